"""The paper's step against ``train_step`` with probes, at equal standard error: both errors and both times of one run.

For one and three probes: as many coordinates as have the same error. For the paper's 50 coordinates: as many probes as
have the same error. k ≥ 2 probes have the error r_3·sqrt(3/k), where r_3 is the error of three (probes are drawn
independently, and their common part is exact; one probe alone has more than r_3·sqrt(3)).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from benchmarks.loops import MODELS, UNIT, Loop, Model, Variant
from benchmarks.measuring import seconds_in_turns, tidy
from benchmarks.paper import (
    PAPER_COORDINATES,
    column_estimates,
    coordinate_cost,
    error_of_coordinates,
    examples_of,
    relative_std,
    traces,
)

__all__ = ["matched", "matching_coordinates", "matching_probes"]

_BATCHES = 8


def matching_coordinates(r_coordinate: float, r_probes: float, d: int) -> float:
    """How many of d coordinates have the relative standard error ``r_probes``, at least one.

    Example:
        >>> round(matching_coordinates(0.7, 0.1, 10_000), 1)
        48.8
    """
    return max(1.0, 1 / ((r_probes / r_coordinate) ** 2 + 1 / d))


def matching_probes(r_coordinate: float, r_three_probes: float, d: int) -> int:
    """The fewest probes, at least two, that have the relative standard error of the paper's coordinates.

    Example:
        >>> matching_probes(0.7, 0.1, 10_000)
        4
    """
    if d <= PAPER_COORDINATES:
        raise ValueError(f"{PAPER_COORDINATES} coordinates of {d} are exact: no number of probes matches them")
    error = error_of_coordinates(r_coordinate, PAPER_COORDINATES, d)
    return max(2, math.ceil(3 * (r_three_probes / error) ** 2))


def matched(name: str, device: str, *, quick: bool = False) -> dict[str, Any]:
    """By state of the weights: the errors, coordinates and probes, and both steps' seconds from one run."""
    model, on_gpu = MODELS[name], device.startswith("cuda")
    examples = model.batch(device) if on_gpu else min(model.batch(device), 16)
    coordinate = coordinate_cost(model, device, examples, repeats=1 if quick else 5)["coordinate_seconds"]
    assert coordinate is not None
    states = {state: _errors(model, device, steps, quick=quick) for state, steps in model.states(device).items()}
    rows = [row for state in states.values() for row in state["rows"]]
    seconds = _steps(model, device, {row["probes"] for row in rows}, quick=quick)
    for row in rows:
        row["paper_seconds"] = seconds[UNIT]["seconds"] + row["coordinates"] * coordinate
        ours = seconds[f"plain {row['probes']}"]["seconds"]
        row |= {"plain_seconds": ours, "plain_slower": row["paper_seconds"] / ours}
    return {
        "title": model.title,
        "batch": model.batch(device),
        "coordinate_seconds": coordinate,
        "opacus_seconds": seconds[UNIT]["seconds"],
        "states": states,
    }


def _errors(model: Model, device: str, train_steps: int, *, quick: bool) -> dict[str, Any]:
    """Relative standard deviations (root mean squares over some examples), and the matching numbers."""
    on_gpu = device.startswith("cuda")
    if quick:
        examples, coordinates, draws = 2, 8, 4
    elif on_gpu:
        examples, coordinates, draws = (16, 100, 64) if model.heavy else (32, 400, 200)
    else:
        examples, coordinates, draws = min(model.cpu_batch, 8), 50, 24
    gradients = examples_of(model, examples, device, train_steps=train_steps)
    generator, d = torch.Generator().manual_seed(1), gradients.num_coordinates
    r_coordinate = relative_std(column_estimates(gradients, coordinates, generator))
    r_one, r_three = (relative_std(traces(gradients, probes, draws, generator)) for probes in (1, 3))
    rows: list[dict[str, Any]] = [
        {"probes": probes, "error": error, "coordinates": matching_coordinates(r_coordinate, error, d)}
        for probes, error in ((1, r_one), (3, r_three))
    ]
    if on_gpu or not model.heavy:
        probes = matching_probes(r_coordinate, r_three, d)
        rows.append({"probes": probes, "error": r_three * math.sqrt(3 / probes), "coordinates": PAPER_COORDINATES})
    for row in rows:
        row["paper_error"] = error_of_coordinates(r_coordinate, row["coordinates"], d)
    sampled = {"examples": examples, "coordinates": min(coordinates, d), "draws": draws}
    return {"num_coordinates": d, "coordinate_error": r_coordinate, "rows": rows, "sampled": sampled}


def _steps(model: Model, device: str, probes: set[int], *, quick: bool) -> dict[str, dict[str, Any]]:
    """Seconds of Opacus's step and, as "plain k", of ``train_step`` with k probes, in turns."""
    chosen = {UNIT: Variant("hooks")}
    chosen |= {f"plain {k}": Variant("train_step", (("num_probes", k),)) for k in sorted(probes)}
    batches = 1 if quick else _BATCHES
    loops = {title: Loop(model, variant, device, batches=batches) for title, variant in chosen.items()}
    work = {title: loop.step for title, loop in loops.items()}
    times = seconds_in_turns(work, device, repeats=1 if quick else 24, warm_up=batches)
    del work, loops
    tidy()
    return times
