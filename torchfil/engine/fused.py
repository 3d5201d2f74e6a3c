"""A whole private step from one recorded pass: losses, clipped sum and Fisher accounting from the same graph."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchfil.accounting.contributions import additions
from torchfil.accounting.quantities import Track, needs_of
from torchfil.fisher.batch import PrivateBatch
from torchfil.fisher.draws import Draws, GivenDraws, draw_bits, signs_of
from torchfil.fisher.gradients import ExampleGradients
from torchfil.fisher.recording import RecordedJacobian
from torchfil.fisher.recording.compiled import CompilationError, CompiledPass
from torchfil.fisher.recording.graphs import CapturedPass, signature
from torchfil.fisher.rules.products import exact_convolutions, product_precision
from torchfil.private import Examples
from torchfil.utils.trees import map_tensors

__all__ = ["FusedPass", "FusedResult", "Wanted", "confirm", "joined"]

logger = logging.getLogger(__name__)

_MOST_GRAPHS = 48
_BUCKETS = 8  # graphs' batch sizes are multiples of an eighth of the expected batch
_USES_BEFORE_COMPILING = 16
_SHARE_BEFORE_COMPILING = 0.125  # of the batches so far
_FURTHER_PADDING = 1.25  # a compiled pass for up to so many times the size serves, too
_MOST_PARTS_TO_COMPILE = 8  # of a pass's probes: each part is compiled by itself, whatever the number of its probes


@dataclass(frozen=True)
class FusedResult:
    """What one pass over a batch gives.

    Attributes:
        losses: ℓ, [batch].
        norm: ‖g‖ before clipping, [batch].
        clipped_norm: ‖g̃‖, [batch].
        sums: Σ_i g̃_i by parameter name; empty where it is not wanted.
        additions: What the ledger adds, by name, [batch, …] each; None where the step is not measured.
        output_gradients: ∂ℓ_i/∂output_i, for every tensor of the model's output; empty where they are not wanted.
    """

    losses: Tensor
    norm: Tensor
    clipped_norm: Tensor
    sums: dict[str, Tensor]
    additions: dict[str, Tensor] | None
    output_gradients: tuple[Tensor, ...] = ()

    def kept(self) -> FusedResult:
        """The same, which later passes do not overwrite."""
        return FusedResult(**map_tensors(Tensor.clone, vars(self)))

    def first(self, count: int) -> FusedResult:
        """The same of so many examples; the sums are left as they are."""
        cut = map_tensors(lambda value: value[:count], {**vars(self), "sums": None})
        return FusedResult(**{**cut, "sums": self.sums})


@dataclass(frozen=True)
class Wanted:
    """What a pass is to give.

    Attributes:
        track: The tracked quantities.
        seeds: Of the weight probes; none: the step is not measured.
        rate: π, the probability with which such a step is measured.
        summed: Whether the clipped sum is wanted.
        at_outputs: Whether the gradients at the model's outputs are.
        estimator: The name of an estimator that the recorded pass serves.
    """

    track: tuple[Track, ...]
    seeds: tuple[int, ...]
    rate: float = 1.0
    summed: bool = True
    at_outputs: bool = False
    estimator: str = "weight-probes"

    @property
    def kind(self) -> Hashable:
        """All that a captured pass depends on."""
        return (
            self.track,
            len(self.seeds),
            self.rate < 1,
            self.summed,
            self.at_outputs,
            self.estimator,
        )


class FusedPass:
    """Runs batches through one recorded pass each; on a GPU as a CUDA graph, where the pass can be captured.

    A graph needs fixed shapes: a batch is padded with copies of its first example to the next multiple of an eighth of
    the expected batch, and the copies are masked out of the sum. A graph that is used often is compiled, if wanted.

    Args:
        expected_batch: The mean batch size.
        graphs: Whether to use CUDA graphs on a GPU.
        compiled: Whether to compile those that are used often.
    """

    def __init__(self, expected_batch: int, *, graphs: bool = True, compiled: bool = False) -> None:
        self.bucket = max(8, -(-expected_batch // _BUCKETS))
        self.graphs = graphs
        self.compiled = compiled
        self._captured: dict[tuple[Hashable, int], _Captured] = {}  # by kind and size
        self._uses: Counter[tuple[Hashable, int]] = Counter()
        self._pool: Any = None  # one memory for all graphs: they are replayed one after the other

    def run(self, batch: PrivateBatch, wanted: Wanted, max_memory: int, mode: Hashable = None) -> FusedResult:
        """One pass over the batch, at least one example, in chunks where ``max_memory`` asks for them.

        The next pass may overwrite what this one gives; see :meth:`FusedResult.kept`. A graph serves batches of one
        ``mode`` of the model, such as which of its modules are in training.
        """
        found = batch.plan
        assert found is not None
        room = max(1, max_memory // max(1, found.bytes_per_example))
        fits = len(batch.gradients) + self.bucket <= room
        if self.graphs and fits and batch.gradients.device.type == "cuda":
            replayed = self._replay(batch, wanted, room, mode)
            if replayed is not None:
                return replayed
        parts: list[FusedResult] = []
        at_once = batch.probes_at_once(len(wanted.seeds), max_memory)
        for rows, jacobian in batch.chunks(max_memory, 1, one_pass=True):
            assert isinstance(jacobian, RecordedJacobian)
            draws = Draws(wanted.seeds, rows, len(batch.gradients), 1, at_once)
            parts.append(_result(batch, jacobian, wanted, draws, wanted.rate))
        return joined(parts)

    def _replay(self, batch: PrivateBatch, wanted: Wanted, room: int, mode: Hashable = None) -> FusedResult | None:
        gradients = batch.gradients
        size = -(-len(gradients) // self.bucket) * self.bucket
        kind = (signature(gradients), mode, wanted.kind, batch.mechanism)
        try:
            captured = self._compiled_for(batch, wanted, kind, size, room) if self.compiled else None
            captured = captured or self._captured.get((kind, size)) or self._capture(batch, wanted, size)
            self._captured.pop((kind, captured.size), None)
            self._captured[kind, captured.size] = captured  # the latest stands last
            if len(self._captured) > _MOST_GRAPHS:  # a changing noise or threshold needs a graph each
                oldest = next(iter(self._captured))
                del self._captured[oldest], self._uses[oldest]
            return captured.replay(gradients.examples, wanted)
        except RuntimeError as error:
            logger.warning("the step could not be captured in a CUDA graph and runs eagerly: %s", error)
            self.graphs = False
            self._captured.clear()
            self._pool = None
            return None

    def _compiled_for(
        self, batch: PrivateBatch, wanted: Wanted, kind: Hashable, size: int, room: int
    ) -> _Captured | None:
        """A compiled pass for so many examples, made now where it is worth it; None: there is none."""
        self._uses[kind, size] += 1
        known = self._captured.get((kind, size))
        if known is not None and known.compiled:
            return known
        uses = self._uses[kind, size]
        of_kind = sum(count for (its_kind, _), count in self._uses.items() if its_kind == kind)
        if uses >= _USES_BEFORE_COMPILING and uses >= _SHARE_BEFORE_COMPILING * of_kind:
            return self._compile(batch, wanted, size, room)
        larger = [n for (its_kind, n), other in self._captured.items() if its_kind == kind and other.compiled]
        fitting = [n for n in larger if size <= n <= _FURTHER_PADDING * size]
        return self._captured[kind, min(fitting)] if fitting else None

    def _capture(
        self, batch: PrivateBatch, wanted: Wanted, size: int, *, compiled: bool = False, probes_at_once: int = 1
    ) -> _Captured:
        warm_ups = 1 if self._captured else 3
        return _Captured(
            batch, size, wanted, self._memory(), warm_ups, compiled=compiled, probes_at_once=probes_at_once
        )

    def _compile(self, batch: PrivateBatch, wanted: Wanted, size: int, room: int) -> _Captured | None:
        """``room``: the examples whose pass the memory would hold."""
        probes = len(wanted.seeds)
        fitting = max(1, min(probes, room // size))
        logger.info("compiling the pass over %d examples with %d probes", size, probes)
        problem: Exception | str = (
            f"it would have to be compiled in {-(-probes // fitting)} parts, since max_memory holds {fitting} of its "
            f"{probes} probes at once; raise max_memory or take fewer probes"
        )
        for at_once in dict.fromkeys((fitting, 1)):
            if probes > _MOST_PARTS_TO_COMPILE * at_once:
                continue
            try:
                return self._capture(batch, wanted, size, compiled=True, probes_at_once=at_once)
            except CompilationError as error:
                problem = error
                logger.info("compiling with %d probes at once failed: %s", at_once, error)
        logger.warning("the step could not be compiled and goes on as it is: %s", problem)
        self.compiled = False
        return None

    def _memory(self) -> Any:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool


def joined(parts: Sequence[FusedResult]) -> FusedResult:
    """Several passes as one: their examples one after the other, their sums added."""
    if len(parts) == 1:
        return parts[0]
    measured = [part.additions for part in parts if part.additions is not None]
    return FusedResult(
        torch.cat([part.losses for part in parts]),
        torch.cat([part.norm for part in parts]),
        torch.cat([part.clipped_norm for part in parts]),
        {name: torch.stack([part.sums[name] for part in parts]).sum(dim=0) for name in parts[0].sums},
        {name: torch.cat([part[name] for part in measured]) for name in measured[0]} if measured else None,
        tuple(map(torch.cat, zip(*(part.output_gradients for part in parts), strict=True))),
    )


def confirm(found: FusedResult, true: FusedResult, dtype: torch.dtype) -> None:
    """Raise unless both agree, as compilers err; computed in that dtype with exact convolutions.

    Raises:
        CompilationError: With what differs, and by how much.
    """
    tolerance = 1e-8 if dtype == torch.float64 else 1e-2 if product_precision() == "tf32" else 1e-3
    values = _named(found)
    for name, truth in _named(true).items():
        apart, size = float((values[name] - truth).abs().max()), float(truth.abs().max())
        if not apart <= tolerance * size:
            raise CompilationError(f"{name} off by {apart:.3g}, the largest being {size:.3g}")


def _named(result: FusedResult) -> dict[str, Tensor]:
    """Every part with a name; the clipped sum as a whole, of which parts may vanish but for rounding."""
    named = {"losses": result.losses, "norms": result.norm, "clipped norms": result.clipped_norm}
    named |= {f"addition {name!r}": value for name, value in (result.additions or {}).items()}
    named |= {f"gradient at output {k}": value for k, value in enumerate(result.output_gradients)}
    if result.sums:
        named["clipped sum"] = torch.cat([part.flatten() for part in result.sums.values()])
    return named


def _result(
    batch: PrivateBatch,
    jacobian: RecordedJacobian,
    wanted: Wanted,
    draws: Draws,
    rate: float | Tensor,
    mask: Tensor | None = None,
) -> FusedResult:
    """Everything that is wanted of one chunk."""
    added = None
    if wanted.seeds:
        chunk = [(draws.rows, jacobian)]
        needs = needs_of(wanted.track)
        measurement = batch.measured(
            chunk, needs.quantities, wanted.estimator, draws, susceptibility=needs.susceptibility
        )
        added = additions(measurement, rate, skipping=wanted.rate < 1, track=wanted.track)
    sums = jacobian.clipped_sum(mask) if wanted.summed else {}
    at_outputs = jacobian.output_gradients if wanted.at_outputs else ()
    return FusedResult(jacobian.losses, jacobian.norm, jacobian.clipped_norm, sums, added, at_outputs)


class _Captured:
    """One pass of fixed size as a CUDA graph, with the probes' bits, the batch's size and the rate that it reads.

    Attributes:
        size: How many examples it takes.
        compiled: Whether it was compiled before it was captured.
        probes_at_once: How many probes are worked at together.
    """

    def __init__(
        self,
        batch: PrivateBatch,
        size: int,
        wanted: Wanted,
        pool: Any,
        warm_ups: int,
        *,
        compiled: bool = False,
        probes_at_once: int = 1,
    ) -> None:
        gradients = batch.gradients
        self.batch, self.wanted, self.size = batch, wanted, size
        self.compiled, self.probes_at_once = compiled, probes_at_once
        device = gradients.device
        self.bits = tuple(torch.zeros(gradients.num_parameters, dtype=torch.int8, device=device) for _ in wanted.seeds)
        self.source = torch.Generator(device=device)
        self.places = torch.arange(size, device=device)
        self.count = torch.zeros((), dtype=torch.long, device=device)
        self.rate = torch.full((), wanted.rate, dtype=torch.float64, device=gradients.device)
        self._compiled_pass: CompiledPass[dict[str, Any]] | None = None
        if compiled:
            self._fill_in_for_a_trial()
        self.captured = CapturedPass(gradients, size, self._run, pool, warm_ups)

    def _fill_in_for_a_trial(self) -> None:
        """Probes that differ, and nothing masked."""
        for seed, bits in enumerate(self.bits):
            draw_bits(seed, bits)
        self.count.fill_(self.size)

    def _run(self, gradients: ExampleGradients) -> FusedResult:
        inputs = (self.bits, self.places, self.count, self.rate)
        if not self.compiled:
            return FusedResult(**self._pass(gradients, inputs))
        if self._compiled_pass is None:
            made = CompiledPass(partial(self._pass, probes_at_once=self.probes_at_once), gradients, inputs)
            with exact_convolutions():
                found, true = (FusedResult(**run(gradients, inputs)) for run in (made, self._pass))
            confirm(found, true, gradients.dtype)
            self._compiled_pass = made
        return FusedResult(**self._compiled_pass(gradients, inputs))

    def _pass(
        self,
        gradients: ExampleGradients,
        inputs: tuple[tuple[Tensor, ...], Tensor, Tensor, Tensor],
        probes_at_once: int = 1,
    ) -> dict[str, Any]:
        """The fields of the result."""
        all_bits, places, count, rate = inputs
        mechanism = self.batch.mechanism
        jacobian = RecordedJacobian(gradients, mechanism.clip, mechanism.max_grad_norm)
        probes = tuple(signs_of(bits, gradients.dtype) for bits in all_bits)
        draws = GivenDraws(self.wanted.seeds, slice(0, self.size), self.size, 1, probes_at_once, probes)
        mask = (places < count).to(gradients.dtype)
        return vars(_result(replace(self.batch, gradients=gradients), jacobian, self.wanted, draws, rate, mask))

    def replay(self, examples: Examples, wanted: Wanted) -> FusedResult:
        """The pass over these examples; the next replay overwrites what it gives."""
        count = len(examples)
        self.count.fill_(count)
        if wanted.rate < 1:
            self.rate.fill_(wanted.rate)
        for bits, seed in zip(self.bits, wanted.seeds, strict=True):
            draw_bits(seed, bits, self.source)
        result = self.captured.replay(examples)
        return result.first(count)
