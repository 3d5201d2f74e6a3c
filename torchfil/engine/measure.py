"""What a pass over a batch should compute, and its results: losses, norms, clipped sums, what the ledger adds.

For questions, a batch has alternatives: its examples as the questions of the run change them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torchfil.accounting.quantities import Asked, Divergence, Track, additions, needs_of
from torchfil.fisher.batch import PrivateBatch
from torchfil.fisher.estimators import Draws
from torchfil.fisher.operator import Jacobian
from torchfil.private import Examples, as_call, as_given, check_finite
from torchfil.questions import Alternative, Question
from torchfil.utils.trees import concatenated, map_tensors, tensors_of

Places = tuple[tuple[str, tuple[int | None, ...]], ...]  # by question: the alternative of each answer; None: absent


@dataclass(frozen=True)
class StepValues:
    """The results of one pass over a batch.

    Attributes:
        losses: ℓ, [batch]; None if Opacus's gradients are released unmeasured.
        norm: ‖g‖ before clipping, [batch].
        clipped_norm: ‖g̃‖, [batch].
        sums: Σ_i g̃_i by parameter name; empty if not wanted.
        additions: What the ledger adds, by name, [batch, …] each; None if the step is not measured.
        output_gradients: ∂ℓ_i/∂output_i, for every tensor of the model's output; None if the pass has none.
    """

    losses: Tensor | None
    norm: Tensor
    clipped_norm: Tensor
    sums: dict[str, Tensor]
    additions: dict[str, Tensor] | None
    output_gradients: tuple[Tensor, ...] | None = None

    def kept(self, *, sums: bool) -> StepValues:
        """A copy that later passes do not overwrite; ``sums`` says whether the sums are copied, too."""
        copied = map_tensors(Tensor.clone, {**vars(self), "sums": self.sums if sums else None})
        return StepValues(**copied if sums else {**copied, "sums": self.sums})

    def measured_anew(self, rows: Tensor, additions: dict[str, Tensor]) -> StepValues:
        """The same, with the additions of these rows replaced by a later measurement, [rows, …] each."""
        before = self.additions or {}
        size = len(self.norm)
        parts = {name: before.get(name, value.new_zeros(size, *value.shape[1:])) for name, value in additions.items()}
        added = {name: part.index_copy(0, rows, additions[name]) for name, part in parts.items()}
        return replace(self, additions={**before, **added})

    def first(self, count: int) -> StepValues:
        """The values of the first examples, this many; the sums stay as they are."""
        cut = map_tensors(lambda value: value[:count], {**vars(self), "sums": None})
        return StepValues(**{**cut, "sums": self.sums})


@dataclass(frozen=True)
class Wanted:
    """What a pass should compute.

    Attributes:
        track: The quantities that are tracked besides the trace.
        estimator: The name of the estimator.
        seeds: The seeds of the probes; none: the step is not measured.
        rate: π, the probability that such a step is measured.
        summed: Whether the clipped sum is wanted.
        test_matrix: Ω, [d, r], if I Ω is wanted.
        questions: For each question, which of the examples' alternatives (:func:`with_alternatives`) are
            its answers.
    """

    track: tuple[Track, ...]
    estimator: str
    seeds: tuple[int, ...]
    rate: float = 1.0
    summed: bool = True
    test_matrix: Tensor | None = None
    questions: Places = ()

    @property
    def kind(self) -> Hashable:
        """Everything that a captured pass depends on."""
        measured = self.track, self.estimator, len(self.seeds), self.rate < 1, self.test_matrix is None
        return *measured, self.summed, self.questions


@dataclass(frozen=True)
class StartedGraph:
    """The forward half of a captured pass, which a training loop has run.

    Attributes:
        captured: The pass.
        replays: How many replays of graphs that share its memory there had been at that time.
        outputs: The model's outputs.
    """

    captured: Any
    replays: int
    outputs: Any


def values_of(
    batch: PrivateBatch,
    chunks: Iterable[tuple[slice, Jacobian]],
    wanted: Wanted,
    draws: Draws,
    rate: float | Tensor,
    mask: Tensor | None = None,
) -> StepValues:
    """The wanted values, chunk by chunk; ``mask`` (1 or 0, [batch]) says which examples count in the sum."""
    parts, needs = [], needs_of(wanted.track)
    for rows, jacobian in chunks:
        added = None
        if wanted.seeds:
            own, omega = replace(draws, rows=rows), wanted.test_matrix
            found = batch.measured(jacobian, needs.quantities, wanted.estimator, own, omega, needs.susceptibility)
            added = additions(found, rate, skipping=wanted.rate < 1, track=wanted.track)
        if wanted.questions:
            added = (added or {}) | _divergences(batch, jacobian, wanted, rate)
        sums = jacobian.clipped_sum(mask) if wanted.summed else {}
        norms = jacobian.norm, jacobian.clipped_norm
        parts.append(StepValues(jacobian.losses, *norms, sums, added, jacobian.output_gradients))
    return joined(parts)


def _divergences(batch: PrivateBatch, jacobian: Jacobian, wanted: Wanted, rate: float | Tensor) -> dict[str, Tensor]:
    """What the ledger adds for the questions; for "absent", the gradients' norms are enough."""
    examples, mechanism = jacobian.gradients.examples, batch.mechanism
    gradients = replace(jacobian.gradients, model=batch.gradients.model)  # the copy, whose passes nobody counts

    weights = examples.clip_weights
    by_alternative = [
        mechanism.divergence(jacobian.products_with(replace(gradients, examples=other)), weights)
        for other in examples.alternatives
    ]
    added: dict[str, Tensor] = {}
    for name, places in wanted.questions:
        columns = [
            mechanism.divergence(jacobian.products_alone(), weights) if k is None else by_alternative[k] for k in places
        ]
        quantity = Divergence(name, Asked(("",) * len(places)))
        added |= quantity.added(torch.stack(columns, dim=1), rate, skipping=wanted.rate < 1)
    return added


def joined(parts: Sequence[StepValues]) -> StepValues:
    """Several passes as one: their examples concatenated, their sums added."""
    if len(parts) == 1:
        return parts[0]
    sums = {name: torch.stack([part.sums[name] for part in parts]).sum(dim=0) for name in parts[0].sums}
    parts = [replace(part, sums={}) for part in parts]
    if any(part.output_gradients is None for part in parts):
        parts = [replace(part, output_gradients=None) for part in parts]
    result: StepValues = concatenated(parts)
    return replace(result, sums=sums)


def with_alternatives(
    examples: Examples, questions: Mapping[str, Question], *, check_values: bool
) -> tuple[Examples, Places]:
    """The examples with their alternatives, as the questions define them.

    Args:
        examples: A batch.
        questions: By name.
        check_values: Whether to look for NaN and infinity, which has to wait for the device.

    Raises:
        ValueError: An alternative has another form or shape than the batch, or is not finite.
    """
    args, kwargs, targets = examples.public
    inputs = as_given(args, kwargs)
    alternatives: list[Examples] = []
    places: list[tuple[str, tuple[int | None, ...]]] = []
    for name, question in questions.items():
        answers = question.alternatives(inputs, targets)
        if len(answers) != len(question.answers):
            raise ValueError(
                f"the question {name!r} gave {len(answers)} alternatives for its {len(question.answers)} answers"
            )
        own: list[int | None] = []
        for answer, other in zip(question.answers, answers, strict=True):
            own.append(None if other is None else len(alternatives))
            if other is not None:
                what = f"the answer {answer!r} to the question {name!r}"
                alternatives.append(_laid_out(what, other, examples, check_values))
        places.append((name, tuple(own)))
    return replace(examples, alternatives=tuple(alternatives)), tuple(places)


def _laid_out(what: str, other: Alternative, examples: Examples, check_values: bool) -> Examples:
    args, kwargs = as_call(other.inputs)
    positions = sorted(key for key in kwargs if isinstance(key, int))  # as_given names positional inputs by place
    public = ((*args, *(kwargs.pop(place) for place in positions)), kwargs, other.targets)
    given, true = tensors_of(public), tensors_of(examples.public)
    shapes, wanted = ([(tuple(leaf.shape), leaf.dtype) for leaf in leaves] for leaves in (given, true))
    if shapes != wanted:
        raise ValueError(
            f"{what} has tensors of {shapes}, and the batch has {wanted}; an alternative may differ only in values"
        )
    try:
        if check_values:
            check_finite(*public)
        return replace(examples.with_values(public), clip_weights=None)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error
