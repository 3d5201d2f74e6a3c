"""Numbers for a log, and what print and a notebook show of engine, leakage and estimate."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torchfil import FILPrivacyEngine
from torchfil.fisher import Estimate
from torchfil.questions import Absent


def made(count: int = 40, **options: Any) -> tuple[FILPrivacyEngine, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    data = TensorDataset(torch.randn(count, 4, dtype=torch.float64), torch.randint(2, (count,)))
    engine = FILPrivacyEngine()
    _, _, loader = engine.make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        DataLoader(data, batch_size=10),
        criterion=nn.CrossEntropyLoss(),
        **options,
    )
    return engine, loader


def trained(**options: Any) -> FILPrivacyEngine:
    engine, loader = made(**options)
    for batch in loader:
        engine.train_step(*batch)
    return engine


def test_the_numbers_are_those_of_the_readings() -> None:
    engine = trained(questions={"member": Absent()})
    metrics = engine.metrics(delta=1e-5)
    measured = engine.was_measured()
    fil, bound = engine.get_fil().value[measured], engine.get_mse_bound().value[measured]
    expected = {
        "privacy/steps": 4.0,
        "privacy/measured_share": float(measured.double().mean()),
        "privacy/median_fil": float(fil.median()),
        "privacy/largest_fil": float(fil.max()),
        "privacy/smallest_mse_bound": float(bound.min()),
        "privacy/largest_divergence/member": float(engine.get_guess("member").divergence.value[measured].max()),
        "privacy/epsilon": engine.get_epsilon(1e-5),
    }
    assert metrics == pytest.approx(expected, rel=1e-6)
    assert list(metrics) == list(expected)
    assert all(type(value) is float for value in metrics.values())
    assert 0 < metrics["privacy/measured_share"] < 1
    assert metrics["privacy/smallest_mse_bound"] == pytest.approx(engine.get_smallest_mse_bound()[0])
    assert set(engine.metrics(prefix="")) == {name.removeprefix("privacy/") for name in expected} - {"epsilon"}


def test_before_the_first_step_there_is_nothing_to_log() -> None:
    engine, _ = made()
    assert engine.metrics() == {}
    with pytest.raises(RuntimeError, match="call make_private first"):
        FILPrivacyEngine().metrics()


@pytest.mark.filterwarnings("ignore:Fisher accounting is paused")
def test_what_nothing_is_known_about_is_left_out() -> None:
    """Nobody was measured: all steps were paused."""
    engine, loader = made()
    with warnings.catch_warnings(), engine.paused():
        warnings.simplefilter("ignore")
        for batch in loader:
            engine.train_step(*batch)
        metrics = engine.metrics()
        assert "MSE bound" not in repr(engine)
    assert metrics == {"privacy/steps": 4.0, "privacy/measured_share": 0.0}


def test_without_noise_everything_leaks() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        metrics = trained(noise_multiplier=0.0).metrics()
    assert metrics["privacy/median_fil"] == torch.inf
    assert metrics["privacy/smallest_mse_bound"] == 0


def test_delta_is_checked() -> None:
    with pytest.raises(ValueError, match="delta=2"):
        trained().metrics(delta=2)


def test_an_engine_says_where_it_stands() -> None:
    assert repr(FILPrivacyEngine()) == "FILPrivacyEngine\n  accountant: rdp\n  run: none yet: call make_private"
    engine, loader = made(noise_multiplier=1.5, max_grad_norm=0.5)
    assert "noise and clipping: σ = 1.5, C = 0.5\n  run: no step yet" in repr(engine)
    for batch in loader:
        engine.train_step(*batch)
    text = repr(engine)
    assert "steps: 4\n  examples measured: " in text
    assert f"median {engine.metrics()['privacy/median_fil']:.3g}, largest" in text
    assert "unbiased attackers; from one run, an estimate" in text
    page = engine._repr_html_()
    assert page.startswith("<table><caption>FILPrivacyEngine (confidential)</caption>")
    assert "<td>steps</td><td>4</td>" in page


def test_leakage_says_what_it_holds() -> None:
    engine = trained(questions={"<member>": Absent()})
    text = repr(engine.totals)
    assert text.startswith("Leakage: steps 4; examples measured ")
    assert "D of '<member>' largest" in text
    assert "every attacker" in text
    assert "&lt;member&gt;" in engine.totals._repr_html_()
    assert "<member>" not in engine.totals._repr_html_()


def test_reading_for_a_text_does_not_warn() -> None:
    engine, loader = made()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine.train_step(*next(iter(loader)))
        with engine.paused():
            for batch in loader:
                engine.train_step(*batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "lower bound" in repr(engine)
        assert "lower bound" in repr(engine.totals)
        engine._repr_html_()


def test_an_estimate_is_a_table_of_its_first_entries() -> None:
    value = torch.arange(1.0, 15.0)
    page = Estimate(value, 0.1 * value, "estimate")._repr_html_()
    assert "<caption>Estimate (estimate)</caption>" in page
    assert "<td>0</td><td>1</td><td>± 0.1</td>" in page
    assert page.count("<tr>") == 1 + 10 + 1
    assert "14 in all" in page
    assert Estimate.exact(value[:2])._repr_html_().count("<tr>") == 3
    assert "shape (7, 2)" in Estimate.exact(value.reshape(7, 2))._repr_html_()
    assert "Estimate(1, exact)" in Estimate.exact(value[0])._repr_html_()
