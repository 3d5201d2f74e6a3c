"""Van Trees against attackers who know the prior: they break Cramér–Rao's bound, never this one."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import optimize
from torch import Tensor

from tests.refused import all_refused
from torchfil import bounds
from torchfil.bounds import Prior
from torchfil.fisher import Estimate


def people(covariance: Tensor, count: int, generator: torch.Generator) -> Tensor:
    root = torch.linalg.cholesky(covariance)
    return torch.randn(count, len(covariance), generator=generator, dtype=torch.float64) @ root.T


@pytest.mark.parametrize("noise", [0.3, 5.0])
def test_a_posterior_mean_breaks_cramer_rao_and_attains_van_trees(noise: float) -> None:
    """z ~ N(0, Σ), o = z + N(0, s²I): the posterior mean's MSE is tr((I/s² + Σ⁻¹)⁻¹)/d, the least
    there is.
    """
    generator, trials = torch.Generator().manual_seed(0), 100_000
    covariance = torch.diag(torch.tensor([0.8, 1.0, 1.2], dtype=torch.float64)) + 0.1
    z = people(covariance, trials, generator)
    output = z + noise * torch.randn(z.shape, generator=generator, dtype=torch.float64)
    gain = covariance @ torch.linalg.inv(covariance + noise**2 * torch.eye(3, dtype=torch.float64))
    errors = (output @ gain.T - z).square().mean(dim=1)
    mse, error = errors.mean().item(), errors.std().item() / math.sqrt(trials)

    trace, information = 3 / noise**2, torch.linalg.inv(covariance)
    loose = bounds.mse_van_trees(trace, 3, information.trace()).item()
    tight = bounds.mse_van_trees(trace, 3, torch.linalg.eigvalsh(information)).item()
    assert mse + 4 * error < bounds.mse_from_trace(torch.tensor(trace), 3).item(), (
        "biased attackers may"
    )
    assert loose <= tight * (1 + 1e-12)
    assert tight < mse + 4 * error
    assert mse < 1.1 * loose, "an isotropic release of nearly isotropic people: both come close"


@pytest.mark.parametrize("noise", [0.2, 2.0])
def test_no_posterior_mean_beats_it_in_a_box(noise: float) -> None:
    """z with the density cos² on [−1, 1], o = z + N(0, s²), the posterior mean by summation over a
    grid.
    """
    grid = np.linspace(-1, 1, 801)
    prior = np.cos(math.pi * grid / 2) ** 2
    prior /= prior.sum()
    outputs = np.linspace(-1 - 8 * noise, 1 + 8 * noise, 1601)
    likelihood = np.exp(-((outputs[:, None] - grid) ** 2) / (2 * noise**2))
    likelihood *= (outputs[1] - outputs[0]) / (noise * math.sqrt(2 * math.pi))
    joint = likelihood * prior
    evidence = joint.sum(axis=1)
    guess = joint @ grid / evidence
    mse = (joint * (guess[:, None] - grid) ** 2).sum()

    box = Prior.box(-1.0, 1.0, num_coordinates=1)
    bound = bounds.mse_van_trees(1 / noise**2, 1, box.information).item()
    assert bound <= mse <= box.variance * (1 + 1e-3)
    assert mse < noise**2, "it breaks Cramér–Rao's bound"
    assert bound > 0.7 * mse, "and comes close to van Trees'"
    assert box.variance == pytest.approx((prior * grid**2).sum(), rel=1e-4)


def test_water_filling_is_the_least_over_all_ways_to_spend_the_trace() -> None:
    information = np.array([0.2, 0.5, 3.0, 40.0])
    for trace in (0.0, 1.0, 1000.0):
        least = optimize.minimize(
            lambda spent: (1 / (information + spent)).mean(),
            np.full(4, trace / 4),
            bounds=[(0, None)] * 4,
            constraints={"type": "eq", "fun": lambda spent, trace=trace: spent.sum() - trace},
            options={"ftol": 1e-15, "maxiter": 1000},
        )
        bound = bounds.mse_van_trees(trace, 4, information.tolist()).item()
        assert bound == pytest.approx(least.fun, rel=1e-5)
        assert bound >= bounds.mse_van_trees(trace, 4, information.sum()).item()
    assert bounds.mse_van_trees(0.0, 4, information.tolist()).item() == pytest.approx(
        (1 / information).mean()
    )
    assert bounds.mse_van_trees(torch.tensor([math.inf, 0.0]), 1, [math.pi]).tolist() == [
        0.0,
        1 / math.pi,
    ]


def test_directions_in_which_all_agree_count_as_known() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(500, 6, generator=generator, dtype=torch.float64)
    values[:, 3] = 7.0  # constant
    values[:, 5] = values[:, 0] - values[:, 1]
    prior = Prior.gaussian(values)
    assert prior.information.isinf().sum() == 2
    assert prior.variance == pytest.approx(values.var(dim=0).mean().item())
    assert bounds.mse_van_trees(0.0, 6, prior.information).item() == pytest.approx(prior.variance)
    wide = Prior.gaussian(values[:4].float())  # fewer people than coordinates
    assert wide.information.isfinite().sum() == 3
    assert wide.variance == pytest.approx(values[:4].var(dim=0).mean().item(), rel=1e-5)


def test_the_error_is_calibrated_over_draws_of_people() -> None:
    """Traces that differ from person to person: the interval covers the bound at the population's
    mean trace.
    """
    prior = Prior.box(0.0, 1.0, num_coordinates=5)
    truth = bounds.mse_van_trees(20.0, 5, prior.information).item()
    covered = 0
    for seed in range(200):
        traces = 20 * torch.empty(100).exponential_(generator=torch.Generator().manual_seed(seed))
        low, high = bounds.population_mse_bound(Estimate.exact(traces), 5, prior).bound.interval(
            0.95
        )
        covered += int(low <= truth <= high)
    assert 0.9 <= covered / 200 <= 0.99


def test_refusals() -> None:
    values = torch.cat(
        [torch.randn(40, 2, dtype=torch.float64), torch.arange(40).double()[:, None] % 2], dim=1
    )
    box, exact = Prior.box(0, 1, num_coordinates=3), Estimate.exact
    refused = {
        r"infinite.*torchfil.questions": lambda: bounds.mse_van_trees(1.0, 1, math.inf),
        r"coordinates 2 with 2 distinct values.*torchfil.questions": lambda: Prior.gaussian(values),
        "int64: discrete": lambda: Prior.gaussian(np.arange(40)[:, None]),
        "the prior has 3 coordinates": lambda: bounds.population_mse_bound(
            exact(torch.ones(4)), 2, box
        ),
        "leaves nothing unknown": lambda: Prior.gaussian(values[:, :2], [torch.arange(40)]),
        "prior is of 40 examples": lambda: bounds.population_mse_bound(
            exact(torch.ones(3)), 2, Prior.gaussian(values[:, :2], [values[:, 2].long()])
        ),
    }
    all_refused(refused)
    assert Prior.gaussian(values, allow_discrete=True).variance == pytest.approx(
        values.var(dim=0).mean().item()
    )


def test_labels_and_known_columns_are_conditioned_on() -> None:
    """A joint normal law of private and public values within two labels of different spread: Σ
    given both is known.
    """
    generator, count = torch.Generator().manual_seed(5), 20_000
    label = torch.arange(count) % 2
    column = 3 + torch.randn(count, 1, generator=generator, dtype=torch.float64)
    spread = torch.tensor([0.1, 0.5], dtype=torch.float64)[label][:, None]
    noise = torch.randn(count, 2, generator=generator, dtype=torch.float64)
    values = 5.0 * label[:, None] + torch.tensor([2.0, -1.0]) * column + spread * noise
    trace = Estimate.exact(torch.where(label == 0, 2.0, 0.2).double())

    prior = Prior.gaussian(values, [label, column])
    assert prior.variance == pytest.approx((0.01 + 0.25) / 2, rel=0.03)
    found = bounds.population_mse_bound(trace, 2, prior)
    by_label = [
        bounds.mse_van_trees(t, 2, [1 / s**2] * 2).item() for t, s in ((2.0, 0.1), (0.2, 0.5))
    ]
    assert found.bound.value.item() == pytest.approx(sum(by_label) / 2, rel=0.03)
    assert found.bound.kind == "upper bound"
    alone = bounds.population_mse_bound(trace, 2, Prior.gaussian(values))
    assert alone.bound.value.item() > 3 * found.bound.value.item(), (
        "without the label it would claim too much"
    )

    # one-hot labels are labels; an example whose label nobody shares counts as known
    hot = torch.nn.functional.one_hot(label).double()
    same = Prior.gaussian(values, [hot, column])
    torch.testing.assert_close(same.information, prior.information.flip(0))
    lonely = label.clone()
    lonely[0] = 2
    with_one = bounds.population_mse_bound(trace, 2, Prior.gaussian(values, [lonely, column]))
    assert with_one.bound.value.item() == pytest.approx(found.bound.value.item(), rel=1e-3)


def test_known_columns_cost_degrees_of_freedom() -> None:
    """Few people and many known columns: what is left has the variance of a regression, not of its
    small residuals.
    """
    generator = torch.Generator().manual_seed(7)
    columns = torch.randn(30, 12, generator=generator, dtype=torch.float64)
    values = columns @ torch.randn(12, 3, generator=generator, dtype=torch.float64)
    values += torch.randn(30, 3, generator=generator, dtype=torch.float64)
    design = torch.cat([columns, torch.ones(30, 1, dtype=torch.float64)], dim=1)
    residual = values - design @ torch.linalg.lstsq(design, values).solution
    variance = residual.square().sum().item() / (3 * (30 - 13))
    assert Prior.gaussian(values, [columns]).variance == pytest.approx(variance)
