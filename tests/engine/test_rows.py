"""Inputs that are made from several examples are refused; augmentations of single ones are not."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.cases import DEVICE
from tests.engine.loops import SIGMA, C, loader
from torchfil import FILPrivacyEngine
from torchfil.engine.guard import how_rows_mix

ROWS = torch.randn(12, 3, 4, generator=torch.Generator().manual_seed(0))


def cut_out(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, 1:] = x.flip(0)[:, 1:]
    return x


MIXED = {
    "blends": [
        lambda x: 0.7 * x + 0.3 * x.roll(1, 0),
        lambda x: torch.linspace(0, 1, len(x))[:, None, None].to(x) * (x - x.roll(3, 0)) + x.roll(3, 0),
        lambda x: x.roll(1, 0) * 0.999 + x,
    ],
    "patchworks": [cut_out],
    "another order": [
        lambda x: x.flip(0),
        lambda x: x[torch.randperm(len(x), generator=torch.Generator().manual_seed(1))],
    ],
    "statistics": [lambda x: x - x.mean(dim=0), lambda x: (x - x.mean()) / x.std()],
}
ALONE = [
    lambda x: x,
    lambda x: x.flip(2),
    lambda x: x + 0.1 * torch.randn_like(x),
    lambda x: 2 * x - 1,
    lambda x: x * torch.rand(len(x), 1, 1).to(x),
    lambda x: (x - 0.13) / 0.3,
    lambda x: x * (torch.rand(x.shape) > 0.3).to(x),
    lambda x: x.roll(1, 2),
    lambda x: x.clamp(min=0),
]


@pytest.mark.parametrize(("how", "change"), [(how, change) for how, changes in MIXED.items() for change in changes])
def test_mixed_rows_are_found(how: str, change: Any) -> None:
    found = how_rows_mix(change(ROWS), ROWS)
    assert found is not None
    assert how in found


@pytest.mark.parametrize("change", ALONE)
@pytest.mark.parametrize("rows", [ROWS, torch.cat([torch.ones(1, 3, 4), ROWS]), ROWS[:2], ROWS[:, :1, :1] * ROWS[:1]])
def test_rows_changed_by_themselves_are_not(change: Any, rows: Tensor) -> None:
    assert how_rows_mix(change(rows), rows) is None


@pytest.mark.parametrize("numbers", [3, 4, 7])
def test_rows_of_few_numbers(numbers: int) -> None:
    """Mixup, another order and centring are noticed; changes of single rows, and categories, are not."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(20, numbers, generator=generator)
    assert "mixup" in (how_rows_mix(0.7 * rows + 0.3 * rows.flip(0), rows) or "")
    assert "another order" in (how_rows_mix(rows.flip(0), rows) or "")
    assert "statistics" in (how_rows_mix(rows - rows.mean(dim=0), rows) or "")
    for change in ALONE:
        for batch in (rows, rows[:2], rows.abs()):
            assert how_rows_mix(change(batch[:, None])[:, 0], batch) is None
    categories = torch.randint(3, (20, numbers), generator=generator).float()
    assert how_rows_mix((categories + torch.randint(3, categories.shape, generator=generator)) % 3, categories) is None


def test_missing_numbers_are_left_to_another_check() -> None:
    rows = ROWS.clone()
    rows[1, 0, 0] = float("nan")
    assert how_rows_mix(rows, rows.clone()) is None


def test_order_of_single_numbers() -> None:
    rows = torch.randn(6, 1, generator=torch.Generator().manual_seed(0))
    assert "another order" in (how_rows_mix(rows.flip(0), rows) or "")
    assert how_rows_mix(0.7 * rows + 0.3 * rows.flip(0), rows) is None  # any number is a blend of two


def trained(change: Any, dataset: TensorDataset, way: str) -> FILPrivacyEngine:
    engine = FILPrivacyEngine()
    module = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)).to(DEVICE)
    model, optimizer, private = engine.make_private(
        module,
        torch.optim.SGD(module.parameters(), lr=0.1),
        loader(dataset, 6),
        poisson_sampling=False,
        noise_multiplier=SIGMA,
        max_grad_norm=C,
        criterion=nn.CrossEntropyLoss(),
    )
    for x, y in private:
        x, y = change(x).to(DEVICE), y.to(DEVICE)
        if way == "train_step":
            engine.train_step(x, y)
        else:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return engine


@pytest.mark.parametrize("way", ["loop", "train_step"])
def test_mixup_is_refused_at_the_first_step(way: str, caplog: pytest.LogCaptureFixture) -> None:
    dataset = TensorDataset(ROWS, torch.arange(12) % 3)
    with pytest.raises(RuntimeError, match=r"blends of two rows \(mixup\?\).*not bounded by max_grad_norm"):
        trained(MIXED["blends"][0], dataset, way)
    with caplog.at_level(logging.INFO):
        engine = trained(ALONE[2], dataset, way)
    assert sum("views that it saw" in record.message for record in caplog.records) == 1
    assert bool((engine.get_fil().value > 0).all())
