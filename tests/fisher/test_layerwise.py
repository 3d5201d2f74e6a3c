"""Gradients clipped parameter by parameter: the Jacobian's products, the FIM and divergences against brute force."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev

from tests.cases import relative_error
from torchfil.clipping import get_clip
from torchfil.fisher import reference
from torchfil.fisher.batch import PrivateBatch
from torchfil.fisher.estimators import Draws, get_estimator
from torchfil.fisher.gradients import ExampleGradients
from torchfil.fisher.mechanism import Mechanism, step_divergence
from torchfil.fisher.operator import ClippedJacobian

LIMITS = [0.3, 0.8, 0.1, 2.0]
C = math.hypot(*LIMITS)
SIGMA, Q = 0.7, 0.2
loss_fn = nn.CrossEntropyLoss()


def setting(zero: bool = False) -> tuple[nn.Module, Tensor, Tensor, dict[str, float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    if zero:  # no gradient reaches the first layer
        model[2].weight.data.zero_()
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(3, (6,))
    names = dict(model.named_parameters())
    return model, x, y, {name: limit / C for name, limit in zip(names, LIMITS, strict=True)}


def brute(model: nn.Module, x: Tensor, y: Tensor, clip: str) -> tuple[Tensor, Tensor]:
    """g̃ [batch, p] and J̃ [batch, p, d] by jacrev of the definition, one example after the other."""
    c = get_clip(clip)
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def clipped_of(target: Tensor) -> Callable[[Tensor], Tensor]:
        def clipped(z: Tensor) -> Tensor:
            def loss(weights: dict[str, Tensor]) -> Tensor:
                return loss_fn(functional_call(model, weights, (z[None],)), target[None])

            parts = []
            for part, limit in zip(grad(loss)(parameters).values(), LIMITS, strict=True):
                square = part.square().sum()
                norm = torch.where(square == 0, 0.0, torch.where(square == 0, 1.0, square).sqrt())
                parts.append(part.flatten() / c.c(norm / c.threshold(limit)))
            return torch.cat(parts)

        return clipped

    functions = [clipped_of(target) for target in y]
    return (
        torch.stack([f(z) for f, z in zip(functions, x, strict=True)]),
        torch.stack([jacrev(f)(z) for f, z in zip(functions, x, strict=True)]),
    )


def jacobian_of(model: nn.Module, x: Tensor, y: Tensor, shares: dict[str, float], clip: str) -> ClippedJacobian:
    return ClippedJacobian(ExampleGradients.build(model, loss_fn, x, y), get_clip(clip), C, shares)


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("clip", ["smooth", "hard", "gelu", "rsqrt"])
def test_every_product_against_jacrev(clip: str, zero: bool) -> None:
    model, x, y, shares = setting(zero)
    clipped, dense = brute(model, x, y, clip)
    jacobian = jacobian_of(model, x, y, shares, clip)
    unit = clipped / clipped.norm(dim=1, keepdim=True)
    a = (dense.mT @ unit[:, :, None])[:, :, 0]
    across = dense.mT @ dense - a[:, :, None] * a[:, None, :]
    v, u = torch.randn_like(x), torch.randn(clipped.shape[1], dtype=x.dtype)
    off = u - (unit @ u)[:, None] * unit

    def product(matrix: Tensor, vectors: Tensor) -> Tensor:
        return (matrix @ vectors.expand(len(matrix), -1)[:, :, None])[:, :, 0]

    truth = {
        "clipped_gradient": clipped,
        "clipped_norm": clipped.norm(dim=1),
    }
    size = float(dense.abs().max())  # a vanishes where everything is clipped hard
    for name, value in truth.items():
        assert torch.allclose(getattr(jacobian, name), value, rtol=1e-10, atol=1e-12 * size), name
    assert torch.allclose(jacobian.clipped_norm_gradient(), a, rtol=1e-10, atol=1e-12 * size)
    assert relative_error(jacobian.dense(), dense) < 1e-10
    assert relative_error(jacobian.gram(), dense.mT @ dense) < 1e-10
    assert relative_error(jacobian.matvec(v), product(dense, v)) < 1e-10
    assert relative_error(jacobian.rmatvec(u), product(dense.mT, u)) < 1e-10
    assert relative_error(jacobian.perpendicular_rmatvec(u), product(dense.mT, off)) < 1e-10
    assert relative_error(jacobian.perpendicular_squared_norm(v), (product(across, v) * v).sum(dim=1)) < 1e-9
    assert relative_error(jacobian.perpendicular_gram_matvec(v), product(across, v)) < 1e-9
    for columns in (None, 1):
        assert relative_error(jacobian.perpendicular_gram(columns), across) < 1e-9
        assert relative_error(jacobian.perpendicular_diagonal(columns), across.diagonal(dim1=1, dim2=2)) < 1e-9
    summed = torch.cat([part.flatten() for part in jacobian.clipped_sum().values()])
    assert relative_error(summed, clipped.sum(dim=0)) < 1e-12
    mask = torch.tensor([1.0, 0, 1, 1, 0, 1], dtype=x.dtype)
    masked = torch.cat([part.flatten() for part in jacobian.clipped_sum(mask).values()])
    assert relative_error(masked, mask @ clipped) < 1e-12


def test_no_gradient_at_all_gives_zeros() -> None:
    """The loss does not depend on the model: everything is 0, nothing NaN."""
    model, x, y, shares = setting()
    gradients = ExampleGradients.build(model, lambda outputs, _: 0 * outputs.sum(), x, y)
    jacobian = ClippedJacobian(gradients, get_clip("smooth"), C, shares)
    for value in (jacobian.clipped_norm, jacobian.clipped_norm_gradient(), jacobian.perpendicular_gram()):
        assert torch.equal(value, torch.zeros_like(value))


def test_one_parameter_is_ordinary_clipping() -> None:
    torch.manual_seed(1)
    model = nn.Linear(4, 3, bias=False).double()
    x, y = torch.randn(5, 4, dtype=torch.float64), torch.randint(3, (5,))
    gradients = ExampleGradients.build(model, loss_fn, x, y)
    flat = ClippedJacobian(gradients, get_clip("smooth"), 0.4)
    one = ClippedJacobian(gradients, get_clip("smooth"), 0.4, {"weight": 1.0})
    assert relative_error(one.dense(), flat.dense()) < 1e-12
    assert relative_error(one.clipped_norm_gradient(), flat.clipped_norm_gradient()) < 1e-12
    assert relative_error(one.perpendicular_gram(), flat.perpendicular_gram()) < 1e-12


def batch_of(amplification: str | None, **more: Any) -> tuple[PrivateBatch, Tensor]:
    """A batch under account, and the truth of its FIM, [batch, d, d]."""
    model, x, y, shares = setting()
    clipped, dense = brute(model, x, y, "smooth")
    mechanism = Mechanism.build(C, SIGMA, "smooth", amplification, Q, shares=shares, **more)
    s = SIGMA * C
    truth = dense.mT @ dense / s**2 if amplification is None else reference.poisson_fim(dense, clipped, s, Q)
    return PrivateBatch(ExampleGradients.build(model, loss_fn, x, y), mechanism), truth


@pytest.mark.parametrize("amplification", [None, "poisson"])
def test_the_fim_is_exact(amplification: str | None) -> None:
    """s = σ‖C‖ for all parameters; subsampling weighs the direction of the whole clipped gradient."""
    batch, truth = batch_of(amplification)
    tolerance = 1e-9 if amplification is None else 2e-6  # of the tabulated factors
    assert relative_error(batch.estimate("matrix", "exact").value, truth) < tolerance
    assert relative_error(batch.estimate("trace", "exact").value, truth.diagonal(dim1=1, dim2=2).sum(dim=1)) < tolerance


@pytest.mark.parametrize(("estimator", "probes"), [("weight-probes", 1), ("weight-probes", 3), ("input-probes", 3)])
def test_estimators_are_unbiased(estimator: str, probes: int) -> None:
    batch, truth = batch_of("poisson")
    (_, jacobian), *_ = batch.chunks(2**30, 8)
    generator, rows = torch.Generator().manual_seed(0), slice(0, 6)
    seeds = [Draws.seeds_from(probes, generator) for _ in range(100)]
    function = get_estimator(estimator).function
    found = [function(jacobian, batch.mechanism, ("trace",), Draws(seed, rows, 6, 1)) for seed in seeds]
    draws = torch.stack([moments["trace"].mean for moments in found])
    expected = truth.diagonal(dim1=1, dim2=2).sum(dim=1)
    z = (draws.mean(dim=0) - expected) / (draws.std(dim=0) / math.sqrt(len(draws)))
    assert float(z.abs().max()) < 4


@pytest.mark.parametrize("amplification", [None, "poisson"])
def test_divergences_clip_each_parameter(amplification: str | None) -> None:
    """Of another answer, and of absence, from g̃ and g̃′ themselves."""
    batch, _ = batch_of(amplification)
    model, x, y, _ = setting()
    others = ExampleGradients.build(model, loss_fn, x + 0.3, y)
    (_, jacobian), *_ = batch.chunks(2**30, 8)
    own, other = brute(model, x, y, "smooth")[0], brute(model, x + 0.3, y, "smooth")[0]
    rate, s = (Q if amplification else None), SIGMA * C
    for products, g, h in (
        (jacobian.products_with(others), own, other),
        (jacobian.products_alone(), own, torch.zeros_like(own)),
    ):
        inner = [(a * b).sum(dim=1) / s**2 for a, b in ((g, g), (h, h), (g, h))]
        expected = step_divergence(*inner, rate) / (rate or 1)
        assert relative_error(batch.mechanism.divergence(products), expected) < 1e-10
