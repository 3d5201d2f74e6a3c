"""Individual ε: each example's own RDP, from its own clipped gradient norms.

A step of a Gaussian mechanism whose sensitivity to example i is ‖g̃_i‖ ≤ C has, for i, the RDP of noise multiplier
σC/‖g̃_i‖ (Feldman & Zrnic 2021; Yu et al. 2022). Norms are rounded up to a grid, so that the numbers are computed
once per grid value at the end. Between participations the last seen norm stands in, C where none was seen yet, so that
``norm_refresh`` is recommended; of a stream, whose batches are known, only the steps that used the example count. The
result is **output-specific** (Yu et al. 2022): the norms depend on what this run released. It is an estimate; a
guarantee needs a filter (Feldman & Zrnic 2021; Koskela et al. 2023).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from opacus.accountants import RDPAccountant
from opacus.accountants.analysis.rdp import compute_rdp
from torch import Tensor

from torchfil.utils.growing import grow_rows

__all__ = ["NormHistory", "epsilon_over_time", "individual_epsilon"]

_RATIO = 1.05  # between neighbouring noise multipliers of the grid
_BELOW, _LEVELS = 8, 96


class NormHistory:
    """For every example: at how many steps it had which effective noise multiplier σC/‖g̃‖, rounded down.

    Args:
        num_examples: n.
        device: Where the n×96 table of counts (int32) lives.
        clip_weights: The most that ‖g̃‖/C can be of each example, [n]; None: 1.
        own_steps: Whether only steps that used an example count for it, as where its batches are known: a stream.
    """

    def __init__(
        self,
        num_examples: int,
        device: torch.device | str = "cpu",
        clip_weights: Tensor | None = None,
        *,
        own_steps: bool = False,
    ) -> None:
        self._own_steps = own_steps
        self.anchor = 0.0  # the noise multiplier of the first step; the grid is anchor · 1.05^k
        self.lowest = math.inf
        self.noiseless = False  # whether a step was released without noise
        self.noise_multiplier = 0.0
        self.sample_rate = 0.0
        self.steps = 0
        self.counts = torch.zeros(num_examples, _LEVELS, dtype=torch.int32, device=device)
        self.ratio = torch.ones(num_examples, dtype=torch.float32, device=device)  # ‖g̃‖/C, last seen, or the most
        if clip_weights is not None:
            self.ratio.copy_(clip_weights)
        self.since = torch.zeros(num_examples, dtype=torch.int64, device=device)

    @staticmethod
    def bytes_needed(num_examples: int) -> int:
        """How much memory the table takes."""
        return num_examples * (_LEVELS * 4 + 4 + 8)

    def step(self, rows: Tensor, ratio: Tensor, noise_multiplier: float, sample_rate: float) -> None:
        """Account one released step in which the examples ``rows`` had clipped norms ``ratio`` · C."""
        if noise_multiplier == 0:
            self.noiseless = True  # nobody's ε is finite any more
            self.steps += 1
            return
        if self.anchor == 0:
            self.anchor = self.noise_multiplier = noise_multiplier
        if noise_multiplier != self.noise_multiplier:
            self._settle(torch.arange(len(self.ratio), device=self.ratio.device))
            self.noise_multiplier = noise_multiplier
        self.lowest = min(self.lowest, noise_multiplier)
        self.sample_rate = max(self.sample_rate, sample_rate)
        self.set_ratios(rows, ratio)
        if self._own_steps:
            self._count(rows, torch.ones_like(rows, dtype=self.counts.dtype))
        self.steps += 1

    def grow(self, num_examples: int) -> None:
        """Make room for so many examples, where only their own steps count."""
        for value, fill in ((self.counts, 0), (self.ratio, 1), (self.since, 0)):
            grow_rows(value, num_examples, fill)

    def replace(self, rows: Tensor, ratio: Tensor) -> None:
        """How a refresh pass reports."""
        self.set_ratios(rows, ratio)

    def set_ratios(self, rows: Tensor, ratio: Tensor) -> None:
        """From now on these examples have these norms."""
        self._settle(rows)
        self.ratio[rows] = ratio.to(self.ratio.dtype)

    def counts_of(self, rows: Tensor) -> Tensor:
        """The counts of these examples with the open stretch included, [rows, levels]."""
        counts = self.counts[rows].clone()
        if self._own_steps:
            return counts
        open_steps = (self.steps - self.since[rows]).to(counts.dtype)
        counts.scatter_add_(1, self._level(rows)[:, None], open_steps[:, None])
        return counts

    def multipliers(self) -> list[float]:
        """The noise multiplier of each grid level; the lowest level holds everything below it too."""
        grid = [self.anchor * _RATIO ** (k - _BELOW) for k in range(_LEVELS)]
        grid[0] = min(grid[0], self.lowest)
        return grid

    def state_dict(self) -> dict[str, Any]:
        """Everything, as tensors and plain numbers."""
        return {name: value.clone() if isinstance(value, Tensor) else value for name, value in self._kept().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        for name, value in self._kept().items():
            new = state[name]
            if isinstance(value, Tensor):
                if value.shape != new.shape:
                    raise ValueError(
                        f"the norm history's {name!r} has shape {tuple(new.shape)}, not {tuple(value.shape)}"
                    )
                new = new.to(value.device, value.dtype).clone()
            setattr(self, name, new)

    def _kept(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def _level(self, rows: Tensor) -> Tensor:
        edges = _edges(self.noise_multiplier / self.anchor, self.ratio.device)
        return _LEVELS - 1 - torch.bucketize(self.ratio[rows], edges)

    def _settle(self, rows: Tensor) -> None:
        """Book the steps since these examples' norms were last set."""
        if len(rows) == 0 or self.steps == 0 or self._own_steps:
            return
        self._count(rows, (self.steps - self.since[rows]).to(self.counts.dtype))
        self.since.index_fill_(0, rows, self.steps)

    def _count(self, rows: Tensor, steps: Tensor) -> None:
        """Book so many steps at these examples' present norms."""
        places = torch.add(self._level(rows), rows, alpha=_LEVELS)
        self.counts.view(-1).index_add_(0, places, steps)


@lru_cache(maxsize=64)
def _edges(relative_noise: float, device: torch.device) -> Tensor:
    """The largest ratio ‖g̃‖/C of each level but the lowest, from the last level's on, [levels − 1].

    A ratio r belongs to the last level whose noise multiplier, in units of the anchor, is at most ``relative_noise``/r.
    """
    levels = torch.arange(_LEVELS - 1, 0, -1, dtype=torch.float64)
    slack = 1e-5  # in levels: numbers that lie on the grid are not rounded off it
    return (relative_noise * _RATIO ** (_BELOW + slack - levels)).to(device, torch.float32)


def individual_epsilon(history: NormHistory, rows: Tensor, delta: float) -> Tensor:
    """ε_i at δ of these examples, [rows], output-specific, by the RDP accountant's own orders and conversion."""
    if history.noiseless:
        return torch.full((len(rows),), math.inf, dtype=torch.float64)
    if history.steps == 0:
        return torch.zeros(len(rows), dtype=torch.float64)
    result = []
    multipliers = history.multipliers()
    for part in rows.split(65_536):
        counts = history.counts_of(part).cpu().double().numpy()
        rdp = np.zeros((len(part), len(RDPAccountant.DEFAULT_ALPHAS)))
        for level in np.flatnonzero(counts.sum(axis=0)).tolist():
            rdp += np.outer(counts[:, level], _rdp_per_step(history.sample_rate, multipliers[level]))
        result.append(torch.from_numpy(_epsilon_from_rdp(rdp, delta)))
    return torch.cat(result) if result else torch.zeros(0, dtype=torch.float64)


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
