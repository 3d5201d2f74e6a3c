"""What a run keeps per example: registered, measured, summed, read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cases import build
from tests.fisher.recorded_cases import Model
from torchfil.accounting import quantities
from torchfil.accounting.ids import ExampleIds
from torchfil.accounting.leakage import Leakage
from torchfil.accounting.ledger import Contribution, Ledger
from torchfil.accounting.sums import Column
from torchfil.fisher import ExampleGradients, Mechanism
from torchfil.fisher.batch import Measurement, PrivateBatch

ALL = ("diagonal", "fim", "plis")


class Largest(quantities.TrackedQuantity):
    """The largest entry of the diagonal, summed over steps."""

    name = "largest"
    needs = quantities.Needs(("diagonal",))

    def measure(self, measurement: Measurement) -> Column:
        return {"value": measurement.estimates["diagonal"].value.max(dim=1).values}

    def read(self, sums: Mapping[str, Tensor], reading: Any) -> Tensor:
        return sums[self.name]


def batch(sigma: float = 0.9) -> PrivateBatch:
    case = build("mlp", 4)
    gradients = ExampleGradients.build(*case.arguments)
    return PrivateBatch(gradients, Mechanism.build(1.0, sigma, allow_zero_noise=True))


def measured(found: PrivateBatch, track: tuple[str, ...]) -> Measurement:
    needs = quantities.needs_of(track)
    return found.measure(needs.quantities, "exact", susceptibility=needs.susceptibility)


def booked(found: PrivateBatch, track: tuple[str, ...], rate: float = 1.0) -> Leakage:
    """Four examples, of which the first and the third take part in one step."""
    measurement, device = measured(found, track), found.gradients.device
    sigma, sizes = found.mechanism.noise_std, (4, found.gradients.num_coordinates)
    rows = torch.tensor([0, 2], device=device)
    ledger = Ledger(*sizes, track=track, device=device, draw_rate=0.1)
    columns = {
        name: {part: value[rows] for part, value in column.items()}
        for name, column in quantities.columns_of(measurement, track).items()
    }
    added = Contribution(rows, torch.ones(2, device=device), columns=columns, rate=rate)
    ledger.add(added, noise_multiplier=sigma)
    conditions = quantities.Conditions(exact=rate == 1, skipping=rate < 1)
    return Leakage(ledger, ExampleIds(4), conditions)


def test_a_step_that_may_be_skipped_counts_by_its_rate() -> None:
    """Fisher information with its readings, products and divergences, measured in half of all
    steps.
    """
    measurement = measured(batch(), ALL)
    leakage, rows, d = booked(batch(), ALL, rate=0.5), [0, 2], batch().gradients.num_coordinates
    trace = 2 * measurement.estimates["trace"].value[rows].double()
    torch.testing.assert_close(leakage.get_trace(rows).value, trace)
    torch.testing.assert_close(leakage.get_fil(rows).value, (trace / d).sqrt())
    torch.testing.assert_close(leakage.get_mse_bound(rows).value, d / trace)
    torch.testing.assert_close(
        leakage.get_plis(rows), 2 * measurement.susceptibility[rows].double()
    )
    asked = Ledger(2, 1, questions={"age": quantities.QuestionSpec(("old", "young"))})
    columns = {"question age": {"value": torch.ones(2, 2)}}
    asked.add(Contribution(torch.arange(2), torch.ones(2), columns=columns, rate=0.5))
    assert asked.sums["question age"].tolist() == [[2.0, 2.0]] * 2
    # of 2 or 0, each every other time
    assert asked.sums["question age_variance"].tolist() == [[1.0, 1.0]] * 2


class TestRegistry:
    def test_the_trace_is_always_kept_and_stands_first(self) -> None:
        assert [quantity.name for quantity in quantities.tracked(("plis", "diagonal"))] == [
            "trace",
            "diagonal",
            "plis",
        ]
        assert Ledger(3, 2, track=("trace",)).track == ()
        assert quantities.needs_of(ALL) == quantities.Needs(
            ("trace", "diagonal", "matrix"), susceptibility=True
        )
        with pytest.raises(ValueError, match="colour"):
            Ledger(3, 2, track=("colour",))
        with pytest.raises(ValueError, match="plis"):
            booked(batch(), ("diagonal",)).get_plis()

    def test_one_class_and_one_call_add_a_quantity(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(quantities, "_REGISTRY", dict(quantities._REGISTRY))
        quantities.register_quantity(Largest())
        leakage = booked(batch(), ("largest",), rate=0.5)
        truth = (
            measured(batch(), ("diagonal",)).estimates["diagonal"].value.double().max(dim=1).values
        )
        torch.testing.assert_close(leakage.get("largest", [2, 0]), 2 * truth[[2, 0]])
        copy = Ledger.from_state_dict(leakage.ledger.state_dict(), leakage.ledger.device)
        assert torch.equal(copy.sums["largest"], leakage.ledger.sums["largest"])
        assert Ledger.bytes_needed(10, 3, ("largest",)) == Ledger.bytes_needed(10, 3) + 10 * 8
        clash = Largest()
        clash.name = "trace_near"
        for other, noun in ((Largest(), "overwrite=True"), (clash, "others already use")):
            with pytest.raises(ValueError, match=noun):
                quantities.register_quantity(other)


class TestWithoutNoise:
    """A step without noise shows the gradients: FIL is infinite, the MSE bound 0, for certain."""

    @pytest.mark.parametrize("rate", [1.0, 0.5])
    def test_every_reading_is_infinite(self, rate: float) -> None:
        leakage = booked(batch(sigma=0.0), ALL, rate)
        took_part = torch.tensor([True, False, True, False], device=leakage.ledger.device)
        infinite = torch.where(took_part, torch.inf, 0.0).double()
        fil = leakage.get_fil()
        for estimate in (leakage.get_trace(), fil, leakage.get_fil(kind="spectral")):
            assert torch.equal(estimate.value.isinf(), took_part)
            assert not estimate.standard_error[took_part].any()
            low, high = estimate.interval(0.95, "probes")
            assert torch.equal(low, infinite)
            assert bool(high[took_part].isinf().all())
        bound = leakage.get_mse_bound()
        low, high = bound.interval(0.95)  # one run says nothing of who was not drawn
        assert torch.equal(low, torch.zeros_like(low))
        assert torch.equal(high, torch.where(took_part, 0.0, torch.inf).double())
        attributes = leakage.get_attribute_fil()
        for estimate in (fil, bound, attributes):
            for value in (estimate.value, estimate.standard_error):
                unknown = value.reshape(4, -1)[:, 0].isnan()
                assert torch.equal(unknown, ~took_part)
        assert not bool(bound.value[took_part].any())
        assert bool(attributes.value[took_part].isinf().all())
        columns = leakage.columns()[1]
        del columns["fil_kind"]
        for name, column in columns.items():
            unknown = ~took_part.cpu() & (name in ("fil", "fil_error", "mse_bound", "rel_error"))
            assert torch.equal(torch.tensor(column, dtype=torch.float64).isnan(), unknown), name

    def test_an_example_whose_gradient_does_not_depend_on_it_leaks_nothing(self) -> None:
        x, y = torch.randn(3, 2, dtype=torch.float64), torch.zeros(3, 1, dtype=torch.float64)
        blind = Model(lambda m, x: m.layer(0 * x), layer=torch.nn.Linear(2, 1)).double()
        gradients = ExampleGradients.build(blind, torch.nn.MSELoss(), x, y)
        trace = replace(batch(sigma=0.0), gradients=gradients).estimate("trace", "exact")
        assert torch.equal(trace.value, torch.zeros(3, dtype=torch.float64))


def test_an_answer_that_made_a_difference_once_is_not_forgotten() -> None:
    """However often its KL_t is 0 afterwards; the true answer's always was."""
    asked = {"age": quantities.QuestionSpec(("old", "young"))}
    ledger, rows = Ledger(3, 1, questions=asked), torch.arange(3)
    for step in range(150):
        value = torch.tensor([[step < 2, 0], [1, 0], [1, step == 0]]).double()
        column = {"trace": {"value": value[:, 0]}, "question age": {"value": value}}
        ledger.add(Contribution(rows, torch.ones(3), column))
    known = {"question age": {"value": torch.tensor([[torch.inf, 0.0]])}}  # without noise
    ledger.add(Contribution(rows[1:2], torch.ones(1), known), noise_multiplier=0.0)
    found = Leakage(ledger, ExampleIds(3)).get_guess("age").divergence.value
    assert found.tolist() == [[2.0, 0.0], [torch.inf, 0.0], [150.0, 1.0]]
