"""σ for a target of leakage: it is met, pilots leave no trace, and what cannot be met is refused with numbers."""

from __future__ import annotations

import copy
import math
import random
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from paper_data import small_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.cases import DEVICE
from tests.engine.loops import data, loader, network
from torchfil import Accounting, FILPrivacyEngine
from torchfil.planning.calibration import (
    LeakageTarget,
    NoiseChoice,
    NoiseSearch,
    TargetCheck,
    choose_noise,
)
from torchfil.questions import Absent

EPOCHS = 3


def start(n: int = 48, dataset: Any = None, module: nn.Module | None = None, **options: Any) -> dict[str, Any]:
    """What make_private_with_bound is given, for a short run that is judged by the error of its probes."""
    module = network() if module is None else module
    torch.manual_seed(5)
    return {
        "module": module,
        "optimizer": torch.optim.SGD(module.parameters(), lr=0.3, momentum=0.5),
        "data_loader": loader(data(n) if dataset is None else dataset, 16),
        "epochs": EPOCHS,
        "criterion": nn.CrossEntropyLoss(),
        "of": "probes",
        **options,
    }


def train(engine: FILPrivacyEngine, private: Any, epochs: int = EPOCHS) -> FILPrivacyEngine:
    for _ in range(epochs):
        for x, y in private:
            engine.train_step(x.to(DEVICE), y.to(DEVICE))
    return engine


@pytest.fixture(scope="module")
def trained() -> FILPrivacyEngine:
    engine = FILPrivacyEngine()
    _, optimizer, private = engine.make_private_with_bound(**start(target_mse_bound=2.0))
    assert optimizer.noise_multiplier == engine.pilot.noise_multiplier
    return train(engine, private)


def test_the_target_is_met_and_told(trained: FILPrivacyEngine) -> None:
    check = trained.check_bound()
    assert check.met
    assert check.headroom >= 1
    assert check.mse_bound == trained.get_smallest_mse_bound(0.95, "probes")
    assert str(check).startswith("met after 9 steps: every MSE bound at least 2")
    assert "unbiased attackers" in str(check)
    assert trained.bound_target == LeakageTarget(2.0, of="probes")


def test_pilots_show_how_far_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """A bar each, of all steps; none unless asked for."""
    engine = FILPrivacyEngine()
    engine.make_private_with_bound(**start(target_mse_bound=2.0), progress=True)
    shown = capsys.readouterr().err
    assert "pilot 1, σ = " in shown
    assert "9/9" in shown
    FILPrivacyEngine().make_private_with_bound(**start(target_mse_bound=2.0))
    assert "pilot" not in capsys.readouterr().err


def test_the_pilots_are_kept_and_told(trained: FILPrivacyEngine) -> None:
    choice = trained.pilot
    assert isinstance(choice, NoiseChoice)
    on_grid = 4 * np.log2(choice.noise_multiplier)
    assert on_grid == pytest.approx(round(on_grid), abs=1e-9)
    chosen = [pilot for pilot in choice.pilots if pilot.noise_multiplier == choice.noise_multiplier]
    assert len(chosen) == 1
    assert chosen[0].check.headroom >= 1.25
    assert all(
        pilot.check.headroom < 1.25 for pilot in choice.pilots if pilot.noise_multiplier < choice.noise_multiplier
    )
    text = str(choice)
    assert all(f"σ = {pilot.noise_multiplier:.4g}" in text for pilot in choice.pilots)
    assert "depends on the data" in text
    assert "nothing of the pilots is released" in text


@pytest.mark.parametrize("shuffled", [False, True])
def test_training_afterwards_is_bit_for_bit_that_of_make_private(shuffled: bool) -> None:
    results = []
    for make in ("make_private_with_bound", "make_private"):
        given = start(module=nn.Sequential(network(), nn.Dropout(0.2)))
        given["noise_generator"] = torch.Generator(DEVICE).manual_seed(7)
        if shuffled:
            given |= {"poisson_sampling": False, "data_loader": loader(data(48), 16, shuffle=True)}
        random.seed(1)
        np.random.seed(1)
        own = {name: given.pop(name) for name in ("epochs", "of")}
        if make == "make_private_with_bound":
            options: dict[str, Any] = {**own, "target_mse_bound": 2.0}
        else:
            options = {"noise_multiplier": results[0][0], "accounting": Accounting(epochs=EPOCHS)}
        engine = FILPrivacyEngine()
        model, optimizer, private = getattr(engine, make)(**given, **options)
        train(engine, private)
        drawn = [float(torch.rand(())), random.random(), float(np.random.rand())]
        drawn += [float(torch.rand((), generator=given["data_loader"].generator))]
        trace = engine.totals.get_trace().value
        results.append((optimizer.noise_multiplier, dict(model.state_dict()), trace, drawn, engine.get_epsilon(1e-3)))
    one, other = results
    assert one[0] == other[0]
    assert one[3:] == other[3:]
    assert torch.equal(one[2], other[2])
    assert all(torch.equal(value, other[1][name]) for name, value in one[1].items())


def test_a_refusal_leaves_everything_as_it_was() -> None:
    given = start(target_mse_bound=2.0, max_noise_multiplier=0.5)
    module, optimizer = given["module"], given["optimizer"]
    before = copy.deepcopy(module.state_dict()), torch.get_rng_state(), given["data_loader"].generator.get_state()
    engine = FILPrivacyEngine()
    with pytest.raises(ValueError, match="was not met within max_noise_multiplier=0.5.*of the target, but 1.25"):
        engine.make_private_with_bound(**given)
    assert all(torch.equal(value, before[0][name]) for name, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), before[1])
    assert torch.equal(given["data_loader"].generator.get_state(), before[2])
    assert not optimizer.state
    assert module.training
    with pytest.raises(RuntimeError, match="not made by make_private_with_bound"):
        _ = engine.pilot
    engine.make_private(module, optimizer, given["data_loader"])  # is free for another


def test_a_question_is_aimed_at() -> None:
    engine = FILPrivacyEngine()
    given = start(target_true_positive_rate=0.2, at_false_positive_rate=0.05, questions={"member": Absent()})
    *_, private = engine.make_private_with_bound(**given)
    train(engine, private)
    check = engine.check_bound()
    rates = engine.get_guess("member").upper(0.9).true_positive_rate(0.05)[engine.was_measured()]
    assert check.true_positive_rate is not None
    assert check.mse_bound is None
    assert check.met
    assert check.true_positive_rate[1] <= 0.2
    assert check.true_positive_rate[1] <= float(rates.max()) + 1e-9  # whose ends hold the run, too
    assert engine.bound_target.question == "member"
    assert "every attacker" in str(check)


def test_of_two_targets_the_harder_one_decides() -> None:
    engine = FILPrivacyEngine()
    targets = {"target_mse_bound": 0.01, "target_true_positive_rate": 0.2, "questions": {"in": Absent()}}
    *_, private = engine.make_private_with_bound(**start(**targets))
    check = train(engine, private).check_bound()
    assert check.mse_bound is not None
    assert check.divergence is not None
    assert check.headroom == min(
        check.mse_bound[1] / 0.01, engine.bound_target.largest_divergence / check.divergence[1]
    )
    assert check.mse_bound[1] > 0.1  # the rate decides
    assert ", and " in engine.bound_target.wanted


def test_a_loop_of_ones_own_trains_the_pilots() -> None:
    lengths = []

    def with_schedule(engine: FILPrivacyEngine, model: Any, optimizer: Any, private: Any) -> None:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer.original_optimizer, 1, gamma=0.5)
        for _ in range(EPOCHS):
            train(engine, private, 1)
            scheduler.step()
        lengths.append(scheduler.last_epoch)

    engine = FILPrivacyEngine()
    given = start(target_mse_bound=2.0, train=with_schedule)
    engine.make_private_with_bound(**given)
    assert lengths == [EPOCHS] * len(engine.pilot.pilots)
    assert given["optimizer"].param_groups[0]["lr"] == 0.3


@pytest.mark.parametrize("mode", ["hooks", pytest.param("ghost", marks=pytest.mark.slow)])
def test_other_modes(mode: str) -> None:
    engine = FILPrivacyEngine()
    made = engine.make_private_with_bound(**start(target_mse_bound=2.0, grad_sample_mode=mode))
    assert len(made) == (4 if mode == "ghost" else 3)
    assert made[1].noise_multiplier == engine.pilot.noise_multiplier


def test_a_run_that_misses_warns_once_and_goes_on() -> None:
    engine = FILPrivacyEngine()
    _, optimizer, private = engine.make_private_with_bound(**start(target_mse_bound=2.0))
    optimizer.noise_multiplier = 0.3
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        train(engine, private)
    missed = [str(each.message) for each in told if "already missed its target" in str(each.message)]
    assert len(missed) == 1
    assert "smallest bound" in missed[0]
    assert len(engine.accountant.history) == 1
    assert engine.accountant.history[0][2] == EPOCHS * len(private)
    check = engine.check_bound()
    assert not check.met
    assert "missed by a factor of" in str(check)


def test_a_part_of_a_run_can_be_checked() -> None:
    engine = FILPrivacyEngine()
    *_, private = engine.make_private_with_bound(**start(target_mse_bound=2.0))
    train(engine, private, 1)
    assert "after 3 steps" in str(engine.check_bound())


def test_a_target_can_be_checked_on_any_run() -> None:
    engine = FILPrivacyEngine()
    given = start()
    *_, private = engine.make_private(
        given["module"], given["optimizer"], given["data_loader"], criterion=given["criterion"]
    )
    train(engine, private)
    assert engine.check_bound(LeakageTarget(1e-6, of="probes")).met
    assert not engine.check_bound(LeakageTarget(1e6, of="probes")).met
    with pytest.raises(RuntimeError, match="not made by make_private_with_bound"):
        engine.check_bound()


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({}, ValueError, "no target is given"),
        ({"target_mse_bound": 0.0}, ValueError, "must be positive"),
        ({"target_mse_bound": 1.0, "confidence": 0.5}, ValueError, "strictly between 0.5 and 1"),
        ({"target_mse_bound": 1.0, "noise_multiplier": 1.0}, TypeError, "noise_multiplier"),
        ({"target_mse_bound": 1.0, "of": "run"}, ValueError, "fewer than 5 steps.*or pass of='probes'"),
        ({"target_mse_bound": 1.0, "margin": -0.1}, ValueError, "margin=-0.1"),
        ({"target_mse_bound": 1.0, "grid": 1.0}, ValueError, "grid=1.0"),
        ({"target_mse_bound": 1.0, "max_noise_multiplier": -1.0}, ValueError, "max_noise_multiplier=-1.0"),
        ({"target_mse_bound": 1.0, "accumulation_steps": 2}, RuntimeError, "train_step takes whole draws"),
        ({"target_mse_bound": 1.0, "epochs": 0}, ValueError, "epochs=0"),
        ({"target_true_positive_rate": 0.2}, ValueError, "question=None must be one of questions="),
        (
            {"target_true_positive_rate": 0.01, "questions": {"in": Absent()}},
            ValueError,
            "strictly between at_false_positive_rate=0.01",
        ),
        ({"target_mse_bound": 50.0, "max_noise_multiplier": 1.0}, ValueError, "not met within.*Allow more noise"),
        ({"target_mse_bound": 1.0, "criterion": None}, RuntimeError, "needs the loss before it is called"),
    ],
)
def test_what_is_refused(options: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        FILPrivacyEngine().make_private_with_bound(**start(**options))


def test_ends_far_from_the_estimates_are_told_apart() -> None:
    target = LeakageTarget(1.0)

    def choose(end: float) -> Any:
        pilots: Any = SimpleNamespace(epochs=20, run=lambda sigma, number: None)
        checked: Any = SimpleNamespace(
            wanted=target.wanted, check=lambda run: TargetCheck(target, (0.8, end), None, 5, 5)
        )
        return choose_noise(pilots, checked, NoiseSearch(max_noise_multiplier=2.0))

    with pytest.raises(ValueError, match="max_noise_multiplier=2.*runs differ a lot: lower the learning rate first"):
        choose(0.2)
    with pytest.raises(ValueError, match=r"Allow more noise \(σ of about 2.6 may do\)"):
        choose(0.75)
    with pytest.raises(ValueError, match="a pilot has no end that holds for all examples"):
        choose(0.0)


def test_an_engine_that_is_used_is_refused_before_any_pilot() -> None:
    engine = FILPrivacyEngine()
    given = start(target_mse_bound=2.0)
    module = network()
    engine.make_private(module, torch.optim.SGD(module.parameters(), lr=1.0), given["data_loader"])
    with pytest.raises(ValueError, match="already accounts for a run"):
        engine.make_private_with_bound(**given)


# ------------------------------------------------------------------ the search


@pytest.mark.parametrize("power", [1.0, 2.0, 5.0])
@pytest.mark.parametrize("needed", [0.11, 0.5, 0.97, 1.0, 3.3, 40.0])
def test_the_smallest_noise_of_the_grid_is_found(power: float, needed: float) -> None:
    search = NoiseSearch()
    sigma = search.smallest(lambda sigma: 1.25 * (sigma / needed) ** power)
    assert sigma is not None
    assert needed * (1 - 1e-9) <= sigma <= needed * search.grid * (1 + 1e-9)


def test_the_search_ends_at_its_limits() -> None:
    tried: list[float] = []
    assert NoiseSearch(max_noise_multiplier=4.0).smallest(lambda sigma: tried.append(sigma) or sigma / 10) is None  # type: ignore[func-returns-value]
    assert tried == [1.0, 4.0]
    sigma = NoiseSearch().smallest(lambda sigma: float("inf"))
    assert sigma == pytest.approx(0.1, rel=0.2)
    assert NoiseSearch().smallest(lambda sigma: 0.0) is None


def test_the_margin_covers_how_much_runs_differ() -> None:
    """Runs whose headroom spreads by 30 %, as on digits at worst, meet the target in more than four of five."""
    generator, met, excess = random.Random(0), 0, 0.0
    for _ in range(400):
        needed = math.exp(generator.uniform(-0.7, 1.7))

        def headroom(sigma: float, needed: float = needed) -> float:
            return (sigma / needed) ** 2 * math.exp(0.3 * generator.gauss(0, 1))

        sigma = NoiseSearch().smallest(headroom)
        assert sigma is not None
        met += headroom(sigma) >= 1
        excess += math.log(sigma / needed) / 400
    assert met >= 0.85 * 400
    assert math.exp(excess) < 1.35  # not bought by far too much noise


# ------------------------------------------------------------------ digits


def digits_run(seed: int, **targets: Any) -> FILPrivacyEngine:
    """Eighteen epochs of a small network on 90 digits: enough for an interval of each."""
    images, labels = small_digits()
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 10)).to(DEVICE)
    engine = FILPrivacyEngine()
    *_, private = engine.make_private_with_bound(
        module,
        torch.optim.SGD(module.parameters(), lr=0.5),
        DataLoader(TensorDataset(images[:90].flatten(1), labels[:90]), 30),
        epochs=18,
        criterion=nn.CrossEntropyLoss(),
        **targets,
    )
    return train(engine, private, 18)


@pytest.mark.long
def test_the_target_is_met_on_digits_in_four_of_five_seeds() -> None:
    checks = [digits_run(seed, target_mse_bound=1.0).check_bound() for seed in range(5)]
    assert sum(check.met for check in checks) >= 4, "\n".join(map(str, checks))
    assert all(check.target.of == "run" and check.target.confidence == 0.95 for check in checks)
    assert min(check.headroom for check in checks) < 4  # and not by far too much noise


@pytest.mark.long
def test_a_question_is_aimed_at_on_digits_in_four_of_five_seeds() -> None:
    asked = {"target_true_positive_rate": 0.2, "questions": {"member": Absent()}, "num_probes": 1}
    checks = [digits_run(seed, **asked).check_bound() for seed in range(5)]
    assert sum(check.met for check in checks) >= 4, "\n".join(map(str, checks))
