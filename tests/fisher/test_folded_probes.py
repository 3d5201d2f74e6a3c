"""One probe that carries the part along the gradient: its mean is the whole, and its error is told conservatively."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.cases import CLIPS, DEVICE, build
from torchfil import fisher
from torchfil.fisher import PoissonAmplification
from torchfil.fisher.gradients import ExampleGradients
from torchfil.fisher.mechanism import Mechanism
from torchfil.fisher.operator import ClippedJacobian
from torchfil.fisher.recording import RecordedJacobian

pytestmark = pytest.mark.torch_versions


@pytest.mark.parametrize("amplification", [None, PoissonAmplification(0.05)])
@pytest.mark.parametrize("clip", CLIPS)
def test_one_folded_probe_has_the_whole_matrix_as_its_mean(clip: str, amplification: Any) -> None:
    """Over all 2^p sign vectors, the mean of r rᵀ is the amplified Fisher information, clipping included."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1, bias=False)).to(DEVICE).double()
    x, y = torch.randn(4, 2).to(DEVICE).double(), torch.randn(4, 1).to(DEVICE).double()
    mechanism = Mechanism.build(1.5, 0.8, clip, amplification)
    gradients = ExampleGradients.build(model, nn.MSELoss(), x, y, None)
    jacobian = RecordedJacobian(gradients, mechanism.clip, mechanism.max_grad_norm)
    p = gradients.num_parameters
    mean = torch.zeros(4, 2, 2, dtype=torch.float64, device=DEVICE)
    for bits in range(2**p):
        u = torch.tensor([1.0 if bits >> k & 1 else -1.0 for k in range(p)], dtype=torch.float64, device=DEVICE)
        r = jacobian.folded_row(mechanism, u)
        mean += r[:, :, None] * r[:, None, :] / 2**p
    want = fisher.exact_fim(
        model,
        nn.MSELoss(),
        x,
        y,
        max_grad_norm=1.5,
        noise_multiplier=0.8,
        clip=clip,
        amplification=amplification,
    )
    assert torch.allclose(mean, want, rtol=1e-8, atol=1e-12)


def test_one_folded_probe_reports_a_conservative_error() -> None:
    case = build("mlp", 5)
    options: dict[str, Any] = {"max_grad_norm": case.C, "noise_multiplier": 1.0}
    amplified = {**options, "amplification": PoissonAmplification(0.1)}
    truth = fisher.fim_trace(*case.arguments, **amplified, estimator="exact").value
    draws = [
        fisher.fim_trace(*case.arguments, **amplified, num_probes=1, generator=torch.Generator().manual_seed(s))
        for s in range(200)
    ]
    values = torch.stack([draw.value for draw in draws])
    errors = torch.stack([draw.standard_error for draw in draws])
    assert ((values.mean(dim=0) - truth).abs() < 4.5 * values.std(dim=0) / 200**0.5).all()
    assert (errors.square().mean(dim=0) >= values.var(dim=0)).all()


def test_the_part_along_the_gradient_is_not_left_to_chance() -> None:
    """Var ‖r‖² = 2‖AAᵀ‖² + 4aᵀAAᵀa at most: what lies along the gradient alone does not vary."""
    case = build("mlp", 5)
    mechanism = Mechanism.build(case.C, 1.0)
    gradients = ExampleGradients.build(*case.arguments)
    jacobian = RecordedJacobian(gradients, mechanism.clip, mechanism.max_grad_norm)
    mapped = ClippedJacobian(gradients, mechanism.clip, mechanism.max_grad_norm)
    a, rest = jacobian.clipped_norm_gradient() / case.C, mapped.perpendicular_gram() / case.C**2
    source = torch.Generator(device=DEVICE).manual_seed(0)
    signs = torch.randint(0, 2, (1500, gradients.num_parameters), generator=source, device=DEVICE) * 2.0 - 1
    values = torch.stack([jacobian.folded_row(mechanism, u.to(a)).square().sum(dim=1) for u in signs])
    largest = 2 * rest.square().sum(dim=(1, 2)) + 4 * torch.einsum("bd,bde,be->b", a, rest, a)
    assert (values.var(dim=0) <= 1.15 * largest).all()
    whole = rest + a[:, :, None] * a[:, None, :]
    assert (largest < 2 * whole.square().sum(dim=(1, 2))).all()
