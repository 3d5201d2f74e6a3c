"""How closely examples could be rebuilt: the least errors of unbiased guesses, beside that of a blind guess."""

from __future__ import annotations

from torchfil.report.page import svg
from torchfil.report.page.context import Report, named_level, paragraph, root
from torchfil.report.page.html import Markup, count, join, number, table, tag
from torchfil.report.yardsticks import share_in_words

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
    blind, unit = root(summary.guess), report.about("unit_of_inputs")
    marks = [svg.Mark(blind, f"blind guess, {number(blind)}")] if blind else []
    caption = [
        "How many examples have which least error; further left is more exposed. Only measured examples are counted.",
        f" {count(bins.outside)} examples with nothing to learn about them (error infinite) are left out."
        if bins.outside
        else "",
        " Bars of unequal width show counts by their area; the outermost are laid around the mean of their examples."
        if summary.redacted
        else "",
    ]

    return svg.figure(
        lambda width: svg.histogram(
            [edge**0.5 for edge in bins.edges],
            bins.counts,
            width=width,
            title="examples",
            axis="least error of an unbiased guess" + (f" ({unit})" if unit else ", per input"),
            marks=marks,
            emphasis_below=blind,
        ),
        caption,
        label="Histogram of the least errors of unbiased guesses, over the measured examples",
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
            f"{number(guess**0.5)} (root mean square over all inputs)."
        )
    else:
        middle = (ends[0] + ends[1]) / 2
        blind = (
            f"Inputs lie between {number(ends[0])} and {number(ends[1])}; always answering {number(middle)} is off by "
            f"at most {number(ends[1] - middle)}."
        )
    return paragraph(
        tag("b", "The dashed line"),
        f" is what somebody errs by who has never seen the model. {blind} Right of the line, an unbiased attacker who "
        "uses the model errs by more than that on average. Left of it the bound leaves room to learn more from the "
        "model than a blind guess gives; it does not say that an attack gets there. A biased attacker may start from "
        "the blind guess, so that it need not err by more than the line; no bound in this chapter says how much less.",
    )


def _table(report: Report) -> Markup:
    """Typical examples: their least error and its share of a blind guess's; FIL and squared bounds folded away."""
    summary = report.summary
    digits = 2 if summary.redacted else 3
    with_low = summary.exposure[0].mse_bound_low is not None
    with_share = any(row.share is not None for row in summary.exposure)
    rows, raw = [], []
    for row in summary.exposure:
        name = named_level(row.level, row.examples, summary.redacted)
        bound = row.mse_bound_low if with_low else row.mse_bound
        share = [] if not with_share else ["" if row.share is None else share_in_words(row.share)]
        rows.append([name, f"±\u00a0{number(root(bound), digits, even=True)}", *share])
        squares = [row.fil, row.mse_bound, *([row.mse_bound_low] if with_low else [])]
        raw.append([name, *(number(value, digits, even=True) for value in squares)])

    note = (
        f"Each row is a geometric mean over {summary.smallest} examples of neighbouring rank"
        + (f"; the first low end is that of the {summary.smallest} lowest low ends." if with_low else ".")
        if summary.redacted
        else ""
    )
    first = "Of the measured examples"
    low = "at the lower end of its 95 % interval, of each example by itself" if with_low else "an estimate from one run"
    return join(
        table([first, "least error per input", *(["beside a blind guess"] if with_share else [])], rows),
        paragraph(
            f"An unbiased guess of an input is off by at least this, on average (root mean square), {low}. The "
            "largest errors are so partly by luck. ",
            note,
            class_="note",
        ),
        tag(
            "details",
            tag("summary", "FIL and squared errors"),
            table([first, "FIL η̄", "MSE bound", *(["its low end"] if with_low else [])], raw),
        ),
    )
