"""Targets, exposures and clip weights: checked when they are made, on the grid, never above 1 nor
below the floor.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.refused import all_refused
from torchfil.guessing import divergence_of_rate, largest_true_positive_rate
from torchfil.planning import equalising
from torchfil.planning.calibration import LeakageTarget, TargetCheck

positive = st.floats(1e-6, 1e6)


def exposed(values: Any) -> equalising.Exposure:
    value = torch.as_tensor(values, dtype=torch.float64)
    return equalising.Exposure(value, value, torch.ones(len(value), dtype=torch.bool))


@settings(deadline=None)
@given(st.lists(positive, min_size=1, max_size=20), positive, st.floats(1, 3))
def test_lowered_weights(values: list[float], most: float, margin: float) -> None:
    """What is foreseen meets the target with its margin, by less than a step of the grid more than
    needed.
    """
    exposure = exposed(values)
    weights = equalising.lowered_weights(
        torch.ones(len(values), dtype=torch.float64), exposure, most, margin
    )
    assert bool((weights <= 1).all())
    steps = 4 * weights.log2()
    assert bool(((steps - steps.round()).abs() < 1e-6).all()), "on the grid"
    foreseen = weights.square() * exposure.value * margin / most
    safe = exposure.value <= most / margin
    assert bool((weights[safe] == 1).all())
    assert bool((foreseen[~safe] <= 1 + 1e-5).all())
    assert bool((foreseen[~safe] > 2 ** (-2 / 4) - 1e-5).all())


def test_labels_that_fit_nobody() -> None:
    for given_labels, noun in (
        ({"x": 1}, "no label for 1 of 2"),
        (["a"], "1 labels"),
        ([1.0, math.nan], "NaN"),
    ):
        with pytest.raises(ValueError, match=noun):
            equalising.members_of(given_labels, ["x", "y"])


def test_goals_that_are_none() -> None:
    wrong: dict[str, dict[str, Any]] = {"target": {"target": 0.0}}
    wrong |= {
        "false_positive_rate": {"target": 0.005, "question": "member"},
        "both": {"target": 1.0, "share": 0.1},
    }
    wrong |= {"share": {"share": 1.0}, "confidence": {"confidence": 0.3}}
    all_refused(
        {
            noun: lambda options=options: equalising.Goal(**options)
            for noun, options in wrong.items()
        }
    )
    with pytest.raises(ValueError, match="only 1 of 20"):
        equalising.Goal(share=0.2).settled(exposed([1.0] + [0.0] * 19))


@settings(deadline=None, max_examples=20)
@given(st.floats(0.02, 0.99), st.sampled_from([0.01, 0.015]))
def test_the_largest_divergence_is_where_the_rate_is_reached(rate: float, alpha: float) -> None:
    target = LeakageTarget(true_positive_rate=rate, question="in", false_positive_rate=alpha)
    for divergence in (divergence_of_rate(rate, alpha), target.largest_divergence):
        assert float(largest_true_positive_rate(divergence, alpha)) == pytest.approx(rate, abs=1e-8)


def test_headroom_is_that_of_the_worse_end() -> None:
    target = LeakageTarget(2.0, 0.1, "in")
    check = TargetCheck(target, (5.0, 3.0), (0.01, 0.02), 10, 10)
    assert check.headroom == min(1.5, target.largest_divergence / 0.02)
    assert (check.headroom_of_estimate, check.met) == (2.5, True)
    nobody = TargetCheck(target, (math.inf, math.inf), (0.0, 0.0), 0, 10)
    assert (nobody.headroom, nobody.met) == (0, False)  # unknown is not safe
    assert "10 examples were never measured" in str(nobody)
    assert TargetCheck(target, (5.0, 0.0), (0.01, math.inf), 10, 10).headroom == 0
