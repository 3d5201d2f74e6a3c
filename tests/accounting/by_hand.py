"""The sums of a ledger by plain loops over a log of steps: one example and one number at a time.

Of what is predicted and corrected,

    Ŝ = Σ_t [ q X̂_t + B_t (X̃_t − X̂_t + (M_t/π)(x_t − X̃_t)) ],   X̂ = f r τ,   X̃ = f a h,

as :mod:`torchfil.accounting.prediction` describes it. Nothing is queued, settled or dealt into
rounds, and all that an example ever showed is kept.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from torchfil.accounting.ledger import Contribution, Ledger
from torchfil.accounting.quantities import question_column

TINY = 1e-30


class Step(NamedTuple):
    """What a ledger is told of a step.

    With several ranks, ``rank_of`` is the one that can draw each example, [n]: it alone predicts.
    If they resume the run of one process, they begin with its trend; one process begins with none.
    ``draw_rate``: q, if it is not the ledger's at the end.
    """

    contributions: Sequence[Contribution]
    noise_multiplier: float = 1.0
    max_grad_norm: float = 1.0
    paused: bool = False
    rank_of: Tensor | None = None
    draw_rate: float | None = None

    @property
    def factor(self) -> float:
        """1/σ²; 0: nothing is predicted."""
        return 0.0 if self.paused or not self.noise_multiplier else self.noise_multiplier**-2

    def book(self, ledger: Ledger) -> None:
        ledger.add(
            *self.contributions,
            noise_multiplier=self.noise_multiplier,
            max_grad_norm=self.max_grad_norm,
            paused=self.paused,
        )


@contextmanager
def logged() -> Iterator[list[Step]]:
    """Inside, what any ledger is told."""
    log: list[Step] = []

    def add(ledger: Ledger, *contributions: Contribution, **how: Any) -> None:
        booked(ledger, *contributions, **how)
        log.append(Step(contributions, **how))

    booked = Ledger.add
    with mock.patch.object(Ledger, "add", add):
        yield log


@dataclass
class Draw:
    """One number of one example at one step; ``x`` is None if it was skipped."""

    row: int
    x: float | None
    variance: float
    noise: float
    freedom: float
    rate: float
    norm: float  # ‖g‖/C
    step: Step

    # of its prediction, which sums by coordinate share
    shift: float = 0.0
    guess: float = 0.0
    unsure: float = 0.0


@dataclass
class Trend:
    """What a rank predicts with; 0: nothing yet.

    Attributes:
        level: τ.
        median: The running median.
        seen: By class of norm, faded sums of X/f and of 1.
    """

    level: float = 0.0
    median: float = 0.0
    seen: dict[int, tuple[float, float]] = field(default_factory=dict)

    def base(self, norm: float) -> float:
        """h at this norm; of all norms if none of its class was seen."""
        own = self.seen.get(class_of(norm))
        totals, counts = zip(*([own] if own else self.seen.values() or [(0.0, 1.0)]), strict=True)
        return sum(totals) / sum(counts)

    def after(self, draws: Sequence[Draw]) -> tuple[Trend, float]:
        """The next trend, and the mean X/f of this batch."""
        found = [(draw.norm, draw.x / draw.step.factor) for draw in draws if draw.x is not None]
        if not found:
            mean = sum(self.base(draw.norm) for draw in draws) / len(draws)
            return Trend(running(self.level, mean), self.median, self.seen), mean
        seen = {name: (0.9 * total, 0.9 * count) for name, (total, count) in self.seen.items()}
        for norm, value in found:
            total, count = seen.get(class_of(norm), (0.0, 0.0))
            seen[class_of(norm)] = total + value, count + 1
        values = sorted(value for _, value in found)
        mean, median = sum(values) / len(values), values[(len(values) - 1) // 2]
        if self.level:
            median = self.median + 0.3 * (median - self.median)
        return Trend(running(self.level, mean), median, seen), mean


def class_of(norm: float) -> int:
    ends = (0.03, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95, 1.1, 1.3, 1.6, 2.0, 3.0, 5.0, 8.0)
    return sum(norm > end for end in ends)


def running(old: float, new: float) -> float:
    return old + 0.3 * (new - old) if old else new


def own_running(old: float, new: float, count: int) -> float:
    weight = 0.9 if count == 0 else max(1 / 3, 1 / (count + 1))
    return max(old + weight * (new - old), TINY)


@dataclass
class Example:
    """One number of one example.

    Attributes:
        ahead: q Σ X̂ since its last draw.
        ratio: r; 0: not drawn yet.
        relative: a; 0: not measured yet.
        misses: (x − X̃)² and X̃² of its measured draws.
        draws: How often it was drawn in steps that were not paused.
        path: Of each draw, its number, x (X̃ if it was skipped), the noise in x, and f τ after it.
    """

    total: float = 0.0
    variance: float = 0.0
    spread: float = 0.0
    square: float = 0.0
    ahead: float = 0.0
    ratio: float = 0.0
    relative: float = 0.0
    measured: int = 0
    misses: list[tuple[float, float]] = field(default_factory=list)
    draws: int = 0
    path: list[tuple[int, float, float, float]] = field(default_factory=list)

    def expected(self, trend: Trend) -> float:
        """X̂/f."""
        return self.ratio * trend.level if self.ratio else trend.median

    def missed(self) -> tuple[float, float]:
        """Fading sums of (x − X̃)² and X̃²."""
        ages = [0.7**age for age in range(len(self.misses))][::-1]
        return (
            sum(age * by for age, (by, _) in zip(ages, self.misses, strict=True)),
            sum(age * of for age, (_, of) in zip(ages, self.misses, strict=True)),
        )

    def draw(self, draw: Draw, trend: Trend, mean: float, draw_rate: float | None) -> None:
        """Correct what was predicted."""
        chance = 0.0 if draw_rate is None else 1 - draw_rate
        x, rate, factor = draw.x, draw.rate, draw.step.factor
        skipping = (1 - rate) / rate
        if not factor:  # paused, or without noise
            self.total += 0.0 if x is None else x / rate
            self.add_variance(0.0 if x is None else draw.variance / rate, draw)
            self.measured += x is not None
            self.draws += not draw.step.paused
            return
        first = 0.0 if draw_rate is None else factor * self.expected(trend)
        base = trend.base(draw.norm)
        guess = factor * base * (self.relative or 1.0) if base else first
        by, of = self.missed()
        unsure = guess**2 * (by + 0.1 * guess**2) / max(of + 0.1 * guess**2, TINY)
        draw.shift, draw.guess, draw.unsure = self.ahead + guess - first, guess, unsure

        self.ahead, seen = 0.0, guess if x is None else x
        self.total += draw.shift
        if x is None:
            self.add_variance(skipping * unsure, draw)
            self.square += chance * ((guess - first) ** 2 + unsure)
        else:
            self.total += (x - guess) / rate
            self.add_variance(draw.variance / rate + skipping * (x - guess) ** 2, draw)
            self.square += chance * ((x - first) ** 2 - draw.variance)
            self.misses.append(((x - guess) ** 2, guess**2))

        # its own means
        before = self.ratio or trend.median / max(trend.level, TINY)
        new = seen / factor / mean if mean else before
        self.ratio = own_running(before, new, self.draws)
        if x is not None and base:
            new = x / factor / base
            self.relative = own_running(self.relative or new, new, self.measured)
        level = factor * running(trend.level, mean)
        self.path.append((self.draws, seen, 0.0 if x is None else draw.noise, level))
        self.measured += x is not None
        self.draws += 1

    def add_variance(self, added: float, draw: Draw) -> None:
        self.variance += added
        usual = draw.x is not None and draw.rate == 1
        self.spread += added**2 / (draw.freedom if usual else 1) if added else 0.0

    def changes(
        self, path: Sequence[tuple[int, float, float, float]], *, precise: bool
    ) -> list[float]:
        """The squared changes along these draws, without the noise; if X is precise, only those
        that differ from the trend's, too, in direction or size.
        """
        found = []
        for (_, old, _, then), (_, new, noise, now) in itertools.pairwise(path):
            faded = old * now / then if precise and then and now else old
            between = min(old, faded) <= new <= max(old, faded)
            off = 0.0 if between else min(abs(new - old), abs(new - faded))
            found.append(off**2 - 2 * noise)
        return found

    def sums(self, *, precise: bool) -> dict[str, float]:
        far = [each for each in self.path if compared(each[0])]
        distances = [k - max(filter(compared, range(k))) for k, *_ in far[1:]]
        far_changes = self.changes(far, precise=precise)
        by, of = self.missed()
        return {
            "": self.total + self.ahead,
            "_square": self.square,
            "_near": sum(self.changes(self.path, precise=precise)),
            "_far": sum(map(math.prod, zip(distances, far_changes, strict=True))),
            "_previous": self.path[-1][1] if self.path else 0.0,
            "_previous_level": self.path[-1][3] if self.path else 0.0,
            "_last": far[-1][1] if far else 0.0,
            "_last_level": far[-1][3] if far else 0.0,
            "_ratio": self.ratio,
            "_relative": self.relative,
            "_reached": 0.0,
            "_missed_by": by,
            "_missed_of": of,
            "_variance": self.variance,
            "_variance_spread": self.spread,
        }


def compared(place: int) -> bool:
    """0, 4, 8, 12, 16, 24, 32, 48, 64, 96, …"""
    return place % max(4, 2 ** (max(place, 1).bit_length() - 2)) == 0


def draws_of(step: Step, name: str, place: tuple[int, ...], *, always: bool) -> Iterable[Draw]:
    """One number of everybody that the step drew, batch by batch."""
    for batch in step.contributions:
        column = batch.columns.get(name)
        for k, row in enumerate(batch.rows.tolist()):
            value, variance, noise = (
                0.0 if column is None or part not in column else float(column[part][(k, *place)])
                for part in ("value", "variance", "noise")
            )
            freedom = float(column["freedom"][k]) if column and "freedom" in column else 1.0
            norms = batch.squared_norm.sqrt() if batch.norm is None else batch.norm
            norm = float(norms[k]) / step.max_grad_norm
            x, rate = None if column is None else value, 1.0 if always else batch.rate
            yield Draw(row, x, variance, noise, freedom, rate, norm, step)


def predicted(
    log: Sequence[Step],
    n: int,
    draw_rate: Tensor | float | None,
    name: str,
    place: tuple[int, ...] = (),
    *,
    always: bool = False,
) -> tuple[list[Example], list[Draw]]:
    """One number of all examples after the log, and its draws in the order of the log."""
    examples, every = [Example() for _ in range(n)], list[Draw]()
    trends: dict[int | None, Trend] = {}
    for step in log:
        q = draw_rate if step.draw_rate is None else step.draw_rate
        rates = [None] * n
        if q is not None:
            rates = torch.as_tensor(q, dtype=torch.float64).expand(n).tolist()
        rank_of = [None] * n if step.rank_of is None else step.rank_of.tolist()
        for rank in rank_of:
            trends.setdefault(rank, trends.get(None, Trend()))
        for each, rank, rate in zip(examples, rank_of, rates, strict=True):
            if rate is not None:
                each.ahead += rate * step.factor * each.expected(trends[rank])
        draws = list(draws_of(step, name, place, always=always))
        for rank in {rank_of[draw.row] for draw in draws}:
            batch = [draw for draw in draws if rank_of[draw.row] == rank]
            trend, mean = trends[rank], 0.0
            if step.factor:
                trends[rank], mean = trend.after(batch)
            for draw in batch:
                examples[draw.row].draw(draw, trend, mean, rates[draw.row])
        every += draws
    return examples, every


def shares(total: Tensor) -> Tensor:
    """The part of the trace's prediction that each entry of a sum by coordinate gets."""
    if total.ndim == 2:  # in proportion to the matrix
        trace = float(total.trace())
        begin = torch.eye(len(total)).double() / len(total) * (trace == 0)
        return total / trace if 0 < trace < math.inf else begin
    positive = torch.where(total.isfinite(), total.clamp(min=0), 0.0)
    largest = (total == total.max()).double()
    return positive / positive.sum() if positive.any() else largest / largest.sum()


def by_coordinate(
    log: Sequence[Step],
    name: str,
    shape: tuple[int, ...],
    examples: Sequence[Example],
    draws: Sequence[Draw],
) -> tuple[Tensor, Tensor]:
    """A sum whose entries correct their shares of the trace's prediction, and its variance,
    [n, *shape] each.
    """
    total, variance = torch.zeros(2, len(examples), *shape, dtype=torch.float64)
    batches = [batch for step in log for batch in step.contributions]
    places = [(batch.columns.get(name), k) for batch in batches for k in range(len(batch.rows))]
    for draw, (column, k) in zip(draws, places, strict=True):
        own, skipping = total[draw.row], (1 - draw.rate) / draw.rate
        share = shares(own)
        own += share * draw.shift
        square = share**2 * draw.unsure
        if column is not None:
            error = column["value"][k] - share * draw.guess
            own += error / draw.rate
            square = error**2 if draw.step.factor else 0 * share
            if "variance" in column:
                variance[draw.row] += column["variance"][k] / draw.rate
        variance[draw.row] += skipping * square
    for own, each in zip(total, examples, strict=True):
        own += shares(own) * each.ahead
    return total, variance


def sums_by_hand(ledger: Ledger, log: Sequence[Step]) -> dict[str, Tensor]:
    """All sums of a ledger like this one after the log, in float64."""
    n, q, layout = ledger.num_examples, ledger.draw_rate, ledger.sums.layout
    found = {name: torch.zeros(n, *each.shape).double() for name, each in layout.items()}
    questions = {question_column(name): asked for name, asked in ledger.questions.items()}
    for name in (*questions, "trace"):  # whose variance has no prefix
        always = name in questions and questions[name].membership
        for place in itertools.product(*map(range, layout[name].shape)):
            examples, _ = predicted(log, n, q, name, place, always=always)
            for row, each in enumerate(examples):
                for part, value in each.sums(precise=name in questions).items():
                    own = f"{name}{part}" if f"{name}{part}" in found else part[1:]
                    if own not in found:  # of precise columns alone
                        continue
                    found[own][(row, *place)[: found[own].ndim]] = value
    for name in {"diagonal", "fim"} & set(layout):
        found[name], variance = by_coordinate(
            log, name, layout[name].shape, *predicted(log, n, q, "trace")
        )
        if name == "diagonal":
            found["diagonal_variance"] = variance
    for step in log:
        for batch in step.contributions:
            rows, size = batch.rows, batch.num_coordinates
            found["participations"][rows] += 1
            found["paused"][rows] += step.paused
            found["measured"][rows] += "trace" in batch.columns
            found["squared_norm"][rows] += batch.squared_norm
            least = ledger.laid_out if size is None else size
            found["num_coordinates"][rows] = found["num_coordinates"][rows].clamp(min=least)
            for name, column in batch.columns.items():
                if name not in ("trace", "diagonal", "fim", *questions):  # plain
                    found[name][rows] += column["value"] / batch.rate
    return found


def assert_by_hand(ledger: Ledger, log: Sequence[Step]) -> None:
    """All sums are those by hand, to 1e-12; those made of float32 to 1e-6."""
    for name, value in sums_by_hand(ledger, log).items():
        ours = ledger.sums[name].double()
        if name.startswith(("diagonal", "fim")) or name.endswith(("_near", "_far")):
            # of an infinite trace they mean nothing
            ours, value = (each[ledger.sums["trace"].isfinite()] for each in (ours, value))
        precise = ledger.sums[name].dtype != torch.float32 and name != "variance_spread"
        tolerance, usual = 1e-12 if precise else 1e-6, value[value.isfinite()]
        scale = float(usual.abs().max()) if len(usual) else 0.0
        torch.testing.assert_close(ours, value, rtol=tolerance, atol=tolerance * scale, msg=name)
