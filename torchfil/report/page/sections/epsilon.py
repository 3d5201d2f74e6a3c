"""Individual ε."""

from __future__ import annotations

from torchfil.report.page import svg
from torchfil.report.page.context import Report, named_level, paragraph
from torchfil.report.page.html import Markup, join, number, table

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
        [named_level(float(level), summary.smallest, summary.redacted), number(value)]
        for level, value in summary.epsilon.items()
    ]
    at = f" at δ = {number(delta)}" if delta is not None else ""
    return join(
        paragraph(
            f"ε for everybody{at} assumes gradients of the full clipping norm at every step. With an example’s own norms it "
            "is smaller. This is an estimate, for between two participations the last norm seen stands in."
        ),
        chart,
        table(["Of the examples", "ε"], rows),
    )
