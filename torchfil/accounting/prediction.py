r"""Predict, then correct: sums without the chance of how often somebody happened to be drawn.

The bounds are about E Σ_t q X_t, where X_t is what step t adds for an example that it draws. The
plain sum Σ_t B_t X_t has this mean, but most of its spread comes from the draws B_t. So every step
adds a prediction for everybody, and a step that draws the example corrects it:

    Ŝ = Σ_t [ q X̂_t + B_t (X̃_t − X̂_t + (M_t/π)(X_t − X̃_t)) ].

M_t says whether the step was measured, π with which probability. X̂_t comes from the past alone.
X̃_t may use ‖g_t‖ too, the norm before clipping, which is known at every draw; but neither M_t nor
the probes. Hence E Ŝ = E Σ_t q X_t whatever the predictions are: a poor one costs accuracy, never a
bias. If batches are known, nothing is predicted for those who are not drawn:
Ŝ = Σ B (X̃ + (M/π)(X − X̃)).

**The predictions.** With f = 1/σ²,

    X̂ = f r τ,       X̃ = f a h(‖g‖/C).

τ is a running mean of the drawn examples' X/f, and r that of an example's own X/f relative to its
batch's mean; h is the running mean of X/f among draws of about that norm, whoever was drawn, and a
that of an example's own X/f relative to it. (Information is largest for gradients near the
threshold: smaller ones change little, larger ones are scaled down.) Before its first draw an
example counts with the running median of its batches; before its first measurement, a is 1. With
the running sum R = Σ τ f an example needs work only when it is drawn: add q r (R − R_i), set
R_i = R.

**The error.** Given the weights, Var Ŝ = Σ_t q [(1−q)(X_t − X̂_t)² + W_t], where W_t is the variance
of what was measured or skipped,

    W = v/π + (1−π)/π · (X − X̃)²,      x = X + the error of its probes, of variance v.

A measured draw adds v/π + (1−π)/π (x − X̃)², one that was skipped (1−π)/π u X̃², with u the
example's squared relative errors so far: together they have the mean W. So a skipped step is never
counted as certain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

_SMOOTHING = 0.3  # of running means over steps
_FIRST, _LEAST = 0.9, 1 / 3  # weights of the first, and of late draws in an example's running means
_FADING = 0.7  # of squared errors, from one measurement to the next
_UNKNOWN = 0.1  # how much an error of 100 % counts beside those that were measured
_TINY = 1e-30  # running means are positive; 0 says that there is none yet
_FORGETTING = 0.1  # of h, per measured step
# ends of the classes of ‖g‖/C in which h is constant
_NORMS = (0.03, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95, 1.1, 1.3, 1.6, 2.0, 3.0, 5.0, 8.0)


def norm_class(ratio: Tensor) -> Tensor:
    """The class of each ‖g‖/C, [batch].

    Example:
        >>> norm_class(torch.tensor([0.0, 1.0, 9.0])).tolist()
        [0, 8, 15]
    """
    return torch.bucketize(ratio, ratio.new_tensor(_NORMS))


@dataclass(frozen=True)
class Trend:
    """What all examples share in the predictions of one column, [*shape] each, on the CPU.

    Attributes:
        level: τ; 0 before the first measurement.
        median: The running median of X/f.
        reach: R = Σ τ f since sums were last settled.
        reach_undrawn: The same with the median.
        sums: Faded sums of X/f by class of norm, [classes, *shape].
        counts: How many draws they are of, [classes, 1…].
    """

    level: Tensor
    median: Tensor
    reach: Tensor
    reach_undrawn: Tensor
    sums: Tensor
    counts: Tensor

    @classmethod
    def start(cls, shape: tuple[int, ...]) -> Trend:
        """Nothing is predicted."""
        zero = torch.zeros(shape, dtype=torch.float64)
        classes = zero.new_zeros(len(_NORMS) + 1, *shape)
        return cls(zero, zero, zero, zero, classes, classes)

    def settled(self) -> Trend:
        """After everybody's prediction was added."""
        return replace(
            self,
            reach=torch.zeros_like(self.reach),
            reach_undrawn=torch.zeros_like(self.reach),
        )

    def state(self) -> Tensor:
        """τ, the median, and sums and counts by class, [2 + 2·classes, *shape]."""
        return torch.cat([self.level[None], self.median[None], self.sums, self.counts])

    @classmethod
    def from_state(cls, state: Tensor) -> Trend:
        """The inverse of :meth:`state`, of settled sums."""
        level, median, *classes = state.cpu().unbind(0)
        half = len(classes) // 2
        start = cls.start(tuple(state.shape[1:]))
        by_class = torch.stack(classes[:half]), torch.stack(classes[half:])
        return replace(start, level=level, median=median, sums=by_class[0], counts=by_class[1])

    def ahead(self, factor: float) -> Trend:
        """With the predictions of a step."""
        return replace(
            self,
            reach=self.reach + factor * self.level,
            reach_undrawn=self.reach_undrawn + factor * self.median,
        )

    def base(self) -> Tensor:
        """h by class of norm, [classes, *shape]; where there were no draws yet, of all."""
        every = self.sums.sum(dim=0) / self.counts.sum(dim=0).clamp(min=_TINY)
        return torch.where(self.counts > 0, self.sums / self.counts.clamp(min=_TINY), every)

    def after(self, drawn: Drawn) -> tuple[Trend, Tensor]:
        """The trend after a draw, and its mean of X/f (of h if the step was skipped)."""
        if not drawn.count:
            weights = drawn.counts.view(-1, *(1,) * self.level.ndim)
            mean = (self.base() * weights).sum(dim=0) / drawn.counts.sum()
            return replace(self, level=mixed(self.level, mean)), mean
        mean = drawn.sums.sum(dim=0) / drawn.count
        counts = drawn.counts.view(-1, *(1,) * self.level.ndim)
        later = self.median + _SMOOTHING * (drawn.median - self.median)
        return (
            replace(
                self,
                level=mixed(self.level, mean),
                median=torch.where(self.level > 0, later, drawn.median),
                sums=(1 - _FORGETTING) * self.sums + drawn.sums,
                counts=(1 - _FORGETTING) * self.counts + counts,
            ),
            mean,
        )


@dataclass(frozen=True)
class Drawn:
    """What one step drew, for the trend, on the CPU.

    Attributes:
        count: How many of the draws were measured.
        counts: By class of norm, of the measured draws; of all, if the step was skipped, [classes].
        sums: Their X/f by class, [classes, *shape].
        median: Their median, [*shape].
    """

    count: int
    counts: Tensor
    sums: Tensor
    median: Tensor

    @classmethod
    def of_steps(
        cls, value: Tensor, steps: Tensor, classes: Tensor, counts: Sequence[int]
    ) -> list[Drawn]:
        """Of several steps, with one transfer from a GPU.

        Args:
            value: X/f of the draws, step by step, [draws, *shape]; anything where it was not
                measured.
            steps: The number of each draw's step; of those of measured steps that were not
                measured, the number of steps, [draws].
            classes: Of the norms, [draws].
            counts: How many draws of each step were measured.
        """
        number, size = len(counts), len(_NORMS) + 1
        cells = steps * size + classes
        wide = value.new_zeros((number + 1) * size, *value.shape[1:])
        sums = wide.index_add(0, cells, value)[: number * size].unflatten(0, (number, size))
        ones = torch.ones_like(cells, dtype=value.dtype)
        found = value.new_zeros((number + 1) * size).index_add(0, cells, ones)
        found = found[: number * size].view(number, size)

        # the lower median of each step, by sorting all of them together
        sizes = torch.bincount(steps, minlength=number + 1)[:number]
        starts = sizes.cumsum(0) - sizes
        middles = (torch.tensor(counts, device=value.device) - 1).clamp(min=0) // 2
        flat, medians = value.flatten(1) if value.ndim > 1 else value[:, None], []
        for column in flat.unbind(1):
            order = column.argsort(stable=True)
            order = order[steps[order].argsort(stable=True)]
            medians.append(column[order[(starts + middles).clamp(max=len(order) - 1)]])
        median = torch.stack(medians, dim=1).reshape(number, *value.shape[1:])
        together = torch.cat([found, sums.flatten(1), median.reshape(number, -1)], dim=1).cpu()
        parts = together.split([size, sums[0].numel(), median[0].numel()], dim=1)
        return [
            cls(count, own, each.view(sums.shape[1:]), middle.view(value.shape[1:]))
            for count, own, each, middle in zip(counts, *parts, strict=True)
        ]


def mixed(old: Tensor, new: Tensor) -> Tensor:
    """A running mean; the first value counts as it is."""
    return torch.where(old > 0, old + _SMOOTHING * (new - old), new)


@dataclass(frozen=True)
class Draws:
    """The draws of some examples, at most one each, for one column; [draws, *shape] or [draws, 1…].

    Attributes:
        value: x; 0 if it was not measured.
        variance: v.
        noise: The same or less, to be subtracted from squares of x.
        told: Whether x was measured.
        rate: π.
        base: h at the norm; 0: not known yet.
        factor: f; 0 if the step was paused or had no noise: then x/π is added, nothing else.
        level: τ, at the step of each draw.
        median: The median then.
        reach: R.
        reach_undrawn: The same for those who were never drawn.
        mean: The batch's mean of X/f.
        count: In how many steps that were not paused each example was drawn before.
        measured: How often it was measured before.
    """

    value: Tensor
    variance: Tensor
    noise: Tensor
    told: Tensor
    rate: Tensor
    base: Tensor
    factor: Tensor
    level: Tensor
    median: Tensor
    reach: Tensor
    reach_undrawn: Tensor
    mean: Tensor
    count: Tensor
    measured: Tensor

    def __getitem__(self, part: slice | Tensor) -> Draws:
        """Some of them."""
        return Draws(**{each.name: getattr(self, each.name)[part] for each in fields(self)})


@dataclass(frozen=True)
class Booked:
    """What the draws add.

    Attributes:
        shift: What the prediction adds: q Σ X̂ since the last draw, and X̃ − X̂.
        value: The whole addition to Ŝ.
        guess: X̃.
        unsure: u X̃², the expected square of x − X̃ if the draw was skipped.
        variance: W.
        square: An estimate of (1−q)(X − X̂)², the variance due to the draw; 0 if batches are known.
        path: x, or X̃ where it was skipped.
    """

    shift: Tensor
    value: Tensor
    guess: Tensor
    unsure: Tensor
    variance: Tensor
    square: Tensor
    path: Tensor


def book(state: Mapping[str, Tensor], draws: Draws, draw_rate: Tensor | float | None) -> Booked:
    """Correct the predictions by some draws, and change the examples' own running means in place.

    Args:
        state: By name, [draws, *shape] each: "ratio" (r), "relative" (a), "reached" (R_i),
            "missed_by" and "missed_of" (running sums of (x − X̃)² and X̃²).
        draws: At most one of each example.
        draw_rate: q, one number or [draws, 1…]; None: batches are known.
    """
    ratio, own, reached = state["ratio"], state["relative"], state["reached"]
    factor, told = draws.factor, draws.told
    active, known = factor > 0, ratio > 0

    # X̂, and q Σ X̂ since the last draw
    before = torch.where(known, ratio, draws.median / draws.level.clamp(min=_TINY))
    chance: Tensor | float = 0.0  # 1 − q
    if draw_rate is None:
        expected = ahead = torch.zeros_like(draws.reach)
    else:
        chance = 1 - draw_rate
        expected = factor * before * draws.level
        reach = torch.where(known, ratio * (draws.reach - reached), draws.reach_undrawn - reached)
        ahead = torch.where(active, draw_rate * reach, 0.0)

    # X̃
    own_before = torch.where(own > 0, own, 1.0)
    guess = torch.where(draws.base > 0, factor * draws.base * own_before, expected)
    error = torch.where(told & active, draws.value - guess, 0.0)
    square, missed_by, missed_of = guess.square(), state["missed_by"], state["missed_of"]
    prior = _UNKNOWN * square
    unsure = square * (missed_by + prior) / (missed_of + prior).clamp(min=_TINY)
    shift = ahead + guess - torch.where(active, expected, 0.0)
    plain = torch.where(told, draws.value, 0.0) / draws.rate
    skipping = (1 - draws.rate) / draws.rate

    path = torch.where(told, draws.value, guess)
    found = Booked(
        shift=shift,
        value=torch.where(active, shift + error / draws.rate, plain),
        guess=guess,
        unsure=unsure,
        variance=torch.where(
            told, draws.variance / draws.rate + skipping * error.square(), skipping * unsure
        ).where(active, draws.variance / draws.rate),
        square=chance
        * torch.where(
            told,
            (draws.value - expected).square() - draws.variance,
            (guess - expected).square() + unsure,
        ).where(active, torch.zeros_like(path)),
        path=path,
    )

    # the examples' own means
    late = _late(draws.count)
    seen = torch.where(active, path / factor.where(active, torch.ones_like(factor)), 0.0)
    new = torch.where(draws.mean > 0, seen / draws.mean.clamp(min=_TINY), before)
    _set(ratio, (before + late * (new - before)).clamp(min=_TINY), active)
    if draw_rate is not None:
        _set(reached, draws.reach, active)
    new = seen / draws.base.clamp(min=_TINY)
    base = torch.where(own > 0, own, new)
    usable = told & active & (draws.base > 0)
    _set(own, (base + _late(draws.measured) * (new - base)).clamp(min=_TINY), usable)
    for kept, added in ((missed_by, error.square()), (missed_of, square)):
        _set(kept, _FADING * kept + added, told & active)
    return found


def _late(count: Tensor) -> Tensor:
    """The weight of a draw in a running mean, after so many before it."""
    return torch.where(count == 0, _FIRST, (1 / (count + 1.0)).clamp(min=_LEAST))


def _set(kept: Tensor, value: Tensor, chosen: Tensor) -> None:
    kept.copy_(torch.where(chosen, value, kept.double()))


def outstanding(
    state: Mapping[str, Tensor], trend: Trend, draw_rate: Tensor | float | None
) -> Tensor:
    """q Σ X̂ since each example's last draw, [n, *shape]; see :func:`book`."""
    reached = state["reached"]
    if draw_rate is None:
        return torch.zeros_like(reached)
    ratio = state["ratio"]
    reach, undrawn = trend.reach.to(ratio.device), trend.reach_undrawn.to(ratio.device)
    return draw_rate * torch.where(ratio > 0, ratio * (reach - reached), undrawn - reached)
