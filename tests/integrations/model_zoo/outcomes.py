"""What became of a model that was trained privately: it runs and is right, it is refused, or it
fails; as a page.
"""

from __future__ import annotations

import re
import sys
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torchfil
from tests.opacus_suite.vision import import_torchvision

from . import hugging_face, plain, vision
from .model import Model
from .truth import WAYS, assert_true, trained

# Beside the environment, not in it, as the Makefile says why; torchvision comes before what looks
# for it.
sys.path.append(str(Path(sys.prefix) / "vision"))
import_torchvision()
MODELS = {model.name: model for model in (*hugging_face.MODELS, *vision.MODELS, *plain.MODELS)}

RECORDED, MAPPED, REFUSED, FAILED, WRONG = "runs", "runs (vmap)", "refused", "fails", "wrong"


@dataclass(frozen=True)
class Case:
    """A cell of the table.

    Attributes:
        name: Of the model.
        way: How it is trained, one of :data:`WAYS`.
        dropout: Whether it drops.
    """

    name: str
    way: str
    dropout: bool

    @property
    def model(self) -> Model:
        """What is trained."""
        return MODELS[self.name]

    def __str__(self) -> str:
        return f"{self.name}, {self.way}, {'with' if self.dropout else 'without'} dropout"


@dataclass(frozen=True)
class Outcome:
    """How a case ended.

    Attributes:
        kind: "runs" (a recorded pass), "runs (vmap)" (mapped over examples), "refused" (by
            torchfil, with a reason) or "fails" (in an error of another package).
        reason: The text of the error, numbers left out.
    """

    kind: str
    reason: str = ""


CASES = tuple(
    Case(name, way, dropout)
    for name, model in MODELS.items()
    for way in WAYS
    for dropout in (True, False)
    if (way != "loss" or model.loss_inside) and (model.drops or not dropout)
)


def outcome_of(case: Case) -> Outcome:
    """Train the case and compare it with brute force.

    Raises:
        AssertionError: A number is wrong.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            run = trained(case.model, case.way, dropout=case.dropout)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1].filename
            is_ours = Path(last).is_relative_to(Path(torchfil.__file__).parent)
            text = " ".join(f"{type(error).__name__}: {error}".split())
            # machines' numbers differ
            reason = re.sub(r"\d+(\.\d+)?(e[-+]?\d+)?", "N", text.replace("|", "/"))
            return Outcome(REFUSED if is_ours else FAILED, reason)
        assert_true(run)
    return Outcome(MAPPED if run.mapped else RECORDED)


# --- docs/models.md: written from outcomes, and read back

DOCS = Path(__file__).parents[3] / "docs" / "models.md"
PACKAGES = ("torch", "opacus", "transformers", "peft", "timm", "torchvision")
COLUMNS = [(way, dropout) for way in WAYS for dropout in (True, False)]
NONE = "–"

# the page's own words
HEADER = re.split(r"^\d+ models, ", DOCS.read_text(), flags=re.MULTILINE)[0].rstrip() + "\n"


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
    refused = [
        name for name in names if any(outcomes[case].reason for case in CASES if case.name == name)
    ]
    lines = [
        HEADER,
        f"{len(names)} models, {len(outcomes)} runs; {len(refused)} models are refused in some "
        "way or fail. Versions: " + ", ".join(f"{name} {version(name)}" for name in PACKAGES) + ".",
        "",
        "| model | out.loss, dropout | out.loss | loop, dropout | loop | train_step, dropout | "
        "train_step |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {' | '.join(cell(Case(name, *column)) for column in COLUMNS)} |"
        for name in names
    ]
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
