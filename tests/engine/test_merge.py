"""Averages over runs, and several runs saved as one: of repetitions only.

What releasing all of them would mean.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torchfil
from tests.engine.ways import examples, mlp, start, step
from torchfil import FILPrivacyEngine, Private
from torchfil.attacks import AttackResult
from torchfil.fisher import PoissonAmplification
from torchfil.gate.gate import notes
from torchfil.report import load, write_report

DELTA = 1e-5


def sampled(seed: int, steps: int = 2, count: int = 24, **options: Any) -> FILPrivacyEngine:
    """Two steps of Poisson sampling: some examples are never drawn."""
    torch.manual_seed(seed)
    options = {"poisson_sampling": True, "batch": 4, "seed": seed, "max_grad_norm": 0.01} | options
    engine, model, optimizer, loader = start(mlp(), examples(count), **options)
    while sum(taken for *_, taken in engine.accountant.history) < steps:
        step(engine, model, optimizer, *next(iter(loader)), "hooks")
    return engine


@pytest.fixture(scope="module")
def repeated() -> list[FILPrivacyEngine]:
    return [sampled(seed, estimator="exact", track=("diagonal",)) for seed in (1, 2, 3)]


def test_mean_run_to_run_error_and_who_was_never_drawn(repeated: list[FILPrivacyEngine]) -> None:
    traces = torch.stack([engine.totals.get_trace().value for engine in repeated])
    merged = FILPrivacyEngine.merge(repeated)
    trace, table = merged.get_trace(), merged.leakage()
    assert trace.kind == "estimate"
    assert bool(trace.degrees_of_freedom.isinf().all())  # everybody's spread is known of many
    mean, between = traces.mean(dim=0), traces.var(dim=0) / 3
    torch.testing.assert_close(trace.value, mean, rtol=1e-12, atol=0)

    # those of like exposure share the spread, relative to their means; runs of two steps alone say
    # nothing of themselves
    variance, order = torch.zeros(24).double(), mean.argsort()
    parts = order[mean[order] > 0].tensor_split(max(1, int((mean > 0).sum()) // 10))
    for part in parts:
        spread = between[part].sum() / mean[part].square().sum()
        variance[part] = 1.3 * spread * mean[part].square()
    positive = mean > 0
    torch.testing.assert_close(
        trace.standard_error[positive], variance[positive].sqrt(), rtol=1e-5, atol=0
    )
    drawn = np.stack([engine.leakage()["participations"] for engine in repeated]).sum(axis=0)
    assert 0 < (drawn == 0).sum() < 24
    assert (table["sampling_error"] == 0).all()  # fil_error includes it
    assert ((table["participations"] == 0) == (drawn == 0)).all()
    alone = FILPrivacyEngine.merge(repeated[:1])
    found, own = alone.get_fil().value, repeated[0].get_fil().value
    torch.testing.assert_close(found, own, rtol=0, atol=0, equal_nan=True)
    assert alone.get_fil().kind == "exact"
    assert (
        alone.leakage()["sampling_error"].tolist()
        == repeated[0].leakage()["sampling_error"].tolist()
    )


FIRST, OTHER = (
    Private(coordinates=torch.tensor([True, *rest])) for rest in ((False, True), (True, False))
)


@pytest.mark.parametrize(
    ("first", "second", "noun"),
    [
        ({}, {"noise_multiplier": 2.0}, "noise"),
        ({}, {"steps": 3}, "3 steps"),
        ({}, {"amplification": "none"}, "amplification by"),
        ({"private": FIRST}, {"private": OTHER}, r"\[True, True, False\]"),
        ({}, {"count": 25}, "data"),
        (
            {"private": Private(coordinates=[0, 1])},
            {"private": Private(coordinates=(0, 1))},
            None,
        ),
        ({"amplification": "poisson"}, {"amplification": PoissonAmplification()}, None),
    ],
)
def test_only_repetitions_are_averaged(first: Any, second: Any, noun: str | None) -> None:
    engines = [sampled(1, **first), sampled(2, **second)]
    if noun is None:
        assert FILPrivacyEngine.merge(engines).get_trace().value.max() > 0
        return
    with pytest.raises(ValueError, match=noun):
        FILPrivacyEngine.merge(engines)


def test_an_example_that_was_not_measured_has_no_bound_to_violate() -> None:
    close = {"measure": "mse", "trials": 9, "standard_error": np.full(24, 1e-12)}
    attack = AttackResult("the mean", "nothing", range(24), np.full(24, 1e-9), **close)
    engine = sampled(1, 30)
    drawn = engine.leakage()["participations"]
    for source in (engine, FILPrivacyEngine.merge([engine])):
        assert source.was_measured().tolist() == (drawn > 0).tolist()
        violated = torchfil.compare_with_bounds(source, attack).violated
        # fewer do not tell how far one run is off
        assert violated.tolist() == (drawn >= 5).tolist()
    assert 0 < violated.sum() < 24


def test_runs_that_are_saved_as_one(repeated: list[FILPrivacyEngine], tmp_path: Path) -> None:
    """ε of all is that of one training three times as long; η̄ of all is √3 times the mean's."""
    run = load(
        FILPrivacyEngine.save_merged(repeated, tmp_path / "run.parquet", delta=DELTA, title="three")
    )
    columns = FILPrivacyEngine.merge(repeated).arrays()
    for name in ("fil", "mse_bound", "mse_bound_low", "fil_error"):
        assert np.array_equal(run.columns[name], columns[name], equal_nan=True)
    assert run.attributes is not None
    assert (run.about["title"], run.about["merged"]["runs"]) == ("three", 3)
    assert "epsilon" not in run.columns  # what belongs to one run is left out
    assert (run.history, run.about["probe_seed"], run.about["exact"]) == ({}, None, False)

    longer = copy.deepcopy(repeated[0].accountant)
    for sigma, rate, steps in repeated[0].accountant.history:
        for _ in range(2 * steps):
            longer.step(noise_multiplier=sigma, sample_rate=rate)
    assert run.about["merged"]["epsilon_of_all"] == pytest.approx(longer.get_epsilon(DELTA))
    assert run.about["epsilon"] == pytest.approx(repeated[0].get_epsilon(DELTA))
    assert len(repeated[0].accountant.history) == 1, "the run's own accountant is left as it was"
    assert any("means over 3 runs" in note for note in notes(run))
    assert (
        "Several runs together" in write_report(run, tmp_path / "public", redacted=True).read_text()
    )
