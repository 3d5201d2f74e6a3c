"""How the MSE bounds are distributed."""

from __future__ import annotations

from torchfil.report.page import svg
from torchfil.report.page.context import Report, named_level, paragraph
from torchfil.report.page.html import Markup, count, join, number, table, tag
from torchfil.report.page.wording import is_linear, over
from torchfil.run.baselines import share_in_words

__all__ = ["render"]


def render(report: Report) -> Markup | None:
    """Bars of the bounds with the line of a blind guess, and typical examples by exposure."""
    summary = report.summary
    if not summary.exposure:
        return paragraph("Too few examples were measured to show a distribution.")
    return join(_chart(report), _explained(report), _table(report))


def _chart(report: Report) -> Markup | None:
    summary, bins = report.summary, report.summary.mse_histogram
    if bins is None:
        return paragraph("Too few bounds are finite to draw them.")
    marks = [svg.Mark(summary.guess, f"blind guess, {number(summary.guess)}")] if summary.guess else []
    caption = [
        "How many examples have which bound; further left is more exposed. Only measured examples are counted.",
        f" {count(bins.outside)} examples with nothing to learn about them (bound infinite) are left out."
        if bins.outside
        else "",
        " Bars of unequal width show counts by their area; the outermost are laid around the mean of their examples."
        if summary.redacted
        else "",
    ]

    return svg.figure(
        lambda width: svg.histogram(
            bins.edges,
            bins.counts,
            width=width,
            title="examples",
            axis="bound on the mean squared error per input (MSE)",
            marks=marks,
            emphasis_below=summary.guess,
        ),
        caption,
        label="Histogram of the MSE bounds of the measured examples",
    )


def _explained(report: Report) -> Markup:
    """What the line of a blind guess stands for; where none is drawn, why not."""
    guess, ends = report.summary.guess, report.about("dataset", "input_range")
    if guess is None and report.summary.exposed is not None:
        return paragraph(
            "A blind guess, by somebody who knows how the data is spread but not the model, is off by the data’s "
            "standard deviation. That is private, and no line is drawn for it: ",
            tag("b", f"{count(report.summary.exposed)} examples"),
            " can be guessed more closely than that, by an unbiased attacker.",
        )
    if guess is None:
        return paragraph(
            "The run does not say between which values its inputs lie, nor how they are spread, so the error of a "
            "blind guess is not known and no line is drawn for it."
        )

    # from the data's own spread where the run keeps it, otherwise from the range
    if report.run is not None and report.run.yardsticks is not None:
        blind = (
            "Always answering an input’s mean over the examples is off by its standard deviation, "
            f"{number(guess**0.5)} (root mean square over all inputs): a squared error of {number(guess)}."
        )
    else:
        middle = (ends[0] + ends[1]) / 2
        blind = (
            f"Inputs lie between {number(ends[0])} and {number(ends[1])}; always answering {number(middle)} is off by "
            f"at most {number(ends[1] - middle)}, a squared error of at most {number(guess)}."
        )
    return paragraph(
        tag("b", "The dashed line"),
        f" is what somebody errs by who has never seen the model. {blind} Right of the line, an unbiased attacker who "
        "uses the model errs by more than that on average. Left of it the bound leaves room to learn more from the "
        "model than a blind guess gives; it does not say that an attack gets there. A biased attacker may start from "
        "the blind guess, so that it need not err by more than the line; no bound in this chapter says how much less.",
    )


def _table(report: Report) -> Markup:
    summary = report.summary
    digits = 2 if summary.redacted else 3
    with_low = summary.exposure[0].mse_bound_low is not None and not is_linear(report)
    with_share = any(row.share is not None for row in summary.exposure)
    head = [
        *("Of the measured examples", "FIL η̄", "MSE bound"),
        *(["its low end"] if with_low else []),
        *(["beside a blind guess"] if with_share else []),
    ]
    rows = [
        [
            named_level(row.level, row.examples, summary.redacted),
            number(row.fil, digits, even=True),
            number(row.mse_bound, digits, even=True),
            *([number(row.mse_bound_low, digits, even=True)] if with_low else []),
            *(["" if row.share is None else share_in_words(row.share)] if with_share else []),
        ]
        for row in summary.exposure
    ]

    note = (
        f"Each row is a geometric mean over {summary.smallest} examples of neighbouring rank"
        + (f"; the first low end is that of the {summary.smallest} lowest low ends." if with_low else ".")
        if summary.redacted
        else ""
    )
    return join(
        table(head, rows),
        paragraph(
            "The mean squared error of an unbiased guess of an input is at least the MSE bound, on average ",
            f"{over(report)}. ",
            None if is_linear(report) else "Bounds are estimates; the largest are so partly by luck. ",
            note,
            class_="note",
        ),
    )
