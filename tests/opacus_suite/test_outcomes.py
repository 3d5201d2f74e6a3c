from tests.opacus_suite.outcomes import (
    PASSED,
    REASONS,
    UNEXPLAINED,
    is_lost,
    load_expected,
    outcome_of,
)


def test_what_is_not_as_listed():
    refused = {
        "outcome": "failed",
        "error": "ValueError: clipping='adaptive' cannot be accounted for",
    }
    assert outcome_of("a_test.py::ATest::test_basic", refused) == "adaptive-clipping"
    unknown = outcome_of(
        "a_test.py::ATest::test_basic", {"outcome": "failed", "error": "AssertionError: 1 != 8"}
    )
    assert unknown == UNEXPLAINED
    assert is_lost(unknown, "zero-noise")
    assert is_lost("adaptive-clipping", PASSED)
    assert not is_lost(PASSED, "zero-noise")
    assert not is_lost(PASSED, PASSED)


def test_every_listed_outcome_is_documented():
    outcomes = {entry["outcome"] for entry in load_expected().values()}
    assert outcomes <= {PASSED, *(reason.name for reason in REASONS)}
