"""Layers with a rule of their own, and what a recorded pass of them is compared with: plain autograd, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.cases import DEVICE
from torchfil.clipping import get_clip
from torchfil.fisher import PoissonAmplification
from torchfil.fisher.gradients import ExampleGradients, differentiable_twice
from torchfil.fisher.mechanism import Mechanism
from torchfil.fisher.operator import ClippedJacobian
from torchfil.fisher.recording import RecordedJacobian, plan

BATCH = 3


class NormGradient(NamedTuple):
    """‖g‖², [batch], and ∇_z‖g‖² = 2Jᵀg, [batch, d]."""

    square: Tensor
    gradient: Tensor


def norm_gradient(gradients: ExampleGradients) -> NormGradient:
    jacobian = RecordedJacobian(gradients, get_clip("rsqrt"), 1.0)
    return NormGradient(jacobian.norm.square(), 2 * jacobian.norm[:, None] * jacobian.norm_gradient())


def brute_force(model: nn.Module, loss_fn: Any, x: Tensor, y: Any) -> tuple[Tensor, Tensor]:
    """‖g‖² and its gradient with respect to x, one example at a time."""
    squares, slopes = [], []
    weights = [p for p in model.parameters() if p.requires_grad]
    for i in range(len(x)):
        one = x[i : i + 1].detach().clone().requires_grad_()
        loss = loss_fn(model(one * 1), y[i : i + 1])  # times one: a leaf must not be changed in place
        gradients = torch.autograd.grad(loss, weights, create_graph=True, allow_unused=True)
        square = sum((g.square().sum() for g in gradients if g is not None), start=torch.zeros(()))
        (slope,) = torch.autograd.grad(square, one, allow_unused=True)
        squares.append(square.detach())
        slopes.append(torch.zeros_like(one[0]) if slope is None else slope[0])
    return torch.stack(squares), torch.stack(slopes)


def check(model: nn.Module, x: Tensor, *, supported: bool = True, loss_fn: Any = None) -> None:
    model = model.to(DEVICE).double()
    x = x.to(DEVICE).double()
    with torch.no_grad():
        y = torch.randn_like(model(x.clone()))
    loss_fn = loss_fn or nn.MSELoss()

    before = {k: v.clone() for k, v in model.state_dict().items()}
    gradients = ExampleGradients.build(model, loss_fn, x, y, None)
    found = plan(gradients)
    assert found.fits == supported, found.reason
    if not supported:
        return

    got = norm_gradient(gradients)
    with differentiable_twice():
        square, slope = brute_force(model, loss_fn, x, y)
    assert torch.allclose(got.square, square, rtol=1e-10)
    assert torch.allclose(got.gradient.reshape(slope.shape), slope, rtol=1e-8, atol=1e-10 * float(slope.abs().max()))

    mechanism = Mechanism.build(1.0, 0.7, "gelu", PoissonAmplification(0.1))
    recorded, mapped = (kind(gradients, mechanism.clip, 1.0) for kind in (RecordedJacobian, ClippedJacobian))
    probes = torch.randn(3, gradients.num_parameters, dtype=torch.float64, device=DEVICE)
    pairs = [(recorded.folded_row(mechanism, u), mapped.folded_row(mechanism, u)) for u in probes[:2]]
    for at_once in (1, 2):
        pairs += zip(recorded.perpendicular_rows(probes, at_once), mapped.perpendicular_rows(probes), strict=True)
    assert len(pairs) == 8
    for got_row, want in pairs:
        assert torch.allclose(got_row, want, rtol=1e-8, atol=1e-10 * float(want.abs().max()))

    mask = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64, device=DEVICE)
    summed = torch.cat([part.flatten() for part in recorded.clipped_sum(mask).values()])
    assert torch.allclose(summed, mask @ mapped.clipped_gradient, rtol=1e-9, atol=1e-12)
    assert torch.allclose(recorded.clipped_norm_gradient(), mapped.clipped_norm_gradient(), rtol=1e-8, atol=1e-12)

    assert found.bytes_per_example > 0
    assert not any(module._forward_hooks for module in model.modules())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(isinstance(p, nn.Parameter) and p.grad is None for p in model.parameters())


class Flat(nn.Module):
    """A layer under a nonlinearity, so that its input and output gradient both depend on x."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(torch.sin(x))).flatten(1)


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(5, 4), (5,)),
    "linear without bias": (lambda: nn.Linear(5, 4, bias=False), (5,)),
    "linear on few tokens": (lambda: nn.Linear(20, 15), (2, 20)),
    "linear on many tokens": (lambda: nn.Linear(3, 2), (9, 3)),
    "linear on a grid": (lambda: nn.Linear(3, 2), (2, 4, 3)),
    "conv1d": (lambda: nn.Conv1d(2, 3, 3, stride=2, padding=1), (2, 7)),
    "conv2d": (lambda: nn.Conv2d(2, 3, 3), (2, 5, 6)),
    "conv2d by Gram matrices": (lambda: nn.Conv2d(6, 8, 2), (6, 3, 2)),
    "conv2d stride, padding": (lambda: nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 2)), (2, 5, 6)),
    "conv2d many channels": (lambda: nn.Conv2d(8, 3, (3, 2), padding=(2, 1)), (8, 4, 5)),
    "conv2d kernel of whole strides": (lambda: nn.Conv2d(9, 2, (4, 2), stride=2, padding=(1, 0)), (9, 7, 6)),
    "conv2d dilation": (lambda: nn.Conv2d(2, 3, 2, dilation=(2, 3), padding=1), (2, 6, 6)),
    "conv2d groups": (lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1), (4, 4, 4)),
    "conv2d groups, stride": (lambda: nn.Conv2d(4, 6, (3, 2), groups=2, stride=(2, 3), padding=1), (4, 6, 5)),
    "conv2d depthwise": (lambda: nn.Conv2d(3, 6, 3, groups=3, bias=False), (3, 5, 5)),
    "conv2d same": (lambda: nn.Conv2d(2, 3, (3, 4), padding="same"), (2, 5, 5)),
    "conv2d circular": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (2, 5, 5)),
    "conv2d reflect": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (2, 5, 5)),
    "conv3d": (lambda: nn.Conv3d(2, 2, 2, stride=(1, 2, 1)), (2, 3, 4, 3)),
    "transposed conv": (lambda: nn.ConvTranspose2d(2, 3, 2), (2, 3, 3)),
    "layernorm": (lambda: nn.LayerNorm(5), (5,)),
    "layernorm on tokens": (lambda: nn.LayerNorm((4, 3)), (2, 4, 3)),
    "rmsnorm": (lambda: nn.RMSNorm(5), (3, 5)),
    "groupnorm": (lambda: nn.GroupNorm(2, 4), (4, 3, 3)),
    "instancenorm": (lambda: nn.InstanceNorm2d(3, affine=True), (3, 4, 4)),
    "own parameters beside a child": (lambda: Scaled(), (4,)),
    "own parameters in a product": (lambda: Mixed(), (3,)),
    "prelu": (lambda: nn.PReLU(4), (4,)),
}


class Scaled(nn.Module):
    """A plain parameter beside a child with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0, 0.5]))
        self.inner = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * torch.tanh(self.inner(x))


class Mixed(nn.Module):
    """A plain parameter that meets the examples in a sum of products."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,ij->bj", x, self.mix)
