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
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchfil.accounting.ids import ExampleIds
from torchfil.accounting.quantities import (
    Divergence,
    QuestionSpec,
    Track,
    TrackedQuantity,
    tracked,
)
from torchfil.accounting.rows import Rows, RowTable, bytes_per_row, in_rounds
from torchfil.accounting.sums import OWN_SUMS, Columns, Sum, Summed, compared, path_sums

STEPS_QUEUED = 32  # steps that are booked together
BYTES_QUEUED = 2**26  # of their columns, at most
MAX_POINTS = 200  # of a timeline

# the examples of a batch, and what is told of them: [batch, …], or one number for all
_Queued = tuple[Tensor, Mapping[str, Tensor | float]]


@dataclass(frozen=True)
class Contribution:
    """What one (physical) batch adds: row k belongs to example ``rows[k]``.

    Attributes:
        rows: Example numbers, [batch]; on the CPU, because booking waits for numbers on a GPU.
        squared_norm: ‖g̃‖², [batch].
        measured: Whether Fisher information was measured, or skipped at random; otherwise the step
            was paused for these examples.
        columns: What was measured, by the names of quantities and questions; empty if the step was
            skipped at random.
        rate: π, the probability that the step was measured.
        num_coordinates: How many private coordinates each example has, [batch], or one number for
            all; None: as many as the ledger.
    """

    rows: Tensor
    squared_norm: Tensor
    measured: bool = True
    columns: Columns = field(default_factory=dict)
    rate: float = 1.0
    num_coordinates: Tensor | int | None = None


class Ledger:
    """Sums per example: values in float64, sums for their errors in float32, counts in int32.

    Besides the sums of the trace and the tracked quantities (:mod:`torchfil.accounting.sums`) it
    keeps, [n] each: ``participations``; ``missed``, participations in paused steps;
    ``squared_norm``, Σ‖g̃‖²; ``num_coordinates``, the largest number of private coordinates that an
    example was seen with (0: never seen).

    Args:
        num_examples: n.
        num_coordinates: d. If nothing is kept by coordinate, examples may have different d.
        device: Where the sums live.
        track: What to keep besides the trace: "diagonal" (2nd numbers), "fim" (nd² numbers), "plis"
            (nd), or a registered quantity.
        questions: By name, the questions whose divergences are kept.

    Attributes:
        laid_out: d of the sums by coordinate.
        device: Where the sums live.
        bytes_per_example: The memory for an example that has all of them.
        by_coordinate: The names of the quantities kept by coordinate.

    Example:
        >>> ledger = Ledger(num_examples=3, num_coordinates=2)
        >>> ledger.add(
        ...     Contribution(torch.tensor([0, 2]), torch.ones(2))
        ... )  # a step that was skipped at random
        >>> ledger.sums["participations"].tolist()
        [1, 0, 1]
        >>> ledger
        Ledger(trace of 3 examples after 0 steps, 68 bytes per example, 0.0 MiB now)
    """

    def __init__(
        self,
        num_examples: int,
        num_coordinates: int,
        device: torch.device | str = "cpu",
        track: Collection[Track] = (),
        questions: Mapping[str, QuestionSpec] | None = None,
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

        # large sums, which steps add to but do not read, lie apart
        self._apart = [
            self._summed[each.name]
            for each in self.quantities
            if each.by_coordinate and not each.followed
        ]
        layout: dict[str, Sum] = {}
        for summed in self._summed.values():
            layout |= summed.layout
        only_added = {name for summed in self._apart for name in summed.layout}
        self._sums = RowTable(layout | OWN_SUMS, num_examples, device, only_added=only_added)
        self.device = self._sums.device
        self.bytes_per_example = bytes_per_row(self._sums.layout)

        # what was added and is not booked yet
        self._queue: list[_Queued] = []
        self._steps_queued = self._bytes_queued = 0

    @property
    def followed(self) -> tuple[TrackedQuantity, ...]:
        """The quantities whose path is followed."""
        return tuple(each for each in self.quantities if each.followed)

    @staticmethod
    def bytes_needed(num_examples: int, num_coordinates: int, *options: Any) -> int:
        """The memory of a ledger; the arguments are those of the class, without ``device``.

        Example:
            >>> Ledger.bytes_needed(1, 10), Ledger.bytes_needed(1, 10, ("diagonal",))
            (68, 188)
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
        """All sums by name, [n, …] each, with everything that was added."""
        self.flush()
        return self._sums

    @property
    def num_coordinates(self) -> int:
        """d; the largest one, if examples differ."""
        own = self.sums["num_coordinates"]
        return self.laid_out if self.by_coordinate or not own.any() else int(own.max())

    @property
    def same_coordinates(self) -> bool:
        """Whether all examples seen so far have the same d; texts of different lengths do not."""
        own = self.sums["num_coordinates"]
        seen = own[own > 0]
        return not len(seen) or bool((seen == seen[0]).all())

    @property
    def own_coordinates(self) -> Tensor:
        """d of every example, int32 [n]; 1 for an example that was never seen."""
        return self.sums["num_coordinates"].clamp(min=1)

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

    def add(self, *contributions: Contribution) -> None:
        """Add the contributions of the batches of one step.

        Each example occurs in them at most once.

        They are queued, and booked by a later call: their tensors must not change any more.

        Raises:
            ValueError: What is added to a sum has another shape than the sum; nothing of the step
                is added.
        """
        self.flush_if_full()

        # all of it is checked before any of it is queued
        queued, size = [], self._bytes_queued
        for each in contributions:
            size += each.squared_norm.nbytes
            told: dict[str, Tensor | float] = {
                "participations": 1,
                "missed": int(not each.measured),
                "squared_norm": each.squared_norm,
                "num_coordinates": self.laid_out
                if each.num_coordinates is None
                else each.num_coordinates,
                "rate": each.rate,
                # of a step that was skipped at random, the error is unknown
                _field("trace", "limit"): math.inf if each.measured else 0.0,
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
        self._queue += queued
        self._bytes_queued, self._steps_queued = size, self._steps_queued + 1

    def flush_if_full(self) -> None:
        """Book what is queued if it is much."""
        if self._steps_queued >= STEPS_QUEUED or self._bytes_queued >= BYTES_QUEUED:
            self.flush()

    def flush(self) -> None:
        """Book what is queued.

        Every reader does this first. After an exception all sums are as before.
        """
        if self._queue:
            self._book()
        self._queue, self._steps_queued, self._bytes_queued = [], 0, 0

    def _book(self) -> None:
        """Add what is queued to the sums, round by round."""
        distinct, order, rounds = in_rounds(torch.cat([rows.cpu() for rows, _ in self._queue]))
        order = order.to(self.device, non_blocking=True)
        with self._sums.rows_of(distinct) as sums:
            added = {name: self._column(name, ())[order] for name in OWN_SUMS}
            rate = self._column("rate", ())[order]
            for summed in self._summed.values():
                if summed not in self._apart:
                    told = self._column(_field(summed.name, "told"), ())[order]
                    parts = {
                        part: self._column(_field(summed.name, part), shape)[order]
                        for part, shape in summed.fields.items()
                    }
                    added |= summed.additions(parts, rate, told)

            # numbers that are no sums: the largest d, and what depends on earlier participations
            largest, own = sums["num_coordinates"], added["num_coordinates"].to(torch.int32)
            for size, here in rounds:
                largest[:size].clamp_(min=own[here])
            added["num_coordinates"].zero_()
            for summed in self._summed.values():
                if summed.followed:
                    _follow(summed.name, sums, added, rounds)

            # plain sums
            for dtype, block in sums.blocks.items():
                values = sums.side_by_side(dtype, added)
                for size, here in rounds:
                    block[:size].add_(values[here])

            # large sums batch by batch: what is added to them is never copied into one tensor
            for summed in self._apart:
                for rows, numbers in self._queue:
                    self._add_apart(summed, rows, numbers)

    def _add_apart(
        self, summed: Summed, rows: Tensor, numbers: Mapping[str, Tensor | float]
    ) -> None:
        """Add a batch's column to its large sums, if it has one."""
        if _field(summed.name, "told") not in numbers:
            return
        one = torch.ones(len(rows), dtype=torch.float64, device=self.device)
        parts = {
            part: torch.as_tensor(numbers.get(_field(summed.name, part), 0.0), device=self.device)
            for part in summed.fields
        }
        added = summed.additions(parts, one * numbers["rate"], one)
        for name, value in added.items():
            self._sums.add(name, rows, value)

    def _column(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """What is queued under a name, float64 [entries, *shape], on its device."""
        numbers = [told.get(name, 0) for _, told in self._queue]
        tensors = [number for number in numbers if isinstance(number, Tensor)]
        if tensors:
            parts = [
                number
                if isinstance(number, Tensor)
                else tensors[0].new_full((len(rows), *shape), number)
                for (rows, _), number in zip(self._queue, numbers, strict=True)
            ]
            return torch.cat(parts).to(self.device, torch.float64)
        sizes = [len(rows) for rows, _ in self._queue]
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
        ledger = cls(state["num_examples"], state["num_coordinates"], device, state["track"], asked)
        ledger.steps, ledger.missed_steps = int(state["steps"]), int(state["missed_steps"])
        for name, own in ledger.sums.items():
            own.copy_(state["sums"][name].view_as(own))
        return ledger


def _field(name: str, part: str) -> str:
    """The name of a column's field in the queue."""
    return f"{name}: {part}"


def _follow(
    name: str, sums: Rows, added: dict[str, Tensor], rounds: Sequence[tuple[int, slice]]
) -> None:
    """Book the path of a sum, before it is booked how often it was measured.

    Nothing else is added to its state.

    Where a comparison is due, the change of X since the last compared participation is noted; X is
    compared at the participation after m measured ones if ``compared(m + 1) == m``, at the distance
    m − ``compared(m)``.
    """
    _, last, changes, measured = path_sums(name)
    is_measured = added[measured] > 0  # the step was not skipped
    count, counts = sums[measured].clone(), []
    for size, here in rounds:
        counts.append(count[:size].clone())
        count[:size].add_(is_measured[here])
    before = torch.cat(counts)
    distance = before - compared(before)
    is_due = (compared(before + 1) == before) & is_measured
    is_change = is_due & (distance > 0)

    last_value, change, value, noise = sums[last], sums[changes], added[last], added[changes]
    for size, here in rounds:
        earlier = last_value[:size]
        squared = ((value[here] - earlier).square() + noise[here]) * distance[here]
        change[:size].add_(torch.where(is_change[here], squared, 0.0).to(change.dtype))
        earlier.copy_(torch.where(is_due[here], value[here].to(earlier.dtype), earlier))
    added[last], added[changes] = torch.zeros_like(value), torch.zeros_like(noise)


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


def mean_ledger(ledgers: Sequence[Ledger]) -> Ledger:
    """The mean of several runs' sums, as a new ledger.

    With two or more runs, their variances are Var/runs.

    Participations are rounded up: 0 only for an example that no run has drawn.
    """
    mean = Ledger.from_state_dict(ledgers[0].state_dict(), ledgers[0].device)
    mean.steps = max(ledger.steps for ledger in ledgers)
    mean.missed_steps = sum(ledger.missed_steps for ledger in ledgers)

    def by_run(name: str) -> Tensor:
        """[runs, n, …]."""
        return torch.stack([ledger.sums[name].to(mean.device) for ledger in ledgers])

    # sums become means, but participations missed in any run stay missing
    for name in mean.sums:
        target, values = mean.sums[name], by_run(name)
        if name == "missed":
            target.copy_(values.sum(dim=0))
        elif name == "num_coordinates":
            target.copy_(values.amax(dim=0))
        else:
            value = values.double().mean(dim=0)
            target.copy_(value if target.is_floating_point() else value.ceil())

    # errors come from the spread between runs, and cover everything random in a run
    for each in mean.quantities if len(ledgers) > 1 else ():
        if each.variance is not None:
            mean.sums[each.variance].copy_(by_run(each.name).double().var(dim=0) / len(ledgers))
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
