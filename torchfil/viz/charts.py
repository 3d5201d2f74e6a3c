"""Charts of scores: columns of a table as bars, examples as a cumulative distribution."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from torchfil.utils.errors import require
from torchfil.viz.common import NEGATIVE, NEUTRAL, POSITIVE, as_finite, as_vector, new_figure, plain_number, wrapped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME_WIDTH = 36  # characters
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito
STYLES = ("-", "--", "-.", ":")


def bar_chart(
    values: Any,
    names: Iterable[Hashable],
    *,
    errors: Any = None,
    intervals: Any = None,
    top: int = 20,
    sort: bool = True,
    title: str | None = None,
    label: str = "PLIS",
    unit: str | None = None,
) -> Figure:
    """Horizontal bars, one per column of a table, the largest magnitude on top.

    Positive bars are orange and negative ones purple, as in signed maps.

    Args:
        values: [n].
        names: n names, never cut off: long ones are wrapped.
        errors: [n], half the length of each whisker, such as a standard error; or give ``intervals``.
        intervals: [n, 2], the ends of each whisker, around its value; or give ``errors``.
        top: The largest number of bars; a last line says how many are left out, and their largest magnitude.
        sort: Whether to order by magnitude; if not, the first ``top`` are shown in the given order.
        title: The figure's title.
        label: The name of the value.
        unit: Its unit, shown after the name.

    Returns:
        The figure.
    """
    heights = as_vector(values, "values")
    texts = [wrapped(str(name), NAME_WIDTH) for name in names]
    one_each = f"names has {len(texts)} entries for {len(heights)} values; it must have one each"
    require(len(texts) == len(heights), one_each)
    require(top >= 1, f"top={top} must be at least 1")
    whiskers = _whiskers(heights, errors, intervals)

    order = np.argsort(-np.abs(heights), kind="stable") if sort else np.arange(len(heights))
    shown, rest = order[:top], order[top:]
    labels = [texts[i] for i in shown]
    if len(rest):
        bound = "within ±" if bool((heights[rest] < 0).any()) else "at most "
        labels.append(f"… {len(rest)} more, each {bound}{plain_number(float(np.abs(heights[rest]).max()))}")

    # make room for every line of a wrapped name
    tops = np.cumsum([0] + [1 + text.count("\n") for text in labels])
    longest = max(len(line) for text in labels for line in text.split("\n"))
    figure = new_figure(4.5 + 0.08 * longest, 1.1 + 0.24 * tops[-1] + 0.3 * (title is not None), "constrained")
    axis = figure.subplots()
    places = (tops[:-1] + tops[1:]) / 2  # a wrapped name gets the room of its lines
    rows = places[: len(shown)]

    axis.barh(rows, heights[shown], height=0.7, color=[POSITIVE if heights[i] >= 0 else NEGATIVE for i in shown])
    if whiskers is not None:
        style: dict[str, Any] = {"fmt": "none", "ecolor": NEUTRAL, "capsize": 2.5, "linewidth": 1}
        axis.errorbar(heights[shown], rows, xerr=whiskers[:, shown], **style)

    axis.set_yticks(places, labels, parse_math=False)
    axis.tick_params(axis="y", length=0)
    axis.set_ylim(tops[-1] + 0.1, -0.1)
    axis.axvline(0, color=NEUTRAL, linewidth=0.8)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.set_xlabel(label if unit is None else f"{label} ({unit})")
    if len(rest):
        axis.get_yticklabels()[-1].set(color=NEUTRAL, style="italic")
    if not heights[shown].any() and whiskers is None:
        axis.set_xticks([0.0])
    else:
        axis.locator_params(axis="x", nbins=7)
        axis.ticklabel_format(axis="x", style="sci", scilimits=(-3, 4))
    if title is not None:
        figure.suptitle(title)
    return figure


def distribution(
    values: Any,
    *,
    groups: Iterable[Hashable] | None = None,
    threshold: float | None = None,
    threshold_label: str = "threshold",
    log: bool = True,
    label: str = "PLIS",
    title: str | None = None,
) -> Figure:
    """The share of examples whose score is at most x: the empirical distribution, without bins to choose.

    Args:
        values: [n]. Infinite values, and zeros if ``log``, count as examples but have no place on the axis: the curve
            then starts above 0 or ends below 1, and the legend says how many there are.
        groups: n names; one curve for each group, distinguished by colour and line style.
        threshold: A score to mark, such as the error of guessing without the model; the legend says which share of all
            examples lies at or below it.
        threshold_label: The threshold's name.
        log: Whether x is logarithmic.
        label: The name of the score.
        title: The figure's title.

    Returns:
        The figure.
    """
    scores = as_vector(values, "values", infinite=True)
    members = list(groups) if groups is not None else ["all"] * len(scores)
    drawable = np.isfinite(scores) & ((scores > 0) | (not log))
    _check_distribution(scores, members, drawable, threshold, log)
    kinds: list[Any] = list(dict.fromkeys(members))
    with contextlib.suppress(TypeError):  # sorted if they can be compared
        kinds.sort()
    most = len(COLOURS) * len(STYLES)
    require(
        len(kinds) <= most, f"{len(kinds)} groups cannot be drawn in distinct styles; merge them into {most} or fewer"
    )

    figure = new_figure(6.4, 4.0, "constrained")
    axis = figure.subplots()
    entries: list[tuple[Any, str]] = []
    ends = float(scores[drawable].min()), float(scores[drawable].max())
    for i, kind in enumerate(kinds):
        own = np.sort(scores[[member == kind for member in members]])
        style = {"color": COLOURS[i % len(COLOURS)], "linestyle": STYLES[i % len(STYLES)]}
        curve, notes = _curve(axis, own, ends, log, style)
        entries.append((curve, f"{kind} ({notes})"))
    if threshold is not None:
        line = axis.axvline(threshold, color=NEUTRAL, linewidth=1.2, linestyle=(0, (1, 1)))
        at_most = 100 * float((scores <= threshold).mean())
        entries.append((line, f"{threshold_label} {plain_number(threshold)} ({at_most:.3g} % at or below)"))

    if log:
        axis.set_xscale("log")
    axis.set_ylim(0, 1.02)
    axis.set(xlabel=label, ylabel="share of examples at or below")
    axis.spines[["top", "right"]].set_visible(False)
    _draw_legend(figure, entries)
    if title is not None:
        axis.set_title(title, loc="left")
    return figure


def _check_distribution(
    scores: np.ndarray, members: list[Any], drawable: np.ndarray, threshold: float | None, log: bool
) -> None:
    one_each = f"groups has {len(members)} entries for {len(scores)} values; it must have one each"
    require(len(members) == len(scores), one_each)
    place = "has no place on a logarithmic axis; pass log=False"
    require(not log or bool((scores >= 0).all()), f"values holds {scores.min():g}, which {place}")
    require(not log or threshold is None or threshold > 0, f"threshold={threshold} {place}")
    zeros, infinite = int((scores == 0).sum()), int(np.isinf(scores).sum())
    nothing = (
        f"no value can be drawn: of {len(scores)}, {zeros} are zero (log=False draws them) and {infinite} infinite"
    )
    require(bool(drawable.any()), nothing)


def _curve(
    axis: Axes, scores: np.ndarray, ends: tuple[float, float], log: bool, style: dict[str, Any]
) -> tuple[Any, str]:
    """Draw the distribution of ascending scores from end to end of the axis; return the curve and its legend notes."""
    inside = np.isfinite(scores) & ((scores > 0) | (not log))
    below, above = int((scores < ends[0]).sum()), int(np.isposinf(scores).sum())  # left and right of the axis

    # from one end of the axis to the other, so all groups' curves have the same length
    x = np.concatenate([ends[:1], scores[inside], ends[1:]])
    y = np.append(np.arange(below, below + inside.sum() + 1), below + inside.sum()) / len(scores)
    curve = axis.step(x, y, where="post", linewidth=1.8, **style)[0]
    notes = [f"n = {len(scores)}"]
    notes += [f"{below} at {'zero' if log else '−∞'}"] * (below > 0)
    notes += [f"{above} at ∞"] * (above > 0)
    return curve, ", ".join(notes)


def _draw_legend(figure: Figure, entries: list[tuple[Any, str]]) -> None:
    legend = figure.legend(
        [handle for handle, _ in entries],
        [str(i) for i in range(len(entries))],
        loc="outside right upper" if len(entries) > 4 else "outside upper left",
        frameon=False,
        fontsize="small",
    )
    for text, (_, content) in zip(legend.get_texts(), entries, strict=True):
        text.set_parse_math(False)
        text.set_text(content)  # set afterwards: matplotlib hides labels that start with an underscore


def _whiskers(heights: np.ndarray, errors: Any, intervals: Any) -> np.ndarray | None:
    """Distances from the values down and up to the ends of the whiskers, [2, n]."""
    require(errors is None or intervals is None, "errors and intervals both set the whiskers; pass one of them")
    if errors is not None:
        half = as_vector(errors, "errors", len(heights))
        require(bool((half >= 0).all()), f"errors must be ≥ 0, got {half.min():g}")
        return np.stack([half, half])
    if intervals is None:
        return None
    ends, wanted = as_finite(intervals, "intervals"), [len(heights), 2]
    require(list(ends.shape) == wanted, f"intervals must have shape {wanted}, low and high, got {list(ends.shape)}")
    reach = np.stack([heights - ends[:, 0], ends[:, 1] - heights])
    outside = np.flatnonzero((reach < 0).any(axis=0)).tolist()
    require(not outside, f"values[i] lies outside its interval for i in {outside[:5]}")
    return reach
