"""A private run on the small network, and one step of its loop."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from tests.cases import DEVICE, grouped
from tests.engine.loops import data, loader, network
from torchfil import FILPrivacyEngine


def make(dataset: Any = None, module: nn.Module | None = None, batch_size: int = 8, **options: Any) -> Any:
    module = module if module is not None else network()
    engine = FILPrivacyEngine()
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.3)
    plain = dataset if isinstance(dataset, DataLoader) else loader(dataset or data(40), batch_size)
    return engine, module, *engine.make_private(module, optimizer, plain, **grouped(**options))


def step(model: Any, optimizer: Any, batch: Any) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(batch[0].to(DEVICE)), batch[1].to(DEVICE)).backward()
    optimizer.step()
