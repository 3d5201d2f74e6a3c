"""Models, batches and gradients out of the ordinary: the three ways of training agree, or refuse."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.ways import LOSS, WAYS, examples, mlp, start, step
from torchfil import fisher


class _WithScalar(nn.Module):
    """A temperature of no dimension, as CLIP has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = mlp(), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        """As said."""
        result: Tensor = self.scale * self.inner(x)
        return result


class _Several(nn.Module):
    """Outputs that are made from one another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """As said."""
        hidden = torch.tanh(self.body(x))
        logits = self.head(hidden)
        return {"logits": logits, "hidden": hidden, "probabilities": logits.softmax(dim=1), "again": logits}


def of_logits(outputs: Any, targets: Tensor) -> Tensor:
    return LOSS(outputs["logits"] if isinstance(outputs, dict) else outputs, targets)


@pytest.mark.parametrize("build", [_WithScalar, _Several])
def test_three_ways_agree(build: Callable[[], nn.Module]) -> None:
    traces = []
    for way in WAYS:
        torch.manual_seed(0)
        engine, model, optimizer, loader = start(build(), examples(), way, criterion=of_logits, seed=1, num_probes=3)
        for x, y in loader:
            if way == "train_step":
                engine.train_step(x, y)
            else:
                optimizer.zero_grad()
                of_logits(model(x), y).backward()
                optimizer.step()
        traces.append(engine.get_fil().value)
    assert torch.allclose(traces[0], traces[1], rtol=1e-4)
    assert torch.allclose(traces[0], traces[2], rtol=1e-4)


def test_a_scalar_parameter_against_the_exact_trace() -> None:
    x, y = examples(4)
    model, data = _WithScalar().double(), (x[:4].double(), y[:4])
    exact = fisher.fim_trace(model, LOSS, *data, estimator="exact", max_grad_norm=1.0, noise_multiplier=1.0).value
    found = fisher.fim_trace(model, LOSS, *data, num_probes=200, max_grad_norm=1.0, noise_multiplier=1.0)
    assert bool(((found.value - exact).abs() < 5 * found.standard_error).all())


class _Switch(nn.Module):
    """Mixes examples when told to, by an argument or an attribute."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.stage = nn.Linear(3, 4), nn.Linear(4, 2), 0

    def forward(self, x: Tensor, *, centred: bool = False) -> Tensor:
        """As said."""
        hidden = torch.tanh(self.body(x))
        result: Tensor = self.head(hidden - hidden.mean(dim=0) if centred or self.stage else hidden)
        return result


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("by", ["argument", "integer"])
def test_a_model_that_begins_to_mix_examples_is_found_out(way: str, by: str) -> None:
    module = _Switch()
    engine, model, optimizer, loader = start(module, examples(), way)
    with pytest.raises(RuntimeError, match="mixes examples|differ from those"):
        for k, (x, y) in enumerate(loader):
            late = k >= 2
            module.stage = int(late and by == "integer")
            given = {"x": x, "centred": late} if by == "argument" else {"x": x}
            if way == "train_step":
                engine.train_step(given, y)
            else:
                optimizer.zero_grad()
                LOSS(model(given.pop("x"), **given), y).backward()
                optimizer.step()
    assert engine.leakage()["participations"].tolist() == [1] * 12 + [0] * 12


class _Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(3, 4, bias=False), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        """A derivative that is not finite where all inputs are 0."""
        result: Tensor = self.head(self.body(x).square().sqrt())
        return result


@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_that_is_not_finite_is_not_released(way: str) -> None:
    x, y = examples()
    x[8] = 0.0
    module = _Root()
    engine, model, optimizer, loader = start(module, (x, y), way)
    batches = iter(loader)
    step(engine, model, optimizer, *next(batches), way)
    before = [p.detach().clone() for p in module.parameters()]
    with pytest.raises(RuntimeError, match="NaN or infinite, though its inputs are finite"):
        step(engine, model, optimizer, *next(batches), way)
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    assert engine.leakage()["participations"].tolist() == [1] * 6 + [0] * 18


def test_a_gpu_that_has_not_finished_tells_at_the_next_step() -> None:
    class OnGPU:
        """Norms as a GPU would hold them."""

        device = SimpleNamespace(type="cuda")

        def sum(self) -> Tensor:
            """Not finite."""
            return torch.tensor(float("nan"))

    engine, *_, loader = start(mlp(), examples())
    batches = iter(loader)
    engine.train_step(*next(batches))
    guard = engine._training.step.guard
    guard.begin_step()
    guard.check_norms(OnGPU(), torch.ones(1))  # type: ignore[arg-type]
    guard.raise_if_any()
    batch = next(batches)
    with pytest.raises(RuntimeError, match="batch of the last step, which was taken"):
        engine.train_step(*batch)
    engine.train_step(*batch)
    assert engine.leakage()["participations"].tolist() == [1] * 12 + [0] * 12


class _Counting(nn.Module):
    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """Counts its calls."""
        self.steps += 1
        result: Tensor = self.inner(x)
        return result


@pytest.mark.parametrize("max_memory", [2**30, 3000, 1])
def test_buffers_are_written_once_a_step_however_memory_cuts_it(max_memory: int) -> None:
    module = _Counting()
    engine, *_, loader = start(module, examples(), max_memory=max_memory)
    for x, y in loader:
        engine.train_step(x, y)
    assert float(module.steps) == 4


class _ByHalves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        """Larger batches in two calls, as trials of few examples do not show."""
        halves = x.chunk(2) if len(x) > 3 else (x,)
        return torch.cat([self.inner(half) for half in halves])


def test_a_batch_that_is_not_as_the_trials_is_mapped(caplog: pytest.LogCaptureFixture) -> None:
    engine, model, optimizer, loader = start(_ByHalves(), examples(), "auto", seed=1, estimator="exact")
    other, *parts, batches = start(mlp(), examples(), "auto", seed=1, estimator="exact")
    x, y = next(iter(loader))
    LOSS(model(x), y).backward()
    optimizer.step()
    assert "gradients are mapped over examples" in caplog.text
    step(other, *parts, *next(iter(batches)), "auto")
    assert torch.allclose(engine.get_fil().value, other.get_fil().value, rtol=1e-4)


class _Forgetful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale, self.unused = mlp(), 3.0, None

    def forward(self, x: Tensor) -> Tensor:
        """With a scale, if there is one."""
        result: Tensor = self.inner(x) * getattr(self, "scale", 1.0) * getattr(self, "extra", 1.0)
        return result


@pytest.mark.product
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", ["deleted", "one for another", "a tensor"])
def test_attributes_that_go_are_followed_or_refused(way: str, change: str) -> None:
    module = _Forgetful()
    engine, model, optimizer, loader = start(module, examples(), way, seed=1)
    batches = iter(loader)
    step(engine, model, optimizer, *next(batches), way)
    if change == "deleted":
        del module.scale
    elif change == "one for another":
        del module.unused
        module.extra = 2.5
    else:
        module.scale = torch.tensor(1.0)  # type: ignore[assignment]
        if way == "auto":  # the loop's own pass is recorded, with whatever it uses
            step(engine, model, optimizer, *next(batches), way)
            assert engine.leakage()["participations"].tolist() == [1] * 12 + [0] * 12
            return
        with pytest.raises(RuntimeError, match="copy of the model gives|differ from those"):
            step(engine, model, optimizer, *next(batches), way)
        return
    step(engine, model, optimizer, *next(batches), way)
    fresh = _Forgetful()
    if change == "deleted":
        del fresh.scale
    else:
        fresh.extra = 2.5
    other, model, optimizer, loader = start(fresh, examples(), way, seed=1)
    for (x, y), _ in zip(loader, range(2), strict=False):
        step(other, model, optimizer, x, y, way)
    same = engine.leakage()["squared_norm"][6:12], other.leakage()["squared_norm"][6:12]
    assert same[0].tolist() == pytest.approx(same[1].tolist(), rel=1e-5)


@pytest.mark.product
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", [{"estimator": "exact"}, {"track": ["sketch"]}, {"norm_refresh": 2}], ids=str)
def test_buffers_that_are_written_where_gradients_are_mapped(way: str, options: dict[str, Any]) -> None:
    if way == "auto" and "norm_refresh" not in options:
        pytest.skip("one pass serves weight probes alone")
    module = _Counting()
    engine, model, optimizer, loader = start(module, examples(), way, **options)
    for x, y in loader:
        step(engine, model, optimizer, x, y, way)
    assert float(module.steps) == 4
    assert engine.leakage()["participations"].tolist() == [1] * 24


def test_no_step_is_taken_after_detach() -> None:
    engine, *_, loader = start(mlp(), examples())
    batches = iter(loader)
    engine.train_step(*next(batches))
    engine.detach()
    with pytest.raises(RuntimeError, match="no further step can be taken"):
        engine.train_step(*next(batches))
