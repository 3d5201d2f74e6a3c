"""Does a step get the batch that was read, with each example in its own row?"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchfil.engine.batches import BatchTracker
from torchfil.engine.loader import split_batch
from torchfil.engine.options import RunOptions
from torchfil.engine.replica import Replica
from torchfil.engine.step.forwards import ForwardPass
from torchfil.engine.step.rows import how_rows_mix
from torchfil.private import as_call
from torchfil.utils.deferred import read_later
from torchfil.utils.trees import map_tensors, tensors_of

__all__ = ["STEPS_BETWEEN_LOOKS", "BatchChecks", "nothing"]

logger = logging.getLogger(__name__)

STEPS_BETWEEN_LOOKS = 128  # steps between expensive checks; they are more frequent at the start


def nothing() -> None:
    """Nothing to check."""


class BatchChecks:
    """Compares the model's inputs with the batches from the loader.

    Args:
        replica: The model.
        options: How the run is accounted for.
        tracker: Knows which batches were read.
    """

    def __init__(self, replica: Replica, options: RunOptions, tracker: BatchTracker) -> None:
        self.replica = replica
        self.options = options
        self.tracker = tracker
        self._until_rows = self._row_looks = 0
        self._told_view = False

    def moved(self, tree: Any) -> Any:
        """The same, with its tensors on the model's device."""
        return map_tensors(lambda leaf: leaf.to(self.replica.device), tree)

    def begin_batch_check(self, inputs: Any, targets: Any) -> Callable[[], None]:
        """Begin to check whether a step got an earlier batch than the last one read; the result raises if so.

        Inputs decide, or targets if the inputs match no batch (they were augmented). A match with the last batch is
        right, a match with an earlier batch is wrong, and anything else passes. The first and last rows are compared.
        """
        now, given = _tensors(self.replica.examples_first(self.tracker.batch)), _tensors(inputs)
        if any(a.data_ptr() == b.data_ptr() and a.shape == b.shape for a in given for b in now):
            return nothing
        kinds = {(leaf.shape, leaf.dtype) for leaf in (*given, *_tensors(targets))}
        before = [
            leaf
            for batch in self.tracker.earlier
            for leaf in _tensors(self.replica.examples_first(batch))
            if (leaf.shape, leaf.dtype) in kinds
        ]
        if not before:
            return nothing

        device = self.replica.device
        alike = [_any_alike(part, leaves, device) for part in (given, _tensors(targets)) for leaves in (now, before)]
        answers = read_later(torch.stack(alike))

        def confirm() -> None:
            input_is_last, input_is_earlier, target_is_last, target_is_earlier = answers().tolist()
            if not input_is_last and (input_is_earlier or (target_is_earlier and not target_is_last)):
                raise RuntimeError(
                    "the step got a batch that was read before the last one, and would be recorded for the last one's "
                    "examples: was another batch read meanwhile (a prefetcher, an evaluation on the same loader)? "
                    "Read a batch, take its step, then read the next. This step was not taken."
                )

        return confirm

    def check_rows(self, forward: ForwardPass) -> None:
        """Now and then, raise if the model's inputs are made from several rows of the batch that was read.

        If each row was changed on its own, this is logged once: the numbers are about the view that the model saw.

        Raises:
            RuntimeError: The rows are mixed; it says how: mixup, another order, statistics of the batch.
        """
        self._until_rows -= 1
        if self._until_rows >= 0 or self.options.batch_to_inputs is not None:
            return
        self._row_looks += 1
        self._until_rows = min(2**self._row_looks, STEPS_BETWEEN_LOOKS)

        own = False  # whether an input comes from the loader
        for given in _tensors((forward.args, forward.kwargs)):
            for rows in _tensors(self.replica.examples_first(forward.batch)):
                if given.shape != rows.shape or given.dtype != rows.dtype:
                    continue
                how = how_rows_mix(given, rows.to(given.device))
                if how is not None:
                    self._until_rows = 0
                    raise RuntimeError(
                        f"the model's inputs are {how}: an example then enters another example's row, its gradient is "
                        "not bounded by max_grad_norm, and what leaks about it is not accounted for. Make each row of "
                        "the model's inputs from its own example alone; augmentations of single examples are fine. "
                        "This step was not taken."
                    )
                own = own or given is rows or torch.equal(given, rows.to(given.device))
        if not own and _tensors(forward.batch) and not self._told_view:
            self._told_view = True
            logger.info(
                "the model's inputs are not the rows that the loader gave (an augmentation in the loop?): the numbers "
                "are about the views that the model saw, as they were drawn"
            )

    def check_calls_for_refresh(self, forward: ForwardPass) -> None:
        """Raise if norms must be refreshed, but the loop calls the model with inputs that are not a batch's."""
        every = self.options.accounting.norm_refresh
        if every is None:
            return
        args, kwargs = as_call(split_batch(forward.batch, self.options.batch_to_inputs)[0])
        if len(args) + len(kwargs) != len(forward.args) + len(forward.kwargs):
            raise ValueError(
                f"norm_refresh={every} calls the model with everything in a batch except its targets ({len(args)} "
                f"positional inputs, {sorted(kwargs)} by name), the loop with {len(forward.args)} and "
                f"{sorted(forward.kwargs)}; pass batch_to_inputs=a function that maps a batch to (inputs, targets)"
            )


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tensors_of(tree) if leaf.ndim and len(leaf)]


def _looked_at(leaf: Tensor) -> Tensor:
    """The numbers to compare: all of a vector; the first and the last row of anything larger."""
    return leaf if leaf.ndim == 1 else leaf[[0, -1]]


def _any_alike(some: list[Tensor], others: list[Tensor], device: torch.device) -> Tensor:
    """Whether any two, on ``device``, have the same shape, dtype and numbers; see ``_looked_at``.

    A constant tensor, such as labels of a single class, does not count.
    """
    pairs = [
        (_looked_at(a), _looked_at(b).to(device))
        for a in some
        for b in others
        if a.shape == b.shape and a.dtype == b.dtype
    ]
    alike = [(a == b).all() & (a != a.flatten()[0]).any() for a, b in pairs]
    return torch.stack(alike).any() if alike else torch.zeros((), dtype=torch.bool, device=device)
