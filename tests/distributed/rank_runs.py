"""Training runs that go on several ranks and, with the same draws, in one process.

And what is known of them after.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.utils.batch_memory_manager import BatchMemoryManager
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import zoo
from tests.accounting.by_hand import Step, logged, predicted, sums_by_hand
from tests.cases import DEVICE, grouped
from tests.engine.architectures import beside
from tests.engine.loops import SIGMA, C
from torchfil import FILPrivacyEngine, Private
from torchfil.accounting.leakage import Leakage
from torchfil.accounting.ledger import Ledger, summary
from torchfil.engine.loader import FILPoissonSampler
from torchfil.questions import Absent, Label, Token
from torchfil.report import load

DELTA = 1e-5
# what ranks with known batches do not tell each other
OF_PATHS = ("_ratio", "_relative", "_missed_by", "_missed_of")
OF_PATHS += ("_near", "_far", "_previous", "_last")
Draws = Sequence[Sequence[int]]  # the examples of every step


@dataclass
class Outcome:
    """All that a run says."""

    # the weights, individual ε; robustness, if a file is written
    values: list[Tensor] = field(default_factory=list)
    sums: dict[str, Tensor] = field(default_factory=dict)
    epsilon: float = 0.0
    columns: dict[str, list[Any]] = field(default_factory=dict)
    timeline: dict[str, Any] = field(default_factory=dict)
    draws: list[list[int]] = field(default_factory=list)
    # by step: whom this rank could draw; None: everybody
    held: list[Tensor | None] = field(default_factory=list)
    # of one process: what its ledger was told, and the ledger
    log: list[Step] = field(default_factory=list)
    leakage: Leakage | None = None
    before: list[dict[str, Tensor]] = field(default_factory=list)  # the weights before every step


def digits_case() -> tuple[nn.Module, TensorDataset, dict[str, Any]]:
    """A perceptron on 61 digits, a number that no number of ranks divides."""
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
    module = zoo.token_transformer(3, 20, 4, width=4, depth=1, heads=2).double()
    dataset = TensorDataset(torch.randint(20, (23, 4)), torch.randint(3, (23,)))
    return (
        module,
        dataset,
        {"private": Private(submodule="embedding"), "questions": {"second": Token(1, [3, 4])}},
    )


def adapter_case() -> tuple[nn.Module, TensorDataset, dict[str, Any]]:
    """A frozen transformer of two layers with adapters at its attention, on 23 texts."""
    torch.manual_seed(0)
    module = zoo.token_transformer(3, 20, 4, width=4, depth=2, heads=2).requires_grad_(False)
    for layer in module.encoder.layers:
        layer.queries_keys_values = beside(layer.queries_keys_values)
        layer.attention_output = beside(layer.attention_output)
    _, dataset, settings = text_case()
    return module.double(), dataset, settings


CASES: dict[str, Callable[[], tuple[nn.Module, TensorDataset, dict[str, Any]]]] = {
    "digits": digits_case,
    "texts": text_case,
    "adapters": adapter_case,
}


@dataclass
class Made:
    """A run that is ready to train."""

    engine: FILPrivacyEngine
    module: nn.Module
    model: Any
    optimizer: Any
    loader: Any


def shard(module: nn.Module) -> nn.Module:
    """FSDP2, block by block."""
    for part in module.modules():
        if part is not module and any(True for _ in part.parameters(recurse=False)):
            fully_shard(part)
    for layer in getattr(getattr(module, "encoder", None), "layers", ()):
        fully_shard(layer)
    return fully_shard(module)


def make(case: str, *, batch_size: int = 10, **options: Any) -> Made:
    """In this process, as one of several ranks where there are any."""
    module, dataset, settings = CASES[case]()
    plain = DataLoader(dataset, batch_size=batch_size, generator=torch.Generator().manual_seed(2))
    return start(module, plain, **{**settings, **options})


def start(module: nn.Module, plain: Any, *, sharded: bool = False, **options: Any) -> Made:
    """Of a model and a loader of one's own."""
    module.to(DEVICE)
    several = dist.is_initialized()
    if sharded and several:
        shard(module)
    wrapped = (
        DifferentiallyPrivateDistributedDataParallel(module) if several and not sharded else module
    )
    engine = FILPrivacyEngine()
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer: Any = torch.optim.SGD(trained, lr=0.5, momentum=0.5)
    given = {
        "noise_multiplier": SIGMA,
        "max_grad_norm": C,
        "criterion": nn.CrossEntropyLoss(),
        "estimator": "exact",
    }
    given |= {
        "noise_generator": torch.Generator(device=DEVICE).manual_seed(7),
        "seed": 3,
        **options,
    }
    return Made(engine, module, *engine.make_private(wrapped, optimizer, plain, **grouped(**given)))


def take_step(made: Made, x: Tensor, y: Tensor) -> Tensor:
    made.optimizer.zero_grad()
    loss = nn.functional.cross_entropy(made.model(x.to(DEVICE)), y.to(DEVICE))
    loss.backward()
    made.optimizer.step()
    return loss


def trained(
    case: str,
    folder: str | None = None,
    *,
    passes: int = 3,
    step: str = "loop",
    replayed: Any = None,
    reshuffled: bool = False,
    physical: int | None = None,
    refreshed: bool = False,
    **options: Any,
) -> Outcome:
    """Train in this process, as one of several ranks where there are any, and tell all of it.

    ``replayed`` are the draws of one process, or those of every rank.
    """
    made = make(case, **options)
    done, several = Outcome(), dist.is_initialized()
    here = replayed[dist.get_rank()] if replayed is not None and several else replayed
    others = replayed[1 - dist.get_rank()] if replayed is not None and several else None
    with replaying(here, others), logged() as done.log:
        for epoch in range(passes):
            if reshuffled and dist.is_initialized():
                made.loader.batch_sampler.set_epoch(epoch)
            for x, y in noting(batches_of(made.loader, made.optimizer, physical), done.draws):
                if not made.optimizer.inside_logical_batch:
                    weights = {n: whole(p).cpu() for n, p in made.module.named_parameters()}
                    done.before.append(weights)
                    done.held.append(held_by(made))
                take_step(made, x, y) if step == "loop" else made.engine.train_step(x, y)
            if refreshed:
                made.engine.refresh_norms()
    return outcome(made, folder, done)


def whole(value: Tensor) -> Tensor:
    """A copy of a weight, gathered where it is sharded."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def batches_of(loader: Any, optimizer: Any, physical: int | None) -> Iterator[Any]:
    if physical is None:
        yield from loader
        return
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=physical, optimizer=optimizer
    ) as batches:
        yield from batches


def noting(batches: Iterator[Any], draws: list[list[int]]) -> Iterator[Any]:
    for batch in batches:
        draws.append(list(batch._ids))
        yield batch


def held_by(made: Made) -> Tensor | None:
    """Whom this rank can draw in the current pass."""
    sampler = made.loader.batch_sampler
    return sampler._tracker.held if isinstance(sampler, FILPoissonSampler) else None


@contextmanager
def replaying(draws: Draws | None, others: Draws | None = None) -> Iterator[None]:
    """In place of chance: the batches of this process, one after the other, also over several
    passes; and those of the other rank, which can draw nobody else.
    """
    if draws is None:
        yield
        return
    left, left_to_others = iter(draws), iter(others or ())

    def replay(sampler: Any) -> Iterator[list[int]]:
        sampler._on_start()
        own = list(itertools.islice(left, len(sampler)))
        if others is not None:
            drawn = {i for step in itertools.islice(left_to_others, len(sampler)) for i in step}
            everybody = set(range(sampler.total_size))
            mine = everybody - drawn if dist.get_rank() == 0 else {i for step in own for i in step}
            sampler._tracker.held = torch.tensor(sorted(mine))
        yield from (list(drawn) for drawn in own)

    with mock.patch.object(FILPoissonSampler, "__iter__", replay):
        yield


def outcome(made: Made, folder: str | None, done: Outcome) -> Outcome:
    """All that the run says now, beside what is known of its steps.

    Without a folder no run file is written.
    """
    engine = made.engine
    engine.gather()
    timeline: dict[str, Any] = {"steps": list(engine.state_dict()["run"]["timeline"]["steps"])}
    values = [
        *map(whole, made.module.parameters()),
        engine.get_individual_epsilon(range(3), delta=DELTA).value,
    ]
    if folder is not None:
        path = Path(folder) / f"run{dist.get_world_size() if dist.is_initialized() else 1}.parquet"
        engine.save_run(path, delta=DELTA, hash_data=False)
        timeline = (
            dict(load(path).history) if not dist.is_initialized() or dist.get_rank() == 0 else {}
        )
        values.append(engine.get_reconstruction_robustness([0, 1]).value)
    if not dist.is_initialized():
        done.leakage = engine.totals
    else:
        done.log = []  # it is not sent
    return replace(
        done,
        values=[value.cpu() for value in values],
        sums={name: value.cpu() for name, value in engine.ledger.sums.items()},
        epsilon=float(engine.get_epsilon(DELTA)),
        columns=engine.leakage_columns()[1],
        timeline=timeline,
    )


def ranks_of(held: Sequence[Sequence[Tensor | None]], n: int) -> list[Tensor | None]:
    """By step, which rank can draw each example, [n]; None: there is one."""
    found: list[Tensor | None] = []
    for own in zip(*held, strict=True):
        masks = [torch.zeros(n).index_fill(0, rows, 1) for rows in own if rows is not None]
        found.append(torch.stack(masks).argmax(dim=0) if masks else None)
    return found


def divided(alone: Outcome, held: Sequence[Sequence[Tensor | None]]) -> Outcome:
    """What ranks must say that draw as this one process did, if each predicts, for those it
    ``held`` by step, from what it measured itself: by hand.
    """
    assert alone.leakage is not None
    ledger, log = Ledger.from_state_dict(alone.leakage.ledger.state_dict()), list[Step]()
    n, missing = ledger.num_examples, len(held[0]) - len(alone.log)  # steps before the first draw
    for step, rank_of in zip(alone.log, ranks_of(held, n)[missing:], strict=True):
        log.append(step._replace(rank_of=rank_of))
    timeline = {name: torch.as_tensor(values).clone() for name, values in alone.timeline.items()}
    for place, step in enumerate(timeline.get("step", torch.zeros(0)).tolist()):
        examples, _ = predicted(log[: step - missing], n, ledger.draw_rate, "trace")
        told = [each.total + each.ahead if each.draws else 0.0 for each in examples]
        points = summary(torch.tensor(told, dtype=torch.float64), ledger.num_coordinates)
        for name, point in zip(("fil_median", "fil_q95", "fil_max"), points.tolist(), strict=True):
            timeline[name][place] = point
    for name, value in sums_by_hand(ledger, log).items():
        ledger.sums[name].copy_(value)
    leakage = Leakage(ledger, alone.leakage.ids, alone.leakage.conditions)
    columns = {name: values.tolist() for name, values in leakage.columns()[1].items()}
    columns = {**alone.columns, **columns}
    return replace(alone, sums=dict(ledger.sums), columns=columns, timeline=timeline)


def as_one(parts: Sequence[Draws]) -> list[list[int]]:
    """The draws of all ranks together, step by step."""
    return [[i for part in step for i in part] for step in zip(*parts, strict=True)]


def assert_same(
    found: Outcome, expected: Outcome, tolerance: float = 1e-6, *, moved: bool = False
) -> None:
    """Weights, sums, ε, columns and timeline (which rank 0 has) agree.

    Where examples ``moved`` from rank to rank although batches are known, predictions and the error
    of the run's path may differ, and with it lower ends.
    """
    for ours, theirs in zip(found.values, expected.values, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    assert found.sums.keys() == expected.sums.keys()
    for name, value in expected.sums.items():
        if moved and name.endswith(OF_PATHS):
            continue
        scale = float(value.abs().max())
        if name.endswith(("_near", "_far")):  # of differences
            scale = float(expected.sums[f"{name.rpartition('_')[0]}_last"].square().max())
        atol = tolerance * scale if value.is_floating_point() else 0.0
        torch.testing.assert_close(found.sums[name], value, rtol=tolerance, atol=atol, msg=name)
    assert found.epsilon == expected.epsilon
    for name, column in expected.columns.items():
        differs = moved and name.endswith(("mse_bound_low", "true_positive_rate"))
        if not isinstance(column[0], str) and not differs:
            ours, theirs = torch.tensor(found.columns[name]).double(), torch.tensor(column).double()
            torch.testing.assert_close(
                ours, theirs, rtol=tolerance, atol=1e-9, equal_nan=True, msg=name
            )
    for name, points in expected.timeline.items() if found.timeline else ():
        ours, theirs = torch.as_tensor(found.timeline[name]), torch.as_tensor(points)
        torch.testing.assert_close(
            ours, theirs, rtol=tolerance, atol=1e-9, equal_nan=True, msg=name
        )
