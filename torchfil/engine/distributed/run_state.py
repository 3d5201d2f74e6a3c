"""A run's saved state: whether it belongs to this run, what is read from it, and its rows in blocks over ranks."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchfil.accounting.ids import ExampleIds, GrowingIds
from torchfil.accounting.ledger import Ledger
from torchfil.engine.clip_weights import check_same_weights
from torchfil.engine.distributed.rank_state import RowBlocks
from torchfil.engine.distributed.ranks import Ranks
from torchfil.engine.options import Accounting

__all__ = ["check_same_run", "loaded_ids", "loaded_ledger", "with_blocks"]

_NEEDED = ("ledger", "history", "timeline", "test_matrix", "generator", "pace")


def check_same_run(state: Mapping[str, Any], clip_weights: Tensor | None, ids: ExampleIds) -> None:
    """Raise unless a state is complete, and has this run's weights, [n]."""
    missing = [key for key in _NEEDED if key not in state]
    if missing:
        raise ValueError(f"the run's state lacks {missing}; was it saved by another version?")
    check_same_weights(state.get("clip_weights"), clip_weights, ids)


def loaded_ledger(
    state: Mapping[str, Any],
    place: torch.device | Path,
    accounting: Accounting,
    ids: ExampleIds,
    chosen: Mapping[str, Tensor],
) -> Ledger:
    """The ledger of a saved run, if it is of the same data set and keeps what this run keeps.

    ``chosen``: by tracked quantity, the rows for which this run keeps it, ascending, if these are not all.
    """
    ledger, track = Ledger.from_state_dict(state, place), tuple(accounting.track)
    if not isinstance(ids, GrowingIds) and ledger.num_examples != ids.num_examples:
        raise ValueError(f"the saved ledger has {ledger.num_examples} examples, the data set {ids.num_examples}")
    if set(ledger.track) != set(track):
        raise ValueError(f"the saved ledger tracks {ledger.track}, this run {track}; pass the same track=")
    if chosen.keys() != ledger.chosen.keys() or any(
        not torch.equal(rows, ledger.chosen[name]) for name, rows in chosen.items()
    ):
        raise ValueError("the saved ledger tracks other ids than this run; pass the same track=")
    if ledger.questions != accounting.asked:
        raise ValueError(
            f"the saved ledger has the questions {ledger.questions}, this run {accounting.asked}; pass the same "
            "questions="
        )
    return ledger


def loaded_ids(keys: Sequence[Hashable] | None, ids: ExampleIds) -> ExampleIds:
    """The examples' names of a saved run, whose state has the keys of a stream; ``ids`` are those of this run."""
    grows = isinstance(ids, GrowingIds)
    if grows != (keys is not None):
        kinds = "a stream", "a data set with numbered examples"
        raise ValueError(f"the saved run was on {kinds[keys is None]}, this one is on {kinds[not grows]}")
    return ids if keys is None else GrowingIds(keys)


def with_blocks(state: dict[str, Any], blocks: RowBlocks, ranks: Ranks) -> dict[str, Any]:
    """A state whose ledger was combined in blocks, with all its rows as distributed tensors (collective)."""
    shared = {name: blocks.shared(state[name]) for name in ("history", "clip_weights")}
    ledger, parts = state["ledger"], state["ranks"]
    if ledger is not None:
        together = {name: blocks.together(value) for name, value in ledger["sums"].items()}
        ledger = {**ledger, "num_coordinates": max(ranks.objects(ledger["num_coordinates"])), "sums": together}
        parts = {**parts, "booked_by": blocks.together(parts["booked_by"])}
    return {**state, **shared, "ledger": ledger, "ranks": parts}
