"""Passes that run out of memory are discarded and repeated in pieces of half the size."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from torchfil.engine.measure import Wanted
from torchfil.fisher.batch import PrivateBatch
from torchfil.fisher.estimators import get_estimator
from torchfil.fisher.recording import Plan
from torchfil.fisher.recording.graphs import release_memory
from torchfil.utils.errors import ran_out

__all__ = ["PassMemory", "is_recorded", "passes_within", "recorded_pass_within"]

logger = logging.getLogger(__name__)

T = TypeVar("T")
Passes = Sequence[tuple[int, int]]  # over one batch: examples at once, and bytes per example
Cut = Callable[[int], Passes]  # from a limit in bytes


class PassMemory:
    """The bytes that a pass over examples may hold at once; fewer once a pass has run out of memory.

    Guarantees:
        * A pass that ran out of memory leaves nothing behind: no number and no entry in the ledger. Its seeds determine
          its probes, so that the repeated pass gives the same numbers up to rounding.
        * If not even one example fits, the limit stays as it was, and the error says so.

    Args:
        limit: The bytes.

    Attributes:
        limit: The bytes now.

    Example:
        >>> memory = PassMemory(1000)
        >>> memory.room(100), memory.room(4000)
        (10, 1)
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._told = False

    def room(self, bytes_per_example: int) -> int:
        """How many examples a pass may hold at once."""
        return max(1, self.limit // max(1, bytes_per_example))

    def repeated(self, attempt: Callable[[], T], cut: Cut) -> T:
        """The result of ``attempt()``, repeated with half as many examples at once while it runs out of memory.

        Args:
            attempt: Passes over a batch, within the limit at the time of the call.
            cut: How a limit cuts that batch.

        Raises:
            torch.OutOfMemoryError: The batch cannot be cut further.
        """
        before = self.limit
        while True:
            try:
                return attempt()
            except RuntimeError as error:
                if not ran_out(error):
                    raise
                reason = str(error)
            # only here is the error gone, whose traceback held everything that the pass had allocated
            if not self.halve(cut, reason):
                self.limit = before
                raise torch.OutOfMemoryError(
                    f"the pass over one example ran out of memory ({_shortened(reason)}). Nothing was recorded, and "
                    "the step was not taken. Free memory on that device, track less (track=()), or use fewer probes "
                    "(num_probes=)."
                )

    def halve(self, cut: Cut, reason: str) -> bool:
        """Let a pass hold half as much; False if it held only one example.

        Args:
            cut: How a limit cuts the batch that ran out of memory.
            reason: The device's message.
        """
        held = cut(self.limit)
        limit = min(self.limit, max(examples * size for examples, size in held)) // 2
        pieces = cut(limit)
        if pieces == held:
            return False
        self.limit = limit
        release_memory()

        # warn the first time: from now on every step takes longer
        was, now = (max(examples for examples, _ in passes) for passes in (held, pieces))
        text = f"a pass over {was} examples ran out of memory ({_shortened(reason)}) and is repeated with {now} at once"
        logger.info(text)
        if not self._told:
            self._told = True
            warnings.warn(
                f"{text}, as later ones will be. The numbers are the same up to rounding; "
                f"Execution(max_memory={limit}) starts with that size.",
                stacklevel=2,
            )
        return True


def passes_within(limit: int, batch: PrivateBatch, wanted: Wanted) -> Passes:
    """The passes over a batch within this many bytes: recorded, mapped over examples, or one of each."""
    passes = []
    if is_recorded(batch):
        assert batch.plan is not None
        passes.append(recorded_pass_within(limit, len(batch.gradients), batch.plan))
    if not passes or not get_estimator(wanted.estimator).one_pass or wanted.test_matrix is not None:
        gradients = batch.gradients
        vectors = batch.working_vectors(wanted.estimator, limit)[1]
        size = vectors * gradients.num_parameters * gradients.dtype.itemsize
        passes.append((min(len(gradients), max(1, limit // size)), size))
    return passes


def recorded_pass_within(limit: int, count: int, tried: Plan) -> tuple[int, int]:
    """How many of ``count`` examples a recorded pass holds at once within this many bytes, and the bytes of one."""
    size = max(1, tried.bytes_per_example)
    return min(count, max(1, limit // size)), size


def is_recorded(batch: PrivateBatch) -> bool:
    """Whether a recorded pass serves the batch."""
    return batch.plan is not None and batch.plan.fits


def _shortened(reason: str) -> str:
    return reason.partition("\n")[0][:200]
