"""Options check themselves, before anything is touched; shortcuts, and options that belong elsewhere."""

from __future__ import annotations

import dataclasses
import inspect
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from opacus import PrivacyEngine
from opacus.schedulers import ExponentialNoise
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.cases import DEVICE, relative_error
from tests.engine.brute_force import make, take
from tests.engine.loops import data, loader, network
from torchfil import Accounting, Execution, FILPrivacyEngine
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
    return (engine or FILPrivacyEngine()).make_private(module, optimizer, loader(data(24)), **options)


class TestAccounting:
    @pytest.mark.parametrize(
        ("options", "told"),
        [
            ({"num_probes": 0}, "num_probes=0 must be at least 1"),
            ({"rel_error": 0.0}, "rel_error=0.0 must lie strictly between 0 and 1; 0.05 means 5 %"),
            ({"rel_error": 5.0}, "rel_error=5.0 must lie strictly between 0 and 1"),
            ({"rel_error": math.nan}, "rel_error=nan must lie strictly"),
            ({"rel_error": 0.1, "num_probes": 2}, "chooses the probes .* leave out num_probes=2"),
            ({"rel_error": 0.1, "fil_rate": 0.5}, "leave out num_probes=None and fil_rate=0.5"),
            ({"rel_error": 0.1, "estimator": "exact"}, "needs estimator='weight-probes', not 'exact'"),
            ({"epochs": 0}, "epochs=0 must be positive"),
            ({"fil_rate": 0.0}, r"fil_rate=0.0 must lie in \(0, 1\]: the probability of measuring a step"),
            ({"fil_rate": 1.5}, r"fil_rate=1.5 must lie in \(0, 1\]"),
            ({"fil_rate": math.nan}, r"fil_rate=nan must lie in \(0, 1\]"),
            ({"sketch_rank": 0}, "sketch_rank=0 must be at least 1"),
            ({"accumulation_steps": 0}, "accumulation_steps=0 must be at least 1"),
            ({"sample_rate": 0.0}, r"sample_rate=0.0 must lie in \(0, 1\]"),
            ({"sample_rate": 1.1}, r"sample_rate=1.1 must lie in \(0, 1\]"),
            ({"expected_batch_size": 0}, "expected_batch_size=0 must be positive"),
            ({"norm_refresh": 0}, "norm_refresh=0 must be at least 1"),
            ({"estimator": "magic"}, "estimator='magic' is unknown; use one of coordinates, exact"),
            ({"amplification": "magic"}, "amplification='magic' is unknown; use one of none, poisson, theorem4"),
            ({"track": ("spectrum",)}, r"track=\['spectrum'\] is unknown"),
            ({"track": "spectrum"}, r"track=\['spectrum'\] is unknown"),
            (
                {"track": ("diagonal",), "estimator": "coordinates"},
                r"track=\('diagonal',\) needs the diagonal, and estimator='coordinates' gives the trace only",
            ),
            ({"track": ("fim",), "num_probes": 1}, "needs num_probes of at least 2"),
        ],
        ids=str,
    )
    def test_refusals(self, options: dict[str, Any], told: str) -> None:
        with pytest.raises(ValueError, match=told):
            Accounting(**options)

    def test_amplifications_that_are_none(self) -> None:
        with pytest.raises(TypeError, match=r"factors\(rho, q, sigma\)"):
            Accounting(amplification=3)  # type: ignore[arg-type]

        class Mute:
            def factors(self, rho: Tensor, q: float | None, sigma: float) -> tuple[Tensor, Tensor]:
                return rho, rho

        with pytest.raises(TypeError, match="a flag secret_batches"):
            Accounting(amplification=Mute())  # type: ignore[arg-type]

    def test_is_frozen(self) -> None:
        with pytest.raises(dataclasses.FrozenInstanceError):
            Accounting().num_probes = 3  # type: ignore[misc]
        with pytest.raises(dataclasses.FrozenInstanceError):
            Execution().cuda_graphs = False  # type: ignore[misc]

    def test_a_single_name_to_track(self) -> None:
        assert Accounting(track="diagonal").track == ("diagonal",)
        assert Accounting(track=["plis"]).track == ("plis",)

    def test_what_it_says_of_itself(self) -> None:
        assert Accounting(estimator="exact").exact
        assert not Accounting(estimator="exact", fil_rate=0.5).exact
        assert not Accounting().exact
        assert Accounting(rel_error=0.1).skips_steps
        assert Accounting(fil_rate=0.5).skips_steps
        assert not Accounting().skips_steps
        assert Accounting().pace().num_probes == 3
        assert Accounting(num_probes=7).pace().num_probes == 7

    def test_secret_batches_need_poisson_sampling(self) -> None:
        for amplification in ("poisson", "theorem4", PoissonAmplification(), Theorem4Amplification()):
            accounting = Accounting(amplification=amplification)
            with pytest.raises(ValueError, match=r"needs poisson_sampling=True.* Use 'none'"):
                accounting.amplification_for(poisson_sampling=False)
        assert Accounting().amplification_for(poisson_sampling=False) == NoAmplification()
        assert Accounting().amplification_for(poisson_sampling=True) == PoissonAmplification()


class TestExecution:
    @pytest.mark.parametrize("max_memory", [0, -1])
    def test_memory_is_positive(self, max_memory: int) -> None:
        with pytest.raises(ValueError, match=f"max_memory={max_memory} must be a positive number of bytes"):
            Execution(max_memory=max_memory)

    def test_memory_follows_the_gpu_where_nobody_says(self, monkeypatch: pytest.MonkeyPatch) -> None:
        free = 2**36
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 10**12))
        assert Execution().memory_on(torch.device("cuda")) == 2**34
        assert Execution().memory_on(torch.device("cpu")) == 2**30
        assert Execution(max_memory=5).memory_on(torch.device("cuda")) == 5
        free = 2**20
        assert Execution().memory_on(torch.device("cuda")) == 2**30


class TestMakePrivate:
    def test_has_at_most_twenty_arguments(self) -> None:
        parameters = inspect.signature(FILPrivacyEngine.make_private).parameters.values()
        named = [p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]
        assert len(named) - 1 <= 20
        ours = {"criterion", "clip", "private", "id_of", "batch_to_inputs", "accounting"}
        theirs = set(inspect.signature(PrivacyEngine.make_private).parameters) - {"kwargs"}
        assert set(named) - theirs <= ours, "at most six of our own"

    def test_positional_and_keyword_arguments(self) -> None:
        private()
        module = network()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        given = {"module": module, "optimizer": optimizer, "data_loader": loader(data(24))}
        FILPrivacyEngine().make_private(**given, noise_multiplier=1.0, max_grad_norm=1.0)
        with pytest.raises(TypeError):
            module = network()
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            FILPrivacyEngine().make_private(module, optimizer, loader(data(24)), 1.0)  # type: ignore[misc]

    def test_shortcuts(self) -> None:
        engine = FILPrivacyEngine()
        private(engine, num_probes=7, track=("diagonal",))
        accounting = engine._training.run.options.accounting
        assert (accounting.num_probes, accounting.track) == (7, ("diagonal",))
        engine = FILPrivacyEngine()
        private(engine, accounting=Accounting(seed=3), rel_error=0.1)
        accounting = engine._training.run.options.accounting
        assert (accounting.seed, accounting.rel_error) == (3, 0.1)

    @pytest.mark.parametrize("option", [{"views": 2}, {"accumulation_steps": 2}])
    def test_how_the_loop_trains_may_be_said_in_the_accounting(self, option: dict[str, int]) -> None:
        for given in (option, {"accounting": Accounting(**option)}):  # type: ignore[arg-type]
            engine = FILPrivacyEngine()
            private(engine, criterion=nn.CrossEntropyLoss(), **given)
            accounting = engine._training.run.options.accounting
            assert {name: getattr(accounting, name) for name in option} == option

    def test_shortcuts_are_checked_together_with_the_rest(self) -> None:
        with pytest.raises(ValueError, match="leave out num_probes=2"):
            private(num_probes=2, rel_error=0.1)
        with pytest.raises(ValueError, match="'coordinates' gives the trace only"):
            private(accounting=Accounting(estimator="coordinates"), track="diagonal")

    def test_given_twice(self) -> None:
        with pytest.raises(ValueError, match="num_probes is given twice, in accounting= and directly; keep one"):
            private(accounting=Accounting(num_probes=2), num_probes=3)
        with pytest.raises(ValueError, match="track is given twice"):
            private(accounting=Accounting(track="plis"), track="plis")

    @pytest.mark.parametrize("name", ["estimator", "fil_rate", "amplification", "max_memory", "cuda_graphs"])
    def test_options_that_belong_elsewhere(self, name: str) -> None:
        with pytest.raises(TypeError, match=rf"'{name}'.*accounting=Accounting\(…, execution=Execution\(…\)\)"):
            private(**{name: 1})

    def test_unknown_options(self) -> None:
        with pytest.raises(TypeError, match=r"unexpected option 'probes': of Accounting it takes num_probes,"):
            private(probes=3)
        with pytest.raises(TypeError, match="unexpected option 'noise_multiplyer'"):
            private(noise_multiplyer=1.0)

    @pytest.mark.parametrize(
        "options",
        [{"probes": 3}, {"num_probes": 0}, {"max_clipbound": 1.0}, {"clip": "soft"}, {"noise_multiplier": -1.0}],
        ids=str,
    )
    def test_refusals_touch_nothing(self, options: dict[str, Any]) -> None:
        engine, module = FILPrivacyEngine(), network()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with pytest.raises((TypeError, ValueError)):
            engine.make_private(module, optimizer, loader(data(24)), **options)
        assert not any(part._forward_hooks for part in module.modules())
        assert not hasattr(module[0].weight, "grad_sample")
        engine.make_private(module, optimizer, loader(data(24)))  # the engine is as new

    def test_the_clip_is_told(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level("INFO", logger="torchfil"):
            private(max_grad_norm=0.7)
        assert "clipped to 0.7 by the clip function 'smooth'" in caplog.text


class TestPublicSizes:
    """With q and the divisor given, a step's scale does not tell how many examples there are (opacus#571, #819)."""

    def scale(self, n: int, **options: Any) -> tuple[float, Any]:
        """The spread of a step's released gradient over 20,000 weights, and the settings of the run."""
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(20, 900), nn.Tanh(), nn.Linear(900, 2))
        engine = FILPrivacyEngine()
        examples = TensorDataset(torch.randn(n, 20), torch.randint(2, (n,)))
        options = {"noise_multiplier": 20.0, "max_grad_norm": 0.1, "criterion": nn.CrossEntropyLoss(), **options}
        plain = torch.optim.SGD(module.parameters(), lr=0.1)
        _, optimizer, batches = engine.make_private(module, plain, loader(examples, 100), **options)
        engine.train_step(*next(iter(batches)))
        released = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
        told = len(batches), optimizer.expected_batch_size, engine.accountant.history, batches.sample_rate
        return float(released.std()), told

    def test_the_scale_is_that_of_the_given_sizes(self) -> None:
        given = {"sample_rate": 0.1, "expected_batch_size": 80}
        (here, told), (_, same), (half, less) = (self.scale(n, **given) for n in (1000, 999, 500))
        assert told == same == less == (10, 80, [(20.0, 0.1, 1)], 0.1)
        assert here == pytest.approx(20.0 * 0.1 / 80, rel=0.03)
        assert half == pytest.approx(here, rel=0.03)
        assert self.scale(500)[0] == pytest.approx(20.0 * 0.1 / 100, rel=0.03)  # 500 // 5

    def test_the_draws_have_the_given_rate(self) -> None:
        engine = FILPrivacyEngine()
        *_, batches = private(engine, sample_rate=0.5)
        sizes = [len(x) for _ in range(200) for x, _ in batches]
        assert len(sizes) == 400
        assert sum(sizes) / 400 == pytest.approx(12, abs=0.6)  # 24 examples; the mean's error is 0.12
        assert engine._training.run.options.sample_rate == 0.5

    def test_a_rate_without_poisson_sampling(self) -> None:
        with pytest.raises(ValueError, match="leave one of them out"):
            private(sample_rate=0.5, poisson_sampling=False)
        _, optimizer, _ = private(expected_batch_size=7, poisson_sampling=False)
        assert optimizer.expected_batch_size == 7

    def test_noise_for_a_target_epsilon_at_the_given_rate(self) -> None:
        engine = FILPrivacyEngine()
        options = {"target_epsilon": 3.0, "target_delta": 1e-3, "epochs": 10, "criterion": nn.CrossEntropyLoss()}
        module = network()
        made = engine.make_private_with_epsilon(
            module, torch.optim.SGD(module.parameters(), lr=0.1), loader(data(24)), sample_rate=0.35, **options
        )
        for _ in range(10):
            for x, y in made[2]:
                engine.train_step(x, y)
        assert engine.accountant.history[0][1:] == (0.35, 20)  # passes of ⌊1/0.35⌋ steps
        assert engine.get_epsilon(1e-3) <= 3.0


class TestWithEpsilon:
    def given(self, engine: FILPrivacyEngine, **options: Any) -> Any:
        module = network()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        wished = {"target_epsilon": 3.0, "target_delta": 1e-3, "epochs": 2, "epsilon_tolerance": 0.05, **options}
        return engine.make_private_with_epsilon(module, optimizer, loader(data(24)), **wished)

    def test_a_looser_tolerance_ends_no_higher(self) -> None:
        multipliers = []
        for tolerance in (0.05, 1.0):
            _, optimizer, _ = self.given(FILPrivacyEngine(), epsilon_tolerance=tolerance)
            multipliers.append(optimizer.noise_multiplier)
        assert multipliers[0] < multipliers[1]

    def test_it_is_opacus_noise(self) -> None:
        module = network()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        _, stock, _ = PrivacyEngine(accountant="rdp").make_private_with_epsilon(
            module=module,
            optimizer=optimizer,
            data_loader=loader(data(24)),
            target_epsilon=3.0,
            target_delta=1e-3,
            epochs=2,
            max_grad_norm=1.0,
            epsilon_tolerance=0.05,
        )
        _, ours, _ = self.given(FILPrivacyEngine())
        assert ours.noise_multiplier == stock.noise_multiplier

    def test_epochs_are_those_of_the_accounting_where_it_says_none(self) -> None:
        for accounting, epochs in ((None, 2), (Accounting(num_probes=2), 2), (Accounting(epochs=5), 5)):
            engine = FILPrivacyEngine()
            self.given(engine, accounting=accounting)
            assert engine._training.run.options.accounting.epochs == epochs

    def test_the_noise_is_not_the_callers(self) -> None:
        with pytest.raises(TypeError, match="noise_multiplier"):
            self.given(FILPrivacyEngine(), noise_multiplier=1.0)

    def test_shortcuts_and_refusals_come_through(self) -> None:
        engine = FILPrivacyEngine()
        self.given(engine, num_probes=5)
        assert engine._training.run.options.accounting.num_probes == 5
        with pytest.raises(TypeError, match="unexpected option 'probes'"):
            self.given(FILPrivacyEngine(), probes=3)
        with pytest.raises(TypeError, match=r"'fil_rate'.*others go into accounting=Accounting\("):
            self.given(FILPrivacyEngine(), fil_rate=0.5)


class TestParameters:
    def test_an_optimizer_of_other_parameters(self) -> None:
        module = network()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        module[2] = nn.Linear(6, 3).double()
        with pytest.raises(ValueError, match=r"2 of the optimizer's 4 are not the module's.* Make the optimizer after"):
            FILPrivacyEngine().make_private(module, optimizer, loader(data(24)))

    def test_an_optimizer_of_too_few(self) -> None:
        module = network()
        optimizer = torch.optim.SGD(module[0].parameters(), lr=0.1)
        with pytest.raises(ValueError, match=r"does not hold 2 trainable ones \(.*2.weight.*2.bias.*freeze"):
            FILPrivacyEngine().make_private(module, optimizer, loader(data(24)))


class TestLabels:
    def train(self, **options: Any) -> FILPrivacyEngine:
        run = make(network(), data(24), batch_size=8, noise_multiplier=0.9, **options)
        for batch in run.private:
            take(run, batch)
        return run.engine

    def test_a_registered_exact_estimator_is_exact(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(estimators, "_REGISTRY", dict(estimators._REGISTRY))
        register_estimator("columns", estimators.exact, quantities=("trace", "diagonal"), exact=True)
        engine = self.train(estimator="columns", track=("diagonal",))
        assert engine.get_fil().kind == engine.get_attribute_fil().kind == "exact"
        truth = self.train(estimator="exact", track=("diagonal",))
        assert torch.equal(engine.get_attribute_fil().value, truth.get_attribute_fil().value)

    def test_one_of_the_trace_alone_is_refused_at_construction(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(estimators, "_REGISTRY", dict(estimators._REGISTRY))
        register_estimator("traces", estimators.exact)
        with pytest.raises(ValueError, match=r"estimator='traces' gives the trace only, not the diagonal; use"):
            Accounting(estimator="traces", track=("diagonal",))

    def test_batches_that_are_known_have_no_sampling_error_however_that_is_said(self) -> None:
        engines = [self.train(amplification=given) for given in ("none", NoAmplification())]
        fil = [engine.get_fil().value for engine in engines]
        assert torch.equal(*fil)
        for engine in engines:
            assert not bool(engine.totals.get_sampling_error().any())
        named, given = (self.train(amplification=given) for given in ("poisson", PoissonAmplification()))
        errors = [engine.totals.get_sampling_error() for engine in (named, given)]
        assert torch.equal(*errors)
        assert bool((errors[0] > 0).any())


class Louder:
    """κ = 1 + q + σ, which shows what it was given."""

    secret_batches = True

    def factors(self, rho: Tensor, q: float | None, sigma: float) -> tuple[Tensor, Tensor]:
        assert q is not None
        return torch.full_like(rho, 1 + q + sigma), torch.full_like(rho, 1 + q + sigma)


@pytest.mark.parametrize("way", ["auto", "hooks", "train_step"])
@pytest.mark.parametrize(
    "amplification", [Louder(), Theorem4Amplification(), "poisson"], ids=["own", "thm4", "poisson"]
)
def test_an_amplification_follows_a_noise_scheduler(way: str, amplification: Any) -> None:
    sigma, clip, q = 0.9, 0.5, 1 / 3
    options = {"noise_multiplier": sigma, "amplification": amplification, "criterion": nn.CrossEntropyLoss()}
    mode = "hooks" if way == "hooks" else "auto"
    run = make(network(), data(24), batch_size=8, max_grad_norm=clip, grad_sample_mode=mode, **options)
    scheduler = ExponentialNoise(run.optimizer, gamma=0.7)
    expected = torch.zeros(24, dtype=torch.float64)
    for batch in run.private:
        run.plain.load_state_dict(run.module.state_dict())
        begun = take(run, batch, way)
        arguments = (run.plain, F.cross_entropy, begun.x, begun.y)
        jacobian = reference.exact_jacobian(*arguments, max_grad_norm=clip)
        if amplification == "poisson":
            clipped = reference.clipped_gradients(*arguments, max_grad_norm=clip)
            fim = reference.poisson_fim(jacobian, clipped, sigma * clip, q)
        else:
            kappa = amplification.factors(torch.ones(1), q, sigma)[0].item()
            fim = kappa * jacobian.mT @ jacobian / (sigma * clip) ** 2
        expected[begun.ids] += torch.einsum("bii->b", fim).cpu()
        scheduler.step()
        sigma *= 0.7
    assert relative_error(run.engine.totals.get_trace().value, expected) < 1e-6
    assert DEVICE in str(run.engine.totals.get_trace().value.device)
