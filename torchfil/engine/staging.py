"""The current logical batch: what its physical batches add, kept until they are released under one draw of noise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from torchfil.accounting.ledger import Contribution
from torchfil.engine.distributed.ranks import Ranks, StepNotTakenError
from torchfil.engine.optimizer import FILOptimizer
from torchfil.engine.step.forwards import ForwardPass

__all__ = ["LogicalBatch", "Noise", "Staged"]


@dataclass(frozen=True)
class Noise:
    """σ and C of a release."""

    noise_multiplier: float
    max_grad_norm: float

    @classmethod
    def of(cls, optimizer: FILOptimizer) -> Noise:
        """The optimizer's current values."""
        return cls(float(optimizer.noise_multiplier), float(optimizer.max_grad_norm))


@dataclass(frozen=True)
class Staged:
    """A physical batch whose logical batch has not been released yet."""

    contribution: Contribution  # in a stream, new examples get their rows when they are booked
    ratio: Tensor  # ‖g̃‖/C, [batch]
    ids: Sequence[Any]
    noise: Noise


class LogicalBatch:
    """The physical batches that were staged since the last release.

    Args:
        ranks: The processes whose batches may hold the same example; None: a single one, or Poisson sampling from
            separate parts of the data.

    Attributes:
        parts: What was staged, in order.
        is_measured: Whether the step is measured, drawn once for a logical batch; None: not drawn yet.
    """

    def __init__(self, ranks: Ranks | None = None) -> None:
        self._ranks = ranks
        self.parts: list[Staged] = []
        self.is_measured: bool | None = None
        self._keys: list[Hashable] | None = None  # of all ranks; None: not exchanged yet

    def clear(self) -> None:
        """Forget what was staged: it was booked, or the logical batch was given up."""
        self.parts = []
        self.is_measured = self._keys = None

    @property
    def ids(self) -> list[Any]:
        """The examples of this process."""
        return [key for staged in self.parts for key in staged.ids]

    def check_noise(self, optimizer: FILOptimizer) -> Noise:
        """σ and C; refused if they have changed within a logical batch, which is released under one noise."""
        noise = Noise.of(optimizer)
        for staged in self.parts:
            if staged.noise != noise:
                before = (staged.noise.noise_multiplier, staged.noise.max_grad_norm)
                raise RuntimeError(
                    f"noise_multiplier and max_grad_norm changed from {before} to "
                    f"{(noise.noise_multiplier, noise.max_grad_norm)} within one logical batch: step their schedulers "
                    "only after a whole one. Restore the values, or call optimizer.discard_partial_batch(). This step "
                    "was not taken."
                )
        return noise

    def check_ids(self, forwards: Sequence[ForwardPass], num_gradients: int) -> list[int]:
        """The numbers of the examples in these passes, checked against the gradients and what is staged."""
        if not forwards and num_gradients:
            raise RuntimeError(
                "optimizer.step() was called with gradients that did not come through the private model's output; call "
                "the model that make_private returned, then loss.backward()"
            )
        ids: list[int] = []
        for forward in forwards:
            if forward.ids is None:
                raise RuntimeError(
                    "the model was trained on a batch that did not come from the loader that make_private returned, so "
                    "its examples are unknown; iterate over that loader"
                )
            ids += forward.ids
        if not ids and num_gradients <= 1:  # an empty batch, or Opacus's random row for one (rand_on_empty): nobody
            return ids
        if len(ids) != num_gradients:
            raise RuntimeError(
                f"{len(ids)} examples were seen in {len(forwards)} forward passes, but there are {num_gradients} "
                "per-example gradients. Call the model once per batch, with the whole batch; to use it on parts or "
                "twice, put both calls into one module. Examples must lie along the first dimension of the model's "
                "outputs, and of its inputs unless batch_first=False."
            )

        together = [*ids, *self.ids]
        if len(set(together)) < len(together):
            raise RuntimeError(
                "an example occurs twice under one draw of noise: its gradient would count twice. Check the sampler "
                "(no replacement within a batch), and do not accumulate gradients over passes that share examples."
            )
        return ids

    def settle_ids(self) -> None:
        """Tell all ranks which examples take part in this step (collective, unless batches are Poisson draws).

        Raises:
            StepNotTakenError: On all ranks, if two of them have the same example.
        """
        if self._ranks is None:
            self._keys = self.ids
            return
        by_rank = self._ranks.objects(self.ids)
        self._keys = [key for keys in by_rank for key in keys]
        if len(set(self._keys)) < len(self._keys):
            twice = next(key for key, count in Counter(self._keys).items() if count > 1)
            raise StepNotTakenError(
                f"example {twice!r} is in this step's batches of ranks "
                f"{[rank for rank, keys in enumerate(by_rank) if twice in keys]}: its gradient would count twice under "
                "one draw of noise. Give every rank its own shards (the same sampler.set_epoch on all). This "
                "step was not taken."
            )

    def ids_of_all(self) -> list[Hashable]:
        """Who takes part in this step, on all ranks; they exchange this before it is released."""
        if self._keys is None:
            self.settle_ids()
        assert self._keys is not None
        return self._keys

    def place(self, rows_of: Callable[[Sequence[Any]], Tensor]) -> None:
        """Give the examples of a stream their rows."""
        self.parts = [
            replace(staged, contribution=replace(staged.contribution, rows=rows_of(staged.ids)))
            for staged in self.parts
        ]
