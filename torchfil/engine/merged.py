"""The mean over repeated runs as one saved run, with their number and what releasing all of them would mean."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from torchfil.report.saved_run import SavedRun

__all__ = ["as_merged", "epsilon_of_all"]


def as_merged(run: SavedRun, runs: int, epsilon: float) -> SavedRun:
    """A run whose numbers are means over ``runs`` repetitions, without what belongs to a single one.

    The numbers are about one release, on average. An example's own ε, the course of training and the seed are left out;
    so is reconstruction robustness if batches are known, because it depends on one run's participations.

    Args:
        run: Saved from the average; everything else is that of the first run.
        runs: The number of runs.
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
    """ε at δ if ``runs`` trainings like the accountant's are released together (composition)."""
    together = copy.deepcopy(accountant)
    together.history = list(accountant.history) * runs
    return float(together.get_epsilon(delta))
