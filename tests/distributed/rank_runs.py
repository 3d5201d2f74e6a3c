"""Training runs that go on several ranks and, with the same draws, in one process; and what is known of them after."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from cases import grouped
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from torchfil import FILPrivacyEngine, Private, zoo
from torchfil.engine.loader import FILRankSampler
from torchfil.questions import Absent, Label, Token
from torchfil.report import load

SIGMA, C, DELTA = 0.9, 0.5, 1e-5
Draws = Sequence[Sequence[int]]  # the examples of every step


@dataclass
class Outcome:
    """All that a run says."""

    weights: list[Tensor]
    sums: dict[str, Tensor]
    epsilon: float
    individual: Tensor
    columns: dict[str, list[Any]]
    timeline: dict[str, Any]
    robustness: Tensor
    losses: list[float] = field(default_factory=list)
    draws: list[list[int]] = field(default_factory=list)


def digits_case() -> tuple[nn.Module, TensorDataset, dict[str, Any]]:
    """A perceptron on 61 digits, a number that no number of ranks divides."""
    from sklearn.datasets import load_digits

    data = load_digits(n_class=3)
    torch.manual_seed(5)
    module = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    images = torch.tensor(data.data[:61]).reshape(-1, 8, 8) / 16
    pooled = nn.functional.avg_pool2d(images, 2).flatten(1)  # 16 coordinates
    dataset = TensorDataset(pooled, torch.tensor(data.target[:61]))
    return module, dataset, {"questions": {"member": Absent(), "label": Label(3)}}


def text_case() -> tuple[nn.Module, TensorDataset, dict[str, Any]]:
    """A transformer on 23 texts."""
    torch.manual_seed(0)
    module = zoo.token_transformer(3, 20, 6, width=8, depth=1, heads=2).double()
    dataset = TensorDataset(torch.randint(20, (23, 6)), torch.randint(3, (23,)))
    return module, dataset, {"private": Private(submodule="embedding"), "questions": {"second": Token(1, [3, 4])}}


CASES = {"digits": digits_case, "texts": text_case}


def trained(
    case: str,
    folder: str,
    *,
    passes: int = 3,
    batch_size: int = 10,
    step: str = "loop",
    replayed: Draws | None = None,
    reshuffled: bool = False,
    physical: int | None = None,
    refreshed: bool = False,
    **options: Any,
) -> Outcome:
    """Train in this process, as one of several ranks where there are any, and tell all of it."""
    module, dataset, settings = CASES[case]()
    wrapped = DifferentiallyPrivateDistributedDataParallel(module) if dist.is_initialized() else module
    engine = FILPrivacyEngine()
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.5)
    given = {
        "noise_multiplier": SIGMA,
        "max_grad_norm": C,
        "noise_generator": torch.Generator().manual_seed(7),
        "criterion": nn.CrossEntropyLoss(),
        "estimator": "exact",
        "seed": 3,
        **settings,
        **options,
    }
    plain = DataLoader(dataset, batch_size=batch_size, generator=torch.Generator().manual_seed(2))
    model, optimizer, loader = engine.make_private(wrapped, optimizer, plain, **grouped(**given))
    draws: list[list[int]] = []
    losses = []
    with replaying(replayed):
        for epoch in range(passes):
            if reshuffled and dist.is_initialized():
                loader.batch_sampler.set_epoch(epoch)
            for x, y in noting(batches_of(loader, optimizer, physical), draws):
                if step == "loop":
                    optimizer.zero_grad()
                    loss = nn.functional.cross_entropy(model(x), y)
                    loss.backward()
                    optimizer.step()
                else:
                    loss = engine.train_step(x, y)
                losses.append(loss.item())
            if refreshed:
                engine.refresh_norms()
    return outcome(engine, module, folder, losses, draws)


def batches_of(loader: Any, optimizer: Any, physical: int | None) -> Iterator[Any]:
    if physical is None:
        yield from loader
        return
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=physical, optimizer=optimizer) as batches:
        yield from batches


def noting(batches: Iterator[Any], draws: list[list[int]]) -> Iterator[Any]:
    for batch in batches:
        draws.append(list(batch._ids))
        yield batch


@contextmanager
def replaying(draws: Draws | None) -> Iterator[None]:
    """In place of chance: the batches of this process, one after the other, also over several passes."""
    if draws is None:
        yield
        return
    left = iter(draws)

    def replay(sampler: Any) -> Iterator[list[int]]:
        if isinstance(sampler, FILRankSampler):
            sampler._on_start()
        for _ in range(len(sampler)):
            yield list(next(left))

    kinds = (UniformWithReplacementSampler, FILRankSampler)
    with mock.patch.object(kinds[0], "__iter__", replay), mock.patch.object(kinds[1], "__iter__", replay):
        yield


def outcome(
    engine: FILPrivacyEngine, module: nn.Module, folder: str, losses: list[float], draws: list[list[int]]
) -> Outcome:
    engine.gather()
    path = Path(folder) / f"run{dist.get_world_size() if dist.is_initialized() else 1}.fil"
    engine.save_run(path, delta=DELTA, pictures=0, hash_data=False)
    is_here = not dist.is_initialized() or dist.get_rank() == 0
    assert engine.ledger is not None
    return Outcome(
        weights=[p.detach().clone() for p in module.parameters()],
        sums=engine.ledger.sums,
        epsilon=float(engine.get_epsilon(DELTA)),
        individual=engine.get_individual_epsilon(delta=DELTA).value,
        columns=engine.leakage_columns()[1],
        timeline=dict(load(path).history) if is_here else {},
        robustness=engine.get_reconstruction_robustness([0, 1]).value,
        losses=losses,
        draws=draws,
    )


def as_one(parts: Sequence[Draws]) -> list[list[int]]:
    """The draws of all ranks together, step by step."""
    return [[i for part in step for i in part] for step in zip(*parts, strict=True)]


def assert_same(found: Outcome, expected: Outcome, tolerance: float = 1e-6) -> None:
    for ours, theirs in zip(found.weights, expected.weights, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    assert found.sums.keys() == expected.sums.keys()
    for name, value in expected.sums.items():
        scale = float(expected.sums["trace" if name in ("certain", "variance") else name].abs().max())
        atol = tolerance * scale if value.is_floating_point() else 0.0
        torch.testing.assert_close(found.sums[name], value, rtol=tolerance, atol=atol, msg=name)
    assert found.epsilon == expected.epsilon
    torch.testing.assert_close(found.individual, expected.individual, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found.robustness, expected.robustness, rtol=tolerance, atol=tolerance)
    for name, column in expected.columns.items():
        if not isinstance(column[0], str):
            ours, theirs = torch.tensor(found.columns[name]).double(), torch.tensor(column).double()
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=1e-9, msg=name)
    for name, points in expected.timeline.items():
        ours, theirs = torch.as_tensor(found.timeline[name]), torch.as_tensor(points)
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=1e-9, msg=name)
