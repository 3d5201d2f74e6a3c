"""The private loader: batches that know which examples they hold, drawn from the run's own source.

The ids travel with the batch. The data set notes which examples were fetched; the collate function,
in the same process, takes that note and returns the batch as an object of the same kind and content
that remembers its ids, even if it comes from a worker. When the training loop reads the batch, it
becomes the current one. Skipped batches, workers, and ``BatchMemoryManager`` (which rebuilds the
loader from its parts) therefore cannot shift ids.

Streams are data sets without a length or random access, whose examples carry their ids in the
batch. Their batches are not drawn at random: the order of the examples determines which step uses
them, and an attacker may know it. So subsampling gets no credit (κ = 1), and a step counts for the
examples that it used. The DP accountant counts as many releases with q = 1 as the most frequent
example has participations, under the smallest noise of the run. Neighbouring streams differ in one
example whose gradient is left out at its place ("zero-out"); if other examples moved up to its
place instead, every later batch would change.
"""

from __future__ import annotations

import copy
import itertools
import math
import threading
import warnings
import weakref
from collections import UserDict, deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, SupportsInt

import numpy as np
import torch
from opacus.data_loader import CollateFnWithEmpty
from opacus.utils.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
    UniformWithReplacementSampler,
)
from torch import Tensor
from torch.utils import data
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
)
from torch.utils.data._utils.pin_memory import pin_memory

from torchfil.accounting.ids import plain_key
from torchfil.accounting.owners import Owners
from torchfil.accounting.quantities import tracked
from torchfil.engine.distributed.ranks import Ranks
from torchfil.private import Private, as_call
from torchfil.private.batches import named_inputs
from torchfil.private.choice import private_inputs
from torchfil.utils.errors import OfRun
from torchfil.utils.given import Batch, Rows, Tree
from torchfil.utils.noise import NoiseSource, preserve_rng
from torchfil.utils.trees import map_tensors, tensors_of

OnStart = Callable[[], None]  # called when a pass over the data begins
IdOf = str | int | Callable[[Any], Any]  # where to find the ids in a batch of a stream
# the ids of all rows, or of all owners by row; or where to find them in a batch
KeysOf = IdOf | Sequence[Hashable] | Tensor | None

_AT_ONCE = 1024  # rows that are read together to find their owners
_EXAMPLES_TO_READ = 16  # a flip with probability 1/2 goes unnoticed once in 65,536 runs
_TARGET_NAMES = ("targets", "target", "y", "start_positions", "end_positions")
_TRACKERS: weakref.WeakValueDictionary[int, BatchTracker] = weakref.WeakValueDictionary()
_TOKENS = itertools.count()


# ------------------------------------------------------------------ batches that remember their ids


class BatchTracker:
    """Remembers the batch that the training loop read last: its ids and its content.

    Attributes:
        ids: The examples' rows; None: no batch was read.
        earlier: The content of the two batches before.
        parts: How many batches each draw of the sampler is split into.
        draws: The examples of each such draw in the current pass over the data, if there are
            several parts.
        example_of: The number of the example to which a row belongs.
        rows_of: Maps the ids that a batch carries to the examples' rows; in a stream these are
            keys.
        held: The places that this rank can draw in the current pass; None: all, or not known.
    """

    def __init__(self) -> None:
        self.token = next(_TOKENS)
        self.ids: list[int] | None = None
        self.earlier: deque[object] = deque(maxlen=2)
        self.parts = 1
        self.held: Tensor | None = None
        self.draws: set[frozenset[int]] = set()
        self.example_of: Callable[[int], int] = int
        self.rows_of: Callable[[list[Any]], list[int]] = list
        self._read: object = None
        self._carried: list[Any] = []
        self._as_it_came: Batch = None
        self._thread: int | None = None
        _TRACKERS[self.token] = self

    def begin_pass(self) -> None:
        """From now on, only reads by the current thread count; other threads pin memory."""
        self._thread = threading.get_ident()
        self.draws.clear()

    def in_parts(self, drawn: list[int]) -> Iterator[list[int]]:
        """The batches into which a draw is split."""
        if self.parts > 1:
            self.draws.add(frozenset(drawn))
        return (drawn[part :: self.parts] for part in range(self.parts))

    def take(self, ids: list[Any], batch: object) -> None:
        """Make this the current batch."""
        if self._thread is not None and self._thread != threading.get_ident():
            return
        if batch is not self._read or ids != self._carried:
            if self.ids is not None:
                self.earlier.append(self._as_it_came)
            self.ids, self._as_it_came = self.rows_of(ids), _content(batch)
        self._read, self._carried = batch, ids

    @property
    def batch(self) -> Batch:
        """The content of the current batch, including entries that the loop has taken out of it."""
        now, before = _content(self._read), self._as_it_came
        if isinstance(now, UserDict):
            now.data = {**before.data, **now.data}
            return now
        return {**before, **now} if isinstance(now, dict) else now


class _Remembering:
    """A batch with its ids; reading it makes it the current batch of the tracker with that token.

    If other code copies it with ``type(batch)(content)``, for example to move it to a device, the
    copy has no ids; the batch that was read for the copy stays the current one.
    """

    _plain_kind: type = object
    _ids: Sequence[Any] = ()
    _token: int = -1  # no tracker

    def _touch(self) -> None:
        tracker = _TRACKERS.get(self._token)
        if tracker is not None:
            tracker.take(list(self._ids), self)

    def __reduce__(self) -> Any:
        return remembering, (_content(self), self._ids, self._token)

    def pin_memory(self) -> Any:
        """The same batch in pinned memory; torch calls this before it looks inside a batch."""
        return remembering(pin_memory(_content(self)), self._ids, self._token)


def _reading(method: Callable[..., object]) -> Callable[..., object]:
    """A method that makes the batch the current one first."""

    def read(self: _Remembering, *args: object) -> object:
        self._touch()
        return method(self, *args)

    return read


def _data_of(batch: _Remembering) -> object:
    """The dict in a ``UserDict``, through which everything reads it."""
    batch._touch()
    return batch.__dict__["data"]


_READ_BY: dict[type, tuple[str, ...]] = {
    list: ("__getitem__", "__iter__"),
    tuple: ("__getitem__", "__iter__"),
    dict: ("__getitem__", "__iter__", "get", "items", "values", "pop"),
}
_REMEMBERING: dict[type, Any] = {}


def can_remember(batch: object) -> bool:
    """Whether a batch can carry ids: a list, a tuple, a dict, or a ``UserDict`` such as Hugging
    Face's.
    """
    return type(batch) in _READ_BY or isinstance(batch, UserDict)


def remembering(batch: Batch, ids: Sequence[Hashable], token: int) -> Batch:
    """The batch with its ids.

    When read, it becomes the current batch of the tracker with that token.
    """
    kind = type(batch)
    if kind not in _REMEMBERING:
        methods: dict[str, object] = {
            name: _reading(getattr(kind, name)) for name in _READ_BY.get(kind, ())
        }
        if kind not in _READ_BY:
            methods["data"] = property(
                _data_of, lambda self, value: self.__dict__.update(data=value)
            )
        _REMEMBERING[kind] = type(
            kind.__name__, (_Remembering, kind), {"_plain_kind": kind, **methods}
        )
    if kind in _READ_BY:
        made = _REMEMBERING[kind](batch)
    else:
        made = object.__new__(_REMEMBERING[kind])
        made.__dict__.update(vars(batch))
    made._ids, made._token = ids, token
    return made


def _content(batch: object) -> Batch:
    """A plain copy of a list, dict or tuple, without ids and without reading it.

    Anything else as it is.
    """
    if isinstance(batch, dict):
        return dict(dict.items(batch))
    if isinstance(batch, UserDict):
        made = object.__new__(getattr(batch, "_plain_kind", type(batch)))
        made.__dict__.update(
            {name: value for name, value in vars(batch).items() if name not in ("_ids", "_token")}
        )
        made.data = dict(vars(batch)["data"])
        return made
    if type(batch) is list or isinstance(batch, _Remembering):
        if isinstance(batch, list):
            return list(list.__iter__(batch))
        return tuple(tuple.__iter__(batch))  # type: ignore[arg-type]
    return batch


def plain(tree: Tree) -> Tree:
    """The same, with plain tuples, lists and dicts instead of batches that remember their ids."""
    kind = type(tree)
    if isinstance(tree, _Remembering):
        return plain(_content(tree))
    if kind is tuple or kind is list:
        return kind(map(plain, tree))
    return dict(zip(tree, map(plain, tree.values()), strict=True)) if kind is dict else tree


def make_current(tree: Tree) -> None:
    """Make a batch that is passed on unread the current one of its tracker."""
    if isinstance(tree, _Remembering):
        tree._touch()
    elif type(tree) in (tuple, list, dict):
        for part in tree.values() if isinstance(tree, dict) else tree:
            if type(part) is not Tensor:
                make_current(part)


# ---------------------------------------------------------------------- fetching


class _Gathered(list[Tensor]):
    """A batch that was fetched at once, as the default collate function would make it from single
    examples.
    """


class NotingDataset(Dataset[Any]):
    """The user's data set, which also notes which rows were fetched last.

    Everything else is passed through.

    Of owners, it fetches and notes their rows, one owner after the other.

    Args:
        dataset: The user's data set.
        note: Where the numbers of the fetched examples are noted.
        collates_plainly: Whether the default collate function makes batches, so that the examples
            of a ``TensorDataset`` (or a ``Subset`` of one) are taken in one gather. The batches are
            the same, bit by bit.
    """

    def __init__(self, dataset: Rows, note: list[int], *, collates_plainly: bool = False) -> None:
        self.dataset, self._note, self._gathers = dataset, note, collates_plainly

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: SupportsInt) -> Any:
        sample = self.dataset[index]
        self._note.append(int(index))
        return sample

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        dataset = self.dataset
        if isinstance(dataset, OwnerRows):
            indices, dataset = dataset.owners.rows(indices, dataset.most), dataset.dataset
        samples: Any = _gathered(dataset, indices) if self._gathers and len(indices) else None
        fetch = getattr(dataset, "__getitems__", None)
        if samples is None and callable(fetch):
            samples = fetch(indices)
        elif samples is None:
            samples = [dataset[index] for index in indices]
        self._note[:] = map(int, indices)
        return samples

    def __getattr__(self, name: str) -> Any:
        if name in ("dataset", "_note", "_gathers"):
            raise AttributeError(name)
        return getattr(self.dataset, name)


def _gathered(dataset: object, indices: Sequence[int]) -> _Gathered | None:
    """The examples of a ``TensorDataset`` at once.

    None if it is another data set, or holds unusual tensors.
    """
    while type(dataset) is Subset:
        indices, dataset = [dataset.indices[index] for index in indices], dataset.dataset
    if type(dataset) is not TensorDataset:
        return None
    if any(
        type(part) is not Tensor or part.layout != torch.strided or part.requires_grad
        for part in dataset.tensors
    ):
        return None
    rows = torch.tensor(indices)
    return _Gathered(part[rows.to(part.device, non_blocking=True)] for part in dataset.tensors)


def _collate_noted(
    collate_fn: Callable[[list[Any]], Any],
    note: list[int],
    token: int,
    workers: bool,
    samples: list[Any],
) -> Any:
    """Collate as before, to a batch that remembers its ids."""
    at_once = type(samples) is _Gathered
    ids = note[:] if at_once else note[len(note) - len(samples) :]
    note.clear()
    batch = list(samples) if at_once else collate_fn(samples)
    if can_remember(batch):
        return remembering(batch, ids, token)
    if workers:
        raise TypeError(
            f"the collate function returns {type(batch).__name__}, which cannot carry example ids "
            "out of a worker process; return a list, tuple or dict, or use num_workers=0"
        )
    tracker = _TRACKERS.get(token)
    if tracker is not None:
        tracker.take(ids, batch)
    return batch


class EmptySecond(CollateFnWithEmpty):
    """Opacus's collate function for ``batch_first=False``, whose empty batches may also hold
    labels, [batch].
    """

    def _make_empty_batch(self, sample: object) -> Batch:
        self.batch_first = isinstance(sample, Tensor) and sample.ndim < 2
        return super()._make_empty_batch(sample)


class FILPoissonSampler(UniformWithReplacementSampler):
    """Opacus's Poisson sampler, which draws from the run's own source and announces the start of
    each pass.

    If gradients are accumulated over k batches, these are the parts of one draw at k times the
    rate: no example is in two of them.

    On several ranks each draws from its part of the data, as in Opacus. Unlike Opacus's sampler, it
    does not leave out empty batches: ranks with fewer steps would make the others wait forever.
    Each rank has its own source: if ranks drew the same places, an attacker who saw one example in
    a batch would know about those at the same place in the other parts.
    """

    def __init__(
        self,
        sampler: UniformWithReplacementSampler | DistributedUniformWithReplacementSampler,
        on_start: OnStart,
        tracker: BatchTracker,
        source: NoiseSource,
    ) -> None:
        self.__dict__.update(vars(sampler))
        self.sample_rate, self.steps = (
            tracker.parts * sampler.sample_rate,
            max(1, len(sampler) // tracker.parts),
        )
        self._on_start, self._tracker, self._source = on_start, tracker, source
        self._is_distributed = isinstance(sampler, DistributedUniformWithReplacementSampler)

    def set_epoch(self, epoch: int) -> None:
        """As in Opacus: another division of the data between the ranks."""
        self.epoch = epoch

    def __len__(self) -> int:
        return int(self.steps) * self._tracker.parts

    def __iter__(self) -> Iterator[list[int]]:
        self._on_start()
        own = torch.arange(self.num_samples)
        if self._is_distributed:
            shuffling = torch.Generator().manual_seed(self.shuffle_seed + self.epoch)
            n = self.total_size
            order = torch.randperm(n, generator=shuffling) if self.shuffle else torch.arange(n)
            own = order[self.rank :: self.num_replicas]
            self._tracker.held = own
        for _ in range(int(self.steps)):
            yield from self._tracker.in_parts(
                own[self._source.uniform(len(own)) < self.sample_rate].tolist()
            )


class FILBatchSampler(BatchSampler):
    """An ordinary batch sampler, which announces the start of each pass over the data."""

    def __init__(self, sampler: BatchSampler, on_start: OnStart) -> None:
        # a subclass need not call BatchSampler's constructor
        for name in ("sampler", "batch_size", "drop_last"):
            setattr(self, name, getattr(sampler, name, None))
        self._batches, self._on_start = sampler, on_start

    def __iter__(self) -> Iterator[list[int]]:
        self._on_start()
        yield from self._batches

    def __len__(self) -> int:
        return len(self._batches)


class FILDataLoader(OfRun, DataLoader[Any]):
    """A prepared loader, unchanged except that its batches remember their ids.

    Args:
        loader: The loader that Opacus prepared (Poisson), or the user's own.
        tracker: Notes the current batch.
        on_start: Called at the start of each pass, in the main process.
        source: Makes the Poisson draws.
    """

    def __init__(
        self, loader: DataLoader[Any], tracker: BatchTracker, on_start: OnStart, source: NoiseSource
    ) -> None:
        note: list[int] = []
        self.plain_dataset = dataset_of(loader)

        # Both kinds of sampler draw as before, and say when a pass begins.
        sampler: Any = loader.batch_sampler
        batch_sampler: BatchSampler = FILBatchSampler(sampler, on_start)
        if isinstance(
            sampler, UniformWithReplacementSampler | DistributedUniformWithReplacementSampler
        ):
            batch_sampler = FILPoissonSampler(sampler, on_start, tracker, source)
        self.sample_rate: float | None = getattr(batch_sampler, "sample_rate", None)

        # perhaps in Opacus's wrapper, which knows an empty batch
        collate_fn = loader.collate_fn
        plainly = getattr(collate_fn, "wrapped_collator_fn", collate_fn) is default_collate
        super().__init__(
            dataset=NotingDataset(self.plain_dataset, note, collates_plainly=plainly),
            batch_sampler=batch_sampler,
            collate_fn=partial(
                _collate_noted, collate_fn, note, tracker.token, loader.num_workers > 0
            ),
            **worker_options(loader),
        )


def worker_options(loader: DataLoader[Any]) -> dict[str, Any]:
    """A loader's settings for another loader over the same data: workers, their memory and random
    numbers.

    Example:
        >>> worker_options(DataLoader([1, 2], num_workers=0))["num_workers"]
        0
    """
    names = (
        "num_workers",
        "pin_memory",
        "timeout",
        "worker_init_fn",
        "multiprocessing_context",
        "generator",
    )
    return {
        name: getattr(loader, name) for name in (*names, "prefetch_factor", "persistent_workers")
    }


# ---------------------------------------------------------------------- streams


def dataset_of(loader: DataLoader[Any]) -> Rows:
    """The data set of a loader that is no stream."""
    return loader.dataset  # type: ignore[return-value]


def is_stream(loader: DataLoader[Any]) -> bool:
    """Whether a loader's examples cannot be numbered, because they simply arrive.

    Example:
        >>> is_stream(DataLoader([1, 2, 3]))
        False
    """
    return isinstance(loader.dataset, IterableDataset)


def ids_of_batch(batch: Batch, id_of: IdOf) -> tuple[list[Hashable], Batch]:
    """The ids of a batch, and the batch without them.

    Args:
        batch: A dict, tuple or list of parts [batch, …]; of any kind if ``id_of`` is a function.
        id_of: The name or position of the part that holds the ids; or a function from a batch to
            its ids, which leaves the batch unchanged.

    Example:
        >>> ids_of_batch({"x": torch.zeros(2), "key": ["a", "b"]}, "key")
        (['a', 'b'], {'x': tensor([0., 0.])})
        >>> ids_of_batch((torch.zeros(2), torch.tensor([7, 9])), 1)
        ([7, 9], (tensor([0., 0.]),))
    """
    if callable(id_of):
        found, rest = id_of(batch), batch
    elif isinstance(batch, dict | UserDict) and id_of in batch:
        rest = copy.copy(batch)
        found = rest.pop(id_of)
    elif (
        type(batch) in (tuple, list)
        and isinstance(id_of, int)
        and -len(batch) <= id_of < len(batch)
    ):
        parts = list(batch)
        found, rest = parts.pop(id_of), type(batch)(parts)
    else:
        names = f" with {sorted(map(str, batch))}" if isinstance(batch, dict | UserDict) else ""
        raise ValueError(
            f"id_of={id_of!r} is not in a batch of type {type(batch).__name__}{names}: give the "
            "name or place of the ids, or a function from a batch to its ids"
        )

    listed = found.tolist() if isinstance(found, Tensor | np.ndarray) else found
    keys = [plain_key(key) for key in listed] if isinstance(listed, Sequence) else [listed]
    unusable = [key for key in keys if not isinstance(key, Hashable) or isinstance(key, Tensor)]
    if unusable or isinstance(listed, str | bytes) or not isinstance(listed, Sequence):
        raise TypeError(
            f"{found!r} cannot be the examples' ids; give a list with one number or string for each"
        )
    return keys, rest


def _collate_with_ids(
    collate_fn: Callable[[Any], Any], id_of: IdOf, token: int, samples: object
) -> Batch:
    """Collate as before, to a batch that remembers its ids, without the part that held them."""
    ids, batch = ids_of_batch(collate_fn(samples), id_of)
    if not can_remember(batch):
        kind = type(batch).__name__
        raise TypeError(
            f"the collate function returns {kind}, which cannot carry ids; return a list, tuple "
            "or dict"
        )
    return remembering(batch, ids, token)


class FILStreamLoader(OfRun, DataLoader[Any]):
    """A loader of a stream, unchanged except that its batches remember their ids.

    On several ranks each reads its own stream, and all of them take as many steps as the longest
    has batches: a rank whose stream has ended gets empty ones.

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
        on_start: OnStart,
        id_of: IdOf,
        ranks: Ranks | None,
    ) -> None:
        self.sample_rate: float | None = None
        self._on_start, self._tracker, self._ranks = on_start, tracker, ranks
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
        return (
            iter(batches)
            if self._ranks is None
            else _until_all_end(batches, self._ranks, self._tracker)
        )


def _until_all_end(batches: Iterator[Any], ranks: Ranks, tracker: BatchTracker) -> Iterator[Any]:
    """This rank's batches, then empty ones until all ranks' streams have ended (collective at
    each).

    At each batch, all ranks give the same rows to the examples of all.
    """
    empty: Batch = None
    while True:
        batch = next(batches, None)
        if empty is None and batch is not None:
            empty = remembering(
                map_tensors(lambda part: part[:0], _content(batch)), [], batch._token
            )
        arrived = ranks.objects(None if batch is None else list(batch._ids))
        begun = ranks.objects(empty is not None)
        if all(keys is None for keys in arrived):
            return
        if not all(begun):
            raise RuntimeError(
                f"the stream of rank {begun.index(False)} has no batch at all, so the shape of an "
                "empty one is unknown: give each rank some shards"
            )
        for keys in arrived:
            tracker.rows_of(keys or [])
        yield empty if batch is None else batch


# ---------------------------------------------------------------------- people with several rows


class OwnerRows(Dataset[Any]):
    """A data set of owners, from one of rows: an owner's item is its first row.

    A batch of them is read by row.

    Args:
        dataset: The user's data set.
        owners: Who owns which row.
        most: The largest number of rows that a drawn owner brings, drawn anew each time; None: all
            of its rows.
    """

    def __init__(self, dataset: Rows, owners: Owners, most: int | None) -> None:
        self.dataset, self.owners, self.most = dataset, owners, most

    def __len__(self) -> int:
        return len(self.owners)

    def __getitem__(self, owner: int) -> Any:
        return self.dataset[self.owners.rows([owner])[0]]


def owners_of(loader: DataLoader[Any], owner_of: KeysOf) -> Owners | None:
    """Who owns which row of the loader's data set; None: nobody knows, or it is a stream.

    Args:
        loader: Draws from a data set with numbered rows, or from a stream.
        owner_of: The owner of every row, [rows]; the name or position of the owners in a batch; or
            a function from a batch to its owners. For the last two, every row is read once, unless
            the data set has columns.

    Raises:
        ValueError: There is not one owner for each row.
    """
    if owner_of is None or is_stream(loader):
        return None
    dataset = dataset_of(loader)
    count = len(dataset)
    if isinstance(owner_of, str) and owner_of in (getattr(dataset, "column_names", None) or ()):
        owner_of = list(dataset[owner_of])
    elif callable(owner_of) or isinstance(owner_of, str | int):
        found: list[Hashable] = []
        with preserve_rng():
            for start in range(0, count, _AT_ONCE):
                rows = range(start, min(start + _AT_ONCE, count))
                found += ids_of_batch(loader.collate_fn([dataset[row] for row in rows]), owner_of)[
                    0
                ]
        owner_of = found
    owners = Owners(owner_of)
    given = len(owners.of_row)
    if given != count:
        raise ValueError(
            f"owner_of gives owners of {given} rows, and the data set has {count}; give one for "
            "each"
        )
    return owners


def loader_of_owners(
    loader: DataLoader[Any], owners: Owners, owner_of: KeysOf, most: int | None
) -> DataLoader[Any]:
    """The loader, which draws owners instead of rows; a pass has as many batches as before.

    Args:
        loader: The user's loader.
        owners: Who owns which row.
        owner_of: As the user gave it; a part of the batch that holds the owners is taken out of it.
        most: The largest number of rows that a drawn owner brings; None: all of its rows.
    """
    dataset = OwnerRows(dataset_of(loader), owners, most)
    inner = getattr(loader.batch_sampler, "sampler", None)
    if not isinstance(inner, data.SequentialSampler | data.RandomSampler | data.DistributedSampler):
        raise ValueError(
            f"{type(inner or loader.batch_sampler).__name__} chooses rows, and owners are drawn; "
            "use shuffle=, a DistributedSampler or a Subset"
        )
    sampler = (
        _DistributedOwners(dataset, inner) if isinstance(inner, data.DistributedSampler) else None
    )
    collate_fn = loader.collate_fn
    if isinstance(owner_of, str | int):
        collate_fn = partial(_without_owners, collate_fn, owner_of)
    return DataLoader(
        dataset,
        batch_size=-(-len(dataset if sampler is None else sampler) // len(loader)),
        shuffle=isinstance(inner, data.RandomSampler) if sampler is None else None,
        sampler=sampler,
        collate_fn=collate_fn,
        **worker_options(loader),
    )


class _DistributedOwners(data.DistributedSampler[Any]):
    """Deals owners out to ranks, nobody twice, as a sampler of rows deals out rows.

    That one's epoch counts.
    """

    def __init__(self, dataset: OwnerRows, rows: data.DistributedSampler[Any]) -> None:
        super().__init__(
            dataset, rows.num_replicas, rows.rank, rows.shuffle, rows.seed, drop_last=True
        )
        self._rows = rows

    def __iter__(self) -> Iterator[Any]:
        self.epoch = self._rows.epoch or self.epoch
        return super().__iter__()


def _without_owners(
    collate_fn: Callable[[list[Any]], Any], owner_of: str | int, samples: list[Any]
) -> Any:
    return ids_of_batch(collate_fn(samples), owner_of)[1]


# -------------------------------------------------------- what batches hold, and how they are drawn


def split_batch(
    batch: Batch, batch_to_inputs: Callable[[Any], tuple[Any, Any]] | None
) -> tuple[Any, Any]:
    """The (inputs, targets) of a batch: by the user's split, a tuple's last item, or their names.

    A batch of one tensor is its own target, as in an autoencoder; a loss of the outputs alone
    ignores it.
    """
    if batch_to_inputs is not None:
        return batch_to_inputs(batch)
    remedy = "pass batch_to_inputs=a function that maps a batch to (inputs, targets)"
    if isinstance(batch, Mapping):
        targets = {key: value for key, value in batch.items() if is_target_name(key)}
        if not targets:
            raise ValueError(
                f"cannot tell the targets in a dict batch with keys {list(batch)}; {remedy}"
            )
        inputs = {key: value for key, value in batch.items() if key not in targets}
        return inputs, next(iter(targets.values())) if len(targets) == 1 else targets
    if isinstance(batch, (list, tuple)) and len(batch) >= 2:
        return tuple(batch[:-1]), batch[-1]
    if isinstance(batch, Tensor) or (isinstance(batch, (list, tuple)) and len(batch) == 1):
        only = batch if isinstance(batch, Tensor) else batch[0]
        return only, only
    raise ValueError(f"cannot tell the targets in a batch of type {type(batch).__name__}; {remedy}")


def is_target_name(name: object) -> bool:
    """Whether an entry of a dict batch, or an input of a model, with that name holds labels.

    Example:
        >>> is_target_name("labels"), is_target_name("label_2"), is_target_name("input_ids")
        (True, True, False)
    """
    return name in _TARGET_NAMES or (isinstance(name, str) and name.startswith("label"))


def check_sampler(loader: DataLoader[Any], *, poisson_sampling: bool) -> None:
    """Raise for loaders whose sampling cannot be accounted for."""
    dataset = dataset_of(loader)
    if not (not isinstance(dataset, IterableDataset) and loader.batch_sampler is not None):
        raise ValueError(
            "the loader must draw batches from a data set with numbered examples. Give the "
            "DataLoader a batch_size; for an IterableDataset pass "
            "make_private(poisson_sampling=False, id_of=…)."
        )
    if not len(dataset) > 0:
        raise ValueError(
            "the loader's data set is empty: there is nobody to train on. Were its files found?"
        )

    # Poisson sampling replaces a sampler, whose choice of examples would be lost.
    inner = getattr(loader.batch_sampler, "sampler", None)
    name = type(inner).__name__
    twice = (
        f"{name}(replacement=True) can put an example into a batch twice, where its gradient "
        "counts twice under"
    )
    unused = (
        f"the loader's sampler ({name}) is not used: Poisson sampling draws all with the "
        "same probability"
    )
    if not poisson_sampling:
        if getattr(inner, "replacement", False):
            raise ValueError(f"{twice} one noise draw; use replacement=False or Poisson sampling")
    elif isinstance(inner, data.SubsetRandomSampler | data.WeightedRandomSampler):
        raise ValueError(
            f"{unused}. Use torch.utils.data.Subset(dataset, indices), or poisson_sampling=False."
        )
    elif not isinstance(
        inner, data.RandomSampler | data.SequentialSampler | data.DistributedSampler | None
    ):
        warnings.warn(f"{unused}. Pass poisson_sampling=False to keep it.", stacklevel=4)
    if isinstance(inner, data.WeightedRandomSampler):
        warnings.warn(
            "weighted examples take part more often, and leak more with each participation",
            stacklevel=4,
        )


def most_in_a_pass(loader: DataLoader[Any]) -> int:
    """How often an example takes part in a pass without Poisson sampling, at most: 1, unless the
    sampler repeats.
    """
    sampler = getattr(loader.batch_sampler, "sampler", None)
    if is_stream(loader) or sampler is None:
        return 1
    return max(1, math.ceil(len(sampler) / len(dataset_of(loader))))


def check_reads_alike(
    loader: DataLoader[Any],
    track: Collection[str],
    private: Private | None,
    batch_to_inputs: Callable[..., Any] | None,
) -> None:
    """If sums by coordinate are tracked, read some examples twice, and refuse data that differs.

    The Fisher information of a step is about the tensor that the model saw. With random flips or
    crops this is a drawn view, and coordinate j is another pixel in every step, so sums by
    coordinate would mix pixels. The trace has no coordinates and is kept, as a sum over the views.
    It reads 16 examples, so a rare random transform can go unnoticed.

    Args:
        loader: Draws from a data set with numbered examples.
        track: What is tracked.
        private: What is private.
        batch_to_inputs: Maps a batch to (inputs, targets).

    Raises:
        ValueError: The private part of an example differs between two reads.
    """
    dataset = dataset_of(loader)
    by_coordinate = [quantity.name for quantity in tracked(track) if quantity.by_coordinate]
    rows = range(0, len(dataset), max(1, len(dataset) // _EXAMPLES_TO_READ))[:_EXAMPLES_TO_READ]
    if not by_coordinate or not rows:
        return

    with preserve_rng():
        first, second = (
            _private_tensors(
                split_batch(loader.collate_fn([dataset[row] for row in rows]), batch_to_inputs),
                private,
            )
            for _ in range(2)
        )

    def same(one: Tensor, two: Tensor) -> bool:
        return one.shape == two.shape and torch.allclose(one, two, rtol=0, atol=0, equal_nan=True)

    if not (len(first) == len(second) and all(map(same, first, second))):
        raise ValueError(
            f"track={tuple(by_coordinate)} sums by coordinate, but this data set gives other "
            "values each time. Track the trace only, move the transform into the model, or name "
            "the private: private=Private(inputs=…)"
        )


def _private_tensors(batch: tuple[Any, Any], private: Private | None) -> list[Tensor]:
    """The tensors whose coordinates are summed.

    A private submodule's output depends on all inputs.
    """
    private, named = private or Private(), named_inputs(*as_call(batch[0]))
    chosen = private_inputs(named, batch[1], private) or list(named)
    return tensors_of(([named[key].value for key in chosen], batch[1] if private.target else ()))
