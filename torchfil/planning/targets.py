"""The target of a run (the smallest MSE bound, the best guess of a question), and whether the run met it.

Both are about all examples together, at an end of the interval: with the stated confidence no example's MSE bound lies
below the first end, and no attacker's true-positive rate on any example above the second. As in
:meth:`Leakage.get_smallest_mse_bound`, one example's one-sided interval serves all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torchfil.accounting.leakage import Leakage
from torchfil.fisher.results import Estimate, Part
from torchfil.guessing import divergence_of_rate, largest_true_positive_rate
from torchfil.utils.errors import require

__all__ = ["LeakageTarget", "TargetCheck", "mean_of_runs"]


@dataclass(frozen=True)
class LeakageTarget:
    """What a run aims at for every example; :meth:`check` says whether it got there.

    Attributes:
        mse_bound: The smallest bound that any example may have: an unbiased attacker's MSE per coordinate, on average
            over runs.
        true_positive_rate: The largest rate that any attacker, biased or not, may reach on any example; over runs.
        question: The question that the rate is about, by its name in ``questions=``.
        false_positive_rate: The false-positive rate for it.
        confidence: The confidence of each of the two ends.
        of: "run": the ends cover everything random in a run; "probes": only the error of the measurement, for this
            run; see :meth:`torchfil.fisher.results.Estimate.interval`.

    Example:
        >>> LeakageTarget(mse_bound=1.0, confidence=0.9).wanted
        'every MSE bound at least 1'
    """

    mse_bound: float | None = None
    true_positive_rate: float | None = None
    question: str | None = None
    false_positive_rate: float = 0.01
    confidence: float = 0.95
    of: Part = "run"

    def __post_init__(self) -> None:
        bound, rate, wrong = self.mse_bound, self.true_positive_rate, self.false_positive_rate
        given = bound is not None or rate is not None
        require(given, "no target is given: pass target_mse_bound=, target_true_positive_rate=, or both")
        require(bound is None or 0 < bound < math.inf, f"target_mse_bound={bound} must be positive and finite")
        require(0.5 < self.confidence < 1, f"confidence={self.confidence} must lie strictly between 0.5 and 1")
        require(self.of in ("run", "probes"), f"of={self.of!r} must be 'run' (all that is random in it) or 'probes'")
        require(0 < wrong < 1, f"at_false_positive_rate={wrong} must lie strictly between 0 and 1")
        if rate is not None:
            ends = f"at_false_positive_rate={wrong}, which saying yes at random reaches, and 1"
            require(wrong < rate < 1, f"target_true_positive_rate={rate} must lie strictly between {ends}")
            require(self.question is not None, "target_true_positive_rate= needs question=, a name of questions=")

    @property
    def wanted(self) -> str:
        """The target in words."""
        parts = [] if self.mse_bound is None else [f"every MSE bound at least {self.mse_bound:g}"]
        if self.true_positive_rate is not None:
            rate = f"{self.true_positive_rate:g} ({self.false_positive_rate:g} false positives)"
            parts.append(f"every attacker's true-positive rate on {self.question!r} at most {rate}")
        return ", and ".join(parts)

    @property
    def largest_divergence(self) -> float:
        """The D at which the rate is reached.

        Example:
            >>> target = LeakageTarget(true_positive_rate=0.2556, question="sex", false_positive_rate=0.05)
            >>> round(target.largest_divergence, 3)
            0.235
        """
        assert self.true_positive_rate is not None
        return divergence_of_rate(self.true_positive_rate, self.false_positive_rate)

    def check(self, *runs: Leakage) -> TargetCheck:
        """Whether a run met the target; for several independent runs with the same noise, whether their mean did.

        Examples that no run has measured do not count: nothing is known about them.
        """
        measured = torch.stack([run.was_measured() for run in runs]).any(dim=0)
        level = 2 * self.confidence - 1  # the confidence of an interval one end of which has this confidence
        bound, divergence = None, None
        if self.mse_bound is not None:
            trace = mean_of_runs([run.get_trace() for run in runs])
            inverse = trace.raised(-1.0, runs[0].get_num_coordinates())
            low = inverse.interval(level, self.of)[0]
            bound = _worst(torch.Tensor.min, inverse.value, low, measured, no_leakage=math.inf)
        if self.true_positive_rate is not None:
            assert self.question is not None
            answers = mean_of_runs([run.get_guess(self.question).divergence for run in runs])
            high = answers.interval(level, self.of)[1]
            divergence = _worst(torch.Tensor.max, answers.value, high, measured, no_leakage=0.0)
        steps = runs[0].ledger.steps
        return TargetCheck(self, bound, divergence, int(measured.sum()), len(measured), len(runs), steps)

    def is_missed_by(self, run: Leakage) -> bool:
        """Whether the estimates so far are worse than the target: leakage cannot be undone. Cheap to call often."""
        sums, missed = run.ledger.sums, []
        if self.mse_bound is not None:
            missed.append((sums["trace"] * self.mse_bound > run.ledger.own_coordinates).any())
        if self.true_positive_rate is not None:
            missed.append((sums[f"question {self.question}"] > self.largest_divergence).any())
        return bool(torch.stack(missed).any())


@dataclass(frozen=True)
class TargetCheck:
    """Whether a target was met, with the numbers; print it. They depend on private data and are confidential.

    Attributes:
        target: What was wanted.
        mse_bound: The smallest estimate of all examples, and the end below all bounds; None: not wanted.
        divergence: The largest estimate of D over examples and answers, and the end above it; None: not wanted.
        num_measured: How many examples were measured.
        num_examples: The number of examples.
        num_runs: The number of independent runs that were averaged.
        num_steps: The number of steps; more steps leak more.
    """

    target: LeakageTarget
    mse_bound: tuple[float, float] | None
    divergence: tuple[float, float] | None
    num_measured: int
    num_examples: int
    num_runs: int = 1
    num_steps: int = 0

    @property
    def true_positive_rate(self) -> tuple[float, float] | None:
        """The largest of any attacker on any example at the estimates of D, and at their end."""
        if self.divergence is None:
            return None
        estimate, end = largest_true_positive_rate(self.divergence, self.target.false_positive_rate).tolist()
        return estimate, end

    @property
    def headroom(self) -> float:
        """How many times better than the target the worse end is: met if at least 1; about proportional to σ²."""
        return self._headroom(1)

    @property
    def headroom_of_estimate(self) -> float:
        """The same for the estimates."""
        return self._headroom(0)

    @property
    def met(self) -> bool:
        """Whether the target was met with the stated confidence."""
        return self.headroom >= 1

    def _headroom(self, which: int) -> float:
        shares = []
        if self.mse_bound is not None and self.target.mse_bound is not None:
            shares.append(self.mse_bound[which] / self.target.mse_bound)
        if self.divergence is not None:
            worst = self.divergence[which]
            shares.append(self.target.largest_divergence / worst if worst > 0 else math.inf)
        return min(shares)

    @property
    def measured(self) -> str:
        """The numbers in one line."""
        parts, confidence = [], f"{100 * self.target.confidence:g} %"
        if self.mse_bound is not None:
            smallest, end = self.mse_bound
            parts.append(f"smallest bound {smallest:.3g}, at least {end:.3g} ({confidence})")
        if self.true_positive_rate is not None:
            largest, end = self.true_positive_rate
            parts.append(f"largest rate {largest:.3g}, at most {end:.3g} ({confidence})")
        return "; ".join(parts)

    def __str__(self) -> str:
        verdict = "met" if self.met else f"missed by a factor of {1 / self.headroom if self.headroom else math.inf:.3g}"
        runs = "" if self.num_runs == 1 else f", the mean of {self.num_runs} runs"
        unknown = f"{self.num_examples - self.num_measured} examples were never measured: nothing is known about them"
        remarks = {
            unknown: self.num_measured < self.num_examples,
            "The bound binds unbiased attackers, on average over runs: batches and noise are random.": self.mse_bound,
            "The rate binds every attacker, biased or not; batches and noise are random.": self.divergence,
            "The ends cover the measurement's error alone; another run would give other ends.": self.target.of != "run",
        }
        lines = [
            f"{verdict} after {self.num_steps} steps: {self.target.wanted}",
            f"  {self.measured}, over {self.num_measured} examples{runs}",
            *(f"  {remark}" for remark, holds in remarks.items() if holds),
        ]
        return "\n".join(lines)


def mean_of_runs(estimates: Sequence[Estimate]) -> Estimate:
    """The mean of independent estimates of one positive quantity, [ids, …] each, with errors from each run's own.

    Unlike an average whose error is the spread between runs (:meth:`Leakage.average`), it needs only two runs. If a run
    does not know its error (an example was hardly ever drawn), the largest error of the others is used.

    Example:
        >>> one = Estimate(torch.tensor([2.0]), torch.tensor([0.3]), "estimate", positive=True)
        >>> mean_of_runs([one, one])
        Estimate([2 ± 0.21], estimate)
    """
    if len(estimates) == 1:
        return estimates[0]

    def mean(name: str) -> Any:  # None if a run does not know it
        values = [getattr(each, name) for each in estimates]
        return None if any(value is None for value in values) else torch.stack(values).mean(dim=0)

    def error_of_mean(errors: Tensor) -> Tensor:  # [runs, ids, …] to [ids, …]
        return torch.linalg.vector_norm(errors, dim=0) / len(estimates)

    value, limit = mean("value"), mean("variance_limit")
    run_error, known = None, [each.run_error for each in estimates if each.run_error is not None]
    if known:
        errors = torch.stack(known)
        finite = errors.isfinite()
        largest = errors.where(finite, 0.0).amax(dim=0).where(finite.any(dim=0), torch.inf)
        run_error = error_of_mean(errors.where(finite, largest))
    freedoms = [torch.as_tensor(each.degrees_of_freedom, dtype=torch.float64) for each in estimates]
    return replace(
        estimates[0],
        value=value,
        standard_error=error_of_mean(torch.stack([each.standard_error for each in estimates])),
        degrees_of_freedom=torch.stack([freedom.to(value.device).expand(len(value)) for freedom in freedoms]).amin(0),
        certain=mean("certain"),
        variance_limit=None if limit is None else limit / len(estimates),
        run_error=run_error,
    )


def _worst(
    worst: Callable[[Tensor], Tensor], value: Tensor, end: Tensor, measured: Tensor, *, no_leakage: float
) -> tuple[float, float]:
    """The worst estimate and the worst end of the measured examples; without any, those of no leakage."""
    if not bool(measured.any()):
        return no_leakage, no_leakage
    return float(worst(value[measured])), float(worst(end[measured]))
