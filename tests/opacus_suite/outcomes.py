"""How a test ended, in one word; what was expected; and both as a table."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.mutations import tomllib

EXPECTED = Path(__file__).with_name("expected.json")
PASSED, UNEXPLAINED = "passed", "unexplained"

Record = Mapping[str, Any]  # of one test, as the plugin writes it


class Reason(NamedTuple):
    """A documented reason for which a test does not pass; reasons.toml says what each field is."""

    name: str
    title: str
    why: str
    error: str
    tests: str = ""

    def explains(self, test: str, record: Record) -> bool:
        """Whether the failure that the plugin recorded is this one."""
        text = f"{record.get('error')}: {record.get('text')}"
        return bool(re.search(self.tests, test) and re.search(self.error, text))


REASONS = [Reason(**each) for each in tomllib.loads(EXPECTED.with_name("reasons.toml").read_text())["reason"]]


def outcome_of(test: str, record: Record) -> str:
    """ "passed", "skipped", the name of the documented reason for which it ends otherwise, or "unexplained"."""
    if record["outcome"] != "failed":
        return str(record["outcome"])
    return next((reason.name for reason in REASONS if reason.explains(test, record)), UNEXPLAINED)


def surprise(test: str, record: Record, expected: Mapping[str, Record]) -> str | None:
    """How the test ended otherwise than listed: "lost" and "unexplained" are failures, "gained" and "moved" are not."""
    outcome, listed = outcome_of(test, record), expected.get(test, {}).get("outcome")
    if outcome == UNEXPLAINED:
        return UNEXPLAINED
    if listed is None or outcome == listed:
        return None
    return "lost" if listed == PASSED else "gained" if outcome == PASSED else "moved"


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
    for name, title, why in [*(reason[:3] for reason in REASONS), (UNEXPLAINED, "not explained", "")]:
        if counts[name]:
            rows.append(f"| {counts[name]} | {title} | {why} | {', '.join(sorted(functions[name]))} |")
    return "\n".join([*rows, f"| **{len(outcomes)}** | call an engine | | |"])


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
