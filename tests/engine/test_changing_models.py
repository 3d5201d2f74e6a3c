"""Models that change during a run: hooks, attributes, layers that wake up or are frozen."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.engine.ways import LOSS, WAYS, examples, mlp, start, step
from torchfil import FILPrivacyEngine
from torchfil.utils.errors import UnsupportedModuleError


@pytest.mark.parametrize("way", WAYS)
def test_a_forward_hook_that_changes_the_output_is_refused(way: str) -> None:
    module = mlp()
    module[1].register_forward_hook(lambda module, inputs, output: 3 * output)  # type: ignore[index, union-attr]
    engine, model, optimizer, loader = start(module, examples(), way)
    x, y = next(iter(loader))
    with pytest.raises(RuntimeError, match="copy of the model gives|differ from those of the engine's loss"):
        step(engine, model, optimizer, x, y, way)


class _Scaled(nn.Module):
    """A temperature that a schedule may change."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = mlp(), 1.0

    def forward(self, x: Tensor) -> Tensor:
        """As said."""
        result: Tensor = self.scale * self.inner(x)
        return result


@pytest.mark.parametrize("way", WAYS)
def test_an_attribute_that_changes_is_followed(way: str) -> None:
    module = _Scaled()
    options = {"noise_multiplier": 1e-9, "max_grad_norm": 1e3, "clip": "hard"}
    engine, model, optimizer, loader = start(module, examples(), way, **options)
    batches = iter(loader)
    step(engine, model, optimizer, *next(batches), way)
    module.scale = 10.0
    x, y = next(batches)
    step(engine, model, optimizer, x, y, way)
    same = _Scaled()
    same.load_state_dict(copy.deepcopy(module.state_dict()))
    same.scale = 10.0
    LOSS(same(x), y).backward()
    for got, want in zip(module.parameters(), same.parameters(), strict=True):
        assert torch.allclose(got.grad, want.grad, atol=1e-5)  # type: ignore[arg-type]


class _Caching(nn.Module):
    """Keeps a tensor in an attribute that begins as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.last: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        """As said."""
        self.last = x.detach().clone()
        result: Tensor = self.inner(x)
        return result


@pytest.mark.parametrize("way", WAYS)
def test_an_attribute_that_becomes_a_tensor(way: str) -> None:
    module = _Caching()
    engine, model, optimizer, loader = start(module, examples(), way)
    for x, y in loader:
        step(engine, model, optimizer, x, y, way)
        module.last = 0.0
    assert engine.leakage()["participations"].tolist() == [1] * 24


@pytest.mark.parametrize("way", WAYS)
def test_batch_normalisation_that_wakes_up_is_refused(way: str) -> None:
    """Frozen and in eval mode it is taken; model.train() after a validation puts it back into training."""
    module = nn.Sequential(nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2))
    module[1].requires_grad_(False)
    module[1].eval()
    engine, model, optimizer, loader = start(module, examples(24, 1, 3, 3), way)
    batches = iter(loader)
    step(engine, model, optimizer, *next(batches), way)
    model.eval()
    model.train()
    with pytest.raises(UnsupportedModuleError, match="batch normalisation mixes the examples"):
        step(engine, model, optimizer, *next(batches), way)
    module[1].eval()
    step(engine, model, optimizer, *next(batches), way)
    assert engine.leakage()["participations"].sum() == 12


def test_a_layer_that_is_frozen_stays_where_it_is() -> None:
    module = mlp()
    engine = FILPrivacyEngine()
    loader = DataLoader(TensorDataset(*examples()), batch_size=6)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    _, _, private = engine.make_private(
        module, optimizer, loader, criterion=LOSS, poisson_sampling=False, noise_multiplier=1.0, max_grad_norm=1.0
    )
    batches = iter(private)
    engine.train_step(*next(batches))
    first, last = module[0], module[2]  # type: ignore[index]
    first.requires_grad_(False)
    frozen, trained = first.weight.clone(), last.weight.clone()
    engine.train_step(*next(batches))
    engine.train_step(*next(batches))
    assert torch.equal(first.weight, frozen)
    assert not torch.equal(last.weight, trained)
