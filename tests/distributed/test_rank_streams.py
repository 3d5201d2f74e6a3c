"""Ranks that each read a stream of their own are one process that reads all of it (float64)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.rank_pool import RankPool
from tests.distributed.rank_runs import assert_same
from tests.distributed.rank_streams import begun, one_rank_has_nothing, resumed, same_example_on_two_ranks, streamed


def test_two_streams_are_one(two_ranks: RankPool, tmp_path: Path) -> None:
    """Uneven ones, whose examples go from rank to rank."""
    parts = two_ranks.run(streamed, str(tmp_path))
    names, alone = streamed(str(tmp_path))
    assert len(names) == 23
    for found, told in parts:
        assert found == names
        told.timeline = parts[0][1].timeline  # rank 0 has the file
        assert_same(told, alone, but=("_changes", "_last"), same_errors=False)
    assert alone.sums["participations"].max() == 2


@pytest.mark.slow
def test_a_grown_ledger_goes_on_from_a_checkpoint_of_ranks(two_ranks: RankPool, tmp_path: Path) -> None:
    """On two ranks bit for bit, and on one."""
    names, whole = two_ranks.run(streamed, str(tmp_path))[0]
    two_ranks.run(begun, str(tmp_path))
    for found, told in two_ranks.run(resumed, str(tmp_path)):
        assert found == names
        for name, value in whole.sums.items():
            assert torch.equal(told.sums[name], value), name
        assert told.epsilon == whole.epsilon
    found, told = resumed(str(tmp_path))
    assert found == names
    assert_same(told, whole, but=("_changes", "_last"), same_errors=False)


def test_an_example_on_two_ranks_in_one_step_is_refused(two_ranks: RankPool) -> None:
    for error, names, participations, most in two_ranks.run(same_example_on_two_ranks):
        assert error.startswith("StepNotTakenError: example 4 is in this step's batches of ranks [0, 1]")
        assert names == [0, 1, 2, 9, 10, 11, 6, 7, 8, 14, 15]
        assert participations == [2, *[1] * 10]
        assert most == 2


def test_a_rank_needs_some_of_the_stream(two_ranks: RankPool) -> None:
    assert all("the stream of rank 1 has no batch at all" in text for text in two_ranks.run(one_rank_has_nothing))
