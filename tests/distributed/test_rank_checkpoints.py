"""Runs that are stopped and go on: bit for bit on as many ranks, to rounding on another number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.accounting.by_hand import logged
from tests.distributed.rank_pool import RankPool
from tests.distributed.rank_runs import (
    Outcome,
    as_one,
    assert_same,
    divided,
    held_by,
    make,
    outcome,
    replaying,
    take_step,
)
from tests.repeatable import check_no_noise_is_shared, recorded_noise

DRAWS: list[list[list[int]]] = [
    [[0, 2, 4], [6], [], [8, 10, 12], [2, 14], [4, 6, 8], [0], [12, 14, 16]],
    [[1, 3], [5, 7, 9], [11], [], [3], [1, 9], [], [7, 11, 13]],
]  # of 8 steps, by two ranks that have parts of their own
ALONE = as_one(DRAWS)
SLOW = pytest.mark.slow


def own_draws(scattered: bool) -> list[list[list[int]]]:
    """Of this process and the other one; ``scattered``: the ranks change places."""
    if not dist.is_initialized():
        return [ALONE]
    return DRAWS[:: -1 if dist.get_rank() ^ scattered else 1]


def trained(
    path: str | None = None, *, resume: bool = False, scattered: bool = False, **options: Any
) -> Outcome:
    """Two passes with a checkpoint between them, or the second from that checkpoint, after a wrong
    start.
    """
    made = make("digits", questions={}, num_probes=2, batch_size=16, **options)
    state = {"path": path, "module": made.model, "optimizer": made.optimizer}
    draws, done = own_draws(scattered), Outcome()
    if resume:
        draws = [own[4:] for own in draws]
    with replaying(*draws), logged() as done.log:
        if resume:
            with torch.no_grad():
                for p in made.module.parameters():
                    p.add_(1.0)
            made.engine.load_checkpoint(**state)
        for last in (True,) if resume else (False, True):
            for x, y in made.loader:
                done.held.append(held_by(made))
                take_step(made, x, y)
            if path is not None and not last:
                made.engine.save_checkpoint(**state)
    return outcome(made, None, done)


@pytest.fixture(scope="module")
def alone() -> Outcome:
    return trained()


@pytest.mark.parametrize(("kind", "sharded"), [("run.pt", False), ("run/", True)])
def test_as_many_ranks_go_on_bit_for_bit(
    two_ranks: RankPool, tmp_path: Path, kind: str, sharded: bool
) -> None:
    path, options = f"{tmp_path}/{kind}", {"sharded": sharded, "estimator": "weight-probes"}
    expected = two_ranks.run(trained, path, **options)
    assert [path.name for path in tmp_path.iterdir()] == [kind.strip("/")]  # of rank 0, for all
    for found, unbroken in zip(
        two_ranks.run(trained, path, resume=True, **options), expected, strict=True
    ):
        assert_same(found, unbroken, 0.0)


@pytest.mark.parametrize(
    ("kind", "sharded"),
    [("run.pt", False), pytest.param("run.pt", True, marks=SLOW), ("run/", True)],
)
def test_another_number_of_ranks_goes_on(
    two_ranks: RankPool, tmp_path: Path, alone: Outcome, kind: str, sharded: bool
) -> None:
    of_one, of_two = (f"{tmp_path}/{size}{kind}" for size in (1, 2))
    trained(of_one)
    nobody: list[Tensor | None] = [None] * 4
    parts = two_ranks.run(trained, of_one, resume=True, scattered=True, sharded=sharded)
    expected = divided(alone, [nobody + part.held for part in parts])
    for found in parts:
        assert_same(found, expected)
    if kind == "run/" or not sharded:
        parts = two_ranks.run(trained, of_two, sharded=sharded)
        expected = divided(alone, [part.held[:4] + nobody for part in parts])
        assert_same(trained(of_two, resume=True), expected)


def noise_of_a_run(path: str, *, resume: bool) -> tuple[list[Tensor], list[list[int]]]:
    """A pass as users make it, from the start or from a checkpoint, which it writes otherwise: its
    noise and draws.
    """
    with recorded_noise() as drawn:
        torch.manual_seed(0)
        made = make(
            "digits", questions={}, estimator="weight-probes", noise_generator=None, batch_size=16
        )
        state, batches = {"path": path, "module": made.model, "optimizer": made.optimizer}, []
        if resume:
            made.engine.load_checkpoint(**state)
        for x, y in made.loader:
            batches.append([round(float(value)) for value in 1e6 * x.sum(dim=1)])
            take_step(made, x, y)
        if not resume:
            made.engine.save_checkpoint(**state)
    dist.barrier()
    return drawn, batches


@pytest.mark.parametrize("kind", ["run.pt", "run/"])
def test_ranks_that_resume_share_neither_noise_nor_draws(
    two_ranks: RankPool, tmp_path: Path, kind: str
) -> None:
    path = f"{tmp_path}/{kind}"
    runs = [two_ranks.run(noise_of_a_run, path, resume=resume) for resume in (False, True, True)]
    check_no_noise_is_shared(*(noise for (noise, _), _ in runs))  # rank 0 adds it
    assert not any(noise for _, (noise, _) in runs)
    draws = [tuple(map(tuple, batches)) for run in runs for _, batches in run]
    assert len(set(draws)) == 6  # nor do the two ranks draw alike
