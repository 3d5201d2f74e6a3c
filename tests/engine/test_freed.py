"""A finished run is freed: nobody else holds its model, data, ledger, passes or, on a GPU, its graphs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from tests.cases import DEVICE
from tests.engine.loops import data, loader
from tests.engine.ways import Calling
from torchfil import Canaries, FILPrivacyEngine

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


def loop(run: Run) -> None:
    for x, y in run.loader:
        run.backward(x, y)
        run.optimizer.step()


def train_step(run: Run) -> None:
    for x, y in run.loader:
        run.engine.train_step(x, y)


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
    "loop": (loop, lambda: mlp(0.2), {}),
    "train_step": (train_step, lambda: mlp(0.2), {}),
    "hooks": (loop, mlp, {"grad_sample_mode": "hooks"}),
    "owners": (loop, mlp, {"owner_of": [row // 2 for row in range(24)]}),
    "own class": (train_step, of_its_own, {"owner_of": [row // 2 for row in range(24)]}),
    "canaries": (loop, mlp, {"canaries": Canaries(4)}),
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
