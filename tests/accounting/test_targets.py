"""Targets of leakage: what is wanted, the ends that decide, and means over runs."""

from __future__ import annotations

import math

import pytest
import torch

from torchfil.fisher.results import Estimate
from torchfil.guessing import largest_true_positive_rate
from torchfil.planning.calibration import LeakageTarget, TargetCheck, mean_of_runs


def estimate(value: float, error: float = 0.3, run_error: float | None = None) -> Estimate:
    told = None if run_error is None else torch.tensor([run_error])
    return Estimate(torch.tensor([value]), torch.tensor([error]), "estimate", 4.0, positive=True, run_error=told)


def test_the_largest_divergence_is_where_the_rate_is_reached() -> None:
    for alpha, rate in ((0.01, 0.02), (0.05, 0.5), (0.2, 0.99)):
        target = LeakageTarget(true_positive_rate=rate, question="in", false_positive_rate=alpha)
        assert float(largest_true_positive_rate(target.largest_divergence, alpha)) == pytest.approx(rate)


def test_headroom_is_that_of_the_worse_end() -> None:
    target = LeakageTarget(2.0, 0.1, "in")
    check = TargetCheck(target, (5.0, 3.0), (0.01, 0.02), 10, 10)
    assert check.headroom == min(1.5, target.largest_divergence / 0.02)
    assert check.headroom_of_estimate == 2.5
    assert check.met
    nobody = TargetCheck(target, (math.inf, math.inf), (0.0, 0.0), 0, 10)
    assert nobody.headroom == math.inf
    assert "10 examples were never measured" in str(nobody)
    untold = TargetCheck(target, (5.0, 0.0), (0.01, math.inf), 10, 10)
    assert untold.headroom == 0
    assert "missed by a factor of inf" in str(untold)


def test_the_mean_of_runs_has_the_errors_of_independent_ones() -> None:
    mean = mean_of_runs([estimate(2.0, 0.3, 0.5), estimate(4.0, 0.4, 1.2)])
    assert mean.value.item() == 3
    assert mean.standard_error.item() == pytest.approx(0.25)
    assert mean.run_error is not None
    assert mean.run_error.item() == pytest.approx(0.65)
    assert mean.interval(0.9)[0].item() < 3 < mean.interval(0.9)[1].item()
    single = estimate(2.0)
    assert mean_of_runs([single]) is single


def test_a_run_that_does_not_tell_its_error_takes_that_of_the_others() -> None:
    mean = mean_of_runs([estimate(2.0, 0.3, math.inf), estimate(4.0, 0.4, 1.2)])
    assert mean.run_error is not None
    assert mean.run_error.item() == pytest.approx(1.2 * math.sqrt(2) / 2)
    mean = mean_of_runs([estimate(2.0, 0.3, math.inf), estimate(4.0, 0.4, math.inf)])
    assert mean.run_error is not None
    assert mean.run_error.item() == math.inf


def test_the_mean_of_runs_covers() -> None:
    """The 90 % interval of their mean holds the truth in about 90 % of draws or more."""
    generator = torch.Generator().manual_seed(0)
    count, truth, spread = 20_000, 3.0, 0.5
    runs = []
    for _ in range(2):
        value = truth + spread * torch.randn(count, generator=generator, dtype=torch.float64)
        errors = torch.zeros(count, dtype=torch.float64)
        runs.append(Estimate(value, errors, "estimate", positive=True, run_error=torch.full_like(value, spread)))
    low, high = mean_of_runs(runs).interval(0.9)
    assert float(((low <= truth) & (truth <= high)).double().mean()) == pytest.approx(0.9, abs=0.015)
