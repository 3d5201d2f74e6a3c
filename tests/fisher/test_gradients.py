"""Gradients of models that cannot be mapped over examples are taken of one example after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.cases import DEVICE, relative_error
from tests.fisher.recorded_cases import Model
from torchfil.fisher.gradients import ExampleGradients
from torchfil.private import Private


def gradients_of(batch: int, *, plainly: bool, dtype: torch.dtype, checkpointed: bool = False) -> ExampleGradients:
    """Of a model that asks whether a mask is all ones, as Hugging Face's models do; ``plainly`` it does not."""

    def run(m: Any, x: Tensor, mask: Tensor) -> Tensor:
        hidden = (checkpoint(m.first, x, use_reentrant=False) if checkpointed else m.first(x)).tanh()
        return m.second(hidden if not plainly and mask.all() else hidden * mask)

    torch.manual_seed(0)
    model = Model(run, first=nn.Linear(3, 4), second=nn.Linear(4, 2)).to(DEVICE, dtype)
    x = torch.randn(batch, 3, dtype=torch.float64).to(DEVICE, dtype)
    mask = (torch.arange(4).expand(batch, 4) < torch.arange(2, 2 + batch)[:, None]).to(x)
    y = torch.arange(batch, device=DEVICE) % 2
    return ExampleGradients.build(model, nn.CrossEntropyLoss(), (x, mask), y, Private(inputs=0))


@pytest.mark.parametrize("batch", [0, 1, 3])
def test_a_model_that_looks_at_a_mask(batch: int) -> None:
    ours, plain = (gradients_of(batch, plainly=plainly, dtype=torch.float64) for plainly in (False, True))
    u, v = (torch.randn(s, dtype=torch.float64, device=DEVICE) for s in ((plain.num_parameters,), (batch, 3)))
    for value, truth in (
        (ours.vjp(u), plain.vjp(u)),
        (ours.jvp(v), plain.jvp(v)),
        (ours.jacobian_columns(slice(0, 3)), plain.jacobian_columns(slice(0, 3))),
    ):
        assert value.shape == truth.shape
        assert not batch or relative_error(value, truth) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_precision_of_one_after_the_other(dtype: torch.dtype) -> None:
    """As of examples that are mapped together: no autocast, float32 at least, no checkpoints."""
    with torch.autocast(DEVICE, torch.bfloat16, enabled=dtype == torch.float32):
        ours, plain = (
            gradients_of(3, plainly=plainly, dtype=dtype, checkpointed=True).gradients() for plainly in (False, True)
        )
    assert ours.dtype == plain.dtype == torch.float32
    assert relative_error(ours, plain) < (1e-2 if dtype == torch.bfloat16 else 1e-6)
