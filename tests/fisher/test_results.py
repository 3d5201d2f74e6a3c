"""An estimate stands for its value, and its parts keep what is known of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from torchfil.fisher import Estimate


def estimate(shape: tuple[int, ...] = (5,)) -> Estimate:
    source = torch.Generator().manual_seed(0)
    value, error = (torch.rand(shape, generator=source, dtype=torch.float64) + 0.5 for _ in range(2))
    freedom = torch.arange(1.0, shape[0] + 1, dtype=torch.float64)
    return Estimate(
        value, error, "lower bound", freedom, positive=True, certain=0.3 * value, variance_limit=0.1 * value
    )


class TestAsArray:
    def test_numpy_and_torch_take_it_for_its_value(self) -> None:
        found = estimate()
        assert np.array_equal(np.asarray(found), found.value.numpy())
        assert np.asarray(found, dtype=np.float32).dtype == np.float32
        assert np.mean(found) == pytest.approx(found.value.mean().item())  # type: ignore[call-overload]
        assert np.array(found) is not found.value.numpy()
        for convert in (torch.as_tensor, torch.asarray, torch.tensor):
            got: Any = convert(found)  # type: ignore[operator]
            assert torch.equal(got, found.value)

    def test_a_gradient_is_left_behind(self) -> None:
        value = torch.ones(2, requires_grad=True)
        assert np.asarray(Estimate.exact(2 * value)).tolist() == [2, 2]

    def test_length_iteration_and_floats(self) -> None:
        found = estimate()
        assert len(found) == 5
        assert [float(part) for part in found] == found.value.tolist()
        assert sorted(found, key=float)[-1].value == found.value.max()
        with pytest.raises(TypeError, match=r"an estimate of 5 numbers is not a float; choose one, as in e"):
            float(found)


INDICES = [
    2,
    slice(1, 4),
    [3, 0],
    torch.tensor([4, 4]),
    torch.tensor([True, False, True, False, False]),
    np.array([False, True, True, False, True]),
    np.array([1, 0]),
    ...,
]


class TestIndexing:
    @pytest.mark.parametrize("index", INDICES, ids=str)
    @pytest.mark.parametrize("exponent", [None, 0.5, -1.0])
    @pytest.mark.parametrize("shape", [(5,), (5, 3)])
    def test_a_part_has_the_interval_of_the_whole(
        self, index: Any, exponent: float | None, shape: tuple[int, ...]
    ) -> None:
        whole = estimate(shape) if exponent is None else estimate(shape).raised(exponent, 2.0)
        part = whole[index]
        assert torch.equal(part.value, whole.value[index])
        assert torch.equal(part.standard_error, whole.standard_error[index])
        assert part.kind == whole.kind
        for got, want in zip(part.interval(0.9), whole.interval(0.9), strict=True):
            torch.testing.assert_close(got, want[index], rtol=1e-12, atol=0)

    @pytest.mark.parametrize("index", [(slice(None), 1), (2, slice(None)), (1, 2)], ids=str)
    def test_columns_of_an_estimate_by_coordinate(self, index: Any) -> None:
        whole = estimate((5, 3)).raised(0.5)
        for got, want in zip(whole[index].interval(), whole.interval(), strict=True):
            torch.testing.assert_close(got, want[index], rtol=1e-12, atol=0)

    def test_a_mask_of_entries(self) -> None:
        whole = estimate((5, 3))
        mask = whole.value > whole.value.median()
        torch.testing.assert_close(whole[mask].interval()[0], whole.interval()[0][mask], rtol=1e-12, atol=0)

    def test_plain_estimates_keep_their_one_number_of_freedom(self) -> None:
        plain = Estimate(torch.arange(3.0), torch.ones(3), "estimate", 4.0)
        assert plain[1:].degrees_of_freedom == 4.0
        assert plain[1:].certain is None


class TestText:
    @pytest.mark.parametrize(
        ("found", "text"),
        [
            (Estimate.exact(torch.tensor([1.5, 2.0])), "Estimate([1.5, 2], exact)"),
            (Estimate(torch.tensor(0.12345), torch.tensor(0.02), "estimate"), "Estimate(0.1235 ± 0.02, estimate)"),
            (
                Estimate(torch.zeros(2, 3), torch.ones(2, 3), "upper bound"),
                "Estimate([0 ± 1, 0 ± 1, 0 ± 1, 0 ± 1, …], upper bound, shape (2, 3))",
            ),
            (Estimate.exact(torch.zeros(0)), "Estimate([], exact)"),
        ],
    )
    def test_repr(self, found: Estimate, text: str) -> None:
        assert repr(found) == text


class TestInfinite:
    def test_nothing_about_infinity_is_uncertain(self) -> None:
        whole = estimate((3,))
        value = torch.tensor([torch.inf, 1.0, 0.0], dtype=torch.float64)
        whole = replace(whole, value=value, certain=torch.tensor([torch.inf, 0.5, 0.0], dtype=torch.float64))
        whole = replace(whole, standard_error=torch.tensor([0.0, 0.1, 0.0], dtype=torch.float64))
        root, inverse = whole.raised(0.5, 2.0), whole.raised(-1.0, 2.0)
        for found, at_infinity in ((whole, torch.inf), (root, torch.inf), (inverse, 0.0)):
            low, high = found.interval(0.95)
            assert low[0] == high[0] == found.value[0] == at_infinity
            assert found.standard_error[0] == 0
            assert not bool(torch.cat([low, high, found.value, found.standard_error]).isnan().any())
            assert low[1] < found.value[1] < high[1]
