"""The kept runs come out as they did; ``python -m tests.golden.runs`` says what differs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.rank_pool import RankPool
from tests.golden.runs import RUNS, bert, differences, two_ranks

TOLERANCE = 1e-12
QUICK = ("loop", "train_step", "hooks", "questions")
NAMES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in RUNS]
pytestmark = pytest.mark.usefixtures("noise_of_users")


@pytest.mark.parametrize("name", NAMES)
def test_a_run_is_the_kept_one(name: str) -> None:
    apart = differences(name, RUNS[name]())
    assert len(apart) > 8
    assert max(apart.values()) <= TOLERANCE, apart


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    with RankPool(2, tmp_path) as pool:
        apart = differences("two ranks", pool.run(two_ranks)[0])
    assert max(apart.values()) <= TOLERANCE, apart


@pytest.mark.slow
def test_a_model_of_hugging_face() -> None:
    pytest.importorskip("transformers")
    apart = differences("BERT", bert())
    assert max(apart.values()) <= TOLERANCE, apart
