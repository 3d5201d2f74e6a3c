r"""Which sums are kept of what steps measure, and how far one run can be off.

A step measures one column for each tracked quantity and question: X of every example of the batch,
with what is known about the error of X. The trace and the divergences are *predicted and corrected*
(:mod:`torchfil.accounting.prediction`); sums by coordinate share the trace's predictions; any other
sum is plain, Σ B (M/π) X.

How far one run can be off. The bounds are about E Σ q X, a mean over everything that is random in a
run. Besides probes and skipped steps, whose variance W is summed, two things change Ŝ:

* the batches: Σ B (1−q)(X − X̂)², an unbiased estimate; 0 if batches are known;
* the path: X_t depends on the weights, and so on all noise before t. Runs diverge for good, and
  momentum and Adam make the weights move smoothly: consecutive draws are much alike although runs
  differ. So X is compared from draw to draw, and at the draws 0, 4, 8, 12, 16, 24, 32, 48, 64, …
  (:func:`compared`). With γ₁ and γ the mean squares of these changes, beyond the probes' noise, and
  m draws, the variance of the mean of X is taken as

      (γ − γ₁)₊/4 + γ₁/(2m) + (0.03 · mean of X)²:

  what changes quickly averages out, what changes slowly counts as if all draws were off together.
  Leakage that fades in every run alike is no deviation: where X is known without error (D), only
  what lies outside of [X_s, X_s τ_t/τ_s] is a change from draw s to draw t. A trace's probes leave
  it too noisy for that.

γ of one example comes from few changes, and is too small just where its sum is too small. So
examples of like exposure, a twentieth of all, share γ relative to the square of their means. An
example that was drawn fewer than five times, or never measured, says nothing: its error is
infinite. ``benchmarks/coverage.py`` measures how often ends are too high, by optimizer and q.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from torchfil.accounting.prediction import Booked, Draws, mixed

FEWEST_PARTICIPATIONS = 5
_SLOW = 1 / 4  # of the mean squared change between distant draws, to the mean's variance
_LEAST_SPREAD = 0.03  # of runs that differ in their noise, relative
_GROUPS, _FEWEST_IN_GROUP = 20, 10


# X of one tracked quantity or question, as one step measured it: "value", [batch, …]. "variance":
# v, of its sampling error. "noise": the same or less, to be subtracted from squares of X. For the
# trace also "freedom", the degrees of freedom of v. What is missing is 0.
Column = dict[str, Tensor]
Columns = Mapping[str, Column]  # by the names of quantities and questions


class Named(Protocol):
    """Tensors by name."""

    def __getitem__(self, name: str, /) -> Tensor: ...


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
    "measured": COUNT,
    "paused": COUNT,
    "num_coordinates": COUNT,
}

# what prediction and path keep of a column besides its sum, and the dtypes
_PREDICTION = {
    "ratio": torch.float64,
    "relative": torch.float64,
    "reached": torch.float64,
    "missed_by": ERROR,
    "missed_of": ERROR,
}
_PATH = dict.fromkeys(("square", "previous", "near", "last", "far"), ERROR)
_LEVELS = dict.fromkeys(("previous_level", "last_level"), ERROR)


@dataclass(frozen=True)
class Summed:
    """Which sums are kept of a column.

    Attributes:
        name: The column's name, and that of its sum.
        shape: That of X of one example.
        variance: The name of the sum of W; None: not kept.
        predicted: Whether it is predicted and corrected, and its path is followed.
        spread: The name of Σ W²/(its degrees of freedom), which gives those of the total (Welch
            and Satterthwaite); None: not kept.
        always: Whether every step measures it, because norms are enough.
        precise: Whether what is measured has no error, so that its path is compared with the trend.
        shares: For a sum by coordinate, from the sums [rows, *shape] to the parts of the trace's
            prediction that its entries get, which depend on the past alone and not on a factor;
            None: the sum is plain.
    """

    name: str
    shape: tuple[int, ...] = ()
    variance: str | None = None
    predicted: bool = False
    spread: str | None = None
    always: bool = False
    precise: bool = False
    shares: Callable[[Tensor], Tensor] | None = None

    @property
    def layout(self) -> dict[str, Sum]:
        """The sums of one example."""
        layout = {self.name: Sum(self.shape)}
        if self.spread is not None:
            layout[self.spread] = Sum(self.shape)  # its square exceeds the range of float32
        if self.variance is not None:
            layout[self.variance] = Sum(self.shape, ERROR)
        kept = {**_PREDICTION, **_PATH} if self.predicted else {}
        kept |= _LEVELS if self.precise else {}
        return layout | {self.part(name): Sum(self.shape, dtype) for name, dtype in kept.items()}

    def part(self, name: str) -> str:
        """The name of a sum that prediction or path keep.

        Example:
            >>> Summed("trace").part("ratio")
            'trace_ratio'
        """
        return f"{self.name}_{name}"

    @property
    def fields(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the fields of the column that matter, by name."""
        used = {"value": True, "variance": self.variance is not None, "noise": self.predicted}
        fields = {name: self.shape for name, is_used in used.items() if is_used}
        return fields if self.spread is None else {**fields, "freedom": ()}

    def state(self, rows: Named, count: int) -> dict[str, Tensor]:
        """The first rows' own running means, for :func:`torchfil.accounting.prediction.book`."""
        return {name: rows[self.part(name)][:count] for name in _PREDICTION}

    def add(self, rows: Named, draws: Draws, found: Booked, freedom: Tensor) -> None:
        """Add what some draws add to the sums of the first rows, in place.

        Args:
            rows: The sums, by name.
            draws: The draws.
            found: What they add.
            freedom: The degrees of freedom of v, [draws, 1…].
        """
        size = len(draws.value)

        def kept(name: str) -> Tensor:
            return rows[self.part(name)][:size]

        rows[self.name][:size].add_(found.value)
        if self.variance is not None:
            rows[self.variance][:size].add_(found.variance)
        if self.spread is not None:
            usual = draws.told & (draws.rate == 1)
            spread = found.variance.square() / torch.where(usual, freedom, 1.0)
            rows[self.spread][:size].add_(torch.where(found.variance > 0, spread, 0.0))
        kept("square").add_(found.square)

        # changes from draw to draw, beyond the trend or the probes' noise
        active, count = (draws.factor > 0).expand_as(found.path), draws.count
        noise = 2 * torch.where(draws.told, draws.noise, 0.0)
        level = draws.factor * mixed(draws.level, draws.mean)
        distance = count - compared(count)
        is_due = active & (compared(count + 1) == count)
        for last, changes, weight, now in (
            ("previous", "near", 1.0, active),
            ("last", "far", distance, is_due),
        ):
            before = after = kept(last).double()
            if self.precise:
                then = kept(f"{last}_level")
                both = (then > 0) & (level > 0)
                after = before * torch.where(both, level / then.where(both, 1.0), 1.0)
                then.copy_(torch.where(now, level, then.double()))
            low, high = before.minimum(after), before.maximum(after)
            off = found.path - found.path.clamp(low, high)
            change = weight * (off.square() - noise)
            kept(changes).add_(torch.where(now & (count > 0), change, 0.0))
            kept(last).copy_(torch.where(now, found.path, before))


def compared(draws: Tensor) -> Tensor:
    """Which of so many draws, numbered from 0, is the last whose X is compared, in float64.

    Number i is compared if max(4, 2^(⌊log₂ i⌋ − 1)) divides it: distances are 4, and later a
    quarter to a half of i.

    Example:
        >>> compared(torch.tensor([0, 1, 4, 5, 16, 17, 24, 25, 70]))
        tensor([ 0.,  0.,  0.,  4., 12., 16., 16., 24., 64.], dtype=torch.float64)
    """
    last = (draws - 1).clamp(min=0).double()
    return last - last % (1 << (torch.frexp(last).exponent - 2).clamp(min=2))


# ------------------------------------------------------------------ how far one run can be off


def unpaused(sums: Mapping[str, Tensor], like: Tensor) -> Tensor:
    """In how many steps that were not paused each example was drawn, [n, 1…], as ``like``."""
    draws = sums["participations"] - sums["paused"]
    return draws.reshape(-1, *(1,) * (like.ndim - 1))


@dataclass(frozen=True)
class Spread:
    """How much examples of like exposure vary: groups by Ŝ, from the smallest on.

    Attributes:
        edges: The largest Ŝ of each group but the last, [groups − 1, …].
        values: What the groups share, by name, [groups, …] each.
    """

    edges: Tensor
    values: Mapping[str, Tensor]

    @classmethod
    def of(cls, total: Tensor, known: Tensor, means: Mapping[str, tuple[Tensor, Tensor]]) -> Spread:
        """Of each group, ratios of sums.

        Args:
            total: Ŝ, [n, …].
            known: Which of them count, [n, …].
            means: By name, numerators and denominators, [n, …] each.
        """
        shape, flat = total.shape[1:], total.reshape(len(total), -1)
        masks = known.expand_as(total).reshape(len(total), -1)
        groups = min(_GROUPS, max(1, int(masks.sum(dim=0).min()) // _FEWEST_IN_GROUP))
        edges = flat.new_full((groups - 1, flat.shape[1]), math.inf)
        values = {name: flat.new_full((groups, flat.shape[1]), math.inf) for name in means}
        for place in range(flat.shape[1]):
            mask = masks[:, place]
            if not mask.any():
                continue
            order = flat[mask, place].argsort()
            parts = order.tensor_split(groups)
            ends = [flat[mask, place][part[-1]] for part in parts[:-1]]
            edges[:, place] = torch.stack(ends) if ends else edges[:, place]
            for name, (above, below) in means.items():
                one, other = (
                    each.reshape(len(flat), -1)[mask, place].double() for each in (above, below)
                )
                values[name][:, place] = torch.stack(
                    [one[part].sum() / other[part].sum().clamp(min=1e-300) for part in parts]
                )
        return cls(
            edges.reshape(-1, *shape),
            {name: value.reshape(-1, *shape) for name, value in values.items()},
        )

    def at(self, name: str, total: Tensor) -> Tensor:
        """What the examples' groups share, [n, …].

        Args:
            name: Of the shared value.
            total: Ŝ, [n, …].
        """
        place = (total[:, None] > self.edges[None]).sum(dim=1)
        return self.values[name].gather(0, place)


def has_told(name: str, sums: Mapping[str, Tensor]) -> Tensor:
    """Whether one run shows how far it can be off, [n, …]."""
    total = sums[name]
    enough = unpaused(sums, total) >= FEWEST_PARTICIPATIONS
    seen = sums["measured"].reshape(-1, *(1,) * (total.ndim - 1)) > 0
    seen = seen | (sums[f"{name}_relative"] > 0)  # some need no measured step
    return enough & seen & total.isfinite()


def path_spread(name: str, sums: Mapping[str, Tensor]) -> Spread:
    """γ and γ₁ relative to squared means, by groups.

    Args:
        name: The name of a predicted sum.
        sums: The sums of all examples.
    """
    total, near, far = (sums[each].double() for each in (name, f"{name}_near", f"{name}_far"))
    draws = unpaused(sums, total)
    square = (total / draws.clamp(min=1)).square()
    changes = {
        "far": (far / compared(draws).clamp(min=1), square),
        "near": (near / (draws - 1).clamp(min=1), square),
    }
    return Spread.of(total, has_told(name, sums) & (total > 0), changes)


def run_variance(
    name: str,
    variance: str,
    sums: Mapping[str, Tensor],
    spread: Spread,
    known: bool = False,
) -> tuple[Tensor, Tensor]:
    """The variance of a sum due to the batches, and all of it, [n, …] each.

    Infinite if unknown.

    Args:
        name: The name of a predicted sum.
        variance: That of its W.
        sums: The sums of the examples.
        spread: Of all examples: :func:`path_spread`.
        known: Whether batches are known.
    """
    total, batches, measuring = (sums[each].double() for each in (name, f"{name}_square", variance))
    draws = unpaused(sums, total)

    # of few draws the estimate may be below 0, together with W it is hardly ever
    both = (batches + measuring).clamp(min=0).maximum(measuring / 2)
    far, near = (spread.at(each, total).clamp(min=0) for each in ("far", "near"))
    slow = (far - near).clamp(min=0).where(far.isfinite(), far)
    relative = _SLOW * slow + _LEAST_SPREAD**2 + near / 2 / draws.clamp(min=1)
    path = torch.where(total > 0, relative * total.square(), 0.0)

    # an infinite sum is certain, and so is one to which nothing can have been added
    told = has_told(name, sums) | total.isinf()
    if known:  # then nothing is predicted for those who were not drawn
        told = told | (draws == 0)
    nothing = (total == 0) & (both == 0)
    certain = total.isinf() | nothing
    every = torch.where(certain, 0.0, both + path)
    drawn = torch.ones_like(told) if known else (draws > 0).expand_as(told)
    return (
        torch.where(drawn, batches.clamp(min=0), math.inf),
        torch.where(told, every, math.inf),
    )
