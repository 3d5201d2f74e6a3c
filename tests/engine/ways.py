"""Three ways of a step on a small model: hooks, auto, train_step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.cases import DEVICE, grouped
from tests.fisher.recorded_cases import Model
from torchfil import FILPrivacyEngine

Calling = Model  # whose forward pass is a function of itself and its inputs
LOSS = nn.CrossEntropyLoss()
WAYS = ("hooks", "auto", "train_step")


def mlp() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def examples(count: int = 24, *shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, *(shape or (3,)), generator=generator), torch.randint(
        2, (count,), generator=generator
    )


def start(
    module: nn.Module,
    data: Any,
    way: str = "hooks",
    *,
    batch: int = 6,
    lr: float = 0.0,
    optimizer: Any = None,
    loading: Any = None,
    **options: Any,
) -> Any:
    """Engine, model, optimizer and loader.

    By default the learning rate is 0 and every batch comes in order.
    """
    engine = FILPrivacyEngine()
    given = {
        "poisson_sampling": False,
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
        "criterion": LOSS,
    }
    given |= {"grad_sample_mode": "auto" if way == "auto" else "hooks"} | options
    dataset = data if isinstance(data, DataLoader | Dataset | list) else TensorDataset(*data)
    loader = (
        data
        if isinstance(data, DataLoader)
        else DataLoader(dataset, batch_size=batch, **loading or {})
    )
    optimizer = optimizer or torch.optim.SGD(
        [p for p in module.parameters() if p.requires_grad], lr=lr
    )
    return engine, *engine.make_private(module.to(DEVICE), optimizer, loader, **grouped(**given))


def step(
    engine: FILPrivacyEngine,
    model: Any,
    optimizer: Any,
    x: Any,
    y: Tensor,
    way: str = "auto",
    loss: Any = LOSS,
) -> None:
    x = (
        {name: value.to(DEVICE) for name, value in x.items()}
        if isinstance(x, dict)
        else x.to(DEVICE)
    )
    if way == "train_step":
        engine.train_step(x, y.to(DEVICE))
        return
    optimizer.zero_grad()
    loss(model(**x) if isinstance(x, dict) else model(x), y.to(DEVICE)).backward()
    optimizer.step()


def trained(
    engine: Any,
    model: Any,
    optimizer: Any,
    loader: Any,
    way: str = "auto",
    loss: Any = LOSS,
    steps: int | None = None,
) -> FILPrivacyEngine:
    """So many steps of one pass over the loader, or all."""
    for _, (x, y) in zip(range(steps or len(loader)), loader, strict=False):
        step(engine, model, optimizer, x, y, way, loss)
    return engine  # type: ignore[no-any-return]


def weights_of(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def taken(engine: FILPrivacyEngine) -> list[int]:
    """How often every example took part."""
    return engine.leakage()["participations"].tolist()  # type: ignore[no-any-return]
