"""Tasks of ranks that each read a stream of their own, and the same stream in one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, default_collate

from tests.distributed.rank_runs import Made, Outcome, outcome, take_step
from tests.engine.loops import SIGMA, C, data, network
from torchfil import Accounting, FILPrivacyEngine

SIZE = 3  # of a rank's batches
PASSES = [  # who comes to which of two ranks: uneven, then dealt out anew, with somebody new
    [list(range(13)), list(range(13, 20))],
    [[15, 2, 19, 0, 7], [4, 20, 13, 1, 9, 10, 21, 22]],
]


class Stream(IterableDataset):
    """The examples of these numbers; None: a place that stays empty."""

    def __init__(self, order: Sequence[int | None]) -> None:
        self.order, self.tensors = order, data(23).tensors

    def __iter__(self) -> Iterator[Any]:
        for row in self.order:
            yield None if row is None else (self.tensors[0][row], self.tensors[1][row], row)


def present(samples: list[Any]) -> Any:
    return default_collate([sample for sample in samples if sample is not None])


def as_one(parts: Sequence[Sequence[int]]) -> list[int | None]:
    """The streams of all ranks as one, in whose batches all ranks' batches follow one another."""
    batches = [[part[start : start + SIZE] for start in range(0, len(part), SIZE)] for part in parts]
    steps = max(map(len, batches))
    order: list[int | None] = []
    for step in range(steps):
        drawn = [row for part in batches for row in (part[step] if step < len(part) else [])]
        order += [*drawn, *[None] * (len(parts) * SIZE - len(drawn))]
    return order


def make_stream(**options: Any) -> Made:
    module = network()
    several = dist.is_initialized()
    wrapped = DifferentiallyPrivateDistributedDataParallel(module) if several else module
    size = SIZE if several else 2 * SIZE
    engine = FILPrivacyEngine()
    settings = {"noise_multiplier": SIGMA, "max_grad_norm": C, "poisson_sampling": False, "id_of": 2, **options}
    settings |= {"noise_generator": torch.Generator().manual_seed(7), "criterion": nn.CrossEntropyLoss()}
    private = engine.make_private(
        wrapped,
        torch.optim.SGD(module.parameters(), lr=0.3),
        DataLoader(Stream([]), batch_size=size, collate_fn=present),
        accounting=Accounting(estimator="exact", seed=3),
        **settings,
    )
    return Made(engine, module, *private)


def train_on(made: Made, parts: Sequence[Sequence[int]]) -> None:
    """One pass over the streams of the ranks, or over the same as one."""
    made.loader.dataset.order = parts[dist.get_rank()] if dist.is_initialized() else as_one(parts)
    for x, y in made.loader:
        take_step(made, x, y)


def streamed(folder: str) -> tuple[list[Any], Outcome]:
    """The names and all that the run says after two passes."""
    made = make_stream()
    for parts in PASSES:
        train_on(made, parts)
    told = outcome(made, folder, Outcome([], {}, 0.0, torch.zeros(0), {}, {}, torch.zeros(0)))
    return made.engine.leakage_columns()[0], told


def begun(folder: str) -> None:
    made = make_stream()
    train_on(made, PASSES[0])
    made.engine.save_checkpoint(path=Path(folder) / "run.pt", module=made.model, optimizer=made.optimizer)


def resumed(folder: str) -> tuple[list[Any], Outcome]:
    made = make_stream()
    made.engine.load_checkpoint(path=Path(folder) / "run.pt", module=made.model, optimizer=made.optimizer)
    train_on(made, PASSES[1])
    told = outcome(made, folder, Outcome([], {}, 0.0, torch.zeros(0), {}, {}, torch.zeros(0)))
    return made.engine.leakage_columns()[0], told


def same_example_on_two_ranks() -> tuple[str, list[Any], list[int], float]:
    """In the second of three steps; the others are taken."""
    made = make_stream()
    error = ""
    made.loader.dataset.order = [[0, 1, 2, 3, 4, 5, 6, 7, 8], [9, 10, 11, 12, 4, 13, 14, 15, 0]][dist.get_rank()]
    for x, y in made.loader:
        before = [p.detach().clone() for p in made.module.parameters()]
        try:
            take_step(made, x, y)
        except RuntimeError as caught:
            error = f"{type(caught).__name__}: {caught}"
            assert all(map(torch.equal, before, made.module.parameters()))
    names, columns = made.engine.leakage_columns()
    return error, names, columns["participations"], made.engine.accountant.history[0][2]


def one_rank_has_nothing() -> str:
    made = make_stream()
    try:
        train_on(made, [[0, 1, 2], []])
    except RuntimeError as error:
        return str(error)
    return ""
