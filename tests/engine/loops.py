"""Runs on a small network, and training loops for the engine's tests."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from opacus.utils.batch_memory_manager import BatchMemoryManager
from scipy import optimize, stats
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.cases import DEVICE, relative_error
from tests.engine.ways import start
from torchfil import FILPrivacyEngine

SIGMA, C = 0.9, 0.8


def data(n: int = 93, d: int = 5, classes: int = 3, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(classes, (n,), generator=generator))


def network(d: int = 5, classes: int = 3, seed: int = 1) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(d, 6), nn.Tanh(), nn.Linear(6, classes)).double().to(DEVICE)


def loader(dataset: Any, batch_size: int = 8, **options: Any) -> DataLoader[Any]:
    options.setdefault("generator", torch.Generator().manual_seed(2))
    return DataLoader(dataset, batch_size=batch_size, **options)


def exact_epsilon(mu: float, delta: float) -> float:
    """ε at δ between N(0, 1) and N(μ, 1) (Balle and Wang 2018)."""

    def excess(epsilon: float) -> float:
        first, second = stats.norm.cdf([mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu])
        return float(first - math.exp(epsilon) * second - delta)

    return float(optimize.brentq(excess, 0.0, 100.0))


@dataclass
class Trained:
    engine: Any
    model: Any
    optimizer: Any
    loader: Any


def make(
    dataset: Any = None, module: nn.Module | None = None, batch_size: int = 8, **options: Any
) -> Any:
    """Engine, module, private model, optimizer and loader."""
    module = module if module is not None else network()
    plain = dataset if isinstance(dataset, DataLoader) else loader(dataset or data(40), batch_size)
    given = {"poisson_sampling": True, "criterion": None, "lr": 0.3, **options}
    engine, *parts = start(module, plain, "auto", **given)
    return engine, module, *parts


def step(model: Any, optimizer: Any, batch: Any, loss_fn: Any = F.cross_entropy) -> None:
    optimizer.zero_grad()
    loss_fn(model(batch[0].to(DEVICE)), batch[1].to(DEVICE)).backward()
    optimizer.step()


def physical_batches(private: Any, optimizer: Any, size: int | None) -> Any:
    """The loader's batches, or parts of at most that size."""
    if size is None:
        return nullcontext(private)
    return BatchMemoryManager(
        data_loader=private, max_physical_batch_size=size, optimizer=optimizer
    )


def train(
    dataset: Any,
    *,
    steps: int = 20,
    physical: int | None = None,
    batch_size: int = 8,
    module: nn.Module | None = None,
    loss_fn: Any = F.cross_entropy,
    **options: Any,
) -> Trained:
    """A loop of so many logical steps."""
    module, taken = (module if module is not None else network()).to(DEVICE), 0
    given = {"noise_multiplier": SIGMA, "max_grad_norm": C, "seed": 3, **options}
    torch.manual_seed(4)
    engine, _, model, optimizer, private = make(dataset, module, batch_size, **given)
    while True:
        with physical_batches(private, optimizer, physical) as batches:
            for batch in batches:
                step(model, optimizer, batch, loss_fn)
                taken += not optimizer.inside_logical_batch
                if taken == steps:
                    return Trained(engine, model, optimizer, private)


def assert_same_run(
    one: tuple[FILPrivacyEngine, nn.Module],
    other: tuple[FILPrivacyEngine, nn.Module],
    tolerance: float,
) -> None:
    """Weights, ledger, ε and individual ε are the same within the tolerance.

    What counts is equal.
    """
    for ours, theirs in zip(one[1].parameters(), other[1].parameters(), strict=True):
        assert relative_error(ours.detach(), theirs.detach()) < tolerance
    ledgers = [engine.ledger for engine, _ in (one, other)]
    found, expected = (ledger.sums for ledger in ledgers if ledger is not None)
    assert set(found) == set(expected)
    for name, value in expected.items():
        if value.is_floating_point():
            scale = float(value.abs().max())
            assert torch.allclose(found[name], value, rtol=tolerance, atol=tolerance * scale), name
        else:
            assert torch.equal(found[name], value), name
    assert one[0].get_epsilon(1e-5) == other[0].get_epsilon(1e-5)
    individual = [engine.get_individual_epsilon(delta=1e-5).value for engine, _ in (one, other)]
    assert torch.allclose(*individual)
