"""docs/models.md tells the truth: every model runs or is refused as it says, and what runs is right to 1e-6."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
sys.path.insert(0, str(Path(__file__).parents[2]))
for package in ("transformers", "peft"):
    pytest.importorskip(package, reason=f"{package} is not installed (make test-integrations)")

from tests.integrations.model_zoo.outcomes import CASES, Case, Outcome, outcome_of  # noqa: E402
from tests.integrations.model_zoo.table import DOCS, read_table, text_of  # noqa: E402

WRITTEN = read_table(DOCS.read_text())
REMEDY = "run python -m tests.integrations.model_zoo"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_model_does_what_the_page_says(case: Case) -> None:
    outcome = outcome_of(case)
    assert case in WRITTEN, REMEDY
    assert outcome == WRITTEN[case], REMEDY


def test_the_page_has_every_model_and_is_as_it_would_be_written() -> None:
    assert set(WRITTEN) == set(CASES), REMEDY
    assert len({case.name for case in CASES}) >= 40
    assert read_table(text_of(WRITTEN)) == WRITTEN


def test_reasons_survive_the_page() -> None:
    outcomes = {CASES[0]: Outcome("runs"), CASES[1]: Outcome("refused", "ValueError: a reason [N]. Do 1. this / that")}
    assert (
        read_table(text_of({**dict.fromkeys(CASES, Outcome("runs (vmap)")), **outcomes}))[CASES[1]]
        == outcomes[CASES[1]]
    )
