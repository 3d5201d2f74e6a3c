"""Running sums of Fisher information by example, over the steps of a training run.

By Theorem 3 of Guo et al. 2022 the sum over the steps of a realised run is an unbiased estimate of an upper
bound on the Fisher information of the trained model; a step without the example adds nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchfil.accounting.contributions import Contribution
from torchfil.accounting.divergences import Asked, Divergence
from torchfil.accounting.packed import BatchRows, bytes_per_row
from torchfil.accounting.path import follow, path_state
from torchfil.accounting.quantities import OWN_SUMS, Sum, Track, TrackedQuantity, tracked
from torchfil.accounting.rows import RowTable

__all__ = ["Ledger", "Track"]

_FORMAT = 4  # of the saved state
_WITHOUT_OWN_COORDINATES = 3  # an earlier one, in which all examples have as many


class Ledger:
    """Sums per example: values in float64, what tells of their errors in float32, counts in int32.

    Besides those of the trace and of what is tracked (:mod:`torchfil.accounting.quantities`) it keeps, [n] each:
    ``participations``; ``missed``, those in steps that were paused; ``squared_norm``, Σ‖g̃‖²; ``num_coordinates``, how
    many private coordinates an example has, the most that it was seen with (0: it was never seen).

    Args:
        num_examples: n.
        num_coordinates: d. Examples may have others, where nothing is kept by coordinate.
        track: What to keep besides the trace: "diagonal" (2nd numbers), "fim" (nd² numbers), "sketch" (ndr),
            "plis" (nd), or a registered quantity.
        sketch_rank: r, the number of columns of the test matrix.
        device: A device or a folder, where the sums lie (:class:`torchfil.accounting.rows.RowTable`).
        questions: By name those whose divergences are kept.
        lazy: Whether an example gets a row when it is first drawn; None: on CPUs, from 2²⁰ examples on.
        chosen: By the name of a tracked quantity, the only examples of whom it is kept; None: of all. Others read NaN.

    Attributes:
        laid_out: d of what is kept by coordinate.

    Example:
        >>> ledger = Ledger(num_examples=3, num_coordinates=2)
        >>> after = ledger.add(Contribution(torch.tensor([0, 2]), torch.ones(2)))  # a step that was skipped at random
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
        layout = _layout(self.quantities, num_coordinates, sketch_rank)
        of_chosen = _sums_of_chosen(self.quantities, self.chosen)
        large = [each for each in self.quantities if each.by_coordinate and not each.followed]
        only_added = {name for quantity in large for name in quantity.sums(1, 1)}
        self.sums = RowTable(layout, num_examples, device, lazy=lazy, chosen=of_chosen, only_added=only_added)

    @staticmethod
    def bytes_needed(
        num_examples: int,
        num_coordinates: int,
        track: Collection[Track],
        sketch_rank: int,
        questions: Mapping[str, Asked] | None = None,
        num_chosen: Mapping[str, int] | None = None,
    ) -> int:
        """How much memory a ledger of that size takes, once every example was drawn; see the class for arguments.

        ``num_chosen``: by quantity, of how many examples it is kept; each then has 4 bytes of everybody.

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
        """What it holds, and what that takes."""
        kept = ", ".join(("trace", *self.track, *self.questions))
        return (
            f"Ledger({kept} of {self.num_examples:,} examples after {self.steps:,} steps, "
            f"{bytes_per_row(self.sums.layout):,} bytes per example, {self.sums.num_bytes / 2**20:,.1f} MiB now)"
        )

    @classmethod
    def like(cls, ledger: Ledger, num_rows: int) -> Ledger:
        """An empty one for the same quantities, on the CPU, with rows for all examples or for a block of them."""
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
        """The names of what is kept besides the trace."""
        others = (quantity for quantity in self.quantities if not isinstance(quantity, Divergence))
        return tuple(quantity.name for quantity in others if quantity.name != "trace")

    @property
    def device(self) -> torch.device:
        """Where the sums live."""
        return self.sums.device

    @property
    def num_coordinates(self) -> int:
        """d; the largest, where examples have different ones."""
        own = self.sums.own("num_coordinates")
        return self.laid_out if self.by_coordinate or not own.any() else int(own.max())

    @property
    def own_coordinates(self) -> Tensor:
        """d of every example, int32 [n]; 1 of one that was never seen."""
        return self.sums["num_coordinates"].clamp(min=1)

    @property
    def by_coordinate(self) -> tuple[str, ...]:
        """The names of what is kept by coordinate."""
        return tuple(quantity.name for quantity in self.quantities if quantity.by_coordinate)

    def check_coordinates(self, num_coordinates: int) -> None:
        """Raise where examples with so many private coordinates do not fit the sums by coordinate."""
        if num_coordinates != self.laid_out and self.by_coordinate:
            raise ValueError(
                f"this batch has {num_coordinates} private coordinates per example, earlier ones {self.laid_out}, and "
                f"{' and '.join(self.by_coordinate)} is summed by coordinate. Declare the longest text with "
                "private=Private(max_length=…), so that all have one layout; or pad to one length, or track less"
            )

    def grow(self, num_examples: int) -> None:
        """Make room for so many examples; the new ones have taken part in nothing."""
        self.sums.extend(num_examples)
        self.num_examples = max(self.num_examples, num_examples)

    def add(self, *contributions: Contribution) -> Mapping[str, Tensor]:
        """Add what the batches of one step contribute, at least one; each example occurs at most once in them.

        Returns the sums of these examples after it, [examples, …] each, on the device of the contributions: all that
        lie side by side, so none of those by coordinate.
        """
        examples = torch.cat([contribution.rows.to(self.device) for contribution in contributions])
        with self.sums.rows_of(examples, contributions[0].squared_norm.device) as sums:
            sizes = [len(contribution.rows) for contribution in contributions]
            for contribution, own in zip(contributions, sums.split(sizes), strict=True):
                self._book(contribution, own)
        return sums

    def _book(self, contribution: Contribution, sums: BatchRows) -> None:
        """Add what one batch contributes to the sums of its examples."""
        sums["participations"].add_(1)
        sums.add("squared_norm", contribution.squared_norm)
        own = self.laid_out if contribution.num_coordinates is None else contribution.num_coordinates
        sums["num_coordinates"].clamp_(min=own.to(sums.device, torch.int32) if isinstance(own, Tensor) else own)
        if not contribution.measured:
            sums["missed"].add_(1)
            return

        # what depends on the participation before comes first
        additions = contribution.additions
        followed = [name for quantity in self.quantities for name in quantity.followed]
        for name in followed:
            follow(name, sums, additions)
        booked = {state for name in followed for state in path_state(name)}
        for name, value in additions.items():
            if name not in booked:
                sums.add(name, value)
        for quantity in self.quantities:
            for name, number in quantity.unless_told.items():
                if name not in additions:
                    sums.add(name, torch.full((), number, dtype=torch.float64, device=sums.device))

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
        """The ledger whose state that is.

        Args:
            state: Of :meth:`state_dict`.
            device: As of a new one.
            lazy: As of a new one.

        Raises:
            ValueError: If it was saved by another version, something is missing or has the wrong shape.
        """
        if state.get("format") not in (_FORMAT, _WITHOUT_OWN_COORDINATES):
            raise ValueError(
                f"the ledger's state has format {state.get('format', 1)}, and this version of torchfil reads "
                f"{_WITHOUT_OWN_COORDINATES} and {_FORMAT} only; load it with the version that saved it"
            )

        # what earlier states do not have yet is as if nobody had asked for it
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
            if state["format"] == _WITHOUT_OWN_COORDINATES:
                sums = {**sums, "num_coordinates": (sums["participations"] > 0) * state["num_coordinates"]}
            for name, each in ledger.sums.layout.items():
                _check_shape(name, sums[name], (len(ledger.sums.kept(name)), *each.shape))
            ledger.sums.load(sums, sums["participations"] > 0)
        except KeyError as error:
            raise ValueError(f"the ledger's state lacks {error.args[0]!r}; was it saved by another version?") from error
        return ledger


def _quantities(track: Collection[Track], questions: Mapping[str, Asked]) -> tuple[TrackedQuantity, ...]:
    """What is kept: the trace, what is tracked, and the divergences of the questions."""
    return (*tracked(track), *(Divergence(name, asked) for name, asked in questions.items()))


def _sums_of_chosen(quantities: Iterable[TrackedQuantity], chosen: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By sum, the examples that have it, of quantities that are kept of chosen examples.

    Raises:
        ValueError: Where a quantity is not kept, or every example needs it.
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
