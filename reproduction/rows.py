"""A row of the reproduction page: what a paper reports, how it is measured here, and how agreement
is judged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from paper_data import SOURCES, PaperData

from benchmarks.measuring import Json

__all__ = [
    "PAPERS",
    "Check",
    "Earlier",
    "Outcome",
    "Row",
    "Run",
    "check_near",
    "check_that",
    "verdict_of",
]

PAPERS = {
    "hannun": "Hannun, Guo and van der Maaten 2021, *Measuring Data Leakage in Machine-Learning "
    "Models with Fisher Information*",
    "guo": "Guo, Karrer, Chaudhuri and van der Maaten 2022, *Bounding Training Data "
    "Reconstruction in Private (Deep) Learning*",
    "plis": "the PLIS paper, 2022, on the *Privacy Loss-Input Susceptibility*",
    "mo": "Mo et al. 2021, on quantifying the leakage of gradients (V-information and sensitivity "
    "by layer)",
}


@dataclass(frozen=True)
class Check:
    """One number or statement of the paper, compared with ours.

    Attributes:
        what: What is compared.
        theirs: The paper's value.
        ours: The measured value.
        rule: When both count as the same.
        holds: Whether they count as the same.
    """

    what: str
    theirs: str
    ours: str
    rule: str
    holds: bool


def check_near(what: str, theirs: float, ours: float, within: float, digits: int = 3) -> Check:
    """Two numbers that may differ by ``within``.

    Example:
        >>> check_near("mean η", 0.040, 0.0405, 0.001).holds
        True
    """
    rule = f"within {within:g}"
    return Check(
        what,
        f"{theirs:.{digits}f}",
        f"{ours:.{digits + 1}f}",
        rule,
        bool(abs(ours - theirs) <= within),
    )


def check_that(what: str, theirs: str, ours: str, rule: str, holds: bool) -> Check:
    """A statement, with the rule that was applied to our numbers."""
    return Check(what, theirs, ours, rule, bool(holds))


@dataclass(frozen=True)
class Outcome:
    """The result of measuring a row.

    Attributes:
        here: Our result in a sentence or two, made from the numbers.
        checks: The comparisons.
        values: The numbers behind it, for the JSON file.
        pictures: Names of the pictures in the output folder.
    """

    here: str
    checks: tuple[Check, ...]
    values: Json = field(default_factory=dict)
    pictures: tuple[str, ...] = ()


@dataclass(frozen=True)
class Earlier:
    """An earlier result from another machine, taken from the page that documents it.

    Attributes:
        here: The result in words.
        checks: As in an outcome.
        device: The machine.
        source: The page of the documentation that has the numbers.
        quotes: Pieces of text that this page or README.md must contain; a test looks for them.
        command: The command.
    """

    here: str
    checks: tuple[Check, ...]
    device: str
    source: str
    quotes: tuple[str, ...]
    command: str


@dataclass(frozen=True)
class Run:
    """How rows are measured.

    Attributes:
        out: The folder for pictures.
        tiny: Whether to use made-up data and a few steps, to check that a row runs, not to measure.
        device: The device for rows that need a GPU.
    """

    out: Path
    tiny: bool = False
    device: str = "cpu"

    def data(self, *names: str) -> PaperData:
        """These data sets: the real ones if they are on this machine, else stand-ins."""
        return PaperData(
            *names, folder=self.out / "no data" if self.tiny else None, say=lambda line: None
        )

    def missing(self, names: tuple[str, ...]) -> list[str]:
        """Which of these data sets are stand-ins, by their full names."""
        return [SOURCES[name].name for name in names if name in self.data(*names).made]


@dataclass(frozen=True)
class Row:
    """A table or figure, or a part of one.

    Attributes:
        id: Unique; the name of its file.
        paper: A key of :data:`PAPERS`.
        item: The table or figure.
        theirs: What the paper reports, read from its text.
        data: The data used here.
        measure: The function that measures it; None for an illustration, or if it cannot be done.
        minutes: The expected minutes on two cores (on one GPU if ``gpu``).
        needs: Data sets, by their names in examples/paper_data.py.
        gpu: Whether only ``make reproduce-gpu`` runs it.
        stand_in: What differs from the paper's setting: other data, a smaller run. Empty: nothing.
        reason: Why it differs or cannot be done, or what to know about a result that agrees.
        earlier: An earlier result, shown until the row is measured again.
    """

    id: str
    paper: str
    item: str
    theirs: str
    data: str
    measure: Callable[[Run], Outcome] | None
    minutes: float = 0.0
    needs: tuple[str, ...] = ()
    gpu: bool = False
    stand_in: str = ""
    reason: str = ""
    earlier: Earlier | None = None


def verdict_of(checks: tuple[Check, ...], *, stand_in: bool) -> str:
    """Whether all, some or no checks hold.

    The text starts with "stand-in" for other data or a smaller run.

    Example:
        >>> verdict_of((check_near("η", 1, 1, 0), check_near("η", 1, 2, 0)), stand_in=False)
        'agrees in part'
    """
    held = sum(check.holds for check in checks)
    if not checks:
        return "nothing to compare"
    plain = "agrees" if held == len(checks) else "differs" if held == 0 else "agrees in part"
    return f"stand-in: {plain}" if stand_in else plain
