"""torchfil.check: what runs by which rule, what is not smooth, what falls back, what is refused,
before training.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchfil
from tests.engine.loops import make
from torchfil import Private
from torchfil.engine.check import LayerCheck

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 0, 1, 2])
IDS = torch.randint(9, (6, 5), generator=torch.Generator().manual_seed(0))
LOSS = nn.CrossEntropyLoss()


def mlp(activation: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), activation or nn.Tanh(), nn.Linear(8, 3))


class Mixing(nn.Linear):
    """Subtracts the batch's mean."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(dim=0))


class Mixture(nn.Module):
    """A layer without a rule, a bare parameter, dropout, a call that is not smooth."""

    def __init__(self) -> None:
        super().__init__()
        self.pair, self.scale, self.drop = (
            nn.Bilinear(4, 4, 3),
            nn.Parameter(torch.ones(3)),
            nn.Dropout(0.5),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.pair(x, x)).relu() * self.scale


class Sorted(nn.Linear):
    """Puts its examples into another order on the way, which a recorded pass cannot follow."""

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        return super().forward(x[order]).tanh()[order.argsort()]


class WithLoss(nn.Module):
    """Gives its loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 5), nn.Linear(5, 3)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.embedding(input_ids).mean(dim=1))
        loss = {} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels)}
        return {**loss, "logits": logits}


def test_a_network_that_runs() -> None:
    found = torchfil.check(mlp(), (X, Y), LOSS)
    assert (found.verdict, found.runs, found.reason, found.not_smooth) == (
        "recorded",
        True,
        None,
        (),
    )
    assert (found.batch_size, found.num_coordinates, found.private) == (6, 4, "input 0, 4")
    assert found.loss == "CrossEntropyLoss(), as given"
    assert found.layers == (LayerCheck("Linear", "linear, closed form", ("0", "2"), 5 * 8 + 9 * 3),)
    found = torchfil.check(mlp(nn.ReLU()), (X, Y), LOSS)
    assert [line.split(":")[0] for line in found.not_smooth] == ["1 (ReLU)"]
    assert "closed form" in str(found)


def test_the_model_is_left_as_it_is() -> None:
    model = Mixture()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    found = torchfil.check(model, (X, Y), LOSS)
    assert found.verdict == "recorded"
    assert {layer.kind for layer in found.layers} == {"Bilinear", "Parameter"}
    assert any("calls relu" in line for line in found.not_smooth)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(value.grad is None for value in model.parameters())
    make(module=model)


class Contrasting(WithLoss):
    """Gives a loss that compares each example with all others."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        views = nn.functional.normalize(self.head(self.embedding(input_ids).mean(dim=1)), dim=1)
        return {"loss": (views @ views.T).exp().sum(dim=1).log().mean()}


def test_what_is_mapped_over_examples_is_told() -> None:
    found = torchfil.check(nn.Sequential(Sorted(4, 4), nn.Linear(4, 3)), (X, Y), LOSS)
    assert (found.verdict, found.layers) == ("mapped", ())
    assert found.reason


@pytest.mark.parametrize(
    ("model", "batch", "options", "noun"),
    [
        (Mixing(4, 3), (X, Y), {"criterion": LOSS}, "mixes examples"),
        (Contrasting(), {"input_ids": IDS, "labels": Y}, {}, "mixes the examples"),
        (nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), (X, Y), {}, "GroupNorm"),
        (mlp(), (X, torch.randn(6, 7)), {}, "criterion="),
        (mlp().eval(), (X, Y), {}, "eval mode"),
        (mlp(), (X, Y), {"criterion": LOSS, "private": Private(inputs="z")}, "'z'"),
    ],
)
def test_what_is_refused_is_told(
    model: nn.Module, batch: Any, options: dict[str, Any], noun: str
) -> None:
    found = torchfil.check(model, batch, **options)
    assert (found.verdict, found.runs) == ("refused", False)
    assert noun in found.reason


def test_losses_private_coordinates_and_batches_of_other_forms() -> None:
    found = torchfil.check(WithLoss(), {"input_ids": IDS, "labels": Y})
    assert "identified from the model's own" in found.loss
    assert (found.private, found.num_coordinates) == ("the output of 'embedding', 5×5", 25)
    assumed = torchfil.check(mlp(), (X, Y))
    assert "assumed" in assumed.loss
    assert torchfil.check(mlp(), (X, Y), LOSS, Private(coordinates=[0, 2])).num_coordinates == 2
    assert torchfil.check(
        mlp(), {"a": X, "b": Y}, LOSS, batch_to_inputs=lambda batch: (batch["a"], batch["b"])
    ).runs
