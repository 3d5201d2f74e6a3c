"""The private loader: batches that know which examples they hold, drawn from the run's own source.

The ids travel with the batch. The data set notes which examples were fetched; the collate function, in the same
process, takes that note and returns the batch as an object of the same kind and content that remembers its ids, even if
it comes from a worker. When the training loop reads the batch, it becomes the current one. Skipped batches, workers,
and ``BatchMemoryManager`` (which rebuilds the loader from its parts) therefore cannot shift ids.
"""

from __future__ import annotations

import itertools
import threading
import warnings
import weakref
from collections import UserDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from opacus import data_loader
from opacus.utils.uniform_sampler import DistributedUniformWithReplacementSampler, UniformWithReplacementSampler
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    default_collate,
)
from torch.utils.data import WeightedRandomSampler as _Weighted
from torch.utils.data._utils.pin_memory import pin_memory

from torchfil.utils.noise import NoiseSource
from torchfil.utils.trees import map_tensors

__all__ = [
    "BatchTracker",
    "EmptySecond",
    "FILDataLoader",
    "can_remember",
    "check_sampler",
    "emptied",
    "is_target_name",
    "make_current",
    "plain",
    "remembering",
    "split_batch",
    "worker_options",
]

_TARGET_NAMES = ("targets", "target", "y", "start_positions", "end_positions")
_TRACKERS: weakref.WeakValueDictionary[int, BatchTracker] = weakref.WeakValueDictionary()
_TOKENS = itertools.count()


# ---------------------------------------------------------------------- batches that remember their ids


class BatchTracker:
    """Remembers the batch that the training loop read last: its ids and its content.

    Attributes:
        ids: The examples' numbers, or keys of a stream; None: no batch was read.
        earlier: The content of the two batches before.
        parts: How many batches each draw of the sampler is split into.
        draws: The examples of each such draw in the current pass over the data, if there are several parts.
    """

    def __init__(self) -> None:
        self.token = next(_TOKENS)
        self.ids: list[Any] | None = None
        self.earlier: deque[Any] = deque(maxlen=2)
        self.parts = 1
        self.draws: set[frozenset[int]] = set()
        self._read: Any = None
        self._as_it_came: Any = None
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

    def take(self, ids: list[Any], batch: Any) -> None:
        """Make this the current batch."""
        if self._thread is not None and self._thread != threading.get_ident():
            return
        if batch is not self._read or ids != self.ids:
            if self.ids is not None:
                self.earlier.append(self._as_it_came)
            self._as_it_came = _content(batch)
        self._read, self.ids = batch, ids

    @property
    def batch(self) -> Any:
        """The content of the current batch, including entries that the loop has taken out of it."""
        now, before = _content(self._read), self._as_it_came
        if isinstance(now, UserDict):
            now.data = {**before.data, **now.data}
            return now
        return {**before, **now} if isinstance(now, dict) else now


class _Remembering:
    """A batch with its ids; reading it makes it the current batch of the tracker with that token.

    If other code copies it with ``type(batch)(content)``, for example to move it to a device, the copy has no ids; the
    batch that was read for the copy stays the current one.
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


def _reading(method: Callable[..., Any]) -> Any:
    """A method that makes the batch the current one first."""

    def read(self: _Remembering, *args: Any) -> Any:
        self._touch()
        return method(self, *args)

    return read


def _data_of(batch: Any) -> Any:
    """The dict in a ``UserDict``, through which everything reads it."""
    batch._touch()
    return batch.__dict__["data"]


_READ_BY: dict[type, tuple[str, ...]] = {
    list: ("__getitem__", "__iter__"),
    tuple: ("__getitem__", "__iter__"),
    dict: ("__getitem__", "__iter__", "get", "items", "values", "pop"),
}
_REMEMBERING: dict[type, Any] = {}


def can_remember(batch: Any) -> bool:
    """Whether a batch can carry ids: a list, a tuple, a dict, or a ``UserDict`` such as Hugging Face's."""
    return type(batch) in _READ_BY or isinstance(batch, UserDict)


def remembering(batch: Any, ids: Sequence[Any], token: int) -> Any:
    """The batch with its ids; when read, it becomes the current batch of the tracker with that token."""
    kind = type(batch)
    if kind not in _REMEMBERING:
        methods = {name: _reading(getattr(kind, name)) for name in _READ_BY.get(kind, ())}
        if kind not in _READ_BY:
            methods["data"] = property(_data_of, lambda self, value: self.__dict__.update(data=value))
        _REMEMBERING[kind] = type(kind.__name__, (_Remembering, kind), {"_plain_kind": kind, **methods})
    if kind in _READ_BY:
        made = _REMEMBERING[kind](batch)
    else:
        made = object.__new__(_REMEMBERING[kind])
        made.__dict__.update(vars(batch))
    made._ids, made._token = ids, token
    return made


def _content(batch: Any) -> Any:
    """A plain copy of a list, dict or tuple, without ids and without reading it; anything else as it is."""
    if isinstance(batch, dict):
        return dict(dict.items(batch))
    if isinstance(batch, UserDict):
        made: Any = object.__new__(getattr(batch, "_plain_kind", type(batch)))
        made.__dict__.update({name: value for name, value in vars(batch).items() if name not in ("_ids", "_token")})
        made.data = dict(vars(batch)["data"])
        return made
    if type(batch) is list or isinstance(batch, _Remembering):
        return list(list.__iter__(batch)) if isinstance(batch, list) else tuple(tuple.__iter__(batch))  # type: ignore[arg-type]
    return batch


def plain(tree: Any) -> Any:
    """The same, with plain tuples, lists and dicts instead of batches that remember their ids."""
    kind = type(tree)
    if isinstance(tree, _Remembering):
        return plain(_content(tree))
    if kind is tuple or kind is list:
        return kind(map(plain, tree))
    return dict(zip(tree, map(plain, tree.values()), strict=True)) if kind is dict else tree


def make_current(tree: Any) -> None:
    """Make a batch that is passed on unread the current one of its tracker."""
    if isinstance(tree, _Remembering):
        tree._touch()
    elif type(tree) in (tuple, list, dict):
        for part in tree.values() if isinstance(tree, dict) else tree:
            if type(part) is not Tensor:
                make_current(part)


def emptied(batch: Any) -> Any:
    """An empty batch of the same kind, for the same tracker.

    Example:
        >>> emptied(remembering([torch.ones(2, 3)], [4, 7], token=-1))
        [tensor([], size=(0, 3))]
    """
    return remembering(map_tensors(lambda part: part[:0], _content(batch)), [], batch._token)


# ---------------------------------------------------------------------- fetching


class _Gathered(list[Tensor]):
    """A batch that was fetched at once, as the default collate function would make it from single examples."""


class NotingDataset(Dataset[Any]):
    """The user's data set, which also notes which examples were fetched last; everything else is passed through.

    Args:
        dataset: The user's data set.
        note: Where the numbers of the fetched examples are noted.
        collates_plainly: Whether the default collate function makes batches, so that the examples of a
            ``TensorDataset`` (or a ``Subset`` of one) are taken in one gather. The batches are the same, bit by bit.
    """

    def __init__(self, dataset: Any, note: list[int], *, collates_plainly: bool = False) -> None:
        self.dataset = dataset
        self._note = note
        self._gathers = collates_plainly

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        sample = self.dataset[index]
        self._note.append(int(index))
        return sample

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        samples: Any = _gathered(self.dataset, indices) if self._gathers and len(indices) else None
        if samples is None and callable(getattr(self.dataset, "__getitems__", None)):
            samples = self.dataset.__getitems__(indices)
        elif samples is None:
            samples = [self.dataset[index] for index in indices]
        self._note[:] = map(int, indices)
        return samples

    def __getattr__(self, name: str) -> Any:
        if name in ("dataset", "_note", "_gathers"):
            raise AttributeError(name)
        return getattr(self.dataset, name)


def _gathered(dataset: Any, indices: Sequence[int]) -> _Gathered | None:
    """The examples of a ``TensorDataset`` at once; None if it is another data set, or holds unusual tensors."""
    while type(dataset) is Subset:
        dataset, indices = dataset.dataset, [dataset.indices[index] for index in indices]
    if type(dataset) is not TensorDataset:
        return None
    if any(type(part) is not Tensor or part.layout != torch.strided or part.requires_grad for part in dataset.tensors):
        return None
    rows = torch.tensor(indices)
    return _Gathered(part[rows.to(part.device, non_blocking=True)] for part in dataset.tensors)


class RememberingCollate:
    """Collates as before and returns a batch that remembers its ids."""

    def __init__(self, collate_fn: Callable[[list[Any]], Any], note: list[int], token: int, workers: bool) -> None:
        self.collate_fn = collate_fn
        self._note = note
        self._token = token
        self._workers = workers

    def __call__(self, samples: list[Any]) -> Any:
        at_once = type(samples) is _Gathered
        ids = self._note[:] if at_once else self._note[len(self._note) - len(samples) :]
        self._note.clear()
        batch = list(samples) if at_once else self.collate_fn(samples)
        if can_remember(batch):
            return remembering(batch, ids, self._token)
        if self._workers:
            raise TypeError(
                f"the collate function returns {type(batch).__name__}, which cannot carry example ids out of a worker "
                "process; return a list, tuple or dict, or use num_workers=0"
            )
        tracker = _TRACKERS.get(self._token)
        if tracker is not None:
            tracker.take(ids, batch)
        return batch


class EmptySecond(getattr(data_loader, "CollateFnWithEmpty", object)):  # type: ignore[misc]
    """Opacus's collate function for ``batch_first=False``, whose empty batches may also hold labels, [batch]."""

    def _make_empty_batch(self, sample: Any) -> Any:
        self.batch_first = isinstance(sample, Tensor) and sample.ndim < 2
        return super()._make_empty_batch(sample)


class FILPoissonSampler(UniformWithReplacementSampler):
    """Opacus's Poisson sampler, which announces the start of each pass over the data.

    If gradients are accumulated over k batches, these are the parts of one draw at k times the rate: no example is in
    two of them.
    """

    def __init__(self, sampler: Any, on_start: Callable[[], None], tracker: BatchTracker, source: NoiseSource) -> None:
        self.__dict__.update(vars(sampler))
        self.sample_rate, self.steps = tracker.parts * sampler.sample_rate, max(1, sampler.steps // tracker.parts)
        self._on_start, self._tracker, self._source = on_start, tracker, source

    def __len__(self) -> int:
        return int(self.steps) * self._tracker.parts

    def __iter__(self) -> Iterator[list[int]]:
        self._on_start()
        for _ in range(int(self.steps)):
            drawn = self._source.uniform(self.num_samples) < self.sample_rate
            yield from self._tracker.in_parts(drawn.nonzero().view(-1).tolist())


class FILRankSampler(DistributedUniformWithReplacementSampler):
    """The same on each of several ranks, as in Opacus: a rank draws from its part of the data.

    Unlike Opacus's sampler, it does not leave out empty batches: ranks with fewer steps would make the others wait
    forever. Each rank has its own source: if ranks drew the same places, an attacker who saw one example in a batch
    would know about those at the same place in the other parts.
    """

    def __init__(self, sampler: Any, on_start: Callable[[], None], tracker: BatchTracker, source: NoiseSource) -> None:
        self.__dict__.update(vars(sampler))
        self.sample_rate = tracker.parts * sampler.sample_rate
        self.num_batches = max(1, sampler.num_batches // tracker.parts)
        self._on_start, self._tracker, self._source = on_start, tracker, source

    def __len__(self) -> int:
        return int(self.num_batches) * self._tracker.parts

    def __iter__(self) -> Iterator[list[int]]:
        self._on_start()
        shuffling = torch.Generator().manual_seed(self.shuffle_seed + self.epoch)
        n = self.total_size
        order = torch.randperm(n, generator=shuffling) if self.shuffle else torch.arange(n)
        own = order[self.rank :: self.num_replicas]
        for _ in range(self.num_batches):
            drawn = own[self._source.uniform(len(own)) < self.sample_rate]
            yield from self._tracker.in_parts(drawn.tolist())


class FILBatchSampler(BatchSampler):
    """An ordinary batch sampler, which announces the start of each pass over the data."""

    def __init__(self, sampler: BatchSampler, on_start: Callable[[], None]) -> None:
        for name in ("sampler", "batch_size", "drop_last"):  # a subclass need not call BatchSampler's constructor
            setattr(self, name, getattr(sampler, name, None))
        self._batches = sampler
        self._on_start = on_start

    def __iter__(self) -> Iterator[list[int]]:
        self._on_start()
        yield from self._batches

    def __len__(self) -> int:
        return len(self._batches)


class FILDataLoader(DataLoader[Any]):
    """A prepared loader, unchanged except that its batches remember their ids.

    Args:
        loader: The loader that Opacus prepared (Poisson), or the user's own.
        tracker: Notes the current batch.
        on_start: Called at the start of each pass, in the main process.
        source: Makes the Poisson draws.
    """

    def __init__(
        self, loader: DataLoader[Any], tracker: BatchTracker, on_start: Callable[[], None], source: NoiseSource
    ) -> None:
        note: list[int] = []
        self.plain_dataset: Any = loader.dataset
        self.plain_collate_fn: Callable[[list[Any]], Any] = loader.collate_fn

        # Both kinds of sampler draw as before, and say when a pass begins.
        sampler = loader.batch_sampler
        batch_sampler: Any
        if isinstance(sampler, UniformWithReplacementSampler):
            batch_sampler = FILPoissonSampler(sampler, on_start, tracker, source)
        elif isinstance(sampler, DistributedUniformWithReplacementSampler):
            batch_sampler = FILRankSampler(sampler, on_start, tracker, source)
        elif isinstance(sampler, BatchSampler):
            batch_sampler = FILBatchSampler(sampler, on_start)
        else:
            raise ValueError(
                f"batch_sampler of type {type(sampler).__name__} is not supported; derive it from "
                "torch.utils.data.BatchSampler, or use Poisson sampling"
            )
        self.sample_rate: float | None = getattr(batch_sampler, "sample_rate", None)

        super().__init__(
            dataset=NotingDataset(loader.dataset, note, collates_plainly=_collates_plainly(loader.collate_fn)),
            batch_sampler=batch_sampler,
            collate_fn=RememberingCollate(loader.collate_fn, note, tracker.token, loader.num_workers > 0),
            **worker_options(loader),
        )


def _collates_plainly(collate_fn: Any) -> bool:
    """Whether this is torch's default collate function, or Opacus's wrapper of it, which knows an empty batch."""
    if getattr(collate_fn, "first_batch", None) is not None:
        collate_fn = collate_fn.wrapped_collator_fn
    return collate_fn is default_collate


def worker_options(loader: DataLoader[Any]) -> dict[str, Any]:
    """A loader's settings for another loader over the same data: workers, their memory and random numbers.

    Example:
        >>> worker_options(DataLoader([1, 2], num_workers=0))["num_workers"]
        0
    """
    names = ("num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator")
    return {name: getattr(loader, name) for name in (*names, "prefetch_factor", "persistent_workers")}


def split_batch(batch: Any, batch_to_inputs: Callable[[Any], tuple[Any, Any]] | None) -> tuple[Any, Any]:
    """The (inputs, targets) of a batch: by the user's split, a tuple's last item, or their names.

    A batch of one tensor is its own target, as in an autoencoder; a loss of the outputs alone ignores it.
    """
    if batch_to_inputs is not None:
        return batch_to_inputs(batch)
    remedy = "pass batch_to_inputs=a function that maps a batch to (inputs, targets)"
    if isinstance(batch, Mapping):
        targets = {key: value for key, value in batch.items() if is_target_name(key)}
        if not targets:
            raise ValueError(f"cannot tell the targets in a dict batch with keys {list(batch)}; {remedy}")
        inputs = {key: value for key, value in batch.items() if key not in targets}
        return inputs, next(iter(targets.values())) if len(targets) == 1 else targets
    if isinstance(batch, (list, tuple)) and len(batch) >= 2:
        return tuple(batch[:-1]), batch[-1]
    if isinstance(batch, Tensor) or (isinstance(batch, (list, tuple)) and len(batch) == 1):
        only = batch if isinstance(batch, Tensor) else batch[0]
        return only, only
    raise ValueError(f"cannot tell the targets in a batch of type {type(batch).__name__}; {remedy}")


def is_target_name(name: Any) -> bool:
    """Whether an entry of a dict batch, or an input of a model, with that name holds labels.

    Example:
        >>> is_target_name("labels"), is_target_name("label_2"), is_target_name("input_ids")
        (True, True, False)
    """
    return name in _TARGET_NAMES or (isinstance(name, str) and name.startswith("label"))


def check_sampler(loader: DataLoader[Any], *, poisson_sampling: bool) -> None:
    """Raise for loaders whose sampling cannot be accounted for."""
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        raise ValueError(
            "the loader must draw batches from a data set with numbered examples; an IterableDataset, or "
            "batch_size=None, has none. Give the DataLoader a batch_size; for an IterableDataset pass "
            "make_private(poisson_sampling=False, id_of=…), which accounts by the ids in its batches."
        )
    if len(loader.dataset) == 0:  # type: ignore[arg-type]
        raise ValueError("the loader's data set is empty: there is nobody to train on. Were its files found?")

    # Poisson sampling replaces a sampler, whose choice of examples would be lost.
    inner = getattr(loader.batch_sampler, "sampler", None)
    name = type(inner).__name__
    if not poisson_sampling and getattr(inner, "replacement", False):
        raise ValueError(
            f"{name}(replacement=True) can put an example into a batch twice, and its gradient then counts twice under "
            "one noise draw; use replacement=False or Poisson sampling"
        )
    if poisson_sampling and isinstance(inner, SubsetRandomSampler | _Weighted):
        raise ValueError(
            f"the loader has a {name}, but Poisson sampling draws every example of the whole data set with the same "
            "probability. Pass a loader over torch.utils.data.Subset(dataset, indices) without a sampler, or "
            "poisson_sampling=False with a sampler without replacement (then amplification is 'none')."
        )
    if isinstance(inner, _Weighted):
        warnings.warn(
            "the loader has a WeightedRandomSampler: examples with larger weights take part more often, and each "
            "participation counts, so they leak more; ε counts those of the most frequent example.",
            stacklevel=4,
        )
    elif poisson_sampling and not isinstance(inner, RandomSampler | SequentialSampler | DistributedSampler | None):
        warnings.warn(
            f"the loader's sampler ({name}) is not used: Poisson sampling draws every example of the data set with the "
            "same probability, independently. Pass poisson_sampling=False to keep the sampler.",
            stacklevel=4,
        )
