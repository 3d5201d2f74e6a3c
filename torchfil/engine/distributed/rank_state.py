"""The state of a run with several ranks: one for all of them, from which any number of ranks can resume.

It holds the sums of all ranks, and which rank booked each example. The same number of ranks therefore resumes with the
same rows and generators, bit for bit if each draws from its own part of the data. With another number of ranks, rank 0
takes all rows; sums over ranks are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from torchfil.accounting.combining import Parts, whole_ledger
from torchfil.accounting.ledger import Ledger
from torchfil.engine.distributed.ranks import Ranks
from torchfil.utils.noise import derived_seed
from torchfil.utils.trees import map_tensors

__all__ = ["RowBlocks", "Whole", "take_part"]


class RowBlocks:
    """The ranks' parts of all n rows, combined in blocks: each rank has one block (:class:`Parts`, collective).

    No rank ever holds more than n rows of one tensor. Blocks are those of ``torch.chunk``.

    Args:
        ranks: The processes.
        num_rows: n.
    """

    def __init__(self, ranks: Ranks, num_rows: int) -> None:
        self._ranks, self._num_rows = ranks, num_rows
        longest = -(-num_rows // ranks.size)
        ends = [min(num_rows, longest * rank) for rank in range(ranks.size + 1)]
        self._sizes = [end - start for start, end in pairwise(ends)]
        self._own = slice(ends[ranks.rank], ends[ranks.rank + 1])

    def each(self, value: Tensor) -> list[Tensor]:
        """Each rank's rows of this rank's block, in order."""
        return self._ranks.dealt(value, self._sizes)

    def sum(self, value: Tensor) -> Tensor:
        """Σ over the ranks, [block, …]."""
        return torch.stack(self.each(value)).sum(dim=0)

    def maximum(self, value: Tensor) -> Tensor:
        """The largest over the ranks, [block, …]."""
        return torch.stack(self.each(value)).amax(dim=0)

    def together(self, block: Tensor) -> Tensor:
        """The blocks of all ranks as one tensor, [n, …]."""
        return self._ranks.as_blocks(block, self._num_rows)

    def shared(self, tree: Any) -> Any:
        """The same, where tensors [n, …] that are equal on all ranks are kept in blocks."""

        def share(leaf: Tensor) -> Tensor:
            is_by_row = leaf.ndim > 0 and len(leaf) == self._num_rows
            return self.together(leaf[self._own].cpu().clone()) if is_by_row else leaf

        return map_tensors(share, tree)


@dataclass(frozen=True)
class Whole:
    """What all ranks had booked when they were last combined.

    Attributes:
        steps: The number of steps taken.
        ledger: The sums of all ranks, on the CPU; None if nobody was drawn yet.
        test_matrix: The test matrix of its sketch, if there is one.
        parts: The rest of the state: the seed, each example's rank, [n], and the ranks' sources of probes.
    """

    steps: int
    ledger: Ledger | None
    test_matrix: Tensor | None
    parts: dict[str, Any]

    @classmethod
    def of(
        cls,
        ranks: Ranks,
        steps: int,
        ledger: Ledger | None,
        test_matrix: Tensor | None,
        new_ledger: Callable[[int], tuple[Ledger, Tensor | None]],
        generator: torch.Generator,
        blocks: Parts | None = None,
    ) -> Whole:
        """Combine the parts (collective).

        Args:
            ranks: The processes.
            steps: The number of steps taken.
            ledger: This rank's ledger; None if it has none.
            test_matrix: The test matrix of its sketch.
            new_ledger: Returns an empty ledger for d coordinates.
            generator: This rank's source of probes.
            blocks: The blocks of rows, if each rank gets one; None: each gets all rows.
        """
        parts: dict[str, Any] = {"seed": ranks.seed, "generators": ranks.each(generator.get_state())}
        sizes = [size for size in ranks.objects(None if ledger is None else ledger.laid_out) if size is not None]
        if not sizes:
            return cls(steps, None, None, parts)
        if ledger is None:  # this rank has had only empty batches
            ledger, test_matrix = new_ledger(max(sizes))
        rows = ranks if blocks is None else blocks
        parts["booked_by"] = torch.stack(rows.each(ledger.sums["participations"])).argmax(dim=0).short()
        return cls(steps, whole_ledger(ledger, rows), test_matrix, parts)


def take_part(
    ranks: Ranks, saved: Mapping[str, Any] | None, ledger: Ledger | None, steps: int, generator: torch.Generator
) -> None:
    """Keep in a ledger of all ranks only the rows that this rank has booked, and set its generator.

    Args:
        ranks: The processes.
        saved: ``Whole.parts``; None: the state of a single process.
        ledger: The sums of all ranks; changed in place.
        steps: The number of steps taken.
        generator: This rank's source of probes, set to rank 0's state.
    """
    ranks.seed, ranks.is_lost = saved["seed"] if saved is not None else ranks.seed, False
    state = ranks.own(saved["generators"]) if saved is not None else None
    if state is not None:
        generator.set_state(state.cpu())
    elif ranks.rank > 0:
        generator.manual_seed(derived_seed(ranks.seed, f"probes from step {steps}", ranks.rank))
    if ledger is not None:
        is_own = torch.full((ledger.num_examples,), ranks.rank == 0)
        if saved is not None and state is not None and "booked_by" in saved:
            is_own = saved["booked_by"].cpu() == ranks.rank
        ledger.sums.keep_only(is_own)
