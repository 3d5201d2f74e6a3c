"""Batches of every kind remember their examples: from workers, pinned, copied, and read in any way."""

from __future__ import annotations

import copy
import pickle
from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate

from tests.engine.loops import data, network
from tests.engine.ways import start, step
from torchfil.engine.loader import BatchTracker, plain, remembering, split_batch


class Encoding(UserDict):  # type: ignore[type-arg]
    """As Hugging Face's BatchEncoding: entries are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        if name == "data" or name not in self.data:
            raise AttributeError(name)
        return self.data[name]


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    labels: Tensor
    weight: Tensor | None = None


def as_tuple(samples: list[Any]) -> Any:
    x = torch.stack([x for x, _ in samples]) if samples else torch.zeros(0, 5, dtype=torch.float64)
    return x, torch.stack([y for _, y in samples]) if samples else torch.zeros(0, dtype=torch.long)


def as_list(samples: list[Any]) -> Any:
    return list(as_tuple(samples))


def as_dict(samples: list[Any]) -> Any:
    return dict(zip(("x", "labels"), as_tuple(samples), strict=True))


def as_encoding(samples: list[Any]) -> Any:
    return Encoding(as_dict(samples))


def as_frozen(samples: list[Any]) -> Any:
    return Frozen(*as_tuple(samples))


def fil_of(collate: Any, read: Any, workers: int, **options: Any) -> Tensor:
    torch.manual_seed(4)
    loading = {"collate_fn": collate, "num_workers": workers, "generator": torch.Generator().manual_seed(2)}
    parts = start(network(), data(40), "auto", batch=8, loading=loading, poisson_sampling=True, **options)
    for batch in parts[-1]:
        step(*parts[:3], *read(batch))
    return parts[0].get_fil().value


@pytest.fixture(scope="module")
def fil_of_lists() -> Tensor:
    return fil_of(as_list, tuple, 0, estimator="exact")


@pytest.mark.parametrize(
    ("collate", "read", "workers", "options"),
    [
        (as_tuple, tuple, 2, {}),
        (as_dict, lambda batch: (batch["x"], batch["labels"]), 0, {}),
        (as_encoding, lambda batch: (batch["x"], batch["labels"]), 2, {}),
        (as_encoding, lambda batch: (batch.x, batch.pop("labels")), 0, {}),
        (as_frozen, lambda b: (b.x, b.labels), 0, {"batch_to_inputs": lambda batch: (batch.x, batch.labels)}),
    ],
)
def test_every_kind_gives_the_same_run(
    collate: Any, read: Any, workers: int, options: Any, fil_of_lists: Tensor
) -> None:
    assert torch.equal(fil_of(collate, read, workers, estimator="exact", **options), fil_of_lists)
    assert bool((fil_of_lists > 0).any())


@pytest.mark.parametrize("batch", [[1, 2], (1, 2), {"x": 1}, Encoding(x=1)])
def test_a_batch_is_of_its_kind_and_keeps_its_ids(batch: Any) -> None:
    tracker = BatchTracker()
    made = remembering(batch, [5, 3], tracker.token)
    assert isinstance(made, type(batch))
    for other in (made, copy.copy(made), pickle.loads(pickle.dumps(made)), made.pin_memory()):
        assert type(other) is type(made)
        assert type(plain(other)) is type(batch)
        assert tracker.ids is None
    list(made)
    assert tracker.ids == [5, 3]
    assert plain(tracker.batch) == batch


def test_targets_are_found_by_name() -> None:
    x, y = torch.zeros(2, 3), torch.arange(2)
    inputs, targets = split_batch({"x": x, "labels_a": y, "labels_b": y}, None)
    assert list(inputs) == ["x"]
    assert list(targets) == ["labels_a", "labels_b"]


def test_the_very_first_batch_may_be_empty_whatever_its_structure() -> None:
    """Opacus's loader makes an empty batch like an earlier one, and cannot where there is none."""
    sizes = []
    records: Any = [{"inputs": {"x": torch.full((5,), float(i)).double()}, "labels": i % 3} for i in range(8)]
    for seed in range(4, 12):
        drawn = DataLoader(records, batch_size=1, generator=torch.Generator().manual_seed(seed))
        first = next(iter(start(network(), drawn, "auto", poisson_sampling=True)[-1]))
        assert first["inputs"]["x"].shape == (len(first["labels"]), 5)
        sizes.append(len(first["labels"]))
    assert 0 in sizes


class Doubled(TensorDataset):
    """A data set of tensors with its own way to read an example."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        x, y = super().__getitem__(index)
        return 2 * x, y


@pytest.mark.parametrize(
    ("kind", "workers"), [("tensors", 0), ("tensors", 2), ("subset", 0), ("subclass", 0), ("own collate", 0)]
)
def test_examples_that_are_fetched_at_once_make_the_same_batches(kind: str, workers: int) -> None:
    """One gather gives, bit by bit, what single examples give; data sets with their own way to read keep it."""
    x, y = torch.randn(30, 5, generator=torch.Generator().manual_seed(1)), torch.arange(30) % 3
    dataset: Any = (Doubled if kind == "subclass" else TensorDataset)(x, y)
    dataset = Subset(dataset, range(29, -1, -1)) if kind == "subset" else dataset
    loading = {"collate_fn": as_list if kind == "own collate" else default_collate, "num_workers": workers}
    *_, private = start(nn.Linear(5, 3), dataset, "auto", poisson_sampling=True, loading=loading)
    sizes = set()
    for batch in private:
        ids = list(batch._ids)
        sizes.add(len(ids))
        if ids:
            expected = default_collate([dataset[k] for k in ids])
            assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(batch, expected, strict=True))
    assert (type(private.dataset.__getitems__([3, 1])) is not list) == (kind in ("tensors", "subset"))
    assert len(sizes) > 1
