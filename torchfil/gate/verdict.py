"""What one rule of a policy found, and whom it concerns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from torchfil.run.saved_run import SavedRun
from torchfil.run.status import NOT_MEASURED, status_of

__all__ = ["Verdict", "everybody", "measured", "nobody", "told_apart"]


@dataclass(frozen=True, eq=False)
class Verdict:
    """What one rule found.

    Attributes:
        rule: Its name in the policy.
        passed: Whether it holds.
        limit: The threshold.
        found: The value that is compared with it; None where it is not known.
        rows: The places in ``ids`` of the examples that break it, [m].
        detail: In words.
    """

    rule: str
    passed: bool
    limit: float
    found: float | None
    rows: np.ndarray
    detail: str

    @property
    def offending(self) -> int:
        """How many examples break it."""
        return len(self.rows)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: without the examples, of which the number is told."""
        names = ("rule", "passed", "limit", "found", "offending", "detail")
        return {name: getattr(self, name) for name in names}


def measured(run: SavedRun) -> np.ndarray:
    """Which examples the run says something about, [n] booleans."""
    run.column("fil")
    return status_of(run) != NOT_MEASURED


def everybody(run: SavedRun) -> np.ndarray:
    """All places, [n]."""
    return np.arange(len(run))


def nobody() -> np.ndarray:
    """No place, [0]."""
    return np.zeros(0, dtype=np.int64)


def told_apart(limit: float | None, value: float | None, digits: int = 3) -> tuple[str, str]:
    """Two numbers as texts of so many digits, or of as many as it takes to see which is larger.

    Example:
        >>> told_apart(1.05, 1.0499), told_apart(1.05, 2.0), told_apart(1.05, None)
        (('1.05', '1.0499'), ('1.05', '2'), ('1.05', 'not known'))
    """
    if limit is None or value is None:
        return _shown(limit, digits), _shown(value, digits)
    while digits < 17 and limit != value and _shown(limit, digits) == _shown(value, digits):
        digits += 1
    return _shown(limit, digits), _shown(value, digits)


def _shown(value: float | None, digits: int) -> str:
    if value is None:
        return "not known"
    if np.isinf(value):
        return "∞" if value > 0 else "−∞"
    return f"{value:,}" if isinstance(value, int) else f"{value:.{digits}g}"
