"""The divergence of one step against integration in the plane, and its known limits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from torchfil.fisher import poisson_amplification
from torchfil.fisher.mechanism import largest_divergences, step_divergence

RATES = [1e-5, 1e-3, 0.01, 0.05, 0.3, 0.9, 1.0]
NORMS = [0.0, 0.3, 1.3, 5.0]
COSINES = [-1.0, -0.3, 0.9, 1.0]


def divergence(norm: float, other: float, cosine: float, q: float | None) -> float:
    squares = torch.tensor([norm**2, other**2, norm * other * cosine], dtype=torch.float64)
    return step_divergence(*squares, q).item()


def in_the_plane(norm: float, other: float, cosine: float, q: float) -> float:
    """∫ φ (A log A/B − A + B), an integrand ≥ 0, on a fine grid over the plane of u and v."""
    step = 0.2
    x, y = np.arange(-14, 14, step)[:, None], np.arange(-9, 14, step)
    with_true = norm * x - norm**2 / 2
    with_other = other * (cosine * x + math.sqrt(1 - cosine**2) * y) - other**2 / 2
    log_out, log_in = math.log1p(-q) if q < 1 else -math.inf, math.log(q)
    log_density, log_other = (
        np.logaddexp(log_out, log_in + with_true),
        np.logaddexp(log_out, log_in + with_other),
    )
    density = np.exp(log_density)
    r = q * np.exp(with_true) * np.expm1(with_other - with_true) / density  # B/A − 1
    small = np.where(np.abs(r) < 1e-2, r, 0)
    series = sum((-1) ** k * small**k / k for k in range(2, 8))  # of r − log(1 + r)
    excess = np.where(np.abs(r) < 1e-2, series, r - (log_other - log_density))
    return float((np.exp(-(x**2 + y**2) / 2) * density * excess).sum() * step**2 / (2 * math.pi))


@pytest.mark.parametrize("q", RATES)
def test_against_integration_in_the_plane(q: float) -> None:
    pairs = [
        (norm, other, c)
        for norm in NORMS
        for other in NORMS
        for c in (COSINES if norm * other else [0.0])
    ]
    want = np.array([in_the_plane(*pair, q) for pair in pairs])
    norm, other, cosine = torch.tensor(pairs, dtype=torch.float64).T
    got = step_divergence(norm**2, other**2, norm * other * cosine, q).numpy()
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-19, err_msg=str(pairs))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-8)


@pytest.mark.parametrize("q", [1e-5, 0.5])
def test_far_apart(q: float) -> None:
    half = 50.0**2 / 2
    assert divergence(50, 0, 0, q) == pytest.approx(
        (1 - q) * math.log1p(-q) + q * (math.log(q) + half), rel=1e-6
    )
    assert divergence(0, 50, 0, q) == pytest.approx(-math.log1p(-q), rel=1e-6)
    # the release without the example is the nearer one
    opposite = q * (math.log(q) - math.log1p(-q) + half)
    assert divergence(50, 50, -1, q) == pytest.approx(opposite, rel=1e-6)


@pytest.mark.parametrize("q", RATES)
@pytest.mark.parametrize("norm", [0.01, 0.7, 2.0, 5.0])
def test_close_pairs_give_the_fisher_information(norm: float, q: float) -> None:
    """KL(u ‖ u + δ) → q κ ‖δ‖²/2, κ∥ along u and κ⊥ across it: two modules, one limit."""
    perp, par = poisson_amplification(norm, q)
    along = norm * 1e-4
    assert divergence(norm, norm + along, 1.0, q) == pytest.approx(
        q * par.item() * along**2 / 2, rel=1e-3
    )
    angle = 1e-4
    across = 2 * norm * math.sin(angle / 2)
    assert divergence(norm, norm, math.cos(angle), q) == pytest.approx(
        q * perp.item() * across**2 / 2, rel=1e-3
    )


@pytest.mark.parametrize("q", RATES)
def test_between_zero_and_known_batches(q: float) -> None:
    """The divergence is convex: who does not know the batches learns at most q of what one does who
    knows.
    """
    random = torch.rand(4, 300, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    norm, other = 50 * random[0] ** 4, 50 * random[1] ** 4
    arguments = (norm**2, other**2, norm * other * (2 * random[2] - 1))
    got, known = step_divergence(*arguments, q), step_divergence(*arguments, None)
    assert (got >= 0).all()
    assert (got <= q * known * (1 + 1e-4)).all()


def test_known_batches_and_rounding() -> None:
    u, v = torch.randn(2, 50, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    arguments = (u.square().sum(-1), v.square().sum(-1), (u * v).sum(-1))
    for q in (None, 1, 1.0):
        torch.testing.assert_close(step_divergence(*arguments, q), (u - v).square().sum(-1) / 2)
    squared = torch.tensor([0.0, 1e-30, 1e-5, 0.3, 7.0, 25.0, 2500.0], dtype=torch.float32)
    # of the same gradient, also where rounding makes ⟨u, v⟩ larger than ‖u‖‖v‖
    for q in (None, *RATES):
        for rounding in (1.0, 1 + 1e-6):
            assert step_divergence(squared, squared, squared * rounding, q).tolist() == [0.0] * 7


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_captured_in_a_cuda_graph() -> None:
    arguments = [torch.zeros(5, device="cuda") for _ in range(3)]
    step_divergence(*arguments, 0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step_divergence(*arguments, 0.1)
    values = torch.rand(3, 5)
    values[2] *= values[:2].prod(dim=0).sqrt()
    for argument, value in zip(arguments, values, strict=True):
        argument.copy_(value)
    graph.replay()
    torch.testing.assert_close(got.cpu(), step_divergence(*values, 0.1))


@pytest.mark.parametrize(("q", "sigma"), [(0.01, 0.7), (0.1, 1.0), (0.5, 2.0), (1.0, 1.0)])
def test_no_gradients_have_a_larger_divergence_than_the_largest(q: float, sigma: float) -> None:
    """Membership is worst at the threshold, any other question for opposite gradients at the
    threshold.
    """
    draws = torch.Generator().manual_seed(0)
    u, v = torch.randn(2, 4000, 2, generator=draws, dtype=torch.float64)
    radius = (
        torch.rand(2, 4000, 1, generator=draws, dtype=torch.float64).clamp(max=1) ** 0.25 / sigma
    )
    radius[:, :1000] = 1 / sigma  # at the threshold, in all directions
    u, v = (radius[k] * each / each.norm(dim=1, keepdim=True) for k, each in enumerate((u, v)))
    squares = u.square().sum(dim=1), v.square().sum(dim=1)
    membership, other = largest_divergences([(sigma, q, 3), (sigma, q, 4)])
    alone = step_divergence(squares[0], 0 * squares[0], 0 * squares[0], q)
    both = step_divergence(*squares, (u * v).sum(dim=1), q)
    for found, most in ((alone, membership / 7), (both, other / 7)):
        assert found.max() <= most * (1 + 1e-9)
        assert found.max() > 0.99 * most  # the largest is nearly attained
    assert largest_divergences([(sigma, q, 1), (0.0, q, 1)]) == (math.inf, math.inf)
