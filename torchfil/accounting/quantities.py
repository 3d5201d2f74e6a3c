r"""What a run keeps per example: one object per quantity, from a step's measurement to reading the
sum.

A quantity says what must be measured for it, which column it makes of a step's measurement, which
sums are kept of that column and what they mean. How columns are summed is
:mod:`torchfil.accounting.sums`.

To add one, subclass :class:`TrackedQuantity` and call :func:`register_quantity`; then ``track=("its
name",)`` keeps it and :meth:`torchfil.accounting.leakage.Leakage.get` reads it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchfil.accounting.sums import OWN_SUMS, Column, Spread, Summed
from torchfil.fisher.batch import Measurement
from torchfil.fisher.estimators import Quantity
from torchfil.fisher.results import Estimate, Kind
from torchfil.guessing import Guess

Track = str  # the name of a tracked quantity


@dataclass(frozen=True)
class Needs:
    """What must be measured at a step.

    Attributes:
        quantities: The quantities that the estimator must provide.
        susceptibility: Whether the PLIS is needed.
    """

    quantities: tuple[Quantity, ...] = ()
    susceptibility: bool = False


@dataclass(frozen=True)
class Conditions:
    """The facts about a run that matter for reading its sums.

    Attributes:
        exact: Whether every measured step was measured without sampling.
        skipping: Whether steps were skipped at random, so that an example may have taken part
            without being measured.
        largest_divergences: The largest D of membership, and of any other question, that the noise
            allows; None: not known, because batches are known.
        averaged: Whether the sums are means over repeated runs, whose variances include everything.
        spreads: By predicted sum, its :func:`torchfil.accounting.sums.path_spread`, while reading
            in parts; None: it is computed at every reading.
    """

    exact: bool = False
    skipping: bool = False
    largest_divergences: tuple[float, float] | None = None
    averaged: bool = False
    spreads: Mapping[str, Spread] | None = None


@dataclass(frozen=True)
class Reading:
    """How the sums that are being read were made.

    Attributes:
        conditions: The facts about the run.
        kind: "exact", "estimate" or, if steps were paused, "lower bound".
        trace: The sums of the trace, by name, of the same examples.
        run_error: By the name of a predicted sum, the standard deviation due to everything that is
            random in a run, [ids, …].
    """

    conditions: Conditions
    kind: Kind
    trace: Mapping[str, Tensor]
    run_error: Mapping[str, Tensor] = field(default_factory=dict)

    def estimate(
        self, value: Tensor, variance: Tensor, run_error: Tensor | None = None
    ) -> Estimate:
        """A sum with its variance, [ids, …] each; an infinite sum is certain, with error 0."""
        total, spread = self.trace["variance"].square(), self.trace["variance_spread"]
        freedom = torch.where((spread > 0) & total.isfinite(), total / spread, math.inf)
        if self.conditions.averaged:
            freedom = torch.full_like(freedom, math.inf)
        error = torch.where(value.isinf(), 0.0, variance.clamp(min=0).sqrt())
        return Estimate(value, error, self.kind, freedom, positive=True, run_error=run_error)

    def without_variance(self, value: Tensor) -> Estimate:
        """A sum whose variance was not kept: its error is unknown (NaN), or 0 if nothing was
        sampled or added.
        """
        certain = value.isinf() | (value == 0)
        error = torch.where(
            certain, 0.0, torch.full_like(value, 0.0 if self.conditions.exact else math.nan)
        )
        return Estimate(value, error, self.kind)


class TrackedQuantity:
    """Something that is summed per example over a run.

    Attributes:
        name: Its name in ``track``, and that of its sum.
        needs: What must be measured.
        variance: The name of the sum of its variance; None: not kept.
        predicted: Whether it is predicted and corrected, and its path followed, so that readings
            know how far one run can be off.
    """

    name: str
    needs: Needs = Needs()
    variance: str | None = None
    predicted: bool = False

    def shape(self, num_coordinates: int) -> tuple[int, ...]:
        """That of X of one example; one number unless overridden."""
        return ()

    def summed(self, num_coordinates: int) -> Summed:
        """Which sums are kept."""
        return Summed(self.name, self.shape(num_coordinates), self.variance, self.predicted)

    @property
    def by_coordinate(self) -> bool:
        """Whether a sum has the private coordinates as a dimension."""
        return self.shape(1) != self.shape(2)

    def measure(self, measurement: Measurement) -> Column:
        """X and what is known about its error, [batch, …] each, in float64."""
        raise NotImplementedError

    def read(self, sums: Mapping[str, Tensor], reading: Reading) -> Any:
        """The quantity, read from the sums of some examples, [ids, …]."""
        raise NotImplementedError


def _column(estimate: Estimate) -> Column:
    return {
        "value": estimate.value.double(),
        "variance": estimate.standard_error.double().square(),
    }


class Trace(TrackedQuantity):
    """tr I, which every run keeps, with everything known about its error."""

    name = "trace"
    needs = Needs(("trace",))
    variance = "variance"
    predicted = True

    def summed(self, num_coordinates: int) -> Summed:
        """With the degrees of freedom of its errors."""
        return Summed(self.name, (), self.variance, predicted=True, spread="variance_spread")

    def measure(self, measurement: Measurement) -> Column:
        """The trace and what is known about its error."""
        column = _column(measurement.estimates["trace"])
        # the error of a single probe is a limit, too large to subtract from the changes between
        # steps
        column["noise"] = column["variance"] if measurement.repeated else column["variance"] * 0
        freedom = measurement.estimates["trace"].degrees_of_freedom
        column["freedom"] = torch.zeros_like(column["value"]) + freedom
        return column

    def read(self, sums: Mapping[str, Tensor], reading: Reading) -> Estimate:
        """tr I, [ids]."""
        return reading.estimate(sums["trace"], sums["variance"], reading.run_error.get("trace"))


class Diagonal(TrackedQuantity):
    """I_jj of every private coordinate j, with its variance: 2nd numbers.

    How far the run can be off is not followed by coordinate; the trace's relative error is used for
    each.
    """

    name = "diagonal"
    needs = Needs(("diagonal",))
    variance = "diagonal_variance"

    def shape(self, num_coordinates: int) -> tuple[int, ...]:
        """[d]."""
        return (num_coordinates,)

    def summed(self, num_coordinates: int) -> Summed:
        """Predicted by its shares so far."""
        return replace(super().summed(num_coordinates), shares=_shares)

    def measure(self, measurement: Measurement) -> Column:
        """The diagonal and its variance."""
        return _column(measurement.estimates["diagonal"])

    def read(self, sums: Mapping[str, Tensor], reading: Reading) -> Estimate:
        """The diagonal, [ids, d]."""
        diagonal, variance = sums["diagonal"], sums["diagonal_variance"]
        trace, error = reading.trace["trace"], reading.run_error["trace"]
        share = torch.where(trace > 0, error / trace, error)[:, None]
        together = (share * diagonal).square().nan_to_num(nan=0.0) + variance
        run_error = torch.where(diagonal.isinf() | (share == 0), 0.0, together.sqrt())
        return reading.estimate(diagonal, variance, run_error.where(share.isfinite(), share))


def _shares(diagonal: Tensor) -> Tensor:
    """The coordinates' shares of the trace, [rows, d]; if none is positive, those of the largest.

    Shares of a diagonal to which a prediction was added by its shares are the same: it does not
    matter when sums are read.
    """
    positive = torch.where(diagonal.isfinite(), diagonal, 0.0).clamp(min=0)
    largest = (diagonal == diagonal.amax(dim=1, keepdim=True)).to(diagonal)
    positive = torch.where(positive.any(dim=1, keepdim=True), positive, largest)
    return positive / positive.sum(dim=1, keepdim=True)


def _per_trace(matrix: Tensor) -> Tensor:
    """F / tr F, [rows, d, d]; multiples of the identity as long as there is nothing, and 0 if the
    trace is negative.
    """
    trace = matrix.diagonal(dim1=1, dim2=2).sum(dim=1)[:, None, None]
    usual = (trace > 0) & trace.isfinite()
    begin = torch.eye(matrix.shape[1]).to(matrix) / matrix.shape[1] * (trace == 0)
    return torch.where(usual, matrix / trace, begin)


class Fim(TrackedQuantity):
    """The whole matrix I: nd² numbers."""

    name = "fim"
    needs = Needs(("matrix",))

    def shape(self, num_coordinates: int) -> tuple[int, ...]:
        """[d, d]."""
        return (num_coordinates, num_coordinates)

    def summed(self, num_coordinates: int) -> Summed:
        """Predicted in proportion to the matrix so far."""
        return replace(super().summed(num_coordinates), shares=_per_trace)

    def measure(self, measurement: Measurement) -> Column:
        """The matrix."""
        return {"value": measurement.estimates["matrix"].value.double()}

    def read(self, sums: Mapping[str, Tensor], reading: Reading) -> Estimate:
        """The matrix, [ids, d, d]."""
        return reading.without_variance(sums["fim"])


class Plis(TrackedQuantity):
    """Σ_t ∂(‖g̃_t‖/s_t)²/∂z: nd numbers."""

    name = "plis"
    needs = Needs(susceptibility=True)

    def shape(self, num_coordinates: int) -> tuple[int, ...]:
        """[d]."""
        return (num_coordinates,)

    def measure(self, measurement: Measurement) -> Column:
        """The derivative of the privacy loss."""
        assert measurement.susceptibility is not None
        return {"value": measurement.susceptibility.double()}

    def read(self, sums: Mapping[str, Tensor], reading: Reading) -> Tensor:
        """The derivative, [ids, d]."""
        return sums["plis"]


class QuestionSpec(NamedTuple):
    """What a ledger knows of a question: its answers, whether they include the true one, whether it
    is membership.
    """

    answers: tuple[str, ...]
    complete: bool = False
    membership: bool = False


def question_column(question: str) -> str:
    """The name of a question's column, KL_t of each of its answers, [batch, m]."""
    return f"question {question}"


class Divergence(TrackedQuantity):
    """D = KL(P ‖ P′) of every alternative of one question, [m] per example.

    By the chain rule D = E Σ_t KL_t, so the sum of KL_t over the steps that used the example
    (KL_t/q if batches are secret) is an unbiased estimate of D, as for Fisher information. Unlike
    other quantities it belongs to a run: there is one for each of the run's questions, with as many
    numbers as the question has answers.

    Args:
        question: The question's name.
        asked: Its answers.
    """

    predicted = True

    def __init__(self, question: str, asked: QuestionSpec) -> None:
        self.asked = asked
        self.name = question_column(question)
        self.variance = f"{self.name}_variance"

    def summed(self, num_coordinates: int) -> Summed:
        """Membership is measured at every step: the gradients' norms are enough."""
        always = self.asked.membership
        return replace(super().summed(num_coordinates), always=always, precise=True)

    def shape(self, num_coordinates: int) -> tuple[int, ...]:
        """[m]."""
        return (len(self.asked.answers),)

    def read(self, sums: Mapping[str, Tensor], reading: Reading) -> Guess:
        """What D says about every attacker, [ids, m]; [ids] for one alternative."""
        value, variance = sums[self.name], sums[f"{self.name}_variance"]
        run_error = reading.run_error.get(self.name)

        # KL_t was 0 at every draw, as the true answer's is: nothing that others predict is added
        relative, last, changes = (
            sums[f"{self.name}_{part}"] for part in ("relative", "previous", "near")
        )
        same = (relative > 0) & (last < 1e-20) & (changes < 1e-40) & value.isfinite()
        value, variance = value.masked_fill(same, 0.0), variance.masked_fill(same, 0.0)
        if run_error is not None:
            run_error = run_error.masked_fill(same & run_error.isfinite(), 0.0)
        if len(self.asked.answers) == 1:
            value, variance = value[:, 0], variance[:, 0]
            run_error = None if run_error is None else run_error[:, 0]
        estimate = reading.estimate(value, variance, run_error)
        estimate = replace(estimate, degrees_of_freedom=math.inf)  # no probes
        membership, other = reading.conditions.largest_divergences or (math.inf, math.inf)
        largest = membership if self.asked.membership else other
        return Guess(estimate, self.asked.answers, self.asked.complete, largest)


_REGISTRY: dict[str, TrackedQuantity] = {}


def available_quantities() -> tuple[str, ...]:
    """The names that ``track`` may contain; "trace" is always kept."""
    return tuple(_REGISTRY)


def register_quantity(quantity: TrackedQuantity, *, overwrite: bool = False) -> None:
    """Register a quantity under its name, for every ``track=``.

    Raises:
        ValueError: The name is taken, or a sum has the name of another quantity's.
    """
    if not overwrite and quantity.name in _REGISTRY:
        raise ValueError(
            f"quantity {quantity.name!r} is already registered; pass overwrite=True to replace it"
        )
    others = [other for other in _REGISTRY.values() if other.name != quantity.name]
    taken = set(OWN_SUMS).union(*(other.summed(1).layout for other in others)) & set(
        quantity.summed(1).layout
    )
    if taken:
        raise ValueError(
            f"quantity {quantity.name!r} keeps sums {sorted(taken)}, which others already use; "
            "rename them"
        )
    _REGISTRY[quantity.name] = quantity
    needs_of.cache_clear()


def tracked(track: Collection[Track]) -> tuple[TrackedQuantity, ...]:
    """The quantities of a run that tracks these, the trace first, in the order of their
    registration.
    """
    unknown = set(track) - set(_REGISTRY)
    if unknown:
        raise ValueError(
            f"track={sorted(unknown)} is unknown; choose from {', '.join(available_quantities())}"
        )
    return tuple(
        [quantity for name, quantity in _REGISTRY.items() if name == "trace" or name in track]
    )


@cache
def needs_of(track: tuple[Track, ...]) -> Needs:
    """What must be measured at a step of a run that tracks these."""
    needs = [quantity.needs for quantity in tracked(track)]
    return Needs(
        tuple(dict.fromkeys([name for need in needs for name in need.quantities])),
        any(need.susceptibility for need in needs),
    )


def columns_of(measurement: Measurement, track: Collection[Track] = ()) -> dict[str, Column]:
    """The columns of the trace and of the tracked quantities."""
    return {each.name: each.measure(measurement) for each in tracked(track)}


for _quantity in (Trace(), Diagonal(), Fim(), Plis()):
    register_quantity(_quantity)
