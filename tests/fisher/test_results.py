"""An estimate stands for its value, and its parts keep what is known of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from torchfil.fisher import Estimate


def estimate(*shape: int) -> Estimate:
    source = torch.Generator().manual_seed(0)
    value, error = (
        torch.rand(shape, generator=source, dtype=torch.float64) + 0.5 for _ in range(2)
    )
    freedom = torch.arange(1.0, shape[0] + 1, dtype=torch.float64)
    more = {"certain": 0.3 * value, "variance_limit": 0.1 * value}
    return Estimate(value, error, "lower bound", freedom, positive=True, **more)


PARTS: list[Any] = [2, slice(1, 4), torch.arange(5) % 2 == 0, np.array([1, 0]), (slice(None), 1)]


@pytest.mark.parametrize("place", PARTS, ids=str)
@pytest.mark.parametrize("exponent", [None, 0.5, -1.0])
def test_a_part_has_the_interval_of_the_whole(place: Any, exponent: float | None) -> None:
    whole = estimate(5, 3) if exponent is None else estimate(5, 3).raised(exponent, 2.0)
    part = whole[place]
    assert part.kind == whole.kind
    pairs = zip(part.interval(0.9), whole.interval(0.9), strict=True)
    for got, want in (
        (part.value, whole.value),
        (part.standard_error, whole.standard_error),
        *pairs,
    ):
        torch.testing.assert_close(got, want[place], rtol=1e-12, atol=0)


def test_nothing_about_infinity_is_uncertain() -> None:
    value = torch.tensor([torch.inf, 1.0, 0.0], dtype=torch.float64)
    error = torch.tensor([0.0, 0.1, 0.0], dtype=torch.float64)
    whole = replace(estimate(3), value=value, standard_error=error, certain=value / 2)
    for found, at_infinity in ((whole, torch.inf), (whole.raised(-1.0, 2.0), 0.0)):
        low, high = found.interval(0.95)
        assert low[0] == high[0] == found.value[0] == at_infinity
        assert found.standard_error[0] == 0
        assert not bool(torch.cat([low, high, found.value, found.standard_error]).isnan().any())
        assert low[1] < found.value[1] < high[1]


def test_a_sum_near_0_is_off_by_a_few_errors_and_below_0_claims_nothing() -> None:
    value = torch.tensor([1e-9, 0.5, -0.1])
    whole = Estimate(value, value * 0, "estimate", positive=True, run_error=torch.ones(3))
    assert whole.interval(0.95)[1].tolist() == pytest.approx([19.31, 15.62, torch.inf], rel=1e-3)
