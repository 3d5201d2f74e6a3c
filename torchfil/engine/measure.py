"""What a step computes from a batch: one pass, and what makes passes fast or small.

    measure = halved(recorded_or_mapped(captured(finished(in_chunks(recorded))), in_chunks(mapped)))

Every function here has one signature, ``(bound, mechanism, probes, wanted) → StepValues``
(:data:`Measure`). Only ``recorded`` and ``mapped`` compute anything. Without any of the others the
numbers are the same up to rounding: a step is slower, or needs more memory. The choice of a pass
lies outside of graphs and chunks, because the two passes take other memory; halving lies outside of
everything, because nothing may catch an error while a graph is captured. They share two objects:
``plans`` (which pass serves a kind of examples, and how much it holds) and ``memory``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from torchfil.accounting.quantities import Track, columns_of, needs_of, question_column
from torchfil.accounting.sums import Column
from torchfil.engine.checks import check_copy
from torchfil.engine.forward import StartedGraph
from torchfil.engine.plans import Plans
from torchfil.fisher.batch import PrivateBatch, working_vectors
from torchfil.fisher.estimators import EXACT, Draws
from torchfil.fisher.gradients import ExampleGradients
from torchfil.fisher.mechanism import Mechanism
from torchfil.fisher.operator import ClippedJacobian, Jacobian
from torchfil.fisher.recording import (
    Plan,
    RecordedForward,
    RecordedJacobian,
    UnsupportedCallError,
)
from torchfil.fisher.recording.graphs import release_memory
from torchfil.utils.errors import ran_out
from torchfil.utils.trees import concatenated, map_tensors

# by question: the alternative of each answer; None: absent
Places = tuple[tuple[str, tuple[int | None, ...]], ...]
Half = RecordedForward | StartedGraph | None  # a forward pass that the loop has run

_MORE_WHEN_MAPPED = 4  # times the memory of a recorded pass


# ------------------------------------------------------------------ what goes in and comes out


@dataclass(frozen=True)
class Bound:
    """A batch of at least one example at the current weights.

    Attributes:
        gradients: The examples with the engine's copy of the model, and the loss.
        tried: The plan of such examples.
        forward: The loop's own forward pass over them, which the step may finish; None: there is
            none.
        live: The model that ran it.
        counts: Which examples count in the sum (1 or 0, [batch]), because a captured pass is
            padded; None: all.
    """

    gradients: ExampleGradients
    tried: Plan
    forward: Half = None
    live: nn.Module | None = None
    counts: Tensor | None = None


@dataclass(frozen=True)
class Wanted:
    """What a pass should compute besides losses and norms.

    Attributes:
        track: The quantities that are tracked besides the trace.
        estimator: The name of the estimator.
        summed: Whether the clipped sum is wanted.
        questions: For each question, which of the examples' alternatives
            (:func:`torchfil.engine.step.with_alternatives`) are its answers.
    """

    track: tuple[Track, ...]
    estimator: str
    summed: bool = True
    questions: Places = ()

    @property
    def kind(self) -> Hashable:
        """Everything that a captured pass depends on."""
        return self.track, self.estimator, self.summed, self.questions


@dataclass(frozen=True)
class StepValues:
    """The results of one pass over a batch.

    Attributes:
        losses: ℓ, [batch]; None if Opacus's gradients are released unmeasured.
        norm: ‖g‖ before clipping, [batch].
        clipped_norm: ‖g̃‖, [batch].
        sums: Σ_i g̃_i by parameter name; empty if not wanted.
        columns: What the ledger sums, by the names of quantities and questions; None if the step is
            not measured.
        output_gradients: ∂ℓ_i/∂output_i, for every tensor of the model's output; None if the pass
            has none.
    """

    losses: Tensor | None
    norm: Tensor
    clipped_norm: Tensor
    sums: dict[str, Tensor]
    columns: dict[str, Column] | None
    output_gradients: tuple[Tensor, ...] | None = None

    def kept(self, *, sums: bool) -> StepValues:
        """A copy that later passes do not overwrite; ``sums`` says whether the sums are copied,
        too.
        """
        copied = map_tensors(Tensor.clone, {**vars(self), "sums": self.sums if sums else None})
        return StepValues(**copied if sums else {**copied, "sums": self.sums})

    def first(self, count: int) -> StepValues:
        """The values of the first examples, this many; the sums stay as they are."""
        cut = map_tensors(lambda value: value[:count], {**vars(self), "sums": None})
        return StepValues(**{**cut, "sums": self.sums})


Measure = Callable[[Bound, Mechanism, Draws, Wanted], StepValues]
Size = Callable[[Bound, Wanted, int], int]


# ------------------------------------------------------------------ one pass


def recorded(bound: Bound, mechanism: Mechanism, probes: Draws, wanted: Wanted) -> StepValues:
    """From one recorded forward and backward pass over the batch; without seeds, no probe is
    measured.
    """
    forward, gradients = None, bound.gradients
    if isinstance(bound.forward, RecordedForward):
        assert bound.live is not None
        forward, gradients = bound.forward, replace(gradients, model=bound.live)
    jacobian = RecordedJacobian(gradients, mechanism, forward, measured=bool(probes.seeds))
    return values_of(jacobian, bound, mechanism, probes, wanted)


def mapped(bound: Bound, mechanism: Mechanism, probes: Draws, wanted: Wanted) -> StepValues:
    """The same from gradients mapped over examples: slower, for every model and estimator."""
    clipping = mechanism.clip, mechanism.max_grad_norm, mechanism.shares
    return values_of(ClippedJacobian(bound.gradients, *clipping), bound, mechanism, probes, wanted)


def values_of(
    jacobian: Jacobian, bound: Bound, mechanism: Mechanism, probes: Draws, wanted: Wanted
) -> StepValues:
    """The wanted values from an example's Jacobian."""
    columns: dict[str, Column] | None = None
    if probes.seeds:
        needs, batch = needs_of(wanted.track), PrivateBatch(bound.gradients, mechanism)
        found = batch.measured(
            jacobian, needs.quantities, wanted.estimator, probes, needs.susceptibility
        )
        columns = columns_of(found, wanted.track)
    if wanted.questions:
        columns = (columns or {}) | _divergences(jacobian, bound, mechanism, wanted)
    sums = jacobian.clipped_sum(bound.counts) if wanted.summed else {}
    norms = jacobian.norm, jacobian.clipped_norm
    return StepValues(jacobian.losses, *norms, sums, columns, jacobian.output_gradients)


def _divergences(
    jacobian: Jacobian, bound: Bound, mechanism: Mechanism, wanted: Wanted
) -> dict[str, Column]:
    """The questions' columns, KL_t of each answer, [batch, m]; for "absent", the gradients' norms
    are enough.
    """
    examples = jacobian.gradients.examples
    # the copy, whose passes nobody counts
    gradients = replace(jacobian.gradients, model=bound.gradients.model)
    by_alternative = [
        jacobian.products_with(replace(gradients, examples=other))
        for other in examples.alternatives
    ]
    columns: dict[str, Column] = {}
    for name, places in wanted.questions:
        products = [jacobian.products_alone() if k is None else by_alternative[k] for k in places]
        weights = examples.clip_weights
        by_answer = [mechanism.divergence(each, weights) for each in products]
        columns[question_column(name)] = {"value": torch.stack(by_answer, dim=1)}
    return columns


# ------------------------------------------------------------------ in pieces


@dataclass
class Memory:
    """What passes may hold.

    Attributes:
        limit: Bytes; fewer once a pass has run out of memory.
        at_once: How many examples the latest pass took together.
        each: The bytes that it held for each.
        least: The bytes for each within the smallest limit.
        has_warned: Whether a user knows that passes are cut.
    """

    limit: int
    at_once: int = 1
    each: int = 1
    least: int = 1
    has_warned: bool = False

    def room(self, bytes_per_example: int) -> int:
        """How many examples a pass may hold at once."""
        return max(1, self.limit // max(1, bytes_per_example))

    def halve(self, reason: str) -> None:
        """Let a pass hold half as much as the one that ran out of memory."""
        self.limit = min(self.limit, self.at_once * self.each) // 2
        release_memory()

        # warn the first time: from now on every step takes longer
        if not self.has_warned:
            self.has_warned = True
            now = min(self.at_once, self.room(self.each))
            what = (
                f"a pass over {self.at_once} examples ran out of memory ({reason}), and is "
                f"repeated with {now}"
            )
            warnings.warn(
                f"{what}, with the same numbers; start with Execution(max_memory={self.limit})",
                stacklevel=2,
            )


def in_chunks(measure: Measure, size: Size, memory: Memory) -> Measure:
    """In pieces that fit into memory.

    Args:
        measure: The pass.
        size: The bytes that it holds for one example, within a limit.
        memory: What may be held.
    """

    def run(bound: Bound, mechanism: Mechanism, probes: Draws, wanted: Wanted) -> StepValues:
        each, count = size(bound, wanted, memory.limit), len(bound.gradients)
        room = memory.room(each)
        memory.at_once, memory.each = min(count, room), each
        memory.least = size(bound, wanted, 0)
        if count <= room:
            return measure(bound, mechanism, probes, wanted)
        whole = replace(bound, forward=None)
        parts = bound.gradients.chunks(memory.limit, each)
        return joined(
            measure(replace(whole, gradients=part), mechanism, probes, wanted) for _, part in parts
        )

    return run


def bytes_recorded(bound: Bound, wanted: Wanted, limit: int) -> int:
    """What a recorded pass holds for one example."""
    return bound.tried.bytes_per_example


def bytes_mapped(bound: Bound, wanted: Wanted, limit: int) -> int:
    """What a mapped pass holds for one example, with as many columns of J as fit."""
    vectors = working_vectors(bound.gradients, wanted.estimator, limit)[1]
    return vectors * bound.gradients.bytes_per_vector


def joined(parts: Iterable[StepValues]) -> StepValues:
    """Several passes as one: their examples concatenated, their sums added as they come."""
    first: dict[str, Tensor] = {}  # may share memory with other tensors
    total: dict[str, Tensor] = {}

    def take(part: StepValues) -> StepValues:
        for name, value in part.sums.items():
            if name in total:
                total[name] += value
            elif name in first:
                total[name] = first.pop(name) + value
            else:
                first[name] = value
        return replace(part, sums={})

    found = list(map(take, parts))  # a loop would keep each part's sums during the next pass
    # a mapped pass has them in another order than a recorded one
    names = list(found[0].columns or ())
    columns = [
        None if part.columns is None else {name: part.columns[name] for name in names}
        for part in found
    ]
    found = [replace(part, columns=each) for part, each in zip(found, columns, strict=True)]
    if any(part.output_gradients is None for part in found):
        found = [replace(part, output_gradients=None) for part in found]
    return replace(concatenated(found), sums=first | total)


def halved(measure: Measure, memory: Memory) -> Measure:
    """Once more with half as much at once, if a pass runs out of memory.

    A pass that failed leaves nothing behind: no number and no entry in the ledger. Its seeds
    determine its probes, so the numbers are the same up to rounding.

    Raises:
        torch.OutOfMemoryError: Not even one example fits; the limit stays as it was.
    """

    def run(bound: Bound, mechanism: Mechanism, probes: Draws, wanted: Wanted) -> StepValues:
        before = memory.limit
        while True:
            try:
                return measure(bound, mechanism, probes, wanted)
            except RuntimeError as error:
                if not ran_out(error):
                    raise
                reason = str(error).partition("\n")[0][:200]
            bound = replace(bound, forward=None)  # which would keep its tensors in memory
            # only here is the error gone, whose traceback held everything that the pass had
            # allocated
            if memory.at_once == 1 and memory.each <= memory.least:
                memory.limit = before
                raise torch.OutOfMemoryError(
                    f"the pass over one example ran out of memory ({reason}). This step was not "
                    "taken: track less (track=()), or use fewer probes (num_probes=)."
                )
            memory.halve(reason)

    return run


# ------------------------------------------------------------------ which pass serves


def finished(measure: Measure, plans: Plans) -> Measure:
    """From the loop's own forward pass as far as it can be used: the way back from its outputs
    shows it.
    """

    def run(bound: Bound, mechanism: Mechanism, probes: Draws, wanted: Wanted) -> StepValues:
        if isinstance(bound.forward, RecordedForward):
            try:
                return measure(bound, mechanism, probes, wanted)
            except UnsupportedCallError:
                plans.refuse_live(bound.gradients)
        return measure(replace(bound, forward=None), mechanism, probes, wanted)

    return run


def recorded_or_mapped(recorded: Measure, mapped: Measure, plans: Plans, memory: Memory) -> Measure:
    """By a recorded pass as far as one serves.

    The exact estimator uses products with every column of J; then the recorded pass gives the rest.
    """

    def run(bound: Bound, mechanism: Mechanism, probes: Draws, wanted: Wanted) -> StepValues:
        bound = _by_rows(bound, memory)

        def by_example(wanted: Wanted) -> StepValues:
            columns = working_vectors(bound.gradients, wanted.estimator, memory.limit)[0]
            return mapped(bound, mechanism, replace(probes, columns_at_once=columns), wanted)

        serves = wanted.estimator != EXACT or not probes.seeds
        if not bound.tried.fits or not (serves or wanted.summed):
            return by_example(wanted)
        size = bound.tried.bytes_per_example
        if wanted.questions:  # an alternative has a pass in addition to the examples' own
            bound = replace(bound, tried=replace(bound.tried, bytes_per_example=2 * size))
        batch = PrivateBatch(bound.gradients, mechanism, bound.tried)
        at_once = batch.probes_at_once(len(probes.seeds), memory.limit)
        draws = replace(probes, probes_at_once=at_once)
        try:
            own = draws if serves else replace(draws, seeds=())
            values = recorded(bound, mechanism, own, wanted)
        except UnsupportedCallError as error:  # of a batch that is not as the trial's
            plans.refuse(bound.gradients, bound.tried, str(error))
            return by_example(wanted)
        if serves:
            return values
        measured = by_example(replace(wanted, summed=False, questions=()))
        check_copy(measured.norm, values.norm, reduced=bound.gradients.reduced)
        return replace(values, columns={**(values.columns or {}), **(measured.columns or {})})

    return run


def exceeds(gradients: ExampleGradients, tried: Plan, memory: Memory) -> bool:
    """Whether the rows of one owner do not fit together.

    Masks cannot be cut, so they are not asked to.
    """
    examples = gradients.examples
    too_large = tried.bytes_per_example > memory.limit
    return examples.num_rows > 1 and too_large and not examples.masks


def _by_rows(bound: Bound, memory: Memory) -> Bound:
    """The batch, with owners cut by rows if theirs do not fit together."""
    gradients, tried = bound.gradients, bound.tried
    if not exceeds(gradients, tried, memory):
        return bound
    of_a_row = _MORE_WHEN_MAPPED * (tried.bytes_per_example // gradients.examples.num_rows)
    cut = replace(
        gradients, examples=gradients.examples.by_place, rows_at_once=memory.room(of_a_row)
    )
    reason = "an owner's rows do not fit into memory together"
    return Bound(cut, Plan(reason, 0, facts=tried.facts))
