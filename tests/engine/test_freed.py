"""A finished run is freed: nobody else holds its model, data, ledger, passes or, on a GPU, its graphs."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from tests.cases import DEVICE
from tests.engine.loops import data, loader
from tests.engine.ways import Calling
from torchfil import Accounting, Canaries, FILPrivacyEngine
from torchfil.engine.forward import in_training

Train = Callable[[Any], None]


class Run:
    """A run of a few batches with everything that belongs to it."""

    def __init__(self, module: nn.Module, dataset: Dataset[Any] | None = None, **options: Any) -> None:
        self.module, self.engine, self.data = module.to(DEVICE), FILPrivacyEngine(), dataset or data(24)
        plain: Any = torch.optim.SGD(self.module.parameters(), 0.1)
        given = {"noise_multiplier": 1.0, "criterion": nn.CrossEntropyLoss()} | options
        made = self.engine.make_private(self.module, plain, loader(self.data), **given)
        self.model, self.optimizer, self.loader = made[0], made[1], made[-1]
        self.loss = made[2] if len(made) == 4 else F.cross_entropy

    def backward(self, x: Any, y: Any) -> None:
        self.optimizer.zero_grad()
        self.loss(self.model(x.to(DEVICE)), y.to(DEVICE)).backward()

    def parts(self) -> dict[str, Any]:
        """What must be freed, by name."""
        training = self.engine._training
        parts = {"module": self.module, "weight": next(self.module.parameters()), "engine": self.engine}
        parts |= {"model": self.model, "optimizer": self.optimizer, "loader": self.loader, "data": self.data}
        parts |= {"training": training, "run": training.run, "ledger": training.run.ledger}
        parts |= {"copy": training.replica.template}
        if not isinstance(self.module, nn.Sequential):
            parts["class"] = type(self.module)
        return {name: part for name, part in parts.items() if part is not None}


def mlp(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 3)).double()


def of_its_own() -> nn.Module:
    """A model of a class that only this run has, with a weight that is no layer's."""

    class Own(Calling):
        pass

    def forward(self: Any, x: Any) -> Any:
        return self.body(x).tanh() @ self.weight

    own = Own(forward, body=nn.Linear(5, 6))
    own.weight = nn.Parameter(torch.randn(6, 3) / 3)
    return own.double()


def made_alone(run: Run) -> None:
    """No step."""


def loop(run: Run) -> None:
    for x, y in run.loader:
        run.backward(x, y)
        run.optimizer.step()


def train_step(run: Run) -> None:
    for x, y in run.loader:
        run.engine.train_step(x, y)


def half_a_step(run: Run) -> None:
    run.backward(*next(iter(run.loader)))


def refused_steps(run: Run) -> None:
    x, y = next(iter(run.loader))
    run.backward(x, y)
    sum(p.square().sum() for p in run.module.parameters()).backward()  # type: ignore[union-attr]
    for call in (run.optimizer.step, lambda: run.engine.train_step(x * torch.nan, y)):
        with pytest.raises((RuntimeError, ValueError)):
            call()


def checkpoints(run: Run) -> None:
    loop(run)
    parts: dict[str, Any] = {"module": run.model, "optimizer": run.optimizer}
    for path in (Path("one.pt"), "folder/"):
        run.engine.save_checkpoint(path=path, **parts)
        run.engine.load_checkpoint(path=path, **parts)


def readings(run: Run) -> None:
    with run.engine.watch(delta=1e-5, every=1):
        loop(run)
    run.engine.leakage(delta=1e-5)
    run.engine.plis()
    run.engine.save_run("run.parquet", delta=1e-5)
    run.engine.report("report", delta=1e-5)


WAYS: dict[str, tuple[Train, Callable[[], nn.Module], dict[str, Any]]] = {
    "made alone": (made_alone, mlp, {}),
    "loop": (loop, lambda: mlp(0.2), {}),
    "loss identified": (loop, mlp, {"criterion": None}),
    "train_step": (train_step, lambda: mlp(0.2), {}),
    "hooks": (loop, mlp, {"grad_sample_mode": "hooks"}),
    "ghost": (loop, mlp, {"grad_sample_mode": "ghost"}),
    "per_layer": (train_step, mlp, {"clipping": "per_layer", "max_grad_norm": [0.5] * 4}),
    "owners": (loop, mlp, {"owner_of": [row // 2 for row in range(24)]}),
    "own class": (train_step, of_its_own, {"owner_of": [row // 2 for row in range(24)]}),
    "canaries": (loop, mlp, {"canaries": Canaries(4)}),
    "norms refreshed": (loop, mlp, {"accounting": Accounting(norm_refresh=1)}),
    "half a step": (half_a_step, mlp, {}),
    "refused steps": (refused_steps, mlp, {}),
    "checkpoints": (checkpoints, mlp, {}),
    "readings": (readings, mlp, {"track": ("diagonal",)}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore")
def test_a_run_is_freed_when_nobody_holds_it(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train, module, options = WAYS[way]

    def finished() -> dict[str, weakref.ref[Any]]:
        run = Run(module(), **options)
        train(run)
        return {name: weakref.ref(part) for name, part in run.parts().items()}

    parts = finished()
    gc.collect()
    assert [name for name, part in parts.items() if part() is not None] == []


def kept() -> tuple[int, ...]:
    """How many modules, tensors, functions and classes there are, and modules in training."""
    gc.collect()
    kinds = [type(each) for each in gc.get_objects()]
    modules = sum(issubclass(kind, nn.Module) for kind in kinds)
    tensors = sum(issubclass(kind, torch.Tensor) for kind in kinds)
    functions, classes = kinds.count(type(kept)), sum(issubclass(kind, type) for kind in kinds)
    return modules, tensors, functions, classes, len(in_training)


@pytest.mark.parametrize("way", ["loop", "train_step", "hooks", "own class"])
def test_twenty_runs_in_one_process_grow_by_nothing(way: str) -> None:
    train, module, options = WAYS[way]
    before: tuple[int, ...] = ()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(20):
            train(Run(module(), **options))
            before = kept() if number == 2 else before  # the first fill caches
    assert kept() == before


class Block(nn.Module):
    """A block of a vision transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.before(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        return x + torch.as_tensor(self.mlp(self.between(x)))


def vit(width: int = 256) -> nn.Module:
    patches = nn.Sequential(nn.Conv2d(3, width, 8, 8), nn.Flatten(2))
    return Calling(
        lambda m, x: m.head(m.blocks(m.patches(x).mT).mean(dim=1)),
        patches=patches,
        blocks=nn.Sequential(Block(width), Block(width)),
        head=nn.Linear(width, 10),
    )


def convolutions(width: int = 128) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 2, 1)]
    for _ in range(5):
        layers += [nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, width, 3, 1, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def allocated() -> int:
    """Bytes that tensors hold on the GPU."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()  # one for each stream that has run a matrix product
    return torch.cuda.memory_allocated()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("make", [vit, convolutions])
@pytest.mark.parametrize("train", [loop, train_step])
def test_memory_of_a_gpu_is_back_at_the_weights(make: Callable[[], nn.Module], train: Train) -> None:
    """Twenty runs in a row, with CUDA graphs: after each, only the model that the caller keeps is on the GPU."""
    images = TensorDataset(torch.rand(48, 3, 32, 32), torch.arange(48) % 10)

    def trained() -> nn.Module:
        run = Run(make(), images)
        for _ in range(2):
            train(run)
        graphs: Any = run.engine._training.step.executor._graphs
        assert train is loop or graphs._captured  # whose memory is most of what there is to free
        run.optimizer.zero_grad(set_to_none=True)
        return run.module

    before, sizes = allocated(), []
    for _ in range(20):
        module = trained()
        weights = sum(p.numel() * p.element_size() for p in module.parameters())
        sizes.append((allocated() - before) / weights)
        del module
    print(f"{weights / 2**20:.1f} MiB of weights; on the GPU, times", *[f"{size:.3f}" for size in sizes])
    assert max(sizes) < 1.01
    assert allocated() - before < 0.01 * weights
