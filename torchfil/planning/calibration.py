r"""Pilots choose σ for a target of leakage, as ``make_private_with_epsilon`` does for ε, but by
training.

No formula gives the leakage of every example over a run: tr I is about proportional to 1/σ², but
the path of the weights changes with σ, and so do the subsampling factors. So whole runs are tried
on copies, with σ on a public grid of powers. The headroom says how many times better than the
target the worst example is; log headroom is nearly linear in log σ, which gives the next trial. The
result is the smallest σ of the grid with which a pilot met the target, with a margin.

A pilot trains a copy of model and optimizer on the user's loader, with its own ``make_private`` and
its own random numbers. It is independent of the run that follows, which continues as if no number
had been drawn.

The target is about all examples together, at an end of the interval: with the stated confidence no
example's MSE bound lies below the first end, and no attacker's true-positive rate on any example
above the second. As in :meth:`Leakage.get_smallest_mse_bound`, one example's one-sided interval
serves all.

What it means: σ depends on the data, and the bound of the run holds with σ taken as given. Rounded
to a coarse grid, σ is constant almost everywhere. ε counts only the run: neither the pilots nor
their measurements may be released.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn, optim
from torch.utils.data import DataLoader

from torchfil.accounting.leakage import Leakage
from torchfil.accounting.sums import FEWEST_PARTICIPATIONS
from torchfil.fisher.recording.graphs import release_memory
from torchfil.fisher.results import Part
from torchfil.guessing import divergence_of_rate, largest_true_positive_rate
from torchfil.utils.noise import preserve_rng
from torchfil.utils.text import with_progress

Train = Callable[..., None]
_MOST_PILOTS = 8
_LARGEST_STEP = 8.0  # between σ of one trial and the next
_USUAL_SLOPE = 2.0  # of log headroom against log σ
_SMALLEST_NOISE = 0.1  # less is hardly noise
_FAR_FROM_ESTIMATE = 3.0  # times
_BETWEEN_SEEDS = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class LeakageTarget:
    """What a run aims at for every example; :meth:`check` says whether it got there.

    Attributes:
        mse_bound: The smallest bound that any example may have: an unbiased attacker's MSE per
            coordinate, on average over runs.
        true_positive_rate: The largest rate that any attacker, biased or not, may reach on any
            example; over runs.
        question: The question that the rate is about, by its name in ``questions=``.
        false_positive_rate: The false-positive rate for it.
        confidence: The confidence of each of the two ends.
        of: "run": the ends cover everything random in a run; "probes": only the error of the
            measurement, for this run; see :meth:`torchfil.fisher.results.Estimate.interval`.

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
        if bound is None and rate is None:
            raise ValueError(
                "no target is given: pass target_mse_bound=, target_true_positive_rate=, or both"
            )
        if bound is not None and not 0 < bound < math.inf:
            raise ValueError(f"target_mse_bound={bound} must be positive and finite")
        if not 0.5 < self.confidence < 1:
            raise ValueError(f"confidence={self.confidence} must lie strictly between 0.5 and 1")
        if self.of not in ("run", "probes"):
            raise ValueError(f"of={self.of!r} must be 'run' (all that is random in it) or 'probes'")
        if not 0 < wrong < 1:
            raise ValueError(f"at_false_positive_rate={wrong} must lie strictly between 0 and 1")
        if rate is not None:
            if not wrong < rate < 1:
                raise ValueError(
                    f"target_true_positive_rate={rate} must lie strictly between "
                    f"at_false_positive_rate={wrong}, which saying yes at random reaches, and 1"
                )
            if self.question is None:
                raise ValueError("target_true_positive_rate= needs question=, a name of questions=")

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
            >>> target = LeakageTarget(
            ...     true_positive_rate=0.2556, question="sex", false_positive_rate=0.05
            ... )
            >>> round(target.largest_divergence, 3)
            0.235
        """
        assert self.true_positive_rate is not None
        return divergence_of_rate(self.true_positive_rate, self.false_positive_rate)

    def check(self, run: Leakage) -> TargetCheck:
        """Whether a run met the target.

        Examples that were not measured do not count: nothing is known about them.
        """
        measured, divergence = run.was_measured(), None
        bound = (
            None if self.mse_bound is None else run.get_smallest_mse_bound(self.confidence, self.of)
        )
        if self.true_positive_rate is not None:
            assert self.question is not None
            guess = run.get_guess(self.question)
            answers = guess.divergence
            # one end alone
            high = answers.interval(2 * self.confidence - 1, self.of)[1].clamp(max=guess.largest)
            worst = [
                float(each[measured].max()) if bool(measured.any()) else 0.0
                for each in (answers.value, high)
            ]
            divergence = worst[0], worst[1]
        return TargetCheck(
            self, bound, divergence, int(measured.sum()), len(measured), run.ledger.steps
        )

    def is_missed_by(self, run: Leakage) -> bool:
        """Whether the estimates so far are worse than the target: leakage cannot be undone.

        Examples that were not measured do not count. Cheap to call often.
        """
        ledger, missed = run.ledger, []
        if self.mse_bound is not None:
            missed.append(ledger.traces() * self.mse_bound > ledger.own_coordinates)
        if self.true_positive_rate is not None:
            divergence = ledger.sums[f"question {self.question}"]
            missed.append((divergence > self.largest_divergence).any(dim=1))
        return bool((torch.stack(missed) & run.was_measured()).any())


@dataclass(frozen=True)
class TargetCheck:
    """Whether a target was met, with the numbers.

    Print it. They depend on private data and are confidential.

    Attributes:
        target: What was wanted.
        mse_bound: The smallest estimate of all examples, and the end below all bounds; None: not
            wanted.
        divergence: The largest estimate of D over examples and answers, and the end above it; None:
            not wanted.
        num_measured: How many examples were measured.
        num_examples: The number of examples.
        num_steps: The number of steps; more steps leak more.
    """

    target: LeakageTarget
    mse_bound: tuple[float, float] | None
    divergence: tuple[float, float] | None
    num_measured: int
    num_examples: int
    num_steps: int = 0

    @property
    def true_positive_rate(self) -> tuple[float, float] | None:
        """The largest of any attacker on any example at the estimates of D, and at their end."""
        if self.divergence is None:
            return None
        estimate, end = largest_true_positive_rate(
            self.divergence, self.target.false_positive_rate
        ).tolist()
        return estimate, end

    @property
    def headroom(self) -> float:
        """How many times better than the target the worse end is: met if at least 1.

        About proportional to σ².
        """
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
        shares = [] if self.num_measured else [0.0]
        if self.mse_bound is not None and self.target.mse_bound is not None:
            shares.append(self.mse_bound[which] / self.target.mse_bound)
        if self.divergence is not None:
            worst = self.divergence[which]
            shares.append(self.target.largest_divergence / worst if worst > 0 else math.inf)
        return min(shares)

    @property
    def measured(self) -> str:
        """The numbers in one line."""
        texts = {"smallest bound {:.3g}, at least {:.3g} ({:g} %)": self.mse_bound}
        texts["largest rate {:.3g}, at most {:.3g} ({:g} %)"] = self.true_positive_rate
        confidence = 100 * self.target.confidence
        return "; ".join(
            text.format(*ends, confidence) for text, ends in texts.items() if ends is not None
        )

    def __str__(self) -> str:
        verdict = (
            "met"
            if self.met
            else f"missed by a factor of {1 / self.headroom if self.headroom else math.inf:.3g}"
        )
        unknown = (
            f"{self.num_examples - self.num_measured} examples were never measured: "
            "nothing is known about them"
        )
        remarks = {
            unknown: self.num_measured < self.num_examples,
            "The bound binds unbiased attackers, on average over runs: batches and noise are "
            "random.": self.mse_bound,
            "The rate binds every attacker, biased or not; batches and noise are "
            "random.": self.divergence,
            "The ends cover the measurement's error alone; another run would give other "
            "ends.": self.target.of != "run",
        }
        first = f"{verdict} after {self.num_steps} steps: {self.target.wanted}"
        second = f"{self.measured}, over {self.num_measured} examples"
        return "\n  ".join([first, second, *(remark for remark, holds in remarks.items() if holds)])


@dataclass(frozen=True)
class NoiseSearch:
    """Which noise is tried, from σ = 1 on.

    Attributes:
        margin: By how much a pilot must beat the target: runs differ, so one in a few pilots of the
            smallest σ that meets the target on average is lucky.
        grid: The factor between neighbouring σ.
        max_noise_multiplier: The largest σ.

    Example:
        >>> NoiseSearch(margin=0.0).smallest(
        ...     lambda sigma: sigma**2 / 1.9
        ... )  # the square root of 2 is on the grid
        1.4142135623730951
    """

    margin: float = 0.25
    grid: float = 2**0.25
    max_noise_multiplier: float = 64.0

    def __post_init__(self) -> None:
        most = self.max_noise_multiplier
        if not self.margin >= 0:
            raise ValueError(
                f"margin={self.margin} must be at least 0; 0.25 asks for 25 % more than the target"
            )
        if not 1 < self.grid < math.inf:
            raise ValueError(
                f"grid={self.grid}, the factor between neighbouring σ, must be above 1"
            )
        if not 0 < most < math.inf:
            raise ValueError(f"max_noise_multiplier={most} must be positive and finite")

    def smallest(self, headroom: Callable[[float], float]) -> float | None:
        """The smallest σ of the grid that was tried with headroom of at least 1 + margin.

        None: there is none.

        Args:
            headroom: Of a trial with this σ; about proportional to a power of σ.
        """

        def sigma(number: int) -> float:
            # powers of 2 are themselves
            return float(2.0 ** round(number * math.log2(self.grid), 9))

        last = math.floor(math.log(self.max_noise_multiplier) / math.log(self.grid) + 1e-9)
        tried: dict[int, float] = {}  # log of headroom/(1 + margin), by the power of the grid
        number: int | None = min(0, last)
        while number is not None and len(tried) < _MOST_PILOTS:
            share = headroom(sigma(number)) / (1 + self.margin)
            tried[number] = math.log(share) if share > 0 else -math.inf
            number = self._next(tried, last)
        return min((sigma(number) for number, log in tried.items() if log >= 0), default=None)

    def _next(self, tried: dict[int, float], last: int) -> int | None:
        """The power of the grid to try next.

        None: the smallest that is enough is known, or none is.
        """
        step = math.log(self.grid)
        enough = min((number for number, log in tried.items() if log >= 0), default=None)
        low = max((number for number, log in tried.items() if log < 0), default=None)

        # what a step on the grid adds: from the two trials next to the target, else the usual slope
        slope = _USUAL_SLOPE * step
        nearest = sorted(
            (number for number in tried if math.isfinite(tried[number])),
            key=lambda n: abs(tried[n]),
        )[:2]
        if len(nearest) == 2:
            one, other = nearest
            slope = max((tried[one] - tried[other]) / (one - other), slope / 2)

        # to where the target is expected, between what has failed and what was enough
        smallest = (
            min(math.ceil(math.log(_SMALLEST_NOISE) / step), last) if low is None else low + 1
        )
        largest = last if enough is None else enough - 1
        # the next smaller one would fail
        if smallest > largest or (enough is not None and tried[enough] < slope):
            return None
        start = low if enough is None else enough
        assert start is not None
        farthest = math.floor(math.log(_LARGEST_STEP) / step)
        return min(
            max(math.ceil(start + max(-farthest, min(-tried[start] / slope, farthest))), smallest),
            largest,
        )


@dataclass(frozen=True)
class Pilot:
    """One pilot, a whole run.

    Attributes:
        noise_multiplier: σ.
        check: What it leaked, compared with the target.
    """

    noise_multiplier: float
    check: TargetCheck


@dataclass(frozen=True)
class NoiseChoice:
    """The chosen σ and its pilots; print it. Confidential: it was measured on private data.

    Attributes:
        noise_multiplier: σ.
        target: The run's target.
        search: How it was searched.
        pilots: All pilots, in order.
    """

    noise_multiplier: float
    target: LeakageTarget
    search: NoiseSearch
    pilots: tuple[Pilot, ...]

    def summary(self, leakage: Leakage) -> dict[str, Any]:
        """What a run file keeps: the target, and how the run so far compares with it (met if
        headroom is ≥ 1).

        Args:
            leakage: The run's results.
        """
        target, check = self.target, self.target.check(leakage)
        kept = {"target": target.wanted, "confidence": target.confidence, "of": target.of}
        kept |= {
            "num_pilots": len(self.pilots),
            "headroom": check.headroom,
            "measured": check.measured,
        }
        return {
            **kept,
            "pilot_noise_multipliers": [pilot.noise_multiplier for pilot in self.pilots],
        }

    def __str__(self) -> str:
        lines = [
            f"σ = {self.noise_multiplier:.4g}, chosen by {len(self.pilots)} pilots for "
            f"{self.target.wanted}"
        ]
        for sigma, check in ((pilot.noise_multiplier, pilot.check) for pilot in self.pilots):
            lines.append(
                f"  σ = {sigma:<6.4g} {check.measured}: {check.headroom:.3g} of the target"
            )
        lines += [
            f"  The search aimed at {1 + self.search.margin:g} of the target (margin), on a "
            f"public grid, the powers of {self.search.grid:.4g}: σ depends on the data, and the "
            "run's bound takes it as given.",
            "  Pilots trained copies, with other random numbers. ε and the bound count only the "
            "run: they hold if nothing of the pilots is released, including this text.",
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class Pilots:
    """How pilots are trained.

    Attributes:
        new_engine: Makes an engine without a run, for a pilot's number.
        module: The user's model, which is copied.
        optimizer: The user's optimizer, copied with it.
        data_loader: The user's loader.
        epochs: The epochs of the run that follows.
        accounting: The accounting of the run that follows; pilots track only the trace and the
            questions.
        options: The other options of ``make_private``, except the noise.
        split: Maps a batch and ``batch_to_inputs`` to (inputs, targets).
        train: The user's loop: called with the engine and what ``make_private`` returns, it trains
            for all epochs. None: ``engine.train_step`` on each batch.
        progress: Whether each pilot shows a bar with the remaining time; not for the user's loop.
    """

    new_engine: Callable[[int], Any]
    module: nn.Module
    optimizer: optim.Optimizer
    data_loader: DataLoader[Any]
    epochs: int
    accounting: Any
    options: Mapping[str, Any]
    split: Callable[[Any, Any], tuple[Any, Any]]
    train: Train | None = None
    progress: bool = False

    def run(self, noise_multiplier: float, number: int) -> Leakage:
        """The leakage of a pilot with this noise.

        Args:
            noise_multiplier: σ.
            number: The pilot's number: each has its own random numbers.
        """
        seed = (torch.initial_seed() + (number + 1) * _BETWEEN_SEEDS) % 2**63
        options = dict(self.options)
        if self.train is None:  # train_step gives the same numbers without hooks
            options.pop("wrap_model", None)
            if options.get("grad_sample_mode") in ("hooks", "functorch", "ew"):
                options["grad_sample_mode"] = "auto"
        with preserve_rng(self._generators(), seed):
            # of one that is already private
            plain = getattr(self.optimizer, "original_optimizer", self.optimizer)
            module, optimizer = copy.deepcopy(
                (getattr(self.module, "_orig_mod", self.module), plain)
            )
            engine = self.new_engine(number)
            made = engine.make_private(
                module,
                optimizer,
                self.data_loader,
                noise_multiplier=noise_multiplier,
                accounting=replace(self.accounting, track=(), norm_refresh=None, seed=seed),
                **options,
            )
            if self.train is not None:
                self.train(engine, *made)
            else:
                self._train(engine, made[-1], f"pilot {number + 1}, σ = {noise_multiplier:.4g}")
            leakage: Leakage = engine.totals
            engine.detach()

        # its graphs and copies are no longer needed, and the next pilot checks how much memory is
        # free
        del engine, made, module, optimizer
        release_memory()
        return leakage

    def _train(self, engine: Any, loader: Any, title: str) -> None:
        batches = (batch for _ in range(self.epochs) for batch in loader)
        for batch in with_progress(batches, self.progress, title, self.epochs * len(loader)):
            # the model computes its loss from the whole batch
            if self.options.get("criterion") is None:
                engine.train_step(batch)
            else:
                engine.train_step(*self.split(batch, self.options.get("batch_to_inputs")))

    def _generators(self) -> list[torch.Generator]:
        """All generators in the options, the loader, its samplers and its data set, without
        repetition.
        """
        loader, batches = self.data_loader, self.data_loader.batch_sampler
        parts = (
            loader,
            loader.sampler,
            batches,
            getattr(batches, "sampler", None),
            loader.dataset,
            loader.collate_fn,
        )
        held = [value for part in parts for value in getattr(part, "__dict__", {}).values()]
        generators = [
            value for value in [*self.options.values(), *held] if isinstance(value, torch.Generator)
        ]
        return list({id(generator): generator for generator in generators}.values())


def choose_noise(pilots: Pilots, target: LeakageTarget, search: NoiseSearch) -> NoiseChoice:
    """The smallest σ of the grid with which a pilot meets the target, with the margin.

    Args:
        pilots: How they are trained.
        target: The run's target.
        search: Which σ are tried.

    Raises:
        ValueError: The target cannot be met; the message says by how much.
    """
    ran: list[Pilot] = []

    def headroom(noise_multiplier: float) -> float:
        # if by chance an example was hardly ever drawn, another pilot may be better
        for _ in range(2):
            check = target.check(pilots.run(noise_multiplier, len(ran)))
            ran.append(Pilot(noise_multiplier, check))
            if not check.headroom == 0 < check.headroom_of_estimate:
                return check.headroom
        raise ValueError(
            f"a pilot has no end that holds for all examples ({check.measured}): some were drawn "
            f"too rarely (below {FEWEST_PARTICIPATIONS} times). Raise epochs={pilots.epochs} "
            "(about 20 are usual), measure more steps, or pass of='probes'."
        )

    chosen = search.smallest(headroom)
    if chosen is None:
        best = max(ran, key=lambda each: (each.check.headroom, each.noise_multiplier))
        wanted, reached = 1 + search.margin, best.check.headroom
        remedy = (
            "Ends are far from estimates, so runs differ a lot: lower the learning rate "
            "first. Or allow more noise"
        )
        # Ends far below the estimates mean that runs differ, and more noise makes them differ more.
        if reached > 0 and best.check.headroom_of_estimate <= _FAR_FROM_ESTIMATE * reached:
            remedy = (
                "Allow more noise (σ of about "
                f"{best.noise_multiplier * math.sqrt(wanted / reached):.2g} may do)"
            )
        raise ValueError(
            f"the target, {target.wanted}, was not met within "
            f"max_noise_multiplier={search.max_noise_multiplier:g} and {_MOST_PILOTS} pilots: "
            f"with σ = {best.noise_multiplier:.4g} a pilot had {best.check.measured}, which is "
            f"{reached:.2g} of the target, but {wanted:g} is needed (margin={search.margin:g}). "
            f"{remedy}, train for fewer epochs or with smaller batches, give the most exposed "
            "smaller clip_weights=, or lower the target"
        )
    return NoiseChoice(chosen, target, search, tuple(ran))


def warn_when_missed(
    target: LeakageTarget, totals: Callable[[], Leakage | None]
) -> Callable[[int], None]:
    """A function of the number of steps that warns, once, when the estimate so far is already worse
    than the target.

    Leakage cannot be undone, so the run will miss it; nothing changes automatically.

    Args:
        target: The run's target.
        totals: Returns the leakage so far; None: there is none yet.
    """
    warned = False

    def look(steps: int) -> None:
        nonlocal warned
        so_far = None if warned else totals()
        if so_far is not None and target.is_missed_by(so_far):
            warned = True
            what = f"after {steps} steps the run has already missed its target, {target.wanted}"
            warnings.warn(
                f"{what}: {target.check(so_far).measured}. Leakage cannot be undone.", stacklevel=2
            )

    return look
