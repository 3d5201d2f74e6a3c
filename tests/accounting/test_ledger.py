"""The ledger: every example's own number of private coordinates."""

from __future__ import annotations

import pytest
import torch

from torchfil.accounting.ids import ExampleIds
from torchfil.accounting.leakage import Leakage
from torchfil.accounting.ledger import Contribution, Ledger


def ledger_of(*counts: torch.Tensor | int | None) -> Ledger:
    """Four examples, of which the first two take part, with these numbers of coordinates one after the other."""
    ledger = Ledger(4, 6)
    for count in counts:
        ledger.add(Contribution(torch.tensor([0, 1]), torch.ones(2), num_coordinates=count))
    return ledger


def test_an_example_has_as_many_coordinates_as_it_was_seen_with_at_most() -> None:
    ledger = ledger_of(torch.tensor([2, 4]), torch.tensor([3, 1]))
    assert ledger.sums["num_coordinates"].tolist() == [3, 4, 0, 0]
    assert ledger.own_coordinates.tolist() == [3, 4, 1, 1]
    assert ledger.num_coordinates == 4
    assert not ledger.same_coordinates
    assert ledger_of(5).sums["num_coordinates"].tolist() == [5, 5, 0, 0]
    assert ledger_of(None).num_coordinates == 6
    assert ledger_of(None).same_coordinates
    assert Ledger(4, 6).num_coordinates == 6


def test_sums_by_coordinate_fit_one_number_of_coordinates() -> None:
    Ledger(4, 6).check_coordinates(8)
    kept = Ledger(4, 6, track=("diagonal",))
    kept.check_coordinates(6)
    with pytest.raises(ValueError, match=r"this batch has 8 .* earlier ones 6, and diagonal is summed by coordinate"):
        kept.check_coordinates(8)
    kept.add(Contribution(torch.tensor([0]), torch.ones(1), num_coordinates=torch.tensor([4])))
    assert kept.num_coordinates == 6


def test_states_keep_the_numbers() -> None:
    ledger = ledger_of(torch.tensor([2, 4]))
    state = ledger.state_dict()
    assert Ledger.from_state_dict(state).sums["num_coordinates"].tolist() == [2, 4, 0, 0]


def test_runs_of_other_coordinates_are_not_averaged() -> None:
    ids = ExampleIds(4, None)
    texts = [Leakage(ledger_of(torch.tensor(counts)), ids) for counts in ([2, 4], [2, 5])]
    assert Leakage.average(texts).get_num_coordinates().tolist() == [2, 5, 1, 1]
    with pytest.raises(ValueError, match="must share data set, private coordinates"):
        Leakage.average([Leakage(ledger_of(5), ids), Leakage(ledger_of(6), ids)])
