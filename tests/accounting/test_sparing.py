"""Clip weights from exposures: never above 1 nor below the floor, on the grid, and 1 for whoever meets the target."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchfil.planning.equalising import (
    Exposure,
    Goal,
    RoundWeights,
    group_factors,
    group_levels,
    lowered_weights,
    members_of,
    rounded_down,
    smallest_in_cell,
)

positive = st.floats(1e-6, 1e6)


def exposed(values: list[float] | Tensor, power: float = 0.5) -> Exposure:
    value = torch.as_tensor(values, dtype=torch.float64)
    return Exposure(value, value, torch.ones(len(value), dtype=torch.bool), power=power)


def is_on_grid(weights: Tensor) -> bool:
    steps = 4 * weights.double().log2()
    return bool(((steps - steps.round()).abs() < 1e-6).all())


@settings(deadline=None)
@given(st.lists(positive, min_size=1, max_size=20), positive, st.floats(1, 3))
def test_lowered_weights(values: list[float], most: float, margin: float) -> None:
    """What is foreseen meets the target with its margin, by less than a step of the grid more than needed."""
    exposure = exposed(values)
    weights = lowered_weights(torch.ones(len(values), dtype=torch.float64), exposure, most, margin)
    assert bool((weights <= 1).all())
    assert is_on_grid(weights)
    foreseen = weights.square() * exposure.value * margin / most
    safe = exposure.value <= most / margin
    assert bool((weights[safe] == 1).all())
    assert bool((foreseen[~safe] <= 1 + 1e-5).all())
    assert bool((foreseen[~safe] > 2 ** (-2 / 4) - 1e-5).all())


def test_weights_never_rise() -> None:
    before = torch.tensor([0.5, 0.25], dtype=torch.float64)
    torch.testing.assert_close(lowered_weights(before, exposed([0.01, 4.0]), 1.0), before * torch.tensor([1.0, 0.5]))


def test_an_unmeasured_example_keeps_its_weight() -> None:
    value = torch.tensor([9.0, 9.0])
    exposure = Exposure(value, value, torch.tensor([True, False]))
    assert lowered_weights(torch.ones(2), exposure, 1.0)[1] == 1


@settings(deadline=None)
@given(st.lists(st.floats(1e-3, 1), min_size=1, max_size=20))
def test_rounding_down(values: list[float]) -> None:
    weights = torch.tensor(values, dtype=torch.float64)
    rounded = rounded_down(weights)
    assert is_on_grid(rounded)
    assert bool((rounded <= weights * (1 + 1e-6)).all())
    assert bool((rounded * 2 ** (1 / 4) > weights * 0.9999).all())
    torch.testing.assert_close(rounded_down(rounded), rounded)  # what lies on the grid stays


def test_a_cell_gets_the_smallest_weight_of_its_members() -> None:
    weights, cells = torch.rand(50, dtype=torch.float64), torch.arange(50) % 7
    by_hand = torch.stack([weights[cells == cell].min() for cell in cells])
    torch.testing.assert_close(smallest_in_cell(weights, cells), by_hand)


@pytest.mark.parametrize("power", [0.5, 1.0])
def test_groups_become_equal(power: float) -> None:
    """If exposure responds as ω², three steps bring the means within the ratio, each nearer."""
    torch.manual_seed(0)
    groups = torch.arange(300) % 3
    unit = torch.rand(300, dtype=torch.float64) * torch.tensor([1.0, 4.0, 9.0])[groups]
    following = RoundWeights.starting(None, range(300), ["a", "b", "c"] * 100, None)
    goal, ratios = Goal(has_groups=True), []
    for _ in range(3):
        following = following.after(exposed(unit * following.values.square(), power), goal)
        ratios.append(following.ratio(exposed(unit * following.values.square(), power)) or 0.0)
    assert ratios == sorted(ratios, reverse=True)
    assert 1 <= ratios[-1] <= goal.group_ratio
    assert following.factors is not None
    assert following.factors.max() == 1
    assert following.factors[0] == 1


def test_group_factors_may_rise_again() -> None:
    """A group that got too little of a weight is brought back; the least exposed has 1."""
    factors = group_factors(torch.tensor([1.0, 0.25]), torch.tensor([1.0, 0.5]), power=0.5, ratio=1.0 + 1e-9)
    torch.testing.assert_close(factors, torch.tensor([1.0, 0.25 * 2**0.8]), rtol=0.02, atol=0)


def test_a_group_of_which_nobody_was_measured_changes_nothing() -> None:
    value = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
    exposure = Exposure(value, value, torch.tensor([True, True, False]))
    levels = group_levels(exposure, None, torch.tensor([0, 1, 2]))
    assert math.isnan(levels[2])
    assert group_factors(torch.ones(3), levels, power=0.5, ratio=1.05)[2] == 1


def test_members() -> None:
    numbers, labels = members_of({"x": "m", "y": "f", "z": "m"}, ["x", "y", "z"], "groups")
    assert numbers.tolist() == [0, 1, 0]
    assert labels == ("m", "f")
    assert members_of(torch.tensor([3, 5, 3]), range(3), "groups")[1] == (3, 5)
    with pytest.raises(ValueError, match="groups has no label for 1 of 2 ids, .'y'. among them"):
        members_of({"x": 1}, ["x", "y"], "groups")
    with pytest.raises(ValueError, match="by has 1 labels for 2 examples"):
        members_of(["a"], ["x", "y"], "by")
    with pytest.raises(ValueError, match="by has NaN as a label"):
        members_of([1.0, math.nan], ["x", "y"], "by")


def test_groups_must_be_made_of_whole_cells() -> None:
    with pytest.raises(ValueError, match="groups cut through the cells of by="):
        RoundWeights.starting(None, range(4), [0, 1, 0, 1], [0, 0, 1, 1])
    nested = RoundWeights.starting(None, range(4), [0, 0, 1, 1], [0, 1, 2, 2])
    assert nested.groups is not None
