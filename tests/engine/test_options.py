"""What the options of make_private do, and what a loop may do; what they refuse is in test_refusals.py."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from opacus import PrivacyEngine
from opacus.schedulers import ExponentialGradClip, ExponentialNoise
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from tests.cases import DEVICE, relative_error
from tests.engine import brute_force
from tests.engine.loops import data, loader, network, train
from tests.engine.made import make, step
from torchfil import Accounting, Execution, FILPrivacyEngine, clipping
from torchfil.fisher import (
    NoAmplification,
    PoissonAmplification,
    Theorem4Amplification,
    estimators,
    reference,
    register_estimator,
)


def private(engine: FILPrivacyEngine | None = None, **options: Any) -> Any:
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine = engine or FILPrivacyEngine()
    make = engine.make_private_with_epsilon if "target_epsilon" in options else engine.make_private
    return make(module, optimizer, loader(data(24)), **options)


def accounting_of(**options: Any) -> Accounting:
    engine = FILPrivacyEngine()
    private(engine, **options)
    return engine._training.run.options.accounting


class TestAccounting:
    def test_it_is_frozen_and_says_what_it_is(self) -> None:
        for options in (Accounting(), Execution()):
            with pytest.raises(dataclasses.FrozenInstanceError):
                options.seed = 3
        assert Accounting(track="diagonal").track == Accounting(track=["diagonal"]).track == ("diagonal",)
        assert Accounting(estimator="exact").exact
        assert not Accounting(estimator="exact", fil_rate=0.5).exact
        assert not Accounting().exact
        assert [Accounting(**given).skips_steps for given in ({}, {"rel_error": 0.1}, {"fil_rate": 0.5})] == [0, 1, 1]
        assert (Accounting().pace().num_probes, Accounting(num_probes=7).pace().num_probes) == (3, 7)
        assert Accounting().amplification_for(poisson_sampling=False) == NoAmplification()
        assert Accounting().amplification_for(poisson_sampling=True) == PoissonAmplification()

    def test_memory_follows_the_gpu_where_nobody_says(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A quarter of what is free, never less than on a CPU."""
        for free, expected in ((2**36, 2**34), (2**20, 2**30)):
            monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 10**12))
            assert Execution().memory_on(torch.device("cuda")) == expected
        assert Execution().memory_on(torch.device("cpu")) == 2**30
        assert Execution(max_memory=5).memory_on(torch.device("cuda")) == 5

    def test_shortcuts_go_into_it(self) -> None:
        found = accounting_of(num_probes=7, track=("diagonal",))
        assert (found.num_probes, found.track) == (7, ("diagonal",))
        found = accounting_of(accounting=Accounting(seed=3), rel_error=0.1)
        assert (found.seed, found.rel_error) == (3, 0.1)
        for option in ({"views": 2}, {"accumulation_steps": 2}):
            for given in (option, {"accounting": Accounting(**option)}):
                found = accounting_of(criterion=nn.CrossEntropyLoss(), **given)
                assert {name: getattr(found, name) for name in option} == option


class TestWithEpsilon:
    WISHED: dict[str, Any] = {  # noqa: RUF012
        "target_epsilon": 3.0, "target_delta": 1e-3, "epochs": 2, "epsilon_tolerance": 0.2,
    }  # fmt: skip

    def test_it_is_opacus_noise_and_a_looser_tolerance_ends_no_higher(self) -> None:
        module = network()
        given = {"optimizer": torch.optim.SGD(module.parameters(), lr=0.1), "data_loader": loader(data(24))}
        opacus = PrivacyEngine(accountant="rdp")
        stock = opacus.make_private_with_epsilon(module=module, max_grad_norm=1.0, **given, **self.WISHED)
        ours, loose = (private(**{**self.WISHED, "epsilon_tolerance": tolerance})[1] for tolerance in (0.2, 1.0))
        assert stock[1].noise_multiplier == ours.noise_multiplier < loose.noise_multiplier

    def test_epochs_are_those_of_the_accounting_where_it_says_none(self) -> None:
        for accounting, epochs in ((None, 2), (Accounting(num_probes=2), 2), (Accounting(epochs=5), 5)):
            assert accounting_of(**self.WISHED, accounting=accounting).epochs == epochs
        assert accounting_of(**self.WISHED, num_probes=5).num_probes == 5

    @pytest.mark.parametrize(("rate", "steps"), [({}, 6), ({"sample_rate": 0.35}, 4)])
    def test_the_target_is_spent(self, rate: dict[str, float], steps: int) -> None:
        """Also at a rate that is given, whose passes have ⌊1/q⌋ steps."""
        engine = FILPrivacyEngine()
        *_, batches = private(engine, criterion=nn.CrossEntropyLoss(), **rate, **self.WISHED)
        for _ in range(2):
            for x, y in batches:
                engine.train_step(x, y)
        assert engine.accountant.history[0][1:] == (rate.get("sample_rate", 1 / 3), steps)
        assert 2.4 < engine.get_epsilon(1e-3) <= 3.0


class TestPublicSizes:
    """With q and the divisor given, a step's scale does not tell how many examples there are (opacus#571, #819)."""

    def scale(self, n: int, **options: Any) -> tuple[float, Any]:
        """The spread of a step's released gradient over 20,000 weights, and the settings of the run."""
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(20, 900), nn.Tanh(), nn.Linear(900, 2))
        examples = TensorDataset(torch.randn(n, 20), torch.randint(2, (n,)))
        options = {"noise_multiplier": 20.0, "max_grad_norm": 0.1, "criterion": nn.CrossEntropyLoss(), **options}
        engine, _, _, optimizer, batches = make(examples, module, 100, **options)
        engine.train_step(*next(iter(batches)))
        released = torch.cat([p.grad.flatten() for p in module.parameters()])
        told = len(batches), optimizer.expected_batch_size, engine.accountant.history, batches.sample_rate
        return float(released.std()), told

    def test_the_scale_is_that_of_the_given_sizes(self) -> None:
        given = {"sample_rate": 0.1, "expected_batch_size": 80}
        (here, told), (_, same), (half, less) = (self.scale(n, **given) for n in (1000, 999, 500))
        assert told == same == less == (10, 80, [(20.0, 0.1, 1)], 0.1)
        assert here == pytest.approx(20.0 * 0.1 / 80, rel=0.03)
        assert half == pytest.approx(here, rel=0.03)
        assert self.scale(500)[0] == pytest.approx(20.0 * 0.1 / 100, rel=0.03)  # 500 // 5
        assert private(expected_batch_size=7, poisson_sampling=False)[1].expected_batch_size == 7

    def test_the_draws_have_the_given_rate(self) -> None:
        *_, batches = private(sample_rate=0.5)
        sizes = [len(x) for _ in range(200) for x, _ in batches]
        assert len(sizes) == 400
        assert sum(sizes) / 400 == pytest.approx(12, abs=0.6)  # 24 examples; the mean's error is 0.12


class TestLabels:
    def test_a_registered_estimator_is_what_it_says(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(estimators, "_REGISTRY", dict(estimators._REGISTRY))
        register_estimator("columns", estimators.exact, quantities=("trace", "diagonal"), exact=True)
        ours, truth = (
            train(data(24), steps=3, estimator=name, track=("diagonal",)).engine for name in ("columns", "exact")
        )
        assert ours.get_fil().kind == ours.get_attribute_fil().kind == "exact"
        assert set(ours.leakage()["fil_kind"]) == {"exact"}
        assert torch.equal(ours.get_attribute_fil().value, truth.get_attribute_fil().value)
        register_estimator("traces", estimators.exact)
        with pytest.raises(ValueError, match="trace only"):
            Accounting(estimator="traces", track=("diagonal",))

    @pytest.mark.parametrize(("kinds", "known"), [(("none", NoAmplification()), True), (("poisson", None), False)])
    def test_known_batches_have_no_sampling_error_however_it_is_said(self, kinds: Any, known: bool) -> None:
        """By name, by object, or by default."""
        named, given = (
            train(data(24), steps=4, estimator="exact", **({"amplification": kind} if kind else {})).engine.totals
            for kind in kinds
        )
        assert torch.equal(named.get_fil().value, given.get_fil().value)
        for leakage in (named, given):
            assert leakage.conditions.sample_rate == (None if known else pytest.approx(1 / 3))
            assert bool((leakage.get_sampling_error() > 0).any()) is not known


class Louder:
    """κ = 1 + q + σ, which shows what it was given."""

    secret_batches = True

    def factors(self, rho: Tensor, q: float, sigma: float) -> tuple[Tensor, Tensor]:
        return torch.full_like(rho, 1 + q + sigma), torch.full_like(rho, 1 + q + sigma)


@pytest.mark.parametrize(
    ("way", "amplification", "clip"),
    [("auto", Louder(), "smooth"), ("hooks", Theorem4Amplification(), "quartic"), ("train_step", "poisson", "quartic")],
)
def test_clips_of_ones_own_and_amplifications_follow_schedulers(
    way: str, amplification: Any, clip: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clipping, "_REGISTRY", dict(clipping._REGISTRY))
    clipping.register_clip("quartic", lambda t: (1 + t**4) ** 0.25)
    sigma, threshold, q = 0.9, 0.5, 1 / 3
    options = {"noise_multiplier": sigma, "max_grad_norm": threshold, "amplification": amplification, "clip": clip}
    options |= {"criterion": nn.CrossEntropyLoss(), "grad_sample_mode": "hooks" if way == "hooks" else "auto"}
    run = brute_force.make(network(), data(24), batch_size=8, **options)
    schedulers = ExponentialNoise(run.optimizer, gamma=0.7), ExponentialGradClip(run.optimizer, gamma=0.95)
    expected = torch.zeros(24, dtype=torch.float64)
    for k, batch in enumerate(run.private):
        sigma, threshold = 0.9 * 0.7**k, 0.5 * 0.95**k
        run.plain.load_state_dict(run.module.state_dict())
        begun = brute_force.take(run, batch, way)
        given = {"max_grad_norm": threshold, "clip": clip}
        jacobian = reference.exact_jacobian(run.plain, F.cross_entropy, begun.x, begun.y, **given)
        if amplification == "poisson":
            clipped = reference.clipped_gradients(run.plain, F.cross_entropy, begun.x, begun.y, **given)
            fim = reference.poisson_fim(jacobian, clipped, sigma * threshold, q)
        else:
            kappa = amplification.factors(torch.ones(1), q, sigma)[0].item()
            fim = kappa * jacobian.mT @ jacobian / (sigma * threshold) ** 2
        expected[begun.ids] += torch.einsum("bii->b", fim).cpu()
        for scheduler in schedulers:
            scheduler.step()
    assert relative_error(run.engine.totals.get_trace().value, expected) < 1e-6
    history = run.engine.accountant.history
    assert [noise for noise, *_ in history] == pytest.approx([0.9 * 0.7**k for k in range(3)])
    assert run.engine.get_individual_epsilon(delta=1e-5).value.max() <= run.engine.get_epsilon(1e-5) + 1e-9


class TestLoops:
    def test_the_bare_call_and_what_it_logs(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level("INFO", logger="torchfil"):
            engine, _, model, optimizer, batches = make(max_grad_norm=0.7)
        assert "clipped to 0.7 by the clip function 'smooth'" in caplog.text
        engine, _, model, optimizer, batches = make()
        for batch in batches:
            step(model, optimizer, batch)
        assert optimizer.noise_multiplier == optimizer.max_grad_norm == 1.0
        assert engine.get_fil().kind == "estimate"
        assert (engine.get_fil().standard_error > 0).any()

    def test_passes_that_do_not_train_and_gradients_that_are_thrown_away(self) -> None:
        engine, _, model, optimizer, batches = make(data(60))
        seen = torch.zeros(60, dtype=torch.long)
        for _ in range(2):
            for x, _ in batches:
                model(x.to(DEVICE))  # in training mode, without a backward pass
        for k, batch in enumerate(batches):
            x, y = (t.to(DEVICE) for t in batch)
            with torch.no_grad():
                model(x)
            model.eval()
            model(x)
            model.train()
            loss = F.cross_entropy(model(x), y)
            (model if k else optimizer).zero_grad()  # after the forward pass
            loss.backward()
            if k == 2:
                model.zero_grad()
                continue
            optimizer.step()
            seen[batch._ids] += 1
        assert torch.equal(engine.ledger.sums["participations"].cpu(), seen)
        assert engine._training.run.history.steps == len(batches) - 1

    def test_weighted_draws_without_replacement_have_no_amplification(self) -> None:
        sampler = WeightedRandomSampler(torch.rand(40).tolist(), 40, replacement=False)
        engine, _, model, optimizer, batches = make(DataLoader(data(40), 8, sampler=sampler), poisson_sampling=False)
        for batch in batches:
            step(model, optimizer, batch)
        assert engine._training.run.options.amplification == NoAmplification()
        assert engine.ledger.sums["participations"].tolist() == [1] * 40

    def test_a_model_that_is_not_smooth_warns_and_names_the_operators(self) -> None:
        module = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)).double().to(DEVICE)
        _, _, model, optimizer, batches = make(module=module)
        with pytest.warns(UserWarning, match=r"relu.*SmoothnessValidator"):
            step(model, optimizer, next(iter(batches)))
