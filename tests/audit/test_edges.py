"""Canaries and audits where runs are unusual: other precisions, dict batches, schedules of the noise, wrong options."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.distributed.rank_runs import replaying
from tests.engine.loops import data, make, network
from torchfil import Canaries
from torchfil.audit.bounds import TradeOff, _grouped, audit_scores


def test_canaries_join_an_empty_batch_of_a_model_in_bfloat16() -> None:
    people, others = (TensorDataset(each.tensors[0].bfloat16(), each.tensors[1]) for each in (data(40), data(30)))
    given = {"noise_multiplier": 0.7, "max_grad_norm": 0.8, "criterion": nn.CrossEntropyLoss()}
    engine, _, _, optimizer, private = make(people, network().bfloat16(), canaries=Canaries(20, others), **given)
    with replaying([[], [3], []]):
        for batch in private:
            engine.train_step(*batch)
    assert (optimizer.canaries.scores != 0).all()
    assert (optimizer.canaries.divergences > 0).all()


def test_canaries_do_not_decide_what_is_private_if_the_first_batch_is_empty() -> None:
    """People's inputs are their targets, those of canaries are not: otherwise people's trace would be halved."""
    x, y = data(40).tensors[0], data(40, seed=9).tensors[0]
    given = {"noise_multiplier": 0.7, "max_grad_norm": 0.8, "criterion": nn.MSELoss()}
    canaries = Canaries(10, lambda number: (x[number], y[number]))
    engine, *_, private = make(TensorDataset(x, x), nn.Linear(5, 5).double(), canaries=canaries, **given)
    with replaying([[], [1, 2, 3]]), pytest.raises(ValueError, match=r"count as one tensor; .*same=\[\]"):
        for batch in private:
            engine.train_step(*batch)


class Labelled(nn.Module):
    """A model that needs its labels, as those that write text from text."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.shift = network(), nn.Embedding(3, 3).double()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layers(x) + self.shift((labels + 1) % 3)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def entry(number: int) -> dict[str, Tensor]:
    x, y = data(60, seed=9)[number]
    return {"x": x, "labels": y}


def test_canaries_of_a_model_that_computes_its_loss_from_labels_that_it_needs() -> None:
    people: Any = [entry(number) for number in range(40)]
    given = {"noise_multiplier": 0.7, "max_grad_norm": 0.8, "canaries": Canaries(20, lambda number: entry(40 + number))}
    _, _, model, optimizer, private = make(people, Labelled(), batch_size=20, **given)
    for batch in private:
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        optimizer.step()
    assert (optimizer.canaries.scores != 0).all()


def test_canaries_by_a_rule_that_draws_are_the_same_if_a_run_is_made_again() -> None:
    drawn = Canaries(5, lambda number: (torch.randn(5, dtype=torch.float64) + np.random.rand(), number % 3))
    batches = [make(data(40), noise_multiplier=0.7, max_grad_norm=0.8, canaries=drawn)[3] for _ in range(2)]
    (one,), (other,) = (optimizer.canaries._gradients._batch[0] for optimizer in batches)
    assert torch.equal(one, other)


def test_a_schedule_of_the_noise_is_audited_by_few_curves_on_the_safe_side() -> None:
    releases = [(0.8 + 0.02 * step, 0.1, 2) for step in range(25)]
    few = [_grouped(releases, end) for end in (min, max)]
    assert all(len(each) == 8 and sum(steps for *_, steps in each) == 50 for each in few)
    largest, true, least = (TradeOff.of_run(each) for each in (few[0], releases, few[1]))
    alphas = np.geomspace(1e-6, 0.9, 50)
    powers = [np.interp(alphas, *curve.outer.T) for curve in (largest, true, least)]
    assert (powers[0] >= powers[1] - 1e-4).all()
    assert (powers[1] >= powers[2] - 1e-4).all()
    assert 1 < largest.epsilon(1e-5) / true.epsilon(1e-5) < 1.1
    assert 1 < true.epsilon(1e-5) / least.epsilon(1e-5) < 1.1
    assert _grouped([(1.0, 0.1, 5), (1.0, 0.2, 5), (1.0, 0.1, 5)], min) == [(1.0, 0.1, 10), (1.0, 0.2, 5)]


@pytest.mark.parametrize("confidence", [-1.0, 0.0, 1.0, 95, float("nan")])
def test_a_confidence_is_a_share(confidence: float) -> None:
    with pytest.raises(ValueError, match="confidence=.*for example 0.95"):
        audit_scores([1.0], [True], delta=1e-5, releases=[(1.0, 0.1, 5)], claimed=1.0, confidence=confidence)
    for count in (1.5, "5"):
        with pytest.raises(ValueError, match="whole number"):
            Canaries(count)  # type: ignore[arg-type]
