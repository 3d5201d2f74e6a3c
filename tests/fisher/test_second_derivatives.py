"""Second derivatives of torch's operators under vmap against the same example by example, in float64.

Layers without a rule of their own, and models that are mapped over examples, rest on them. Three nestings are in use:

* outside: ``vmap(vjp)`` gives every example's gradient, which autograd differentiates by the inputs (generic rule);
* inside: the gradient of a gradient is taken inside ``vmap`` (mapped gradients);
* over cotangents: one graph of a gradient, differentiated for many directions at once (several probes together).

An operator that torch differentiates wrongly is marked as such, strictly: a torch that mends it is noticed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vjp, vmap
from torch.nn import functional as F

from tests.cases import DEVICE, relative_error
from torchfil.fisher.gradients import differentiable_twice

pytestmark = pytest.mark.torch_versions

BATCH = 3
Operator = Callable[[Tensor, Tensor], Tensor]

# Of an example's input [1, …] and one parameter: the operator, the shape of an example, and the parameter's.
OPERATORS: dict[str, tuple[Operator, tuple[int, ...], tuple[int, ...]]] = {
    "layer_norm": (lambda x, w: F.layer_norm(x, (5,), w), (4, 5), (5,)),
    "layer_norm over two": (lambda x, w: F.layer_norm(x, (4, 5), w), (4, 5), (4, 5)),
    "layer_norm without weights": (lambda x, w: F.layer_norm(x * w, (5,)), (4, 5), (5,)),
    "group_norm": (lambda x, w: F.group_norm(x, 2, w), (4, 3, 2), (4,)),
    "group_norm without weights": (lambda x, w: F.group_norm(x * w, 2), (4, 3), (3,)),
    "rms_norm": (lambda x, w: F.rms_norm(x, (5,), w), (4, 5), (5,)),
    "instance_norm": (lambda x, w: F.instance_norm(x, weight=w), (3, 4), (3,)),
    "instance_norm without weights": (lambda x, w: F.instance_norm(x * w), (3, 4), (4,)),
    "normalize": (lambda x, w: F.normalize(x * w, dim=-1), (4, 5), (5,)),
    "conv1d": (lambda x, w: F.conv1d(x, w, padding=1), (2, 5), (3, 2, 3)),
    "conv2d": (lambda x, w: F.conv2d(x, w, stride=2), (2, 5, 5), (3, 2, 3, 2)),
    "conv2d in groups": (lambda x, w: F.conv2d(x, w, groups=2), (4, 3, 3), (4, 2, 2, 2)),
    "conv3d": (lambda x, w: F.conv3d(x, w), (2, 3, 3, 3), (2, 2, 2, 2, 2)),
    "conv_transpose2d": (lambda x, w: F.conv_transpose2d(x, w, stride=2), (2, 3, 3), (2, 3, 2, 2)),
    "linear": (lambda x, w: F.linear(x, w).tanh(), (4, 5), (3, 5)),
    "bilinear": (lambda x, w: F.bilinear(x, x.sin(), w), (5,), (2, 5, 5)),
    "embedding": (lambda x, w: F.embedding((x > 0).long(), w).sum(dim=-2) * x.sin(), (4, 5), (2, 5)),
    "bmm": (lambda x, w: torch.bmm(x @ w, x.mT), (4, 5), (5, 5)),
    "einsum": (lambda x, w: torch.einsum("bti,ij,bsj->bts", x, w, x), (4, 5), (5, 5)),
    "softmax": (lambda x, w: torch.softmax(x @ w, dim=-1), (4, 5), (5, 3)),
    "log_softmax": (lambda x, w: torch.log_softmax(x @ w, dim=-1), (4, 5), (5, 3)),
    "logsumexp": (lambda x, w: torch.logsumexp(x @ w, dim=-1), (4, 5), (5, 3)),
    "gelu": (lambda x, w: F.gelu(x @ w), (4, 5), (5, 3)),
    "gelu by tanh": (lambda x, w: F.gelu(x @ w, approximate="tanh"), (4, 5), (5, 3)),
    "silu": (lambda x, w: F.silu(x @ w), (4, 5), (5, 3)),
    "mish": (lambda x, w: F.mish(x @ w), (4, 5), (5, 3)),
    "elu": (lambda x, w: F.elu(x @ w), (4, 5), (5, 3)),
    "softplus": (lambda x, w: F.softplus(x @ w), (4, 5), (5, 3)),
    "tanh": (lambda x, w: torch.tanh(x @ w), (4, 5), (5, 3)),
    "sigmoid": (lambda x, w: torch.sigmoid(x @ w), (4, 5), (5, 3)),
    "relu": (lambda x, w: F.relu(x @ w).square(), (4, 5), (5, 3)),
    "leaky_relu": (lambda x, w: F.leaky_relu(x @ w).square(), (4, 5), (5, 3)),
    "hardswish": (lambda x, w: F.hardswish(x @ w), (4, 5), (5, 3)),
    "glu": (lambda x, w: F.glu(x @ w), (4, 5), (5, 4)),
    "prelu": (lambda x, w: F.prelu(x, w).square(), (4, 5), (4,)),
    "prelu, one slope": (lambda x, w: F.prelu(x, w).square(), (4, 5), (1,)),
    "attention": (lambda x, w: F.scaled_dot_product_attention(x @ w, x, x.sin()), (2, 4, 5), (5, 5)),
    "attention, causal": (
        lambda x, w: F.scaled_dot_product_attention(x @ w, x, x.sin(), is_causal=True),
        (2, 4, 5),
        (5, 5),
    ),
    "attention with a bias": (
        lambda x, w: F.scaled_dot_product_attention(x, x, x.sin(), attn_mask=w),
        (2, 4, 5),
        (2, 4, 4),
    ),
    "avg_pool1d": (lambda x, w: F.avg_pool1d((x * w).sin(), 2), (3, 6), (6,)),
    "avg_pool2d": (lambda x, w: F.avg_pool2d((x * w).sin(), 2, stride=1), (3, 4, 4), (4,)),
    "adaptive_avg_pool2d": (lambda x, w: F.adaptive_avg_pool2d((x * w).sin(), 2), (3, 5, 5), (5,)),
    "max_pool2d": (lambda x, w: F.max_pool2d((x * w).sin(), 2), (3, 4, 4), (4,)),
    "interpolate, nearest": (lambda x, w: F.interpolate((x * w).sin(), scale_factor=2.0), (3, 4, 4), (4,)),
    "interpolate, bilinear": (
        lambda x, w: F.interpolate((x * w).sin(), size=(5, 7), mode="bilinear", align_corners=False),
        (3, 4, 4),
        (4,),
    ),
    "interpolate, bicubic": (
        lambda x, w: F.interpolate((x * w).sin(), size=(5, 7), mode="bicubic", align_corners=False),
        (3, 4, 4),
        (4,),
    ),
    "pad, reflecting": (lambda x, w: F.pad((x * w).sin(), (1, 1), mode="reflect"), (3, 4), (4,)),
    "unfold": (lambda x, w: F.unfold((x * w).sin(), 2), (2, 4, 4), (4,)),
    "pixel_shuffle": (lambda x, w: F.pixel_shuffle((x * w).sin(), 2), (4, 3, 3), (3,)),
    "cat": (lambda x, w: torch.cat([x, w.expand(1, 2, 5)], dim=1).prod(dim=1), (4, 5), (2, 5)),
    "where": (lambda x, w: torch.where(x > 0, (x * w).sin(), w), (4, 5), (5,)),
    "masked_fill": (lambda x, w: (x * w).sin().masked_fill(x > 0, 0.5), (4, 5), (5,)),
    "index_select": (lambda x, w: (x * w).sin().index_select(1, torch.tensor([2, 0, 2]).to(x.device)), (4, 5), (5,)),
    "gather": (lambda x, w: (x * w).sin().gather(2, (x > 0).long()), (4, 5), (5,)),
    "a table by index": (lambda x, w: x.sin() * w[torch.tensor([[0, 1], [1, 0]]).to(x.device)], (2, 2, 3), (2, 3)),
    "roll": (lambda x, w: torch.roll((x * w).sin(), (1, 2), dims=(1, 2)), (4, 5), (5,)),
    "cumsum": (lambda x, w: torch.cumsum((x * w).sin(), dim=1), (4, 5), (5,)),
    "cumprod": (lambda x, w: torch.cumprod((x * w).cos(), dim=1), (4, 5), (5,)),
    "prod": (lambda x, w: torch.prod(x * w, dim=1), (4, 5), (5,)),
    "var": (lambda x, w: (x * w).var(dim=-1), (4, 5), (5,)),
    "std": (lambda x, w: (x * w).std(dim=-1), (4, 5), (5,)),
    "norm": (lambda x, w: torch.linalg.vector_norm(x * w, dim=-1), (4, 5), (5,)),
    "amax": (lambda x, w: (x * w).amax(dim=-1).sin(), (4, 5), (5,)),
    "pow": (lambda x, w: (x * w).square().add(1).pow(1.5), (4, 5), (5,)),
    "rsqrt": (lambda x, w: (x * w).square().mean(dim=-1, keepdim=True).add(1e-3).rsqrt() * x, (4, 5), (5,)),
    "erf": (lambda x, w: torch.erf(x @ w), (4, 5), (5, 3)),
    "cross_entropy": (
        lambda x, w: F.cross_entropy((x @ w).flatten(0, 1), torch.tensor([0, 2, -100, 1]).to(x.device))[None],
        (4, 5),
        (5, 3),
    ),
    "weight_norm": (lambda x, w: F.linear(x, torch._weight_norm(w, x.new_ones(3, 1), 0)), (4, 5), (3, 5)),
}

_NORM = "torch's vmap of native_layer_norm_backward and native_batch_norm_backward loses the weight's derivative by x"
OUTSIDE_WRONG = {"layer_norm": _NORM, "layer_norm over two": _NORM, "instance_norm": _NORM}
INSIDE_WRONG: dict[str, str] = {}
COTANGENTS_WRONG: dict[str, str] = {}


def _cases(wrong: dict[str, str]) -> list[Any]:
    return [
        pytest.param(name, marks=pytest.mark.xfail(strict=True, reason=wrong[name])) if name in wrong else name
        for name in OPERATORS
    ]


def _inputs(name: str) -> tuple[Operator, Tensor, Tensor, Tensor, Tensor]:
    """The operator, x, δ for each example, the parameter, and a direction of its shape for each example."""
    torch.manual_seed(0)
    operator, shape, of_parameter = OPERATORS[name]
    x = torch.randn(BATCH, *shape, dtype=torch.float64, device=DEVICE)
    w = torch.randn(of_parameter, dtype=torch.float64, device=DEVICE)
    with differentiable_twice():
        delta = torch.randn_like(torch.stack([operator(row[None], w)[0] for row in x]))
    return operator, x, delta, w, torch.randn(BATCH, *of_parameter, dtype=torch.float64, device=DEVICE)


def _example_by_example(operator: Operator, x: Tensor, delta: Tensor, w: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """∂⟨c, ∂⟨δ, f(x; w)⟩/∂w⟩/∂(x, δ) by plain autograd, one example after the other."""
    by_x, by_delta = [], []
    for row, back, direction in zip(x, delta, c, strict=True):
        row, back, theta = (value.detach().clone().requires_grad_() for value in (row, back, w))
        (gradient,) = torch.autograd.grad((operator(row[None], theta) * back).sum(), theta, create_graph=True)
        first, second = torch.autograd.grad((gradient * direction).sum(), (row, back), allow_unused=True)
        by_x.append(torch.zeros_like(row) if first is None else first)
        by_delta.append(second)
    return torch.stack(by_x), torch.stack(by_delta)


@pytest.mark.parametrize("name", _cases(OUTSIDE_WRONG))
def test_autograd_outside_of_vmap(name: str) -> None:
    operator, x, delta, w, c = _inputs(name)
    x, delta = x.requires_grad_(), delta.requires_grad_()
    with differentiable_twice():
        want = _example_by_example(operator, x, delta, w, c)

        def gradient(row: Tensor, back: Tensor) -> Tensor:
            by_parameter: Tensor = vjp(lambda theta: operator(row[None], theta), w)[1](back[None])[0]
            return by_parameter

        product = (vmap(gradient)(x, delta) * c).sum()
        got = torch.autograd.grad(product, (x, delta), allow_unused=True, materialize_grads=True)
    for fast, true in zip(got, want, strict=True):
        assert relative_error(fast, true) < 1e-10


@pytest.mark.parametrize("name", _cases(INSIDE_WRONG))
def test_autograd_inside_vmap(name: str) -> None:
    operator, x, delta, w, c = _inputs(name)
    with differentiable_twice():
        want = _example_by_example(operator, x, delta, w, c)

        def product(row: Tensor, back: Tensor, direction: Tensor) -> Tensor:
            by_parameter = grad(lambda theta: (operator(row[None], theta) * back).sum())(w)
            return (by_parameter * direction).sum()

        got = vmap(grad(product, argnums=(0, 1)))(x, delta, c)
    for fast, true in zip(got, want, strict=True):
        assert relative_error(fast, true) < 1e-10


@pytest.mark.parametrize("name", _cases(COTANGENTS_WRONG))
def test_many_cotangents_of_one_graph(name: str) -> None:
    operator, x, delta, w, c = _inputs(name)
    row, back, theta = (value.detach().clone().requires_grad_() for value in (x[0], delta[0], w))
    with differentiable_twice():
        (gradient,) = torch.autograd.grad((operator(row[None], theta) * back).sum(), theta, create_graph=True)

        def derivatives(direction: Tensor) -> tuple[Tensor, ...]:
            return torch.autograd.grad(gradient, (row, back), direction, retain_graph=True)

        want = [torch.stack(part) for part in zip(*map(derivatives, c), strict=True)]
        got = vmap(derivatives)(c)
    for fast, true in zip(got, want, strict=True):
        assert relative_error(fast, true) < 1e-10
