"""Batches of every kind remember their examples: from workers, pinned, copied, and read in any way."""

from __future__ import annotations

import copy
import pickle
from collections import UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.cases import DEVICE
from tests.engine.loops import SIGMA, C, data, loader, network
from torchfil import Accounting, FILPrivacyEngine
from torchfil.engine.batches import BatchTracker, plain, remembering
from torchfil.engine.loader import split_batch

Pair = namedtuple("Pair", "x label")


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


@dataclass(slots=True)
class Slotted:
    x: Tensor
    y: Tensor


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


def as_pair(samples: list[Any]) -> Any:
    return Pair(*stacked(samples))


def as_frozen(samples: list[Any]) -> Any:
    return Frozen(*stacked(samples))


def as_slotted(samples: list[Any]) -> Any:
    return Slotted(*stacked(samples))


KINDS: list[tuple[Callable[[list[Any]], Any], Callable[[Any], tuple[Tensor, Tensor]]]] = [
    (as_list, lambda batch: (batch[0], batch[1])),
    (as_tuple, tuple),
    (as_dict, lambda batch: (batch["x"], batch["labels"])),
    (as_encoding, lambda batch: (batch["x"], batch["labels"])),
    (as_encoding, lambda batch: (batch.x, batch.pop("labels"))),
    (as_pair, lambda batch: (batch.x, batch.label)),
    (as_pair, tuple),
    (as_frozen, lambda batch: (batch.x, batch.labels)),
    (as_slotted, lambda batch: (batch.x, batch.y)),
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


@pytest.mark.parametrize("batch", [[1, 2], (1, 2), {"x": 1}, Encoding(x=1), Pair(1, 2), Frozen(1, 2), Slotted(1, 2)])  # type: ignore[arg-type]
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
    len(repr(made)), [getattr(made, name, None) for name in ("x", "data")], list(getattr(made, "__iter__", list)())
    assert tracker.ids == [5, 3]
    assert plain(tracker.batch) == batch


def test_targets_are_found_by_name() -> None:
    x, y = torch.zeros(2, 3), torch.arange(2)
    for batch in (Pair(x, y), Frozen(x, y), Slotted(x, y)):
        inputs, targets = split_batch(batch, None)
        assert len(inputs) == 1
        assert inputs[0] is x
        assert targets is y
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
