r"""Pilots choose σ for a target of leakage, as ``make_private_with_epsilon`` does for ε, but by training.

No formula gives the leakage of every example over a run: tr I is about proportional to 1/σ², but the path of the
weights changes with σ, and so do the subsampling factors. So whole runs are tried on copies (:mod:`.pilots`), with σ on
a public grid of powers. The headroom says how many times better than the target the worst example is; log headroom is
nearly linear in log σ, which gives the next trial. The result is the smallest σ of the grid with which a pilot met the
target, with a margin.

What it means: σ depends on the data, and the bound of the run holds with σ taken as given. Rounded to a coarse grid, σ
is constant almost everywhere. ε counts only the run: neither the pilots nor their measurements may be released.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from scipy import stats

from torchfil.accounting.leakage import Leakage
from torchfil.accounting.path import FEWEST_PARTICIPATIONS
from torchfil.engine.options import Accounting
from torchfil.planning.pilots import Pilots
from torchfil.planning.targets import LeakageTarget, TargetCheck

__all__ = ["NoiseChoice", "NoiseSearch", "Pilot", "check_participations", "choose_noise", "warn_when_missed"]

_EXPECTED_WITHOUT_INTERVAL = 0.05  # expected examples with too few participations; above, a run is likely to have one
_LARGEST_STEP = 8.0  # between σ of one trial and the next
_USUAL_SLOPE = 2.0  # of log headroom against log σ
_SMALLEST_NOISE = 0.1  # less is hardly noise
_FAR_FROM_ESTIMATE = 3.0  # times


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
        if not self.margin >= 0:
            raise ValueError(f"margin={self.margin} must be at least 0; 0.25 asks for 25 % more than the target")
        if not 1 < self.grid < math.inf:
            raise ValueError(f"grid={self.grid} is the factor between neighbouring σ and must be above 1")
        if self.max_pilots < 1:
            raise ValueError(f"max_pilots={self.max_pilots} must be at least 1")
        if not 0 < self.max_noise_multiplier < math.inf:
            raise ValueError(f"max_noise_multiplier={self.max_noise_multiplier} must be positive and finite")

    @property
    def _lowest(self) -> int:
        """The number of the smallest σ that is tried."""
        return min(math.ceil(math.log(_SMALLEST_NOISE) / math.log(self.grid)), self._last)

    @property
    def _last(self) -> int:
        """The number of the largest σ of the grid that is allowed."""
        return math.floor(math.log(self.max_noise_multiplier) / math.log(self.grid) + 1e-9)

    def smallest(self, headroom: Callable[[float], float]) -> tuple[float | None, dict[float, float]]:
        """The smallest σ of the grid that was tried with headroom of at least 1 + margin; None: there is none.

        Args:
            headroom: Of a trial with this σ; about proportional to a power of σ.

        Returns:
            σ, and the headroom of all trials, in order.
        """
        step = math.log(self.grid)
        tried: dict[int, float] = {}  # log of headroom/(1 + margin), by the power of the grid
        headrooms: dict[float, float] = {}
        number: int | None = min(math.ceil(math.log(self.first) / step - 1e-9), self._last)
        while number is not None and len(tried) < self.max_pilots:
            sigma = self._sigma(number)
            headrooms[sigma] = headroom(sigma)
            share = headrooms[sigma] / (1 + self.margin)
            tried[number] = math.log(share) if share > 0 else -math.inf
            number = self._next(tried, step)
        enough = [number for number, log in tried.items() if log >= 0]
        return (self._sigma(min(enough)) if enough else None), headrooms

    def _sigma(self, number: int) -> float:
        return float(2.0 ** round(number * math.log2(self.grid), 9))  # powers of 2 are themselves

    def _next(self, tried: dict[int, float], step: float) -> int | None:
        """The power of the grid to try next; None: the smallest that is enough is known, or none is."""
        enough = min((number for number, log in tried.items() if log >= 0), default=None)
        low = max((number for number, log in tried.items() if log < 0), default=None)
        farthest = math.floor(math.log(_LARGEST_STEP) / step)
        slope = self._slope(tried, step)
        if enough is None:
            assert low is not None
            if low == self._last:
                return None
            ahead = math.ceil(min(-tried[low] / slope, farthest))
            return min(low + max(ahead, 1), self._last)
        if (
            enough == self._lowest or low == enough - 1 or tried[enough] < slope
        ):  # the next smaller one has failed, or would
            return None
        if low is None:
            return max(enough - max(math.floor(min(tried[enough] / slope, farthest)), 1), self._lowest)
        return min(max(math.ceil(enough - tried[enough] / slope), low + 1), enough - 1)

    @staticmethod
    def _slope(tried: dict[int, float], step: float) -> float:
        """How much a step on the grid adds: from the two trials next to the target, else the usual slope."""
        usual = _USUAL_SLOPE * step
        nearest = sorted((number for number in tried if math.isfinite(tried[number])), key=lambda n: abs(tried[n]))[:2]
        if len(nearest) < 2:
            return usual
        one, other = nearest
        return max((tried[one] - tried[other]) / (one - other), usual / 2)


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
    if pilot_epochs is not None and not 1 <= pilot_epochs < pilots.epochs:
        raise ValueError(
            f"pilot_epochs={pilot_epochs} must be at least 1 and below epochs={pilots.epochs}; pass None for whole "
            "pilots only"
        )
    if pilot_epochs is not None and pilots.train is not None:
        raise ValueError(
            f"pilot_epochs={pilot_epochs} is for train_step, but train= trains for all epochs: leave one of them out"
        )
    ran: list[Pilot] = []

    def run(noise_multiplier: float, epochs: int) -> Pilot:
        leakage = pilots.run(noise_multiplier, len(ran), epochs)
        whole = epochs == pilots.epochs
        check = target.check(leakage)
        ran.append(Pilot(noise_multiplier, epochs, epochs / pilots.epochs, check, leakage if whole else None))
        return ran[-1]

    def headroom_of_whole(noise_multiplier: float) -> float:
        pilot = run(noise_multiplier, pilots.epochs)
        if _has_no_end(pilot.check):  # by chance, an example was hardly ever drawn; another pilot may be better
            pilot = run(noise_multiplier, pilots.epochs)
            _check_ends(pilot.check)
        return pilot.headroom

    # Short pilots only show where to begin: the leakage of a run is not proportional to its length.
    if pilot_epochs is not None:
        near, _ = search.smallest(lambda sigma: run(sigma, pilot_epochs).headroom)
        search_from = replace(search, first=near or search.max_noise_multiplier)
    else:
        search_from = search
    chosen, _ = search_from.smallest(headroom_of_whole)
    if chosen is None:
        raise _not_met(target, search, [pilot for pilot in ran if pilot.share == 1])
    kept = [pilot if pilot.noise_multiplier == chosen else replace(pilot, leakage=None) for pilot in ran]
    return NoiseChoice(chosen, target, search, tuple(kept))


def check_participations(
    target: LeakageTarget,
    accounting: Accounting,
    num_examples: int,
    steps_per_epoch: int,
    epochs: int,
    *,
    poisson: bool,
) -> None:
    """Raise if a run is so short that it will hardly have an interval for every example.

    An example that was measured in fewer than five steps has none; see :mod:`torchfil.accounting.path`.
    """
    if target.of == "probes":
        return

    def expected_without(epochs: int) -> float:
        draws, rate = (epochs * steps_per_epoch, 1 / steps_per_epoch) if poisson else (epochs, 1.0)
        return num_examples * float(stats.binom.cdf(FEWEST_PARTICIPATIONS - 1, draws, rate * accounting.fil_rate))

    expected = expected_without(epochs)
    if expected <= _EXPECTED_WITHOUT_INTERVAL:
        return
    enough = next(longer for longer in range(epochs, 10**6) if expected_without(longer) <= _EXPECTED_WITHOUT_INTERVAL)
    raise ValueError(
        f"in epochs={epochs} about {expected:.2g} of {num_examples} examples are measured in fewer than "
        f"{FEWEST_PARTICIPATIONS} steps, and one run says nothing about those: no end holds for all. Train for "
        f"epochs={enough} or more, or pass of='probes' for ends that cover only the measurement's error, for this very "
        "run"
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
        if target.is_missed_by(totals()):
            warned = True
            warnings.warn(
                f"after {steps - 1} steps the run has already missed its target, {target.wanted}: "
                f"{target.check(totals()).measured}. Leakage cannot be undone: stop here, or continue without the "
                "target (engine.check_bound() shows the result at the end).",
                stacklevel=2,
            )

    optimizer.attach_step_hook(hook)


def _has_no_end(check: TargetCheck) -> bool:
    """Whether some example has no interval."""
    return check.headroom == 0 < check.headroom_of_estimate


def _check_ends(check: TargetCheck) -> None:
    """Raise if a pilot has no ends by which the noise could be chosen."""
    if _has_no_end(check):
        raise ValueError(
            f"a pilot has no end that holds for all examples ({check.measured}): one run says nothing about examples "
            f"measured in fewer than {FEWEST_PARTICIPATIONS} steps. Train for more epochs, measure more steps "
            "(fil_rate, rel_error), or pass of='probes' for ends that cover only the measurement's error, for one run"
        )


def _not_met(target: LeakageTarget, search: NoiseSearch, whole: Sequence[Pilot]) -> ValueError:
    """The error for a target that no whole pilot has met: by how much, and what to do."""
    wanted = 1 + search.margin
    best = max(whole, key=lambda pilot: (pilot.headroom, pilot.noise_multiplier))
    largest = max(pilot.noise_multiplier for pilot in whole)
    limit = f"max_noise_multiplier={search.max_noise_multiplier:g}"
    if largest * search.grid * (1 - 1e-9) <= search.max_noise_multiplier:
        limit = f"max_pilots={search.max_pilots}"

    # Ends far below the estimates mean that runs differ, and more noise makes them differ more.
    if best.check.headroom_of_estimate > _FAR_FROM_ESTIMATE * best.headroom or best.headroom == 0:
        remedy = (
            "The lower end is far from the estimate, because runs differ a lot: lower the learning rate first. Or "
            "allow more noise"
        )
    else:
        remedy = f"Allow more noise (σ of about {best.noise_multiplier * math.sqrt(wanted / best.headroom):.2g} may do)"
    return ValueError(
        f"the target, {target.wanted}, was not met within {limit}: with σ = {best.noise_multiplier:.4g} a pilot had "
        f"{best.check.measured}, which is {best.headroom:.2g} of the target, but {wanted:g} is needed "
        f"(margin={search.margin:g}). {remedy} or more pilots, train for fewer epochs or with smaller batches, spare "
        "the most exposed (clip_weights=), or lower the target"
    )
