"""Bounds on every attacker, read from a run: reconstruction robustness by example, van Trees for the population."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.engine.loops import SIGMA, C, data, train
from torchfil import Accounting, FILPrivacyEngine, Private, bounds
from torchfil.accounting.norms import NormHistory
from torchfil.engine.reading import everybodys_robustness, individual_robustness


def test_history_by_hand() -> None:
    """Norms of ½C at three steps and of C (the stand-in) at one: the levels' powers composed."""
    history = NormHistory(2)
    history.step(torch.tensor([], dtype=torch.long), torch.zeros(0), 1.0, 0.1)
    for _ in range(3):
        history.step(torch.tensor([0]), torch.tensor([1.05**-14]), 1.0, 0.1)
    got = individual_robustness(history, torch.arange(2), [0.01, 0.2])
    alone = bounds.rero([0.01, 0.2], q=0.1, noise_multiplier=[1.0, 1.05**14], steps=[1, 3])
    clipped = bounds.rero([0.01, 0.2], q=0.1, noise_multiplier=1.0, steps=4)
    for row, bracket in zip(got, (alone, clipped), strict=True):
        assert (row >= bracket.low).all()
        np.testing.assert_allclose(row, bracket.high, rtol=5e-3)


def test_examples_are_below_everybody_and_ordered_as_their_epsilon() -> None:
    engine = train(data(93), steps=30, clip="gelu", norm_refresh=5).engine
    own = engine.get_reconstruction_robustness(prior_success=0.01)
    history = engine.accountant.history
    everybody = everybodys_robustness(history, [0.01]).high.item()
    assert own.kind == "estimate"
    assert own.standard_error.isnan().all()
    assert 0.01 < own.value.min() < own.value.max() <= everybody * (1 + 1e-3)
    epsilon = engine.get_individual_epsilon(delta=1e-5).value
    assert stats.spearmanr(own.value, epsilon).statistic > 0.95
    curve = engine.get_reconstruction_robustness([5, 3], prior_success=[0.001, 0.1])
    assert curve.value.shape == (2, 2)
    assert engine.get_reconstruction_robustness([5], prior_success=0.01).value[0] == pytest.approx(own.value[5].item())


def test_known_batches_count_an_examples_own_steps_alone() -> None:
    engine = train(data(40), steps=10, poisson_sampling=False).engine
    assert engine.ledger is not None
    norm = engine.ledger.sums["squared_norm"].double().sqrt().cpu().numpy()
    want = stats.norm.cdf(stats.norm.ppf(0.05) + norm / (SIGMA * C))
    np.testing.assert_allclose(engine.get_reconstruction_robustness(prior_success=0.05).value, want, rtol=1e-9)


def test_changing_noise_and_rates_are_composed() -> None:
    releases = [(1.0, 0.1, 10), (2.0, 0.1, 5), (1.0, 0.1, 3), (1.0, 0.3, 1)]
    got = everybodys_robustness(releases, [0.1])
    want = bounds.rero(0.1, q=[0.1, 0.1, 0.3], noise_multiplier=[1.0, 2.0, 1.0], steps=[13, 5, 1])
    assert got.high.item() == pytest.approx(want.high.item(), rel=1e-3)
    many = [(1.0 + 0.005 * k, 0.1, 1) for k in range(60)]
    rounded = everybodys_robustness(many, [0.1])
    less = bounds.rero(0.1, q=0.1, noise_multiplier=[many[k][0] for k in (9, 19, 29, 39, 49, 59)], steps=10)
    more = bounds.rero(0.1, q=0.1, noise_multiplier=[many[k][0] for k in (0, 10, 20, 30, 40, 50)], steps=10)
    assert less.low.item() < rounded.high.item() < more.high.item(), "rounded down by 2 %, not by 5 %"
    assert everybodys_robustness([], [0.1]).high.tolist() == [0.1]
    assert everybodys_robustness([(0.0, 0.1, 1)], [0.1]).high.tolist() == [1.0]


def test_nothing_was_released_or_all() -> None:
    history = NormHistory(3)
    assert individual_robustness(history, torch.arange(3), [0.1]).tolist() == [[0.1]] * 3
    history.step(torch.tensor([0]), torch.tensor([0.5]), 0.0, 0.1)
    assert individual_robustness(history, torch.arange(3), [0.1]).tolist() == [[1.0]] * 3


def test_population_bound_from_data_box_and_own_prior() -> None:
    dataset = data(93)
    engine = train(dataset, steps=20).engine
    values, labels = dataset.tensors
    trace = engine.totals.get_trace()
    mean = trace.value.double().mean().item()

    fitted = engine.get_population_mse_bound()
    by_hand = bounds.population_mse_bound(trace, 5, bounds.Prior.gaussian(values, [labels]))
    assert fitted.bound.value.item() == pytest.approx(by_hand.bound.value.item(), rel=1e-6)
    within = torch.stack([values[labels == label].var(dim=0).mean() for label in labels])
    assert fitted.prior_variance == pytest.approx(within.mean().item(), rel=1e-5)
    assert 0 < fitted.bound.value.item() < fitted.prior_variance, "the model tells something"
    assert fitted.bound.standard_error.item() > 0

    box = engine.get_population_mse_bound((-3.0, 3.0))
    assert box.bound.value.item() == pytest.approx(5 / (mean + 5 * math.pi**2 / 9), rel=1e-6)
    own = engine.get_population_mse_bound(bounds.Prior(torch.tensor(2.0), 3.0, "what we know"))
    assert own.bound.value.item() == pytest.approx(5 / (mean + 2.0), rel=1e-6)
    assert own.bound.kind == "estimate"
    assert "spread like what we know" in str(own)
    with pytest.raises(TypeError, match=r"ignores what is public.*known=\[labels"):
        engine.get_population_mse_bound(values)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the prior has 2 coordinates, and 5 are private"):
        engine.get_population_mse_bound(bounds.Prior.gaussian(values[:, :2]))


class Mean(nn.Module):
    """Estimates a mean: the gradient of an example is w − x, so a step without clipping releases x plus noise."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * (x - self.w).square().sum(dim=1)


@pytest.mark.parametrize("public", ["label", "column"])
def test_a_public_label_or_column_is_no_protection(public: str) -> None:
    """The private values lie close to what the label, or a public column, says: the answer without a model is good."""
    source, n = torch.Generator().manual_seed(0), 400
    noise = 0.1 * torch.randn(n, 3, generator=source, dtype=torch.float64)
    label = torch.randint(0, 2, (n,), generator=source)
    column = torch.randn(n, generator=source, dtype=torch.float64)
    told = 4.0 * label - 2.0 if public == "label" else column
    x = noise + told[:, None] * torch.tensor([0.0, 1.0, 1.0])
    x[:, 0] = column
    engine = FILPrivacyEngine()
    _, _, loader = engine.make_private(
        (module := Mean()),
        torch.optim.SGD(module.parameters(), lr=0.01),
        DataLoader(TensorDataset(x, label), batch_size=n),
        noise_multiplier=0.02,
        max_grad_norm=100.0,
        criterion=lambda losses, _: losses.mean(),
        poisson_sampling=False,
        accounting=Accounting(estimator="exact"),
        private=Private(coordinates=[1, 2]),
    )
    for _ in range(6):
        for inputs, targets in loader:
            engine.train_step(inputs, targets)
    found = engine.get_population_mse_bound()
    reached = noise[:, 1:].square().mean().item()  # by answering what is told
    assert found.prior_variance == pytest.approx(reached, rel=0.02)
    assert 0.5 * reached < found.bound.value.item() < reached
    blind = bounds.population_mse_bound(engine.totals.get_trace(), 2, bounds.Prior.gaussian(x[:, 1:]))
    assert blind.bound.value.item() > 10 * reached, "a prior of the private values alone claims too much"


def test_more_runs_give_their_spread() -> None:
    engines = [train(data(60), steps=20, seed=seed).engine for seed in (3, 4, 5)]
    traces = FILPrivacyEngine.merge(engines).get_trace()
    merged = bounds.population_mse_bound(traces, 5, bounds.Prior.box(-3, 3, num_coordinates=5))
    values = [engine.get_population_mse_bound((-3.0, 3.0)).bound.value.item() for engine in engines]
    assert min(values) <= merged.bound.value.item() <= max(values)
    assert merged.bound.standard_error.item() > 0


def test_noise_of_zero_leaves_nothing_to_bound() -> None:
    with pytest.warns(UserWarning, match="no privacy"):
        engine = train(data(40), steps=4, noise_multiplier=0.0).engine
    assert engine.get_population_mse_bound((-3.0, 3.0)).bound.value.item() == 0.0
    assert (engine.get_reconstruction_robustness().value == 1).all()
