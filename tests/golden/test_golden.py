"""The kept runs come out as they did; ``python -m tests.golden.runs`` says what differs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.rank_pool import RankPool
from tests.golden.runs import RUNS, Found, bert, differences, two_ranks

TOLERANCE = 1e-12
QUICK = ("loop", "train_step", "hooks", "questions")
NAMES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in RUNS]
pytestmark = pytest.mark.usefixtures("noise_of_users")


def check(name: str, found: Found) -> None:
    apart = differences(name, found)
    assert len(apart) > 8
    assert max(apart.values()) <= TOLERANCE, apart


@pytest.mark.parametrize("name", NAMES)
def test_a_run_is_the_kept_one(name: str) -> None:
    check(name, RUNS[name]())


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    with RankPool(2, tmp_path) as pool:
        check("two ranks", pool.run(two_ranks)[0])


@pytest.mark.slow
def test_a_model_of_hugging_face() -> None:
    pytest.importorskip("transformers")
    check("BERT", bert())
