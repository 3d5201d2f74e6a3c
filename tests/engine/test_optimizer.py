"""The optimizer against Opacus's own."""

from __future__ import annotations

import pytest
import torch
from opacus.optimizers import DPOptimizer
from torch import nn

from tests.cases import DEVICE
from torchfil.clipping import get_clip
from torchfil.engine.optimizer import FILOptimizer
from torchfil.utils.noise import Seeded


@pytest.mark.parametrize("noise_multiplier", [0.7, 0.0])
def test_seeded_noise_is_opacus_own(noise_multiplier: float) -> None:
    """Number by number, also for sums that do not lie in order."""
    found = []
    seeded = [torch.Generator(DEVICE).manual_seed(3) for _ in range(2)]
    ours = {"clip": get_clip("hard"), "step": None, "names": {}, "noise": Seeded(seeded[1])}
    for kind, options in ((DPOptimizer, {"generator": seeded[0]}), (FILOptimizer, ours)):
        parameters = [nn.Parameter(torch.zeros(3, 4, device=DEVICE)), nn.Parameter(torch.zeros(5, device=DEVICE))]
        optimizer = kind(
            torch.optim.SGD(parameters, lr=0.1),
            noise_multiplier=noise_multiplier,
            max_grad_norm=1.5,
            expected_batch_size=4,
            **options,
        )
        parameters[0].summed_grad = torch.arange(12.0, device=DEVICE).reshape(4, 3).mT  # type: ignore[attr-defined]
        parameters[1].summed_grad = torch.ones(5, device=DEVICE)  # type: ignore[attr-defined]
        optimizer.add_noise()
        found.append([parameter.grad for parameter in parameters])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
