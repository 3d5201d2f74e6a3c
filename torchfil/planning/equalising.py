"""``torchfil.equalise``: rounds of training that spare the most exposed.

Hannun et al. 2021 reweight a linear model until everybody leaks alike (:mod:`torchfil.glm.irfil`). Here it is DP-SGD,
and a weight ω_i ∈ (0, 1] scales the clipped gradient of its example (:mod:`torchfil.planning.sparing`). The noise
stays that of C: sparing an example reduces its pull on the model, and costs nothing else.

What the weights themselves reveal. ω is a function of the data, and a round's bounds and ε take it as fixed. **ε of all
rounds together**, as if every model was released, counts the weights as well (zero-out adjacency), if ``target`` is
fixed, ``confidence=None``, without groups and cells, for a number of rounds that is fixed beforehand, and the runs are
measured without ``rel_error`` and ``extra_probes``, which look at other examples. Given what the earlier rounds
released, the others' weights then do not depend on example i; and whatever ω_i is, the gradient that it scales has norm
≤ C. Groups, cells, shares, intervals (which borrow from all examples) and the decision when to stop depend on the
others' data, and are held fixed in that count, too. Fisher information cannot be added in this way: ω_i depends on
which batches of an earlier round drew example i, and that round's information counts this as secret.
"""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torchfil.accounting.leakage import Leakage
from torchfil.clipping import check_clip_weights
from torchfil.planning.equalised import HELD_FIXED, Equalised, Round, Stopped
from torchfil.planning.goal import Exposure, Goal, read_exposure
from torchfil.planning.sparing import RoundWeights
from torchfil.utils.progress import with_progress

__all__ = ["equalise"]

logger = logging.getLogger(__name__)

Labels = Mapping[Hashable, Hashable] | Sequence[Hashable] | Tensor | Any
_PROGRESS = 0.98  # progress: the excess falls below this share, or fewer examples miss the target
_PATIENCE = 2


def equalise(
    train: Callable[[Tensor | None], Any],
    *,
    target: float | None = None,
    question: str | None = None,
    false_positive_rate: float = 0.01,
    share: float | None = None,
    confidence: float | None = 0.95,
    groups: Labels | None = None,
    group_ratio: float = 1.05,
    by: Labels | None = None,
    max_rounds: int = 4,
    fresh_runs: int = 0,
    floor: float = 1 / 16,
    margin: float = 1.5,
    grid: int = 4,
    weights: Tensor | None = None,
    delta: float | None = None,
    progress: bool = False,
) -> Equalised:
    """Train in rounds, each with clip weights from the round before, until the most exposed are safe enough.

    ω_i ← ω_i · min(1, sqrt(e* / (margin · e_i))), rounded down to a grid, where e_i is 1/bound of the example, or the D
    of a question. Weights never rise again, and examples that meet the target with its margin keep 1.

    **The weights depend on the data and are held fixed in the bound and in ε**, as in IRFIL. Pilot models that nobody
    sees reveal nothing to an attacker of the last model, except through the weights. Ways to deal with this:

    * ``by=``: weights that are a function of public attributes alone. A cell's value is still that of its worst member.
    * Quote ε of all rounds together, ``epsilon_of_all_rounds``, which printing the result shows with ``delta=``; see
      :mod:`torchfil.planning.equalising` for when it covers the weights.
    * ``fresh_runs=``: weights come from some runs and bounds from others, so chance in the choice does not flatter the
      report. This is about chance, not about what the weights reveal. Without it bounds still come from a run that did
      not choose its own weights, but the rounds stop when a run looks good.

    Args:
        train: Trains with given clip weights (None, or a tensor [n] in the order of the data set, to pass to
            ``make_private(…, clip_weights=)``) and returns the engine, or (engine, score) with any number to keep in
            the history, for example the accuracy. Runs must differ in their random numbers: set no seed, or another
            one at each call.
        target: The bound that every example should reach; with ``question`` the largest true-positive rate that any
            attacker may reach. None: with ``groups`` only groups are equalised, otherwise it comes from ``share``.
        question: The name of a question that the run is asked; None: Fisher information (unbiased attackers).
        false_positive_rate: At which the true-positive rate of a question is read.
        share: Without a target: bring the most exposed share of all examples down to where the others begin, by the
            first round; None: 0.01.
        confidence: One-sided: the lower ends of the bounds (upper ends of D) at it, by the probes' errors, must meet
            the target. They do not cover what another run would draw; ``margin`` does. (The ends that ``torchfil gate``
            uses cover it, and are far lower if single steps decide.) An example whose probes give no error counts by
            its estimate, and is counted in the history. None: estimates.
        groups: One label per example in the order of the data set, or a mapping id ↦ label. Every group gets a common
            factor besides its members' own weights, so that the groups' mean FIL (of a question: mean D) become equal.
        group_ratio: The largest over the smallest of these means that counts as equal.
        by: Public cells, given as ``groups`` is: every example gets the smallest weight that any member of its cell
            needs. Groups must be made of whole cells.
        max_rounds: The largest number of trainings, including the first, without weights; fresh runs come on top.
        fresh_runs: How many further trainings with the chosen weights are reported instead; of several, the average.
        floor: The smallest weight: an example that does not pull at all teaches the model nothing.
        margin: Aim at this many times the target, because the next run draws other batches and noise: 1.5 if exposures
            differ by 20 % from run to run, 2 if by 30 % (longer runs differ less).
        grid: Weights are powers of 2^(−1/grid): coarse, so that they are constant for almost every change of the data.
        weights: To start with, [n]: ``next_weights`` of an earlier result. None: the first round has none.
        delta: With it the history has ε.
        progress: Whether to show a progress bar of the rounds; there may be fewer than ``max_rounds``.

    Returns:
        The weights, the engine trained with them, the history and the cost; print it.
    """
    goal = Goal(target, question, false_positive_rate, share, confidence, group_ratio, groups is not None)
    _check_options(train, max_rounds, fresh_runs, floor, margin, grid, weights, delta)
    _check_lengths({"groups": groups, "by": by, "weights": weights})
    rounds = _Rounds(train, delta)
    current: RoundWeights | None = None
    best: _Booked | None = None
    idle, stopped = 0, None

    for _ in with_progress(range(max_rounds), progress, "rounds"):
        # the first round shows which examples there are and, if it is a share of them, the target
        trained = rounds.train(weights if current is None else current.values, goal)
        if current is None:
            ids = trained.leakage.ids.all()
            current = RoundWeights.starting(weights, ids, groups, by, floor=floor, margin=margin, grid=grid)
            goal = goal.settled(trained.exposure)
        booked = rounds.book(trained, goal, current)

        # one round without progress may be chance; the best round's weights are kept
        idle = 0 if rounds.progressed() else idle + 1
        if best is None or booked.left < best.left:
            best = booked
        following = current.after(trained.exposure, goal)
        stopped = _reason_to_stop(booked.missing, idle, unchanged=torch.equal(following.values, current.values))
        if stopped is not None:
            break
        current = following

    assert best is not None
    reported = best if not fresh_runs else rounds.report(best, fresh_runs, goal)
    met = reported.missing <= 1
    warnings.warn(HELD_FIXED, stacklevel=2)
    return Equalised(
        weights=best.weights.values,
        engine=best.trained.engine,
        leakage=reported.trained.leakage,
        met=met,
        stopped=stopped or "max_rounds",
        target=goal.target,
        worst=goal.shown(reported.trained.exposure.largest()[0]),
        worst_end=goal.shown(reported.trained.exposure.largest()[1]),
        chosen=best.round,
        history=tuple(rounds.history),
        next_weights=best.weights.values if met else following.values,
        epsilon_of_all_rounds=rounds.epsilon_of_all(),
        question=question,
        fil_before=rounds.fil_before,
    )


def _reason_to_stop(missing: float, idle: int, *, unchanged: bool) -> Stopped | None:
    if missing <= 1:
        return "target met"
    if unchanged:
        return "floor"
    return "no further progress" if idle >= _PATIENCE else None


def _check_options(
    train: Any,
    max_rounds: int,
    fresh_runs: int,
    floor: float,
    margin: float,
    grid: int,
    weights: Tensor | None,
    delta: float | None,
) -> None:
    """Raise for invalid options, before hours of training."""
    if not callable(train):
        raise TypeError(f"train is a {type(train).__name__}; give a function of clip weights that returns the engine")
    if max_rounds < 1:
        raise ValueError(f"max_rounds={max_rounds} must be at least 1, and at least 2 to train with the chosen weights")
    if fresh_runs < 0:
        raise ValueError(f"fresh_runs={fresh_runs} must be 0 or a number of further trainings")
    if not 0 < floor <= 1:
        raise ValueError(f"floor={floor} must lie in (0, 1]: the smallest clip weight")
    if not 1 <= margin < math.inf:
        raise ValueError(f"margin={margin} must be at least 1: weights aim at this many times the target")
    if not (isinstance(grid, int) and grid >= 1):
        raise ValueError(f"grid={grid} must be a whole number of steps per octave, at least 1")
    if weights is not None:
        check_clip_weights(weights)
    if delta is not None and not 0 < delta < 1:
        raise ValueError(f"delta={delta} must lie strictly between 0 and 1")


def _check_lengths(columns: Mapping[str, Any]) -> None:
    """Raise if columns of one entry per example differ in length; the first round shows whether they fit the data."""
    given = {name: column for name, column in columns.items() if column is not None}
    for name, column in given.items():
        if isinstance(column, str) or not hasattr(column, "__len__"):
            raise TypeError(f"{name} is a {type(column).__name__}; give one label per example, or a mapping id ↦ label")
    lengths = {name: len(column) for name, column in given.items() if not isinstance(column, Mapping)}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{lengths} must each have one entry per example, in the order of the data set")


def _check_used(weights: Tensor | None, engine: Any) -> None:
    """Raise if an engine knows its clip weights, and they differ from those passed to train."""
    if weights is None or not hasattr(engine, "clip_weights"):
        return
    used = engine.clip_weights
    if used is None or not torch.equal(used.cpu(), weights.double().cpu()):
        has = "has none" if used is None else "has others"
        raise ValueError(
            f"train received clip weights, and its engine {has}; pass them on: make_private(…, clip_weights=weights)"
        )


@dataclass(frozen=True)
class _Trained:
    """The result of one training, or the average over several."""

    engine: Any
    leakage: Leakage
    exposure: Exposure
    score: float | None
    seconds: float


@dataclass(frozen=True)
class _Booked:
    """A training with its weights, and the ratio of its worst value to the allowed one."""

    trained: _Trained
    weights: RoundWeights
    missing: float
    round: Round

    @property
    def left(self) -> tuple[int, float]:
        """How many examples still miss the target, which depends less on chance than the worst value."""
        return self.round.num_below, self.missing


class _Rounds:
    """Trains, and keeps the history and the sums over all rounds."""

    def __init__(self, train: Callable[[Tensor | None], Any], delta: float | None) -> None:
        self._train, self._delta = train, delta
        self._accountants: list[Any] = []
        self._missing: list[float] = []
        self.history: list[Round] = []
        self.fil_before: Tensor | None = None

    def train(self, weights: Tensor | None, goal: Goal) -> _Trained:
        """One training with these weights."""
        began = time.perf_counter()
        returned = self._train(weights)
        seconds = time.perf_counter() - began
        engine, score = returned if isinstance(returned, tuple) else (returned, None)
        leakage: Any = getattr(engine, "totals", engine)
        if not hasattr(leakage, "get_mse_bound"):
            raise TypeError(
                f"train returned a {type(engine).__name__}, which has no leakage to read; return the "
                "FILPrivacyEngine of the training, or (engine, score)"
            )
        _check_used(weights, engine)
        exposure = read_exposure(leakage, goal.question, goal.confidence)
        return _Trained(engine, leakage, exposure, None if score is None else float(score), seconds)

    def book(self, trained: _Trained, goal: Goal, weights: RoundWeights, *, fresh: bool = False) -> _Booked:
        """Enter a training into the history."""
        exposure, values, engine = trained.exposure, weights.values, trained.engine
        accountant = getattr(engine, "accountant", None)
        self._accountants.append(accountant)
        worst, worst_end = exposure.largest()

        # the state before anybody was spared, for reports
        if not self.history and bool((values == 1).all()):
            fil = trained.leakage.get_mse_bound().value.rsqrt().cpu()
            self.fil_before = fil.masked_fill(~exposure.measured.cpu(), torch.nan)

        self.history.append(
            Round(
                worst=goal.shown(worst),
                worst_end=goal.shown(worst_end),
                spread=exposure.spread,
                num_below=int((exposure.measured & (exposure.high > goal.most)).sum()),
                num_spared=int((values < 1).sum()),
                smallest_weight=float(values.min()),
                mean_weight=float(values.mean()),
                group_ratio=weights.ratio(exposure),
                group_means=weights.means(exposure),
                without_interval=exposure.without_interval,
                score=trained.score,
                epsilon=None if None in (self._delta, accountant) else float(engine.get_epsilon(self._delta)),
                seconds=trained.seconds,
                fresh=fresh,
            )
        )
        logger.info("round %d: %s", len(self.history), self.history[-1])
        self._missing.append(goal.missing(exposure, weights.ratio(exposure)))
        return _Booked(trained, weights, self._missing[-1], self.history[-1])

    def progressed(self) -> bool:
        """Whether the last round came closer to the target than all before: a smaller excess, or fewer examples."""
        *before, last = zip(self._missing, (each.num_below for each in self.history), strict=True)
        if not before:
            return True
        least, fewest = (min(column) for column in zip(*before, strict=True))
        return bool(last[0] < _PROGRESS * least or last[1] < fewest)

    def report(self, chosen: _Booked, count: int, goal: Goal) -> _Booked:
        """The average over further trainings with the chosen weights, from which nothing is chosen."""
        runs: list[_Trained] = []
        for _ in range(count):
            trained = self.train(chosen.weights.values, goal)
            if any(torch.equal(trained.exposure.value, each.exposure.value) for each in (chosen.trained, *runs)):
                raise ValueError(
                    "train() repeated a run to the last digit: it sets the same seed each time, so a fresh run adds "
                    "no information; set no seed, or another one at each call"
                )
            self.book(trained, goal, chosen.weights, fresh=True)
            runs.append(trained)

        engines = [each.engine for each in runs]
        if all(hasattr(engine, "merge") for engine in engines):
            leakage = engines[0].merge(engines)
        else:
            leakage = runs[0].leakage if count == 1 else Leakage.average([each.leakage for each in runs])
        exposure = read_exposure(leakage, goal.question, goal.confidence)
        average = replace(runs[-1], leakage=leakage, exposure=exposure)
        missing = goal.missing(exposure, chosen.weights.ratio(exposure))
        return replace(chosen, trained=average, missing=missing)

    def epsilon_of_all(self) -> float | None:
        """ε of all rounds' models together; None without δ, or if the accountant cannot say."""
        if self._delta is None or any(accountant is None for accountant in self._accountants):
            return None
        steps: Counter[tuple[float, float]] = Counter()
        for accountant in self._accountants:
            for sigma, q, count in accountant.history:
                steps[sigma, q] += count
        together = type(self._accountants[0])()
        if together.mechanism() == "gdp" and len(steps) > 1:
            return None  # it supports only one kind of step
        together.history = [(sigma, q, count) for (sigma, q), count in steps.items()]
        return float(together.get_epsilon(self._delta))
