"""Gradients of models that cannot be mapped over examples are taken of one example after the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.cases import DEVICE, relative_error
from torchfil.fisher.gradients import ExampleGradients
from torchfil.private import Private


class Looking(nn.Module):
    """Asks whether a mask is all ones, as Hugging Face's models do; ``plainly`` it does not."""

    def __init__(self, plainly: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.plainly = nn.Linear(3, 4), nn.Linear(4, 2), plainly
        self.to(DEVICE, torch.float64)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        logits: Tensor = self.second(hidden if not self.plainly and mask.all() else hidden * mask)
        return logits


@pytest.mark.parametrize("batch", [0, 1, 3])
def test_a_model_that_looks_at_a_mask(batch: int) -> None:
    source = torch.Generator().manual_seed(0)
    x = torch.randn(batch, 3, generator=source, dtype=torch.float64).to(DEVICE)
    mask = (torch.arange(4).expand(batch, 4) < torch.arange(2, 2 + batch)[:, None]).to(x)
    y = torch.arange(batch, device=DEVICE) % 2
    ours, plain = (
        ExampleGradients.build(model, nn.CrossEntropyLoss(), (x, mask), y, Private(inputs=0))
        for model in (Looking(), Looking(plainly=True))
    )
    u = torch.randn(plain.num_parameters, generator=source, dtype=torch.float64).to(DEVICE)
    v = torch.randn(batch, 3, generator=source, dtype=torch.float64).to(DEVICE)
    pairs = [
        (ours.vjp(u), plain.vjp(u)),
        (ours.jvp(v), plain.jvp(v)),
        (ours.jacobian_columns(slice(0, 3)), plain.jacobian_columns(slice(0, 3))),
    ]
    for value, truth in pairs:
        assert value.shape == truth.shape
        assert not batch or relative_error(value, truth) < 1e-12


@pytest.mark.parametrize("trained_in", ["autocast", "bfloat16"])
def test_precision_of_one_after_the_other(trained_in: str) -> None:
    """As of examples that are mapped together: no autocast, float32 at least, no checkpoints."""
    source = torch.Generator().manual_seed(0)
    x, mask = torch.randn(3, 3, generator=source).to(DEVICE), torch.ones(3, 4, device=DEVICE)
    y = torch.tensor([0, 1, 1], device=DEVICE)
    dtype = torch.bfloat16 if trained_in == "bfloat16" else torch.float32
    rows = []
    for plainly in (False, True):
        model = Looking(plainly).to(dtype)
        model.first = Checkpointed(model.first)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=trained_in == "autocast"):
            inputs = (x.to(dtype), mask.to(dtype))
            gradients = ExampleGradients.build(model, nn.CrossEntropyLoss(), inputs, y, Private(inputs=0))
            rows.append(gradients.gradients())
    assert rows[0].dtype == rows[1].dtype == torch.float32
    assert relative_error(rows[0], rows[1]) < (1e-2 if dtype == torch.bfloat16 else 1e-6)


class Checkpointed(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = checkpoint(self.layer, x, use_reentrant=False)  # type: ignore[no-untyped-call]
        return outputs
