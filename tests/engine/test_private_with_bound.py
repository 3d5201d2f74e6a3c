"""σ for a target of leakage: it is met, pilots leave no trace, and what cannot be met is refused
with numbers.
"""

from __future__ import annotations

import itertools
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.cases import DEVICE
from tests.engine.loops import data, loader, network
from torchfil import Accounting, FILPrivacyEngine
from torchfil.planning.calibration import LeakageTarget, NoiseSearch
from torchfil.questions import Absent
from torchfil.report import load, write_report

EPOCHS = 3
MEMBER = {"questions": {"member": Absent()}}


def start(module: nn.Module | None = None, **options: Any) -> dict[str, Any]:
    """What make_private_with_bound is given, for a short run that is judged by the error of its
    probes.
    """
    module = network() if module is None else module
    torch.manual_seed(5)
    return {
        "module": module,
        "optimizer": torch.optim.SGD(module.parameters(), lr=0.3, momentum=0.5),
        "data_loader": loader(data(48), 16),
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


def made(**options: Any) -> Any:
    engine = FILPrivacyEngine()
    return engine, *engine.make_private_with_bound(**start(**{"target_mse_bound": 2.0, **options}))


def test_the_target_is_met_and_told(tmp_path: Path) -> None:
    # everybody is drawn three times; a short run by Poisson sampling may differ much from its pilot
    given = {"progress": True, "max_grad_norm": 0.01, "poisson_sampling": False}
    engine, _, optimizer, private = made(**given)
    check, choice = train(engine, private).check_bound(), engine.pilot
    assert check.met
    assert check.headroom >= 1
    assert check.mse_bound == engine.get_smallest_mse_bound(0.95, "probes")
    assert engine.bound_target == LeakageTarget(2.0, of="probes")
    assert not engine.check_bound(LeakageTarget(1e6, of="probes")).met

    sigma = choice.noise_multiplier
    assert optimizer.noise_multiplier == sigma
    assert 4 * np.log2(sigma) == pytest.approx(round(4 * np.log2(sigma)), abs=1e-9)  # on the grid
    headrooms = {pilot.noise_multiplier: pilot.check.headroom for pilot in choice.pilots}
    assert headrooms[sigma] >= 1.25
    assert all(headroom < 1.25 for other, headroom in headrooms.items() if other < sigma)

    run = load(engine.save_run(tmp_path / "run.parquet", delta=1e-5))
    assert run.about["noise_choice"] == {
        "target": "every MSE bound at least 2",
        "confidence": 0.95,
        "of": "probes",
        "num_pilots": len(choice.pilots),
        "pilot_noise_multipliers": [it.noise_multiplier for it in choice.pilots],
        "headroom": check.headroom,
        "measured": check.measured,
    }
    assert "This run met it" in write_report(run, tmp_path / "report").read_text()


@pytest.mark.parametrize("shuffled", [False, True])
def test_training_afterwards_is_bit_for_bit_that_of_make_private(shuffled: bool) -> None:
    results, weights, traces = list[Any](), list[list[Tensor]](), list[Tensor]()
    for make in ("make_private_with_bound", "make_private"):
        given = start(module=nn.Sequential(network(), nn.Dropout(0.2)))
        given["noise_generator"] = torch.Generator(DEVICE).manual_seed(7)
        if shuffled:
            given |= {"poisson_sampling": False, "data_loader": loader(data(48), 16, shuffle=True)}
        random.seed(1)
        np.random.seed(1)
        options: dict[str, Any] = {name: given.pop(name) for name in ("epochs", "of")} | {
            "target_mse_bound": 2.0
        }
        if make == "make_private":
            options = {"noise_multiplier": results[0][0], "accounting": Accounting(epochs=EPOCHS)}
        engine = FILPrivacyEngine()
        model, optimizer, private = getattr(engine, make)(**given, **options)
        train(engine, private)
        drawn = [float(torch.rand(())), random.random(), float(np.random.rand())]
        drawn += [float(torch.rand((), generator=given["data_loader"].generator))]
        results.append((optimizer.noise_multiplier, drawn, engine.get_epsilon(1e-3)))
        weights.append(list(model.parameters()))
        traces.append(engine.totals.get_trace().value)
    assert results[0] == results[1]
    assert all(map(torch.equal, *weights))
    # the target is watched, and sums that are read in between are rounded once more
    torch.testing.assert_close(*traces, rtol=1e-12, atol=0)


@pytest.mark.parametrize("targets", [{}, {"target_mse_bound": 0.01}])
def test_a_question_is_aimed_at_and_of_two_targets_the_harder_one_decides(
    targets: dict[str, float],
) -> None:
    rate = {"target_true_positive_rate": 0.2, "at_false_positive_rate": 0.05}
    engine, *_, private = made(**{"target_mse_bound": None, **targets}, **rate, **MEMBER)
    check = train(engine, private).check_bound()
    rates = engine.get_guess("member").upper(0.9).true_positive_rate(0.05)[engine.was_measured()]
    assert check.met
    # whose ends hold the run, too
    assert check.true_positive_rate[1] <= min(0.2, float(rates.max()) + 1e-9)
    assert engine.bound_target.question == "member"
    headroom = engine.bound_target.largest_divergence / check.divergence[1]
    if not targets:
        assert (check.mse_bound, check.headroom) == (None, headroom)
    else:
        assert check.headroom == min(check.mse_bound[1] / 0.01, headroom) == headroom


def test_a_loop_of_ones_own_trains_the_pilots() -> None:
    lengths = []

    def with_schedule(engine: FILPrivacyEngine, model: Any, optimizer: Any, private: Any) -> None:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer.original_optimizer, 1, gamma=0.5)
        for _ in range(EPOCHS):
            train(engine, private, 1)
            scheduler.step()
        lengths.append(scheduler.last_epoch)

    engine, _, optimizer, _ = made(train=with_schedule, grad_sample_mode="hooks")
    assert lengths == [EPOCHS] * len(engine.pilot.pilots)
    assert optimizer.param_groups[0]["lr"] == 0.3


def test_a_run_that_misses_warns_once_and_goes_on() -> None:
    engine, _, optimizer, private = made()
    optimizer.noise_multiplier = 0.3
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        train(engine, private)
    assert sum("already missed its target" in str(each.message) for each in told) == 1
    assert [count for *_, count in engine.accountant.history] == [EPOCHS * len(private)]
    assert not engine.check_bound().met


REFUSED: dict[str, dict[str, Any]] = {  # the noun that is told
    "no target": {"target_mse_bound": None},
    "positive": {"target_mse_bound": 0.0},
    "0.5 and 1": {"confidence": 0.5},
    "noise_multiplier": {"noise_multiplier": 1.0},
    "of='probes'": {"of": "run"},
    "max_noise_multiplier": {"max_noise_multiplier": -1.0},
    "whole draws": {"accumulation_steps": 2},
    "epochs": {"epochs": 0},
    "question": {"target_true_positive_rate": 0.2},
    "at_false_positive_rate": {"target_true_positive_rate": 0.01, **MEMBER},
    "loss": {"criterion": None},
}


@pytest.mark.parametrize("noun", REFUSED)
def test_what_is_refused(noun: str) -> None:
    with pytest.raises((ValueError, TypeError, RuntimeError), match=noun):
        made(**REFUSED[noun])


# ------------------------------------------------------------------ the search


def test_the_smallest_noise_of_the_grid_is_found() -> None:
    search = NoiseSearch()
    for needed, power in itertools.product([0.11, 0.5, 0.97, 1.0, 3.3, 40.0], [1.0, 2.0, 5.0]):
        sigma = search.smallest(
            lambda sigma, needed=needed, power=power: 1.25 * (sigma / needed) ** power
        )
        assert needed * (1 - 1e-9) <= sigma <= needed * search.grid * (1 + 1e-9)


def test_the_search_ends_at_its_limits() -> None:
    tried: list[float] = []
    assert (
        NoiseSearch(max_noise_multiplier=4.0).smallest(
            lambda sigma: tried.append(sigma) or sigma / 10
        )
        is None
    )
    assert tried == [1.0, 4.0]
    sigma = NoiseSearch().smallest(lambda sigma: float("inf"))
    assert sigma == pytest.approx(0.1, rel=0.2)
    assert NoiseSearch().smallest(lambda sigma: 0.0) is None


# ------------------------------------------------------------------ digits
