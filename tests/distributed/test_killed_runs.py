"""SIGKILL of any rank at any moment, in a save too: what is resumed equals a run that nobody killed, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import rank_pool
from tests.distributed.killed_runs import STEPS_PER_PASS, hang, run, temporaries


def check(folder: Path, size: int, steps: int, kills: int, seed: int) -> None:
    whole, killed = run(size, folder / "whole", steps, 0), run(size, folder / "killed", steps, kills, seed)
    print(f"{size} ranks: {killed}")
    assert [step for step, _ in whole.lines] == list(range(STEPS_PER_PASS, steps + 1, STEPS_PER_PASS))
    assert len(set(whole.lines)) == len(whole.lines)
    assert set(killed.lines) <= set(whole.lines)
    assert killed.lines[-1] == whole.lines[-1]

    # after every step, also of those that were taken again
    for found, expected in zip(killed.by_rank, whole.by_rank, strict=True):
        assert [step for step, _ in expected] == list(range(1, steps + 1))
        assert set(found) == set(expected)
    assert len(killed.victims) == kills
    assert temporaries(folder / "killed") == []


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_three_kills(tmp_path: Path, size: int) -> None:
    check(tmp_path, size, 48, 3, seed=5)


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 2])
def test_twenty_kills(tmp_path: Path, size: int) -> None:
    """Its quick sister has three; the numbers of docs/guide/scale.md come from here (pytest -s)."""
    check(tmp_path, size, 300, 20, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "way"), [(3, "loop"), (2, "train_step")])
def test_a_rank_that_hangs_is_told(tmp_path: Path, size: int, way: str) -> None:
    context = rank_pool._context(rank_pool.PRELOADED)
    processes = [context.Process(target=hang, args=(rank, size, tmp_path, 1, way), daemon=True) for rank in range(size)]
    for process in processes:
        process.start()
    try:
        for rank in {*range(size)} - {1}:
            processes[rank].join(100)
            text = (tmp_path / f"error{rank}").read_text()
            assert text.startswith("True StepNotTakenError: "), text
            assert "did not reach the end of step 3" in text
            assert "restart all of them from the last checkpoint" in text
            assert "init_process_group(timeout=" in text
    finally:
        for process in processes:
            process.kill()
            process.join()
