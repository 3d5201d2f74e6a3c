"""Individual ε."""

from __future__ import annotations

from torchfil.report.page import svg
from torchfil.report.page.context import Report, paragraph
from torchfil.report.page.html import Markup, join, number, table
from torchfil.report.summary import Summary

__all__ = ["render"]


def render(report: Report) -> Markup | None:
    """Bars of the examples' own ε beside the accountant's; None where none was computed."""
    summary, bins = report.summary, report.summary.epsilon_histogram
    if not summary.epsilon:
        return None
    epsilon, delta = report.about("epsilon"), report.about("delta")
    marks = [svg.Mark(float(epsilon), f"ε for everybody, {number(epsilon)}")] if epsilon is not None else []

    chart = None
    if bins is not None:
        chart = svg.figure(
            lambda width: svg.histogram(
                bins.edges, bins.counts, width=width, title="examples", axis="individual ε", log=False, marks=marks
            ),
            "How many examples have spent how much; never more than ε for everybody.",
            label="Histogram of individual ε",
        )

    rows = [
        [_named(float(level), summary), number(value, 2 if summary.redacted else 3, even=True)]
        for level, value in summary.epsilon.items()
    ]
    at = f" at δ = {number(delta)}" if delta is not None else ""
    return join(
        paragraph(
            f"ε for everybody{at} assumes gradients of the full clipping norm at every step. With an example’s "
            "own norms it is smaller. This is output-specific: the norms are those of this one run and depend on what "
            "it released, so that it is an estimate, not a guarantee (a guarantee needs a filter that stops an example "
            "when its budget is spent). Between two participations the last norm seen stands in; norm_refresh looks "
            "them up more often."
        ),
        chart,
        table(["Of the examples", "ε"], rows, class_="slim"),
    )


def _named(level: float, summary: Summary) -> str:
    if level == 0:
        return f"the {summary.smallest} largest together" if summary.redacted else "the largest"
    return "half have more" if level == 0.5 else f"{100 * level:g} % have more"
