"""Streams: data sets without a length or random access, whose examples carry their ids in the batch.

The batches of a stream are not drawn at random: the order of the examples determines which step uses them, and an
attacker may know it. So subsampling gets no credit (κ = 1), and a step counts for the examples that it used. The DP
accountant counts as many releases with q = 1 as the most frequent example has participations, under the smallest noise
of the run. Neighbouring streams differ in one example whose gradient is left out at its place ("zero-out"); if other
examples moved up to its place instead, every later batch would change.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from torchfil.accounting.ids import plain_key
from torchfil.engine.distributed.ranks import Ranks
from torchfil.engine.loader import BatchTracker, can_remember, emptied, remembering, worker_options

IdOf = str | int | Callable[[Any], Any]  # where to find the ids in a batch of a stream

_ENDED, _GOES_ON, _NEVER_BEGAN = 0, 1, 2  # a rank's answers about its stream


def is_stream(loader: DataLoader[Any]) -> bool:
    """Whether a loader's examples cannot be numbered, because they simply arrive.

    Example:
        >>> is_stream(DataLoader([1, 2, 3]))
        False
    """
    return isinstance(loader.dataset, IterableDataset)


def ids_of_batch(batch: Any, id_of: IdOf) -> tuple[list[Hashable], Any]:
    """The ids of a batch, and the batch without them.

    Args:
        batch: A dict, tuple or list of parts [batch, …]; of any kind if ``id_of`` is a function.
        id_of: The name or position of the part that holds the ids; or a function from a batch to its ids, which leaves
            the batch unchanged.

    Example:
        >>> import torch
        >>> ids_of_batch({"x": torch.zeros(2), "key": ["a", "b"]}, "key")
        (['a', 'b'], {'x': tensor([0., 0.])})
        >>> ids_of_batch((torch.zeros(2), torch.tensor([7, 9])), 1)
        ([7, 9], (tensor([0., 0.]),))
    """
    found: Any
    if callable(id_of):
        found, rest = id_of(batch), batch
    elif isinstance(batch, dict | UserDict) and id_of in batch:
        rest = copy.copy(batch)
        found = rest.pop(id_of)
    elif type(batch) in (tuple, list) and isinstance(id_of, int) and -len(batch) <= id_of < len(batch):
        parts = list(batch)
        found, rest = parts.pop(id_of), type(batch)(parts)
    else:
        names = f" with {sorted(map(str, batch))}" if isinstance(batch, dict | UserDict) else ""
        where = "give the name or place of the ids, or a function from a batch to its ids"
        raise ValueError(f"id_of={id_of!r} is not in a batch of type {type(batch).__name__}{names}: {where}")

    listed = found.tolist() if isinstance(found, Tensor | np.ndarray) else found
    keys = [plain_key(key) for key in listed] if isinstance(listed, Sequence) else [listed]
    unusable = [key for key in keys if not isinstance(key, Hashable) or isinstance(key, Tensor)]
    if unusable or isinstance(listed, str | bytes) or not isinstance(listed, Sequence):
        raise TypeError(f"{found!r} cannot be the examples' ids; give a list with one number or string for each")
    return keys, rest


def _collate_with_ids(collate_fn: Callable[[Any], Any], id_of: IdOf, token: int, samples: Any) -> Any:
    """Collate as before, to a batch that remembers its ids, without the part that held them."""
    ids, batch = ids_of_batch(collate_fn(samples), id_of)
    if not can_remember(batch):
        kind = type(batch).__name__
        raise TypeError(f"the collate function returns {kind}, which cannot carry ids; return a list, tuple or dict")
    return remembering(batch, ids, token)


class FILStreamLoader(DataLoader[Any]):
    """A loader of a stream, unchanged except that its batches remember their ids.

    On several ranks each reads its own stream, and all of them take as many steps as the longest has batches: a
    rank whose stream has ended gets empty ones.

    Args:
        loader: The user's loader.
        tracker: Notes the current batch.
        on_start: Called at the start of each pass, in the main process.
        id_of: Where to find the ids in a batch.
        ranks: The processes that train together; None: a single one.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        tracker: BatchTracker,
        on_start: Callable[[], None],
        id_of: IdOf,
        ranks: Ranks | None,
    ) -> None:
        self.plain_dataset: Any = loader.dataset
        self.plain_collate_fn: Callable[[list[Any]], Any] = loader.collate_fn
        self.sample_rate: float | None = None
        self._on_start, self._ranks = on_start, ranks
        super().__init__(
            dataset=loader.dataset,
            batch_size=loader.batch_size,
            drop_last=loader.drop_last,
            collate_fn=partial(_collate_with_ids, loader.collate_fn, id_of, tracker.token),
            **worker_options(loader),
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._on_start()
        batches = super().__iter__()
        return iter(batches) if self._ranks is None else _until_all_end(batches, self._ranks)


def _until_all_end(batches: Iterator[Any], ranks: Ranks) -> Iterator[Any]:
    """This rank's batches, then empty ones until all ranks' streams have ended (collective at each)."""
    empty: Any = None
    while True:
        batch = next(batches, None)
        empty = emptied(batch) if empty is None and batch is not None else empty
        told = _GOES_ON if batch is not None else _ENDED if empty is not None else _NEVER_BEGAN
        answers = ranks.objects(told)
        if _GOES_ON not in answers:
            return
        if _NEVER_BEGAN in answers:
            empty_rank = f"the stream of rank {answers.index(_NEVER_BEGAN)} has no batch at all"
            raise RuntimeError(f"{empty_rank}, so the shape of an empty one is unknown: give each rank some shards")
        yield empty if batch is None else batch
