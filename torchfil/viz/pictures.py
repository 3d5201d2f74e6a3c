"""Pictures: attributions over images, galleries, examples as a cumulative distribution."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from torch import Tensor

from torchfil.viz.common import (
    NEUTRAL,
    Values,
    as_array,
    as_finite,
    as_vector,
    new_figure,
    plain_number,
    wrapped,
)

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Mode = Literal["absolute", "signed"]
Style = dict[str, Any]  # options of matplotlib
# Okabe and Ito
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", "-.", ":")


def show_map(
    image: Values,
    attribution: Values,
    *,
    mode: Mode = "absolute",
    label: str = "PLIS",
    title: str | None = None,
    axis: Axes | None = None,
) -> Figure:
    """One image, the map of an attribution such as its PLIS, and the map drawn over the image.

    Channels are combined per pixel. ``absolute`` shows their 2-norm, which is the pixel's PLIS (the
    norm over its coordinates), from pale to dark. ``signed`` shows their sum, the change of the
    privacy loss when all channels of the pixel rise together: orange raises it, purple lowers it,
    white is zero. The largest 2 % of the non-zero magnitudes may saturate; the colour bar then has
    a pointed end.

    The overlay is the map over a pale grey copy of the image. A pixel's opacity grows with the root
    of its magnitude, so the image stays visible where nothing leaks. Read values from the map and
    places from the overlay.

    Args:
        image: [H, W], [C, H, W] or [H, W, C] with C 1 or 3; if both readings fit, channels come
            first. Bytes and values within [0, 1] are shown unchanged; other values are scaled so
            that their range becomes [0, 1].
        attribution: The same shape as the image, or [H, W]; NaN marks what is not private, and is
            left blank.
        mode: "absolute" or "signed".
        label: The name of the attribution.
        title: The figure's title.
        axis: Where to draw the map alone, without a colour bar; None: all three in a new figure.

    Returns:
        The figure.

    Guarantees:
        The arrays drawn are the attribution with channels combined, clipped to the limits; signed
        limits are symmetric. A map of zeros is drawn as zeros.

    Example:
        >>> figure = show_map(np.eye(4), np.diag([1.0, -2.0, 0.0, 3.0]), mode="signed")
        >>> figure.axes[2].images[-1].get_clim()
        (-3.0, 3.0)
    """
    name = f"|{label}|" if mode == "absolute" else label
    picture, heat = _pair(image, attribution, mode)
    scale = _limit(heat)
    colours = _colours(mode, scale)
    if axis is not None:
        _bare(axis)
        axis.imshow(np.clip(heat, -scale, scale), **colours)
        return axis.figure.figure

    figure = new_figure(9.0, 3.0 + 0.3 * (title is not None), "compressed")
    of_image, of_map, of_overlay = axes = figure.subplots(1, 3)
    for each, text in zip(axes, ("image", name, "overlay"), strict=True):
        each.set_title(text)
        _bare(each)
    _draw_image(of_image, picture)
    drawn = of_map.imshow(np.clip(heat, -scale, scale), **colours)
    _draw_overlay(of_overlay, picture, heat, scale, colours)
    if title is not None:
        figure.suptitle(title)

    ends = {
        (False, False): "neither",
        (True, False): "min",
        (False, True): "max",
        (True, True): "both",
    }
    extend = ends[bool((heat < -scale).any()), bool((heat > scale).any())]
    text, ticks = (name, None) if scale else (f"{name} (zero everywhere)", [0.0])
    figure.colorbar(drawn, ax=list(axes[1:]), extend=extend, label=text, ticks=ticks).ax.set_label(
        "colour bar"
    )
    return figure


def gallery(
    images: Tensor | np.ndarray | Sequence[Values],
    scores: Values,
    *,
    attributions: Tensor | np.ndarray | Sequence[Values] | None = None,
    ids: Iterable[Hashable] | None = None,
    count: int = 8,
    label: str = "score",
    higher: Literal["more exposed", "less exposed"] = "more exposed",
    title: str | None = None,
) -> Figure:
    """The most and the least exposed examples, each row from the most extreme, with scores above
    and ids below.

    Args:
        images: n images, each as in :func:`show_map`: [n, ...] or a sequence.
        scores: [n]; infinity is allowed.
        attributions: n maps; each is drawn over its image in a row below, as in :func:`show_map`
            with "absolute". The colours of each overlay saturate at its own limit: they show where
            an example leaks, and its score how much.
        ids: n names; None: 0 … n−1.
        count: The largest number of examples in a row.
        label: The name of the score and of the attribution.
        higher: Whether a higher score means more exposed (PLIS, FIL) or less (a bound on the
            attacker's error).
        title: The figure's title.

    Returns:
        The figure.

    Guarantees:
        No example is shown twice: fewer than 2·count examples are divided between the rows, with
        the odd one among the most exposed. A single example gets one row. Equal scores keep the
        order of the data.
    """
    values = as_vector(scores, "scores", infinite=True)
    names = list(ids) if ids is not None else list(range(len(values)))
    for given, what in ((images, "images"), (names, "ids"), (attributions, "attributions")):
        length = len(values) if given is None else len(given)
        if length != len(values):
            raise ValueError(
                f"{what} has {length} entries for {len(values)} scores; it must have one each"
            )
    directions = ("more exposed", "less exposed")
    if higher not in directions:
        raise ValueError(f"higher={higher!r} must be one of {directions}")

    # if there are few, half in each row, so no example is shown twice
    order = np.argsort(-values if higher == "more exposed" else values, kind="stable")
    most = order[: min(count, (len(order) + 1) // 2)]
    least = order[len(most) :][::-1][:count]
    blocks = [("most exposed", most)] + [("least exposed", least)] * (len(least) > 0)

    height = 2 if attributions is not None else 1
    stride = height + 1  # a block and the gap below it
    figure = new_figure(
        max(1.25 * len(most) + 0.6, 3.6), len(blocks) * (1.25 * height + 0.65) + 0.4, "compressed"
    )
    figure.suptitle(
        title
        if title is not None
        else f"{label}: {len(most) + len(least)} of {len(order)} examples"
    )
    ratios = ([1.0] * height + [0.12]) * len(blocks)
    grid = figure.subplots(len(ratios[:-1]), len(most), squeeze=False, height_ratios=ratios[:-1])
    for axis in grid.flat:
        axis.set_axis_off()

    for block, (text, rows) in enumerate(blocks):
        for column, row in enumerate(rows):
            cells = grid[stride * block : stride * block + height, column]
            for axis in cells:
                axis.set_axis_on()
                _bare(axis)
            if attributions is None:
                _draw_image(cells[0], _picture(as_array(images[row]), "images[i]"))
            else:
                picture, heat = _pair(images[row], attributions[row], "absolute")
                _draw_image(cells[0], picture)
                _draw_overlay(
                    cells[1], picture, heat, _limit(heat), _colours("absolute", _limit(heat))
                )
            cells[0].set_title(plain_number(values[row]), fontsize="small", pad=3)
            name = wrapped(str(names[row]), 15)
            cells[-1].set_xlabel(
                name, fontsize="x-small", color="0.35", labelpad=2, parse_math=False
            )
        first = grid[stride * block : stride * block + height, 0]
        first[0].set_ylabel(text, fontsize="small")
        if attributions is not None:
            first[1].set_ylabel(f"|{label}|", fontsize="small")

    if attributions is not None:
        figure.supxlabel(
            "darker: larger; each overlay on its own scale", fontsize="x-small", color="0.35"
        )
    return figure


def _pair(image: Values, attribution: Values, mode: str) -> tuple[np.ndarray, np.ndarray]:
    """The image for display, [H, W] or [H, W, 3], and the attribution with its channels combined,
    [H, W].

    A pixel without a private channel is NaN.
    """
    if mode not in ("absolute", "signed"):
        raise ValueError(f"mode={mode!r} must be 'absolute' or 'signed'")
    array = as_array(image)
    picture = _picture(array, "image")
    heat = as_array(attribution).astype(np.float64)
    hidden = np.isnan(heat)  # what is not private
    if hidden.all() or not np.isfinite(heat[~hidden]).all():
        as_finite(heat, "attribution")
    if heat.shape == array.shape:
        heat = np.moveaxis(heat, 0, -1) if _channels_first(array.shape) else heat
    else:
        given, wanted = list(heat.shape), list(picture.shape[:2])
        if given != wanted:
            raise ValueError(
                f"attribution has shape {given}; it must be that of the image, or {wanted}"
            )
    heat = heat if heat.ndim == 3 else heat[..., None]
    filled = np.nan_to_num(heat)
    together = (
        np.abs(np.hypot.reduce(filled, axis=-1)) if mode == "absolute" else filled.sum(axis=-1)
    )
    return picture, np.where(np.isnan(heat).all(axis=-1), np.nan, together)


def _picture(array: np.ndarray, name: str) -> np.ndarray:
    """The image as [H, W] or [H, W, 3] with values in [0, 1]."""
    shape = array.shape
    if len(shape) == 3 and _channels_first(shape):
        array = np.moveaxis(array, 0, -1)
    else:
        if not (len(shape) == 2 or (len(shape) == 3 and shape[-1] in (1, 3))):
            raise ValueError(
                f"{name} has shape {list(shape)}; it must be one image, [H, W], [C, H, W] or [H, "
                "W, C] with 1 or 3 channels; gallery takes several"
            )
    values = as_finite(array, name)
    if array.dtype == np.uint8:
        values = values / 255
    low, high = values.min(), values.max()
    if low < 0 or high > 1:
        values = (values - low) / (high - low) if high > low else np.full_like(values, 0.5)
    return values[..., 0] if values.ndim == 3 and values.shape[-1] == 1 else values


def _channels_first(shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and shape[0] in (1, 3)


def _limit(heat: np.ndarray) -> float:
    """The magnitude at which colours saturate; 0 for a map of zeros."""
    magnitudes = np.abs(heat[np.isfinite(heat) & (heat != 0)])
    return float(np.percentile(magnitudes, 98, method="higher")) if magnitudes.size else 0.0


def _colours(mode: str, scale: float) -> Style:
    """How imshow draws a map: pale or white is zero, in both modes, and darker is more.

    magma is perceptually uniform; its black end is left out, because over a grey image black would
    look like the image. Readers with red-green blindness see PuOr's two sides as clearly as others
    do, and neither side looks good or bad.
    """
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    top = scale or 1.0
    cmap = (
        colormaps["PuOr_r"]
        if mode == "signed"
        else ListedColormap(colormaps["magma_r"](np.linspace(0, 0.82, 256)))
    )
    return {
        "cmap": cmap,
        "vmin": -top if mode == "signed" else 0.0,
        "vmax": top,
        "interpolation": "nearest",
    }


def _draw_image(axis: Axes, picture: np.ndarray) -> None:
    axis.imshow(picture, cmap="gray", vmin=0, vmax=1, interpolation="nearest")


def _draw_overlay(
    axis: Axes, picture: np.ndarray, heat: np.ndarray, scale: float, colours: Style
) -> None:
    grey = picture.mean(axis=-1) if picture.ndim == 3 else picture
    axis.imshow(0.7 + 0.3 * grey, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    shown = np.clip(np.nan_to_num(heat), -scale, scale)
    axis.imshow(shown, alpha=0.8 * np.sqrt(np.abs(shown) / (scale or 1.0)), **colours)


def _bare(axis: Axes) -> None:
    """Remove the ticks; the frame stays, to mark where an image ends."""
    axis.set_xticks([])
    axis.set_yticks([])


# ------------------------------------------------------------------ the distribution of scores


def distribution(
    values: Values,
    *,
    groups: Iterable[Hashable] | None = None,
    threshold: float | None = None,
    threshold_label: str = "threshold",
    log: bool = True,
    label: str = "score",
    title: str | None = None,
) -> Figure:
    """The share of examples whose score is at most x: the empirical distribution, without bins to
    choose.

    Args:
        values: [n]. Infinite values, and zeros if ``log``, count as examples but have no place on
            the axis: the curve then starts above 0 or ends below 1, and the legend says how many
            there are.
        groups: n names; one curve for each group, distinguished by colour and line style.
        threshold: A score to mark, such as the error of guessing without the model; the legend says
            which share of all examples lies at or below it.
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
    if len(members) != len(scores):
        raise ValueError(
            f"groups has {len(members)} entries for {len(scores)} values; give one each"
        )
    place = "has no place on a logarithmic axis; pass log=False"
    if log and not bool((scores >= 0).all()):
        raise ValueError(f"values holds {scores.min():g}, which {place}")
    if log and threshold is not None and not threshold > 0:
        raise ValueError(f"threshold={threshold} {place}")
    zeros = int((scores == 0).sum())
    if not drawable.any():
        raise ValueError(
            f"no value can be drawn: {zeros} are zero (log=False draws them), others infinite"
        )

    kinds: list[Any] = list(dict.fromkeys(members))
    with contextlib.suppress(TypeError):  # sorted if they can be compared
        kinds.sort()
    most = len(COLOURS) * len(STYLES)
    if not len(kinds) <= most:
        raise ValueError(
            f"{len(kinds)} groups are too many for distinct styles; merge them to {most} or fewer"
        )

    figure = new_figure(6.4, 4.0, "constrained")
    axis = figure.subplots()
    entries: list[tuple[Artist, str]] = []
    ends = float(scores[drawable].min()), float(scores[drawable].max())
    for i, kind in enumerate(kinds):
        own = np.sort(scores[[member == kind for member in members]])
        style = {"color": COLOURS[i % len(COLOURS)], "linestyle": STYLES[i % len(STYLES)]}
        curve, notes = _curve(axis, own, ends, log, style)
        entries.append((curve, f"{kind} ({notes})"))
    if threshold is not None:
        line = axis.axvline(threshold, color=NEUTRAL, linewidth=1.2, linestyle=(0, (1, 1)))
        at_most = 100 * float((scores <= threshold).mean())
        entries.append(
            (line, f"{threshold_label} {plain_number(threshold)} ({at_most:.3g} % at or below)")
        )

    if log:
        axis.set_xscale("log")
    axis.set_ylim(0, 1.02)
    axis.set(xlabel=label, ylabel="share of examples at or below")
    axis.spines[["top", "right"]].set_visible(False)
    _draw_legend(figure, entries)
    if title is not None:
        axis.set_title(title, loc="left")
    return figure


def _curve(
    axis: Axes, scores: np.ndarray, ends: tuple[float, float], log: bool, style: Style
) -> tuple[Artist, str]:
    """Draw the distribution of ascending scores from end to end of the axis.

    Return the curve and its legend notes.
    """
    inside = np.isfinite(scores) & ((scores > 0) | (not log))
    # left and right of the axis
    below, above = int((scores < ends[0]).sum()), int(np.isposinf(scores).sum())

    # from one end of the axis to the other, so all groups' curves have the same length
    x = np.concatenate([ends[:1], scores[inside], ends[1:]])
    y = np.append(np.arange(below, below + inside.sum() + 1), below + inside.sum()) / len(scores)
    curve = axis.step(x, y, where="post", linewidth=1.8, **style)[0]
    notes = [f"n = {len(scores)}"]
    notes += [f"{below} at {'zero' if log else '−∞'}"] * (below > 0)
    notes += [f"{above} at ∞"] * (above > 0)
    return curve, ", ".join(notes)


def _draw_legend(figure: Figure, entries: list[tuple[Artist, str]]) -> None:
    handles, numbers = [handle for handle, _ in entries], [str(i) for i in range(len(entries))]
    place: Any = "outside right upper" if len(entries) > 4 else "outside upper left"
    legend = figure.legend(handles, numbers, loc=place, frameon=False, fontsize="small")
    for text, (_, content) in zip(legend.get_texts(), entries, strict=True):
        text.set_parse_math(False)
        # set afterwards: matplotlib hides labels that start with an underscore
        text.set_text(content)
