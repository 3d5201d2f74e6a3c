"""The table of examples: the most exposed, as JSON that assets/page.js draws. Never part of a redacted report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from torchfil.gate.gate import concerned
from torchfil.report.context import Report
from torchfil.run.baselines import BLANK_WHERE_UNKNOWN, NOT_MEASURED, status_of
from torchfil.run.saved_run import SavedRun
from torchfil.run.statistics import is_spared

__all__ = ["Table", "table_of"]

MOST_ROWS = 10_000  # of a run with more examples the page has the most exposed
MOST_CELLS = 500_000  # of attributes, so that the page stays small
INFINITE = 1e300  # what JSON has in its stead; the page's script shows it as ∞


@dataclass(frozen=True)
class Column:
    """A column: its name in the run, heading, meaning; whether narrow screens show it, or only an example's details."""

    key: str
    label: str
    meaning: str
    narrow: bool = False
    detail: bool = False


COLUMNS = (
    Column(
        "mse_bound",
        "MSE bound",
        "an unbiased guess of the inputs errs by at least this on average (mean square per input)",
        narrow=True,
    ),
    Column("fil", "FIL η̄", "Fisher information loss; larger is more exposed", narrow=True),
    Column("mse_bound_low", "lower end", "of the 95 % interval of the MSE bound: the number to quote"),
    Column("epsilon", "individual ε", "ε of this example for this run’s outputs; an estimate, no guarantee"),
    Column("clip_weight", "weight", "ω, by which the example’s clipped gradient was multiplied; below 1 it was spared"),
    Column("sample_weight", "weight", "ω of the example in the fit, of mean 1; chosen so that examples leak alike"),
    Column("participations", "drawn", "how many batches held the example"),
    Column("fil_error", "error", "standard error of FIL from probes and skipped steps alone"),
    Column("sampling_error", "sampling", "how much the random choice of batches could change FIL"),
    Column("fil_before", "FIL before", "in the run without weights that the weights were chosen from", detail=True),
    Column("missed", "missed", "participations that were not measured", detail=True),
    Column("squared_norm", "Σ‖g̃‖²", "sum of squared clipped gradient norms", detail=True),
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
