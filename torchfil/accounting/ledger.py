"""Running sums of Fisher information by example, over the steps of a training run.

By Theorem 3 of Guo et al. 2022 the sum over the steps of a realised run is an unbiased estimate of an upper
bound on the Fisher information of the trained model; a step without the example adds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

__all__ = ["TRACKABLE", "Contribution", "Ledger", "Track"]

Track = Literal["diagonal", "fim", "sketch", "plis"]
TRACKABLE: tuple[Track, ...] = ("diagonal", "fim", "sketch", "plis")


@dataclass(frozen=True)
class Contribution:
    """What one (physical) batch adds: row k belongs to example ``rows[k]``.

    Attributes:
        rows: Example numbers, [batch].
        squared_norm: ‖g̃‖², [batch].
        measured: Whether Fisher information was measured; otherwise the step was paused for these examples.
        trace: tr I_t, already weighted by 1/π where steps are skipped, [batch]; None where this step was
            skipped at random or not measured.
        variance: The variance of ``trace``, [batch].
        variance_spread: variance² / its degrees of freedom, [batch]; summed, it gives those of the total
            (Welch and Satterthwaite).
        variance_limit: A variance that is not too small in the mean, whatever the probes, [batch]; None: not known, and
            infinite from then on.
        certain: The part of ``trace`` that was not sampled, [batch]; None: 0.
        square: An estimate of (tr I_t)², [batch]; summed, it gives the variance due to random participation.
        diagonal: diag I_t, [batch, d]; with its variance.
        diagonal_variance: [batch, d].
        fim: I_t, [batch, d, d].
        sketch: I_t Ω, [batch, d, r].
        plis: ∂(‖g̃‖/s)²/∂z, [batch, d].
    """

    rows: Tensor
    squared_norm: Tensor
    measured: bool = True
    trace: Tensor | None = None
    variance: Tensor | None = None
    variance_spread: Tensor | None = None
    variance_limit: Tensor | None = None
    certain: Tensor | None = None
    square: Tensor | None = None
    diagonal: Tensor | None = None
    diagonal_variance: Tensor | None = None
    fim: Tensor | None = None
    sketch: Tensor | None = None
    plis: Tensor | None = None


class Ledger:
    """Sums per example, in float64 on one device.

    Args:
        num_examples: n.
        num_coordinates: d.
        track: What to keep beside the trace: "diagonal" (2nd numbers), "fim" (nd² numbers), "sketch" (ndr),
            "plis" (nd).
        sketch_rank: r, the number of columns of the test matrix.
        device: Where the sums live.
    """

    def __init__(
        self,
        num_examples: int,
        num_coordinates: int,
        *,
        track: Collection[Track] = (),
        sketch_rank: int = 4,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_examples = num_examples
        self.num_coordinates = num_coordinates
        self.track = tuple(name for name in TRACKABLE if name in track)
        self.sketch_rank = sketch_rank
        self.steps = 0
        self.missed_steps = 0
        self.sums: dict[str, Tensor] = {
            name: torch.zeros(shape, dtype=dtype, device=device)
            for name, (shape, dtype) in _layout(num_examples, num_coordinates, self.track, sketch_rank).items()
        }

    @staticmethod
    def bytes_needed(num_examples: int, num_coordinates: int, track: Collection[Track], sketch_rank: int) -> int:
        """How much memory a ledger of that size takes."""
        layout = _layout(num_examples, num_coordinates, track, sketch_rank)
        return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in layout.values())

    @staticmethod
    def infinite(like: Tensor) -> dict[str, Tensor]:
        """TEMP"""
        inf = torch.full_like(like, math.inf, dtype=torch.float64)
        return {"trace": inf, "certain": inf, "variance_limit": torch.zeros_like(inf), "square": inf}

    @property
    def device(self) -> torch.device:
        """Where the sums live."""
        return self.sums["trace"].device

    def add(self, contribution: Contribution) -> None:
        """Add what one batch contributes; each example occurs at most once in it."""
        rows = contribution.rows
        self.sums["participations"].index_add_(0, rows, torch.ones_like(rows))
        self.sums["squared_norm"].index_add_(0, rows, contribution.squared_norm.double())
        if not contribution.measured:
            self.sums["missed"].index_add_(0, rows, torch.ones_like(rows))
            return
        for name in (
            "trace",
            "variance",
            "variance_spread",
            "variance_limit",
            "certain",
            "square",
            "diagonal",
            "diagonal_variance",
            "fim",
            "sketch",
            "plis",
        ):
            value = getattr(contribution, name)
            if value is not None and name in self.sums:
                self.sums[name].index_add_(0, rows, value.double())
        if contribution.variance_limit is None:
            self.sums["variance_limit"].index_fill_(0, rows, math.inf)

    def state_dict(self) -> dict[str, Any]:
        """Everything, as tensors and plain numbers."""
        return {
            "num_examples": self.num_examples,
            "num_coordinates": self.num_coordinates,
            "track": list(self.track),
            "sketch_rank": self.sketch_rank,
            "steps": self.steps,
            "missed_steps": self.missed_steps,
            "sums": {name: value.clone() for name, value in self.sums.items()},
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any], device: torch.device | str = "cpu") -> Ledger:
        """The ledger whose state that is.

        Raises:
            ValueError: If something is missing or has the wrong shape.
        """
        try:
            ledger = cls(
                state["num_examples"],
                state["num_coordinates"],
                track=state["track"],
                sketch_rank=state["sketch_rank"],
                device=device,
            )
            ledger.steps, ledger.missed_steps = int(state["steps"]), int(state["missed_steps"])
            for name, value in ledger.sums.items():
                value.copy_(_same_shape(name, state["sums"][name], value))
        except KeyError as error:
            raise ValueError(f"the ledger's state lacks {error.args[0]!r}; was it saved by another version?") from error
        return ledger


def _layout(
    n: int, d: int, track: Collection[Track], sketch_rank: int
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    unknown = set(track) - set(TRACKABLE)
    if unknown:
        raise ValueError(f"track={sorted(unknown)} is not known; choose from {', '.join(TRACKABLE)}")
    layout: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "trace": ((n,), torch.float64),
        "variance": ((n,), torch.float64),
        "variance_spread": ((n,), torch.float64),
        "variance_limit": ((n,), torch.float64),
        "certain": ((n,), torch.float64),
        "square": ((n,), torch.float64),
        "squared_norm": ((n,), torch.float64),
        "participations": ((n,), torch.int64),
        "missed": ((n,), torch.int64),
    }
    if "diagonal" in track:
        layout["diagonal"] = layout["diagonal_variance"] = ((n, d), torch.float64)
    if "fim" in track:
        layout["fim"] = ((n, d, d), torch.float64)
    if "sketch" in track:
        layout["sketch"] = ((n, d, sketch_rank), torch.float64)
    if "plis" in track:
        layout["plis"] = ((n, d), torch.float64)
    return layout


def _same_shape(name: str, value: Tensor, like: Tensor) -> Tensor:
    if value.shape != like.shape:
        raise ValueError(f"the ledger's {name!r} has shape {tuple(value.shape)}, expected {tuple(like.shape)}")
    return value
