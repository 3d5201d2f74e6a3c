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
from torch.utils.data._utils.pin_memory import pin_memory

from tests.engine.loops import data, network
from tests.engine.ways import start, step
from torchfil.engine.loader import BatchTracker, plain, remembering


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


def as_dict(parts: Any) -> Any:
    return dict(zip(("x", "labels"), parts, strict=True))


def fil_of(kind: Any, read: Any = tuple, workers: int = 0, **options: Any) -> Tensor:
    def collate(samples: list[Any]) -> Any:
        x = torch.stack([x for x, _ in samples]) if samples else torch.zeros(0, 5, dtype=torch.float64)
        return kind((x, torch.stack([y for _, y in samples]) if samples else torch.zeros(0, dtype=torch.long)))

    torch.manual_seed(4)
    loading = {"collate_fn": collate, "num_workers": workers, "generator": torch.Generator().manual_seed(2)}
    options |= {"estimator": "exact", "poisson_sampling": True, "loading": loading}
    parts = start(network(), data(24), "auto", batch=8, **options)
    for batch in parts[-1]:
        step(*parts[:3], *read(batch))
    return parts[0].get_fil().value


def test_every_kind_gives_the_same_run() -> None:
    found = [
        fil_of(list),
        fil_of(tuple, workers=2),
        fil_of(as_dict, lambda batch: (batch["x"], batch["labels"])),
        fil_of(lambda parts: Encoding(as_dict(parts)), lambda batch: (batch.x, batch.pop("labels")), 2),
        fil_of(lambda parts: Frozen(*parts), lambda b: (b.x, b.labels), batch_to_inputs=lambda b: (b.x, b.labels)),
    ]
    assert bool((found[0] > 0).any())
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("batch", [[1, 2], (1, 2), {"x": 1}, Encoding(x=1)])
def test_a_batch_is_of_its_kind_and_keeps_its_ids(batch: Any) -> None:
    tracker = BatchTracker()
    made = remembering(batch, [5, 3], tracker.token)
    assert isinstance(made, type(batch))
    for other in (made, copy.copy(made), pickle.loads(pickle.dumps(made))):
        assert type(other) is type(made)
        assert type(plain(other)) is type(batch)
        assert tracker.ids is None
    assert type(plain(made.pin_memory())) is type(pin_memory(batch))  # torch 2.8 makes lists of tuples
    list(made)
    assert tracker.ids == [5, 3]
    assert plain(tracker.batch) == batch


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


ROWS = torch.randn(30, 5, generator=torch.Generator().manual_seed(1)), torch.arange(30) % 3


@pytest.mark.parametrize(
    ("dataset", "loading", "at_once"),
    [
        (TensorDataset(*ROWS), {"num_workers": 2}, True),
        (Subset(TensorDataset(*ROWS), range(29, -1, -1)), {}, True),
        (Doubled(*ROWS), {}, False),
        (TensorDataset(*ROWS), {"collate_fn": lambda samples: default_collate(samples)}, False),
    ],
)
def test_examples_that_are_fetched_at_once_make_the_same_batches(dataset: Any, loading: Any, at_once: bool) -> None:
    """One gather gives, bit by bit, what single examples give; data sets with their own way to read keep it."""
    *_, private = start(nn.Linear(5, 3), dataset, "auto", poisson_sampling=True, loading=loading)
    for batch in private:
        if batch._ids:
            expected = default_collate([dataset[k] for k in batch._ids])
            assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(batch, expected, strict=True))
    assert (type(private.dataset.__getitems__([3, 1])) is not list) == at_once
