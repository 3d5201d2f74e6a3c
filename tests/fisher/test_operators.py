"""torch's operators under vmap: second derivatives against those of one example after the other, in float64.

Layers without a rule of their own, and mapped models, rest on torch's. Three nestings are in use:

* outside: ``vmap(vjp)`` gives every example's gradient, which autograd differentiates by the inputs (generic rule);
* inside: the gradient of a gradient is taken inside ``vmap`` (mapped gradients);
* cotangents: one graph of a gradient, differentiated for many directions at once (several probes together).

An operator that torch differentiates wrongly is marked as such, strictly: a torch that mends it is noticed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.func import grad, vjp, vmap
from torch.nn import functional as F

from tests.cases import DEVICE
from torchfil.fisher.gradients import differentiable_twice

pytestmark = [pytest.mark.torch_versions, pytest.mark.operators]
BATCH = 3
Operator = Callable[..., Tensor]
close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)


def placed(*at: int) -> Tensor:
    return torch.tensor(at, device=DEVICE)


_attention = F.scaled_dot_product_attention
# Of an example's input [1, …] and one parameter: the operator, the shape of an example, and the parameter's.
OPERATORS: dict[str, tuple[Operator, tuple[int, ...], tuple[int, ...]]] = {
    "layer_norm": (lambda x, w: F.layer_norm(x, (5,), w), (4, 5), (5,)),
    "layer_norm over two": (lambda x, w: F.layer_norm(x, (4, 5), w), (4, 5), (4, 5)),
    "layer_norm without weights": (lambda x, w: F.layer_norm(x * w, (5,)), (4, 5), (5,)),
    "group_norm": (lambda x, w: F.group_norm(x, 2, w), (4, 3, 2), (4,)),
    "rms_norm": (lambda x, w: F.rms_norm(x, (5,), w), (4, 5), (5,)),
    "instance_norm": (lambda x, w: F.instance_norm(x, weight=w), (3, 4), (3,)),
    "conv2d": (lambda x, w: F.conv2d(x, w, stride=2), (2, 5, 5), (3, 2, 3, 2)),
    "conv2d in groups": (lambda x, w: F.conv2d(x, w, groups=2), (4, 3, 3), (4, 2, 2, 2)),
    "conv3d": (F.conv3d, (2, 3, 3, 3), (2, 2, 2, 2, 2)),
    "conv_transpose2d": (lambda x, w: F.conv_transpose2d(x, w, stride=2), (2, 3, 3), (2, 3, 2, 2)),
    "bilinear": (lambda x, w: F.bilinear(x, x.sin(), w), (5,), (2, 5, 5)),
    "embedding": (lambda x, w: F.embedding((x > 0).long(), w).sum(dim=-2) * x.sin(), (4, 5), (2, 5)),
    "bmm": (lambda x, w: torch.bmm(x @ w, x.mT), (4, 5), (5, 5)),
    "einsum": (lambda x, w: torch.einsum("bti,ij,bsj->bts", x, w, x), (4, 5), (5, 5)),
    "prelu": (lambda x, w: F.prelu(x, w).square(), (4, 5), (4,)),
    "attention": (lambda x, w: _attention(x @ w, x, x.sin()), (2, 4, 5), (5, 5)),
    "attention with a bias": (lambda x, w: _attention(x, x, x.sin(), attn_mask=w), (2, 4, 5), (2, 4, 4)),
    "cat": (lambda x, w: torch.cat([x, w.expand(1, 2, 5)], dim=1).prod(dim=1), (4, 5), (2, 5)),
    "where": (lambda x, w: torch.where(x > 0, (x * w).sin(), w), (4, 5), (5,)),
    "gather": (lambda x, w: (x * w).sin().gather(2, (x > 0).long()), (4, 5), (5,)),
    "cross_entropy": (lambda x, w: F.cross_entropy((x @ w)[0], placed(0, 2, -100, 1))[None], (4, 5), (5, 3)),
    "weight_norm": (lambda x, w: F.linear(x, torch._weight_norm(w, x.new_ones(3, 1), 0)), (4, 5), (3, 5)),
}
OF_PRODUCTS: dict[str, Operator] = {  # of x @ w
    **{f.__name__: f for f in (F.gelu, F.silu, F.mish, F.softplus, torch.tanh, torch.sigmoid)},
    **{f.__name__: partial(f, dim=-1) for f in (torch.softmax, torch.log_softmax, torch.logsumexp, F.glu)},
    "gelu by tanh": partial(F.gelu, approximate="tanh"),
    "relu": lambda x: F.relu(x).square(),
}
OF_IMAGES: dict[str, Operator] = {  # of sin(x · w)
    "avg_pool2d": lambda x: F.avg_pool2d(x, 2, stride=1),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 3),
    "max_pool2d": lambda x: F.max_pool2d(x, 2),
    "pad, reflecting": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
}
OPERATORS |= {name: (lambda x, w, f=f: f(x @ w), (4, 5), (5, 4)) for name, f in OF_PRODUCTS.items()}
OPERATORS |= {name: (lambda x, w, f=f: f((x * w).sin()), (4, 4, 4), (4,)) for name, f in OF_IMAGES.items()}
_NORM = "torch's vmap of native_layer_norm_backward and native_batch_norm_backward loses the weight's derivative by x"
WRONG = {("outside", name) for name in ("layer_norm", "layer_norm over two", "instance_norm")}


NESTINGS = [
    pytest.param(*pair, marks=pytest.mark.xfail(strict=True, reason=_NORM) if pair in WRONG else (), id=", ".join(pair))
    for pair in itertools.product(("outside", "inside", "cotangents"), OPERATORS)
]


def by_torch(operator: Operator, x: Tensor, delta: Tensor, w: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    """∂⟨c, ∂⟨δ, f(x; w)⟩/∂w⟩/∂(x, δ) by plain autograd, one example after the other."""
    found = []
    for row, back, direction in zip(x, delta, c, strict=True):
        leaves = row.detach().clone().requires_grad_(), back.detach().clone().requires_grad_()
        theta = w.detach().clone().requires_grad_()
        (gradient,) = torch.autograd.grad(
            (operator(leaves[0][None], theta) * leaves[1]).sum(), theta, create_graph=True
        )
        found.append(torch.autograd.grad((gradient * direction).sum(), leaves, materialize_grads=True))
    return tuple(map(torch.stack, zip(*found, strict=True)))


@pytest.mark.parametrize(("nesting", "name"), NESTINGS)
def test_second_derivatives_under_vmap(nesting: str, name: str) -> None:
    torch.manual_seed(0)
    operator, shape, of_parameter = OPERATORS[name]
    draw = partial(torch.randn, dtype=torch.float64, device=DEVICE)
    x, w, c = draw(BATCH, *shape), draw(*of_parameter), draw(BATCH, *of_parameter)

    def gradient(row: Tensor, back: Tensor) -> Tensor:
        found: Tensor = vjp(lambda theta: operator(row[None], theta), w)[1](back[None])[0]
        return found

    with differentiable_twice():
        delta = torch.randn_like(torch.stack([operator(row[None], w)[0] for row in x]))
        if nesting == "cotangents":
            x, delta = x[:1].expand_as(x), delta[:1].expand_as(delta)
        want = by_torch(operator, x, delta, w, c)
        if nesting == "outside":
            leaves = x.requires_grad_(), delta.requires_grad_()
            got = torch.autograd.grad((vmap(gradient)(*leaves) * c).sum(), leaves, materialize_grads=True)
        elif nesting == "inside":
            product = grad(lambda row, back, direction: (gradient(row, back) * direction).sum(), argnums=(0, 1))
            got = vmap(product)(x, delta, c)
        else:
            row, back, theta = (value.detach().clone().requires_grad_() for value in (x[0], delta[0], w))
            (first,) = torch.autograd.grad((operator(row[None], theta) * back).sum(), theta, create_graph=True)
            got = vmap(lambda direction: torch.autograd.grad(first, (row, back), direction, materialize_grads=True))(c)
    for fast, true in zip(got, want, strict=True):
        close(fast, true)
