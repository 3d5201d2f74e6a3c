"""One model, every method: time in multiples of the Opacus step, peak memory, and the paper's
method.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.loops import MODELS, UNIT, Loop, Model, Variant, variants
from benchmarks.measuring import (
    Json,
    Work,
    attempt,
    peak_gigabytes,
    reason_of,
    seconds_in_turns,
    tidy,
)
from benchmarks.paper import PAPER_COORDINATES, coordinate_cost

__all__ = ["compare"]


def compare(name: str, device: str, *, quick: bool) -> Json:
    """Time all methods on one model, in turns.

    Returns:
        "batch"; "rows": by method "seconds", "ratio" (to Opacus's hooks), "peak_gb", or "failed";
        "paper": the cost of the paper's coordinates.
    """
    model = MODELS[name]
    if quick and not device.startswith("cuda"):
        model = replace(model, cpu_batch=max(2, model.cpu_batch // 8))
    batches = 1 if quick else 8
    chosen = variants(device)

    # all methods are built before any is timed, because they take turns
    loops: dict[str, Loop] = {}
    rows: dict[str, Json] = {}
    for title, variant in chosen.items():
        try:
            loops[title] = Loop(model, variant, device, batches=batches)
        except Exception as error:
            rows[title] = {"failed": reason_of(error)}
    work: dict[str, Work] = {title: loop.step for title, loop in loops.items()}
    times = seconds_in_turns(work, device, repeats=1 if quick else 24, warm_up=batches)
    del work, loops
    tidy()

    # peak memory of each on its own
    for title, variant in chosen.items():
        row = rows.setdefault(title, times.get(title, {}))
        if "failed" not in row:
            if variant.mean:
                row["seconds"] = row["mean_seconds"]
            row |= attempt(lambda variant=variant: {"peak_gb": _peak(model, variant, device)})  # type: ignore[misc]
    unit = rows[UNIT].get("seconds")
    for row in rows.values():
        if unit and "seconds" in row:
            row["ratio"] = row["seconds"] / unit
    return {
        "title": model.title,
        "batch": model.batch(device),
        "rows": {title: rows[title] for title in chosen},
        "paper": attempt(lambda: _paper(model, device, rows, quick=quick)),
    }


def _peak(model: Model, variant: Variant, device: str) -> float | None:
    return peak_gigabytes(lambda: Loop(model, variant, device, batches=1).step, device)


def _paper(model: Model, device: str, rows: dict[str, Json], *, quick: bool) -> Json:
    """The paper's step: an Opacus step and its coordinates; see :mod:`benchmarks.paper`."""
    on_gpu = device.startswith("cuda")
    examples = model.batch(device) if on_gpu else min(model.batch(device), 1 if quick else 16)
    result: Json = coordinate_cost(model, device, examples, repeats=1 if quick else 5)
    result["timed_examples"] = examples
    cost, unit = result["coordinate_seconds"], rows[UNIT].get("seconds")
    if unit is not None:
        fifty = unit + PAPER_COORDINATES * cost
        result |= {"fifty_seconds": fifty, "fifty_ratio": fifty / unit}
    return result
