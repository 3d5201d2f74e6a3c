r"""What a run keeps per example: one object per quantity, from a step's measurement to reading the
sum.

A quantity says what must be measured for it, which sums it keeps per example, what a step adds to
them and what they mean. A step that is measured with probability π counts X/π, with the variance
X²(1−π)/π² + v/π, where v is that of X.

To add one, subclass :class:`TrackedQuantity` and call :func:`register_quantity`; then ``track=("its
name",)`` keeps it and :meth:`torchfil.accounting.leakage.Leakage.get` reads it.

How far one run can be off. The bounds are about E[S], S = Σ_t B_t X_t: X_t is what a step would
add, B_t whether it draws the example. One run gives one S. Besides probes and skipped steps, two
things change it:

* the batches: Var = Σ_t q(1−q) X_t², of which (1−q) Σ B_t X_t² is an unbiased estimate; 0 if
  batches are known;
* the path: X_t depends on the weights, and so on all noise before t. Runs diverge for good, and
  momentum and Adam make the weights move smoothly: consecutive participations are much alike
  although runs differ. So the distance at which they are compared grows with the run: X is compared
  at the participations 0, 4, 8, 12, 16, 24, 32, 48, 64, … (:func:`compared`). With γ the mean
  square of its changes from each to the next, weighted by their distance and beyond the probes'
  noise, X has the variance γ/2, and that of S is taken as m²γ/2, whatever the length m of the run:
  as if all its participations were off together. Runs that forget their past vary less, and an
  example whose leakage falls as it is learned adds to γ: both make it too large. Averages over runs
  need no such rule.

γ of one example comes from few changes, and is too small just where its sum is too small. So all
examples of a run share the mean of γ, each relative to the square of its mean. Fewer than five
measured participations say nothing: the error is infinite. ``benchmarks/coverage.py --simulate``
measures how often lower ends are too high, by optimizer and sample rate.

A quantity summed over participations keeps the sums of :func:`path_sums` besides its own, adds
:func:`path_additions` at each step and names itself in ``TrackedQuantity.followed``; its readings
then include this error.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchfil.fisher.batch import Measurement
from torchfil.fisher.estimators import Quantity
from torchfil.fisher.results import Estimate, Kind
from torchfil.guessing import Guess

Track = str  # the name of a tracked quantity

FEWEST_PARTICIPATIONS = 5
_OF_CHANGES = 0.5  # of the mean squared change, to the mean's variance


@dataclass(frozen=True)
class Needs:
    """What must be measured at a step.

    Attributes:
        quantities: The quantities that the estimator must provide.
        susceptibility: Whether the PLIS is needed.
    """

    quantities: tuple[Quantity, ...] = ()
    susceptibility: bool = False


class Sum(NamedTuple):
    """The shape of a sum for one example, and its dtype.

    Values are summed in float64, so that they keep a precision of 1e-6 however many steps there
    are. Sums that only describe the error of a value are in float32 (``ERROR``): 1e-4 after 10⁵
    participations.
    """

    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float64


ERROR = torch.float32
COUNT = Sum(dtype=torch.int32)
OWN_SUMS = {
    "squared_norm": Sum(),
    "participations": COUNT,
    "missed": COUNT,
    "num_coordinates": COUNT,
}


# ------------------------------------------------------------------ how far one run can be off


def path_sums(name: str) -> tuple[str, ...]:
    """The names of the sums: X², the last compared X, Σ distance · change², and how often it was
    measured.

    Example:
        >>> path_sums("trace")
        ('trace_square', 'trace_last', 'trace_changes', 'trace_measured')
    """
    return f"{name}_square", f"{name}_last", f"{name}_changes", f"{name}_measured"


def path_layout(name: str, shape: tuple[int, ...] = ()) -> dict[str, Sum]:
    """The sums of :func:`path_sums`: three that describe errors, and a count."""
    *errors, measured = path_sums(name)
    return {**{error: Sum(shape, ERROR) for error in errors}, measured: Sum(shape, torch.int32)}


def path_additions(
    name: str, value: Tensor, noise: Tensor, rate: float | Tensor
) -> dict[str, Tensor]:
    """What a measured step adds, [batch, …] each.

    Args:
        name: The sum's name.
        value: X, not weighted by 1/π.
        noise: The variance of its sampling error, or less.
        rate: π.
    """
    square, last, changes, measured = path_sums(name)
    return {
        square: (value.square() - noise).clamp(min=0) / rate,
        last: value,
        changes: -2 * noise,
        measured: torch.ones_like(value),
    }


def compared(measured: Tensor) -> Tensor:
    """Which of so many measured participations, numbered from 0, is the last whose X is compared,
    in float64.

    Number i is compared if max(4, 2^(⌊log₂ i⌋ − 1)) divides it: distances are 4, and later a
    quarter to a half of i.

    Example:
        >>> compared(torch.tensor([0, 1, 4, 5, 16, 17, 24, 25, 70]))
        tensor([ 0.,  0.,  0.,  4., 12., 16., 16., 24., 64.], dtype=torch.float64)
    """
    last = (measured - 1).clamp(min=0).double()
    return last - last % (1 << (torch.frexp(last).exponent - 2).clamp(min=2))


def relative_change(
    name: str, sums: Mapping[str, Tensor], participations: Tensor
) -> tuple[Tensor, Tensor]:
    """γ relative to the squared mean (0 if unknown), and for which examples it is known, [n, …]
    each.

    Args:
        name: The sum's name.
        sums: The sums of some examples.
        participations: [n].
    """
    total, changes, measured = (
        sums[each].double() for each in (name, f"{name}_changes", f"{name}_measured")
    )
    drawn = participations.reshape(-1, *(1,) * (total.ndim - 1))

    # sums that are 0 or infinite have no uncertainty
    leaks = (measured >= FEWEST_PARTICIPATIONS) & total.isfinite() & (total > 0)
    mean = total / drawn.clamp(min=1)
    relative = (changes / compared(measured).clamp(min=1)).clamp(min=0) / mean.square()
    return torch.where(leaks, relative, 0.0), leaks


def run_variance(
    name: str,
    sums: Mapping[str, Tensor],
    participations: Tensor,
    sample_rate: float | None,
    typical: Tensor,
) -> tuple[Tensor, Tensor]:
    """The variance of the sum due to the batches, and that due to the path, [n, …] each.

    Infinite if unknown.

    Args:
        name: The sum's name.
        sums: The sums of the examples.
        participations: [n].
        sample_rate: q; None: batches are known.
        typical: The mean of γ, relative to the squared mean, over all examples, […].
    """
    total, square, measured = (
        sums[each].double() for each in (name, f"{name}_square", f"{name}_measured")
    )
    drawn = participations.reshape(-1, *(1,) * (total.ndim - 1))
    batches = torch.zeros_like(total) if sample_rate is None else (1 - sample_rate) * square
    batches = torch.where(drawn > 0, batches, math.inf if sample_rate is not None else 0.0)

    path = torch.where(
        relative_change(name, sums, participations)[1], _OF_CHANGES * typical * total.square(), 0.0
    )
    told = (measured >= FEWEST_PARTICIPATIONS) & total.isfinite() | total.isinf() | (drawn == 0)
    return batches, torch.where(told, path, math.inf)


# ------------------------------------------------------------------ quantities


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
        name: Its name in ``track``.
        needs: What must be measured.
        variances: For a sum's name, the name of the sum that is its variance.
        followed: The sums whose path is followed, so that readings know how far one run can be off.
        unless_told: What a participation adds to a sum if the step does not provide it (it was
            skipped at random, or the measurement lacks that part), and this is not 0.
    """

    name: str
    needs: Needs = Needs()
    variances: Mapping[str, str] = {}
    followed: tuple[str, ...] = ()
    unless_told: Mapping[str, float] = {}

    def sums(self, num_coordinates: int) -> dict[str, Sum]:
        """The sums that it keeps for one example, by name."""
        raise NotImplementedError

    @property
    def by_coordinate(self) -> bool:
        """Whether a sum has the private coordinates as a dimension."""
        return self.sums(1) != self.sums(2)

    def measure(
        self, measurement: Measurement, rate: float | Tensor, *, skipping: bool
    ) -> dict[str, Tensor]:
        """What a step adds to the sums, [batch, …] each, in float64.

        Args:
            measurement: The measurement of a step.
            rate: π.
            skipping: Whether π < 1; the variance then comes from single values, and nothing is
                certain.
        """
        raise NotImplementedError

    def read(self, sums: Mapping[str, Tensor], reading: Reading) -> Any:
        """The quantity, read from the sums of some examples, [ids, …]."""
        raise NotImplementedError


def _weighted(estimate: Estimate, rate: float | Tensor, *, skipping: bool) -> tuple[Tensor, Tensor]:
    """X/π and its variance."""
    value, variance = estimate.value.double(), estimate.standard_error.double().square()
    if not skipping:
        return value, variance
    return value / rate, value.square() * ((1 - rate) / rate**2) + variance / rate


class Trace(TrackedQuantity):
    """tr I, which every run keeps, with its error.

    Sums, [n] each: ``trace``; its ``variance``; ``variance_spread`` = variance² / its degrees of
    freedom, which gives those of the total (Welch and Satterthwaite); ``variance_limit``, a
    variance that on average is not too small, whatever the probes, and infinite once it is unknown;
    ``certain``, the part of the trace that was not sampled; and those of its path
    (:func:`path_sums`): ``trace_square``, …
    """

    name = "trace"
    needs = Needs(("trace",))
    variances: Mapping[str, str] = {"trace": "variance"}
    followed = ("trace",)
    unless_told: Mapping[str, float] = {"variance_limit": math.inf}

    def sums(self, num_coordinates: int) -> dict[str, Sum]:
        """Nine numbers."""
        errors = dict.fromkeys(("variance", "variance_limit"), Sum(dtype=ERROR))
        # the square of a variance exceeds the range of float32
        return {
            "trace": Sum(),
            "variance_spread": Sum(),
            "certain": Sum(),
            **errors,
            **path_layout("trace"),
        }

    def measure(
        self, measurement: Measurement, rate: float | Tensor, *, skipping: bool
    ) -> dict[str, Tensor]:
        """The trace and everything known about its error."""
        estimate = measurement.estimates["trace"]
        trace, variance = _weighted(estimate, rate, skipping=skipping)
        freedom = 1.0 if skipping else estimate.degrees_of_freedom
        added = {
            "trace": trace,
            "variance": variance,
            "variance_spread": variance.square() / freedom,
        }

        # the error of a single probe is a limit, too large to subtract from the changes between
        # steps
        value, noise = estimate.value.double(), estimate.standard_error.double().square()
        added |= path_additions(
            "trace", value, noise if measurement.repeated else torch.zeros_like(noise), rate
        )

        # if steps are skipped, everything counted is random
        if not skipping and estimate.kind == "exact":
            added |= {"certain": trace, "variance_limit": torch.zeros_like(trace)}
        elif not skipping and estimate.variance_limit is not None:
            added["variance_limit"] = estimate.variance_limit.double()
            if estimate.certain is not None:
                added["certain"] = estimate.certain.double()
        return added

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
    variances: Mapping[str, str] = {"diagonal": "diagonal_variance"}

    def sums(self, num_coordinates: int) -> dict[str, Sum]:
        """Two vectors of length d."""
        return {
            "diagonal": Sum((num_coordinates,)),
            "diagonal_variance": Sum((num_coordinates,), ERROR),
        }

    def measure(
        self, measurement: Measurement, rate: float | Tensor, *, skipping: bool
    ) -> dict[str, Tensor]:
        """The diagonal and its variance."""
        diagonal, variance = _weighted(measurement.estimates["diagonal"], rate, skipping=skipping)
        return {"diagonal": diagonal, "diagonal_variance": variance}

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

    def sums(self, num_coordinates: int) -> dict[str, Sum]:
        """One matrix."""
        return {"fim": Sum((num_coordinates, num_coordinates))}

    def measure(
        self, measurement: Measurement, rate: float | Tensor, *, skipping: bool
    ) -> dict[str, Tensor]:
        """The matrix."""
        return {"fim": _weighted(measurement.estimates["matrix"], rate, skipping=skipping)[0]}

    def read(self, sums: Mapping[str, Tensor], reading: Reading) -> Estimate:
        """The matrix, [ids, d, d]."""
        return reading.without_variance(sums["fim"])


class Plis(TrackedQuantity):
    """Σ_t ∂(‖g̃_t‖/s_t)²/∂z: nd numbers."""

    name = "plis"
    needs = Needs(susceptibility=True)

    def sums(self, num_coordinates: int) -> dict[str, Sum]:
        """A vector of length d."""
        return {"plis": Sum((num_coordinates,))}

    def measure(
        self, measurement: Measurement, rate: float | Tensor, *, skipping: bool
    ) -> dict[str, Tensor]:
        """The derivative of the privacy loss."""
        assert measurement.susceptibility is not None
        return {"plis": measurement.susceptibility.double() / rate}

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

    def __init__(self, question: str, asked: QuestionSpec) -> None:
        self.asked = asked
        self.name = f"question {question}"
        self.followed = (self.name,)
        self.variances = {self.name: f"{self.name}_variance"}

    def sums(self, num_coordinates: int) -> dict[str, Sum]:
        """D, its variance from skipped steps, and the sums that show how far one run can be off,
        [m] each.
        """
        shape = (len(self.asked.answers),)
        return {
            self.name: Sum(shape),
            self.variances[self.name]: Sum(shape, ERROR),
            **path_layout(self.name, shape),
        }

    def measure(
        self, measurement: Measurement, rate: float | Tensor, *, skipping: bool
    ) -> dict[str, Tensor]:
        """Nothing: these additions do not come from a measurement of Fisher information, see
        :meth:`added`.
        """
        return {}

    def added(
        self, divergences: Tensor, rate: float | Tensor, *, skipping: bool
    ) -> dict[str, Tensor]:
        """What a step adds to the sums, for KL_t of its examples and alternatives, [batch, m],
        measured at rate π.
        """
        weighted = divergences / rate if skipping else divergences
        added = {
            self.name: weighted,
            **path_additions(self.name, divergences, torch.zeros_like(divergences), rate),
        }
        if skipping:
            added[self.variances[self.name]] = divergences.square() * ((1 - rate) / rate**2)
        return added

    def read(self, sums: Mapping[str, Tensor], reading: Reading) -> Guess:
        """What D says about every attacker, [ids, m]; [ids] for one alternative."""
        value, variance = sums[self.name], sums[self.variances[self.name]]
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
    taken = set(OWN_SUMS).union(*(other.sums(1) for other in others)) & set(quantity.sums(1))
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


def additions(
    measurement: Measurement, rate: float | Tensor, *, skipping: bool, track: Collection[Track] = ()
) -> dict[str, Tensor]:
    """What a measured step adds to the sums of the trace and of the tracked quantities, [batch, …]
    each, in float64.

    Args:
        measurement: The measurement of a step.
        rate: π, the probability that it was measured.
        skipping: Whether π < 1.
        track: The names of the quantities.
    """
    result: dict[str, Tensor] = {}
    for quantity in tracked(track):
        result |= quantity.measure(measurement, rate, skipping=skipping)
    return result


for _quantity in (Trace(), Diagonal(), Fim(), Plis()):
    register_quantity(_quantity)
