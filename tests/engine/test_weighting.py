"""Criteria that weight the examples of a batch by each other, and means over an example's own tokens."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.ways import LOSS, examples, mlp, start, step
from torchfil.engine.losses import LossMismatchError

WEIGHTS = torch.tensor([1.0, 20.0])


def test_class_weights_that_are_averaged_are_refused() -> None:
    for criterion in (nn.CrossEntropyLoss(WEIGHTS), nn.NLLLoss(WEIGHTS)):
        with pytest.raises(ValueError, match="with class weights and reduction='mean' divides by the weights"):
            start(mlp(), examples(), criterion=criterion)


@pytest.mark.parametrize(
    "criterion",
    [
        lambda outputs, targets: nn.functional.cross_entropy(outputs, targets, weight=WEIGHTS),
        lambda outputs, targets: (outputs - outputs.mean(dim=0)).square().mean() + LOSS(outputs, targets),
    ],
)
def test_train_step_refuses_a_criterion_that_weights_examples_by_others(criterion: Any) -> None:
    """On single examples the weights cancel: the model would be trained by another loss than was given."""
    module = mlp()
    engine, *_, loader = start(module, examples(), criterion=criterion)
    x, y = next(iter(loader))
    assert len(y.unique()) == 2
    for _ in range(2):  # trying again does not help
        with pytest.raises(LossMismatchError, match="no example has its own loss"):
            engine.train_step(x, y)
    assert engine.ledger is None


class _PerToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 12)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, classes, tokens]."""
        result: Tensor = self.inner(x)
        return result.reshape(-1, 3, 4)


def _own_mean(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over an example's own targets; 0 where none counts."""
    counted = (targets != -100).sum(dim=1).clamp(min=1)
    sums = nn.functional.cross_entropy(outputs, targets, reduction="none").sum(dim=1)
    return (sums / counted).sum()


def test_uneven_padding_counts_each_examples_own_mean() -> None:
    """A mean over a batch's tokens weights examples by others; what is trained is each example's own, told once."""
    x = examples()[0]
    targets = torch.arange(len(x) * 4).reshape(-1, 4) % 3
    targets[7, 1:] = -100
    targets[13] = -100  # nothing counts
    torch.manual_seed(0)
    module, fil = _PerToken(), []
    for criterion in (LOSS, _own_mean):
        engine, *_, loader = start(copy.deepcopy(module), (x, targets), criterion=criterion, seed=1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for batch in loader:
                engine.train_step(*batch)
        told = [str(w.message) for w in caught if "a mean over all targets of a batch" in str(w.message)]
        assert len(told) == (criterion is LOSS)
        fil.append(engine.get_fil().value)
    assert fil[0][13] == 0
    assert torch.allclose(*fil, rtol=1e-5)


@pytest.mark.parametrize("shifted", [False, True])
def test_a_criterion_of_the_users_that_averages_over_tokens(shifted: bool) -> None:
    x = examples()[0]
    targets = torch.arange(len(x) * 4).reshape(-1, 4) % 3
    targets[1, 2:] = -100

    def mean(outputs: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(*(part[..., shifted:] for part in (outputs, y)))

    engine, *_, loader = start(_PerToken(), (x, targets), criterion=mean)
    with pytest.warns(UserWarning, match="a mean over all targets of a batch"):
        engine.train_step(*next(iter(loader)))


@pytest.mark.parametrize("criterion", [None, lambda o, t: nn.functional.cross_entropy(o, t)])
@pytest.mark.parametrize("grad_sample_mode", ["auto", "hooks"])
def test_uneven_padding_in_a_loop(grad_sample_mode: str, criterion: Any) -> None:
    """With hooks the gradients of a batch's mean are Opacus's, and depend on other examples."""
    x = examples()[0]
    targets = torch.arange(len(x) * 4).reshape(-1, 4) % 3
    targets[7, 1:] = -100
    engine, model, optimizer, loader = start(_PerToken(), (x, targets), grad_sample_mode, criterion=criterion)

    def train() -> None:
        for inputs, y in loader:
            step(engine, model, optimizer, inputs, y, "hooks")

    if grad_sample_mode == "auto":
        with pytest.warns(UserWarning, match="a mean over all targets of a batch"):
            train()
        assert bool((engine.get_fil().value > 0).all())
    else:
        with pytest.raises(LossMismatchError, match=r"Use grad_sample_mode='auto'.*This step was not taken"):
            train()
        assert engine.leakage()["participations"].sum() == 6


@pytest.mark.parametrize(
    "criterion",
    [
        nn.CrossEntropyLoss(WEIGHTS, reduction="sum"),
        lambda outputs, targets: nn.functional.cross_entropy(outputs, targets, label_smoothing=0.1),
        lambda outputs, targets: -outputs.log_softmax(dim=1)[torch.arange(len(targets)), targets].sum(),
    ],
)
def test_train_step_takes_sums_and_means(criterion: Any) -> None:
    engine, *_, loader = start(mlp(), examples(), criterion=criterion)
    for x, y in loader:
        engine.train_step(x, y)
    assert bool((engine.get_fil().value > 0).all())
