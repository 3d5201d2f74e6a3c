"""Verdicts as pipelines read them: SARIF 2.1.0, GitHub's annotations and step summary.

SARIF and annotations are made of :func:`torchfil.gate.gate.public` verdicts: logs and code scanning
have other readers than the data. They name rules, limits and states, and nothing that was measured.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

from torchfil._version import __version__
from torchfil.gate.gate import in_words, outcome, public
from torchfil.gate.rules import RULES, STATES, Verdict
from torchfil.run.unit import Facts
from torchfil.utils.text import marked, visible

COLUMNS = ["rule", "what", "found", "limit"]
_SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)
# level, kind
_SARIF = {"broken": ("error", "fail"), "warning": ("warning", "fail"), "unknown": ("none", "open")}


def rows_of(verdicts: Sequence[Verdict]) -> list[list[str]]:
    """State, rule, what it is about, what was found and the limit, as texts for a table."""
    rows = []
    for verdict in verdicts:
        title, found, limit = RULES[verdict.key].row(verdict)
        missing = f": {verdict.detail}" if verdict.found is None else ""
        source = verdict.source and f" [{verdict.source}]"
        rows.append([STATES[verdict.state], verdict.rule, title + missing + source, found, limit])
    return rows


def in_short(verdicts: Sequence[Verdict]) -> str:
    """The outcome in a line, with how many rules are in each state."""
    end, states = outcome(verdicts), [verdict.state for verdict in verdicts]
    told = {**STATES, "warning": "with a warning"}
    counts = [
        f"{states.count(state)} {told[state]}"
        for state in told
        if state in states and state != "kept"
    ]
    rules = (
        ", ".join(counts).replace(" ", f" of {len(states)} rules ", 1)
        or f"all {len(states)} rules kept"
    )
    # which says nothing about a release
    alone = {verdict.key for verdict in verdicts} == {"max_worsening"}
    said = "compared with the earlier run alone" if alone else end.decision.lower()
    return f"{end.word.upper() if end.code else end.word}: {said} ({rules})"


def sarif(verdicts: Sequence[Verdict], policy: Path | None) -> Facts:
    """A SARIF log with a result for each rule that is not kept, at its line of the policy; "open":
    not answered.
    """
    keys = list(dict.fromkeys(verdict.key for verdict in verdicts))
    rules = [{"id": key, "shortDescription": {"text": RULES[key].compared}} for key in keys]
    results, uri = list[Facts](), "policy.toml" if policy is None else quote(policy.as_posix())
    for verdict, line in _located(verdicts, policy):
        level, kind = _SARIF[verdict.state]
        where = {"artifactLocation": {"uri": uri}, "region": {"startLine": line}}
        results.append(
            {
                "ruleId": verdict.key,
                "ruleIndex": keys.index(verdict.key),
                "level": level,
                "kind": kind,
                "message": {"text": _message(verdict)},
                "locations": [{"physicalLocation": where}],
            }
        )
    driver = {"name": "torchfil", "version": __version__, "rules": rules}
    return {
        "$schema": _SCHEMA,
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": results}],
    }


def github_annotations(verdicts: Sequence[Verdict], policy: Path | None) -> list[str]:
    """GitHub's workflow commands, a line for each rule that is not kept."""
    found = []
    for verdict, line in _located(verdicts, policy):
        where = {"file": str(policy), "line": str(line)} if policy else {}
        named = {"title": f"torchfil gate: {verdict.key}", **where}
        told = ",".join(f"{name}={_escaped(text, property=True)}" for name, text in named.items())
        kind = "warning" if verdict.state == "warning" else "error"
        found.append(f"::{kind} {told}::{_escaped(_message(verdict))}")
    return found


def step_summary(heading: str, verdicts: Sequence[Verdict], remarks: Sequence[str]) -> str:
    """A table in Markdown, for the end of the file that GitHub shows for a step."""
    rows = [[marked(cell) for cell in row] for row in rows_of(verdicts)]
    lines = [f"| {' | '.join(row)} |" for row in [["verdict", *COLUMNS], ["---"] * 5, *rows]]
    notes = [f"* {marked(remark)}" for remark in remarks]
    hidden = all(verdict.hidden for verdict in verdicts)
    remark = "" if hidden else "These numbers depend on private data: keep them confidential."
    title = f"### torchfil gate, {marked(heading)}: {in_short(verdicts)}"
    return "\n".join([title, "", *lines, "", *notes, "", remark, ""])


def _message(verdict: Verdict) -> str:
    missing = f" {verdict.detail}." if verdict.found is None else ""
    return visible(f"{STATES[verdict.state]}: {in_words(verdict)}{missing}")


def _located(verdicts: Sequence[Verdict], policy: Path | None) -> Iterator[tuple[Verdict, int]]:
    """What is not kept, as others may read it, and the first line of the policy that has its
    key.
    """
    lines = policy.read_text(encoding="utf-8").splitlines() if policy else []
    for verdict in (public(verdict) for verdict in verdicts if not verdict.passed):
        key = rf'\s*\[?\s*"?{verdict.key}"?\s*[].=]'
        here = (number for number, line in enumerate(lines, 1) if re.match(key, line))
        yield verdict, next(here, 1)


def _escaped(text: str, property: bool = False) -> str:
    """As the runner of GitHub reads it; in a property, a colon and a comma would end the value."""
    return "".join(
        f"%{ord(sign):02X}" if sign in ("%\r\n:," if property else "%\r\n") else sign
        for sign in text
    )
