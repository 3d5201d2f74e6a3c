"""The examples at both ends: pictures with their PLIS, or rows of a table. Never part of a redacted report."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from torchfil.report.page.context import Report, paragraph
from torchfil.report.page.html import Markup, join, number, plus_minus, tag
from torchfil.report.page.png import as_data_url, overlay, thumbnail
from torchfil.report.page.wording import is_linear, origin, tabled_run
from torchfil.run.baselines import LOWER_BOUND, NOT_MEASURED, status_of
from torchfil.run.saved_run import SavedRun

__all__ = ["render", "shown_rows"]

CARDS, LINES, NAMED, SAMPLE = 12, 8, 4, 10_000
PLIS = (
    " The second picture shows which pixels drive the privacy loss (PLIS): orange raises it, purple lowers it, "
    "each on its own scale."
)
LUCK = (
    "They look safe partly by luck. Each bound is an estimate from one run, and the largest of many estimates are "
    "those that chance has moved up: fewer draws than usual, or small probes. Read the low end, and do not call an "
    "example safe because it stands here."
)


def render(report: Report) -> Markup | None:
    """Cards of the pictured examples, otherwise tables, each opening the example's details."""
    run = tabled_run(report)
    if run is None:
        return None
    status = status_of(run)
    rank = _ranks(run, status)
    if not rank.any():
        return None
    pictured = {} if run.pictures is None else {int(row): i for i, row in enumerate(run.pictures.rows) if rank[row] > 0}
    most, least = _ends(rank, pictured)

    draw = _cards if pictured else _lines
    maps = run.pictures is not None and run.pictures.maps is not None
    return join(
        paragraph(
            f"Ranked by their MSE bound, {origin(report)}, among {rank.max():,} measured examples; select one "
            "for its details.",
            PLIS if maps else "",
        ),
        tag("h3", "Most exposed"),
        draw(run, most, rank, pictured, status),
        [
            tag("h3", "Least exposed"),
            None if is_linear(report) else paragraph(LUCK),
            draw(run, least, rank, pictured, status),
        ]
        if least
        else None,
    )


def shown_rows(run: SavedRun) -> list[int]:
    """The examples that the section shows."""
    rank = _ranks(run, status_of(run))
    pictured = [] if run.pictures is None else [int(row) for row in run.pictures.rows if rank[row] > 0]
    most, least = _ends(rank, pictured)
    return most + least


def _ranks(run: SavedRun, status: np.ndarray) -> np.ndarray:
    """1 for the most exposed of all measured examples and so on, whether they are shown or not, [n]; others have 0."""
    measured = np.flatnonzero(status != NOT_MEASURED)
    order = measured[np.argsort(np.asarray(run.columns["mse_bound"])[measured], kind="stable")]
    rank = np.zeros(len(run), dtype=np.int64)
    rank[order] = np.arange(1, len(order) + 1)
    return rank


def _ends(rank: np.ndarray, pictured: Collection[int]) -> tuple[list[int], list[int]]:
    """The most exposed, and the least exposed from the end: the same number at both, and nobody twice."""
    if pictured:
        rows = np.asarray(sorted(pictured, key=lambda row: rank[row]))
    else:
        rows = np.flatnonzero(rank > 0)
        rows = rows[np.argsort(rank[rows])]
    most = min(CARDS if pictured else LINES, (len(rows) + 1) // 2)
    return rows[:most].tolist(), rows[most:][::-1][:most].tolist()


def _cards(run: SavedRun, rows: list[int], rank: np.ndarray, pictured: dict[int, int], status: np.ndarray) -> Markup:
    assert run.pictures is not None
    cards, low = [], run.columns.get("mse_bound_low")
    for row in rows:
        image = thumbnail(run.pictures.images[pictured[row]])
        pictures = [tag("img", src=as_data_url(image), alt="", class_="picture")]
        if run.pictures.maps is not None:
            heat = thumbnail(run.pictures.maps[pictured[row]])
            pictures.append(tag("img", src=as_data_url(overlay(image, heat)), alt="", class_="picture"))

        # the page's script opens an example's details from data-row
        button = tag(
            "button",
            tag("span", pictures, class_="pictures"),
            tag("span", str(run.ids[row]), class_="id"),
            tag("span", f"MSE bound {number(float(run.columns['mse_bound'][row]))}", class_="bound"),
            [tag("span", f"low end {number(float(low[row]))}", class_="bound")] if low is not None else None,
            tag("span", f"rank {rank[row]:,}{_in_part(status, row)}", class_="rank"),
            type="button",
            class_="card",
            data_row=row,
            aria_haspopup="dialog",
        )
        cards.append(tag("li", button))
    return tag("ul", cards, class_="cards")


def _lines(run: SavedRun, rows: list[int], rank: np.ndarray, pictured: dict[int, int], status: np.ndarray) -> Markup:
    # errors of different units are compared through their medians, for which 10,000 examples are enough
    typical = np.median(np.asarray(run.attributes.shown[:SAMPLE], dtype=np.float64), axis=0) if run.attributes else None
    lines, low = [], run.columns.get("mse_bound_low")
    for row in rows:
        name = tag("button", str(run.ids[row]), type="button", class_="link", data_row=row, aria_haspopup="dialog")
        cells = [
            tag("td", f"{rank[row]:,}", class_="rank"),
            tag("th", name, scope="row"),
            tag("td", number(float(run.columns["mse_bound"][row])), _in_part(status, row)),
            tag("td", number(float(low[row]))) if low is not None else None,
            tag("td", _closest(run, row, typical), class_="words") if typical is not None else None,
        ]
        lines.append(tag("tr", cells))

    closest = tag("th", "unbiased guesses are off by at least, on average", scope="col", class_="words")
    head = tag(
        "tr",
        tag("th", "Rank", scope="col", class_="rank"),
        tag("th", "Example", scope="col"),
        tag("th", "MSE bound", scope="col"),
        tag("th", "its low end", scope="col") if low is not None else None,
        closest if typical is not None else None,
    )
    return tag("div", tag("table", tag("thead", head), tag("tbody", lines), class_="plain ranked"), class_="scroll")


def _in_part(status: np.ndarray, row: int) -> str:
    return ", measured in part" if status[row] == LOWER_BOUND else ""


def _closest(run: SavedRun, row: int, typical: np.ndarray) -> str:
    """The attributes with the least error relative to their median over examples, in their own unit."""
    assert run.attributes is not None
    error = np.asarray(run.attributes.shown[row], dtype=np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        relative = error / typical
    order = [int(j) for j in np.argsort(relative) if np.isfinite(error[j])][:NAMED]
    units = run.attributes.units
    return "; ".join(f"{run.attributes.names[j]} {plus_minus(error[j], units[j])}" for j in order) or "nothing"
