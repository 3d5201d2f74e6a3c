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

Records = Mapping[str, Mapping[str, Any]]  # by test: what the plugin noted, or what is expected


class Reason(NamedTuple):
    """A documented reason for which a test does not pass; reasons.toml says what each field is."""

    name: str
    title: str
    why: str
    error: str
    tests: str = ""


REASONS = [
    Reason(**each)
    for each in tomllib.loads(EXPECTED.with_name("reasons.toml").read_text())["reason"]
]


def outcome_of(test: str, record: Mapping[str, Any]) -> str:
    """ "passed", "skipped", the name of the documented reason for which it ends otherwise, or
    "unexplained".
    """
    if record["outcome"] != "failed":
        return str(record["outcome"])
    for reason in REASONS:
        if re.search(reason.tests, test) and re.search(reason.error, record["error"]):
            return reason.name
    return UNEXPLAINED


def is_lost(outcome: str, expected: str) -> bool:
    """Whether a test ends in a way that nobody wants."""
    return outcome == UNEXPLAINED or (expected == PASSED != outcome)


def load_expected() -> dict[str, dict[str, Any]]:
    """{test: {"outcome", "seconds"}} of the tests that call an engine."""
    return json.loads(EXPECTED.read_text())["tests"]


def save_expected(tests: Records, versions: Mapping[str, str]) -> None:
    """Write the list, one line a test."""
    lines = ",\n".join(
        f"  {json.dumps(test)}: {json.dumps(entry)}" for test, entry in sorted(tests.items())
    )
    EXPECTED.write_text(
        f'{{\n "versions": {json.dumps(versions)},\n "tests": {{\n{lines}\n }}\n}}\n'
    )


def summary(outcomes: Mapping[str, str]) -> str:
    """The table of the docs, in Markdown: how many tests end in which way, which they are, and
    why.
    """
    functions: dict[str, set[str]] = {}
    for test, outcome in outcomes.items():
        functions.setdefault(outcome, set()).add(f"`{test.split('::')[-1].removeprefix('test_')}`")
    counts = Counter(outcomes.values())
    rows = [
        "| tests | outcome | why | test functions |",
        "|---:|---|---|---|",
        f"| {counts[PASSED]} | pass | | |",
    ]
    for name, title, why in [
        *(reason[:3] for reason in REASONS),
        (UNEXPLAINED, "not explained", ""),
    ]:
        if counts[name]:
            rows.append(
                f"| {counts[name]} | {title} | {why} | {', '.join(sorted(functions[name]))} |"
            )
    return "\n".join([*rows, f"| **{len(outcomes)}** | call an engine | | |"])


def quick_part(expected: Records) -> list[str]:
    """The tests that take less than 0.25 s, and each function and class once for every way in which
    it ends.
    """
    seen: set[tuple[str, str]] = set()
    part = []
    for test, entry in sorted(expected.items(), key=lambda item: item[1]["seconds"]):
        _, class_name, function = test.split("::")
        kinds = {(class_name, entry["outcome"]), (function, entry["outcome"])}
        if entry["seconds"] < 0.25 or not kinds <= seen:
            part.append(test)
        seen |= kinds
    return part
