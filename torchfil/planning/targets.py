"""The target of a run (the smallest MSE bound, the best guess of a question), and whether the run met it.

Both are about all examples together, at an end of the interval: with the stated confidence no example's MSE bound lies
below the first end, and no attacker's true-positive rate on any example above the second. As in
:meth:`Leakage.get_smallest_mse_bound`, one example's one-sided interval serves all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchfil.accounting.leakage import Leakage
from torchfil.fisher.results import Estimate, Part
from torchfil.guessing import divergence_of_rate, largest_true_positive_rate

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
        if self.mse_bound is None and self.true_positive_rate is None:
            raise ValueError("no target is given: pass target_mse_bound=, target_true_positive_rate=, or both")
        if self.mse_bound is not None and not 0 < self.mse_bound < math.inf:
            raise ValueError(f"target_mse_bound={self.mse_bound} must be positive and finite: a mean squared error")
        if not 0.5 < self.confidence < 1:
            raise ValueError(
                f"confidence={self.confidence} must lie strictly between 0.5 and 1: it is the confidence of one end"
            )
        if self.of not in ("run", "probes"):
            raise ValueError(f"of={self.of!r} must be 'run' (everything that is random in it) or 'probes'")
        self._check_rates()

    def _check_rates(self) -> None:
        rate, wrong = self.true_positive_rate, self.false_positive_rate
        if not 0 < wrong < 1:
            raise ValueError(f"at_false_positive_rate={wrong} must lie strictly between 0 and 1")
        if rate is None:
            return
        if not wrong < rate < 1:
            raise ValueError(
                f"target_true_positive_rate={rate} must lie strictly between at_false_positive_rate={wrong}, which an "
                "attacker reaches by saying yes at random, and 1"
            )
        if self.question is None:
            raise ValueError("target_true_positive_rate= needs question=, the name of one of questions=")

    @property
    def wanted(self) -> str:
        """The target in words."""
        bound = [] if self.mse_bound is None else [f"every MSE bound at least {self.mse_bound:g}"]
        rate = (
            []
            if self.true_positive_rate is None
            else [
                f"every attacker's true-positive rate on {self.question!r} at most {self.true_positive_rate:g} "
                f"({self.false_positive_rate:g} false positives)"
            ]
        )
        return ", and ".join(bound + rate)

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
            of_all = trace.raised(-1.0, runs[0].get_num_coordinates())
            bound = _extremes(of_all.value, of_all.interval(level, self.of)[0], measured, smallest=True)
        if self.true_positive_rate is not None:
            assert self.question is not None
            of_answers = mean_of_runs([run.get_guess(self.question).divergence for run in runs])
            divergence = _extremes(of_answers.value, of_answers.interval(level, self.of)[1], measured, smallest=False)
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
        if self.mse_bound is not None:
            assert self.target.mse_bound is not None
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
        lines = [
            f"{verdict} after {self.num_steps} steps: {self.target.wanted}",
            f"  {self.measured}, over {self.num_measured} examples{runs}",
        ]
        if self.num_measured < self.num_examples:
            lines.append(
                f"  {self.num_examples - self.num_measured} examples were never measured: nothing is known about them"
            )
        if self.mse_bound is not None:
            lines.append("  The bound binds unbiased attackers, on average over runs: batches and noise are random.")
        if self.divergence is not None:
            lines.append("  The rate binds every attacker, biased or not; batches and noise are random.")
        if self.target.of == "probes":
            lines.append(
                "  The ends cover the measurement's error alone; other batches and noise would give other ends."
            )
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
    count = len(estimates)
    if count == 1:
        return estimates[0]

    def mean(values: Sequence[Tensor | None]) -> Tensor | None:
        known = [value for value in values if value is not None]
        return torch.stack(known).mean(dim=0) if len(known) == count else None

    def error_of_mean(values: Sequence[Tensor]) -> Tensor:
        return torch.linalg.vector_norm(torch.stack(list(values)), dim=0) / count

    limits = mean([each.variance_limit for each in estimates])
    run_errors = _told([each.run_error for each in estimates if each.run_error is not None])
    freedoms = [torch.as_tensor(each.degrees_of_freedom, dtype=torch.float64) for each in estimates]
    value = mean([each.value for each in estimates])
    assert value is not None
    return replace(
        estimates[0],
        value=value,
        standard_error=error_of_mean([each.standard_error for each in estimates]),
        degrees_of_freedom=torch.stack([freedom.to(value.device).expand(len(value)) for freedom in freedoms]).amin(0),
        certain=mean([each.certain for each in estimates]),
        variance_limit=None if limits is None else limits / count,
        run_error=error_of_mean(run_errors) if run_errors else None,
    )


def _told(errors: Sequence[Tensor]) -> list[Tensor]:
    """The same, but infinite errors are replaced by the largest finite one, if there is one."""
    if not errors:
        return []
    stacked = torch.stack(list(errors))
    largest = stacked.where(stacked.isfinite(), torch.zeros_like(stacked)).amax(dim=0)
    stand_in = torch.where(stacked.isfinite().any(dim=0), largest, torch.inf)
    return list(stacked.where(stacked.isfinite(), stand_in))


def _extremes(value: Tensor, end: Tensor, measured: Tensor, *, smallest: bool) -> tuple[float, float]:
    """The worst estimate and the worst end of the measured examples; without any, those of no leakage."""
    if not bool(measured.any()):
        return (math.inf, math.inf) if smallest else (0.0, 0.0)
    worst = torch.Tensor.min if smallest else torch.Tensor.max
    return float(worst(value[measured])), float(worst(end[measured]))
