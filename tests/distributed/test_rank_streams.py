"""Ranks that each read a stream of their own are one process that reads all of it (float64)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, default_collate

from tests.distributed.rank_pool import RankPool
from tests.distributed.rank_runs import Outcome, assert_same, outcome, start, take_step
from tests.engine.loops import data, network

SIZE = 3  # of a rank's batches
PASSES = [  # who comes to which of two ranks: uneven, then dealt out anew, with somebody new
    [list(range(13)), list(range(13, 20))],
    [[15, 2, 19, 0, 7], [4, 20, 13, 1, 9, 10, 21, 22]],
]
# example 4 in the second of three steps
TWICE = [[0, 1, 2, 3, 4, 5, 6, 7, 8], [9, 10, 11, 12, 4, 13, 14, 15, 0]]


class Stream(IterableDataset):
    """The examples of these numbers, and whose they are, ``each`` of one person.

    None: a place that stays empty.
    """

    def __init__(self, order: Sequence[int | None], each: int = 1) -> None:
        self.order, self.tensors, self.each = order, data(23).tensors, each

    def __iter__(self) -> Iterator[Any]:
        for row in self.order:
            yield (
                None
                if row is None
                else (self.tensors[0][row], self.tensors[1][row], row // self.each)
            )


def present(samples: list[Any]) -> Any:
    return default_collate([sample for sample in samples if sample is not None])


def as_one(parts: Sequence[Sequence[int]]) -> list[int | None]:
    """The streams of all ranks as one, in whose batches all ranks' batches follow one another."""
    order: list[int | None] = []
    for place in range(0, max(map(len, parts)), SIZE):
        drawn = [row for part in parts for row in part[place : place + SIZE]]
        order += [*drawn, *[None] * (len(parts) * SIZE - len(drawn))]
    return order


def streamed(
    folder: str, passes: Sequence[Any] = PASSES, each: int = 1
) -> tuple[list[str], list[Any], Outcome]:
    """The errors of this rank's steps, the names, and all that the run says after these passes."""
    several, errors = dist.is_initialized(), []
    size = SIZE if several else 2 * SIZE
    plain = DataLoader(Stream([], each), batch_size=size, collate_fn=present)
    whose: dict[str, Any] = {"id_of" if each == 1 else "owner_of": 2}
    made = start(network(), plain, poisson_sampling=False, **whose)
    for parts in passes:
        made.loader.dataset.order = parts[dist.get_rank()] if several else as_one(parts)
        try:
            for x, y in made.loader:
                before = [p.detach().clone() for p in made.module.parameters()]
                try:
                    take_step(made, x, y)
                except RuntimeError as caught:
                    errors.append(f"{type(caught).__name__}: {caught}")
                    assert all(map(torch.equal, before, made.module.parameters()))
        except RuntimeError as caught:  # of the loader
            errors.append(str(caught))
    if not made.engine.accountant.history:
        return errors, [], Outcome()
    return errors, made.engine.leakage_columns()[0], outcome(made, folder, Outcome())


def test_two_streams_are_one(two_ranks: RankPool, tmp_path: Path) -> None:
    """Uneven ones, whose examples go from rank to rank."""
    _, names, alone = streamed(str(tmp_path))
    assert len(names) == 23
    for errors, found, told in two_ranks.run(streamed, str(tmp_path)):
        assert (errors, found) == ([], names)
        assert_same(told, alone, moved=True)
    assert alone.sums["participations"].max() == 2


def test_what_is_refused(two_ranks: RankPool, tmp_path: Path) -> None:
    """An example on two ranks in one step, whose other steps are taken.

    A rank without any of the stream.
    """
    for errors, names, told in two_ranks.run(streamed, str(tmp_path), [TWICE]):
        assert errors[0].startswith(
            "StepNotTakenError: example 4 is in this step's batches of ranks [0, 1]"
        )
        assert names == [0, 1, 2, 9, 10, 11, 3, 4, 5, 12, 13, 6, 7, 8, 14, 15]
        assert told.sums["participations"].tolist() == [2, *[1] * 5, *[0] * 5, *[1] * 5]
    for errors, *_ in two_ranks.run(streamed, str(tmp_path), [[[0, 1, 2], []]]):
        assert "rank 1 has no batch at all" in errors[0]
