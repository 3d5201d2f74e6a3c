"""Individual ε: each example's own RDP, from its own clipped gradient norms.

If the sensitivity of a Gaussian mechanism to example i is ‖g̃_i‖ ≤ C, a step has for i the RDP of the noise multiplier
σC/‖g̃_i‖ (Feldman & Zrnic 2021; Yu et al. 2022). Norms are rounded up to a grid, so that the numbers are computed once
per grid value at the end. Between participations the last known norm is used, or C if there is none yet; therefore
``norm_refresh`` is recommended. Without Poisson sampling batches may be known, and only the steps that used the example
count. The result is **output-specific** (Yu et al. 2022): the norms depend on what this run released. It is an
estimate; a guarantee needs a filter (Feldman & Zrnic 2021; Koskela et al. 2023).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from opacus.accountants import RDPAccountant
from opacus.accountants.analysis.rdp import compute_rdp
from torch import Tensor

from torchfil.accounting.packed import BatchRows, bytes_per_row
from torchfil.accounting.quantities import Sum
from torchfil.accounting.rows import RowTable
from torchfil.engine.norm_levels import ENTRIES, LEVELS, RATIO, added, as_table

__all__ = ["NormHistory", "epsilon_over_time", "individual_epsilon"]

_BELOW = 8  # levels below the first step's noise multiplier
_AT_ONCE = 65_536  # rows that are processed together


class NormHistory:
    """For every example, the number of steps at each effective noise multiplier σC/‖g̃‖, rounded down.

    An example has twelve entries of a level and a count (:mod:`torchfil.engine.norm_levels`), its last known norm, and
    the step from which it holds: 68 bytes. On CPUs, with 2²⁰ examples or more, examples that were never drawn take 4.

    Args:
        num_examples: n.
        device: The device or folder that holds the rows (:class:`torchfil.accounting.rows.RowTable`).
        clip_weights: The largest possible ‖g̃‖/C of each example, [n]; None: 1.
        lazy: Whether an example gets its row when it is first drawn; None: see above.
        own_steps: Whether only steps that used an example count for it, because batches may be known.
    """

    def __init__(
        self,
        num_examples: int,
        device: torch.device | str | Path = "cpu",
        clip_weights: Tensor | None = None,
        *,
        lazy: bool | None = None,
        own_steps: bool = False,
    ) -> None:
        self._own_steps = own_steps
        self.anchor = 0.0  # the noise multiplier of the first step; the grid is anchor · 1.05^k
        self.lowest = math.inf
        self.noiseless = False  # whether a step was released without noise
        self.noise_multiplier = 0.0
        self.sample_rate = 0.0
        self.steps = 0
        # with individual weights, examples that were not drawn differ
        self._rows = RowTable(_LAYOUT, num_examples, device, lazy=lazy if clip_weights is None else False)
        self._rows.own("ratio").fill_(1.0)
        if clip_weights is not None:
            self._rows.own("ratio").copy_(clip_weights)

    @staticmethod
    def bytes_needed(num_examples: int) -> int:
        """The memory for the rows of all examples."""
        return num_examples * bytes_per_row(_LAYOUT)

    @property
    def device(self) -> torch.device:
        """The device of the rows."""
        return self._rows.device

    @property
    def ratio(self) -> Tensor:
        """The last known ‖g̃‖/C of every example, or its largest possible value, float32 [n]."""
        return self._rows["ratio"]

    @property
    def num_bytes(self) -> int:
        """The memory that the rows take now."""
        return self._rows.num_bytes

    def step(self, rows: Tensor, ratio: Tensor, noise_multiplier: float, sample_rate: float) -> None:
        """Account one released step in which the examples ``rows`` had clipped norms ``ratio`` · C."""
        if noise_multiplier == 0:
            self.noiseless = True  # every ε is infinite from now on
            self.steps += 1
            return
        if self.anchor == 0:
            self.anchor = self.noise_multiplier = noise_multiplier
        if noise_multiplier != self.noise_multiplier:
            for places in torch.arange(self._rows.num_rows, device=self.device).split(_AT_ONCE):
                with self._rows.rows_at(places) as part:
                    self._settle(part)
            self.noise_multiplier = noise_multiplier
        self.lowest = min(self.lowest, noise_multiplier)
        self.sample_rate = max(self.sample_rate, sample_rate)
        with self._rows.rows_of(rows, ratio.device) as part:
            self._set(part, ratio)
            if self._own_steps:
                self._count(part, torch.ones_like(part["since"]))
        self.steps += 1

    def grow(self, num_examples: int) -> None:
        """Make room for this many examples, if only their own steps count."""
        before = self._rows.num_examples
        self._rows.extend(num_examples)
        if not self._rows.lazy:  # in the shared row
            self._rows.own("ratio")[before:] = 1.0

    def replace(self, rows: Tensor, ratio: Tensor) -> None:
        """Take the norms of a refresh pass."""
        self.set_ratios(rows, ratio)

    def set_ratios(self, rows: Tensor, ratio: Tensor) -> None:
        """Set the norms of these examples from now on."""
        with self._rows.rows_of(rows, ratio.device) as part:
            self._set(part, ratio)

    def distinct(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """See :meth:`torchfil.accounting.rows.RowTable.distinct`."""
        return self._rows.distinct(rows)

    def counts_of(self, rows: Tensor) -> Tensor:
        """The counts of these examples, including steps since the last update, [rows, levels]."""
        rows = rows.to(self.device)
        counts = as_table(self._rows.at("levels", rows), self._rows.at("counts", rows))
        if self._own_steps:
            return counts
        open_steps = self.steps - self._rows.at("since", rows)
        return counts.scatter_add_(1, self.levels_of(self._rows.at("ratio", rows))[:, None], open_steps[:, None])

    def levels_of(self, ratio: Tensor) -> Tensor:
        """The level of each norm ‖g̃‖/C at the current noise, int64 [rows]."""
        return LEVELS - 1 - torch.bucketize(ratio, _edges(self.noise_multiplier / self.anchor, ratio.device))

    def multipliers(self) -> list[float]:
        """The noise multiplier of each grid level; the lowest level holds everything below it too."""
        grid = [self.anchor * RATIO ** (k - _BELOW) for k in range(LEVELS)]
        grid[0] = min(grid[0], self.lowest)
        return grid

    def state_dict(self) -> dict[str, Any]:
        """Everything, as tensors, [n, …] each, and plain numbers."""
        return {**self._numbers(), **{name: value.clone() for name, value in self._rows.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        n, rows = self._rows.num_examples, {name: state[name] for name in _LAYOUT}
        for name, value in rows.items():
            expected = (n, *_LAYOUT[name].shape)
            if tuple(value.shape) != expected:
                raise ValueError(f"the norm history's {name!r} has shape {tuple(value.shape)}, not {expected}")

        for name in self._numbers():
            setattr(self, name, state[name])
        if self._rows.lazy:
            # the example seen last, or never, represents those never seen, which are all alike
            unseen = torch.where(rows["ratio"] == 1, rows["since"], self.steps + 1).argmin()
            for name, value in rows.items():
                self._rows.own(name)[0] = value[unseen]
        self._rows.load(rows, self._is_known(rows))

    def _is_known(self, rows: Mapping[str, Tensor]) -> Tensor:
        """Which examples differ from the row of those never seen, [n] booleans."""
        differs = [rows[name] != self._rows.own(name)[:1].to(rows[name].device) for name in rows]
        return torch.stack([each.reshape(len(each), -1).any(dim=1) for each in differs]).any(dim=0)

    def _numbers(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def _set(self, part: BatchRows, ratio: Tensor) -> None:
        """Set the norms of these examples from now on, after booking earlier steps."""
        self._settle(part)
        part["ratio"].copy_(ratio)

    def _settle(self, part: BatchRows) -> None:
        """Book the steps since the norms of these examples were last set."""
        if part.num_rows == 0 or self.anchor == 0 or self._own_steps:
            return
        since = part["since"]
        self._count(part, self.steps - since)
        since.fill_(self.steps)

    def _count(self, part: BatchRows, steps: Tensor) -> None:
        """Book this many steps at the current norms of these examples."""
        levels, counts = part["levels"], part["counts"]
        level = self.levels_of(part["ratio"].contiguous())
        for entries, booked in zip((levels, counts), added(levels, counts, level, steps), strict=True):
            entries.copy_(booked)


_LAYOUT = {
    "levels": Sum((ENTRIES,), torch.uint8),
    "counts": Sum((ENTRIES,), torch.int32),
    "ratio": Sum(dtype=torch.float32),
    "since": Sum(dtype=torch.int32),
}


@lru_cache(maxsize=64)
def _edges(relative_noise: float, device: torch.device) -> Tensor:
    """The largest ratio ‖g̃‖/C of each level except the lowest, from the last level on, [levels − 1].

    A ratio r belongs to the last level whose noise multiplier, in units of the anchor, is at most ``relative_noise``/r.
    """
    levels = torch.arange(LEVELS - 1, 0, -1, dtype=torch.float64)
    slack = 1e-5  # in levels, so that numbers on the grid are not rounded off it
    return (relative_noise * RATIO ** (_BELOW + slack - levels)).to(device, torch.float32)


def individual_epsilon(history: NormHistory, rows: Tensor, delta: float) -> Tensor:
    """ε_i at δ of these examples, [rows], output-specific, by the RDP accountant's own orders and conversion."""
    if history.noiseless:
        return torch.full((len(rows),), math.inf, dtype=torch.float64)
    if history.steps == 0:
        return torch.zeros(len(rows), dtype=torch.float64)
    rows, place = history.distinct(rows)
    multipliers = history.multipliers()
    result = [torch.zeros(0, dtype=torch.float64)]
    for part in rows.split(_AT_ONCE):
        counts = history.counts_of(part).cpu().double().numpy()
        used = np.flatnonzero(counts.sum(axis=0)).tolist()
        per_step = np.stack([_rdp_per_step(history.sample_rate, multipliers[level]) for level in used])
        result.append(torch.from_numpy(_epsilon_from_rdp(counts[:, used] @ per_step, delta)))
    epsilon = torch.cat(result)
    return epsilon if place is None else epsilon[place]


def epsilon_over_time(history: Sequence[tuple[float, float, int]], steps: Sequence[int], delta: float) -> np.ndarray:
    """The RDP accountant's ε at δ after each of these numbers of steps, [t], for its history of (σ, q, steps)."""
    orders = RDPAccountant.DEFAULT_ALPHAS
    rdp = np.zeros((len(steps), len(orders)))
    before = 0
    for sigma, q, count in history:
        inside = (np.asarray(steps) - before).clip(0, count)
        rdp += np.outer(inside, _rdp_per_step(q, sigma))
        before += count
    return _epsilon_from_rdp(rdp, delta)


def _epsilon_from_rdp(rdp: np.ndarray, delta: float) -> np.ndarray:
    """The least ε over all orders, [k], from RDP [k, orders]."""
    orders = np.asarray(RDPAccountant.DEFAULT_ALPHAS, dtype=float)
    penalty = (math.log(delta) + np.log(orders)) / (orders - 1)
    return np.nanmin(rdp - penalty + np.log((orders - 1) / orders), axis=1).clip(min=0)


@lru_cache(maxsize=1024)
def _rdp_per_step(q: float, noise_multiplier: float) -> np.ndarray:
    orders = RDPAccountant.DEFAULT_ALPHAS
    return np.asarray(compute_rdp(q=q, noise_multiplier=noise_multiplier, steps=1, orders=orders))
