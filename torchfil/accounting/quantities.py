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

from torchfil.accounting.sums import OWN_SUMS, Column, Summed
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
        sample_rate: q, if the attacker does not know the batches; participation is then random,
            too. 1 for averages over runs, whose standard errors include it. None: batches are
            known.
        skipping: Whether steps were skipped at random, so that an example may have taken part
            without being measured.
        largest_divergences: The largest D of membership, and of any other question, that the noise
            allows; None: not known, because batches are known.
        degrees_of_freedom: The degrees of freedom of the standard errors: runs − 1 for averages
            over runs. None: each example's own, from the spread of its steps' variances.
        typical_changes: By followed sum, the typical change for :func:`run_variance`, while reading
            in parts; None: it is computed at every reading.
    """

    exact: bool = False
    sample_rate: float | None = None
    skipping: bool = False
    largest_divergences: tuple[float, float] | None = None
    degrees_of_freedom: float | None = None
    typical_changes: Mapping[str, Tensor] | None = None


@dataclass(frozen=True)
class Reading:
    """How the sums that are being read were made.

    Attributes:
        conditions: The facts about the run.
        kind: "exact", "estimate" or, if steps were paused, "lower bound".
        trace: The sums of the trace, by name, of the same examples.
        run_error: By the name of a followed sum, the standard deviation due to everything else that
            is random in a run, [ids, …]; see :func:`run_variance`. Empty for averages over runs,
            whose errors include it.
    """

    conditions: Conditions
    kind: Kind
    trace: Mapping[str, Tensor]
    run_error: Mapping[str, Tensor] = field(default_factory=dict)

    def estimate(
        self, value: Tensor, variance: Tensor, run_error: Tensor | None = None
    ) -> Estimate:
        """A sum with its variance, [ids, …] each; an infinite sum is certain, with error 0."""
        freedom: float | Tensor | None = self.conditions.degrees_of_freedom
        if freedom is None:
            total, spread = self.trace["variance"].square(), self.trace["variance_spread"]
            freedom = torch.where(spread > 0, total / spread, math.inf)
            freedom = torch.where(freedom.isnan(), math.inf, freedom)
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
        followed: Whether its path is followed, so that readings know how far one run can be off.
    """

    name: str
    needs: Needs = Needs()
    variance: str | None = None
    followed: bool = False

    def shape(self, num_coordinates: int) -> tuple[int, ...]:
        """That of X of one example; one number unless overridden."""
        return ()

    def summed(self, num_coordinates: int) -> Summed:
        """Which sums are kept."""
        return Summed(self.name, self.shape(num_coordinates), self.variance, self.followed)

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
    followed = True

    def summed(self, num_coordinates: int) -> Summed:
        """Nine numbers."""
        return Summed(self.name, (), self.variance, followed=True, is_trace=True)

    def measure(self, measurement: Measurement) -> Column:
        """The trace and everything known about its error."""
        estimate = measurement.estimates["trace"]
        column = _column(estimate)
        value, variance = column["value"], column["variance"]
        if estimate.kind == "exact":
            certain, limit = value, torch.zeros_like(value)
        elif estimate.variance_limit is not None:
            certain = torch.zeros_like(value) if estimate.certain is None else estimate.certain
            limit = estimate.variance_limit
        else:
            certain, limit = torch.zeros_like(value), torch.full_like(value, math.inf)
        # the error of a single probe is a limit, too large to subtract from the changes between
        # steps
        column["noise"] = variance if measurement.repeated else torch.zeros_like(variance)
        column["freedom"] = torch.zeros_like(value) + estimate.degrees_of_freedom
        column["certain"], column["limit"] = certain.double(), limit.double()
        return column

    def read(self, sums: Mapping[str, Tensor], reading: Reading) -> Estimate:
        """tr I, [ids]."""
        estimate = reading.estimate(sums["trace"], sums["variance"], reading.run_error.get("trace"))
        if reading.conditions.degrees_of_freedom is not None:
            return estimate
        return replace(estimate, certain=sums["certain"], variance_limit=sums["variance_limit"])


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

    def measure(self, measurement: Measurement) -> Column:
        """The diagonal and its variance."""
        return _column(measurement.estimates["diagonal"])

    def read(self, sums: Mapping[str, Tensor], reading: Reading) -> Estimate:
        """The diagonal, [ids, d]."""
        diagonal, run_error = sums["diagonal"], reading.run_error.get("trace")
        if run_error is not None:
            trace = reading.trace["trace"]
            share = torch.where(trace > 0, run_error / trace, run_error)
            run_error = torch.where(
                diagonal.isinf() | (share == 0)[:, None], 0.0, share[:, None] * diagonal
            )
            run_error = torch.where(share.isinf()[:, None], share[:, None], run_error)
        return reading.estimate(diagonal, sums["diagonal_variance"], run_error)


class Fim(TrackedQuantity):
    """The whole matrix I: nd² numbers."""

    name = "fim"
    needs = Needs(("matrix",))

    def shape(self, num_coordinates: int) -> tuple[int, ...]:
        """[d, d]."""
        return (num_coordinates, num_coordinates)

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

    followed = True

    def __init__(self, question: str, asked: QuestionSpec) -> None:
        self.asked = asked
        self.name = question_column(question)
        self.variance = f"{self.name}_variance"

    def shape(self, num_coordinates: int) -> tuple[int, ...]:
        """[m]."""
        return (len(self.asked.answers),)

    def read(self, sums: Mapping[str, Tensor], reading: Reading) -> Guess:
        """What D says about every attacker, [ids, m]; [ids] for one alternative."""
        value, variance = sums[self.name], sums[f"{self.name}_variance"]
        run_error = reading.run_error.get(self.name)
        if len(self.asked.answers) == 1:
            value, variance = value[:, 0], variance[:, 0]
            run_error = None if run_error is None else run_error[:, 0]
        estimate = reading.estimate(value, variance, run_error)
        if reading.conditions.degrees_of_freedom is None:  # from skipped steps, not from probes
            estimate = replace(estimate, degrees_of_freedom=math.inf)
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
