"""FIL beside bounds from ε: Rényi (RDP) and reconstruction robustness (ReRo)."""

from __future__ import annotations

from typing import Any

from torchfil.report.page import svg
from torchfil.report.page.context import Report, named_level, paragraph
from torchfil.report.page.html import Markup, join, number, percent, table, tag
from torchfil.report.page.wording import origin, over
from torchfil.run.baselines import share_in_words, share_of_blind_guess

__all__ = ["render"]


def render(report: Report) -> Markup | None:
    """Both bounds; None where the run holds neither."""
    parts = [part for part in (_rdp(report), _rero(report)) if part is not None]
    return join(*parts) if parts else None


def _rdp(report: Report) -> Markup | None:
    bounds = report.summary.bounds.get("rdp_mse_bound")
    readings: dict[str, Any] = bounds if isinstance(bounds, dict) else {"replace-one": bounds}
    names = {"replace-one": "from ε, proven", "replace_one": "from ε, proven", "paper": "from ε, as in the paper"}
    told = {text: float(readings[key]) for key, text in names.items() if isinstance(readings.get(key), int | float)}
    if not told:
        return None

    # beside them a few examples, from the most exposed to the median
    guess = report.summary.guess
    bounds = [(text, bound, 2) for text, bound in told.items()]
    for row in report.summary.exposure:
        if row.level in (0.0, 0.05, 0.5):
            text = f"FIL, {named_level(row.level, row.examples, report.summary.redacted)}"
            bounds.append((text, row.mse_bound, int(row.level == 0)))
    rows = [_point(text, bound, guess, tone=tone) for text, bound, tone in bounds]
    unit = report.about("unit_of_inputs")

    return join(
        paragraph(
            "Differential privacy alone gives one bound for everybody, and must assume the worst example; it is "
            f"proven. FIL measures each example, and is {origin(report)}. Both bind unbiased attackers, on average "
            f"{over(report)}: the mean squared error of a guess of an input is at least this (its MSE bound); further "
            "right is safer.",
            " Shares are of a blind guess’s error; right of the line a bound says no more than that the model is no "
            "help." * (guess is not None),
        ),
        svg.figure(
            lambda width: svg.intervals(
                rows,
                width=width,
                axis="MSE bound" + (f" ({unit}, squared)" if unit else ", per input"),
                mark=None if guess is None else svg.Mark(guess, "blind guess"),
            ),
            "“From ε, proven” converts the accountant’s Rényi divergence of order 2 to one between runs that "
            "differ in one example’s value; “as in the paper” takes it as it is, which is no theorem for "
            "accountants that add and remove examples.",
            label="MSE bounds from differential privacy and from Fisher information beside each other",
        ),
        tag(
            "details",
            tag("summary", "The numbers"),
            table(["Of", "MSE bound"], [[text, number(bound)] for text, bound, _ in bounds]),
        ),
    )


def _point(name: str, bound: float, guess: float | None, *, tone: int) -> svg.Row:
    """An MSE bound; beside it the share of a blind guess's error, or the bound itself where none is known."""
    note = number(bound)
    if guess is not None:
        share = float(share_of_blind_guess(bound**0.5, guess**0.5))
        note = "guessing" if share >= 1 else share_in_words(share).split(" of a ")[0]
    return svg.Row(name, bound, bound, bound, tone, note)


def _rero(report: Report) -> Markup | None:
    curve = report.summary.bounds.get("rero")
    if not isinstance(curve, dict) or not curve.get("prior") or len(curve["prior"]) != len(curve.get("success", [])):
        return None
    pairs = sorted(zip(curve["prior"], curve["success"], strict=True))
    shown = pairs if len(pairs) <= 6 else [pairs[round(i * (len(pairs) - 1) / 5)] for i in range(6)]
    line = svg.Line("with model", [a for a, _ in pairs], [b for _, b in pairs])
    with_it, without = "success with the model, at most", "success without the model"
    chart = svg.figure(
        lambda width: svg.lines([line], width=width, title=with_it, axis=without, diagonal=True),
        "The dashed diagonal is a model that gives nothing away.",
        label="Reconstruction robustness: success with the model against success without it",
    )

    return join(
        paragraph(
            "Reconstruction robustness (ReRo) holds for every attacker, also with beliefs about the data, and for "
            "everybody: if a guess from these beliefs alone succeeds this often, then with the model it succeeds at "
            "most that often, over the draw of batches and noise. It is computed, not sampled, and rounded up."
        ),
        chart if len(pairs) > 2 else None,
        table(
            ["Success without the model", "with it, at most"],
            [[percent(a), percent(b)] for a, b in shown],
            class_="slim",
        ),
    )
