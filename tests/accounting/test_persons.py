"""What a step says about a person with several rows, against sums over all sets of drawn rows."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from opacus.accountants import RDPAccountant
from opacus.accountants.analysis.rdp import compute_rdp
from torch import Tensor

from torchfil.accounting.persons import absence_divergence, person_rdp
from torchfil.fisher import poisson_amplification
from torchfil.fisher.mechanism import step_divergence

RATES = [1e-4, 0.01, 0.1, 0.5, 0.9]
ORDERS = tuple(RDPAccountant.DEFAULT_ALPHAS)


def gaussian_nodes(dimensions: int, count: int) -> tuple[Tensor, Tensor]:
    """Gauss–Hermite nodes and weights of N(0, I), [nodes, dimensions] and [nodes]."""
    x, w = np.polynomial.hermite_e.hermegauss(count)
    nodes = np.stack(np.meshgrid(*[x] * dimensions, indexing="ij"), axis=-1).reshape(-1, dimensions)
    weights = np.stack(np.meshgrid(*[w / w.sum()] * dimensions, indexing="ij"), axis=-1).reshape(
        -1, dimensions
    )
    return torch.tensor(nodes), torch.tensor(weights.prod(axis=-1))


PLANE = gaussian_nodes(2, 50)


def sets(rows: int, q: float) -> tuple[Tensor, Tensor]:
    """Every set of rows as 0s and 1s, [sets, rows], and its probability."""
    drawn = torch.tensor(list(itertools.product((0.0, 1.0), repeat=rows)), dtype=torch.float64)
    return drawn, (drawn * q + (1 - drawn) * (1 - q)).prod(dim=1)


def log_mixture(points: Tensor, centres: Tensor, chances: Tensor) -> Tensor:
    """log dP/dφ of the mixture at these points, [..., points]."""
    return torch.logsumexp(
        chances.log() + points @ centres.T - centres.square().sum(dim=1) / 2, dim=-1
    )


def by_sets(u: Tensor, q: float, nodes: tuple[Tensor, Tensor] = PLANE) -> Tensor:
    """KL(P ‖ φ) for rows u, [rows, dimensions], by quadrature around each set's centre."""
    drawn, chances = sets(len(u), q)
    return chances @ (log_mixture((drawn @ u)[:, None] + nodes[0], drawn @ u, chances) @ nodes[1])


def bound(u: Tensor, q: float | None) -> float:
    return absence_divergence(u.norm(dim=1)[None], q).item()


def aligned(norm: float, rows: int, q: float) -> float:
    """KL for equal rows: the centres are the numbers of drawn rows, on a line."""
    drawn = torch.arange(rows + 1.0, dtype=torch.float64)
    chances = torch.distributions.Binomial(rows, torch.tensor(q).double()).log_prob(drawn).exp()
    centres = drawn[:, None] * torch.tensor([[norm, 0.0]]).double()
    return float(chances @ (log_mixture(centres[:, None] + PLANE[0], centres, chances) @ PLANE[1]))


@pytest.mark.parametrize("q", [None, *RATES, 1.0])
def test_one_row_is_the_questions_divergence(q: float | None) -> None:
    squares = 4 * torch.rand(40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    want = step_divergence(squares, torch.zeros(40), torch.zeros(40), q)
    for padding in (0, 3):
        padded = torch.nn.functional.pad(squares.sqrt()[:, None], (padding, 0))
        torch.testing.assert_close(absence_divergence(padded, q), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("q", RATES)
def test_twelve_aligned_rows(q: float) -> None:
    for norm in (0.05, 0.4, 1.0):
        true, found = aligned(norm, 12, q), bound(torch.full((12, 1), norm), q)
        assert true * (1 - 1e-6) - 1e-14 <= found <= 2 * true + 1e-14, norm


@pytest.mark.parametrize(("rows", "q"), [(40, 0.5), (100, 0.2)])
def test_more_rows_than_the_grid_holds(rows: int, q: float) -> None:
    """About twenty rows are drawn, so that half of the sums lie beyond the grid: they count as
    known.
    """
    for norm in (0.1, 0.3):
        u = torch.full((rows, 1), norm, dtype=torch.float64)
        known = norm**2 * (rows * q * (1 - q) + (rows * q) ** 2) / 2
        assert aligned(norm, rows, q) <= bound(u, q) <= known * (1 + 1e-12), norm


@pytest.mark.parametrize("q", [0.01, 0.3, 0.8])
def test_no_arrangement_of_rows_in_the_plane_has_a_larger_divergence(q: float) -> None:
    """Random arrangements, and those that gradient ascent finds from them."""
    draws = torch.Generator().manual_seed(int(100 * q))
    for rows, scale in ((2, 1.8), (3, 0.4), (3, 1.2)):
        norm = scale * torch.rand(rows, 1, generator=draws, dtype=torch.float64) ** 2
        angles = (6.3 * torch.rand(rows, generator=draws, dtype=torch.float64)).requires_grad_()
        most, optimizer = absence_divergence(norm.T, q).item(), torch.optim.Adam([angles], lr=0.2)
        for _ in range(25):
            divergence = by_sets(norm * torch.stack([angles.cos(), angles.sin()], dim=1), q)
            assert divergence.item() <= most * (1 + 1e-6)
            optimizer.zero_grad()
            (-divergence.log()).backward()
            optimizer.step()


@pytest.mark.parametrize("q", [0.05, 0.4])
def test_simulated_releases(q: float) -> None:
    """The mean log ratio of 200,000 releases about four rows in six dimensions, at most 3 standard
    errors above.
    """
    draws = torch.Generator().manual_seed(1)
    u = 0.5 * torch.randn(4, 6, generator=draws, dtype=torch.float64) + 0.4  # partly aligned
    drawn, chances = sets(4, q)
    taken = (torch.rand(200_000, 4, generator=draws) < q).double()
    released = taken @ u + torch.randn(200_000, 6, generator=draws, dtype=torch.float64)
    ratio = log_mixture(released, drawn @ u, chances)
    assert ratio.mean() - 3 * ratio.std() / len(ratio) ** 0.5 <= bound(u, q)


def test_known_batches_and_many_rows() -> None:
    norm = torch.rand(
        1, 10_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    ).sqrt()
    for q in (None, 1.0):
        torch.testing.assert_close(absence_divergence(norm, q), norm.sum(dim=1).square() / 2)
    for q in (1e-6, 1e-4, 0.01):
        mean, square = q * norm.sum(), q * (1 - q) * norm.square().sum()
        found = absence_divergence(norm, q).item()
        assert 0.3 * mean**2 / 2 <= found <= (mean**2 + square) / 2 * (1 + 1e-9)


@pytest.mark.parametrize(
    ("q", "sigma"), [(0.01, 1.0), (0.001, 0.5), (0.1, 2.0), (0.5, 1.0), (1.0, 1.0)]
)
def test_rdp_of_a_person(q: float, sigma: float) -> None:
    opacus = compute_rdp(q=q, noise_multiplier=sigma, steps=1, orders=ORDERS)
    np.testing.assert_allclose(person_rdp(1, q, sigma, ORDERS), opacus, rtol=1e-6)
    # of order 2 in closed form, E e^{jj'/σ²} over two independent numbers of drawn rows
    for rows in (3, 12):
        drawn, found = np.arange(rows + 1.0), person_rdp(rows, q, sigma, ORDERS)
        chance = np.array(
            [math.comb(rows, j) * q**j * (1 - q) ** (rows - j) for j in range(rows + 1)]
        )
        second = np.log(chance @ np.exp(np.outer(drawn, drawn) / sigma**2) @ chance)
        assert found[ORDERS.index(2.0)] == pytest.approx(second, rel=1e-9)
        assert (found <= rows**2 * np.array(ORDERS) / (2 * sigma**2) * (1 + 1e-9)).all()
    assert person_rdp(10_000, q, sigma, (2.0,)).item() == pytest.approx(1e8 / sigma**2)


def information(u: Tensor, slopes: Tensor, q: float) -> Tensor:
    """E(∂ log p)² of the release about a number z, for rows u + z · slopes, at z = 0."""
    drawn, chances = sets(len(u), q)
    points, chances = (drawn @ u)[:, None] + PLANE[0], chances.clamp(min=1e-300)
    at = torch.zeros((), dtype=torch.float64)
    score = torch.func.jvp(
        lambda z: log_mixture(points, drawn @ (u + z * slopes), chances), (at,), (at + 1,)
    )[1]
    return chances @ (score.square() @ PLANE[1])


def test_information_about_two_rows() -> None:
    """tr I of disjoint coordinates is at most Σ_r tr I_r.

    Of a value that both rows share, at most (Σ_r √tr I_r)².
    """
    draws = torch.Generator().manual_seed(0)
    for q in (0.05, 0.5, 1.0):
        for _ in range(5):
            # of each row by its coordinate
            u, slopes = torch.randn(2, 2, 2, generator=draws, dtype=torch.float64)
            one, other = torch.eye(2, dtype=torch.float64)
            scores = [information(u, way[:, None] * slopes, q) for way in (one, other, one + other)]
            perp, par = poisson_amplification(u.norm(dim=1), q)
            along = (slopes * u).sum(dim=1).square() / u.square().sum(dim=1)
            # of each row alone
            rows = q * (perp * (slopes.square().sum(dim=1) - along) + par * along)
            assert scores[0] + scores[1] <= rows.sum() * (1 + 1e-5)
            assert scores[2] <= rows.sqrt().sum().square() * (1 + 1e-5)
            if q == 1:  # known batches: both exactly, with the cross term
                assert scores[2].item() == pytest.approx(slopes.sum(dim=0).square().sum().item())
                assert (scores[0] + scores[1]).item() == pytest.approx(rows.sum().item())


@pytest.mark.parametrize(
    ("rows", "q", "sigma", "steps"), [(3, 0.01, 2.0, 1000), (12, 0.05, 4.0, 200)]
)
def test_epsilon_beside_another_accountant(rows: int, q: float, sigma: float, steps: int) -> None:
    accounting = pytest.importorskip("dp_accounting")
    from dp_accounting import pld

    chances = [math.comb(rows, j) * q**j * (1 - q) ** (rows - j) for j in range(rows + 1)]
    event = accounting.dp_event.MixtureOfGaussiansDpEvent(sigma, list(range(rows + 1)), chances)
    witness = pld.PLDAccountant(value_discretization_interval=1e-3)
    witness.compose(accounting.SelfComposedDpEvent(event, steps))
    alpha = np.array(ORDERS)
    rdp = steps * person_rdp(rows, q, sigma, ORDERS)
    epsilon = (
        rdp + np.log((alpha - 1) / alpha) - (math.log(1e-5) + np.log(alpha)) / (alpha - 1)
    ).min()
    assert witness.get_epsilon(1e-5) <= epsilon <= 1.25 * witness.get_epsilon(1e-5)
