"""Batches that know which examples they hold.

The ids travel with the batch. The data set notes which items were fetched. The collate function, in the same process,
takes that note and returns the batch as an object of the same kind and content that remembers its ids
(:mod:`torchfil.engine.batches`), even if it comes from a worker. When the training loop reads the batch, it becomes the
current one. Skipped batches, workers, and ``BatchMemoryManager`` (which rebuilds the loader from its parts) therefore
cannot shift ids.
"""

from __future__ import annotations

import dataclasses
import warnings
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
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
)
from torch.utils.data import WeightedRandomSampler as _Weighted

from torchfil.engine.batches import BatchTracker, can_remember, remembering, tracker_of, worker_options
from torchfil.utils.noise import NoiseSource

__all__ = ["EmptySecond", "FILDataLoader", "check_sampler", "is_target_name", "split_batch"]

_TARGET_NAMES = ("targets", "target", "y", "start_positions", "end_positions")


class NotingDataset(Dataset[Any]):
    """The user's data set, which also notes which items were fetched last; everything else is passed through."""

    def __init__(self, dataset: Any, note: list[int]) -> None:
        self.dataset = dataset
        self._note = note

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        sample = self.dataset[index]
        self._note.append(int(index))
        return sample

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        if callable(getattr(self.dataset, "__getitems__", None)):
            samples: list[Any] = self.dataset.__getitems__(indices)
        else:
            samples = [self.dataset[index] for index in indices]
        self._note.extend(int(index) for index in indices)
        return samples

    def __getattr__(self, name: str) -> Any:
        if name in ("dataset", "_note"):
            raise AttributeError(name)
        return getattr(self.dataset, name)


class RememberingCollate:
    """Collates as before and returns a batch that remembers its ids."""

    def __init__(self, collate_fn: Callable[[list[Any]], Any], note: list[int], token: int, workers: bool) -> None:
        self.collate_fn = collate_fn
        self._note = note
        self._token = token
        self._workers = workers

    def __call__(self, samples: list[Any]) -> Any:
        ids = self._note[len(self._note) - len(samples) :]
        self._note.clear()
        batch = self.collate_fn(samples)
        if can_remember(batch):
            return remembering(batch, ids, self._token)
        if self._workers:
            raise TypeError(
                f"the collate function returns {type(batch).__name__}, which cannot carry example ids out of a worker "
                "process; return a list, tuple, dict or dataclass, or use num_workers=0"
            )
        tracker = tracker_of(self._token)
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

    def __init__(
        self,
        sampler: UniformWithReplacementSampler,
        on_start: Callable[[], None],
        tracker: BatchTracker,
        source: NoiseSource,
    ) -> None:
        super().__init__(
            num_samples=sampler.num_samples,
            sample_rate=tracker.parts * sampler.sample_rate,
            steps=max(1, sampler.steps // tracker.parts),
        )
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

    def __init__(
        self,
        sampler: DistributedUniformWithReplacementSampler,
        on_start: Callable[[], None],
        tracker: BatchTracker,
        source: NoiseSource,
    ) -> None:
        super().__init__(
            total_size=sampler.total_size,
            sample_rate=tracker.parts * sampler.sample_rate,
            shuffle=sampler.shuffle,
            shuffle_seed=sampler.shuffle_seed,
            steps=max(1, sampler.num_batches // tracker.parts),
        )
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
        self,
        loader: DataLoader[Any],
        tracker: BatchTracker,
        on_start: Callable[[], None],
        source: NoiseSource,
    ) -> None:
        note: list[int] = []
        self.plain_dataset: Any = loader.dataset
        self.plain_collate_fn: Callable[[list[Any]], Any] = loader.collate_fn

        # Both kinds of sampler draw as before, and say when a pass begins.
        sampler = loader.batch_sampler
        self.sample_rate: float | None = None
        if isinstance(sampler, UniformWithReplacementSampler):
            batch_sampler: Sampler[list[int]] = FILPoissonSampler(sampler, on_start, tracker, source)
            self.sample_rate = float(sampler.sample_rate) * tracker.parts
        elif isinstance(sampler, DistributedUniformWithReplacementSampler):
            batch_sampler = FILRankSampler(sampler, on_start, tracker, source)
            self.sample_rate = float(sampler.sample_rate) * tracker.parts
        elif isinstance(sampler, BatchSampler):
            batch_sampler = FILBatchSampler(sampler, on_start)
        else:
            raise ValueError(
                f"batch_sampler of type {type(sampler).__name__} is not supported; derive it from "
                "torch.utils.data.BatchSampler, or use Poisson sampling"
            )

        super().__init__(
            dataset=NotingDataset(loader.dataset, note),
            batch_sampler=batch_sampler,
            collate_fn=RememberingCollate(loader.collate_fn, note, tracker.token, loader.num_workers > 0),
            **worker_options(loader),
        )


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
    named = _named_parts(batch)
    if any(map(is_target_name, named)):
        positional = tuple(value for key, value in named.items() if not is_target_name(key) and value is not None)
        targets = {key: value for key, value in named.items() if is_target_name(key)}
        return positional, next(iter(targets.values())) if len(targets) == 1 else targets
    if isinstance(batch, (list, tuple)) and len(batch) >= 2:
        return tuple(batch[:-1]), batch[-1]
    if isinstance(batch, Tensor) or (isinstance(batch, (list, tuple)) and len(batch) == 1):
        only = batch if isinstance(batch, Tensor) else batch[0]
        return only, only
    raise ValueError(f"cannot tell the targets in a batch of type {type(batch).__name__}; {remedy}")


def _named_parts(batch: Any) -> dict[str, Any]:
    """The fields of a dataclass or a named tuple; nothing for others."""
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return {part.name: getattr(batch, part.name) for part in dataclasses.fields(batch)}
    return dict(zip(batch._fields, batch, strict=True)) if hasattr(batch, "_fields") else {}


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
    if isinstance(inner, SubsetRandomSampler) and poisson_sampling:
        raise ValueError(
            "the loader has a SubsetRandomSampler, but Poisson sampling draws from the whole data set, including what "
            "the sampler leaves out. Pass a loader over torch.utils.data.Subset(dataset, indices), without a sampler."
        )
    if isinstance(inner, _Weighted):
        if poisson_sampling:
            raise ValueError(
                "the loader has a WeightedRandomSampler, but Poisson sampling draws every example with the same "
                "probability and would drop its weights. Remove the sampler, or pass poisson_sampling=False and a "
                "sampler without replacement (then amplification is 'none')."
            )
        if inner.replacement:
            raise ValueError(
                "WeightedRandomSampler(replacement=True) can put an example into a batch twice, and its gradient then "
                "counts twice under one noise draw; build it with replacement=False"
            )
        warnings.warn(
            "the loader has a WeightedRandomSampler: examples with larger weights take part more often, and each "
            "participation counts, so they leak more. Neither the Fisher information (κ = 1) nor ε gives credit for "
            "subsampling; ε counts the participations of the most frequent example.",
            stacklevel=4,
        )
    elif (
        poisson_sampling
        and inner is not None
        and not isinstance(inner, RandomSampler | SequentialSampler | DistributedSampler)
    ):
        warnings.warn(
            f"the loader's sampler ({type(inner).__name__}) is not used: Poisson sampling draws every example of the "
            "data set with the same probability, independently. Pass poisson_sampling=False to keep the sampler.",
            stacklevel=4,
        )

    if not poisson_sampling and isinstance(inner, RandomSampler) and inner.replacement:
        raise ValueError(
            "RandomSampler(replacement=True) can put an example into a batch twice; use replacement=False or Poisson "
            "sampling"
        )
