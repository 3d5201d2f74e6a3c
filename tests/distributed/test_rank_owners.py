"""People with several rows, on several ranks: one rank draws a person with all rows, and all are as
one process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, Subset

from tests.distributed.rank_pool import RankPool
from tests.distributed.rank_runs import (
    CASES,
    DELTA,
    as_one,
    assert_same,
    divided,
    noting,
    start,
    take_step,
    trained,
)
from tests.distributed.test_rank_streams import streamed

PEOPLE = torch.arange(61).float().sqrt().long()  # eight people with one to 13 rows
# who is drawn by each of two ranks
DRAWN = [[[0, 5], [1], [4, 6, 0], []], [[7, 2, 3], [3, 2], [7], [2]]]
RUN: dict[str, Any] = {"case": "digits", "batch_size": 20, "owner_of": PEOPLE, "passes": 1}
RUNS: dict[str, dict[str, Any]] = {
    "loop": {"clip_weights": {3: 0.5, 7: 0.25}, "track": ("diagonal",), "passes": 2},
    "train_step": {"step": "train_step", "row_reduction": "sum", "refreshed": True},
    "pieces": {"batch_size": 16, "physical": 2, "replayed": DRAWN},
    "sharded": {"sharded": True},
}


@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_are_one_process(two_ranks: RankPool, name: str) -> None:
    run = {**RUN, **RUNS[name]}
    parts = two_ranks.run(trained, **run)
    for drawn in (rows for part in parts for rows in part.draws):
        keys = list(dict.fromkeys(PEOPLE[drawn].tolist()))
        assert drawn == [
            row for key in keys for row in (key == PEOPLE).nonzero().flatten().tolist()
        ]
    people = run.get("replayed") or [
        [sorted({*PEOPLE[rows].tolist()}) for rows in part.draws] for part in parts
    ]
    options = {key: value for key, value in run.items() if key not in ("sharded", "physical")}
    alone = trained(**{**options, "replayed": as_one(people)})
    assert len(alone.sums["trace"]) == 8
    expected = divided(alone, [part.held for part in parts])
    for part in parts:
        assert_same(part, expected)


def dealt(order: list[int] | None = None) -> tuple[list[list[int]], list[Any], list[Tensor], float]:
    """Whom every step took, the names, trace and d of everybody, the weights, and ε, without
    Poisson sampling.
    """
    module, dataset, _ = CASES["digits"]()
    people, several = PEOPLE, dist.is_initialized()
    if order is not None:  # one process, which takes people one after the other
        rows = [row for key in order for row in (key == PEOPLE).nonzero().flatten().tolist()]
        dataset, people = Subset(dataset, rows), PEOPLE[rows]  # type: ignore[assignment]
    sampler: Any = DistributedSampler(dataset, drop_last=True, seed=3) if several else None
    plain = DataLoader(dataset, batch_size=15 if several else 31, sampler=sampler)
    made = start(module, plain, poisson_sampling=False, owner_of=people)
    draws: list[list[int]] = []
    if several:
        sampler.set_epoch(1)  # the user's own one
    for x, y in noting(made.loader, draws):
        take_step(made, x, y)
    names, columns = made.engine.leakage_columns()
    found = [
        torch.tensor([column for _, column in sorted(zip(names, columns[name], strict=True))])
        for name in ("fil", "participations")
    ]
    drawn = [list(dict.fromkeys(people[rows].tolist())) for rows in draws]
    return (
        drawn,
        names,
        [*found, *(p.detach() for p in module.parameters())],
        made.engine.get_epsilon(DELTA),
    )


def test_people_dealt_out_by_a_distributed_sampler(two_ranks: RankPool) -> None:
    parts = two_ranks.run(dealt)
    steps = as_one([drawn for drawn, *_ in parts])
    assert [len(step) for step in steps] == [4, 4]
    assert sorted(key for step in steps for key in step) == list(range(8))
    order = torch.randperm(8, generator=torch.Generator().manual_seed(3 + 1)).tolist()
    assert [step[0] for step in parts[0][0]] == [order[0], order[4]]  # of the user's epoch
    *_, alone, epsilon = dealt([key for step in steps for key in step])
    for *_, found, spent in parts:
        assert spent == epsilon
        for ours, theirs in zip(found, alone, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)


def test_streams(two_ranks: RankPool, tmp_path: Path) -> None:
    """People with up to three rows; a person on two ranks in one step is refused."""
    passes = [
        [[0, 1, 2, 3, 4, 6, 20], [9, 10, 11, 12, 13, 15, 16]],
        [[15, 17, 2, 7, 8, 6], [1, 3, 5, 18, 19, 21]],
    ]
    passes[1][0][2], passes[1][1][0] = 16, 1
    _, names, alone = streamed(str(tmp_path), passes, 3)
    for errors, found, told in two_ranks.run(streamed, str(tmp_path), passes, 3):
        assert (errors, found) == ([], names)
        assert_same(told, alone, moved=True)
    for errors, *_ in two_ranks.run(streamed, str(tmp_path), [[[0, 1, 4], [5, 6, 7]]], 3):
        assert errors[0].startswith(
            "StepNotTakenError: example 1 is in this step's batches of ranks [0, 1]"
        )
