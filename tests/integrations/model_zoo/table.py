"""docs/models.md: written from outcomes, and read back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from .outcomes import CASES, Case, Outcome
from .truth import WAYS

DOCS = Path(__file__).parents[3] / "docs" / "models.md"
PACKAGES = ("torch", "opacus", "transformers", "peft", "timm", "torchvision")
COLUMNS = [(way, dropout) for way in WAYS for dropout in (True, False)]
NONE = "–"

HEADER = re.split(r"^\d+ models, ", DOCS.read_text(), flags=re.MULTILINE)[0].rstrip() + "\n"  # the page's own words


def text_of(outcomes: Mapping[Case, Outcome]) -> str:
    """The page."""
    reasons = sorted({outcome.reason for outcome in outcomes.values() if outcome.reason})
    notes = {reason: number for number, reason in enumerate(reasons, 1)}

    def cell(case: Case) -> str:
        outcome = outcomes.get(case)
        if outcome is None:
            return NONE
        return f"{outcome.kind} [{notes[outcome.reason]}]" if outcome.reason else outcome.kind

    names = list(dict.fromkeys(case.name for case in outcomes))
    refused = [name for name in names if any(outcomes[case].reason for case in CASES if case.name == name)]
    lines = [
        HEADER,
        f"{len(names)} models, {len(outcomes)} runs; {len(refused)} models are refused in some way or fail. Versions: "
        + ", ".join(f"{name} {version(name)}" for name in PACKAGES)
        + ".",
        "",
        "| model | out.loss, dropout | out.loss | loop, dropout | loop | train_step, dropout | train_step |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [f"| {name} | {' | '.join(cell(Case(name, *column)) for column in COLUMNS)} |" for name in names]
    if notes:
        lines += ["", "## Notes", ""]
        lines += [f"{number}. {reason}" for reason, number in notes.items()]
    return "\n".join(lines) + "\n"


def read_table(text: str) -> dict[Case, Outcome]:
    """What the page says of every case."""
    notes = dict(re.findall(r"^(\d+)\. (.*)$", text, re.MULTILINE))
    outcomes: dict[Case, Outcome] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if not line.startswith("| ") or len(cells) != 1 + len(COLUMNS) or cells[0] == "model":
            continue
        for column, cell in zip(COLUMNS, cells[1:], strict=True):
            kind, _, number = cell.removesuffix("]").partition(" [")
            if cell != NONE:
                outcomes[Case(cells[0], *column)] = Outcome(kind, notes[number] if number else "")
    return outcomes


def told(outcomes: Mapping[Case, Outcome]) -> str:
    """A line for every case that does not run, for the terminal."""
    return "\n".join(
        f"{case}: {outcome.kind}: {outcome.reason}" for case, outcome in outcomes.items() if outcome.reason
    )
