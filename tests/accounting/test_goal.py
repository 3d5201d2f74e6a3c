"""Targets: checked when they are made, and turned into exposures and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchfil.guessing import divergence_of_rate, largest_true_positive_rate
from torchfil.planning.equalising import Exposure, Goal


def exposed(values: list[float] | Tensor) -> Exposure:
    value = torch.as_tensor(values, dtype=torch.float64)
    return Exposure(value, value, torch.ones(len(value), dtype=torch.bool))


@settings(deadline=None)
@given(st.floats(0.02, 0.99))
def test_divergence_of_a_rate(rate: float) -> None:
    found = float(largest_true_positive_rate(divergence_of_rate(rate, 0.01), 0.01))
    assert found == pytest.approx(rate, abs=1e-8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": 0.0}, "target=0.0 must be a positive, finite MSE bound"),
        ({"target": 0.005, "question": "member"}, "target=0.005 must lie between false_positive_rate=0.01 and 1"),
        ({"target": 1.0, "share": 0.1}, "target=1.0 and share=0.1 both say"),
        ({"share": 1.0}, "share=1.0 must lie strictly between 0 and 1"),
        ({"confidence": 0.3}, "confidence=0.3 must lie strictly between 0.5 and 1"),
        ({"group_ratio": 1.0}, "group_ratio=1.0 must be above 1"),
        ({"question": "member", "false_positive_rate": 0.0}, "false_positive_rate=0.0 must lie strictly"),
    ],
)
def test_goals_that_are_none(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Goal(**options)  # type: ignore[arg-type]


def test_a_share_becomes_a_target() -> None:
    goal = Goal(share=0.1).settled(exposed(torch.arange(1.0, 101.0)))
    assert goal.target == pytest.approx(1 / 90)  # ten examples are above 90
    assert Goal(has_groups=True).settled(exposed([1.0, 2.0])).target is None
    with pytest.raises(ValueError, match="only 1 of 20 examples leak anything"):
        Goal(share=0.2).settled(exposed([1.0] + [0.0] * 19))
