"""How a test ended, in one word; what was expected; and both as a table."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .reasons import REASONS

EXPECTED = Path(__file__).with_name("expected.json")
PASSED, SKIPPED, UNEXPLAINED = "passed", "skipped", "unexplained"

Record = Mapping[str, Any]  # of one test, as the plugin writes it


def outcome_of(test: str, record: Record) -> str:
    """ "passed", "skipped", the name of the documented reason for which it ends otherwise, or "unexplained"."""
    if record["outcome"] != "failed":
        return str(record["outcome"])
    reason = next((reason for reason in REASONS if reason.explains(test, record)), None)
    return UNEXPLAINED if reason is None else reason.name


def engine_tests(stock: Mapping[str, Record]) -> list[str]:
    """The tests that make an engine and pass with Opacus's: a test that fails with it says nothing about ours."""
    return [test for test, record in stock.items() if record["engine"] and record["outcome"] == PASSED]


@dataclass(frozen=True)
class Comparison:
    """What a run says beside the list of expected outcomes.

    Attributes:
        lost: Tests that were expected to pass and do not.
        unexplained: Tests that end in a way that no documented reason covers.
        gained: Tests that pass and were not expected to.
        moved: Tests that end for another documented reason than expected.
    """

    lost: list[str]
    unexplained: list[str]
    gained: list[str]
    moved: list[str]

    @property
    def good(self) -> bool:
        return not (self.lost or self.unexplained)


def compare(records: Mapping[str, Record], expected: Mapping[str, Record]) -> Comparison:
    """Compare the outcomes of the tests that were run with those that are listed."""
    comparison = Comparison([], [], [], [])
    for test, record in records.items():
        outcome, listed = outcome_of(test, record), expected.get(test, {}).get("outcome")
        if outcome == UNEXPLAINED:
            comparison.unexplained.append(test)
        elif listed == PASSED and outcome != PASSED:
            comparison.lost.append(test)
        elif outcome == PASSED and listed not in (PASSED, None):
            comparison.gained.append(test)
        elif listed is not None and outcome != listed:
            comparison.moved.append(test)
    return comparison


def load_expected() -> dict[str, dict[str, Any]]:
    """{test: {"outcome", "seconds", "quick"}} of the tests that call an engine."""
    return json.loads(EXPECTED.read_text())["tests"]


def save_expected(tests: Mapping[str, Mapping[str, Any]], versions: Mapping[str, str]) -> None:
    """Write the list, one line a test."""
    lines = ",\n".join(f"  {json.dumps(test)}: {json.dumps(entry)}" for test, entry in sorted(tests.items()))
    EXPECTED.write_text(f'{{\n "versions": {json.dumps(dict(versions))},\n "tests": {{\n{lines}\n }}\n}}\n')


def summary(outcomes: Mapping[str, str]) -> str:
    """The table of the docs, in Markdown: how many tests end in which way, which they are, and why."""
    functions: dict[str, set[str]] = {}
    for test, outcome in outcomes.items():
        functions.setdefault(outcome, set()).add(f"`{test.split('::')[-1].removeprefix('test_')}`")
    counts = Counter(outcomes.values())

    rows = ["| tests | outcome | why | test functions |", "|---:|---|---|---|", f"| {counts[PASSED]} | pass | | |"]
    for reason in REASONS:
        if counts[reason.name]:
            names = ", ".join(sorted(functions[reason.name]))
            rows.append(f"| {counts[reason.name]} | {reason.title} | {reason.why} | {names} |")
    if counts[UNEXPLAINED]:
        rows.append(f"| {counts[UNEXPLAINED]} | not explained | | {', '.join(sorted(functions[UNEXPLAINED]))} |")
    return "\n".join([*rows, f"| **{len(outcomes)}** | call an engine | | |"])


def unused_reasons(outcomes: Mapping[str, str]) -> list[str]:
    """The documented reasons for which no test ends any more."""
    return [reason.name for reason in REASONS if reason.name not in outcomes.values()]


def quick_part(seconds: Mapping[str, float], outcomes: Mapping[str, str], budget: float = 80) -> set[str]:
    """A representative part: each test function and each class once for every way in which it ends, the fastest first.

    What is left of the budget goes to the fastest of the others.

    Args:
        seconds: How long each test took.
        outcomes: How each ended.
        budget: For all of the part, in seconds on the machine that measured them.
    """
    fastest_first = sorted(outcomes, key=lambda test: seconds[test])
    part: dict[str, float] = {}
    seen: set[tuple[str, str]] = set()
    for test in fastest_first:
        _, class_name, function = test.split("::")
        new = {(class_name, outcomes[test]), (function, outcomes[test])} - seen
        if new:
            seen |= new
            part[test] = seconds[test]
    for test in fastest_first:
        if sum(part.values()) + seconds[test] > budget:
            break
        part[test] = seconds[test]
    return set(part)
