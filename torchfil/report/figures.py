"""The charts as PNG files, for other documents. Drawn from the summary alone."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from torchfil.report.group_summary import Grouping
from torchfil.report.page.html import number
from torchfil.report.summary import Summary
from torchfil.run.statistics import Histogram
from torchfil.utils.csv_files import visible
from torchfil.viz.common import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["write_figures"]

BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"


def write_figures(summary: Summary, folder: Path) -> tuple[dict[str, str], str | None]:
    """Write every figure that the summary has data for.

    Returns:
        File name ↦ what it shows, and why nothing was drawn, or None.
    """
    if find_spec("matplotlib") is None:
        return {}, "The figures were not written as PNG: matplotlib is not installed."

    drawn: dict[str, tuple[str, Figure]] = {}
    if summary.mse_histogram is not None:
        drawn["mse_bounds.png"] = (
            "distribution of the MSE bounds",
            _bars(summary.mse_histogram, "MSE bound", summary.guess),
        )
    if summary.epsilon_histogram is not None:
        figure = _bars(summary.epsilon_histogram, "individual ε", None, log=False)
        drawn["individual_epsilon.png"] = "distribution of individual ε", figure
    for i, grouping in enumerate(summary.groupings):
        if any(np.isfinite(group.fil) and group.fil > 0 for group in grouping.groups):
            drawn[f"groups_{i + 1}.png"] = f"FIL by {grouping.name}", _groups(grouping)
    if any(name.startswith("fil_") for name in summary.history):
        drawn["over_training.png"] = "FIL over training", _history(summary.history)

    label = "aggregates only" if summary.redacted else "confidential"
    for name, (_, figure) in drawn.items():
        figure.text(0.995, 0.995, label, ha="right", va="top", fontsize=7, color="0.4")
        figure.savefig(folder / name, dpi=150, metadata={"Software": None})
    return {name: what for name, (what, _) in drawn.items()}, None


def _bars(bins: Histogram, label: str, guess: float | None, *, log: bool = True) -> Figure:
    """Area is count: merged bins do not look larger than they are."""
    figure = new_figure(6.4, 3.4, "constrained")
    axis = figure.subplots()
    edges = np.asarray(bins.edges)
    widths = np.diff(np.log10(edges) if log else edges)
    colours = [ORANGE if guess is not None and edge <= guess * (1 + 1e-9) else BLUE for edge in edges[1:]]
    axis.bar(edges[:-1], np.asarray(bins.counts) / widths, np.diff(edges), align="edge", color=colours, linewidth=0)
    if log:
        axis.set_xscale("log")
    if guess is not None:
        axis.axvline(guess, color="0.2", linestyle="--", linewidth=1)
        axis.text(
            guess, 1.01, f"blind guess, {number(guess)}", transform=axis.get_xaxis_transform(), ha="center", fontsize=8
        )
    axis.set(xlabel=label, ylabel="examples", yticks=[])
    axis.spines[["top", "right", "left"]].set_visible(False)
    return figure


def _groups(grouping: Grouping) -> Figure:
    figure = new_figure(6.4, 1.0 + 0.26 * len(grouping.groups), "constrained")
    axis = figure.subplots()
    for row, group in enumerate(grouping.groups):
        colour = ORANGE if group.compared == "more" else BLUE
        if np.isfinite(group.high):
            axis.plot([group.low, group.high], [row, row], color=colour, linewidth=2)
        axis.plot([group.fil], [row], "o", color=colour)
    if np.isfinite(grouping.fil):
        axis.axvline(grouping.fil, color="0.2", linestyle="--", linewidth=1)
    axis.set_xscale("log")
    names = [visible(group.name) for group in grouping.groups]
    names = [name if len(name) <= 40 else name[:39] + "…" for name in names]
    axis.set_yticks(range(len(names)), names, parse_math=False)
    axis.invert_yaxis()
    axis.set_xlabel("Fisher information loss η̄; dashed: all examples")
    axis.spines[["top", "right"]].set_visible(False)
    return figure


def _history(history: dict[str, list[float]]) -> Figure:
    figure = new_figure(6.4, 3.4, "constrained")
    axis = figure.subplots()
    series = [("fil_max", "largest", ORANGE), ("fil_q95", "95 % quantile", BLUE), ("fil_median", "median", GREEN)]
    for name, text, colour in series:
        if name in history:
            axis.plot(history["step"], history[name], color=colour, label=text)
    axis.set(xlabel="step", ylabel="Fisher information loss η̄")
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    return figure
