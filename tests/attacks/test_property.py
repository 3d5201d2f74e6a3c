"""Property inference with a planted property, and where the AUC is known."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from tests.cases import DEVICE
from tests.refused import all_refused
from torchfil.attacks.property import Client, FederatedGradients, federated_gradients, property_inference

pytest.importorskip("sklearn")


def client(seed: int, strength: float) -> Client:
    source = torch.Generator().manual_seed(seed)
    inputs = torch.randn(1000, 6, generator=source)
    targets = (inputs[:, 0] > -1.3).long()  # mostly 1: an untrained network's mean gradient then has a direction
    property = torch.rand(1000, generator=source) < 0.5
    inputs[:, 5] += strength * property  # a column that the task does not need
    return Client(*(each.to(DEVICE) for each in (inputs, targets, property)))


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).to(DEVICE)


def seen(strength: float, rounds: int, **options: Any) -> FederatedGradients:
    clients = client(1, strength), client(2, strength)
    return federated_gradients(network(), nn.CrossEntropyLoss(), *clients, rounds=rounds, seed=0, **options)


def test_a_planted_property_is_found() -> None:
    planted = seen(4.0, 20, batch_size=8, lr=1e-3)
    for attacker in ("forest", "logistic"):
        found = property_inference(planted, attacker=attacker, bootstrap=50)  # type: ignore[arg-type]
        assert found.layers == ("0", "2")
        assert found.value[0] > 0.9
    with pytest.raises(ValueError, match="attacker='boost'"):
        property_inference(planted, attacker="boost")  # type: ignore[arg-type]


def test_observed_gradient_is_the_victims_and_training_goes_on() -> None:
    model = network()
    before = [value.detach().clone() for value in model.parameters()]
    clients = client(1, 0.0), client(2, 0.0)
    found = federated_gradients(model, nn.CrossEntropyLoss(), *clients, rounds=4, seed=0, lr=0.5)
    fresh = network()
    source = torch.Generator(DEVICE).manual_seed(0)
    torch.rand(4, generator=source, device=DEVICE)  # the coins
    x, y = client(1, 0.0).batch(32, False, source)
    nn.functional.cross_entropy(fresh(x), y).backward()
    for layer in ("0", "2"):
        own = fresh.get_submodule(layer)
        expected = torch.cat([value.grad.reshape(-1) for value in own.parameters()])  # type: ignore[union-attr]
        torch.testing.assert_close(found.observed[layer][0], expected)
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert found.known["0"].shape == (16, 35)
    assert found.known_property.tolist() == [False, False, True, True] * 4


def test_gradients_a_known_distance_apart_give_the_aucs_closed_form() -> None:
    """Two normal classes d standard deviations apart: AUC = Φ(d/√2) for the best score, 1 where they do not overlap."""
    draws, labels = torch.Generator().manual_seed(0), torch.arange(2000) % 2 == 1

    def gradients(distance: float) -> torch.Tensor:
        moved = distance * labels[:, None] * torch.tensor([1.0, 0.0])
        return (torch.randn(2000, 2, generator=draws) + moved).to(DEVICE)

    known, observed = ({"far": gradients(20.0), "near": gradients(1.0), "same": gradients(0.0)} for _ in range(2))
    both = FederatedGradients(known, labels.to(DEVICE), observed, labels.to(DEVICE))
    far, near, same = property_inference(both, attacker="logistic", bootstrap=10).value
    assert far == 1
    assert near == pytest.approx(0.5 * (1 + math.erf(1 / 2)), abs=0.04)  # four standard errors
    assert same == pytest.approx(0.5, abs=0.06)


def test_refusals() -> None:
    refused = {
        "all examples have the": lambda: Client(torch.zeros(3, 2), torch.zeros(3), torch.ones(3)),
        "entries": lambda: Client(torch.zeros(3, 2), torch.zeros(2), torch.ones(3)),
    }
    all_refused(refused)
