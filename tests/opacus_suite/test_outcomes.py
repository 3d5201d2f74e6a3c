from tests.opacus_suite.outcomes import PASSED, REASONS, UNEXPLAINED, load_expected, quick_part, surprise

REFUSED = {"outcome": "failed", "error": "ValueError", "text": "clipping='adaptive' cannot be accounted for"}
UNKNOWN = {"outcome": "failed", "error": "AssertionError", "text": "1 != 8"}
TEST = "privacy_engine_test.py::PrivacyEngineCustomLayerTest::test_basic"


def test_what_is_not_as_listed():
    for record, listed, kind in (
        ({"outcome": PASSED}, PASSED, None),
        (REFUSED, "adaptive-clipping", None),
        (REFUSED, PASSED, "lost"),
        (UNKNOWN, PASSED, UNEXPLAINED),
        (UNKNOWN, "zero-noise", UNEXPLAINED),
        ({"outcome": PASSED}, "zero-noise", "gained"),
        (REFUSED, "zero-noise", "moved"),
    ):
        assert surprise(TEST, record, {TEST: {"outcome": listed}}) == kind


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
