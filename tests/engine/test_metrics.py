"""Numbers for a log, and what print and a notebook show of engine, leakage and estimate."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.made import make
from torchfil import FILPrivacyEngine
from torchfil.fisher import Estimate
from torchfil.questions import Absent


def trained(**options: Any) -> FILPrivacyEngine:
    engine, *_, loader = make(criterion=nn.CrossEntropyLoss(), **options)
    for batch in loader:
        engine.train_step(*batch)
    return engine


def test_the_numbers_are_those_of_the_readings() -> None:
    engine = trained(questions={"<member>": Absent()})
    metrics, measured = engine.metrics(delta=1e-5), engine.was_measured()
    fil, bound = engine.get_fil().value[measured], engine.get_mse_bound().value[measured]
    expected = {
        "privacy/steps": 5.0,
        "privacy/measured_share": float(measured.double().mean()),
        "privacy/median_fil": float(fil.median()),
        "privacy/largest_fil": float(fil.max()),
        "privacy/smallest_mse_bound": float(bound.min()),
        "privacy/largest_divergence/<member>": float(engine.get_guess("<member>").divergence.value[measured].max()),
        "privacy/epsilon": engine.get_epsilon(1e-5),
    }
    assert metrics == pytest.approx(expected, rel=1e-6)
    assert all(type(value) is float for value in metrics.values())
    assert 0 < metrics["privacy/measured_share"] < 1
    assert metrics["privacy/smallest_mse_bound"] == pytest.approx(engine.get_smallest_mse_bound()[0])
    assert set(engine.metrics(prefix="")) == {name.removeprefix("privacy/") for name in expected} - {"epsilon"}
    assert f"median {metrics['privacy/median_fil']:.3g}, largest" in repr(engine)
    pages = engine._repr_html_(), engine.totals._repr_html_(), Estimate.exact(torch.ones(14))._repr_html_()
    assert "confidential" in pages[0]
    assert "&lt;member&gt;" in pages[1]
    assert "14 in all" in pages[2]
    assert not any("<member>" in page for page in pages)


@pytest.mark.filterwarnings("ignore")
def test_where_nothing_or_everything_is_known() -> None:
    """Before the first step; where all steps were paused, or some; without noise."""
    with pytest.raises(RuntimeError, match="make_private first"):
        FILPrivacyEngine().metrics()
    assert "call make_private" in repr(FILPrivacyEngine())
    engine, *_, loader = make(criterion=nn.CrossEntropyLoss(), noise_multiplier=1.5, max_grad_norm=0.5)
    assert engine.metrics() == {}
    assert "no step yet" in repr(engine)
    with engine.paused():
        for batch in loader:
            engine.train_step(*batch)
    assert engine.metrics() == {"privacy/steps": 5.0, "privacy/measured_share": 0.0}
    assert "MSE bound" not in repr(engine)
    for batch in loader:
        engine.train_step(*batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # reading for a text does not warn
        assert "lower bound" in repr(engine)
        assert "lower bound" in repr(engine.totals)
    metrics = trained(noise_multiplier=0.0).metrics()
    assert (metrics["privacy/median_fil"], metrics["privacy/smallest_mse_bound"]) == (torch.inf, 0)
