"""Targets of leakage: what is wanted, and the ends that decide."""

from __future__ import annotations

import math

import pytest

from torchfil.guessing import largest_true_positive_rate
from torchfil.planning.calibration import LeakageTarget, TargetCheck


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
