"""``torchfil.equalise``: rounds of training that spare the most exposed.

Hannun et al. 2021 reweight a linear model until everybody leaks alike (:mod:`torchfil.glm.model`).
Here it is DP-SGD, and a weight ω_i ∈ (0, 1] scales the clipped gradient of its example. The noise
stays that of C: sparing an example reduces its pull on the model, and costs nothing else.

The exposure e of an example is 1/bound = tr(I)/d (unbiased attackers), or the D of a question's
worst answer (every attacker). If the clipped gradient of example i is multiplied by ω_i, its
exposure is nearly multiplied by ω_i². For a target exposure e*, one round computes (with the
weights of the previous round on the right):

    ω_i ← ω_i · min(1, sqrt(e* / e_i))

rounded **down** to a grid of powers of 2^(−1/4), so that ω is constant for almost every small
change of the data.

What the weights themselves reveal. ω is a function of the data, and a round's bounds and ε take it
as fixed. **ε of all rounds together**, as if every model was released, counts the weights as well
(zero-out adjacency), if ``target`` is fixed, ``confidence=None``, without cells, for a number of
rounds that is fixed beforehand, and the runs are measured with ``num_probes=`` and
``amplification="none"``: planned probes, and predictions where batches are secret, look at other
examples. Given what the earlier rounds released, the others' weights then do not depend on example
i; and whatever ω_i is, the gradient that it scales has norm ≤ C. Cells, shares, intervals (which
borrow from all examples) and the decision when to stop depend on the others' data, and are held
fixed in that count, too. Fisher information cannot be added in this way: ω_i depends on which
batches of an earlier round drew example i, and that round's information counts this as secret.
"""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from torchfil.accounting.ids import plain_key
from torchfil.accounting.leakage import Leakage
from torchfil.clipping import check_clip_weights
from torchfil.guessing import divergence_of_rate, largest_true_positive_rate
from torchfil.utils.text import aligned, with_progress

logger = logging.getLogger(__name__)

Labels = Mapping[Hashable, Hashable] | Sequence[Hashable] | Tensor | Any
Stopped = Literal["target met", "no further progress", "floor", "max_rounds"]

HELD_FIXED = (
    "The clip weights were computed from private data and are held fixed in these bounds and in a "
    "round's ε, as in IRFIL: they do not include what the weights themselves reveal about an "
    "example. Keep weights and pilot models as confidential as the data. Alternatives: by= "
    "(weights that are functions of public attributes), or quote ε of all rounds together "
    "(epsilon_of_all_rounds)."
)

_REASONS = {
    "target met": "the rounds met it, but the reported runs do not: a larger margin= leaves room "
    "for chance",
    "no further progress": "two rounds in a row did not help; raise margin=, or the noise",
    "floor": "no weight would change further; lower floor= or the target, or raise the noise",
    "max_rounds": "all rounds are used up; raise max_rounds=, or the noise",
}
_PROGRESS = 0.98  # progress: the excess falls below this share, or fewer examples miss the target
_PATIENCE = 2
_DEFAULT_SHARE = 0.01
# steps per octave: coarse, so that weights are constant for almost every change of the data
_GRID = 4


@dataclass(frozen=True)
class Round:
    """One training, and how it treated the most exposed.

    Attributes:
        worst: The smallest MSE bound (unbiased attackers), or the largest true-positive rate of a
            question (every attacker), as estimated from this run; its batches and its noise are
            random.
        worst_end: The same at the conservative ends of the intervals; ``worst`` itself with
            ``confidence=None``.
        spread: The standard deviation of FIL (of a question: of sqrt(D)) over examples, over its
            mean.
        num_below: For how many examples the (conservative) number misses the target.
        num_spared: How many were trained with ω < 1.
        smallest_weight: The smallest ω.
        without_interval: How many measured examples have no interval and count by their estimate.
        score: What ``train`` returned besides the engine, for example the accuracy.
        epsilon: ε of this run alone, at the given δ, with its weights held fixed.
        seconds: How long it took.
        fresh: Whether the weights had been chosen before, and nothing was chosen from this run.
    """

    worst: float
    worst_end: float
    spread: float
    num_below: int
    num_spared: int
    smallest_weight: float
    without_interval: int
    score: float | None
    epsilon: float | None
    seconds: float
    fresh: bool = False


@dataclass(frozen=True)
class Equalised:
    """Clip weights, the run trained with them, and how they were found; ``str()`` gives a table.

    **The weights depend on the data and are held fixed in every number here**, as in IRFIL; see
    :func:`torchfil.equalise` for ways to deal with that.

    Attributes:
        weights: ω, [n], in the order of the data set, float64; those that ``engine`` was trained
            with. Confidential.
        engine: The engine that ``train`` returned for them, from the best round: the one in which
            the fewest examples missed the target, or the last one if the target was met.
        leakage: What is reported: that engine's totals, or the average over ``fresh_runs``.
        met: Whether what is reported meets the target.
        stopped: Why the rounds ended.
        target: The target bound (or true-positive rate).
        worst: The smallest bound (or largest true-positive rate) reported.
        worst_end: Its conservative end.
        chosen: The round that ``weights`` and ``engine`` come from.
        history: All rounds, fresh ones last.
        next_weights: The weights of another round: pass them as ``weights=`` to continue.
        epsilon_of_all_rounds: ε of all rounds together, fresh ones included, as if every model was
            released; None without δ, and for rounds of different noise with the "gdp" accountant.
        question: The question; None: Fisher information.
        fil_before: η̄ of every example in the first round, [n], NaN if it was not measured; None if
            that round already had weights.
    """

    weights: Tensor
    engine: Any
    leakage: Leakage
    met: bool
    stopped: Stopped
    target: float
    worst: float
    worst_end: float
    chosen: Round = field(repr=False)
    history: tuple[Round, ...] = field(repr=False)
    next_weights: Tensor = field(repr=False)
    epsilon_of_all_rounds: float | None = None
    question: str | None = None
    fil_before: Tensor | None = field(default=None, repr=False)

    @property
    def num_spared(self) -> int:
        """How many examples have ω < 1."""
        return int((self.weights < 1).sum())

    @property
    def seconds(self) -> float:
        """The duration of all rounds."""
        return sum(each.seconds for each in self.history)

    def check_trained_with(self, clip_weights: Tensor | None) -> None:
        """Raise unless a run was trained with the weights that the rounds chose.

        Args:
            clip_weights: ω of the run, [n]; None: 1.
        """
        own = torch.ones_like(self.weights) if clip_weights is None else clip_weights
        if not torch.equal(own.double().cpu(), self.weights.double().cpu()):
            raise ValueError(
                "equalised= has other clip weights than this run has; use result.engine.save_run(…)"
            )

    def summary(self) -> dict[str, Any]:
        """What a run file keeps: what the rounds aimed at, and whether they reached it."""
        names = ("question", "target", "met", "stopped", "epsilon_of_all_rounds")
        return {name: getattr(self, name) for name in names}

    def columns(self) -> dict[str, np.ndarray]:
        """The rounds as columns, [rounds] each, for run files.

        NaN if a round does not have the number.
        """
        names = [*(name for name, _ in _COLUMNS.values()), "fresh"]
        values = {name: [getattr(each, name) for each in self.history] for name in names}
        return {
            name: np.asarray([math.nan if v is None else v for v in column])
            for name, column in values.items()
        }

    def __str__(self) -> str:
        rate = f"largest true-positive rate on {self.question!r} (every attacker)"
        binds = "smallest MSE bound (unbiased attackers)" if self.question is None else rate
        rounds, fresh = len(self.history), sum(each.fresh for each in self.history)
        source = (
            f"from {fresh} fresh run{'s' * (fresh > 1)}"
            if fresh
            else "from the run trained with these weights"
        )
        numbers = (
            f"{self.worst:.4g}, conservative end {self.worst_end:.4g}, target {self.target:.4g}"
        )
        lines = [f"{binds}: {numbers}; {source}"]
        lines += [
            "the target is met" if self.met else f"the target is not met: {_REASONS[self.stopped]}"
        ]
        lines += [
            f"{self.num_spared} of {len(self.weights)} examples are down-weighted (ω < 1)",
            *_table(self.history),
        ]
        lines += [f"{rounds} trainings, {self.seconds:.0f} s"]
        if self.epsilon_of_all_rounds is not None:
            lines += [f"ε of all {rounds} rounds together: {self.epsilon_of_all_rounds:.3g}"]
        return "\n".join([*lines, HELD_FIXED])


# a round's numbers by title, with their format; a column is left out if every round has None
_COLUMNS = {
    "worst": ("worst", ".4g"),
    "its end": ("worst_end", ".4g"),
    "short of target": ("num_below", ""),
    "spread": ("spread", ".3f"),
    "spared": ("num_spared", ""),
    "smallest ω": ("smallest_weight", ".3f"),
    "score": ("score", ".4f"),
    "ε": ("epsilon", ".3g"),
    "seconds": ("seconds", ".0f"),
}


def _table(history: Sequence[Round]) -> list[str]:
    """The rounds, one per line under their titles."""
    rows = [["round", *_COLUMNS]]
    for number, each in enumerate(history, 1):
        values = [(getattr(each, name), form) for name, form in _COLUMNS.values()]
        cells = ["" if value is None else format(value, form) for value, form in values]
        rows.append([f"{number}{' fresh' if each.fresh else ''}", *cells])
    kept = [column for column in zip(*rows, strict=True) if any(column[1:])]
    return aligned(list(zip(*kept, strict=True)))


def _check_rounds(max_rounds: int, fresh_runs: int, floor: float, margin: float) -> None:
    if not max_rounds >= 1:
        raise ValueError(
            f"max_rounds={max_rounds} must be at least 1, and 2 to train with the chosen weights"
        )
    if not fresh_runs >= 0:
        raise ValueError(f"fresh_runs={fresh_runs} must be 0 or a number of further trainings")
    if not 0 < floor <= 1:
        raise ValueError(f"floor={floor} must lie in (0, 1]: the smallest clip weight")
    if not 1 <= margin < math.inf:
        raise ValueError(
            f"margin={margin} must be at least 1: weights aim at this many times the target"
        )


def equalise(
    train: Callable[[Tensor | None], Any],
    *,
    target: float | None = None,
    question: str | None = None,
    false_positive_rate: float = 0.01,
    share: float | None = None,
    confidence: float | None = 0.95,
    by: Labels | None = None,
    max_rounds: int = 4,
    fresh_runs: int = 0,
    floor: float = 1 / 16,
    margin: float = 1.5,
    weights: Tensor | None = None,
    delta: float | None = None,
    progress: bool = False,
) -> Equalised:
    """Train in rounds, each with clip weights from the round before, until the most exposed are
    safe enough.

    ω_i ← ω_i · min(1, sqrt(e* / (margin · e_i))), where e_i is 1/bound of the example, or the D of
    a question. Weights are rounded down to powers of 2^(−1/4), so they are constant for almost
    every change of the data. They never rise again, and examples that meet the target with its
    margin keep 1.

    **The weights depend on the data and are held fixed in the bound and in ε**, as in IRFIL. Pilot
    models that nobody sees reveal nothing to an attacker of the last model, except through the
    weights. Ways to deal with this:

    * ``by=``: weights that are a function of public attributes alone. A cell's value is still that
      of its worst member.
    * Quote ε of all rounds together, ``epsilon_of_all_rounds``, which printing the result shows
      with ``delta=``; see :mod:`torchfil.planning.equalising` for when it covers the weights.
    * ``fresh_runs=``: weights come from some runs and bounds from others, so chance in the choice
      does not flatter the report. This is about chance, not about what the weights reveal. Without
      it bounds still come from a run that did not choose its own weights, but the rounds stop when
      a run looks good.

    Args:
        train: Trains with given clip weights (None, or a tensor [n] in the order of the data set,
            to pass to ``make_private(…, clip_weights=)``) and returns the engine, or (engine,
            score) with any number to keep in the history, for example the accuracy. Runs must
            differ in their random numbers: set no seed, or another one at each call.
        target: The bound that every example should reach; with ``question`` the largest
            true-positive rate that any attacker may reach. None: it comes from ``share``.
        question: The name of a question that the run is asked; None: Fisher information (unbiased
            attackers).
        false_positive_rate: At which the true-positive rate of a question is read.
        share: Without a target: bring the most exposed share of all examples down to where the
            others begin, by the first round; None: 0.01.
        confidence: One-sided: the lower ends of the bounds (upper ends of D) at it, by the probes'
            errors, must meet the target. They do not cover what another run would draw; ``margin``
            does. (The ends that ``torchfil gate`` uses cover it, and are far lower if single steps
            decide.) An example whose probes give no error counts by its estimate, and is counted in
            the history. None: estimates.
        by: Public cells, one label per example in the order of the data set, or a mapping id ↦
            label: every example gets the smallest weight that any member of its cell needs.
        max_rounds: The largest number of trainings, including the first, without weights; fresh
            runs come on top.
        fresh_runs: How many further trainings with the chosen weights are reported instead; of
            several, the average.
        floor: The smallest weight: an example that does not pull at all teaches the model nothing.
        margin: Aim at this many times the target, because the next run draws other batches and
            noise: 1.5 if exposures differ by 20 % from run to run, 2 if by 30 % (longer runs differ
            less).
        weights: To start with, [n]: ``next_weights`` of an earlier result. None: the first round
            has none.
        delta: With it the history has ε.
        progress: Whether to show a progress bar of the rounds; there may be fewer than
            ``max_rounds``.

    Returns:
        The weights, the engine trained with them, the history and the cost; print it.
    """
    goal = Goal(target, question, false_positive_rate, share, confidence)
    _check_rounds(max_rounds, fresh_runs, floor, margin)
    if delta is not None and not 0 < delta < 1:
        raise ValueError(f"delta={delta} must lie strictly between 0 and 1")
    if weights is not None:
        check_clip_weights(weights)
    columns = {"by": by, "weights": weights}
    lengths = {
        name: len(each)
        for name, each in columns.items()
        if each is not None and not isinstance(each, Mapping)
    }
    if not len(set(lengths.values())) <= 1:
        raise ValueError(f"{lengths} must each have one entry per example, in the data's order")

    rounds = _Rounds(train, weights, by, goal, delta)
    following: Tensor | None = None
    best: _Training | None = None
    idle, least, fewest = 0, math.inf, math.inf
    stopped: Stopped = "max_rounds"
    for _ in with_progress(range(max_rounds), progress, "rounds"):
        done = rounds.train(following)
        # depends less on chance than the worst value, and comes first
        num_below = done.round.num_below
        if best is None or (num_below, done.missing) < (best.round.num_below, best.missing):
            best = done
        idle = 0 if done.missing < _PROGRESS * least or num_below < fewest else idle + 1
        least, fewest = min(least, done.missing), min(fewest, num_below)
        following = lowered_weights(done.weights, done.exposure, rounds.goal.most, margin).clamp(
            min=floor
        )
        if rounds.cells is not None:  # the smallest of a cell for all of its members
            smallest = following.new_ones(int(rounds.cells.max()) + 1)
            following = smallest.scatter_reduce(0, rounds.cells, following, "amin")[rounds.cells]
        reasons: dict[Stopped, bool] = {
            "target met": done.missing <= 1,
            "floor": torch.equal(following, done.weights),
            "no further progress": idle >= _PATIENCE,  # one round without progress may be chance
        }
        stopped = next((reason for reason, holds in reasons.items() if holds), "max_rounds")
        if stopped != "max_rounds":
            break

    assert best is not None
    assert following is not None
    reported = rounds.report(best, fresh_runs) if fresh_runs else best
    weights, met, target = best.weights, reported.missing <= 1, rounds.goal.target
    assert target is not None
    worst, worst_end = map(rounds.goal.shown, reported.exposure.largest())
    more: dict[str, Any] = {
        "chosen": best.round,
        "history": tuple(rounds.history),
        "fil_before": rounds.fil_before,
    }
    more |= {"next_weights": weights if met else following, "question": question}
    more |= {"epsilon_of_all_rounds": rounds.epsilon_of_all()}
    warnings.warn(HELD_FIXED, stacklevel=2)
    return Equalised(
        weights, best.engine, reported.leakage, met, stopped, target, worst, worst_end, **more
    )


@dataclass(frozen=True)
class _Training:
    """One training, or the average over several, with its weights.

    Missing: its worst value over the allowed one.
    """

    engine: Any
    leakage: Leakage
    exposure: Exposure
    weights: Tensor
    missing: float
    round: Round


@dataclass
class _Rounds:
    """Trains, and keeps the history and the sums over all rounds.

    The first round settles the goal.
    """

    run: Callable[[Tensor | None], Any]
    first: Tensor | None
    by: Labels | None
    goal: Goal
    delta: float | None
    history: list[Round] = field(default_factory=list)
    accountants: list[Any] = field(default_factory=list)
    fil_before: Tensor | None = None
    cells: Tensor | None = None

    def train(self, weights: Tensor | None, *, fresh: bool = False) -> _Training:
        """One training with these weights, entered into the history.

        The first one (None) shows which examples there are and, if it is a share of them, the
        target.
        """
        given = self.first if weights is None else weights
        began = time.perf_counter()
        returned = self.run(given)
        seconds = time.perf_counter() - began
        engine, score = returned if isinstance(returned, tuple) else (returned, None)
        leakage: Any = getattr(engine, "totals", engine)
        if given is not None:
            used = getattr(engine, "clip_weights", given)
            if not (used is not None and torch.equal(used.cpu(), given.double().cpu())):
                raise ValueError(
                    "train received clip weights, and its engine has "
                    f"{'none' if used is None else 'others'}; pass them on: make_private(…, "
                    "clip_weights=weights)"
                )
        exposure = read_exposure(leakage, self.goal.question, self.goal.confidence)
        if weights is None:
            ids = leakage.ids.all()
            weights = torch.ones(len(ids), dtype=torch.float64) if given is None else given
            if weights.shape != (len(ids),):
                raise ValueError(
                    f"weights has shape {tuple(weights.shape)} for {len(ids)} examples"
                )
            self.cells = None if self.by is None else members_of(self.by, ids)
            self.goal = self.goal.settled(exposure)
            if (weights == 1).all():  # nobody's weight is below 1 yet: for reports
                fil = leakage.get_mse_bound().value.rsqrt().cpu()
                self.fil_before = fil.masked_fill(~exposure.measured.cpu(), torch.nan)

        accountant = getattr(engine, "accountant", None)
        numbers: dict[str, Any] = {
            "num_below": int((exposure.measured & (exposure.high > self.goal.most)).sum()),
            "num_spared": int((weights < 1).sum()),
            "smallest_weight": float(weights.min()),
            "score": None if score is None else float(score),
            "epsilon": None
            if None in (self.delta, accountant)
            else float(engine.get_epsilon(self.delta)),
        }
        numbers |= {"seconds": seconds, "fresh": fresh}
        numbers |= {"spread": exposure.spread, "without_interval": exposure.without_interval}
        worst, worst_end = map(self.goal.shown, exposure.largest())
        entry = Round(worst, worst_end, **numbers)
        self.accountants.append(accountant)
        self.history.append(entry)
        logger.info("round %d: %s", len(self.history), entry)
        return _Training(engine, leakage, exposure, weights, self.goal.missing(exposure), entry)

    def report(self, chosen: _Training, count: int) -> _Training:
        """The average over further trainings with the chosen weights, from which nothing is
        chosen.
        """
        runs: list[_Training] = []
        for _ in range(count):
            run = self.train(chosen.weights, fresh=True)
            if any(
                torch.equal(run.exposure.value, each.exposure.value) for each in (chosen, *runs)
            ):
                raise ValueError(
                    "train() repeated a run to the last digit: set no seed, or another one at "
                    "each call"
                )
            runs.append(run)

        engines = [each.engine for each in runs]
        # which checks that they are repetitions
        leakage = runs[0].leakage if count == 1 else engines[0].merge(engines)
        exposure = read_exposure(leakage, self.goal.question, self.goal.confidence)
        missing = self.goal.missing(exposure)
        return replace(chosen, leakage=leakage, exposure=exposure, missing=missing)

    def epsilon_of_all(self) -> float | None:
        """ε of all rounds' models together; None without δ, or if the accountant cannot say."""
        if self.delta is None or any(accountant is None for accountant in self.accountants):
            return None
        steps: Counter[tuple[float, float]] = Counter()
        for sigma, q, count in (
            entry for accountant in self.accountants for entry in accountant.history
        ):
            steps[sigma, q] += count
        together = type(self.accountants[0])()
        if together.mechanism() == "gdp" and len(steps) > 1:
            return None  # it supports only one kind of step
        together.history = [(sigma, q, count) for (sigma, q), count in steps.items()]
        return max(float(together.get_epsilon(self.delta)), 0.0)  # NaN stays NaN


# ------------------------------------------------------------- whose clip weight falls, and how far


@dataclass(frozen=True)
class Exposure:
    """How exposed every example was in one run; it scales as the square of a clip weight.

    Attributes:
        value: e, [n], float64: 1/bound, or D of a question's worst answer.
        high: The upper end of e, [n], one-sided at a confidence; e itself without a confidence, and
            if the probes give no error.
        measured: Whether the run says anything about the example, bool [n].
        without_interval: How many measured examples have no interval.
    """

    value: Tensor
    high: Tensor
    measured: Tensor
    without_interval: int = 0

    @property
    def spread(self) -> float:
        """The standard deviation of sqrt(e) over examples (of FIL η̄, or sqrt(D)), over its mean;
        0: all alike.
        """
        root = self.value[self.measured].sqrt()
        return float(root.std(correction=0) / root.mean()) if bool((root > 0).any()) else 0.0

    def largest(self) -> tuple[float, float]:
        """The largest estimate and the largest upper end of the measured examples."""
        return float(self.value[self.measured].max()), float(self.high[self.measured].max())


@dataclass(frozen=True)
class Goal:
    """What a run should reach; checked when it is made.

    Attributes:
        target: The bound that every example should reach, or with a question the largest
            true-positive rate that any attacker may reach; None: ``share`` sets it.
        question: Its name; None: Fisher information.
        false_positive_rate: The false-positive rate for the true-positive rate.
        share: The share of examples to bring down to the level at which the others begin.
        confidence: The one-sided confidence of the ends (from the probes' errors) that must meet
            the target; None: use estimates.

    Example:
        >>> Goal(target=2.0).most
        0.5
        >>> Goal(target=0.25, question="member").shown(Goal(target=0.25, question="member").most)
        0.25
    """

    target: float | None = None
    question: str | None = None
    false_positive_rate: float = 0.01
    share: float | None = None
    confidence: float | None = None

    def __post_init__(self) -> None:
        target, alpha, share = self.target, self.false_positive_rate, self.share
        if self.question is None:
            if target is not None and not 0 < target < math.inf:
                raise ValueError(f"target={target} must be a positive, finite MSE bound")
        else:
            if not 0 < alpha < 1:
                raise ValueError(f"false_positive_rate={alpha} must lie strictly between 0 and 1")
            if target is not None and not alpha < target < 1:
                raise ValueError(
                    f"target={target} must lie between false_positive_rate={alpha} and 1: with "
                    "question= it is a rate"
                )
        if None not in (target, share):
            raise ValueError(
                f"target={target} and share={share} both say who is exposed; give one of them"
            )
        if share is not None and not 0 < share < 1:
            raise ValueError(f"share={share} must lie strictly between 0 and 1")
        if self.confidence is not None and not 0.5 < self.confidence < 1:
            raise ValueError(
                f"confidence={self.confidence} must lie strictly between 0.5 and 1, or be None "
                "for estimates"
            )

    @property
    def most(self) -> float:
        """e*, the largest exposure that meets the target; infinite if there is none."""
        if self.target is None:
            return math.inf
        return (
            1 / self.target
            if self.question is None
            else divergence_of_rate(self.target, self.false_positive_rate)
        )

    def shown(self, exposure: float) -> float:
        """An exposure in the form that users read: the bound, or the true-positive rate."""
        if self.question is None:
            return 1 / exposure if exposure > 0 else math.inf
        return round(float(largest_true_positive_rate(exposure, self.false_positive_rate)), 12)

    def settled(self, exposure: Exposure) -> Goal:
        """The goal with the target that its share implies; unchanged if it has a target."""
        if self.target is not None:
            return self
        share = _DEFAULT_SHARE if self.share is None else self.share
        ordered = exposure.high[exposure.measured].sort().values
        most = float(ordered[max(0, math.ceil((1 - share) * len(ordered)) - 1)])
        if not most > 0:
            raise ValueError(
                f"share={share}: only {int((ordered > 0).sum())} of {len(ordered)} examples leak "
                "anything, fewer than the share; give target="
            )
        return replace(self, target=self.shown(most), share=None)

    def missing(self, exposure: Exposure) -> float:
        """The worst exposure divided by what is allowed; ≤ 1: the goal is met."""
        return exposure.largest()[1] / self.most


def read_exposure(leakage: Leakage, question: str | None, confidence: float | None) -> Exposure:
    """Every example's exposure in a run.

    Args:
        leakage: The run's results; they must include the question, if one is named.
        question: None: e = 1/bound = tr(I)/d, unbiased attackers. A name: D of its worst answer,
            every attacker.
        confidence: The one-sided confidence of the upper end, from the probes' errors; None: the
            estimate.

    Raises:
        ValueError: Nobody was measured, somebody's leakage is infinite (steps without noise), or a
            confidence was asked for and nobody has an interval.
    """

    def worst(values: Tensor) -> Tensor:  # over answers, [n]
        return values.detach().double().cpu().reshape(len(values), -1).amax(dim=1).clamp(min=0)

    quantity = (
        leakage.get_mse_bound().raised(-1.0)
        if question is None
        else leakage.get_guess(question).divergence
    )
    measured = leakage.was_measured().cpu()
    value = worst(quantity.value).where(measured, 0.0)
    if not measured.any():
        raise ValueError(
            "the run that train() returned measured nobody: take private steps before that"
        )
    infinite = int(value[measured].isinf().sum())
    if infinite:
        raise ValueError(
            f"{infinite} examples leak without limit: train with noise_multiplier > 0 at every step"
        )
    if confidence is None:
        return Exposure(value, value, measured)

    # Only the probes' errors count here. Another run could differ far more if one step decides, but
    # this does not tell whose weight should fall; the margin of the weights allows for it.
    high = worst(quantity.interval(2 * confidence - 1, "probes")[1])
    known = high.isfinite()
    if not known[measured].any():
        raise ValueError(
            "the probes give nobody an error: train longer, with num_probes=2 or more, or pass "
            "confidence=None"
        )
    return Exposure(
        value, torch.where(known, high, value), measured, int((measured & ~known).sum())
    )


def lowered_weights(
    weights: Tensor, exposure: Exposure, most: float, margin: float = 1.0
) -> Tensor:
    """ω_i · min(1, sqrt(e* / (margin · e_i))), rounded down to a power 2^(−k/4), k = 0, 1, ….

    No weight rises.

    A weight never rises again, because one run cannot distinguish safe examples from lucky ones.

    Args:
        weights: ω of the run that the exposure comes from, [n].
        exposure: The exposure of that run; its upper ends count.
        most: e*.
        margin: Aim at e*/margin. Examples below that keep their weight.

    Example:
        >>> e = torch.tensor([0.5, 4.0])
        >>> lowered_weights(torch.ones(2), Exposure(e, e, torch.tensor([True, True])), 1.0)
        tensor([1.0000, 0.5000])
    """
    aim = most / margin
    exposed = exposure.measured & (exposure.high > aim)
    wanted = weights * (aim / exposure.high.clamp(min=aim)).sqrt().to(weights)
    # values on the grid stay there despite rounding errors
    steps = torch.ceil(-_GRID * wanted.log2() - 1e-6)
    return torch.where(exposed, torch.exp2(-steps / _GRID).clamp(max=1.0), weights)


def members_of(labels: Labels, ids: Sequence[Hashable]) -> Tensor:
    """The number of every example's cell, [n].

    Args:
        labels: One label per example, in the order of the data set (a sequence, an array, a
            tensor), or a mapping id ↦ label that has every id.
        ids: All ids, in the order of the data set.
    """
    if isinstance(labels, Mapping):
        missing = [each for each in ids if each not in labels]
        if missing:
            raise ValueError(
                f"by has no label for {len(missing)} of {len(ids)} ids, {missing[:1]} among them"
            )
        labels = [labels[each] for each in ids]
    listed = [
        plain_key(label)
        for label in (labels.tolist() if hasattr(labels, "tolist") else list(labels))
    ]
    if len(listed) != len(ids):
        raise ValueError(f"by has {len(listed)} labels for {len(ids)} examples; give one for each")
    if not all(label == label for label in listed):
        raise ValueError("by has NaN as a label; use a label such as 'not known'")
    numbers = {label: number for number, label in enumerate(dict.fromkeys(listed))}
    return torch.tensor([numbers[label] for label in listed])
