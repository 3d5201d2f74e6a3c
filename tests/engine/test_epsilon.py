"""ε and bounds on every attacker: Opacus's own, each example's, and those of the population."""

from __future__ import annotations

import contextlib
import copy
import math
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from opacus import PrivacyEngine
from opacus.accountants import PRVAccountant, RDPAccountant
from opacus.accountants.analysis.rdp import compute_rdp, get_privacy_spent
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import RandomSampler, TensorDataset

from tests.cases import DEVICE
from tests.engine.loops import SIGMA, C, Trained, data, exact_epsilon, loader, network, step, train
from tests.engine.test_augmentation import flips
from tests.engine.ways import LOSS, Calling, start, weights_of
from tests.engine.ways import step as step_in_a_way
from torchfil import PLIS, FILPrivacyEngine, Private, bounds
from torchfil.accounting.norms import ENTRIES, LEVELS, RATIO, NormHistory, added, as_table, squeezed
from torchfil.clipping import get_clip
from torchfil.engine.assembly import DatasetPasses
from torchfil.engine.reading import (
    everybodys_robustness,
    individual_epsilon,
    individual_robustness,
    spent_epsilon,
)
from torchfil.fisher import ClippedJacobian, ExampleGradients
from torchfil.report import load

ACCOUNTANTS = pytest.mark.parametrize("accountant", ["rdp", "prv", "gdp"])
ORDERS = RDPAccountant.DEFAULT_ALPHAS
NOBODY = torch.zeros(0, dtype=torch.long), torch.zeros(0)
pytestmark = pytest.mark.filterwarnings("ignore:Secure RNG", "ignore:Optimal order")


@ACCOUNTANTS
def test_epsilon_equals_stock_opacus(accountant: str) -> None:
    spent = []
    for kind in (PrivacyEngine, FILPrivacyEngine):
        module, engine = network(), kind(accountant=accountant)
        optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.1)
        noise = {"noise_multiplier": SIGMA, "max_grad_norm": C}
        model, optimizer, private = engine.make_private(
            module=module, optimizer=optimizer, data_loader=loader(data(40)), **noise
        )
        for batch in private:
            step(model, optimizer, batch)
        spent.append((engine.get_epsilon(1e-5), engine.accountant.history))
    assert spent[0] == spent[1]


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
def test_epsilon_is_never_below_0(accountant: str) -> None:
    """Opacus's formulas are, at a large δ; before the first step, that of "prv" fails."""
    engine = FILPrivacyEngine(accountant=accountant)
    module = network()
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.1)
    model, optimizer, private = engine.make_private(module, optimizer, loader(data(40)))
    assert engine.get_epsilon(0.5) == 0
    step(model, optimizer, next(iter(private)))
    assert engine.accountant.get_epsilon(0.5) < 0
    assert engine.get_epsilon(0.5) == engine.metrics(delta=0.5)["privacy/epsilon"] == 0
    assert not engine.get_individual_epsilon(delta=0.5).value.any()


def test_an_unknown_epsilon_is_not_0(monkeypatch: pytest.MonkeyPatch) -> None:
    accountant = PRVAccountant()
    accountant.history = [(1.0, 0.1, 1)]
    monkeypatch.setattr(accountant, "get_epsilon", lambda _: math.nan)
    assert math.isnan(spent_epsilon(accountant, 0.5))


def with_layer(layer: nn.Module) -> nn.Module:
    module = network()
    module.insert(2, layer)
    return module


def train_known(passes: int, plain: Any = None, accountant: str = "rdp", **options: Any) -> Trained:
    """Passes over 20 examples in batches of 4 without Poisson sampling."""
    module, engine = network(), FILPrivacyEngine(accountant=accountant)
    make = engine.make_private_with_epsilon if "target_epsilon" in options else engine.make_private
    options = {
        "max_grad_norm": C,
        "poisson_sampling": False,
        "criterion": nn.CrossEntropyLoss(),
        **options,
    }
    plain = plain or loader(data(20), 4, shuffle=True)
    made = make(module, torch.optim.SGD(module.parameters(), lr=0.1), plain, **options)
    for _ in range(passes):
        for x, y in made[2]:
            engine.train_step(x, y)
    return Trained(engine, *made)


class TestKnownBatches:
    """Without Poisson sampling every participation counts, however many steps a pass has."""

    @ACCOUNTANTS
    def test_five_passes_are_five_gaussian_mechanisms(self, accountant: str) -> None:
        first, run = (
            train_known(passes, accountant=accountant, noise_multiplier=1.0) for passes in (2, 0)
        )
        run.engine.load_state_dict(first.engine.state_dict())  # participations go on
        for _ in range(3):
            for x, y in run.loader:
                run.engine.train_step(x, y)
        exact, found = exact_epsilon(5**0.5, 1e-5), run.engine.get_epsilon(1e-5)
        assert exact == pytest.approx(11.48, abs=0.01)
        assert run.engine.accountant.history == [(1.0, 1.0, 5)]
        assert found > exact - 0.05
        if accountant != "gdp":  # its formula for Poisson sampling is loose at q = 1
            assert found < exact + (0.05 if accountant == "prv" else 1.0)
        target = {"target_epsilon": 8.0, "target_delta": 1e-5, "epochs": 2}
        aimed = train_known(2, accountant=accountant, **target)
        assert 7.9 <= aimed.engine.get_epsilon(1e-5) <= 8.0
        assert exact_epsilon(2**0.5 / aimed.optimizer.noise_multiplier, 1e-5) <= 8.0

    def test_a_sampler_that_repeats_is_counted(self) -> None:
        twice = loader(data(20), 4, sampler=RandomSampler(data(20), num_samples=40))
        assert train_known(3, twice, noise_multiplier=1.0).engine.accountant.history == [
            (1.0, 1.0, 6)
        ]

    def test_the_noise_for_an_epsilon_counts_rows_that_a_sampler_repeats(self) -> None:
        """Some are drawn twice in a pass, and others once."""
        some = loader(data(20), 4, sampler=RandomSampler(data(20), num_samples=28))
        aimed = train_known(2, some, target_epsilon=8.0, target_delta=1e-5, epochs=2)
        assert aimed.engine.get_epsilon(1e-5) <= 8.0

    def test_the_gate_and_rero_count_participations(self, tmp_path: Path) -> None:
        engine = train_known(5, noise_multiplier=1.0, expected_batch_size=6).engine
        saved = load(engine.save_run(tmp_path / "run.parquet", delta=1e-5))
        assert saved.about["epsilon"] >= exact_epsilon(5**0.5, 1e-5)
        mechanism, rero = saved.about["mechanism"], saved.bounds["rero"]
        assert (mechanism["sample_rate"], mechanism["expected_batch_size"]) == (None, 6)
        known = bounds.rero(rero["prior"], q=1.0, noise_multiplier=1.0, steps=5)
        assert rero["success"] == pytest.approx(known.high.tolist())
        assert "epsilon" not in saved.history  # by step it is not known


def spent(noises: list[float], q: float, delta: float) -> float:
    """ε of steps with these noise multipliers."""
    rdp = sum(compute_rdp(q=q, noise_multiplier=noise, steps=1, orders=ORDERS) for noise in noises)
    return float(get_privacy_spent(orders=ORDERS, rdp=rdp, delta=delta)[0])


class TestHistory:
    def test_by_hand(self) -> None:
        """Unseen: C stands in; seen: the last norm, rounded to the grid.

        Every step counts for everybody.
        """
        history = NormHistory(3)
        history.step(torch.tensor([0]), torch.tensor([0.5]), 1.0, 0.1)
        history.step(*NOBODY, 1.0, 0.1)
        history.step(torch.tensor([0, 1]), torch.tensor([0.25, 0.9]), 1.0, 0.1)
        history.step(*NOBODY, 1.0, 0.1)
        got = individual_epsilon(history, torch.arange(3), 1e-5)
        for value, ratios in zip(
            got, ([0.5, 0.5, 0.25, 0.25], [1.0, 1.0, 0.9, 0.9], [1.0] * 4), strict=True
        ):
            levels = [math.floor(math.log(1 / ratio) / math.log(1.05) + 1e-5) for ratio in ratios]
            assert float(value) == pytest.approx(
                spent([1.05**level for level in levels], 0.1, 1e-5), rel=1e-9
            )
        assert got[0] < got[1] < got[2]

    @pytest.mark.parametrize("ratio", [0.03, 0.62, 0.999])
    def test_rounding_never_understates(self, ratio: float) -> None:
        history, sigmas = NormHistory(1), [1.2, 1.1, 0.9, 1.3, 1.0]
        for sigma in sigmas:
            history.step(torch.tensor([0]), torch.tensor([ratio]), sigma, 0.2)
        epsilon = spent([sigma / ratio for sigma in sigmas], 0.2, 1e-6)
        got = individual_epsilon(history, torch.tensor([0]), 1e-6).item()
        assert max(epsilon, 0) <= got * (1 + 1e-9)
        assert got < 1.2 * max(epsilon, 0.05)


class TestOfRuns:
    def test_an_example_that_always_hits_the_clip_spends_the_engines_epsilon(self) -> None:
        """A regression target far out of reach: hard clipping leaves a norm of exactly C at every
        step.
        """
        x, y = data(40).tensors[0], torch.zeros(40, 3, dtype=torch.float64)
        y[0] = 1e6
        module = nn.Linear(5, 3).double()
        nn.init.zeros_(module.weight)  # so that all others' gradients are small
        engine = train(
            TensorDataset(x, y), steps=10, module=module, loss_fn=F.mse_loss, clip="hard"
        ).engine
        own = engine.get_individual_epsilon(range(6), delta=1e-5)
        assert own.kind == "estimate"
        assert (
            own.value[1:].min() < own.value[0] == pytest.approx(engine.get_epsilon(1e-5), rel=1e-9)
        )
        assert (
            engine.leakage(range(6), delta=1e-5)["individual_epsilon"].tolist()
            == own.value.tolist()
        )

    def test_norm_refresh_looks_everybody_up(self) -> None:
        """Clipped softly: by hard clipping or nearly so, all norms of this model would be C."""
        dataset = data(40)
        stale, fresh = (
            train(dataset, steps=6, clip="gelu", **more).engine
            for more in ({}, {"norm_refresh": 1})
        )
        assert (fresh._training.run.history.ratio < 1).all(), "nobody keeps the stand-in"
        assert (stale._training.run.history.ratio == 1).any()
        means = [
            engine.get_individual_epsilon(delta=1e-5).value.mean() for engine in (fresh, stale)
        ]
        assert means[0] < means[1]
        fresh.refresh_norms()
        module = network()
        module.load_state_dict(fresh._training.replica.live.state_dict())
        gradients = ExampleGradients.build(
            module, nn.CrossEntropyLoss(), *(t.to(DEVICE) for t in dataset.tensors)
        )
        want = ClippedJacobian(gradients, get_clip("gelu"), C).clipped_norm / C
        assert torch.allclose(fresh._training.run.history.ratio.double(), want, rtol=1e-5)

    @pytest.mark.parametrize(
        "options", [{}, {"grad_sample_mode": "hooks"}, {"criterion": LOSS}], ids=str
    )
    @pytest.mark.parametrize(
        "layer", [nn.Dropout(0.5), Calling(lambda m, h: F.dropout(h, 0.5, m.training))], ids=str
    )
    def test_norms_and_plis_are_those_without_dropout(
        self, layer: nn.Module, options: dict[str, Any]
    ) -> None:
        """Masks and random states stay those of training."""
        module, dataset = with_layer(layer), data(40)
        engine = train(
            dataset, steps=4, module=module, clip="gelu", norm_refresh=4, **options
        ).engine
        state = torch.get_rng_state()
        plis = engine.plis()
        engine.refresh_norms()
        assert torch.equal(torch.get_rng_state(), state)
        assert all(part.training for part in module.modules())
        plain = copy.deepcopy(module).eval()
        gradients = ExampleGradients.build(plain, LOSS, *(t.to(DEVICE) for t in dataset.tensors))
        want = ClippedJacobian(gradients, get_clip("gelu"), C).clipped_norm / C
        assert torch.allclose(engine._training.run.history.ratio.double(), want, rtol=1e-5)
        own = PLIS(plain, LOSS, noise_std=SIGMA * C, max_grad_norm=C, clip="gelu")
        maps = own.attribute(*(t.to(DEVICE) for t in dataset.tensors))
        assert torch.allclose(plis, maps, rtol=1e-5, atol=1e-8)

    def test_norms_are_known_of_a_model_that_always_draws(self) -> None:
        """A flip inside the model is drawn in a refresh, too, though not from torch's own stream;
        the norm is that of one of both.
        """
        module, dataset = Calling(flips, network=network()), data(40)
        engine = train(dataset, steps=2, module=module, clip="gelu", criterion=LOSS).engine
        state = torch.get_rng_state()
        engine.refresh_norms()
        assert torch.equal(torch.get_rng_state(), state)
        found = engine._training.run.history.ratio.double()
        x, y = (t.to(DEVICE) for t in dataset.tensors)
        near = []
        for inputs in (x, x.flip(-1)):
            gradients = ExampleGradients.build(module.network, LOSS, inputs, y)
            want = ClippedJacobian(gradients, get_clip("gelu"), C).clipped_norm / C
            near.append(torch.isclose(found, want, rtol=1e-5))
        assert (near[0] | near[1]).all()
        assert min(int(each.sum()) for each in near) > 5

    @pytest.mark.parametrize("way", ["auto", "train_step"])
    def test_a_refresh_that_fails_leaves_a_whole_step(
        self, way: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Weights, ledger and accountant have all taken it, and the next one works."""
        module = network()
        given = {"norm_refresh": 1, "lr": 0.3, "poisson_sampling": True}
        engine, *parts, batches = start(module, loader(data(40)), way, **given)
        for steps, batch in zip((1, 2), batches, strict=False):
            before = weights_of(module)
            with monkeypatch.context() as patch, contextlib.ExitStack() as stack:
                if steps == 1:
                    patch.setattr(DatasetPasses, "_batches", mock.Mock(side_effect=OSError("gone")))
                    stack.enter_context(pytest.raises(OSError, match="gone"))
                step_in_a_way(engine, *parts, *batch, way)
            assert engine.ledger.steps == engine.accountant.history[0][2] == steps
            assert not torch.equal(weights_of(module), before)

    def test_rdp_bound_from_the_accountants_history(self) -> None:
        engine = train(data(40), steps=7).engine

        def rdp(order: float) -> float:
            return float(compute_rdp(q=1 / 5, noise_multiplier=SIGMA, steps=7, orders=order))

        paper = bounds.mse_from_rdp(rdp(2.0), [2.0] * 5)
        assert engine.get_rdp_mse_bound(2.0, reading="paper") == pytest.approx(paper, rel=1e-9)
        lowest = bounds.mse_from_rdp(1.5 * rdp(4.0) + rdp(3.0), [2.0] * 5) * (1 - 1e-9)
        assert lowest <= engine.get_rdp_mse_bound(torch.full((5,), 2.0)) < paper


# ------------------------------------------------------------------ levels of noise in few entries


def test_many_levels_in_few_entries_lose_no_step_and_no_loss() -> None:
    source = torch.Generator().manual_seed(0)
    few = [(90 - 7 * (k % ENTRIES), k) for k in range(60)]
    many = [(int(torch.randint(LEVELS, (), generator=source)), 1 + k % 5) for k in range(300)]
    for steps in (few, many):
        exact = torch.zeros(1, LEVELS, dtype=torch.int32)
        levels, counts = (
            torch.zeros(1, ENTRIES, dtype=torch.uint8),
            torch.zeros(1, ENTRIES, dtype=torch.int32),
        )
        for level, count in steps:
            exact[0, level] += count
            levels, counts = added(levels, counts, torch.tensor([level]), torch.tensor([count]))
        found = as_table(levels, counts)
        assert steps is many or torch.equal(found, exact)
        assert int((found > 0).sum()) <= ENTRIES
        assert found.sum() == exact.sum()
        assert bool((found.cumsum(dim=1) >= exact.cumsum(dim=1)).all()), (
            "no step counts at a level with more noise"
        )
        weights = RATIO ** (-2.0 * torch.arange(LEVELS))
        assert float((found * weights).sum()) < 1.2 * float((exact * weights).sum()), (
            "ε grows by half as much, or less"
        )
    together = squeezed(torch.arange(LEVELS, dtype=torch.uint8)[None], exact, ENTRIES)
    assert bool((as_table(*together).cumsum(dim=1) >= exact.cumsum(dim=1)).all())


# ------------------------------------------------------------------ bounds on every attacker


def test_robustness_by_hand() -> None:
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


def test_known_batches_count_an_examples_own_steps_alone() -> None:
    engine = train(data(40), steps=10, poisson_sampling=False).engine
    norm = engine.ledger.sums["squared_norm"].double().sqrt().cpu().numpy()
    want = stats.norm.cdf(stats.norm.ppf(0.05) + norm / (SIGMA * C))
    np.testing.assert_allclose(
        engine.get_reconstruction_robustness(prior_success=0.05).value, want, rtol=1e-9
    )


def test_changing_noise_and_rates_are_composed() -> None:
    releases = [(1.0, 0.1, 10), (2.0, 0.1, 5), (1.0, 0.1, 3), (1.0, 0.3, 1)]
    got = everybodys_robustness(releases, [0.1])
    want = bounds.rero(0.1, q=[0.1, 0.1, 0.3], noise_multiplier=[1.0, 2.0, 1.0], steps=[13, 5, 1])
    assert got.high.item() == pytest.approx(want.high.item(), rel=1e-3)
    assert everybodys_robustness([], [0.1]).high.tolist() == [0.1]
    assert everybodys_robustness([(0.0, 0.1, 1)], [0.1]).high.tolist() == [1.0]


def test_nothing_was_released_or_all() -> None:
    history = NormHistory(3)
    assert individual_robustness(history, torch.arange(3), [0.1]).tolist() == [[0.1]] * 3
    history.step(torch.tensor([0]), torch.tensor([0.5]), 0.0, 0.1)
    assert individual_robustness(history, torch.arange(3), [0.1]).tolist() == [[1.0]] * 3
    with pytest.warns(UserWarning, match="no privacy"):
        engine = train(data(40), steps=2, noise_multiplier=0.0).engine
    assert engine.get_population_mse_bound((-3.0, 3.0)).bound.value.item() == 0.0
    assert (engine.get_reconstruction_robustness().value == 1).all()


def test_population_bound_from_data_box_and_own_prior() -> None:
    values, labels = data(60).tensors
    engine = train(data(60), steps=10).engine
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
    with pytest.raises(TypeError, match="public"):
        engine.get_population_mse_bound(values)
    with pytest.raises(ValueError, match="2 coordinates"):
        engine.get_population_mse_bound(bounds.Prior.gaussian(values[:, :2]))


class Mean(nn.Module):
    """Estimates a mean: the gradient of an example is w − x, so a step without clipping releases x
    plus noise.
    """

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * (x - self.w).square().sum(dim=1)


@pytest.mark.parametrize("public", ["label", "column"])
def test_a_public_label_or_column_is_no_protection(public: str) -> None:
    """The private values lie close to what the label, or a public column, says: the answer without
    a model is good.
    """
    source, n = torch.Generator().manual_seed(0), 400
    noise = 0.1 * torch.randn(n, 3, generator=source, dtype=torch.float64)
    label = torch.randint(0, 2, (n,), generator=source)
    column = torch.randn(n, generator=source, dtype=torch.float64)
    told = 4.0 * label - 2.0 if public == "label" else column
    x = noise + told[:, None] * torch.tensor([0.0, 1.0, 1.0])
    x[:, 0] = column
    options = {
        "noise_multiplier": 0.02,
        "max_grad_norm": 100.0,
        "poisson_sampling": False,
        "estimator": "exact",
    }
    options |= {"loss_fn": lambda losses, _: losses.mean(), "private": Private(coordinates=[1, 2])}
    engine = train(TensorDataset(x, label), steps=6, batch_size=n, module=Mean(), **options).engine
    found = engine.get_population_mse_bound()
    reached = noise[:, 1:].square().mean().item()  # by answering what is told
    assert found.prior_variance == pytest.approx(reached, rel=0.02)
    assert 0.5 * reached < found.bound.value.item() < reached
    blind = bounds.population_mse_bound(
        engine.totals.get_trace(), 2, bounds.Prior.gaussian(x[:, 1:])
    )
    assert blind.bound.value.item() > 10 * reached, (
        "a prior of the private values alone claims too much"
    )
