"""A number for every layer, with its interval: a table, and a picture."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchfil.accounting.leakage import as_table
from torchfil.utils.tables import aligned
from torchfil.viz.common import new_figure


@dataclass(frozen=True, repr=False)
class LayerTable:
    """One value per layer, in the order of the network.

    Attributes:
        layers: Their names as in ``model.named_modules()``; "" is the model itself.
        value: [layers].
        low: The lower end of the 95 % interval, [layers].
        high: The upper end, [layers].
        standard_error: The standard error over examples, [layers].
        measure: What is measured.
        unit: Its unit.

    Example:
        >>> LayerTable(("conv", "fc"), *np.array([[0.5, 2], [0.4, 1], [0.6, 3], [0.05, 0.5]]), "sensitivity", "F-norm")
        sensitivity [F-norm]
        layer  value   low  high
        conv   0.500 0.400 0.600
        fc     2.000 1.000 3.000
    """

    layers: tuple[str, ...]
    value: np.ndarray
    low: np.ndarray
    high: np.ndarray
    standard_error: np.ndarray
    measure: str
    unit: str

    def __len__(self) -> int:
        return len(self.layers)

    def __repr__(self) -> str:
        digits = _format(self.value)
        values = zip(self._shown, self.value, self.low, self.high, strict=True)
        rows = [[name, *map(digits.format, numbers)] for name, *numbers in values]
        lines = aligned([["layer", "value", "low", "high"], *rows], left=[0])
        return "\n".join([f"{self.measure} [{self.unit}]", *lines])

    def to_pandas(self) -> Any:
        """The columns value, low, high, standard_error by layer; a dict of lists if pandas is not installed."""
        columns = {name: getattr(self, name).tolist() for name in ("value", "low", "high", "standard_error")}
        return as_table(list(self.layers), columns, index_name="layer")

    def plot(self, ax: Any = None) -> Any:
        """Draw bars with their intervals by layer, on ``ax`` or a new figure; return the matplotlib figure.

        A value that is not finite is written as text.

        Raises:
            ImportError: matplotlib is not installed.
        """
        # Names that would overlap are tilted, and need height.
        longest = max(map(len, self._shown))
        rotated = longest * len(self) > 40
        if ax is None:
            height = 3.4 + (0.055 * longest if rotated else 0.0)
            ax = new_figure(max(4.0, 1.6 + 0.45 * len(self)), height, "constrained").subplots()

        places = np.arange(len(self))
        drawn = np.isfinite(self.value)
        ax.bar(places[drawn], self.value[drawn], color="#0072B2", width=0.7)
        for place in places[~drawn]:
            ax.text(place, 0, f"{self.value[place]:g}", ha="center", va="bottom")
        whiskers = drawn & np.isfinite(self.low) & np.isfinite(self.high)
        value, low, high = self.value[whiskers], self.low[whiskers], self.high[whiskers]
        reach = np.stack([value - low, high - value]).clip(min=0)
        ax.errorbar(places[whiskers], value, reach, fmt="none", ecolor="0.25", capsize=3, linewidth=1.2)

        ax.set_xticks(places, self._shown, rotation=45 if rotated else 0, ha="right" if rotated else "center")
        ax.tick_params(axis="x", length=0)
        if rotated:
            for label in ax.get_xticklabels():
                label.set_rotation_mode("anchor")
        ax.axhline(0, color="0.25", linewidth=0.8)
        ax.set_title(self.measure, fontsize=11)
        ax.set_ylabel(self.unit)
        ax.spines[["top", "right"]].set_visible(False)
        return ax.figure

    @property
    def _shown(self) -> list[str]:
        return [layer or "(model)" for layer in self.layers]


def _format(values: np.ndarray) -> str:
    """A format with two digits for the smallest value; scientific if that takes more than five decimals."""
    sizes = np.abs(values[np.isfinite(values) & (values != 0)])
    decimals = max(3, 1 - math.floor(math.log10(sizes.min()))) if len(sizes) else 3
    return "{:.2e}" if decimals > 5 or sizes.max(initial=0) >= 1e6 else f"{{:.{decimals}f}}"
