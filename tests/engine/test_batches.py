"""Batches of every kind remember their examples: from workers, pinned, copied, and read in any way."""

from __future__ import annotations

import copy
import pickle
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.cases import DEVICE
from tests.engine.loops import SIGMA, C, data, loader, network
from torchfil import Accounting, FILPrivacyEngine
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


def stacked(samples: list[Any]) -> tuple[Tensor, Tensor]:
    x = torch.stack([x for x, _ in samples]) if samples else torch.zeros(0, 5, dtype=torch.float64)
    return x, torch.stack([y for _, y in samples]) if samples else torch.zeros(0, dtype=torch.long)


def as_list(samples: list[Any]) -> Any:
    return list(stacked(samples))


def as_tuple(samples: list[Any]) -> Any:
    return stacked(samples)


def as_dict(samples: list[Any]) -> Any:
    return dict(zip(("x", "labels"), stacked(samples), strict=True))


def as_encoding(samples: list[Any]) -> Any:
    return Encoding(as_dict(samples))


def as_frozen(samples: list[Any]) -> Any:
    return Frozen(*stacked(samples))


KINDS: list[tuple[Callable[[list[Any]], Any], Callable[[Any], tuple[Tensor, Tensor]]]] = [
    (as_list, lambda batch: (batch[0], batch[1])),
    (as_tuple, tuple),
    (as_dict, lambda batch: (batch["x"], batch["labels"])),
    (as_encoding, lambda batch: (batch["x"], batch["labels"])),
    (as_encoding, lambda batch: (batch.x, batch.pop("labels"))),
]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("collate", "read"), KINDS)
def test_every_kind_gives_the_same_run(collate: Any, read: Any, workers: int) -> None:
    fil = []
    for collate_fn, taken, number in ((as_list, KINDS[0][1], 0), (collate, read, workers)):
        engine, module = FILPrivacyEngine(), network()
        torch.manual_seed(4)
        plain_loader = loader(
            data(40), 8, collate_fn=collate_fn, num_workers=number, pin_memory=torch.cuda.is_available()
        )
        model, optimizer, private = engine.make_private(
            module,
            torch.optim.SGD(module.parameters(), lr=0.0),
            plain_loader,
            noise_multiplier=SIGMA,
            max_grad_norm=C,
            accounting=Accounting(seed=3, estimator="exact"),
        )
        for batch in private:
            optimizer.zero_grad()
            x, y = (part.to(DEVICE) for part in taken(batch))
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        fil.append(engine.get_fil().value)
    assert torch.equal(*fil)
    assert bool((fil[0] > 0).any())


@pytest.mark.parametrize("batch", [[1, 2], (1, 2), {"x": 1}, Encoding(x=1)])
def test_a_batch_is_of_its_kind_and_keeps_its_ids(batch: Any) -> None:
    tracker = BatchTracker()
    made = remembering(batch, [5, 3], tracker.token)
    assert isinstance(made, type(batch))
    assert tracker.ids is None
    for other in (made, copy.copy(made), pickle.loads(pickle.dumps(made)), made.pin_memory()):
        assert type(other) is type(made)
        assert tracker.ids is None
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


class Records(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Items as Hugging Face's data sets have them."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"inputs": {"x": torch.full((5,), float(index)).double()}, "labels": index % 3}


def test_the_very_first_batch_may_be_empty_whatever_its_structure() -> None:
    """Opacus's loader makes an empty batch like an earlier one, and cannot where there is none."""
    first_sizes = []
    for seed in range(4, 12):
        model = network()
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.utils.data.DataLoader(Records(), batch_size=1, generator=generator)
        *_, private = FILPrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=drawn,
            noise_multiplier=SIGMA,
            max_grad_norm=C,
        )
        first = next(iter(private))
        assert first["inputs"]["x"].shape == (len(first["labels"]), 5)
        first_sizes.append(len(first["labels"]))
    assert 0 in first_sizes


def test_other_containers_need_batch_to_inputs() -> None:
    module = network()
    engine = FILPrivacyEngine()
    model, optimizer, private = engine.make_private(
        module,
        torch.optim.SGD(module.parameters(), lr=0.0),
        loader(data(40), 8, collate_fn=as_frozen),
        noise_multiplier=SIGMA,
        max_grad_norm=C,
        batch_to_inputs=lambda batch: (batch.x, batch.labels),
    )
    for batch in private:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch.x.to(DEVICE)), batch.labels.to(DEVICE)).backward()
        optimizer.step()
    assert bool((engine.get_fil().value > 0).any())


class Doubled(torch.utils.data.TensorDataset):
    """A data set of tensors with its own way to read an example."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        x, y = super().__getitem__(index)
        return 2 * x, y


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["tensors", "subset", "subclass", "own collate"])
def test_examples_that_are_fetched_at_once_make_the_same_batches(kind: str, workers: int) -> None:
    """One gather gives, bit by bit, what single examples give; data sets with their own way to read keep it."""
    x, y = torch.randn(30, 5, generator=torch.Generator().manual_seed(1)), torch.arange(30) % 3
    dataset: Any = Doubled(x, y) if kind == "subclass" else torch.utils.data.TensorDataset(x, y)
    dataset = torch.utils.data.Subset(dataset, range(29, -1, -1)) if kind == "subset" else dataset
    given = {"collate_fn": torch.utils.data.default_collate} if kind != "own collate" else {"collate_fn": as_list}
    module = nn.Linear(5, 3)
    engine = FILPrivacyEngine()
    *_, private = engine.make_private(
        module,
        torch.optim.SGD(module.parameters(), lr=0.0),
        torch.utils.data.DataLoader(dataset, batch_size=6, num_workers=workers, **given),
        noise_multiplier=SIGMA,
        max_grad_norm=C,
    )
    sizes = set()
    for batch in private:
        assert isinstance(batch, list)
        ids = list(batch._ids)  # type: ignore[attr-defined]
        sizes.add(len(ids))
        if ids:
            expected = torch.utils.data.default_collate([dataset[k] for k in ids])
            assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(batch, expected, strict=True))
    fetched = private.dataset.__getitems__([3, 1])
    assert (type(fetched) is not list) == (kind in ("tensors", "subset"))
    assert len(sizes) > 1
