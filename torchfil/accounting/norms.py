"""How often each example had which noise: its own clipped norms, from which its individual ε is
computed.

A step has for example i the noise multiplier σC/‖g̃_i‖. Noise multipliers are rounded down to a
grid: level k is anchor · 1.05^(k − 8), where the anchor is the first step's σ. Between
participations the last known norm holds.

An example has few entries of a level and a count. If it had more levels than there are entries, two
neighbours are merged at the lower level, which has less noise, so that its RDP is never
understated. The two are chosen whose union adds least to Σ count · 1.05^(−2k), which the RDP of
subsampled noise roughly follows. For norms that spread over a factor of 50, twelve entries made ε
larger by 1 to 4 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from torchfil.accounting.rows import RowTable, bytes_per_row, in_rounds
from torchfil.accounting.sums import Sum

RATIO = 1.05  # between neighbouring noise multipliers of the grid
LEVELS = 96
ENTRIES = 12
_BELOW = 8  # levels below the first step's noise multiplier
_EMPTY = LEVELS  # the level of an entry without a count, so that it comes last
_LAYOUT = {
    "levels": Sum((ENTRIES,), torch.uint8),
    "counts": Sum((ENTRIES,), torch.int32),
    "ratio": Sum(dtype=torch.float32),
    "since": Sum(dtype=torch.int32),
}
_AT_ONCE = 65_536  # rows that are processed together
_STEPS_QUEUED = 32  # steps that are entered together
_NORMS_QUEUED = 2**20  # of 12 bytes each, at most


class NormHistory:
    """For every example, the number of steps at each effective noise multiplier σC/‖g̃‖, rounded
    down.

    An example has twelve entries of a level and a count, its last known norm, and the step from
    which it holds: 68 bytes.

    Norms are queued, and entered for many steps at once when the queue is full and before anything
    is read. With several ranks, each queues its own norms (12 bytes per participation). All ranks
    exchange them every so many steps and before reading, and enter everybody's in order:
    :meth:`enter` is then collective, and no reader calls it. The history is the same on all ranks,
    and exact for any sampler.

    Args:
        num_examples: n.
        device: Where the rows lie.
        clip_weights: The largest possible ‖g̃‖/C of each example, [n]; None: 1.
        own_steps: Whether only steps that used an example count for it, because batches may be
            known.
        exchange: Returns the rows of all ranks for this rank's rows, [norms, 3] each; None: a
            single process.
        every: With several ranks, the number of steps after which they exchange their norms.

    Attributes:
        steps: The number of steps taken, including those not entered yet.
        noiseless: Whether a step was released without noise; every ε is infinite from then on.
    """

    def __init__(
        self,
        num_examples: int,
        device: torch.device | str = "cpu",
        clip_weights: Tensor | None = None,
        *,
        own_steps: bool = False,
        exchange: Callable[[Tensor], Tensor] | None = None,
        every: int = _STEPS_QUEUED,
    ) -> None:
        self._own_steps, self._exchange, self._every = own_steps, exchange, every
        self.anchor = 0.0  # the noise multiplier of the first step; the grid is anchor · 1.05^k
        self.lowest = math.inf
        self.noiseless = False
        self.noise_multiplier = 0.0  # of the steps that were entered
        self.sample_rate, self.steps = 0.0, 0
        self._rows = RowTable(_LAYOUT, num_examples, device)
        self._rows["ratio"].copy_(torch.ones(()) if clip_weights is None else clip_weights)
        self._clear()

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
        self._flush()
        return self._rows["ratio"]

    @property
    def num_bytes(self) -> int:
        """The memory that the rows take now."""
        self._flush()
        return self._rows.num_bytes

    @property
    def is_complete(self) -> bool:
        """Whether everything was entered."""
        return not self._queue and self._entered == self.steps

    # ------------------------------------------------------------------ steps

    def step(
        self, rows: Tensor, ratio: Tensor, noise_multiplier: float, sample_rate: float
    ) -> None:
        """Account one released step in which the examples ``rows`` had clipped norms ``ratio`` · C.

        They are queued until :meth:`enter_if_full`. With several ranks, they are the examples of
        this one.
        """
        if noise_multiplier == 0:
            self.noiseless = True
        else:
            if self.anchor == 0:
                self.anchor = self.noise_multiplier = noise_multiplier
            if noise_multiplier != (
                self._changes[-1][1] if self._changes else self.noise_multiplier
            ):
                self._changes.append((self.steps, noise_multiplier))
            self.lowest = min(self.lowest, noise_multiplier)
            self.sample_rate = max(self.sample_rate, sample_rate)
            self._queue.append((2 * self.steps + 1, rows, ratio))
            self._queued += len(rows)
        self.steps += 1

    def set_ratios(self, rows: Tensor, ratio: Tensor) -> None:
        """Set the norms of these examples from now on, as a refresh pass found them.

        The next step may change them.
        """
        self._queue.append((2 * self.steps, rows, ratio))
        self._queued += len(rows)

    def grow(self, num_examples: int) -> None:
        """Make room for this many examples, if only their own steps count."""
        before = self._rows.num_examples
        self._rows.extend(num_examples)
        self._rows["ratio"][before:] = 1.0

    def enter_if_full(self) -> None:
        """Enter what is queued if it is much (collective then, if there are several ranks)."""
        if self.steps - self._entered >= self._every or (
            self._queued >= _NORMS_QUEUED and self._exchange is None
        ):
            self.enter()

    def enter(self) -> None:
        """Enter what is queued, of all ranks, in the order of the steps (collective, if there are
        several).
        """
        when, rows, ratio = self._joined()
        ends = torch.searchsorted(
            when, torch.tensor([2 * step for step, _ in self._changes])
        ).tolist()
        first = 0
        for end, (step, noise_multiplier) in zip(ends, self._changes, strict=True):
            self._enter(when[first:end], rows[first:end], ratio[first:end])
            for part_rows in torch.arange(self._rows.num_examples).split(_AT_ONCE):
                with self._rows.rows_of(part_rows) as part:
                    now = torch.full_like(part["since"], 2 * step)
                    self._count([part[name] for name in _LAYOUT], part["ratio"].clone(), now)
            self.noise_multiplier, first = noise_multiplier, end
        self._enter(when[first:], rows[first:], ratio[first:])
        self._clear()

    def _joined(self) -> tuple[Tensor, Tensor, Tensor]:
        """When, rows and ratios, of all ranks, [norms] each, in the order of time.

        Twice the step, + 1 in the step.
        """
        queue = self._queue or [(0, torch.zeros(0, dtype=torch.long), torch.zeros(0))]
        when = torch.tensor([moment for moment, *_ in queue], dtype=torch.int32)
        when = when.repeat_interleave(torch.tensor([len(rows) for _, rows, _ in queue]))
        rows = torch.cat([rows.cpu() for _, rows, _ in queue])
        ratio = torch.cat([ratio.float() for *_, ratio in queue])
        if self._exchange is None:
            return when, rows, ratio
        packed = torch.stack([when, rows.int(), ratio.cpu().view(torch.int32)], dim=1)
        when, rows, ratio = self._exchange(packed).unbind(dim=1)
        order = when.argsort(stable=True)
        return when[order], rows[order].long(), ratio[order].view(torch.float32)

    def _enter(self, when: Tensor, rows: Tensor, ratio: Tensor) -> None:
        """Enter the norms of steps with one noise multiplier, [norms] each."""
        distinct, order, rounds = in_rounds(rows)
        when = when[order].to(self._rows.device, non_blocking=True)
        ratio = ratio.to(self._rows.device)[order.to(self._rows.device, non_blocking=True)]
        with self._rows.rows_of(distinct) as part:
            numbers = [part[name] for name in _LAYOUT]
            for size, here in rounds:
                self._count([each[:size] for each in numbers], ratio[here], when[here])

    def _count(self, numbers: Sequence[Tensor], ratio: Tensor, when: Tensor) -> None:
        """Count the steps of some examples up to ``when``, and set their norms; ``numbers``: see
        the layout.
        """
        levels, counts, old, since = numbers
        level, count = (ratio, when % 2) if self._own_steps else (old, when // 2 - since)
        if self.anchor > 0:
            for entries, booked in zip(
                numbers, added(levels, counts, self.levels_of(level), count), strict=False
            ):
                entries.copy_(booked)
        since.copy_(when // 2)
        old.copy_(ratio)

    def _clear(self) -> None:
        """Begin a new queue."""
        self._entered = self.steps
        self._queue: list[tuple[int, Tensor, Tensor]] = []  # when, rows, ratios
        self._queued = 0
        self._changes: list[tuple[int, float]] = []  # from which step on σ was another

    def _flush(self) -> None:
        """Enter what is queued before a reading; with several ranks, they have met before."""
        if self._exchange is None and not self.is_complete:
            self.enter()

    # ------------------------------------------------------------------ reading

    def counts_of(self, rows: Tensor) -> Tensor:
        """The counts of these examples, including steps since the last update, [rows, levels]."""
        self._flush()
        levels, counts, ratio, since = (self._rows.at(name, rows) for name in _LAYOUT)
        table = as_table(levels, counts)
        if self._own_steps:
            return table
        return table.scatter_add_(1, self.levels_of(ratio)[:, None], (self.steps - since)[:, None])

    def untouched(self, rows: Tensor) -> Tensor:
        """Whether these examples have had the norm C at every step, as those have that were never
        drawn, [rows].
        """
        self._flush()
        ratio, since, counts = (self._rows.at(name, rows) for name in ("ratio", "since", "counts"))
        return (ratio == 1) & (since == 0) & (counts[:, 0] == 0)

    def levels_of(self, ratio: Tensor) -> Tensor:
        """The level of each norm ‖g̃‖/C at the current noise, int64 [rows]."""
        edges = _edges(self.noise_multiplier / self.anchor, ratio.device)
        return LEVELS - 1 - torch.bucketize(ratio.contiguous(), edges)

    def multipliers(self) -> list[float]:
        """The noise multiplier of each grid level.

        The lowest level holds everything below it too.
        """
        grid = [self.anchor * RATIO ** (k - _BELOW) for k in range(LEVELS)]
        grid[0] = min(grid[0], self.lowest)
        return grid

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Everything that was entered, as tensors, [n, …] each, and plain numbers."""
        self._flush()
        return {**self._numbers(), **{name: value.clone() for name, value in self._rows.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`, which is taken when everything is entered."""
        for name in self._numbers():
            setattr(self, name, state[name])
        for name, rows in self._rows.items():
            rows.copy_(state[name].view_as(rows))
        self._clear()

    def _numbers(self) -> dict[str, float]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}


@lru_cache(maxsize=64)
def _edges(relative_noise: float, device: torch.device) -> Tensor:
    """The largest ratio ‖g̃‖/C of each level except the lowest, from the last level on, [levels −
    1].

    A ratio r belongs to the last level whose noise multiplier, in units of the anchor, is at most
    ``relative_noise``/r.
    """
    levels = torch.arange(LEVELS - 1, 0, -1, dtype=torch.float64)
    slack = 1e-5  # in levels, so that numbers on the grid are not rounded off it
    return (relative_noise * RATIO ** (_BELOW + slack - levels)).to(device, torch.float32)


def added(levels: Tensor, counts: Tensor, level: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """The entries of some examples after ``count`` more steps at ``level``, with the same number of
    entries.

    Args:
        levels: uint8, [rows, entries].
        counts: int32, [rows, entries].
        level: [rows].
        count: [rows].

    Example:
        >>> levels, counts = (
        ...     torch.tensor([[8, 10]], dtype=torch.uint8),
        ...     torch.tensor([[3, 1]], dtype=torch.int32),
        ... )
        >>> added(levels, counts, torch.tensor([11]), torch.tensor([2]))
        (tensor([[ 8, 10]], dtype=torch.uint8), tensor([[3, 3]], dtype=torch.int32))
    """
    levels = torch.cat([levels, level[:, None].to(levels.dtype)], dim=1)
    counts = torch.cat([counts, count[:, None].to(counts.dtype)], dim=1)
    return squeezed(levels, counts, levels.shape[1] - 1)


def squeezed(levels: Tensor, counts: Tensor, entries: int) -> tuple[Tensor, Tensor]:
    """The same in fewer entries, [rows, entries] each, which never understates the loss.

    Levels ascend.

    Equal levels are merged and entries without a count are dropped first, because both cost
    nothing.
    """
    levels = torch.where(counts > 0, levels, _EMPTY)
    order = levels.argsort(dim=1)
    levels, counts = levels.gather(1, order), counts.gather(1, order)
    while levels.shape[1] > entries:
        weight = torch.pow(RATIO, -2.0 * levels)
        # merged with the next
        upper = ((weight[:, :-1] - weight[:, 1:]) * counts[:, 1:]).argmin(dim=1, keepdim=True)

        # the next entry's steps count at the lower level, and the entry is removed
        counts = counts.scatter_add(1, upper, counts.gather(1, upper + 1))
        kept = torch.arange(levels.shape[1] - 1, device=levels.device)[None]
        kept = kept + (kept > upper)
        levels, counts = levels.gather(1, kept), counts.gather(1, kept)
    return levels, counts


def as_table(levels: Tensor, counts: Tensor) -> Tensor:
    """The counts of all levels, int32 [rows, 96]."""
    table = torch.zeros(len(levels), LEVELS + 1, dtype=counts.dtype, device=counts.device)
    return table.scatter_add_(1, torch.where(counts > 0, levels, _EMPTY).long(), counts)[:, :LEVELS]
