"""Times in turns, peak memory, slopes; a failure is recorded, not raised."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

__all__ = [
    "Json",
    "attempt",
    "line",
    "peak_gigabytes",
    "power",
    "reason_of",
    "seconds_in_turns",
    "tidy",
    "timed",
]

Work = Callable[[], object]
Json = dict[str, Any]  # what is measured, to be written to a JSON file


def reason_of(error: Exception) -> str:
    """One line that says what went wrong."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


def attempt(work: Callable[[], Json]) -> Json:
    """The result of the work, or ``{"failed": reason}``."""
    try:
        return work()
    except Exception as error:
        return {"failed": reason_of(error)}
    finally:
        tidy()


def tidy() -> None:
    """Free memory that nothing refers to."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def synchronize(device: str) -> None:
    """Wait until the device has finished."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def timed(work: Work, device: str) -> float:
    """The time of one call in seconds."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def seconds_in_turns(
    work: Mapping[str, Work], device: str, *, repeats: int, warm_up: int = 2
) -> dict[str, Json]:
    """Each call's median and mean time over ``repeats`` turns in which every call runs once.

    Taking turns spreads a busy moment of the machine over all calls. A call that raises an error is
    left out from then on, and its reason is kept.
    """
    times: dict[str, list[float]] = {name: [] for name in work}
    failed: dict[str, str] = {}
    for turn in range(warm_up + repeats):
        for name, call in work.items():
            if name in failed:
                continue
            try:
                took = timed(call, device)
            except Exception as error:
                failed[name] = reason_of(error)
                tidy()
                continue
            if turn >= warm_up:
                times[name].append(took)
    rows: dict[str, Json] = {}
    for name, values in times.items():
        if name in failed:
            rows[name] = {"failed": failed[name]}
        else:
            rows[name] = {
                "seconds": statistics.median(values),
                "mean_seconds": statistics.fmean(values),
            }
    return rows


def peak_gigabytes(build: Callable[[], Work], device: str, calls: int = 3) -> float | None:
    """The peak GPU memory of building and calling the work, in GB; None on a CPU."""
    if not device.startswith("cuda"):
        return None
    tidy()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work = build()
    for _ in range(calls):
        work()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e9


def power(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The least-squares slope of log value over log size: value ∝ size^slope.

    Example:
        >>> round(power([1, 2, 4], [3, 12, 48]), 6)
        2.0
    """
    return line([math.log(s) for s in sizes], [math.log(v) for v in values])[1]


def line(sizes: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """Intercept and slope of the least-squares line."""
    slope, intercept = np.polyfit(np.asarray(sizes, float), np.asarray(values, float), 1)
    return float(intercept), float(slope)
