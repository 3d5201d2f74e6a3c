"""Averages over runs: of repetitions only; who was never drawn, who was not measured."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

import torchfil
from tests.engine.ways import examples, mlp, start, step
from torchfil import FILPrivacyEngine, Private
from torchfil.attacks import AttackResult
from torchfil.fisher import PoissonAmplification


def sampled(seed: int, steps: int = 2, count: int = 24, **options: Any) -> FILPrivacyEngine:
    """Two steps of Poisson sampling: some examples are never drawn."""
    torch.manual_seed(seed)
    options = {"poisson_sampling": True, "batch": 4, "seed": seed} | options
    engine, model, optimizer, loader = start(mlp(), examples(count), **options)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    for _, (x, y) in zip(range(steps), batches, strict=False):
        step(engine, model, optimizer, x, y, "hooks")
    return engine


def test_mean_run_to_run_error_and_who_was_never_drawn() -> None:
    engines = [sampled(seed, estimator="exact") for seed in (1, 2, 3)]
    traces = torch.stack([engine.totals.get_trace().value for engine in engines])
    merged = FILPrivacyEngine.merge(engines)
    trace, table = merged.get_trace(), merged.leakage()
    assert (trace.degrees_of_freedom, trace.kind) == (2, "estimate")
    assert torch.allclose(trace.value, traces.mean(dim=0))
    assert torch.allclose(trace.standard_error, traces.std(dim=0) / math.sqrt(3))
    drawn = np.stack([engine.leakage()["participations"] for engine in engines]).sum(axis=0)
    assert 0 < (drawn == 0).sum() < 24
    assert (np.isinf(table["sampling_error"]) == (drawn == 0)).all()
    assert ((table["participations"] == 0) == (drawn == 0)).all()
    alone = FILPrivacyEngine.merge(engines[:1])
    assert torch.equal(alone.get_fil().value, engines[0].get_fil().value)
    assert alone.get_fil().kind == "exact"
    assert alone.leakage()["sampling_error"].tolist() == engines[0].leakage()["sampling_error"].tolist()


FIRST, OTHER = (Private(coordinates=torch.tensor([True, *rest])) for rest in ((False, True), (True, False)))


@pytest.mark.parametrize(
    ("first", "second", "noun"),
    [
        ({}, {"noise_multiplier": 2.0}, "noise"),
        ({}, {"steps": 3}, "3 steps"),
        ({}, {"amplification": "none"}, "amplification by"),
        ({"private": FIRST}, {"private": OTHER}, r"\[True, True, False\]"),
        ({"private": Private(coordinates=[0])}, {"private": Private(coordinates=[1])}, "Private"),
        ({}, {"count": 25}, "data"),
    ],
)
def test_runs_that_differ_are_not_averaged(first: Any, second: Any, noun: str) -> None:
    with pytest.raises(ValueError, match=noun):
        FILPrivacyEngine.merge([sampled(1, **first), sampled(2, **second)])
    engine = sampled(1, **second)
    FILPrivacyEngine.merge([engine, sampled(2, **second)])
    for wrong, noun in (([engine, engine], "twice"), ([], "at least one")):
        with pytest.raises(ValueError, match=noun):
            FILPrivacyEngine.merge(wrong)


def test_repetitions_that_are_spelled_differently_are_averaged() -> None:
    for first, second in (
        ({"noise_multiplier": 1}, {"noise_multiplier": 1.0}),
        ({"private": Private(coordinates=[0, 1])}, {"private": Private(coordinates=(0, 1))}),
        ({"amplification": "poisson"}, {"amplification": PoissonAmplification()}),
    ):
        assert FILPrivacyEngine.merge([sampled(1, **first), sampled(2, **second)]).get_fil().value.max() > 0


def test_an_example_that_was_not_measured_has_no_bound_to_violate() -> None:
    close = {"measure": "mse", "trials": 9, "standard_error": np.full(24, 1e-12)}
    attack = AttackResult("the mean", "nothing", range(24), np.full(24, 1e-9), **close)
    for steps in (2, 30):
        engine = sampled(1, steps)
        drawn = engine.leakage()["participations"]
        for source in (engine, FILPrivacyEngine.merge([engine])):
            assert source.was_measured().tolist() == (drawn > 0).tolist()
            violated = torchfil.compare_with_bounds(source, attack).violated
            assert violated.tolist() == (drawn >= 5).tolist()  # fewer do not tell how far one run is off
    assert 0 < violated.sum() < 24
