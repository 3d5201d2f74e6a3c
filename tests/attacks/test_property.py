"""The property attack of examples/attack_property.py, where the AUC is known."""

import math

import pytest
import torch
from attack_property import FederatedGradients, property_inference


def test_gradients_a_known_distance_apart_give_the_aucs_closed_form() -> None:
    """Two normal classes d standard deviations apart: AUC = Φ(d/√2) for the best score, 1 where
    they do not overlap.
    """
    draws, labels = torch.Generator().manual_seed(0), torch.arange(2000) % 2 == 1

    def gradients(distance: float) -> torch.Tensor:
        return torch.randn(2000, 2, generator=draws) + distance * labels[:, None] * torch.tensor(
            [1.0, 0.0]
        )

    known, observed = (
        {"far": gradients(20.0), "near": gradients(1.0), "same": gradients(0.0)} for _ in range(2)
    )
    seen = FederatedGradients(known, labels, observed, labels)
    far, near, same = property_inference(seen, attacker="logistic", bootstrap=10).value
    assert far == 1
    assert near == pytest.approx(0.5 * (1 + math.erf(1 / 2)), abs=0.04)  # four standard errors
    assert same == pytest.approx(0.5, abs=0.06)
