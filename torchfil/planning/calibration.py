r"""Pilots choose σ for a target of leakage, as ``make_private_with_epsilon`` does for ε, but by training.

No formula gives the leakage of every example over a run: tr I is about proportional to 1/σ², but the path of the
weights changes with σ, and so do the subsampling factors. So whole runs are tried on copies, with σ on a public grid of
powers. The headroom says how many times better than the target the worst example is; log headroom is nearly linear in
log σ, which gives the next trial. The result is the smallest σ of the grid with which a pilot met the target, with a
margin.

A pilot trains a copy of model and optimizer on the user's loader, with its own ``make_private`` and its own random
numbers. It is independent of the run that follows, which continues as if no number had been drawn.

What it means: σ depends on the data, and the bound of the run holds with σ taken as given. Rounded to a coarse grid, σ
is constant almost everywhere. ε counts only the run: neither the pilots nor their measurements may be released.
"""

from __future__ import annotations

import contextlib
import copy
import math
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import nn, optim
from torch.utils.data import DataLoader

from torchfil.accounting.leakage import Leakage
from torchfil.accounting.path import FEWEST_PARTICIPATIONS
from torchfil.fisher.recording.graphs import release_memory
from torchfil.planning.targets import LeakageTarget, TargetCheck
from torchfil.utils.errors import require
from torchfil.utils.progress import with_progress

__all__ = ["NoiseChoice", "NoiseSearch", "Pilot", "Pilots", "Train", "choose_noise", "isolated_rng", "warn_when_missed"]

Train = Callable[..., None]
_EXPECTED_WITHOUT_INTERVAL = 0.05  # expected examples with too few participations; above, a run is likely to have one
_LARGEST_STEP = 8.0  # between σ of one trial and the next
_USUAL_SLOPE = 2.0  # of log headroom against log σ
_SMALLEST_NOISE = 0.1  # less is hardly noise
_FAR_FROM_ESTIMATE = 3.0  # times
_BETWEEN_SEEDS = 0x9E3779B97F4A7C15
_TOO_FEW_STEPS = f"one run says nothing about examples that are measured in fewer than {FEWEST_PARTICIPATIONS} steps"
_PROBES_ONLY = "pass of='probes' for ends that cover only the measurement's error, for this very run"


@dataclass(frozen=True)
class NoiseSearch:
    """Which noise is tried.

    Attributes:
        margin: By how much a pilot must beat the target: runs differ, so one in a few pilots of the
            smallest σ that meets the target on average is lucky.
        grid: The factor between neighbouring σ.
        max_pilots: The largest number of pilots.
        max_noise_multiplier: The largest σ.
        first: The first σ to try.

    Example:
        >>> NoiseSearch(margin=0.0).smallest(lambda sigma: sigma**2 / 1.9)[0]  # the square root of 2 is on the grid
        1.4142135623730951
    """

    margin: float = 0.25
    grid: float = 2**0.25
    max_pilots: int = 8
    max_noise_multiplier: float = 64.0
    first: float = 1.0

    def __post_init__(self) -> None:
        most = self.max_noise_multiplier
        require(self.margin >= 0, f"margin={self.margin} must be at least 0; 0.25 asks for 25 % more than the target")
        require(1 < self.grid < math.inf, f"grid={self.grid}, the factor between neighbouring σ, must be above 1")
        require(self.max_pilots >= 1, f"max_pilots={self.max_pilots} must be at least 1")
        require(0 < most < math.inf, f"max_noise_multiplier={most} must be positive and finite")

    def smallest(self, headroom: Callable[[float], float]) -> tuple[float | None, dict[float, float]]:
        """The smallest σ of the grid that was tried with headroom of at least 1 + margin; None: there is none.

        Args:
            headroom: Of a trial with this σ; about proportional to a power of σ.

        Returns:
            σ, and the headroom of all trials, in order.
        """
        step = math.log(self.grid)
        last = math.floor(math.log(self.max_noise_multiplier) / step + 1e-9)
        tried: dict[int, float] = {}  # log of headroom/(1 + margin), by the power of the grid
        headrooms: dict[float, float] = {}
        number: int | None = min(math.ceil(math.log(self.first) / step - 1e-9), last)
        while number is not None and len(tried) < self.max_pilots:
            sigma = self._sigma(number)
            headrooms[sigma] = headroom(sigma)
            share = headrooms[sigma] / (1 + self.margin)
            tried[number] = math.log(share) if share > 0 else -math.inf
            number = self._next(tried, step, last)
        enough = [number for number, log in tried.items() if log >= 0]
        return (self._sigma(min(enough)) if enough else None), headrooms

    def _sigma(self, number: int) -> float:
        return float(2.0 ** round(number * math.log2(self.grid), 9))  # powers of 2 are themselves

    @staticmethod
    def _next(tried: dict[int, float], step: float, last: int) -> int | None:
        """The power of the grid to try next; None: the smallest that is enough is known, or none is."""
        enough = min((number for number, log in tried.items() if log >= 0), default=None)
        low = max((number for number, log in tried.items() if log < 0), default=None)
        lowest = min(math.ceil(math.log(_SMALLEST_NOISE) / step), last)
        farthest = math.floor(math.log(_LARGEST_STEP) / step)

        # what a step on the grid adds: from the two trials next to the target, else the usual slope
        slope = _USUAL_SLOPE * step
        nearest = sorted((number for number in tried if math.isfinite(tried[number])), key=lambda n: abs(tried[n]))[:2]
        if len(nearest) == 2:
            one, other = nearest
            slope = max((tried[one] - tried[other]) / (one - other), slope / 2)

        if enough is None:
            assert low is not None
            ahead = max(math.ceil(min(-tried[low] / slope, farthest)), 1)
            return None if low == last else min(low + ahead, last)
        if enough == lowest or low == enough - 1 or tried[enough] < slope:  # the next smaller one has failed, or would
            return None
        if low is None:
            return max(enough - max(math.floor(min(tried[enough] / slope, farthest)), 1), lowest)
        return min(max(math.ceil(enough - tried[enough] / slope), low + 1), enough - 1)


@dataclass(frozen=True)
class Pilot:
    """One pilot.

    Attributes:
        noise_multiplier: σ.
        epochs: How long it was.
        share: Its epochs over those of the run.
        check: What it leaked, compared with the target.
        leakage: The same by example, of pilots as long as the run.
    """

    noise_multiplier: float
    epochs: int
    share: float
    check: TargetCheck
    leakage: Leakage | None = field(default=None, repr=False)

    @property
    def headroom(self) -> float:
        """The headroom of a whole run with this noise; a short pilot's leakage is assumed to grow with its length."""
        return self.check.headroom if self.share == 1 else self.check.headroom_of_estimate * self.share


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

    @property
    def repetitions(self) -> list[Leakage]:
        """The pilots with the chosen σ and the run's length: independent repetitions, chosen for meeting the target."""
        chosen = [pilot for pilot in self.pilots if pilot.noise_multiplier == self.noise_multiplier]
        return [pilot.leakage for pilot in chosen if pilot.leakage is not None]

    def summary(self, leakage: Leakage) -> dict[str, Any]:
        """What a run file keeps: the target, and how the run so far compares with it (met if headroom is ≥ 1).

        Args:
            leakage: The run's results.
        """
        check = self.target.check(leakage)
        return {
            "target": self.target.wanted,
            "confidence": self.target.confidence,
            "of": self.target.of,
            "num_pilots": len(self.pilots),
            "headroom": check.headroom,
            "measured": check.measured,
        }

    def __str__(self) -> str:
        lines = [f"σ = {self.noise_multiplier:.4g}, chosen by {len(self.pilots)} pilots for {self.target.wanted}"]
        for pilot in self.pilots:
            short = "" if pilot.share == 1 else f", after {pilot.epochs} epochs"
            wanted = f"{pilot.headroom:.3g} of the target"
            lines.append(f"  σ = {pilot.noise_multiplier:<6.4g} {pilot.check.measured}{short}: {wanted}")
        lines += [
            f"  The search aimed at {1 + self.search.margin:g} of the target (margin), on a public grid, the powers of "
            f"{self.search.grid:.4g}: σ depends on the data, and the run's bound takes it as given.",
            "  Pilots trained copies, with other random numbers. ε and the bound count only the run: they hold if "
            "nothing of the pilots is released, including this text.",
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
        accounting: The accounting of the run that follows; pilots track only the trace and the questions.
        options: The other options of ``make_private``, except the noise.
        split: Maps a batch and ``batch_to_inputs`` to (inputs, targets).
        train: The user's loop: called with the engine and what ``make_private`` returns, it trains for all epochs.
            None: ``engine.train_step`` on each batch.
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

    def __post_init__(self) -> None:
        if self.train is not None:
            return
        if self.accounting.accumulation_steps > 1:
            raise ValueError(
                f"accumulation_steps={self.accounting.accumulation_steps} is for loops, but pilots take whole draws "
                "with train_step: pass your loop, train=f(engine, model, optimizer, loader)"
            )
        if hasattr(self.optimizer.step, "_wrapped_by_lr_sched"):
            warnings.warn(
                "the optimizer has a learning-rate scheduler, which pilots do not step: the noise is chosen for the "
                "current learning rate. Pass your loop, train=f(engine, model, optimizer, loader), with a scheduler "
                "for the optimizer that it is given.",
                stacklevel=4,
            )

    def run(self, noise_multiplier: float, number: int, epochs: int | None = None) -> Leakage:
        """The leakage of a whole pilot with this noise.

        Args:
            noise_multiplier: σ.
            number: The pilot's number: each has its own random numbers.
            epochs: Its length; None: as long as the run.
        """
        seed = (torch.initial_seed() + (number + 1) * _BETWEEN_SEEDS) % 2**63
        options = dict(self.options)
        if self.train is None:  # train_step gives the same numbers without hooks
            options.pop("wrap_model", None)
            if options.get("grad_sample_mode") in ("hooks", "functorch", "ew"):
                options["grad_sample_mode"] = "auto"
        with isolated_rng(self._generators(), seed):
            plain = getattr(self.optimizer, "original_optimizer", self.optimizer)  # of one that is already private
            module, optimizer = copy.deepcopy((getattr(self.module, "_orig_mod", self.module), plain))
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
                title = f"pilot {number + 1}, σ = {noise_multiplier:.4g}"
                self._train(engine, made[-1], self.epochs if epochs is None else epochs, title)
            leakage: Leakage = engine.totals
            engine.detach()

        # its graphs and copies are no longer needed, and the next pilot checks how much memory is free
        del engine, made, module, optimizer
        release_memory()
        return leakage

    def _train(self, engine: Any, loader: Any, epochs: int, title: str) -> None:
        batches = (batch for _ in range(epochs) for batch in loader)
        for batch in with_progress(batches, self.progress, title, epochs * len(loader)):
            if self.options.get("criterion") is None:  # the model computes its loss from the whole batch
                engine.train_step(batch)
            else:
                engine.train_step(*self.split(batch, self.options.get("batch_to_inputs")))

    def _generators(self) -> list[torch.Generator]:
        """All generators in the options, the loader, its samplers and its data set, without repetition."""
        loader, batches = self.data_loader, self.data_loader.batch_sampler
        parts = (loader, loader.sampler, batches, getattr(batches, "sampler", None), loader.dataset, loader.collate_fn)
        held = [value for part in parts for value in getattr(part, "__dict__", {}).values()]
        generators = [value for value in [*self.options.values(), *held] if isinstance(value, torch.Generator)]
        return list({id(generator): generator for generator in generators}.values())

    def check_participations(self, target: LeakageTarget) -> None:
        """Raise if the run is so short that it will hardly have an interval for every example.

        An example that was measured in fewer than five steps has none; see :mod:`torchfil.accounting.path`.

        Args:
            target: The run's target.
        """
        if target.of == "probes":
            return
        rate = self.accounting.sample_rate
        steps_per_epoch = round(1 / rate) if rate else len(self.data_loader)
        num_examples: int = len(self.data_loader.dataset)  # type: ignore[arg-type]

        def expected_without(epochs: int) -> float:
            draws, rate = epochs, 1.0
            if self.options.get("poisson_sampling", True):
                draws, rate = epochs * steps_per_epoch, 1 / steps_per_epoch
            few = stats.binom.cdf(FEWEST_PARTICIPATIONS - 1, draws, rate * self.accounting.fil_rate)
            return num_examples * float(few)

        expected, longer = expected_without(self.epochs), self.epochs
        if expected <= _EXPECTED_WITHOUT_INTERVAL:
            return
        while expected_without(longer) > _EXPECTED_WITHOUT_INTERVAL:
            longer += 1
        raise ValueError(
            f"epochs={self.epochs} are too few for an end that holds for all: {_TOO_FEW_STEPS}, here about "
            f"{expected:.2g} of {num_examples}. Train for epochs={longer} or more, or {_PROBES_ONLY}"
        )


@contextlib.contextmanager
def isolated_rng(generators: Sequence[torch.Generator], seed: int) -> Iterator[None]:
    """Inside, torch, numpy, Python and these generators draw from this seed; afterwards they continue as before.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> with isolated_rng([], seed=1):
        ...     other = torch.rand(1)
        >>> torch.rand(1), torch.manual_seed(0).initial_seed()
        (tensor([0.4963]), 0)
    """
    states = [generator.get_state() for generator in generators]
    numpys, pythons = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(seed)
            np.random.seed(seed % 2**32)
            random.seed(seed)
            for place, generator in enumerate(generators):
                generator.manual_seed((seed + place + 1) % 2**63)
            yield
    finally:
        np.random.set_state(numpys)
        random.setstate(pythons)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def choose_noise(
    pilots: Pilots, target: LeakageTarget, search: NoiseSearch, pilot_epochs: int | None = None
) -> NoiseChoice:
    """The smallest σ of the grid with which a whole pilot meets the target, with the margin.

    Args:
        pilots: How they are trained.
        target: The run's target.
        search: Which σ are tried.
        pilot_epochs: The length of short pilots that find a starting point; None: none.

    Raises:
        ValueError: The target cannot be met; the message says by how much.
    """
    if pilot_epochs is not None and (pilots.train is not None or not 1 <= pilot_epochs < pilots.epochs):
        raise ValueError(
            f"pilot_epochs={pilot_epochs} must be at least 1 and below epochs={pilots.epochs}, and left out if train= "
            "trains for all epochs"
        )
    pilots.check_participations(target)
    ran: list[Pilot] = []

    def run(noise_multiplier: float, epochs: int) -> Pilot:
        leakage = pilots.run(noise_multiplier, len(ran), epochs)
        whole = epochs == pilots.epochs
        check = target.check(leakage)
        ran.append(Pilot(noise_multiplier, epochs, epochs / pilots.epochs, check, leakage if whole else None))
        return ran[-1]

    def headroom_of_whole(noise_multiplier: float) -> float:
        for _ in range(2):  # if by chance an example was hardly ever drawn, another pilot may be better
            pilot = run(noise_multiplier, pilots.epochs)
            if not pilot.headroom == 0 < pilot.check.headroom_of_estimate:
                return pilot.headroom
        raise ValueError(
            f"a pilot has no end that holds for all examples ({pilot.check.measured}): {_TOO_FEW_STEPS}. Train for "
            f"more epochs, measure more steps (fil_rate, rel_error), or {_PROBES_ONLY}"
        )

    # Short pilots only show where to begin: the leakage of a run is not proportional to its length.
    first = search.first
    if pilot_epochs is not None:
        near, _ = search.smallest(lambda sigma: run(sigma, pilot_epochs).headroom)
        first = near or search.max_noise_multiplier
    chosen, _ = replace(search, first=first).smallest(headroom_of_whole)
    if chosen is None:
        raise _not_met(target, search, [pilot for pilot in ran if pilot.share == 1])
    kept = [pilot if pilot.noise_multiplier == chosen else replace(pilot, leakage=None) for pilot in ran]
    return NoiseChoice(chosen, target, search, tuple(kept))


def _not_met(target: LeakageTarget, search: NoiseSearch, whole: Sequence[Pilot]) -> ValueError:
    """The error for a target that no whole pilot has met: by how much, and what to do."""
    wanted = 1 + search.margin
    best = max(whole, key=lambda pilot: (pilot.headroom, pilot.noise_multiplier))
    larger = max(pilot.noise_multiplier for pilot in whole) * search.grid
    limit = f"max_noise_multiplier={search.max_noise_multiplier:g}"
    if larger * (1 - 1e-9) <= search.max_noise_multiplier:
        limit = f"max_pilots={search.max_pilots}"

    # Ends far below the estimates mean that runs differ, and more noise makes them differ more.
    if best.check.headroom_of_estimate > _FAR_FROM_ESTIMATE * best.headroom or best.headroom == 0:
        remedy = "Ends are far from estimates, so runs differ a lot: lower the learning rate first. Or allow more noise"
    else:
        remedy = f"Allow more noise (σ of about {best.noise_multiplier * math.sqrt(wanted / best.headroom):.2g} may do)"
    return ValueError(
        f"the target, {target.wanted}, was not met within {limit}: with σ = {best.noise_multiplier:.4g} a pilot had "
        f"{best.check.measured}, which is {best.headroom:.2g} of the target, but {wanted:g} is needed "
        f"(margin={search.margin:g}). {remedy} or more pilots, train for fewer epochs or with smaller batches, give "
        "the most exposed smaller clip_weights=, or lower the target"
    )


def warn_when_missed(optimizer: Any, target: LeakageTarget, totals: Callable[[], Leakage], every: int) -> None:
    """Make the optimizer warn, once, when the estimate so far is already worse than the target.

    Leakage cannot be undone, so the run will miss it; nothing changes automatically.

    Args:
        optimizer: The private optimizer; its step hook is called as before.
        target: The run's target.
        totals: Returns the leakage so far.
        every: The number of steps between checks.
    """
    before, steps, warned = optimizer.step_hook, 0, False

    def hook(stepped: Any) -> None:
        nonlocal steps, warned
        before(stepped)
        steps += 1
        if warned or steps % every or steps == 1:  # the hook comes before the step is booked
            return
        warned = target.is_missed_by(totals())
        if warned:
            warnings.warn(
                f"after {steps - 1} steps the run has already missed its target, {target.wanted}: "
                f"{target.check(totals()).measured}. Leakage cannot be undone: stop here, or continue without the "
                "target (engine.check_bound() shows the result at the end).",
                stacklevel=2,
            )

    optimizer.attach_step_hook(hook)
