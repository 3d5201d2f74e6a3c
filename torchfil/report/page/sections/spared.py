"""Examples that were trained with a smaller weight: who, how much, and what the rounds that chose the weights did."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from torchfil.report.page.context import Report, paragraph
from torchfil.report.page.html import Markup, count, join, number, percent, table, tag
from torchfil.run.baselines import BLANK_WHERE_UNKNOWN, LOWER_BOUND, NOT_MEASURED, status_of
from torchfil.run.saved_run import SavedRun

__all__ = ["render", "shown_rows"]

LINES = 20

# heading, and the column of the run that stands below it; of rounds, also how it is written
_OF_EXAMPLES = (
    ("FIL before", "fil_before"),
    ("FIL η̄", "fil"),
    ("MSE bound", "mse_bound"),
    ("its low end", "mse_bound_low"),
    ("own ε", "epsilon"),
)
_OF_ROUNDS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("Spared", "num_spared", count),
    ("Least ω", "smallest_weight", number),
    ("Worst", "worst", number),
    ("its end", "worst_end", number),
    ("Short", "num_below", count),
    ("Groups", "group_ratio", number),
    ("Score", "score", lambda score: number(score, 4)),
    ("ε", "epsilon", number),
    ("Seconds", "seconds", lambda seconds: f"{seconds:,.0f}"),
)


def render(report: Report) -> Markup | None:
    """How many and, unless redacted, who; None where nobody was given a weight."""
    spared, examples = report.summary.spared, report.summary.examples
    if spared is None:
        return None
    if spared.examples == 0:
        return join(paragraph("No example has a weight below 1."), _rounds(report))

    # a public count is rounded, or told in words
    number_of = spared.examples
    share = f" ({percent(min(number_of / max(examples, 1), 1.0))})" if isinstance(number_of, int) else ""
    about = "About " if report.summary.redacted and isinstance(number_of, int) else ""
    told = f"{about}{count(number_of)} of {examples:,} examples{share}"
    smallest = "" if spared.smallest_weight is None else f" The smallest ω is {number(spared.smallest_weight)}."
    return join(
        paragraph(
            tag("b", told[:1].upper() + told[1:]),
            " were trained with a weight ω below 1: after clipping, their gradient was multiplied by ω, while the "
            "noise stayed the same. They move the model less, and leak less.",
            smallest,
        ),
        _who(report.run) if report.run is not None else None,
        _rounds(report),
        paragraph(
            "FIL and MSE bounds bind unbiased attackers, ε every attacker, with the weights held fixed: batches and "
            "noise are random, the weights are not. A small weight tells that its example stood out; keep weights that "
            "were computed from private data as confidential as the data.",
            class_="note",
        ),
    )


def _who(run: SavedRun) -> Markup:
    """The most spared by id, each opening the example's details."""
    weights, status = np.asarray(run.clip_weights, dtype=np.float64), status_of(run)

    def cell(name: str, row: int) -> str:
        if status[row] == NOT_MEASURED and name in BLANK_WHERE_UNKNOWN:
            return "not measured"
        in_part = ", measured in part" if status[row] == LOWER_BOUND and name == "mse_bound" else ""
        return number(float(run.columns[name][row]), even=True) + in_part

    shown = [(label, name) for label, name in _OF_EXAMPLES if name in run.columns]
    rows = [
        [
            tag("button", str(run.ids[row]), type="button", class_="link", data_row=row, aria_haspopup="dialog"),
            number(weights[row], even=True),
            *(cell(name, row) for _, name in shown),
        ]
        for row in shown_rows(run)
    ]
    rest = int((weights < 1).sum()) - len(rows)
    more = f"{rest:,} more: sort the table of every example, or leakage.csv, by weight." if rest else None
    return join(
        tag("h3", "Most spared"),
        table(["Example", "Weight ω", *(label for label, _ in shown)], rows),
        paragraph(more, class_="note") if more else None,
    )


def shown_rows(run: SavedRun) -> list[int]:
    """The examples that are named: those with the smallest weights."""
    if "clip_weight" not in run.columns:
        return []
    weights, status = np.asarray(run.clip_weights, dtype=np.float64), status_of(run)
    spared = np.flatnonzero(weights < 1)

    # of equal weights, those that leak most come first, and what was not measured last
    fil = np.where(status == NOT_MEASURED, -math.inf, np.asarray(run.columns["fil"], dtype=np.float64))
    return spared[np.lexsort((-fil[spared], weights[spared]))][:LINES].tolist()


def _rounds(report: Report) -> Markup | None:
    """One line for each training; columns that no round has are left out."""
    spared = report.summary.spared
    rounds = spared.rounds if spared is not None else {}
    if "num_spared" not in rounds:
        return None
    columns = [
        (label, write, rounds[name]) for label, name, write in _OF_ROUNDS if name in rounds and _is_known(rounds[name])
    ]
    fresh = rounds.get("fresh", [False] * len(rounds["num_spared"]))
    rows = [
        [f"{place + 1}{', fresh' if is_fresh else ''}", *(write(values[place]) for _, write, values in columns)]
        for place, is_fresh in enumerate(fresh)
    ]
    return join(
        tag("h3", "What equalising did"),
        paragraph(_aim(report)),
        table(["Training", *(label for label, _, _ in columns)], rows),
    )


def _is_known(values: list[Any]) -> bool:
    return any(not (isinstance(value, float) and math.isnan(value)) for value in values)


def _aim(report: Report) -> str:
    """How the weights came about and, unless redacted, what was aimed at, what the worst is and whether it was met."""
    text = "The weights were chosen in rounds of training, each from the leakage of the round before"
    if report.summary.redacted:
        return f"{text}. This version tells how many each round spared, and nothing that rests on single examples."

    # what was aimed at, and what it cost
    question, target = report.about("equalised", "question"), report.about("equalised", "target")
    of = "smallest MSE bound (unbiased attackers)"
    if question is not None:
        of = f"largest true-positive rate on “{question}” (every attacker)"
    aim = "groups that leak alike" if target is None else f"a {of} of {number(target)}"
    text += f"; the aim was {aim}."
    met = report.about("equalised", "met")
    text += "" if met is None else " The aim was met." if met else " The aim was not met."
    epsilon = report.about("equalised", "epsilon_of_all_rounds")
    if epsilon is not None:
        text += (
            f" Weights made from the data are outside one round’s ε; all rounds together have ε = {number(epsilon)}."
        )

    # how to read the table
    text += (
        f" “Worst” is the {of}, estimated from that training alone, with the conservative end of its interval; random "
        "are its batches and noise. “Short” counts the examples that missed the aim."
    )
    rounds = report.summary.spared.rounds if report.summary.spared is not None else {}
    if _is_known(rounds.get("group_ratio", [])):
        of_groups = "FIL" if question is None else "D"
        text += f" “Groups” is the largest over the smallest of the groups’ arithmetic means of {of_groups}."
    if any(rounds.get("fresh", [])):
        text += " “Fresh” trainings had their weights beforehand, and nothing was chosen from them."
    return text
