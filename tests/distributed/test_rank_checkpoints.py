"""Runs that are stopped and go on: bit for bit on as many ranks, to rounding on another number."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.rank_checkpoints import DRAWS, Ended, noise_of_a_run, resumed, saved_meanwhile, unbroken
from tests.distributed.rank_pool import RankPool
from tests.distributed.rank_runs import as_one
from tests.repeatable import check_no_noise_is_shared


def assert_close(found: Ended, expected: Ended, tolerance: float) -> None:
    for a, b in zip(found.weights, expected.weights, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    assert found.sums.keys() == expected.sums.keys()
    for name, value in expected.sums.items():
        if not (tolerance and name.endswith(("_changes", "_last"))):
            scale = float(expected.sums["trace"].max())
            torch.testing.assert_close(found.sums[name], value, rtol=tolerance, atol=tolerance * scale, msg=name)
    torch.testing.assert_close(found.individual, expected.individual, rtol=tolerance, atol=tolerance)
    assert found.epsilon == expected.epsilon
    assert found.timeline_steps == expected.timeline_steps


def test_as_many_ranks_go_on_bit_for_bit(two_ranks: RankPool, tmp_path: Path) -> None:
    expected = two_ranks.run(unbroken)
    two_ranks.run(unbroken, passes=1, path=str(tmp_path / "checkpoint.pt"))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]  # of rank 0, for all
    for found, whole in zip(two_ranks.run(resumed, str(tmp_path / "checkpoint.pt")), expected, strict=True):
        assert_close(found, whole, 0.0)


def test_another_number_of_ranks_goes_on(two_ranks: RankPool, tmp_path: Path) -> None:
    of_two, of_one = str(tmp_path / "two.pt"), str(tmp_path / "one.pt")
    expected = unbroken(draws=as_one(DRAWS))
    two_ranks.run(unbroken, passes=1, path=of_two, estimator="exact")
    assert_close(resumed(of_two, draws=as_one(DRAWS)[7:]), expected, 1e-6)
    unbroken(passes=1, path=of_one, draws=as_one(DRAWS))
    for found in two_ranks.run(resumed, of_one, estimator="exact", scattered=True):
        assert_close(found, expected, 1e-6)


@pytest.mark.parametrize("kind", ["run.pt", "run/"])
def test_ranks_that_resume_share_neither_noise_nor_draws(two_ranks: RankPool, tmp_path: Path, kind: str) -> None:
    path = f"{tmp_path}/{kind}"
    runs = [two_ranks.run(noise_of_a_run, path, resume=resume) for resume in (False, True, True)]
    check_no_noise_is_shared(*(noise for (noise, _), _ in runs))  # rank 0 adds it
    assert not any(noise for _, (noise, _) in runs)
    draws = [tuple(map(tuple, batches)) for run in runs for _, batches in run]
    assert len(set(draws)) == 6  # nor do the two ranks draw alike


SHARDED_OR_NOT = [pytest.param(False, marks=pytest.mark.slow), True]  # from a file, not sharded, is tried above


@pytest.mark.parametrize("sharded", SHARDED_OR_NOT)
def test_from_a_folder_as_many_ranks_go_on_bit_for_bit(two_ranks: RankPool, tmp_path: Path, sharded: bool) -> None:
    expected = two_ranks.run(unbroken, sharded=sharded)
    folder = f"{tmp_path}/run/"
    two_ranks.run(unbroken, passes=1, path=folder, sharded=sharded)
    for found, whole in zip(two_ranks.run(resumed, folder, sharded=sharded), expected, strict=True):
        assert_close(found, whole, 0.0)


@pytest.mark.parametrize("sharded", SHARDED_OR_NOT)
def test_from_a_folder_another_number_of_ranks_goes_on(two_ranks: RankPool, tmp_path: Path, sharded: bool) -> None:
    of_two, of_one = f"{tmp_path}/two/", f"{tmp_path}/one/"
    expected = unbroken(draws=as_one(DRAWS))
    two_ranks.run(unbroken, passes=1, path=of_two, estimator="exact", sharded=sharded)
    assert_close(resumed(of_two, draws=as_one(DRAWS)[7:]), expected, 1e-6)
    unbroken(passes=1, path=of_one, draws=as_one(DRAWS))
    for found in two_ranks.run(resumed, of_one, estimator="exact", scattered=True, sharded=sharded):
        assert_close(found, expected, 1e-6)


def test_a_sharded_model_goes_on_from_a_file(two_ranks: RankPool, tmp_path: Path) -> None:
    file = str(tmp_path / "one.pt")
    expected = unbroken(draws=as_one(DRAWS))
    unbroken(passes=1, path=file, draws=as_one(DRAWS))
    for found in two_ranks.run(resumed, file, estimator="exact", scattered=True, sharded=True):
        assert_close(found, expected, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_four_ranks_go_on_from_the_folder_of_two(
    two_ranks: RankPool, four_ranks: RankPool, tmp_path: Path, sharded: bool
) -> None:
    folder = f"{tmp_path}/two/"
    expected = unbroken(draws=as_one(DRAWS))
    two_ranks.run(unbroken, passes=1, path=folder, estimator="exact", sharded=sharded)
    for found in four_ranks.run(resumed, folder, estimator="exact", scattered=True, sharded=sharded):
        assert_close(found, expected, 1e-6)


def test_a_checkpoint_that_is_written_meanwhile_holds_one_state(two_ranks: RankPool, tmp_path: Path) -> None:
    folder = f"{tmp_path}/run/"
    expected = two_ranks.run(saved_meanwhile, folder)
    for found, whole in zip(two_ranks.run(resumed, folder, estimator="exact"), expected, strict=True):
        assert_close(found, whole, 0.0)
