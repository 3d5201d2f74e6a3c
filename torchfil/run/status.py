"""Which examples a run has measured: zero leakage and no measurement look alike in a table."""

from __future__ import annotations

import numpy as np

from torchfil.run.saved_run import SavedRun

__all__ = ["BLANK_WHERE_UNKNOWN", "LOWER_BOUND", "MEASURED", "NOT_MEASURED", "status_of"]

MEASURED, LOWER_BOUND, NOT_MEASURED = 0, 1, 2
BLANK_WHERE_UNKNOWN = ("fil", "fil_error", "sampling_error", "mse_bound", "mse_bound_low")  # columns


def status_of(run: SavedRun) -> np.ndarray:
    """MEASURED, LOWER_BOUND (some participations were not measured) or NOT_MEASURED, uint8 [n].

    An example that no batch drew, or whose every step was skipped, has η̄ = 0 in the table; one run says nothing of it.
    """
    columns = run.columns
    fil = np.asarray(columns["fil"], dtype=np.float64)
    unknown = np.isnan(fil)
    missed = np.asarray(columns.get("missed", np.zeros(len(fil))))
    if "participations" in columns:
        unknown |= np.asarray(columns["participations"]) - missed <= 0
    if "sampling_error" in columns:
        unknown |= np.isinf(np.asarray(columns["sampling_error"], dtype=np.float64))
    mechanism = run.about.get("mechanism", {})
    rate = mechanism.get("fil_rate")
    if mechanism.get("rel_error") is not None or (rate is not None and rate < 1):
        unknown |= fil == 0
    return np.where(unknown, NOT_MEASURED, np.where(missed > 0, LOWER_BOUND, MEASURED)).astype(np.uint8)
