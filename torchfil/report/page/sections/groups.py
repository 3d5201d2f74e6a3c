"""Groups compared: who is exposed more than others."""

from __future__ import annotations

import math

from torchfil.report.page import svg
from torchfil.report.page.context import Report, paragraph
from torchfil.report.page.html import Markup, count, join, number, table, tag
from torchfil.report.summary import Grouping

__all__ = ["render"]


def render(report: Report) -> Markup | None:
    """A chart for each grouping; None where the run has no groups."""
    if not report.summary.groupings:
        return None
    return join(
        paragraph(
            "Dots are a group’s typical FIL (geometric mean over its measured examples), lines its 95 % "
            "interval, widened so that all intervals of a grouping hold together. A group stands out where its "
            "interval misses the line of all examples. The intervals cover chance among a group’s examples; "
            "noise that all examples of a batch share is not in them."
        ),
        [_grouping(grouping, report) for grouping in report.summary.groupings],
        paragraph(
            "What to do about it: train with weights that make the groups leak alike, as far as the weights are held "
            "fixed (",
            tag("code", "torchfil.equalise(groups=…)"),
            "; for generalised linear models ",
            tag("code", "torchfil.glm.iteratively_reweighted_fil"),
            "). More noise, stronger clipping or fewer steps lower everybody’s exposure.",
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

    # in words what the chart shows: the ends, where they differ by more than 5 %, and who stands out
    first, last = grouping.groups[0], grouping.groups[-1]
    verdict = ""
    if len(grouping.groups) > 1 and 0 < 1.05 * last.fil <= first.fil < math.inf:
        verdict = f"{first.name} has {number(first.fil / last.fil, 2)} times the FIL of {last.name}. "
    more = [group.name for group in grouping.groups if group.compared == "more"]
    verdict += (
        f"Clearly above all examples: {', '.join(more)}." if more else "No group stands clearly above all examples."
    )

    verdict += _disparity(grouping)

    hidden = f" {grouping.left_out} groups are not shown." if grouping.left_out else ""
    return join(
        tag("h3", f"By {grouping.name}"),
        svg.figure(
            lambda width: svg.intervals(
                rows,
                width=width,
                axis="Fisher information loss η̄ (further right: more exposed)",
                mark=svg.Mark(grouping.fil, "all examples"),
            ),
            verdict + hidden,
            label=f"Typical FIL with intervals by {grouping.name}",
        ),
        tag("details", tag("summary", "The numbers"), _numbers(grouping)),
    )


def _disparity(grouping: Grouping) -> str:
    """The most over the least exposed group, now and in the run without weights."""
    if grouping.ratio is None:
        return ""
    text = f" The most over the least exposed group: {number(grouping.ratio)}"
    if grouping.ratio_before is not None:
        text += f"; before examples were spared, {number(grouping.ratio_before)}"
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
