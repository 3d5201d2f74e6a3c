"""What was released of a linear model, and what its numbers assume."""

from __future__ import annotations

from typing import Any

from torchfil.report.page.context import Report, paragraph
from torchfil.report.page.html import Markup, join, number, table
from torchfil.report.page.wording import is_linear

__all__ = ["assumptions", "render"]

Point = tuple[str, str | None]
REWEIGHTED = (
    "The examples were weighted so that they leak alike (iteratively reweighted FIL). All numbers take these weights "
    "as fixed. They were computed from the private data and move with it, which is not counted: keep them as "
    "confidential as the data."
)


def render(report: Report) -> Markup | None:
    """The release in words and as a table; None for other runs."""
    if not is_linear(report):
        return None
    several = (report.about("mechanism", "releases") or 1) > 1
    rows: list[tuple[str, Any]] = [
        ("Noise σ on every weight", report.about("mechanism", "sigma")),
        ("Noise σ of the releases", _listed(report.about("mechanism", "sigmas"))),
        ("Penalty λ", report.about("mechanism", "l2")),
        ("Private", _listed(report.about("linear", "private"))),
        ("Score without noise", report.about("linear", "score")),
        ("Score as released (median over the noise)", report.about("linear", "released_score")),
        ("Score of a model that knows no column", report.about("linear", "blind_score")),
    ]
    shown = [[name, number(v) if isinstance(v, int | float) else v] for name, v in rows if v not in (None, "")]

    how = "several times, each" if several else "once,"
    return join(
        paragraph(
            f"The model was fitted without noise, and its weights are released {how} with Gaussian noise of a public σ "
            "added to every weight (output perturbation). There are no training steps, no batches and no clipping, and "
            "no accountant tells an ε: how much the fitted weights change with one example is known in closed form, "
            "and that is what the numbers here are made from."
        ),
        paragraph(_composed(report)) if several else None,
        table([], shown, class_="facts"),
    )


def assumptions(report: Report) -> list[Point]:
    """What a linear model's numbers assume: name and text."""
    return [
        (
            "The attacker",
            "Knows every other example, everything else about this one, the fitting procedure and σ, and sees the "
            "released weights. The MSE bounds bind unbiased attackers: right on average over the noise. An attacker "
            "who mixes in beliefs about the data is biased and may err less. What questions tell binds every attacker, "
            "biased or not, and the best one attains it.",
        ),
        ("What is random", "The noise that is added to the weights, nothing else: the fit itself draws nothing."),
        ("Exact", "Closed forms, to the precision of the fit. There are no intervals, and no luck in the ranking."),
        ("Units", _units(report)),
        (
            "Small changes",
            "Bounds speak of small changes of an example’s values. Questions compare whole values, and refit the model "
            "for each.",
        ),
        ("Weights", REWEIGHTED if report.about("linear", "reweighted") else None),
        (
            "Not counted",
            "A σ, a penalty λ or columns that were chosen by a look at the private data give something away "
            "themselves, as do other releases of the same data, the score on it included. Nothing here counts it.",
        ),
    ]


def _units(report: Report) -> str | None:
    if report.about("unit_of_inputs") is None:
        return None
    if not report.about("unit_of_inputs"):
        return "The inputs are taken as they are: the MSE bound is a mean over columns of different units."
    return (
        "Of all columns together, each counts in units of its own standard deviation over the examples: always "
        "answering the mean is off by 1. Single attributes stand in their own units; those of several columns (one for "
        "each level of a category) as the root mean square over these."
    )


def _composed(report: Report) -> str:
    return (
        f"{report.about('mechanism', 'releases')} releases with independent noise are counted together: their Fisher "
        "information adds up, for an attacker who sees all of them."
    )


def _listed(values: Any) -> str | None:
    if not isinstance(values, list) or not values:
        return None
    named = [value if isinstance(value, str) else number(value) for value in values]
    return ", ".join(named[:12]) + (f" and {len(named) - 12} more" if len(named) > 12 else "")
