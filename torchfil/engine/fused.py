"""A whole private step from one recorded pass: losses, clipped sum and Fisher accounting from the same graph."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchfil.clipping import ClipFunction
from torchfil.examples import Examples
from torchfil.fisher.batch import Measurement, PrivateBatch
from torchfil.fisher.estimators import Draws, Quantity
from torchfil.fisher.ghost import GhostJacobian
from torchfil.fisher.gradients import ExampleGradients
from torchfil.fisher.graphs import CapturedPass, signature
from torchfil.fisher.mechanism import Mechanism
from torchfil.fisher.operator import ClippedJacobian

__all__ = ["FusedPass", "FusedResult"]

logger = logging.getLogger(__name__)

_MOST_GRAPHS = 32
_BUCKETS = 16  # graphs' batch sizes are multiples of a sixteenth of the expected batch


@dataclass(frozen=True)
class FusedResult:
    """What one pass over a batch gives.

    Attributes:
        losses: ℓ, [batch].
        norm: ‖g‖ before clipping, [batch].
        sums: Σ_i g̃_i by parameter name.
        measurement: Fisher quantities; None where the step is not measured.
    """

    losses: Tensor
    norm: Tensor
    sums: dict[str, Tensor]
    measurement: Measurement | None


class FusedPass:
    """Runs batches through one recorded pass each; on a GPU as a CUDA graph, where the pass can be captured.

    A graph needs fixed shapes: a batch is padded with copies of its first example to the next multiple of a sixteenth
    of the expected batch, and the copies are masked out of the sum.

    Args:
        expected_batch: The mean batch size.
        graphs: Whether to use CUDA graphs on a GPU.
    """

    def __init__(self, expected_batch: int, *, graphs: bool = True) -> None:
        self.bucket = max(8, -(-expected_batch // _BUCKETS))
        self.graphs = graphs
        self._captured: dict[Hashable, _Captured] = {}
        self._pool: Any = None  # one memory for all graphs: they are replayed one after the other

    def run(
        self,
        batch: PrivateBatch,
        quantities: tuple[Quantity, ...],
        seeds: tuple[int, ...],
        max_memory: int,
        *,
        measured: bool = True,
        summed: bool = True,
        susceptibility: bool = False,
    ) -> FusedResult:
        """One pass over the batch, in chunks where ``max_memory`` asks for them.

        Args:
            batch: The examples, at least one, and the mechanism.
            quantities: What to measure.
            seeds: Of the weight probes.
            max_memory: Bytes that the recorded graph may hold.
            measured: Whether to measure.
            summed: Whether the clipped sum is wanted; otherwise ``sums`` is empty.
            susceptibility: Whether to give the PLIS, too.
        """
        found = batch.known
        assert found is not None
        fits = len(batch.gradients) + self.bucket <= max(1, max_memory // max(1, found.bytes_per_example))
        if self.graphs and fits and batch.gradients.device.type == "cuda":
            folded = len(seeds) == 1 and not susceptibility
            replayed = self._replay(batch, seeds if measured else (), folded=folded, summed=summed)
            if replayed is not None:
                return self._read(batch, quantities, seeds, replayed, measured=measured, susceptibility=susceptibility)
        losses: list[Tensor] = []
        norms: list[Tensor] = []
        sums: dict[str, Tensor] = {}

        def chunks() -> Iterator[tuple[slice, ClippedJacobian]]:
            for rows, jacobian in batch.chunks(max_memory, 1, one_pass=True):
                assert isinstance(jacobian, GhostJacobian)
                yield rows, jacobian
                losses.append(jacobian.losses)
                norms.append(jacobian.norm)
                for name, part in jacobian.clipped_sum().items() if summed else ():
                    sums[name] = sums[name] + part if name in sums else part

        measurement = None
        if measured:
            measurement = batch.measured(chunks(), quantities, "weight-probes", seeds, susceptibility=susceptibility)
        else:
            for _ in chunks():
                pass
        return FusedResult(torch.cat(losses), torch.cat(norms), sums, measurement)

    def _replay(self, batch: PrivateBatch, seeds: tuple[int, ...], *, folded: bool, summed: bool) -> _Outputs | None:
        gradients, mechanism = batch.gradients, batch.mechanism
        size = -(-len(gradients) // self.bucket) * self.bucket
        key = (size, signature(gradients), len(seeds), folded, summed, mechanism)
        try:
            if key not in self._captured:
                if len(self._captured) >= _MOST_GRAPHS:  # a changing noise or threshold needs a graph each
                    self._captured.clear()
                self._captured[key] = _Captured(
                    gradients, size, len(seeds), mechanism, self._memory(), folded=folded, summed=summed
                )
            return self._captured[key].replay(gradients.examples, seeds)
        except RuntimeError as error:
            logger.warning("the step could not be captured in a CUDA graph and runs eagerly: %s", error)
            self.graphs = False
            self._captured.clear()
            self._pool = None
            return None

    def _memory(self) -> Any:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool

    def _read(
        self,
        batch: PrivateBatch,
        quantities: tuple[Quantity, ...],
        seeds: tuple[int, ...],
        outputs: _Outputs,
        *,
        measured: bool,
        susceptibility: bool,
    ) -> FusedResult:
        count, mechanism = len(batch.gradients), batch.mechanism
        measurement = None
        if measured:
            jacobian = _Replayed(batch.gradients, mechanism.clip, mechanism.max_grad_norm, outputs, count)
            chunk = [(slice(0, count), jacobian)]
            measurement = batch.measured(chunk, quantities, "weight-probes", seeds, susceptibility=susceptibility)
        return FusedResult(outputs.losses[:count].clone(), outputs.norm[:count].clone(), outputs.sums, measurement)


@dataclass(frozen=True)
class _Outputs:
    """A captured pass's results, overwritten by the next replay."""

    losses: Tensor
    norm: Tensor
    norm_gradient: Tensor | None
    rows: tuple[Tensor, ...]
    sums: dict[str, Tensor]


class _Captured:
    """One pass of fixed size as a CUDA graph, with the probes and the mask that it reads."""

    def __init__(
        self,
        gradients: ExampleGradients,
        size: int,
        num_probes: int,
        mechanism: Mechanism,
        pool: Any,
        *,
        folded: bool,
        summed: bool,
    ) -> None:
        self.probes = [
            torch.zeros(gradients.num_parameters, dtype=gradients.dtype, device=gradients.device)
            for _ in range(num_probes)
        ]
        self.mask = torch.zeros(size, dtype=gradients.dtype, device=gradients.device)
        self.mechanism, self.folded, self.summed = mechanism, folded, summed
        self.captured = CapturedPass(gradients, size, self._pass, pool)

    def _pass(self, gradients: ExampleGradients) -> _Outputs:
        jacobian = GhostJacobian(gradients, self.mechanism.clip, self.mechanism.max_grad_norm)
        if self.folded and self.probes:
            rows: tuple[Tensor, ...] = (jacobian.folded_row(self.mechanism, lambda: self.probes[0]),)
            slope = None
        else:
            rows = tuple(jacobian.perpendicular_rmatvec(u) for u in self.probes)
            slope = jacobian.norm_gradient if self.probes else None
        sums = jacobian.clipped_sum(self.mask) if self.summed else {}
        return _Outputs(jacobian.losses, jacobian.norm, slope, rows, sums)

    def replay(self, examples: Examples, seeds: tuple[int, ...]) -> _Outputs:
        """The pass over these examples."""
        count = len(examples)
        self.mask.zero_()
        self.mask[:count] = 1
        draws = Draws(seeds, slice(0, count), count, 1)
        if self.probes:
            for static, u in zip(self.probes, draws.signs(len(self.probes[0]), like=self.mask), strict=True):
                static.copy_(u)
        return self.captured.replay(examples)


class _Replayed(GhostJacobian):
    """The Jacobian whose products with the probes were computed already, in their order."""

    def __init__(
        self, gradients: ExampleGradients, clip: ClipFunction, max_grad_norm: float, outputs: _Outputs, count: int
    ) -> None:
        super().__init__(gradients, clip, max_grad_norm)
        self.norm = outputs.norm[:count].clone()
        if outputs.norm_gradient is not None:
            self.norm_gradient = outputs.norm_gradient[:count].clone()
        self._rows = iter([row[:count] for row in outputs.rows])

    def perpendicular_rmatvec(self, u: Tensor) -> Tensor:
        """The next row."""
        return next(self._rows)

    def folded_row(self, mechanism: Mechanism, probe: Callable[[], Tensor]) -> Tensor:
        """The one row."""
        return next(self._rows)
