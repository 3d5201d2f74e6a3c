"""The examples that a confidential page names: at both ends of the ranking, spared, and text by text.

Nothing of it is part of a redacted report: a public context has no field for it.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from torchfil.gate.gate import concerned
from torchfil.report.formats import number, plus_minus
from torchfil.report.summary import Report
from torchfil.run.baselines import BLANK_WHERE_UNKNOWN, LOWER_BOUND, NOT_MEASURED, status_of
from torchfil.run.saved_run import SavedRun
from torchfil.run.statistics import is_spared

CARDS, LINES, SPARED, NAMED, SAMPLE = 12, 8, 20, 4, 10_000
ORANGE, PURPLE = np.array([179, 88, 6]), np.array([84, 39, 136])  # the ends of ColorBrewer's PuOr
NUMBERED = 3  # tokens of a text, by their share
UNDERLINES = ((0.3, 3), (0.15, 2), (0.05, 1))  # from this share on, so many pixels of a line under the token


@dataclass(frozen=True)
class Named:
    """An example with its id.

    Attributes:
        row: Its place in the run; the page's script opens its details from it.
        id: As saved.
        rank: 1 for the most exposed of all measured examples.
        in_part: Whether some of its steps were not measured.
        bound: Its MSE bound.
        low: The lower end of the bound; None where there is none.
        pictures: Its picture, and its PLIS laid over it, as data addresses.
        closest: The attributes that can be guessed most closely; None where none were tracked.
    """

    row: int
    id: str
    rank: int
    in_part: bool
    bound: float
    low: float | None
    pictures: list[str]
    closest: str | None


@dataclass(frozen=True)
class Ends:
    """The most exposed examples, and the least exposed from the end; with pictures, and PLIS, where they were saved."""

    most: list[Named]
    least: list[Named]
    measured: int
    pictured: bool
    with_maps: bool


def most_and_least_exposed(run: SavedRun) -> Ends:
    """Both ends of the ranking by MSE bound; the most exposed alone where they were pictured."""
    status, pictures = status_of(run), run.pictures
    measured = np.flatnonzero(status != NOT_MEASURED)
    order = measured[np.argsort(np.asarray(run.columns["mse_bound"])[measured], kind="stable")]
    rank = np.zeros(len(run), dtype=np.int64)
    rank[order] = np.arange(1, len(order) + 1)

    # the same number at both ends, and nobody twice; pictures are of the most exposed and of typical ones
    shown = np.zeros(0, np.int64) if pictures is None else pictures.rows[: len(pictures.rows) - pictures.typical]
    pictured = {int(row): i for i, row in enumerate(shown) if rank[row] > 0}
    rows = np.asarray(sorted(pictured, key=lambda row: rank[row])[:CARDS]) if pictured else order
    most = len(rows) if pictured else min(LINES, (len(rows) + 1) // 2)

    # errors of different units are compared through their medians, for which 10,000 examples are enough
    typical = np.median(np.asarray(run.attributes.shown[:SAMPLE], dtype=np.float64), axis=0) if run.attributes else None
    low = run.columns.get("mse_bound_low")

    def named(row: int) -> Named:
        return Named(
            row,
            str(run.ids[row]),
            int(rank[row]),
            bool(status[row] == LOWER_BOUND),
            float(run.columns["mse_bound"][row]),
            None if low is None else float(low[row]),
            _pictures(run, pictured[row]) if pictured else [],
            None if typical is None else _closest(run, row, typical),
        )

    maps = pictures is not None and pictures.maps is not None
    first, last = ([named(row) for row in some.tolist()] for some in (rows[:most], rows[most:][::-1][:most]))
    return Ends(first, last, len(order), bool(pictured), maps)


def _closest(run: SavedRun, row: int, typical: np.ndarray) -> str:
    """The attributes with the least error relative to their median over examples, in their own unit."""
    assert run.attributes is not None
    error, units = np.asarray(run.attributes.shown[row], dtype=np.float64), run.attributes.units
    with np.errstate(invalid="ignore", divide="ignore"):
        order = [int(j) for j in np.argsort(error / typical) if np.isfinite(error[j])][:NAMED]
    return "; ".join(f"{run.attributes.names[j]} {plus_minus(error[j], units[j])}" for j in order) or "nothing"


@dataclass(frozen=True)
class Spared:
    """Those with the smallest clip weights: the table's columns, (row, id, cells) each, and how many more there are."""

    columns: list[str]
    rows: list[tuple[int, str, list[str]]]
    more: int


def spared_examples(run: SavedRun) -> Spared:
    """Up to 20 examples with a clip weight below 1."""
    if "clip_weight" not in run.columns:
        return Spared([], [], 0)
    weights, status = np.asarray(run.clip_weights, dtype=np.float64), status_of(run)
    spared = np.flatnonzero(weights < 1)

    # of equal weights, those that leak most come first, and what was not measured last
    fil = np.where(status == NOT_MEASURED, -math.inf, np.asarray(run.columns["fil"], dtype=np.float64))
    rows = spared[np.lexsort((-fil[spared], weights[spared]))][:SPARED].tolist()
    labels = {
        "clip_weight": "Weight ω",
        "fil_before": "FIL before",
        "fil": "FIL η̄",
        "mse_bound": "MSE bound",
        "mse_bound_low": "its lower end",
        "epsilon": "individual ε",
    }
    columns = [name for name in labels if name in run.columns]

    def cell(name: str, row: int) -> str:
        if status[row] == NOT_MEASURED and name in BLANK_WHERE_UNKNOWN:
            return "not measured"
        in_part = ", measured in part" if status[row] == LOWER_BOUND and name == "mse_bound" else ""
        return number(float(run.columns[name][row]), even=True) + in_part

    cells = [(row, str(run.ids[row]), [cell(name, row) for name in columns]) for row in rows]
    return Spared([labels[name] for name in columns], cells, len(spared) - len(rows))


@dataclass(frozen=True)
class ShownToken:
    """A token of a text: its size, its share of the text, how strong its ground and its line are; its rank, or 0."""

    word: str
    size: float
    share: float
    strength: float
    line: int
    rank: int


def tokens_of(run: SavedRun) -> list[tuple[str, dict[str, list[ShownToken]]]]:
    """Each saved text by id: its tokens by their share of its FIL and, where it was saved, of its PLIS."""
    if run.texts is None:
        return []
    maps = {"FIL": run.texts.fil, **({} if run.texts.plis is None else {"PLIS": run.texts.plis})}
    return [
        (str(run.ids[row]), {name: _tokens(words, sizes[place][: len(words)]) for name, sizes in maps.items()})
        for place, (row, words) in enumerate(zip(run.texts.rows, run.texts.words, strict=True))
    ]


def _tokens(words: list[str], sizes: np.ndarray) -> list[ShownToken]:
    """Tokens without the blanks around them, and a sign for one that is nothing else."""
    shares = shares_of(sizes)
    largest = float(shares.max(initial=0.0)) or 1.0
    numbered = [int(place) for place in np.argsort(-shares, kind="stable")[:NUMBERED] if shares[place] > 0]
    return [
        ShownToken(
            word.strip() or "␣",
            float(sizes[place]),
            share,
            share / largest,
            next((width for least, width in UNDERLINES if share >= least), 0),
            numbered.index(place) + 1 if place in numbered else 0,
        )
        for place, (word, share) in enumerate(zip(words, shares.tolist(), strict=True))
    ]


def shares_of(sizes: np.ndarray) -> np.ndarray:
    """s_t² / Σ s², [T]: of Fisher information for η_t, of ‖PLIS‖² for PLIS; 0 where nothing is known.

    Example:
        >>> shares_of(np.array([3.0, 4.0, np.nan])).tolist()
        [0.36, 0.64, 0.0]
    """
    squares = np.nan_to_num(np.asarray(sizes, dtype=np.float64)) ** 2
    total = squares.sum()
    return squares / total if total > 0 else squares


def _pictures(run: SavedRun, place: int) -> list[str]:
    """A saved picture and, where it has a map, the map laid over it."""
    assert run.pictures is not None
    image = thumbnail(run.pictures.images[place])
    if run.pictures.maps is None:
        return [as_data_url(image)]
    return [as_data_url(image), as_data_url(overlay(image, thumbnail(run.pictures.maps[place])))]


def as_data_url(image: np.ndarray) -> str:
    """uint8 [H, W] or [H, W, 3] as a PNG inside an address."""
    height, width = image.shape[:2]
    rows = np.ascontiguousarray(image).reshape(height, -1)
    raw = np.concatenate([np.zeros((height, 1), np.uint8), rows], axis=1).tobytes()
    head = struct.pack(">IIBBBBB", width, height, 8, 2 if image.ndim == 3 else 0, 0, 0, 0)
    parts = [(b"IHDR", head), (b"IDAT", zlib.compress(raw, 9)), (b"IEND", b"")]
    chunks = b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in parts
    )
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + chunks).decode("ascii")


def overlay(image: np.ndarray, attribution: np.ndarray) -> np.ndarray:
    """A signed map over a paled image: orange positive, purple negative, white nothing; [H, W, 3] uint8.

    Colours saturate at the 98th percentile of the map's own magnitudes.
    """
    grey = image.mean(axis=-1) if image.ndim == 3 else image.astype(np.float64)
    base = (0.7 * 255 + 0.3 * grey)[..., None]
    heat = np.nan_to_num(np.asarray(attribution, dtype=np.float64))
    magnitudes = np.abs(heat[heat != 0])
    scale = np.percentile(magnitudes, 98) if magnitudes.size else 1.0
    strength = np.sqrt(np.clip(np.abs(heat) / scale, 0, 1))[..., None]
    colour = np.where(heat[..., None] >= 0, ORANGE, PURPLE)
    return np.round((1 - strength) * base + strength * colour).astype(np.uint8)


def thumbnail(image: np.ndarray, side: int = 128) -> np.ndarray:
    """The picture or map, averaged over square blocks until no side exceeds ``side``; its dtype stays."""
    block = -(-max(image.shape[:2]) // side)
    if block <= 1:
        return image
    height, width = (max(size // block, 1) for size in image.shape[:2])
    cut = image[: height * block, : width * block].astype(np.float64)
    blocks = cut.reshape(height, cut.shape[0] // height, width, cut.shape[1] // width, *image.shape[2:])
    mean = blocks.mean(axis=(1, 3))
    return (np.round(mean) if image.dtype == np.uint8 else mean).astype(image.dtype)


# ---------------------------------------------------------------------- the table of all examples


MOST_ROWS = 10_000  # of a run with more examples the page has the most exposed
MOST_CELLS = 500_000  # of attributes, so that the page stays small
INFINITE = 1e300  # what JSON has in its stead; the page's script shows it as ∞


@dataclass(frozen=True)
class TableColumn:
    """A column: its name in the run, heading, meaning; whether narrow screens show it, or only an example's details."""

    key: str
    label: str
    meaning: str
    narrow: bool = False
    detail: bool = False


COLUMNS = (
    TableColumn(
        "mse_bound",
        "MSE bound",
        "an unbiased guess of the inputs errs by at least this on average (mean square per input)",
        narrow=True,
    ),
    TableColumn("fil", "FIL η̄", "Fisher information loss; larger is more exposed", narrow=True),
    TableColumn("mse_bound_low", "lower end", "of the 95 % interval of the MSE bound: the number to quote"),
    TableColumn("epsilon", "individual ε", "ε of this example for this run’s outputs; an estimate, no guarantee"),
    TableColumn("clip_weight", "weight", "ω, by which the example’s clipped gradient was multiplied"),
    TableColumn("sample_weight", "weight", "ω of the example in the fit, of mean 1, so that examples leak alike"),
    TableColumn("participations", "drawn", "how many batches held the example"),
    TableColumn("fil_error", "error", "standard error of FIL from probes and skipped steps alone"),
    TableColumn("sampling_error", "sampling", "how much the random choice of batches could change FIL"),
    TableColumn("fil_before", "FIL before", "in the run without weights, from which weights were chosen", detail=True),
    TableColumn("missed", "missed", "participations that were not measured", detail=True),
    TableColumn("squared_norm", "Σ‖g̃‖²", "sum of squared clipped gradient norms", detail=True),
)


@dataclass(frozen=True)
class Table:
    """What the page's script draws.

    Attributes:
        data: The columns, as JSON takes them.
        rows: How many examples it has.
        examples: How many the run has.
        measured: How many of them were measured.
        left_out: The attributes that would have made the page too large.
    """

    data: dict[str, Any]
    rows: int
    examples: int
    measured: int
    left_out: list[str]


def table_of(report: Report, named: Sequence[int]) -> Table:
    """The most exposed examples and those that the page names, with all that the run says of each."""
    assert report.run is not None
    run, status = report.tabled_run(), status_of(report.run)
    measured = np.flatnonzero(status != NOT_MEASURED)
    fil = np.asarray(run.columns["fil"], dtype=np.float64)
    ranked = np.sort(fil[measured])
    places = np.arange(len(run))
    if len(run) > MOST_ROWS:
        worst = measured[np.argsort(-fil[measured], kind="stable")[:MOST_ROWS]]
        places = np.union1d(worst, np.asarray(named, dtype=np.int64))
        run = run.take(places)

    # who is exposed, whom a broken rule concerns, who was spared; without what nobody can say
    marks = {}
    if report.num_exposed is not None:
        marks["exposed"] = report.exposed_rows
    if report.verdicts is not None:
        marks["broken"] = np.zeros(len(report.run), dtype=bool)
        marks["broken"][concerned([verdict for verdict in report.verdicts if not verdict.passed])] = True
    if "clip_weight" in report.run.columns:
        marks["spared"] = is_spared(report.run)

    own = status[places]
    attributes, left_out = _attributes(run, own == NOT_MEASURED)
    data = {
        "ids": np.asarray(run.ids).astype(str).tolist(),
        "places": None if len(places) == len(report.run) else places.tolist(),
        "status": own.tolist(),
        "rank": (1 + len(ranked) - np.searchsorted(ranked, fil[places], side="right")).tolist(),
        "measured": len(measured),
        "marks": {name: chosen[places].astype(int).tolist() for name, chosen in marks.items()},
        "columns": _columns(run, own == NOT_MEASURED, report.origin),
        "groups": _groups(run),
        "attributes": attributes,
        "lower_ends": run.attributes is not None and run.attributes.error_low is not None,
        "attacks": [
            {
                "name": attack.name,
                "rows": attack.rows.tolist(),
                "predicted": _json_numbers(attack.predicted),
                "achieved": _json_numbers(attack.achieved),
            }
            for attack in run.attacks
        ],
        "origin": report.origin,
        "exact": report.is_linear,
    }
    return Table(data, len(run), len(report.run), len(measured), left_out)


def _columns(run: SavedRun, unknown: np.ndarray, origin: str) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    for column in COLUMNS:
        values = run.columns.get(column.key)
        if values is None or (column.key == "missed" and not values.any()):
            continue
        if column.key in BLANK_WHERE_UNKNOWN:
            values = np.where(unknown, np.nan, values.astype(np.float64))
        entry = asdict(column) | {"whole": values.dtype.kind in "biu", "values": _json_numbers(values)}
        if column.key == "mse_bound":
            entry["meaning"] += f"; {origin}"
        entries.append(entry)
    return entries


def _groups(run: SavedRun) -> list[dict[str, Any]]:
    entries = []
    for name in run.groups:
        levels, codes = run.coded_group(name)
        entries.append({"name": name, "levels": [str(level) for level in levels], "codes": codes.tolist()})
    return entries


def _attributes(run: SavedRun, unknown: np.ndarray) -> tuple[list[dict[str, Any]], list[str]]:
    """The first attributes that fit, and the names of the others."""
    if run.attributes is None:
        return [], []
    fit = MOST_CELLS // max(len(run), 1)
    entries = []
    for j, (name, unit) in enumerate(zip(run.attributes.names[:fit], run.attributes.units[:fit], strict=True)):
        values = np.where(unknown, np.nan, np.asarray(run.attributes.shown[:, j], dtype=np.float64))
        entries.append({"name": name, "unit": unit, "values": _json_numbers(values, 4)})
    return entries, run.attributes.names[fit:]


def _json_numbers(values: np.ndarray, digits: int = 6) -> list[float | int | None]:
    """Numbers as JSON has them: NaN is null, infinity 1e300."""
    if values.dtype.kind in "biu":
        return list(map(int, values.tolist()))
    finite = np.clip(np.asarray(values, dtype=np.float64), -INFINITE, INFINITE)
    return [None if math.isnan(value) else float(f"{value:.{digits}g}") for value in finite.tolist()]
