import pytest

from tests.opacus_suite.outcomes import PASSED, UNEXPLAINED, compare, load_expected, outcome_of, quick_part
from tests.opacus_suite.reasons import REASONS

REFUSED = {"outcome": "failed", "error": "ValueError", "text": "clipping='adaptive' cannot be accounted for"}
UNKNOWN = {"outcome": "failed", "error": "AssertionError", "text": "1 != 8"}
TEST = "privacy_engine_test.py::PrivacyEngineCustomLayerTest::test_basic"


@pytest.mark.parametrize(
    ("record", "expected", "good", "kind"),
    [
        ({"outcome": PASSED}, PASSED, True, None),
        (REFUSED, "adaptive-clipping", True, None),
        (REFUSED, PASSED, False, "lost"),
        (UNKNOWN, PASSED, False, "unexplained"),
        (UNKNOWN, "zero-noise", False, "unexplained"),
        ({"outcome": PASSED}, "zero-noise", True, "gained"),
        (REFUSED, "zero-noise", True, "moved"),
    ],
)
def test_lost_passes_and_unexplained_ends_fail_and_nothing_else_does(record, expected, good, kind):
    comparison = compare({TEST: record}, {TEST: {"outcome": expected}})
    assert comparison.good is good
    assert {name for name, tests in vars(comparison).items() if tests} == ({kind} if kind else set())
    assert (outcome_of(TEST, record) == UNEXPLAINED) is (kind == "unexplained")


def test_every_listed_outcome_is_documented():
    outcomes = {entry["outcome"] for entry in load_expected().values()}
    assert outcomes <= {PASSED, *(reason.name for reason in REASONS)}


def test_the_quick_part_has_every_class_and_function_for_every_outcome():
    seconds = {f"a_test.py::{c}::{f}": cost for c, cost in (("Fast", 1), ("Slow", 50)) for f in ("one", "two")}
    outcomes = {test: "zero-noise" if test.endswith("two") else PASSED for test in seconds}
    assert quick_part(seconds, outcomes, budget=10) == set(seconds)
    more = {"a_test.py::Slow::three": 60, "a_test.py::Fast::three": 1}
    seconds, outcomes = seconds | more, outcomes | dict.fromkeys(more, PASSED)
    assert quick_part(seconds, outcomes, budget=10) == set(seconds) - {"a_test.py::Slow::three"}
