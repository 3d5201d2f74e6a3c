"""Running sums of Fisher information by example, over the steps of a training run.

By Theorem 3 of Guo et al. 2022 the sum over the steps of a realised run is an unbiased estimate of an upper
bound on the Fisher information of the trained model; a step without the example adds nothing.

What a step adds is queued where it was computed, and nothing is launched or waited for. The queue is booked for many
steps at once when it is full, and before anything is read or saved.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchfil.accounting.path import due_comparisons, note_changes, path_sums
from torchfil.accounting.quantities import OWN_SUMS, Asked, Divergence, Sum, Track, TrackedQuantity, tracked
from torchfil.accounting.rows import Rows, RowTable, bytes_per_row, in_rounds

__all__ = ["Contribution", "Ledger", "Track"]

_FORMAT = 4  # of the saved state
STEPS_QUEUED = 32  # steps that are booked together
BYTES_QUEUED = 2**26  # of their additions, at most

# the examples of a batch, and by sum what is added: [batch, …], or one number for all
_Queued = tuple[Tensor, Mapping[str, Any]]


@dataclass(frozen=True)
class Contribution:
    """What one (physical) batch adds: row k belongs to example ``rows[k]``.

    Attributes:
        rows: Example numbers, [batch]; on the CPU, because booking waits for numbers on a GPU.
        squared_norm: ‖g̃‖², [batch].
        measured: Whether Fisher information was measured, or skipped at random; otherwise the step was paused for these
            examples.
        additions: What is added to each of the tracked quantities' sums, by name, [batch, …] each, already weighted by
            1/π; empty if the step was skipped at random.
        num_coordinates: How many private coordinates each example has, [batch], or one number for all; None: as many
            as the ledger.
    """

    rows: Tensor
    squared_norm: Tensor
    measured: bool = True
    additions: Mapping[str, Tensor] = field(default_factory=dict)
    num_coordinates: Tensor | int | None = None


class Ledger:
    """Sums per example: values in float64, sums for their errors in float32, counts in int32.

    Besides the sums of the trace and the tracked quantities (:mod:`torchfil.accounting.quantities`) it keeps, [n] each:
    ``participations``; ``missed``, participations in paused steps; ``squared_norm``, Σ‖g̃‖²; ``num_coordinates``, the
    largest number of private coordinates that an example was seen with (0: never seen).

    Args:
        num_examples: n.
        num_coordinates: d. If nothing is kept by coordinate, examples may have different d.
        track: What to keep besides the trace: "diagonal" (2nd numbers), "fim" (nd² numbers), "sketch" (ndr),
            "plis" (nd), or a registered quantity.
        sketch_rank: r, the number of columns of the test matrix.
        device: The device or folder that holds the sums (:class:`torchfil.accounting.rows.RowTable`).
        questions: By name, the questions whose divergences are kept.
        lazy: Whether an example gets a row when it is first drawn; None: on CPUs, with 2²⁰ examples or more.
        chosen: By the name of a tracked quantity, the only examples for which it is kept; None: all. Others read NaN.

    Attributes:
        laid_out: d of the sums by coordinate.
        device: Where the sums live.
        by_coordinate: The names of the quantities kept by coordinate.

    Example:
        >>> ledger = Ledger(num_examples=3, num_coordinates=2)
        >>> ledger.add(Contribution(torch.tensor([0, 2]), torch.ones(2)))  # a step that was skipped at random
        >>> ledger.sums["participations"].tolist()
        [1, 0, 1]
        >>> ledger
        Ledger(trace of 3 examples after 0 steps, 68 bytes per example, 0.0 MiB now)
    """

    def __init__(
        self,
        num_examples: int,
        num_coordinates: int,
        *,
        track: Collection[Track] = (),
        sketch_rank: int = 4,
        device: torch.device | str | Path = "cpu",
        questions: Mapping[str, Asked] | None = None,
        lazy: bool | None = None,
        chosen: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.num_examples = num_examples
        self.laid_out = num_coordinates
        self.questions = dict(questions or {})
        self.quantities = _quantities(track, self.questions)
        self.sketch_rank = sketch_rank
        self.steps = 0
        self.missed_steps = 0
        self.chosen = {name: examples.sort().values.cpu() for name, examples in (chosen or {}).items()}
        self.by_coordinate = tuple([quantity.name for quantity in self.quantities if quantity.by_coordinate])
        self._followed = [name for quantity in self.quantities for name in quantity.followed]
        self._unless_told = {name: value for each in self.quantities for name, value in each.unless_told.items()}
        layout = _layout(self.quantities, num_coordinates, sketch_rank)
        of_chosen = _sums_of_chosen(self.quantities, self.chosen)
        large = [each for each in self.quantities if each.by_coordinate and not each.followed]
        only_added = {name for quantity in large for name in quantity.sums(1, 1)}
        self._sums = RowTable(layout, num_examples, device, lazy=lazy, chosen=of_chosen, only_added=only_added)
        self.device = self._sums.device

        # what was added and is not booked yet
        self._queue: list[_Queued] = []
        self._looks: list[tuple[int, int, Callable[[Tensor, Tensor], object]]] = []  # after how many entries, and n
        self._steps_queued = self._bytes_queued = 0

    @staticmethod
    def bytes_needed(
        num_examples: int,
        num_coordinates: int,
        track: Collection[Track],
        sketch_rank: int,
        questions: Mapping[str, Asked] | None = None,
        num_chosen: Mapping[str, int] | None = None,
    ) -> int:
        """The memory of a ledger of this size once every example was drawn; the arguments are those of the class.

        ``num_chosen``: by quantity, the number of examples for which it is kept; it then adds 4 bytes for everybody.

        Example:
            >>> Ledger.bytes_needed(1, 10, (), 4), Ledger.bytes_needed(1, 10, ("diagonal",), 4)
            (68, 188)
        """
        some = num_chosen or {}
        of_all = [name for name in track if name not in some]
        row = bytes_per_row(_layout(_quantities(of_all, questions or {}), num_coordinates, sketch_rank))
        of_some = {
            quantity.name: bytes_per_row(quantity.sums(num_coordinates, sketch_rank))
            for quantity in tracked(some)
            if quantity.name in some
        }
        return num_examples * (row + 4 * len(some)) + sum(of_some[name] * (some[name] + 1) for name in some)

    def __repr__(self) -> str:
        """What it holds, and its memory."""
        kept = ", ".join(("trace", *self.track, *self.questions))
        return (
            f"Ledger({kept} of {self.num_examples:,} examples after {self.steps:,} steps, "
            f"{bytes_per_row(self.sums.layout):,} bytes per example, {self.sums.num_bytes / 2**20:,.1f} MiB now)"
        )

    @classmethod
    def like(cls, ledger: Ledger, num_rows: int) -> Ledger:
        """An empty ledger for the same quantities, on the CPU, with rows for all examples or for a block of them."""
        empty = cls(
            num_rows,
            ledger.laid_out,
            track=ledger.track,
            sketch_rank=ledger.sketch_rank,
            questions=ledger.questions,
            lazy=False,
            chosen=ledger.chosen,
        )
        empty.num_examples = ledger.num_examples
        empty.steps, empty.missed_steps = ledger.steps, ledger.missed_steps
        return empty

    @property
    def track(self) -> tuple[Track, ...]:
        """The names of the quantities kept besides the trace."""
        others = (quantity for quantity in self.quantities if not isinstance(quantity, Divergence))
        return tuple(quantity.name for quantity in others if quantity.name != "trace")

    @property
    def sums(self) -> RowTable:
        """All sums by name, [n, …] each, with everything that was added."""
        self.flush()
        return self._sums

    @property
    def num_coordinates(self) -> int:
        """d; the largest one, if examples differ."""
        own = self.sums.own("num_coordinates")
        return self.laid_out if self.by_coordinate or not own.any() else int(own.max())

    @property
    def same_coordinates(self) -> bool:
        """Whether all examples seen so far have the same d."""
        own = self.sums.own("num_coordinates")
        seen = own[own > 0]
        return not len(seen) or bool((seen == seen[0]).all())

    @property
    def own_coordinates(self) -> Tensor:
        """d of every example, int32 [n]; 1 for an example that was never seen."""
        return self.sums["num_coordinates"].clamp(min=1)

    def check_coordinates(self, num_coordinates: int) -> None:
        """Raise if examples with this many private coordinates do not fit the sums by coordinate."""
        if num_coordinates != self.laid_out and self.by_coordinate:
            raise ValueError(
                f"this batch has {num_coordinates} private coordinates per example, earlier ones {self.laid_out}, and "
                f"{' and '.join(self.by_coordinate)} is summed by coordinate. Declare the longest text with "
                "private=Private(max_length=…), so that all have one layout; or pad to one length, or track less"
            )

    def grow(self, num_examples: int) -> None:
        """Make room for this many examples; the new ones have not taken part yet."""
        self._sums.extend(num_examples)
        self.num_examples = max(self.num_examples, num_examples)

    def add(self, *contributions: Contribution) -> None:
        """Add the contributions of the batches of one step; each example occurs in them at most once.

        They are queued: their tensors must not change any more.

        Raises:
            ValueError: What is added to a sum has another shape than the sum; nothing of the step is added.
        """
        queued, size, layout = [], self._bytes_queued, self._sums.layout
        for each in contributions:
            size += each.squared_norm.nbytes
            for name, value in each.additions.items():
                size += value.nbytes
                if value.shape != (len(each.rows), *layout[name].shape):
                    raise ValueError(
                        f"what is added to {name!r} has shape {tuple(value.shape)}; for {len(each.rows)} examples it "
                        f"must have {(len(each.rows), *layout[name].shape)}"
                    )
            if len(each.rows):
                told = {
                    "participations": 1,
                    "missed": int(not each.measured),
                    "squared_norm": each.squared_norm,
                    "num_coordinates": self.laid_out if each.num_coordinates is None else each.num_coordinates,
                }
                queued.append((each.rows, {**told, **self._unless_told, **each.additions} if each.measured else told))
        self._queue += queued
        self._bytes_queued, self._steps_queued = size, self._steps_queued + 1
        if self._steps_queued >= STEPS_QUEUED or size >= BYTES_QUEUED:
            self.flush()

    def look_later(self, look: Callable[[Tensor, Tensor], object]) -> None:
        """Call ``look`` with the traces and d of all examples as they are now, [n] each, when the queue is booked."""
        self._looks.append((sum([len(rows) for rows, _ in self._queue]), self.num_examples, look))

    def flush(self) -> None:
        """Book what is queued; every reader does this first. After an exception all sums are as before."""
        if self._looks:
            self._look()
        if self._queue:
            self._book()
        self._queue, self._steps_queued, self._bytes_queued = [], 0, 0

    def _look(self) -> None:
        """Make the looks that are due, each at the sums that it would have found."""
        looks, self._looks = self._looks, []
        trace, own, first = self._sums["trace"].clone(), self._sums["num_coordinates"].clone(), 0
        rows = torch.cat([rows for rows, _ in self._queue] or [torch.zeros(0, dtype=torch.long)]).to(self.device)
        added, sizes = self._column("trace").to(trace.dtype), self._column("num_coordinates").to(own.dtype)
        for end, num_examples, look in looks:
            trace.index_add_(0, rows[first:end], added[first:end])
            own.scatter_reduce_(0, rows[first:end], sizes[first:end], "amax")
            look(trace[:num_examples], own[:num_examples].clamp(min=1))
            first = end

    def _book(self) -> None:
        """Add what is queued to the sums, round by round."""
        distinct, order, rounds = in_rounds(torch.cat([rows.cpu() for rows, _ in self._queue]))
        order = order.to(self.device, non_blocking=True)
        with self._sums.rows_of(distinct) as sums:
            added = {name: self._column(name)[order] for name in sums.layout}

            # numbers that are no sums: the largest d, and what depends on earlier participations
            largest, own = sums["num_coordinates"], added["num_coordinates"].to(torch.int32)
            for size, here in rounds:
                largest[:size].clamp_(min=own[here])
            added["num_coordinates"].zero_()
            for name in self._followed:
                _follow(name, sums, added, rounds)

            # plain sums
            for dtype, block in sums.blocks.items():
                values = sums.side_by_side(dtype, added)
                for size, here in rounds:
                    block[:size].add_(values[here])

            # large sums batch by batch: what is added to them is never copied into one tensor
            for name in self._sums.apart:
                for rows, told in self._queue:
                    if name in told:
                        self._sums.add(name, rows, told[name])

    def _column(self, name: str) -> Tensor:
        """What is queued for a sum, [entries, …], on its device."""
        shape, numbers = self._sums.layout[name].shape, [told.get(name, 0) for _, told in self._queue]
        tensors = [number for number in numbers if isinstance(number, Tensor)]
        if tensors:
            parts = [
                number if isinstance(number, Tensor) else tensors[0].new_full((len(rows), *shape), number)
                for (rows, _), number in zip(self._queue, numbers, strict=True)
            ]
            return torch.cat(parts).to(self.device)
        sizes = [len(rows) for rows, _ in self._queue]
        column = torch.tensor(numbers, dtype=torch.float64).repeat_interleave(torch.tensor(sizes, dtype=torch.long))
        column = column.view(-1, *(1,) * len(shape)).expand(-1, *shape)
        return column.to(self.device, non_blocking=True)

    def state_dict(self) -> dict[str, Any]:
        """Everything, as tensors and plain numbers."""
        return {
            "format": _FORMAT,
            "num_examples": self.num_examples,
            "num_coordinates": self.num_coordinates,
            "track": list(self.track),
            "sketch_rank": self.sketch_rank,
            "questions": {name: [list(asked.answers), asked.complete] for name, asked in self.questions.items()},
            "steps": self.steps,
            "missed_steps": self.missed_steps,
            "sums": {name: self.sums.kept(name).clone() for name in self.sums},
            **({"chosen": dict(self.chosen)} if self.chosen else {}),
        }

    @classmethod
    def from_state_dict(
        cls, state: Mapping[str, Any], device: torch.device | str | Path = "cpu", *, lazy: bool | None = None
    ) -> Ledger:
        """The ledger with this state.

        Args:
            state: From :meth:`state_dict`.
            device: As for a new ledger.
            lazy: As for a new ledger.

        Raises:
            ValueError: It was saved by another version, or something is missing or has the wrong shape.
        """
        if state.get("format") != _FORMAT:
            raise ValueError(
                f"the ledger's state has format {state.get('format', 1)}, and this version of torchfil reads "
                f"{_FORMAT} only; load it with the version that saved it"
            )

        questions = state.get("questions", {})
        try:
            ledger = cls(
                state["num_examples"],
                state["num_coordinates"],
                track=state["track"],
                sketch_rank=state["sketch_rank"],
                device=device,
                questions={name: Asked(tuple(answers), complete) for name, (answers, complete) in questions.items()},
                lazy=lazy,
                chosen=state.get("chosen"),
            )
            ledger.steps, ledger.missed_steps = int(state["steps"]), int(state["missed_steps"])
            sums = state["sums"]
            for name, each in ledger.sums.layout.items():
                _check_shape(name, sums[name], (len(ledger.sums.kept(name)), *each.shape))
            ledger.sums.load(sums, sums["participations"] > 0)
        except KeyError as error:
            raise ValueError(f"the ledger's state lacks {error.args[0]!r}; was it saved by another version?") from error
        return ledger


def _quantities(track: Collection[Track], questions: Mapping[str, Asked]) -> tuple[TrackedQuantity, ...]:
    """The kept quantities: the trace, tracked quantities, and the divergences of the questions."""
    return (*tracked(track), *(Divergence(name, asked) for name, asked in questions.items()))


def _sums_of_chosen(quantities: Iterable[TrackedQuantity], chosen: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By sum, the examples that have it, for quantities that are kept for chosen examples.

    Raises:
        ValueError: A quantity is not kept, or every example needs it.
    """
    by_name = {quantity.name: quantity for quantity in quantities if not quantity.followed}
    unknown = chosen.keys() - by_name.keys()
    if unknown:
        raise ValueError(
            f"track={sorted(unknown)} cannot be kept for chosen ids; choose from {', '.join(by_name) or 'nothing'}"
        )
    return {sum_: examples for name, examples in chosen.items() for sum_ in by_name[name].sums(1, 1)}


def _layout(quantities: Iterable[TrackedQuantity], num_coordinates: int, sketch_rank: int) -> dict[str, Sum]:
    """All sums, by name."""
    layout: dict[str, Sum] = {}
    for quantity in quantities:
        layout |= quantity.sums(num_coordinates, sketch_rank)
    return layout | OWN_SUMS


def _check_shape(name: str, value: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(value.shape) != expected:
        raise ValueError(f"the ledger's {name!r} has shape {tuple(value.shape)}, expected {expected}")


def _follow(name: str, sums: Rows, added: dict[str, Tensor], rounds: Sequence[tuple[int, slice]]) -> None:
    """Book the path of a sum, before it is booked how often it was measured; nothing else is added to its state."""
    _, last, changes, measured = path_sums(name)
    is_measured = added[measured] > 0  # the step was not skipped
    count, before = sums[measured].clone(), []
    for size, here in rounds:
        before.append(count[:size].clone())
        count[:size].add_(is_measured[here])
    is_due, distance = due_comparisons(torch.cat(before))
    is_due &= is_measured
    compared, change, value, noise = sums[last], sums[changes], added[last], added[changes]
    for size, here in rounds:
        note_changes(compared[:size], change[:size], value[here], noise[here], is_due[here], distance[here])
    added[last], added[changes] = torch.zeros_like(value), torch.zeros_like(noise)
