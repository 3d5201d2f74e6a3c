"""Measure a row and keep its record: one JSON file per row, written when the row is done."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from benchmarks.measuring import Json, attempt
from reproduction.rows import Row, Run, verdict_of
from torchfil import __version__
from torchfil.utils.files import replaced_when_complete

__all__ = [
    "Record",
    "earlier_record",
    "machine",
    "measured",
    "read_records",
    "record_path",
    "run_rows",
    "write_json",
]

Record = Json
PACKAGES = ("torch", "opacus", "numpy", "scikit-learn", "torchmetrics")


def run_rows(rows: Sequence[Row], run: Run, *, again: bool = False) -> list[Record]:
    """Measure rows without a record, one after the other.

    A failed row keeps its reason and is tried again next time.

    Args:
        rows: The rows, in this order.
        run: The setting; records go to ``run.out / "rows"``.
        again: Whether to measure rows with a record again.
    """
    records = []
    for row in rows:
        path = record_path(run.out, row.id)
        known = _read(path)
        if known and "failed" not in known and not again:
            print(f"{row.id}: done before ({known['verdict']})", flush=True)
            records.append(known)
            continue
        print(f"{row.id}: about {row.minutes:g} min", flush=True)
        record = measured(row, run)
        write_json(record, path)
        records.append(record)
        told = record.get("failed") or f"{record['verdict']}. {record['here']}"
        print(f"{row.id}: {record['seconds']:.0f} s. {told}", flush=True)
    return records


def measured(row: Row, run: Run) -> Record:
    """Run one row; return its result, time, machine and date."""
    measure = row.measure
    if measure is None:
        raise ValueError(f"row {row.id!r} has nothing to measure; {row.reason}")

    # Both clocks: on a busy machine, compare processor time.
    run.out.mkdir(parents=True, exist_ok=True)
    missing = run.missing(row.needs)
    began, processor = time.perf_counter(), time.process_time()
    outcome = attempt(lambda: {"outcome": measure(run)})

    record: Record = {
        "id": row.id,
        "seconds": time.perf_counter() - began,
        "processor_seconds": time.process_time() - processor,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "machine": machine(run.device if row.gpu else "cpu"),
        "made_up": missing,
    }
    if "failed" in outcome:
        return record | outcome

    checks = outcome["outcome"].checks
    return record | {
        "verdict": verdict_of(checks, stand_in=bool(row.stand_in or missing)),
        "here": outcome["outcome"].here,
        "checks": [asdict(check) for check in checks],
        "values": dict(outcome["outcome"].values),
        "pictures": list(outcome["outcome"].pictures),
    }


def earlier_record(row: Row) -> Record:
    """The record of an earlier result: without a time, but with the page that documents it."""
    earlier = row.earlier
    if earlier is None:
        raise ValueError(f"row {row.id!r} has no earlier result")
    return {
        "id": row.id,
        "verdict": verdict_of(earlier.checks, stand_in=bool(row.stand_in)),
        "here": earlier.here,
        "checks": [asdict(check) for check in earlier.checks],
        "machine": {"device": earlier.device},
        "earlier": {"source": earlier.source, "command": earlier.command},
        "made_up": [],
        "pictures": [],
    }


def machine(device: str) -> Json:
    """The machine and the versions of the measurement."""
    name = (
        torch.cuda.get_device_name(device)
        if device.startswith("cuda")
        else f"{platform.machine()} CPU"
    )
    return {
        "device": name,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torchfil": __version__,
        **{package: _version(package) for package in PACKAGES},
    }


def record_path(out: Path, row_id: str) -> Path:
    """The file of one row."""
    return out / "rows" / f"{row_id}.json"


def read_records(out: Path, rows: Iterable[Row]) -> dict[str, Record]:
    """The records so far, without failed rows."""
    found = {row.id: _read(record_path(out, row.id)) for row in rows}
    return {name: record for name, record in found.items() if record and "failed" not in record}


def write_json(content: Json, path: Path) -> None:
    """Write a record; the file is replaced only when complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced_when_complete(path) as temporary:
        Path(temporary).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        Path(temporary).chmod(0o644)


def _read(path: Path) -> Record | None:
    return json.loads(path.read_text()) if path.exists() else None


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
