"""The paper's step with its 50 coordinates against ``train_step`` with as many probes as have their standard error.

50 of d coordinates, drawn without replacement, have the relative standard error r_c·sqrt(1/50 − 1/d), where r_c is that
of one; k ≥ 2 probes have r_3·sqrt(3/k), where r_3 is that of three. The probes' error is measured again at that k.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from benchmarks.loops import MODELS, UNIT, Loop, Variant
from benchmarks.measuring import seconds_in_turns, tidy
from benchmarks.paper import PAPER_COORDINATES, coordinate_cost, examples_of, relative_std, spreads, traces
from torchfil.fisher.batch import MOST_PROBES_AT_ONCE

__all__ = ["matched", "matching_probes"]

_BATCHES = 8
_TURNS_BEFORE = 48  # until the passes that come up often are compiled


def matching_probes(r_coordinate: float, r_three_probes: float, d: int) -> tuple[float, int]:
    """The relative standard error of the paper's estimate, and the fewest probes, at least two, that have it.

    Example:
        >>> error, probes = matching_probes(0.7, 0.1, 10_000)
        >>> round(error, 3), probes
        (0.099, 4)
    """
    if d <= PAPER_COORDINATES:
        raise ValueError(f"{PAPER_COORDINATES} coordinates of {d} are exact: no number of probes matches them")
    error = r_coordinate * math.sqrt(1 / PAPER_COORDINATES - 1 / d)
    return error, max(2, math.ceil(3 * (r_three_probes / error) ** 2))


def matched(name: str, device: str, *, quick: bool = False) -> dict[str, Any]:
    """By state of the weights: the errors, the probes, and both steps' seconds from one run."""
    model, on_gpu = MODELS[name], device.startswith("cuda")
    small = quick or not on_gpu
    examples = model.batch(device) if on_gpu else min(model.batch(device), 4)
    draws = 4 if quick else 24 if small else 64
    coordinate = coordinate_cost(model, device, examples, repeats=1 if quick else 5)["coordinate_seconds"]
    assert coordinate is not None
    states: dict[str, Any] = {}
    for state, steps in model.states.items():
        shown = 2 if quick else 8 if small else 16
        found = spreads(
            model,
            device,
            examples=shown,
            coordinates=8 if quick else 50 if small else 200,
            draws=draws,
            train_steps=steps,
            probes=(3,),
        )
        r_three, d = found["estimates"]["3"]["relative_std"], found["num_coordinates"]
        error, probes = matching_probes(found["coordinate_relative_std"], r_three, d)
        gradients = examples_of(model, shown, device, train_steps=steps)
        reached = relative_std(traces(gradients, probes, draws, torch.Generator().manual_seed(2)))
        states[state] = {"paper_error": error, "probes": probes, "error": reached}
    seconds: dict[int, dict[str, Any]] = {}
    for probes in {state["probes"] for state in states.values()}:
        compiled = on_gpu and not model.heavy and probes <= MOST_PROBES_AT_ONCE  # others compile for minutes
        seconds[probes] = _steps(name, device, probes, compiled=compiled, quick=quick)
    for state in states.values():
        found = seconds[state["probes"]]
        paper = found[UNIT]["seconds"] + PAPER_COORDINATES * coordinate
        state |= {"paper_seconds": paper, "opacus_seconds": found[UNIT]["seconds"]}
        for title in ("plain", "compiled"):
            if "seconds" in found.get(title, {}):
                state |= {
                    f"{title}_seconds": found[title]["seconds"],
                    f"{title}_slower": paper / found[title]["seconds"],
                }
    return {"title": model.title, "batch": model.batch(device), "states": states}


def _steps(name: str, device: str, probes: int, *, compiled: bool, quick: bool) -> dict[str, dict[str, Any]]:
    settings = (("num_probes", probes),)
    chosen = {UNIT: Variant("hooks"), "plain": Variant("fused", settings)}
    if compiled:
        chosen["compiled"] = Variant("fused", (*settings, ("compile", True)))
    batches = 1 if quick else _BATCHES
    loops = {title: Loop(MODELS[name], variant, device, batches=batches) for title, variant in chosen.items()}
    before = _TURNS_BEFORE if compiled else batches
    work = {title: loop.step for title, loop in loops.items()}
    found = seconds_in_turns(work, device, repeats=1 if quick else 24, warm_up=before)
    del work, loops
    tidy()
    return found
