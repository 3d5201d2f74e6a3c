"""Three ways of a step on a small model: hooks, auto, train_step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.cases import grouped
from torchfil import FILPrivacyEngine

LOSS = nn.CrossEntropyLoss()
WAYS = ("hooks", "auto", "train_step")


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def examples(count: int = 24, *shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, *(shape or (3,)), generator=generator), torch.randint(2, (count,), generator=generator)


def start(module: nn.Module, data: Any, way: str = "hooks", *, batch: int = 6, **options: Any) -> Any:
    """Engine, model, optimizer and loader; learning rate 0, every batch in order."""
    engine = FILPrivacyEngine()
    options = {"poisson_sampling": False, "noise_multiplier": 1.0, "max_grad_norm": 1.0, "criterion": LOSS} | options
    dataset = data if isinstance(data, Dataset) else TensorDataset(*data)
    mode = "auto" if way == "auto" else "hooks"
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    loader = DataLoader(dataset, batch_size=batch)
    return engine, *engine.make_private(module, optimizer, loader, **grouped(grad_sample_mode=mode, **options))


def step(engine: FILPrivacyEngine, model: Any, optimizer: Any, x: Tensor, y: Tensor, way: str) -> None:
    if way == "train_step":
        engine.train_step(x, y)
        return
    optimizer.zero_grad()
    LOSS(model(x), y).backward()
    optimizer.step()
