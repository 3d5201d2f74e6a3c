"""What a bound would look like: pictures of estimates, values with their ranges, tokens with their weights.

Nothing of it is part of a redacted report: a public context has no field for it.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from dataclasses import dataclass

import numpy as np

from torchfil.report.summary import Report
from torchfil.report.svg import Row
from torchfil.run.baselines import is_told, public_classes, ratio_to_blind_guess
from torchfil.run.saved_run import SavedRun

PAIRS, PICTURED, NEAREST = 5, 24, 50
ORANGE, PURPLE = np.array([179, 88, 6]), np.array([84, 39, 136])  # the ends of ColorBrewer's PuOr
NUMBERED = 3  # tokens of a text, by their share


@dataclass(frozen=True)
class Pictured:
    """An example as pictures.

    Attributes:
        row: Its place in the run; the page's script opens its details from it.
        id: As saved.
        typical: Whether it is one of the typical ones.
        pictures: The example and its PLIS laid over it, where that was saved, as data addresses.
        estimates: An unbiased estimate at the bound, the same with beliefs, a blind guess: address and error each;
            empty where they were not saved.
    """

    row: int
    id: str
    typical: bool
    pictures: list[str]
    estimates: list[tuple[str, float]]


def pictures_of(run: SavedRun, ratios: np.ndarray | None) -> list[Pictured]:
    """The saved pictures, the most exposed first and the typical ones last; untold examples are left out."""
    saved = run.pictures
    if saved is None:
        return []
    told, estimates, errors = is_told(run), saved.estimates, saved.errors
    exposure = np.asarray(run.column("mse_bound") if ratios is None else ratios, dtype=np.float64)
    few = len(saved.rows) - saved.typical
    first = sorted(range(few), key=lambda place: exposure[saved.rows[place]])
    found = list[Pictured]()
    for place in [*first, *range(few, len(saved.rows))]:
        row = int(saved.rows[place])
        if not told[row] or len(found) == PICTURED:
            continue
        both = () if estimates is None or errors is None else (estimates[place], errors[place].tolist())
        drawn = [(as_data_url(each), error) for each, error in zip(*both, strict=True)]
        if drawn and drawn[1][1] > drawn[2][1]:  # one draw is worse than its beliefs alone, on which one can fall back
            drawn[1] = drawn[2]
        image = saved.images[place]
        shown = [image] if saved.maps is None else [image, overlay(image, saved.maps[place])]
        found.append(Pictured(row, str(run.ids[row]), place >= few, list(map(as_data_url, shown)), drawn))
    return found


@dataclass(frozen=True)
class ClosestValue:
    """An attribute of an example: how closely it can be estimated at least (lower end), and a blind guess's error.

    ``value`` is None where the record was not saved; ``ends`` are those of the attribute over all examples.
    """

    row: int
    id: str
    attribute: str
    unit: str
    error: float
    blind: float
    value: float | None
    ends: tuple[float, float]

    @property
    def ratio(self) -> float:
        """The error over a blind guess's."""
        return float(ratio_to_blind_guess(self.error, self.blind))

    @property
    def drawn(self) -> Row | None:
        """Value ± 1.96 · error: 95 % of an unbiased attacker's estimates, on the scale of all examples."""
        first, last = self.ends
        if self.value is None or not first < last:
            return None
        ends = self.value - 1.96 * self.error, self.value + 1.96 * self.error
        digits = max(0, -math.floor(math.log10(max(self.error, 1e-6))))
        low, high = (f"{end:,.{digits}f}".replace("-", "−") for end in ends)
        told = f"{low} to {high} {self.unit}".rstrip() if self.ratio < 1 else "beyond a blind guess"
        value, start, end = ((min(max(each, first), last) - first) / (last - first) for each in (self.value, *ends))
        return Row(f"{self.id}, {self.attribute}", value, start, end, "estimate", told)


def closest_values(report: Report, nearest: np.ndarray | None) -> list[ClosestValue]:
    """The pair of example and attribute with the smallest ratio to a blind guess's error, then others, ascending.

    The others are of the records that the run kept, so that they can be drawn; of all examples where it kept none.
    Categories have no ± and are left out.

    Args:
        report: The material.
        nearest: The smallest ratio of each example, [n]; None: no blind guess is known.
    """
    run = report.run
    if run is None or run.attributes is None or nearest is None:
        return []
    records, names = run.records, run.attributes.names
    kept = {} if records is None else dict(zip(records.rows.tolist(), records.values, strict=True))
    rows = np.union1d(np.argsort(nearest, kind="stable")[:NEAREST], np.asarray(list(kept), dtype=np.int64))
    rows = rows[is_told(run)[rows]]

    # of these rows every attribute beside its own blind guess, [m, k]
    errors = np.asarray(run.attributes.shown[rows], dtype=np.float64)
    every = report.blind_errors
    blind = every[public_classes(run)[rows]] if len(every) > 1 else np.repeat(every, len(rows), axis=0)
    ratios, spread = ratio_to_blind_guess(errors, blind), None if run.baselines is None else run.baselines.attributes
    if run.baselines is not None:
        ratios[:, [name in run.baselines.levels for name in names]] = math.nan

    found = list[ClosestValue]()
    for flat in np.argsort(np.where(np.isfinite(ratios), ratios, math.inf), axis=None, kind="stable").tolist():
        i, j = divmod(flat, len(names))
        row, unit = int(rows[i]), run.attributes.units[j]
        value = float(kept[row][j]) if row in kept else math.nan
        if not math.isfinite(ratios[i, j]) or len(found) == PAIRS:
            break
        if found and kept and math.isnan(value):
            continue
        ends = (0.0, 0.0) if spread is None else (float(spread.low[j]), float(spread.high[j]))
        numbers = float(errors[i, j]), float(blind[i, j]), None if math.isnan(value) else value
        found.append(ClosestValue(row, str(run.ids[row]), names[j], unit, *numbers, ends))
    return found


@dataclass(frozen=True)
class ShownToken:
    """A token of a text: its size, its share of the text, how strong its ground is; its rank, or 0."""

    word: str
    size: float
    share: float
    strength: float
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
    largest_first = np.argsort(-shares, kind="stable")[:NUMBERED].tolist()
    ranks = {place: rank for rank, place in enumerate(largest_first, start=1) if shares[place] > 0}
    return [
        ShownToken(word.strip() or "␣", float(sizes[place]), share, share / largest, ranks.get(place, 0))
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
