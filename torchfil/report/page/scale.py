"""From values to places in a chart, and round values to mark there."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torchfil.run.statistics import round_step

__all__ = ["Scale"]


@dataclass(frozen=True)
class Scale:
    """From values to places on the page."""

    low: float
    high: float
    start: float
    end: float
    log: bool

    def __call__(self, value: float) -> float:
        """The place of a value; what lies outside is drawn at the edge."""
        low, high = self._shown(self.low), self._shown(self.high)
        share = (self._shown(value) - low) / (high - low)
        return self.start + min(max(share, -0.02), 1.02) * (self.end - self.start)

    def _shown(self, value: float) -> float:
        return math.log10(max(value, 1e-300)) if self.log else value

    def ticks(self, most: int) -> list[float]:
        """At most about ``most`` round values within the scale."""
        if self.log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            if last - first >= 2:
                step = max(1, math.ceil((last - first) / max(most - 1, 1)))
                return [10.0**power for power in range(first, last + 1, step)]
            fine = [f * 10.0**p for p in range(first - 1, last + 1) for f in (1, 2, 5)]
            inside = [value for value in fine if self.low <= value <= self.high]
            if len(inside) >= 2:
                return inside[:: math.ceil(len(inside) / most)]
        width = round_step((self.high - self.low) / max(most, 1))
        first = math.ceil(self.low / width - 1e-9)
        return [i * width for i in range(first, math.floor(self.high / width + 1e-9) + 1)]
