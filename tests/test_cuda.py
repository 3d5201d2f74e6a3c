"""What only a GPU can show: memory ceilings as the allocator sees them, and agreement with the
CPU.
"""

from __future__ import annotations

import copy
import gc
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import zoo
from tests.cases import grouped, relative_error
from tests.fisher.recorded_cases import Model
from torchfil import PLIS, FILPrivacyEngine, fisher
from torchfil.questions import Absent, Label

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SETTINGS: dict[str, Any] = {"max_grad_norm": 1.0, "noise_multiplier": 1.0}


def looks() -> nn.Module:
    """A forward pass that looks at a value, which no CUDA graph can."""
    return Model(lambda m, x: m.layer(x) if x.sum().item() < 1e30 else x, layer=nn.Linear(5, 3))


def made_private(
    module: nn.Module, x: Tensor, y: Tensor, batch_size: int, lr: float = 0.1, **more: Any
) -> tuple[Any, Any]:
    """An engine on the GPU, and its loader."""
    engine, module = FILPrivacyEngine(), module.cuda()
    data = DataLoader(
        TensorDataset(x, y), batch_size=batch_size, generator=torch.Generator().manual_seed(1)
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=lr)
    noise = torch.Generator("cuda").manual_seed(2)
    given = {"criterion": nn.CrossEntropyLoss(), "noise_generator": noise, "seed": 3}
    given |= {**SETTINGS, **more}
    return engine, engine.make_private(module, optimizer, data, **grouped(**given))[2]


def peak_bytes(max_memory: int, estimator: str) -> int:
    torch.manual_seed(0)
    model = zoo.mnist_cnn().cuda()
    x, y = torch.rand(1024, 1, 28, 28, device="cuda"), torch.randint(10, (1024,), device="cuda")

    def trace(rows: slice) -> None:
        given = {**SETTINGS, "estimator": estimator, "num_probes": 2, "max_memory": max_memory}
        fisher.fim_trace(model, nn.CrossEntropyLoss(), x[rows], y[rows], **given)

    trace(slice(0, 2))  # the libraries' own workspaces come with their first use
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    trace(slice(None))
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("estimator", ["weight-probes", "exact"])
def test_peak_memory_follows_the_ceiling(estimator: str) -> None:
    """Activations come on top of max_memory: a few times the inputs of the chunk, which shrink with
    it.
    """
    small, large = peak_bytes(32 * 2**20, estimator), peak_bytes(512 * 2**20, estimator)
    assert small < 3 * 32 * 2**20
    assert large < 3 * 512 * 2**20
    assert small < large / 3
    # 784 columns of 30,762 numbers, 92 MiB, in blocks
    assert peak_bytes(256 * 2**20, "exact") < 4 * 256 * 2**20


@pytest.mark.vision
@pytest.mark.parametrize("ceiling", [8 * 10**9, 2 * 10**9])
def test_a_plis_map_of_a_resnet18_with_group_norm_keeps_its_ceiling(ceiling: int) -> None:
    """Batch 64 at 224×224, as the allocator sees it: below 8 GB by default, and below a smaller
    ceiling.
    """
    torchvision = pytest.importorskip("torchvision")
    torch.manual_seed(0)
    gc.collect()
    of_other_tests = torch.cuda.memory_allocated()
    model = torchvision.models.resnet18(
        norm_layer=lambda channels: nn.GroupNorm(8, channels), num_classes=10
    ).cuda()
    x, y = torch.rand(64, 3, 224, 224, device="cuda"), torch.randint(10, (64,), device="cuda")
    plis = PLIS(
        model, nn.CrossEntropyLoss(), noise_std=1.0, max_grad_norm=1.0, max_memory=ceiling // 2
    )
    plis.attribute(x[:2], y[:2])
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    maps = plis.attribute(x, y)
    peak = torch.cuda.max_memory_allocated() - of_other_tests
    assert plis.method == "recorded pass"
    assert maps.shape == x.shape
    assert peak < ceiling


def digits(count: int) -> Any:
    torch.manual_seed(0)
    x = torch.rand(count, 1, 28, 28).double()
    return zoo.mnist_cnn().double(), x, torch.randint(10, (count,))


@pytest.mark.parametrize("private", [False, True])
def test_plis_agrees_with_the_cpu(private: bool) -> None:
    model, x, y = digits(8)
    options: dict[str, Any] = (
        {"noise_std": 0.5, "max_grad_norm": 1.0, "clip": "gelu"} if private else {}
    )
    on_gpu = copy.deepcopy(model).cuda()
    want, got = (PLIS(m, nn.CrossEntropyLoss(), **options) for m in (model, on_gpu))
    for _ in range(4):  # eager, captured, replayed with other images and weights
        maps = got.attribute(x.cuda(), y.cuda())
        assert relative_error(maps, want.attribute(x, y)) < 1e-10
        x, y = x.roll(1, dims=0).flip(-1), y.roll(1)
        with torch.no_grad():
            for weight, same in zip(model.parameters(), on_gpu.parameters(), strict=True):
                weight.mul_(1.1)
                same.mul_(1.1)


@pytest.mark.parametrize("module", [nn.Linear(5, 3), looks()])
def test_a_step_falls_back_by_itself(module: nn.Module) -> None:
    """With a graph, without one, and after a capture that failed: the same weights, and random
    numbers go on.
    """
    results, x = [], torch.randn(40, 5, generator=torch.Generator().manual_seed(0)).double()
    for graphs in (True, False):
        model = copy.deepcopy(module).double()
        engine, loader = made_private(model, x, torch.arange(40) % 3, 8, cuda_graphs=graphs)
        for batch in loader:
            engine.train_step(*batch)
        torch.rand(3, device="cuda")
        results.append(
            (torch.cat([p.detach().flatten() for p in model.parameters()]), engine.get_fil().value)
        )
    assert relative_error(results[0][0], results[1][0]) < 1e-10
    assert relative_error(results[0][1], results[1][1]) < 1e-8


def test_a_gradient_that_is_not_finite_is_told_of_at_the_next_step() -> None:
    """A derivative that is not finite where all inputs are 0."""
    x, y = torch.randn(24, 3), torch.randint(2, (24,))
    x[8] = 0.0
    body, head = nn.Linear(3, 4, bias=False), nn.Linear(4, 2)
    module = Model(lambda m, x: m.head(m.body(x).square().sqrt()), body=body, head=head)
    engine, loader = made_private(module, x, y, 6, lr=0.0, poisson_sampling=False)
    with pytest.raises(RuntimeError, match="last step"):
        for batch in loader:
            engine.train_step(*batch)
    assert engine.leakage()["participations"].tolist() == [1] * 12 + [0] * 12


@pytest.mark.parametrize("flag", [False, True])
def test_a_captured_pass_does_not_serve_another_argument(flag: bool) -> None:
    torch.manual_seed(0)
    x, y, norms = torch.randn(24, 3), torch.randint(2, (24,)), []
    inner = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    start = Model(lambda m, x, *, large: m.inner(x) * (3.0 if large else 1.0), inner=inner)
    for first in (flag, not flag):
        engine, loader = made_private(copy.deepcopy(start), x, y, 6, lr=0.0, poisson_sampling=False)
        for k, (inputs, targets) in enumerate(loader):
            engine.train_step({"x": inputs, "large": first if k < 2 else flag}, targets)
        norms.append(torch.tensor(engine.leakage()["squared_norm"].tolist()))
    assert relative_error(norms[0][12:], norms[1][12:]) < 1e-5
    assert relative_error(norms[0][:12], norms[1][:12]) > 0.1


def test_questions_in_a_captured_pass() -> None:
    """Divergences of CUDA graphs are those of plain passes, whatever the batch's size."""

    def divergences(graphs: bool) -> Tensor:
        model, x, y = digits(96)
        asked = {"label": Label(3), "member": Absent()}
        how = {"cuda_graphs": graphs, "questions": asked, "max_grad_norm": 0.5}
        engine, loader = made_private(model, x.cuda(), y.cuda(), 24, num_probes=1, **how)
        for batch in itertools.chain(loader, loader):
            engine.train_step(*batch)
        return torch.cat([engine.get_guess(name).divergence.value.flatten() for name in asked])

    torch.testing.assert_close(divergences(True), divergences(False), rtol=1e-8, atol=1e-12)


def test_a_run_that_fits_once_resumes(tmp_path: Path) -> None:
    """Loading takes the memory of the optimizer's state, which it makes, and hardly more."""
    x, y = torch.rand(16, 1024), torch.arange(16) % 10

    def made() -> Any:
        module: Any = nn.Sequential(nn.Linear(1024, 8192), nn.Tanh(), nn.Linear(8192, 10)).cuda()
        engine, data = FILPrivacyEngine(), DataLoader(TensorDataset(x, y), batch_size=8)
        adam: Any = torch.optim.Adam(module.parameters(), 1e-3)
        model, adam, data = engine.make_private(
            module, adam, data, criterion=nn.CrossEntropyLoss(), **SETTINGS
        )
        return engine, data, {"module": model, "optimizer": adam}

    engine, data, parts = made()
    for batch in data:
        engine.train_step(*batch)
    engine.save_checkpoint(path=tmp_path / "run.pt", **parts)
    other, _, fresh = made()
    weights = sum(p.numel() * p.element_size() for p in fresh["module"].parameters())
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    other.load_checkpoint(path=tmp_path / "run.pt", **fresh)
    peak = (torch.cuda.max_memory_allocated() - before) / weights
    assert peak < 2.2  # Adam's state takes 2
