"""Data sets that give another view of an example each time: refused where coordinates are summed,
else left alone.

Inputs that are made from several examples are refused; augmentations of single ones are not.
``views``: the mean gradient over an example's views, clipped once, accounted for exactly. Batches
of every kind remember their examples.
"""

from __future__ import annotations

import copy
import pickle
import threading
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate
from torch.utils.data._utils.pin_memory import pin_memory

from tests.engine import loops
from tests.engine.brute_force import Run, assert_true, make, train
from tests.engine.loops import data, network
from tests.engine.ways import LOSS, Calling, start, step
from torchfil import Private
from torchfil.engine.loader import BatchTracker, plain, remembering
from torchfil.engine.mixing import how_rows_mix

DIAGONAL = {"track": ("diagonal",)}


class Views(Dataset[Any]):
    """(x, y), or more, as a transform of both makes it at every read."""

    def __init__(self, transform: Callable[[Tensor, Tensor], Any]) -> None:
        self.plain, self.transform = data(24), transform

    def __len__(self) -> int:
        return len(self.plain)

    def __getitem__(self, row: int) -> Any:
        return self.transform(*self.plain[row])


def flipped(x: Tensor, y: Tensor) -> Any:
    return (x.flip(-1) if torch.rand(()) < 0.5 else x), y


def with_noise() -> nn.Module:
    """A model that is given noise, or a flag, beside the example."""
    return Calling(
        lambda self, x, beside: self.network(x + beside.to(x.dtype)[:, None]), network=network()
    )


def embedding() -> nn.Module:
    return nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(20, 3)).double()


def jittered(samples: list[Any]) -> Any:
    x, y = default_collate(samples)
    return x + torch.rand(len(x), 1, dtype=x.dtype), y


WITH_FLOAT = Views(lambda x, y: (x, torch.rand((), dtype=torch.float64), y))


REFUSED: list[tuple[Any, Any, dict[str, Any]]] = [
    *((Views(flipped), network, {"track": (track,)}) for track in ("diagonal", "fim", "plis")),
    (Views(lambda x, y: (x + float(torch.rand(())), y)), network, DIAGONAL),
    # a floating-point input counts as private until it is said what is
    (WITH_FLOAT, with_noise, DIAGONAL),
    (
        Views(lambda x, y: (x, torch.rand(3))),
        network,
        {**DIAGONAL, "private": Private(target=True)},
    ),
    (
        Views(lambda _, y: (torch.randint(9, (5,)), y)),
        embedding,
        {**DIAGONAL, "private": Private(submodule="0")},
    ),
    (data(24), network, {**DIAGONAL, "loading": {"collate_fn": jittered}}),
]
TAKEN: list[tuple[Any, Any, dict[str, Any]]] = [
    (
        Subset(Views(lambda x, y: (2 * x - 1, y)), [5, 2, 7, 1]),
        network,
        {"track": ("diagonal", "plis")},
    ),
    # NaN is equal to itself
    (Views(lambda x, y: (x.where(x > 0, torch.nan), y)), network, DIAGONAL),
    # targets have no coordinates,
    (Views(lambda x, _: (x, torch.randint(3, ()))), network, DIAGONAL),
    # nor integers beside floats
    (Views(lambda x, y: (x, torch.randint(2, ()), y)), with_noise, DIAGONAL),
    (WITH_FLOAT, with_noise, {**DIAGONAL, "private": Private(inputs=0)}),
    (data(24), network, {"loading": {"collate_fn": jittered}}),  # the trace is kept
]


@pytest.mark.parametrize(("dataset", "build", "options"), REFUSED)
def test_random_views_are_refused_where_coordinates_are_summed(
    dataset: Any, build: Any, options: Any
) -> None:
    """The random stream is left as it was."""
    module = build()
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="by coordinate"):
        start(module, dataset, "auto", **options)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("dataset", "build", "options"), TAKEN)
def test_only_what_is_private_must_read_alike(dataset: Any, build: Any, options: Any) -> None:
    start(build(), dataset, "auto", **options)


def flips(self: Any, x: Tensor) -> Tensor:
    """The remedy: a flip inside the model, drawn for each example."""
    drawn = torch.rand(len(x), 1, dtype=x.dtype, device=x.device) < 0.5
    return torch.as_tensor(self.network(torch.where(drawn, x.flip(-1), x)))


@pytest.mark.parametrize("mode", ["auto", "hooks"])
def test_a_flip_inside_the_model_keeps_the_examples_own_coordinates(mode: str) -> None:
    """Brute force draws the same flips, and differentiates by what came before them."""
    module = Calling(flips, network=network())
    options = {
        "grad_sample_mode": mode,
        "criterion": LOSS,
        "noise_multiplier": 0.9,
        "poisson_sampling": False,
    }
    assert_true(train(make(module, data(8), batch_size=8, **options, **DIAGONAL), steps=1))


GENERATOR = torch.Generator().manual_seed(0)
ROWS = torch.randn(12, 3, 4, generator=GENERATOR)


def blend(x: Tensor) -> Tensor:
    return 0.7 * x + 0.3 * x.roll(1, 0)


MIXED = [
    ("mixup", blend),
    (
        "mixup",
        lambda x: (
            torch.linspace(0, 1, len(x))[:, None, None].to(x) * (x - x.roll(3, 0)) + x.roll(3, 0)
        ),
    ),
    ("patchworks", lambda x: torch.cat([x[:, :1], x.flip(0)[:, 1:]], dim=1)),
    ("another order", lambda x: x.flip(0)),
    ("statistics", lambda x: x - x.mean(dim=0)),
]
ALONE = [
    lambda x: x.flip(2),
    lambda x: x + 0.1 * torch.randn_like(x),
    lambda x: x * torch.rand(len(x), 1, 1).to(x),
    lambda x: x * (torch.rand(x.shape) > 0.3).to(x),
    lambda x: x.clamp(min=0),
]


@pytest.mark.parametrize(("how", "change"), MIXED)
def test_mixed_rows_are_found(how: str, change: Any) -> None:
    assert how in (how_rows_mix(change(ROWS), ROWS) or "")


@pytest.mark.parametrize("change", ALONE)
def test_rows_changed_by_themselves_are_not(change: Any) -> None:
    assert how_rows_mix(change(ROWS), ROWS) is None


@pytest.mark.parametrize("way", ["auto", "train_step"])
def test_mixup_is_refused_at_the_first_step(way: str) -> None:
    parts = start(nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), (ROWS, torch.arange(12) % 3), way)
    x, y = next(iter(parts[-1]))
    with pytest.raises(RuntimeError, match="mixup"):
        step(*parts[:3], blend(x), y, way)
    for x, y in parts[-1]:
        step(*parts[:3], ALONE[1](x), y, way)
    assert bool((parts[0].get_fil().value > 0).all())


K = 3


def fixed_views(x: Tensor) -> Tensor:
    return torch.stack([x, x.flip(-1), 0.5 * x.sin()], dim=1)


def random_views(x: Tensor) -> Tensor:
    """Scaled and shifted at random, each view its own way."""
    shift = torch.randn(len(x), K, x.shape[1], dtype=x.dtype, device=x.device)
    return x[:, None] * (1 + torch.rand(len(x), K, 1, dtype=x.dtype, device=x.device)) + shift


class OfViews(nn.Sequential):
    """The outputs of all views, [batch, K, classes], with the plain model's names of weights."""

    views: Any

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.views(x) if callable(self.views) else x)


def mean_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.stack(
        [F.cross_entropy(outputs[:, k], targets) for k in range(outputs.shape[1])]
    ).mean()


def made(views: Any, dataset: Any = None, **options: Any) -> Run:
    given = {
        "criterion": LOSS,
        "noise_multiplier": 0.9,
        "amplification": None,
        "views": views,
        **options,
    }
    run = make(network(), dataset or data(12), **given)
    run.plain, run.true_loss = OfViews(*run.plain), mean_loss
    run.plain.views = views
    return run


@pytest.mark.parametrize("way", ["auto", "train_step"])
@pytest.mark.parametrize("views", [fixed_views, random_views, K])
def test_the_ledger_is_the_truth(views: Any, way: str) -> None:
    x, y = data(12).tensors
    dataset = TensorDataset(fixed_views(x), y) if views == K else data(12)
    run = train(
        made(views, dataset, clip_weights=torch.linspace(0.3, 1, 12).double()), steps=2, way=way
    )
    assert_true(run, 5e-6)
    assert run.engine.ledger.num_coordinates == (5 * K if views == K else 5)


# ---------------------------------------------------- batches of every kind remember their examples


class Encoding(UserDict):  # type: ignore[type-arg]
    """As Hugging Face's BatchEncoding: entries are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        if name == "data" or name not in self.data:
            raise AttributeError(name)
        return self.data[name]


def as_dict(parts: Any) -> Any:
    return dict(zip(("x", "labels"), parts, strict=True))


def fil_of(kind: Any, read: Any = tuple, workers: int = 0, **options: Any) -> Tensor:
    def collate(samples: list[Any]) -> Any:
        x = (
            torch.stack([x for x, _ in samples])
            if samples
            else torch.zeros(0, 5, dtype=torch.float64)
        )
        return kind(
            (
                x,
                torch.stack([y for _, y in samples])
                if samples
                else torch.zeros(0, dtype=torch.long),
            )
        )

    torch.manual_seed(4)
    loading = {
        "collate_fn": collate,
        "num_workers": workers,
        "generator": torch.Generator().manual_seed(2),
    }
    options |= {"estimator": "exact", "poisson_sampling": True, "loading": loading}
    parts = start(network(), data(24), "auto", batch=8, **options)
    for batch in parts[-1]:
        step(*parts[:3], *read(batch))
    return parts[0].totals.get_trace().value


def test_every_kind_gives_the_same_run() -> None:
    found = [
        fil_of(list),
        fil_of(tuple, workers=2),
        fil_of(as_dict, lambda batch: (batch["x"], batch["labels"])),
        fil_of(
            lambda parts: Encoding(as_dict(parts)), lambda batch: (batch.x, batch.pop("labels")), 2
        ),
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
    # torch 2.8 makes lists of tuples
    assert type(plain(made.pin_memory())) is type(pin_memory(batch))
    list(made)
    assert tracker.ids == [5, 3]
    assert plain(tracker.batch) == batch


class Doubled(TensorDataset):
    """A data set of tensors with its own way to read an example."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        x, y = super().__getitem__(index)
        return 2 * x, y


TABLE = torch.randn(30, 5, generator=torch.Generator().manual_seed(1)), torch.arange(30) % 3


@pytest.mark.parametrize(
    ("dataset", "loading", "at_once"),
    [
        (TensorDataset(*TABLE), {"num_workers": 2}, True),
        (Subset(TensorDataset(*TABLE), range(29, -1, -1)), {}, True),
        (Doubled(*TABLE), {}, False),
        (TensorDataset(*TABLE), {"collate_fn": lambda samples: default_collate(samples)}, False),
    ],
)
def test_examples_that_are_fetched_at_once_make_the_same_batches(
    dataset: Any, loading: Any, at_once: bool
) -> None:
    """One gather gives, bit by bit, what single examples give.

    Data sets with their own way to read keep it.
    """
    *_, private = start(nn.Linear(5, 3), dataset, "auto", poisson_sampling=True, loading=loading)
    for batch in private:
        if batch._ids:
            expected = default_collate([dataset[k] for k in batch._ids])
            assert all(
                torch.equal(a, b) and a.dtype == b.dtype
                for a, b in zip(batch, expected, strict=True)
            )
    assert (type(private.dataset.__getitems__([3, 1])) is not list) == at_once


def train_on(made: Any) -> Any:
    """A pass in which every second batch is skipped, and copied.

    How often each example was in a batch, by value.
    """
    engine, _, model, optimizer, private = made
    inputs = private.plain_dataset.tensors[0]
    counts = torch.zeros(len(inputs), dtype=torch.long)
    for k, batch in enumerate(private):
        x, y = type(batch)(part.clone() for part in batch) if k % 4 else batch
        if k % 2 == 0:
            loops.step(model, optimizer, (x, y))
            for row in x.cpu():
                counts[int((inputs == row).all(dim=1).nonzero())] += 1
    return engine.ledger.sums["participations"].cpu(), counts


def test_ids_follow_their_examples() -> None:
    """Also past batches that are skipped, and through copies that other code makes of a batch."""
    assert torch.equal(*train_on(loops.make(data(60))))


def test_batches_touched_by_another_thread_do_not_become_current() -> None:
    """Workers' batches are pinned ahead of time in a thread of its own."""
    engine, _, model, optimizer, private = loops.make(data(60))
    batches = iter(private)
    now, later = next(batches), next(batches)
    x, y = now
    thread = threading.Thread(target=lambda: list(later))
    thread.start()
    thread.join()
    loops.step(model, optimizer, (x, y))
    seen = engine.ledger.sums["participations"].nonzero().flatten().tolist()
    assert seen == sorted(now._ids) != sorted(later._ids)
