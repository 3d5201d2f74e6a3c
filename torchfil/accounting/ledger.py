"""Running sums of Fisher information by example, over the steps of a training run.

By Theorem 3 of Guo et al. 2022 the sum over the steps of a realised run is an unbiased estimate of
an upper bound on the Fisher information of the trained model; a step without the example adds
nothing.

What a step measured is queued where it was computed, and nothing is launched or waited for. The
queue is booked for many steps at once when it is full, and before anything is read or saved; only
then do columns become sums (:mod:`torchfil.accounting.sums`).

The mean over repeated runs on the same data (:func:`mean_ledger`) is one ledger whose errors are
the spread between the runs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from torchfil.accounting.ids import ExampleIds
from torchfil.accounting.prediction import Drawn, Draws, Trend, book, norm_class, outstanding
from torchfil.accounting.quantities import (
    Divergence,
    QuestionSpec,
    Track,
    TrackedQuantity,
    tracked,
)
from torchfil.accounting.rows import Rows, RowTable, bytes_per_row, in_rounds
from torchfil.accounting.sums import OWN_SUMS, Columns, Spread, Sum, Summed

STEPS_QUEUED = 64  # steps that are booked together
BYTES_QUEUED = 2**26  # of their columns, at most
MAX_POINTS = 200  # of a timeline
_TOGETHER = 1.3  # examples of a group share the noise of their runs

# the examples of a batch, and what is told of them: [batch, …], or one number for all
_Queued = tuple[Tensor, Mapping[str, Tensor | float]]


@dataclass(frozen=True)
class Contribution:
    """What one (physical) batch adds: row k belongs to example ``rows[k]``.

    Attributes:
        rows: Example numbers, [batch]; on the CPU, because booking waits for numbers on a GPU.
        squared_norm: ‖g̃‖², [batch].
        columns: What was measured, by the names of quantities and questions; those that are missing
            were skipped at random (of norm-only questions none is, unless the step is paused).
        rate: π, the probability that the step was measured.
        num_coordinates: How many private coordinates each example has, [batch], or one number for
            all; None: as many as the ledger.
        norm: ‖g‖ before clipping, [batch], which helps to predict; None: ‖g̃‖.
    """

    rows: Tensor
    squared_norm: Tensor
    columns: Columns = field(default_factory=dict)
    rate: float = 1.0
    num_coordinates: Tensor | int | None = None
    norm: Tensor | None = None


@dataclass(frozen=True)
class _Step:
    """A step that is not booked yet.

    Attributes:
        batches: Those that have examples.
        factor: 1/σ², in whose unit predictions are kept; 0: the step was paused or had no noise,
            so nothing is predicted.
        max_grad_norm: C.
    """

    batches: Sequence[_Queued]
    factor: float
    max_grad_norm: float


class Ledger:
    """Sums per example: values in float64, sums for their errors in float32, counts in int32.

    Besides the sums of the trace and the tracked quantities (:mod:`torchfil.accounting.sums`) it
    keeps, [n] each: ``participations``; ``paused``, those in paused steps; ``measured``, those in
    measured steps; ``squared_norm``, Σ‖g̃‖²; ``num_coordinates``, the largest number of private
    coordinates that an example was seen with (0: never seen).

    Args:
        num_examples: n.
        num_coordinates: d. If nothing is kept by coordinate, examples may have different d.
        device: Where the sums live.
        track: What to keep besides the trace: "diagonal" (2nd numbers), "fim" (nd² numbers), "plis"
            (nd), or a registered quantity.
        questions: By name, the questions whose divergences are kept.
        draw_rate: q, the probability with which a step draws an example, one number or [n]; None:
            batches are known.

    Attributes:
        laid_out: d of the sums by coordinate.
        device: Where the sums live.
        bytes_per_example: The memory for an example that has all of them.
        by_coordinate: The names of the quantities kept by coordinate.
        held: Which examples this process can draw, [n]; None: all.

    Example:
        >>> ledger = Ledger(num_examples=3, num_coordinates=2)
        >>> ledger.add(
        ...     Contribution(torch.tensor([0, 2]), torch.ones(2))
        ... )  # a step that was skipped at random
        >>> ledger.sums["participations"].tolist()
        [1, 0, 1]
        >>> ledger
        Ledger(trace of 3 examples after 1 steps, 96 bytes per example, 0.0 MiB now)
    """

    def __init__(
        self,
        num_examples: int,
        num_coordinates: int,
        device: torch.device | str = "cpu",
        track: Collection[Track] = (),
        questions: Mapping[str, QuestionSpec] | None = None,
        draw_rate: Tensor | float | None = None,
    ) -> None:
        self.laid_out = num_coordinates
        self.questions = dict(questions or {})
        self.quantities = (
            *tracked(track),
            *(Divergence(name, asked) for name, asked in self.questions.items()),
        )
        self.track = tuple([each.name for each in tracked(track) if each.name != "trace"])
        self.steps = self.missed_steps = 0
        self.by_coordinate = tuple(
            [quantity.name for quantity in self.quantities if quantity.by_coordinate]
        )
        self._summed = {each.name: each.summed(num_coordinates) for each in self.quantities}
        self._predicted = [each for each in self._summed.values() if each.predicted]

        # other sums lie apart, because they may be large
        self._apart = [each for each in self._summed.values() if not each.predicted]
        layout: dict[str, Sum] = {}
        for summed in self._summed.values():
            layout |= summed.layout
        apart = {name for summed in self._apart for name in summed.layout}
        self._sums = RowTable(layout | OWN_SUMS, num_examples, device, only_added=apart)
        self.device = self._sums.device
        self.bytes_per_example = bytes_per_row(self._sums.layout)

        # who is drawn how often, and what they add on average
        self.draw_rate = draw_rate
        self.held: Tensor | None = None
        self._trends = {each.name: Trend.start(each.shape) for each in self._predicted}

        # what was added and is not booked yet
        self._queue: list[_Step] = []
        self._bytes_queued = 0

    @property
    def predicted(self) -> tuple[TrackedQuantity, ...]:
        """The quantities that are predicted and corrected."""
        return tuple(each for each in self.quantities if each.predicted)

    @staticmethod
    def bytes_needed(num_examples: int, num_coordinates: int, *options: Any) -> int:
        """The memory of a ledger; the arguments are those of the class, without ``device``.

        Example:
            >>> Ledger.bytes_needed(1, 10), Ledger.bytes_needed(1, 10, ("diagonal",))
            (96, 216)
        """
        # without storage
        return Ledger(num_examples, num_coordinates, "meta", *options).sums.num_bytes

    def __repr__(self) -> str:
        """What it holds, and its memory."""
        kept, size = (
            ", ".join(("trace", *self.track, *self.questions)),
            f"{self.bytes_per_example:,} bytes per example",
        )
        content = f"{kept} of {self.num_examples:,} examples after {self.steps:,} steps"
        return f"Ledger({content}, {size}, {self.sums.num_bytes / 2**20:,.1f} MiB now)"

    @property
    def num_examples(self) -> int:
        """n."""
        return self._sums.num_examples

    @property
    def sums(self) -> RowTable:
        """All sums by name, [n, …] each, with everything that was added and predicted."""
        self.flush()
        self._settle()
        return self._sums

    def exposed(self, share: float) -> dict[str, Tensor] | None:
        """The sums of the examples that leaked most so far, such a share of those that were
        measured; None: nobody was. Sums by coordinate are left out.
        """
        trace = self.traces()
        known = (self._sums["measured"] > 0) & (trace > 0) & trace.isfinite()
        if not known.any():
            return None
        count = max(1, round(share * int(known.sum())))
        rows = trace.where(known, -math.inf).topk(count).indices
        near = {name: self._sums.at(name, rows) for name in self._summed["trace"].layout}
        return {**near, **{name: self._sums.at(name, rows) for name in OWN_SUMS}} | {
            "trace": trace[rows]
        }

    def _booked(self, name: str) -> Tensor:
        """A sum with everything that was added; what is predicted is not settled."""
        self.flush()
        return self._sums[name]

    def traces(self) -> Tensor:
        """Σ tr I of every example so far, [n]; 0 for those that were never drawn, whatever is
        predicted for them. Sums by coordinate are not settled for it.
        """
        self.flush()
        found = self._sums["trace"] + self._outstanding(self._summed["trace"])
        return torch.where(self._sums["participations"] > 0, found, 0.0)

    @property
    def num_coordinates(self) -> int:
        """d; the largest one, if examples differ."""
        own = self._booked("num_coordinates")
        return self.laid_out if self.by_coordinate or not own.any() else int(own.max())

    @property
    def same_coordinates(self) -> bool:
        """Whether all examples seen so far have the same d; texts of different lengths do not."""
        own = self._booked("num_coordinates")
        seen = own[own > 0]
        return not len(seen) or bool((seen == seen[0]).all())

    @property
    def own_coordinates(self) -> Tensor:
        """d of every example, int32 [n]; 1 for an example that was never seen."""
        return self._booked("num_coordinates").clamp(min=1)

    def check_coordinates(self, num_coordinates: int) -> None:
        """Raise if examples with this many private coordinates do not fit the sums by
        coordinate.
        """
        if num_coordinates != self.laid_out and self.by_coordinate:
            raise ValueError(
                f"this batch has {num_coordinates} private coordinates per example, earlier ones "
                f"{self.laid_out}: pass private=Private(max_length=…), or leave out "
                f"track={self.by_coordinate}"
            )

    def grow(self, num_examples: int) -> None:
        """Make room for this many examples; the new ones have not taken part yet."""
        self._sums.extend(num_examples)

    def add(
        self,
        *contributions: Contribution,
        noise_multiplier: float = 1.0,
        max_grad_norm: float = 1.0,
        paused: bool = False,
    ) -> None:
        """Add a step: the contributions of its batches, if it drew anybody.

        Each example occurs in them at most once.

        They are queued, and booked by a later call: their tensors must not change any more.

        Args:
            *contributions: Of the batches.
            noise_multiplier: σ.
            max_grad_norm: C.
            paused: Whether the step was not to be measured; nothing is predicted for it.

        Raises:
            ValueError: What is added to a sum has another shape than the sum; nothing of the step
                is added.
        """
        self.flush_if_full()

        # all of it is checked before any of it is queued
        queued, size = [], self._bytes_queued
        for each in contributions:
            size += 2 * each.squared_norm.nbytes
            told: dict[str, Tensor | float] = {
                "participations": 1,
                "paused": int(paused),
                "measured": int("trace" in each.columns),
                "squared_norm": each.squared_norm,
                "norm": each.squared_norm.sqrt() if each.norm is None else each.norm,
                "num_coordinates": self.laid_out
                if each.num_coordinates is None
                else each.num_coordinates,
                "rate": each.rate,
            }
            for name, column in each.columns.items():
                told[_field(name, "told")] = 1
                for part, shape in self._summed[name].fields.items():
                    if part not in column:
                        continue
                    value = column[part]
                    size += value.nbytes
                    if value.shape != (len(each.rows), *shape):
                        raise ValueError(
                            f"what is added to {name!r} has shape {tuple(value.shape)}; for "
                            f"{len(each.rows)} examples it must have {(len(each.rows), *shape)}"
                        )
                    told[_field(name, part)] = value

            # a step that was not measured still counts as a participation
            if len(each.rows):
                queued.append((each.rows, told))
        factor = 0.0 if paused or noise_multiplier == 0 else noise_multiplier**-2
        self._queue.append(_Step(queued, factor, max_grad_norm))
        self._bytes_queued = size
        self.steps += 1
        self.missed_steps += int(paused)

    def flush_if_full(self) -> None:
        """Book what is queued if it is much."""
        if len(self._queue) >= STEPS_QUEUED or self._bytes_queued >= BYTES_QUEUED:
            self.flush()

    def flush(self) -> None:
        """Book what is queued.

        Every reader does this first. After an exception all sums are as before.
        """
        if self._queue:
            self._book()
        self._queue, self._bytes_queued = [], 0

    def _book(self) -> None:
        """Add what is queued to the sums, round by round."""
        batches = self._batches
        followed = {summed.name: self._follow(summed) for summed in self._predicted}
        shifts: dict[str, Tensor] = {}
        if batches:
            numbers = torch.cat([rows.cpu() for rows, _ in batches])
            distinct, order, rounds = in_rounds(numbers)
            order = order.to(self.device, non_blocking=True)
            with self._sums.rows_of(distinct) as sums:
                for summed in self._predicted:
                    draws = followed[summed.name][1]
                    assert draws is not None
                    found = self._book_predicted(summed, sums, (distinct, order, rounds), draws)
                    shifts = found if summed.name == "trace" else shifts

                # the examples' own numbers
                added = {name: self._column(name, ())[order] for name in OWN_SUMS}
                for size, here in rounds:
                    largest = sums["num_coordinates"][:size]
                    largest.clamp_(min=added["num_coordinates"][here].to(torch.int32))
                    for name in ("squared_norm", "participations", "measured", "paused"):
                        kept = sums[name][:size]
                        kept.add_(added[name][here].to(kept.dtype))

            # large sums batch by batch: what is added to them is never copied into one tensor
            for summed in self._apart:
                first = 0
                for rows, told in batches:
                    part = {name: each[first : first + len(rows)] for name, each in shifts.items()}
                    self._add_apart(summed, rows, told, part)
                    first += len(rows)
        self._trends = {name: trend for name, (trend, _) in followed.items()}

    @property
    def _batches(self) -> list[_Queued]:
        return [batch for step in self._queue for batch in step.batches]

    def _follow(self, summed: Summed) -> tuple[Trend, Draws | None]:
        """The trend after all queued steps; and their draws, in the order of the queue, each with
        what the trend before it predicts.
        """
        trend, with_draws = self._trends[summed.name], [s for s in self._queue if s.batches]
        if not with_draws:
            for step in self._queue:
                trend = trend.ahead(step.factor)
            return trend, None

        # one entry for each draw
        def by_draw(numbers: Sequence[float], dtype: torch.dtype) -> Tensor:
            sizes = [sum(len(rows) for rows, _ in step.batches) for step in with_draws]
            spread = torch.tensor(numbers, dtype=dtype).repeat_interleave(torch.tensor(sizes))
            return spread.to(self.device, non_blocking=True)

        wide, number = (-1, *(1,) * len(summed.shape)), len(with_draws)
        steps = by_draw(range(number), torch.int64)
        factor = by_draw([step.factor for step in with_draws], torch.float64).view(wide)
        limits = by_draw([step.max_grad_norm for step in with_draws], torch.float64)
        classes = norm_class(self._column("norm", ()) / limits)
        rate, told = (
            self._column(name, ()).view(wide) for name in ("rate", _field(summed.name, "told"))
        )
        value, variance, noise = (
            self._column(_field(summed.name, part), summed.shape)
            for part in ("value", "variance", "noise")
        )

        # step by step: predictions, and what they learn from the draws
        counts = [
            sum(len(rows) for rows, told in step.batches if _field(summed.name, "told") in told)
            if step.factor
            else 0
            for step in with_draws
        ]
        some = torch.tensor([count > 0 for count in counts]).to(self.device)[steps]
        left_out = some & (told.flatten() == 0)
        active = (factor > 0) & (told > 0)
        drawn = Drawn.of_steps(
            torch.where(active, value / factor.clamp(min=1e-300), 0.0),
            torch.where(left_out, number, steps),
            classes,
            counts,
        )
        predicted: list[Tensor] = []
        remaining = iter(drawn)
        for step in self._queue:
            trend = trend.ahead(step.factor)
            if step.batches:
                now, mean, found = trend, torch.zeros_like(trend.level), next(remaining)
                if step.factor:
                    trend, mean = trend.after(found)
                shared = now.level, now.median, now.reach, now.reach_undrawn, mean
                predicted.append(torch.cat([torch.stack(shared), now.base()]))
        table = torch.stack(predicted).to(self.device)
        level, median, reach, undrawn, mean = (table[:, place][steps] for place in range(5))
        zero = torch.zeros_like(rate)
        return trend, Draws(
            value=value,
            variance=variance,
            noise=noise,
            told=told > 0,
            rate=torch.ones_like(rate) if summed.always else rate,
            base=table[steps, 5 + classes],
            factor=factor,
            level=level,
            median=median,
            reach=reach,
            reach_undrawn=undrawn,
            mean=mean,
            count=zero,
            measured=zero,
        )

    def _book_predicted(
        self,
        summed: Summed,
        sums: Rows,
        how: tuple[Tensor, Tensor, Sequence[tuple[int, slice]]],
        draws: Draws,
    ) -> dict[str, Tensor]:
        """Book a column that is predicted and corrected.

        Returns:
            What sums by coordinate need of it, in the order of the queue, [entries] each.
        """
        distinct, order, rounds = how
        wide = (-1, *(1,) * len(summed.shape))
        draws = draws[order]
        freedom = torch.ones_like(draws.rate)
        if summed.spread is not None:
            freedom = self._column(_field(summed.name, "freedom"), ())[order]
        rate = self._rate_of(distinct)
        rate = rate.view(wide) if isinstance(rate, Tensor) else rate
        count = (sums["participations"] - sums["paused"]).double().view(wide)
        unpaused = 1 - self._column("paused", ())[order].view(wide)
        measured = count if summed.always else sums["measured"].double().view(wide)
        measured = measured.clone()

        # an example's draws one after the other: each changes what the next one predicts
        kept: dict[str, Tensor] = {}
        for size, here in rounds:
            now = draws[here]
            now = replace(now, count=count[:size].clone(), measured=measured[:size].clone())
            part = rate[:size] if isinstance(rate, Tensor) else rate
            found = book(summed.state(sums, size), now, part)
            summed.add(sums, now, found, freedom[here])
            count[:size] += unpaused[here]
            measured[:size] += now.told
            for name in ("shift", "guess", "unsure") if self._apart else ():
                value = getattr(found, name)
                if name not in kept:
                    kept[name] = value.new_zeros(len(order), *value.shape[1:])
                kept[name][here] = value
        if not self._apart:
            return {}

        # back to the order of the queue
        places = torch.empty_like(order).index_copy_(
            0, order, torch.arange(len(order), device=order.device)
        )
        return {name: value[places] for name, value in kept.items()}

    def _add_apart(
        self,
        summed: Summed,
        rows: Tensor,
        told: Mapping[str, Tensor | float],
        trace: Mapping[str, Tensor],
    ) -> None:
        """Add a batch's column to its large sums: the trace's prediction by the example's shares,
        corrected where it was measured.
        """
        wide = (-1, *(1,) * len(summed.shape))
        rate = float(told["rate"])
        is_told = _field(summed.name, "told") in told
        parts = {
            part: torch.as_tensor(told.get(_field(summed.name, part), 0.0), device=self.device)
            for part in summed.fields
        }
        value = parts["value"].double() if is_told else torch.zeros((), dtype=torch.float64)
        value = value.to(self.device)

        # what the trace predicts, by the entries' shares so far
        guess = unsure = torch.zeros((), dtype=torch.float64, device=self.device)
        added = value / rate
        if summed.shares is not None and (self.draw_rate is not None or rate < 1):
            share = summed.shares(self._sums.at(summed.name, rows))
            shift, guess, unsure = (trace[name].view(wide) for name in ("shift", "guess", "unsure"))
            guess, unsure = share * guess, share.square() * unsure
            added = share * shift + ((value - guess) / rate if is_told else 0.0)
        self._sums.add(summed.name, rows, added)
        if summed.variance is not None:
            skipping = (1 - rate) / rate
            error = torch.where(value.isfinite(), value - guess, 0.0)
            variance = (
                parts["variance"] / rate + skipping * error.square()
                if is_told
                else skipping * unsure
            )
            self._sums.add(summed.variance, rows, variance)

    # ------------------------------------------------------------------ predictions

    def _rate_of(self, rows: Tensor | None = None) -> Tensor | float | None:
        """q of these examples, [rows] if they differ."""
        if not isinstance(self.draw_rate, Tensor):
            return self.draw_rate
        rate = self.draw_rate.to(self.device, torch.float64)
        return rate if rows is None else rate[rows.to(self.device)]

    def _outstanding(self, summed: Summed) -> Tensor:
        """What is predicted since each example's last draw, [n, …]."""
        wide = (-1, *(1,) * len(summed.shape))
        rate = self._rate_of()
        rate = rate.view(wide) if isinstance(rate, Tensor) else rate
        state = summed.state(self._sums, self.num_examples)
        found = outstanding(state, self._trends[summed.name], rate)
        return found if self.held is None else found * self.held.to(found).view(wide)

    def _settle(self) -> None:
        """Add what is predicted since each example's last draw."""
        if self.draw_rate is None:
            return
        for summed in self._predicted:
            trend = self._trends[summed.name]
            found = self._outstanding(summed)
            self._sums[summed.name].add_(found)
            self._sums[summed.part("reached")].zero_()
            self._trends[summed.name] = trend.settled()
            for each in self._apart if summed.name == "trace" else ():
                if each.shares is not None:
                    own = self._sums[each.name]
                    own.add_(each.shares(own) * found.view(-1, *(1,) * len(each.shape)))

    def _column(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """What is queued under a name, float64 [entries, *shape], on its device."""
        numbers = [told.get(name, 0) for _, told in self._batches]
        tensors = [number for number in numbers if isinstance(number, Tensor)]
        if tensors:
            parts = [
                number
                if isinstance(number, Tensor)
                else tensors[0].new_full((len(rows), *shape), number)
                for (rows, _), number in zip(self._batches, numbers, strict=True)
            ]
            return torch.cat(parts).to(self.device, torch.float64)
        sizes = [len(rows) for rows, _ in self._batches]
        column = torch.tensor(numbers, dtype=torch.float64).repeat_interleave(
            torch.tensor(sizes, dtype=torch.long)
        )
        column = column.view(-1, *(1,) * len(shape)).expand(-1, *shape)
        return column.to(self.device, non_blocking=True)

    def state_dict(self) -> dict[str, Any]:
        """Everything, as tensors and plain numbers."""
        return {
            "num_examples": self.num_examples,
            "num_coordinates": self.num_coordinates,
            "track": list(self.track),
            "questions": {
                name: [list(asked.answers), *asked[1:]] for name, asked in self.questions.items()
            },
            "steps": self.steps,
            "missed_steps": self.missed_steps,
            "draw_rate": self.draw_rate,
            "trends": self.trends(),
            "sums": {name: value.clone() for name, value in self.sums.items()},
        }

    @classmethod
    def from_state_dict(
        cls, state: Mapping[str, Any], device: torch.device | str = "cpu"
    ) -> Ledger:
        """The ledger with this state.

        Args:
            state: From :meth:`state_dict`.
            device: As for a new ledger.
        """
        asked = {
            name: QuestionSpec(tuple(answers), *more)
            for name, (answers, *more) in state["questions"].items()
        }
        sizes = state["num_examples"], state["num_coordinates"]
        ledger = cls(*sizes, device, state["track"], asked, state["draw_rate"])
        ledger.steps, ledger.missed_steps = int(state["steps"]), int(state["missed_steps"])
        for name, own in ledger.sums.items():
            own.copy_(state["sums"][name].view_as(own))
        ledger.load_trends(state["trends"])
        return ledger

    def trends(self) -> dict[str, Tensor]:
        """What all examples share in predictions, by column."""
        self.flush()
        return {name: trend.state() for name, trend in self._trends.items()}

    def load_trends(self, state: Mapping[str, Tensor]) -> None:
        """The inverse of :meth:`trends`, of settled sums."""
        self._trends = {name: Trend.from_state(trend) for name, trend in state.items()}


def _field(name: str, part: str) -> str:
    """The name of a column's field in the queue."""
    return f"{name}: {part}"


def _tensor(value: Tensor | float) -> Tensor:
    assert isinstance(value, Tensor)
    return value


# ------------------------------------------------------------------ repeated runs


def check_repetitions(ids: Sequence[ExampleIds], ledgers: Sequence[Ledger]) -> None:
    """Raise unless all runs are about the same examples and keep the same quantities."""
    first = ledgers[0]
    for names, ledger in zip(ids, ledgers, strict=True):
        # of texts, one run may not have seen the longest
        may_differ = not (ledger.by_coordinate or ledger.same_coordinates or first.same_coordinates)
        same = names.all() == ids[0].all() and (
            ledger.num_coordinates == first.num_coordinates or may_differ
        )
        if not same or (ledger.track, ledger.questions) != (first.track, first.questions):
            told = [
                (each.num_examples, each.num_coordinates, each.track, each.questions)
                for each in ledgers
            ]
            raise ValueError(
                "runs to average must share data, private coordinates, track and questions; got "
                f"{told}"
            )


def mean_ledger(ledgers: Sequence[Ledger], variances: Mapping[str, Tensor] | None = None) -> Ledger:
    """The mean of several runs' sums, as a new ledger.

    With two or more runs, the variance of a mean is the smaller of two estimates: what each run
    says of itself, Σ_r V_r/R²; and the spread between the runs, relative to the squared mean,
    shared among examples of like exposure, times 1.3 because they share the runs' noise.

    Participations are rounded up: 0 only for an example that no run has drawn.

    Args:
        ledgers: Of the runs.
        variances: V of every run by predicted sum, [runs, n, …].
    """
    mean = Ledger.from_state_dict(ledgers[0].state_dict(), ledgers[0].device)
    mean.steps = max(ledger.steps for ledger in ledgers)
    mean.missed_steps = sum(ledger.missed_steps for ledger in ledgers)
    runs = len(ledgers)
    if runs > 1:  # errors will include the draws
        mean.draw_rate = None

    def by_run(name: str) -> Tensor:
        """[runs, n, …]."""
        return torch.stack([ledger.sums[name].to(mean.device) for ledger in ledgers])

    # sums become means, but participations in paused steps of any run stay there
    for name in mean.sums:
        target, values = mean.sums[name], by_run(name)
        if name == "paused":
            target.copy_(values.sum(dim=0))
        elif name == "num_coordinates":
            target.copy_(values.amax(dim=0))
        else:
            value = values.double().mean(dim=0)
            target.copy_(value if target.is_floating_point() else value.ceil())

    # errors cover everything random in a run
    for each in mean.quantities if runs > 1 else ():
        if each.variance is None:
            continue
        total = mean.sums[each.name].double()
        between = by_run(each.name).double().var(dim=0) / runs
        if variances is not None and each.name in variances:
            known = (total > 0) & total.isfinite() & between.isfinite()
            spread = Spread.of(total, known, {"runs": (between, total.square())})
            shared = _TOGETHER * spread.at("runs", total) * total.square()
            of_runs = variances[each.name].sum(dim=0) / runs**2
            between = torch.where(total.isinf(), 0.0, torch.fmin(shared, of_runs))
        elif each.by_coordinate:
            between = by_run(each.variance).double().sum(dim=0) / runs**2
        mean.sums[each.variance].copy_(between)
    return mean


# ------------------------------------------------------------------ over training time


class Timeline:
    """The median, the 95 % quantile and the maximum of η̄ = sqrt(tr(I)/d) over all examples, at
    some of the steps.

    Every ``stride``-th step is noted at first. Whenever there are 200 points, every second one is
    dropped, and from then on half as many steps are noted. So a run of any length keeps at most 200
    equally spaced points, and rarely reads the ledger. Examples that were not drawn yet count as 0.

    Args:
        stride: The initial number of steps between two points.
    """

    def __init__(self, stride: int = 1) -> None:
        self.stride = stride
        # by step, [3] each, on the ledger's device: no waiting for a GPU
        self.points: dict[int, Tensor] = {}

    def is_due(self, step: int) -> bool:
        """Whether this step is to be noted."""
        return step % self.stride == 0

    def note(self, step: int, trace: Tensor, num_coordinates: Tensor | int) -> None:
        """Note the traces and d of the examples, [n] each, after ``step`` steps, if this step is
        due.
        """
        if not self.is_due(step):
            return
        self.points[step] = summary(trace, num_coordinates)
        if len(self.points) >= MAX_POINTS:
            self.stride *= 2
            self.points = {
                noted: point for noted, point in self.points.items() if self.is_due(noted)
            }

    def table(
        self, step: int, trace: Tensor, num_coordinates: Tensor | int
    ) -> tuple[list[int], Tensor]:
        """The noted steps and their points, [t, 3], ending with the current one."""
        points = dict(self.points)
        if step and step not in points:
            points[step] = summary(trace, num_coordinates)
        return list(points), _stacked(points).cpu()

    def state_dict(self) -> dict[str, Any]:
        """Everything, as tensors and plain numbers."""
        return {"stride": self.stride, "steps": list(self.points), "points": _stacked(self.points)}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any], device: torch.device | str) -> Timeline:
        """The inverse of :meth:`state_dict`."""
        timeline = cls(state["stride"])
        timeline.points = dict(zip(state["steps"], state["points"].to(device), strict=True))
        return timeline


def _stacked(points: Mapping[int, Tensor]) -> Tensor:
    """[t, 3]."""
    return torch.stack(list(points.values())) if points else torch.zeros(0, 3, dtype=torch.float64)


def summary(trace: Tensor, num_coordinates: Tensor | int) -> Tensor:
    """Median, 95 % quantile and maximum of sqrt(trace/d), [3].

    Quantiles are values that occur (the higher one).
    """
    ordered = (trace / num_coordinates).sort().values
    median, high = math.ceil(0.5 * len(trace)), math.ceil(0.95 * len(trace))
    return (
        torch.stack([ordered[max(0, median - 1)], ordered[max(0, high - 1)], ordered[-1]])
        .clamp(min=0)
        .sqrt()
    )
