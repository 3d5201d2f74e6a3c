"""The optimizer against Opacus's own."""

from __future__ import annotations

import pytest
import torch
from opacus.optimizers import DPOptimizer
from torch import nn

from tests.cases import DEVICE
from torchfil.clipping import get_clip
from torchfil.engine.optimizer import FILOptimizer


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("noise_multiplier", [0.7, 0.0])
def test_the_noise_is_opacus_own(noise_multiplier: float, secure: bool) -> None:
    """Number by number, also for sums that do not lie in order."""
    found = []
    for kind, options in ((DPOptimizer, {}), (FILOptimizer, {"clip": get_clip("hard"), "source": None, "names": {}})):
        parameters = [nn.Parameter(torch.zeros(3, 4, device=DEVICE)), nn.Parameter(torch.zeros(5, device=DEVICE))]
        optimizer = kind(
            torch.optim.SGD(parameters, lr=0.1),
            noise_multiplier=noise_multiplier,
            max_grad_norm=1.5,
            expected_batch_size=4,
            generator=torch.Generator(DEVICE).manual_seed(3),
            secure_mode=secure,
            **options,
        )
        parameters[0].summed_grad = torch.arange(12.0, device=DEVICE).reshape(4, 3).mT  # type: ignore[attr-defined]
        parameters[1].summed_grad = torch.ones(5, device=DEVICE)  # type: ignore[attr-defined]
        optimizer.add_noise()
        found.append([parameter.grad for parameter in parameters])
    for theirs, ours in zip(*found, strict=True):
        assert torch.equal(theirs, ours)
