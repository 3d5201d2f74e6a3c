"""FIL and ε over training time."""

from __future__ import annotations

from torchfil.report.page import svg
from torchfil.report.page.context import Report
from torchfil.report.page.html import Markup, join

__all__ = ["render"]

NAMES = {"fil_max": "largest", "fil_q95": "95 % quantile", "fil_median": "median"}


def render(report: Report) -> Markup | None:
    """Curves over steps; None where no history was kept."""
    history = report.summary.history
    if "step" not in history or len(history["step"]) < 2:
        return None
    fil = [svg.Line(text, history["step"], history[name]) for name, text in NAMES.items() if name in history]
    charts = []
    if fil:
        charts.append(
            svg.figure(
                lambda width: svg.lines(fil, width=width, title="Fisher information loss η̄", axis="step"),
                "How FIL grew over the examples. It only ever grows: each step adds to what was given away.",
                label="FIL over training steps",
            )
        )
    if "epsilon" in history:
        spent = [svg.Line("ε", history["step"], history["epsilon"])]
        charts.append(
            svg.figure(
                lambda width: svg.lines(spent, width=width, title="ε for everybody", axis="step"),
                "The privacy budget spent, the same for all.",
                label="ε over training steps",
            )
        )
    return join(*charts) if charts else None
