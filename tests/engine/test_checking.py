"""torchfil.check: what runs by which rule, what is not smooth, what falls back, what is refused, before training."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import torchfil
from torchfil import FILPrivacyEngine, Private
from torchfil.engine import ModelCheck

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 0, 1, 2])


def mlp(activation: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), activation or nn.Tanh(), nn.Linear(8, 3))


class Mixing(nn.Module):
    """Subtracts the batch's mean."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x - x.mean(dim=0))


class Mixture(nn.Module):
    """A layer without a rule, a bare parameter, dropout, a call that is not smooth."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.Bilinear(4, 4, 3)
        self.scale = nn.Parameter(torch.ones(3))
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.pair(x, x)).relu() * self.scale


class WithLoss(nn.Module):
    """Gives its loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.embedding(input_ids).mean(dim=1))
        loss = {} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels)}
        return {**loss, "logits": logits}


def test_a_network_that_runs() -> None:
    found = torchfil.check(mlp(), (X, Y), nn.CrossEntropyLoss())
    assert isinstance(found, ModelCheck)
    assert (found.verdict, found.runs, found.reason, found.advice, found.not_smooth) == ("recorded", True, None, (), ())
    assert (found.batch_size, found.num_coordinates) == (6, 4)
    assert found.loss == "CrossEntropyLoss(), as given"
    assert found.private == "input 0, 4"
    [row] = found.rows
    assert (row["name"], row["kind"], row["count"], row["parameters"]) == ("*", "Linear", 2, 5 * 8 + 9 * 3)
    assert row["rule"] == "linear, closed form"
    assert not row["falls_back"]
    plain, step = found.costs
    assert (plain.name, plain.relative) == ("plain forward and backward", 1.0)
    assert step.relative == pytest.approx(step.milliseconds / plain.milliseconds)


def test_the_model_is_left_as_it_is() -> None:
    model = Mixture()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    torchfil.check(model, (X, Y), nn.CrossEntropyLoss())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(value.grad is None for value in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    FILPrivacyEngine().make_private(model, optimizer, DataLoader(TensorDataset(X, Y), batch_size=3))


def test_what_is_not_smooth_is_told() -> None:
    found = torchfil.check(mlp(nn.ReLU()), (X, Y), nn.CrossEntropyLoss())
    assert found.runs
    assert [line.split(":")[0] for line in found.not_smooth] == ["1 (ReLU)"]
    assert any("SmoothnessValidator.fix" in line for line in found.advice)
    called = torchfil.check(Mixture(), (X, Y), nn.CrossEntropyLoss())
    assert any("calls relu" in line for line in called.not_smooth)


def test_layers_without_a_rule_are_told_with_what_to_do() -> None:
    found = torchfil.check(Mixture(), (X, Y), nn.CrossEntropyLoss())
    rows = {row["name"]: row for row in found.rows}
    assert found.verdict == "recorded"
    assert rows["pair"]["falls_back"]
    assert "example by example" in rows["pair"]["rule"]
    assert rows["scale"]["kind"] == "Parameter"
    assert not rows["scale"]["falls_back"]
    assert any(line.startswith("no layer rule for pair (Bilinear)") for line in found.advice)


def test_models_that_mix_examples_are_refused() -> None:
    found = torchfil.check(Mixing(), (X, Y), nn.CrossEntropyLoss())
    assert (found.verdict, found.runs) == ("refused", False)
    assert found.reason is not None
    assert "the model mixes examples" in found.reason
    assert "step" not in found.reason
    normed = torchfil.check(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), (X, Y))
    assert not normed.runs
    assert normed.reason is not None
    assert "GroupNorm" in normed.reason
    assert "is refused" in str(normed)


def test_what_is_mapped_over_examples_is_told_with_its_cost() -> None:
    class Sorted(nn.Module):
        """Puts its examples into another order on the way, which a recorded pass cannot follow."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            order = x[:, 0].argsort()
            return self.second(torch.tanh(self.first(x[order])))[order.argsort()]

    found = torchfil.check(Sorted(), (X, Y), nn.CrossEntropyLoss())
    assert found.verdict == "mapped"
    assert found.reason is not None
    assert {row["name"] for row in found.rows} == {"first", "second"}
    assert all(row["falls_back"] for row in found.rows)
    assert found.costs[1].name.startswith("mapped pass")
    assert any("the recorded pass would be faster" in line for line in found.advice)


def test_the_loss_is_the_models_own_or_the_likeliest() -> None:
    ids = torch.randint(9, (6, 5), generator=torch.Generator().manual_seed(0))
    found = torchfil.check(WithLoss(), {"input_ids": ids, "labels": Y})
    assert found.loss == "CrossEntropyLoss(reduction='mean'), identified from the model's own"
    assert found.private == "the output of 'embedding', 5×5"
    assert found.num_coordinates == 25
    assumed = torchfil.check(mlp(), (X, Y))
    assert assumed.loss == "CrossEntropyLoss(reduction='mean'), assumed (it fits outputs and targets)"
    assert any("criterion=" in line for line in assumed.advice)
    nothing = torchfil.check(mlp(), (X, torch.randn(6, 7)))
    assert nothing.reason is not None
    assert "criterion=" in nothing.reason


def test_private_coordinates_and_batches_of_other_forms() -> None:
    found = torchfil.check(mlp(), (X, Y), nn.CrossEntropyLoss(), Private(coordinates=[0, 2]))
    assert found.num_coordinates == 2
    other = torchfil.check(
        mlp(), {"a": X, "b": Y}, nn.CrossEntropyLoss(), batch_to_inputs=lambda batch: (batch["a"], batch["b"])
    )
    assert other.runs
    wrong = torchfil.check(mlp(), (X, Y), nn.CrossEntropyLoss(), Private(inputs="z"))
    assert wrong.reason is not None
    assert "'z' is not among the inputs" in wrong.reason


def test_a_model_that_fails_by_itself_raises() -> None:
    with pytest.raises(RuntimeError, match="shapes"):
        torchfil.check(mlp(), (X[:, :3], Y))
    with pytest.raises(ValueError, match="num_probes=0"):
        torchfil.check(mlp(), (X, Y), num_probes=0)


def test_text_and_dict_have_it_all() -> None:
    found = torchfil.check(mlp(nn.ReLU()).eval(), (X, Y), nn.CrossEntropyLoss(), num_probes=2)
    text = str(found)
    for part in ("runs, in one recorded pass", "d = 4", "linear, closed form", "2 probes", "1 (ReLU)", "model.train()"):
        assert part in text
    data: dict[str, Any] = json.loads(json.dumps(found.to_dict()))
    assert data["runs"] is True
    assert data["layers"][0]["kind"] == "Linear"
    assert data["costs"][0]["name"] == "plain forward and backward"
