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
from collections.abc import Callable, Hashable, Iterator, Sequence, Sized
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from torchfil.accounting.ids import plain_key
from torchfil.engine.distributed.ranks import Ranks
from torchfil.engine.loader import BatchTracker, can_remember, emptied, remembering, worker_options

__all__ = ["FILStreamLoader", "IdOf", "ids_of_batch", "is_stream"]

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
        >>> ids_of_batch({"x": torch.zeros(2), "key": ["a", "b"]}, "key")
        (['a', 'b'], {'x': tensor([0., 0.])})
        >>> ids_of_batch((torch.zeros(2), torch.tensor([7, 9])), 1)
        ([7, 9], (tensor([0., 0.]),))
    """
    if callable(id_of):
        return _as_keys(id_of(batch)), batch
    if isinstance(batch, dict | UserDict) and id_of in batch:
        rest = copy.copy(batch)
        keys = rest.pop(id_of)
        return _as_keys(keys), rest
    if type(batch) in (tuple, list) and isinstance(id_of, int) and -len(batch) <= id_of < len(batch):
        place = id_of % len(batch)
        return _as_keys(batch[place]), type(batch)(part for at, part in enumerate(batch) if at != place)
    length = len(batch) if isinstance(batch, Sized) else 1
    held = f"with {sorted(map(str, batch))}" if isinstance(batch, dict | UserDict) else f"of {length} parts"
    raise ValueError(
        f"id_of={id_of!r} is not in a batch of type {type(batch).__name__} {held}: give the name or place of the ids, "
        "or a function from a batch to its ids"
    )


def _as_keys(given: Any) -> list[Hashable]:
    """The ids of a batch as Python numbers and strings."""
    listed = given.tolist() if isinstance(given, Tensor | np.ndarray) else given
    if isinstance(listed, str | bytes) or not isinstance(listed, Sequence):
        raise TypeError(
            f"the ids of a batch are {type(given).__name__} {given!r}; give a list with one for each example"
        )
    keys = [plain_key(key) for key in listed]
    for key in keys:
        if not isinstance(key, Hashable) or isinstance(key, Tensor):
            raise TypeError(f"{key!r} cannot be an example's id: give a number or a string for each example")
    return keys


def _collate_with_ids(collate_fn: Callable[[Any], Any], id_of: IdOf, token: int, samples: Any) -> Any:
    """Collate as before, to a batch that remembers its ids, without the part that held them."""
    ids, batch = ids_of_batch(collate_fn(samples), id_of)
    if not can_remember(batch):
        raise TypeError(
            f"the collate function returns {type(batch).__name__}, which cannot carry example ids; return a list, "
            "tuple, dict or dataclass"
        )
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
        told = _GOES_ON if batch is not None else _ENDED if empty is not None else _NEVER_BEGAN
        answers = [int(answer) for answer in ranks.each(torch.tensor([told]))]
        if _GOES_ON not in answers:
            return
        if _NEVER_BEGAN in answers:
            raise RuntimeError(
                f"the stream of rank {answers.index(_NEVER_BEGAN)} has no batch at all, so the shape of an empty one "
                f"is unknown: give each of the {ranks.size} ranks some shards"
            )
        if batch is None:
            yield empty
            continue
        if empty is None:
            empty = emptied(batch)
        yield batch
