"""The mean over repeated runs as one saved run, that says how many there were and what releasing all of them means."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from torchfil.report.saved_run import SavedRun

__all__ = ["as_merged", "epsilon_of_all"]


def as_merged(run: SavedRun, runs: int, epsilon: float) -> SavedRun:
    """A run whose numbers are means over ``runs`` repetitions, without what belongs to a single one.

    The numbers speak of one release, on average. Left out are an example's own ε, the course of training and the seed;
    reconstruction robustness too where batches are known, for it rests on one run's participations.

    Args:
        run: Saved from the average, otherwise as the first run has it.
        runs: How many.
        epsilon: ε of all of them together.
    """
    about = {**run.about, "seed": None, "merged": {"runs": runs, "epsilon_of_all": epsilon}}
    known_batches = about["mechanism"].get("sample_rate") is None
    return replace(
        run,
        about=about,
        columns={name: values for name, values in run.columns.items() if name != "epsilon"},
        history={},
        bounds={name: bound for name, bound in run.bounds.items() if name != "rero" or not known_batches},
    )


def epsilon_of_all(accountant: Any, runs: int, delta: float) -> float:
    """ε at δ of ``runs`` trainings that are all like the one an accountant knows, released together (composition)."""
    together = copy.deepcopy(accountant)
    together.history = list(accountant.history) * runs
    return float(together.get_epsilon(delta))
