"""Groups compared: who is exposed more than others."""

from __future__ import annotations

import math

from torchfil.report.group_summary import Grouping
from torchfil.report.page import svg
from torchfil.report.page.context import Report, paragraph
from torchfil.report.page.html import Markup, count, join, number, table, tag
from torchfil.report.page.wording import is_linear
from torchfil.run.baselines import share_in_words, share_of_blind_guess
from torchfil.run.statistics import SMALLEST_EFFECT, SMALLEST_GROUP

__all__ = ["headline", "render"]


def render(report: Report) -> Markup | None:
    """A chart for each grouping; None where the run has no groups."""
    if not report.summary.groupings:
        return None
    return join(
        paragraph(
            "Dots are a group’s typical FIL (geometric mean over its measured examples), lines its 95 % "
            "interval, widened so that all intervals of a grouping hold together. A group stands out where its "
            f"interval misses the line of all examples and it differs by {100 * (SMALLEST_EFFECT - 1):.0f} % or more; "
            "smaller differences are not called. The intervals cover chance among a group’s examples",
            "." if is_linear(report) else "; noise that all examples of a batch share is not in them.",
        ),
        [_grouping(grouping, report) for grouping in report.summary.groupings],
        paragraph(
            "What to do about it: train with weights that make the groups leak alike, as far as the weights are held "
            "fixed (",
            tag("code", "torchfil.equalise(groups=…)"),
            "; for generalised linear models ",
            tag("code", "torchfil.glm.iteratively_reweighted_fil"),
            "). ",
            "More noise lowers" if is_linear(report) else "More noise, stronger clipping or fewer steps lower",
            " everybody’s exposure.",
            class_="note",
        ),
    )


def _grouping(grouping: Grouping, report: Report) -> Markup:
    if grouping.withheld:
        return join(
            tag("h3", f"By {grouping.name}"),
            paragraph(
                f"Not shown: beside the groupings above, its groups would tell of fewer than {report.summary.smallest} "
                "examples at a time, by subtracting one number from another."
            ),
        )
    if not grouping.groups:
        return join(
            tag("h3", f"By {grouping.name}"),
            paragraph(f"All groups are smaller than {report.summary.smallest} examples and are not shown."),
        )
    rows = [
        svg.Row(
            group.name,
            group.fil,
            group.low,
            group.high,
            {"more": 1, "less": 2}.get(group.compared, 0),
            f"n = {count(group.examples)}",
        )
        for group in grouping.groups
    ]

    # in words what the chart shows: the ends, where they differ enough, and who stands out
    more = [group.name for group in grouping.groups if group.compared == "more"]
    verdict = join(
        [headline(grouping, report) or "", " "],
        f"Clearly above all examples: {', '.join(more)}." if more else "No group stands clearly above all examples.",
        _disparity(grouping),
    )

    hidden = f" {grouping.left_out} groups are not shown." if grouping.left_out else ""
    return join(
        tag("h3", f"By {grouping.name}"),
        svg.figure(
            lambda width: svg.intervals(
                rows,
                width=width,
                axis="Fisher information loss η̄ (right: more exposed)",
                mark=svg.Mark(grouping.fil, "all examples"),
            ),
            join(verdict, hidden),
            label=f"Typical FIL with intervals by {grouping.name}",
        ),
        tag("details", tag("summary", "The numbers"), _numbers(grouping)),
    )


def headline(grouping: Grouping, report: Report) -> str | None:
    """Who leaks how much more than whom, in the inputs' unit; None for small effects, and for what may be chance.

    Of unbiased attackers: an unbiased guess of one input of a typical member (geometric mean) has an MSE of 1/η̄² or
    more.
    """
    disparity, rows = grouping.disparity, {group.name: group for group in grouping.groups}
    if disparity is None or disparity.ratio < SMALLEST_EFFECT or not {disparity.most, disparity.least} <= rows.keys():
        return None
    most, least = rows[disparity.most], rows[disparity.least]
    if math.isinf(disparity.ratio):
        return f"{most.name} leaks beyond all measure beside {least.name}."
    if most.low <= least.high:
        return None

    errors = 1 / most.fil, 1 / least.fil
    text = (
        f"{most.name} has {number(disparity.ratio, 2)} times the FIL of {least.name}: an unbiased guess of an input "
        f"typically has a mean squared error of {number(errors[0] ** 2)} or more there, and of "
        f"{number(errors[1] ** 2)} in {least.name}"
    )
    if report.summary.guess is None:
        return f"{text}."
    shares = [share_in_words(float(share_of_blind_guess(error, report.summary.guess**0.5))) for error in errors]
    return f"{text} ({shares[0]}, and {shares[1]})." if shares[0] != shares[1] else f"{text} (both: {shares[0]})."


def _disparity(grouping: Grouping) -> str:
    """The statistic that the gate judges, now and in the run without weights."""
    if grouping.disparity is None:
        return f" Fewer than two groups have {SMALLEST_GROUP} measured examples, so that no disparity is told."
    text = f" The most over the least exposed group: {number(grouping.disparity.ratio)}"
    if grouping.disparity_before is not None:
        text += f"; before examples were spared, {number(grouping.disparity_before.ratio)}"
    return f"{text} (typical FIL)."


def _numbers(grouping: Grouping) -> Markup:
    before = any(group.fil_before is not None for group in grouping.groups)
    rows = [
        [
            g.name,
            count(g.examples),
            count(g.measured),
            number(g.fil),
            f"{number(g.low)} to {number(g.high)}",
            *([number(g.fil_before)] if before else []),
        ]
        for g in grouping.groups
    ]
    head = ["Group", "Examples", "Measured", "FIL η̄", "95 % interval"]
    return table([*head, *(["FIL η̄ before sparing"] if before else [])], rows)
