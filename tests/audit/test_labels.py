"""Labels without canaries: sound where the reference is right, silent or reduced where it is
not.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from torchfil.audit.labels import audit_labels


def draw(p: Tensor) -> Tensor:
    return torch.multinomial(p, 1)[:, 0]


def laws(n: int, classes: int, scale: float = 1.0) -> Tensor:
    """p(y | x) of n people, [n, classes]."""
    return (scale * torch.randn(n, classes, dtype=torch.float64)).softmax(dim=1)


def randomised_response(labels: Tensor, p: Tensor, epsilon: float) -> Tensor:
    """Log probabilities of a "model" that knows p and a released label, which is ε-private, of
    everybody.
    """
    classes = p.shape[1]
    kept = torch.rand(len(labels)) < math.exp(epsilon) / (math.exp(epsilon) + classes - 1)
    released = torch.where(
        kept, labels, (labels + torch.randint(1, classes, labels.shape)) % classes
    )
    return p.log() + epsilon * F.one_hot(released, classes)


@pytest.mark.parametrize(("classes", "delta"), [(2, 0.0), (5, 1e-4)])
def test_a_model_that_knows_only_the_law_of_labels_shows_nothing(
    classes: int, delta: float
) -> None:
    torch.manual_seed(classes)
    audits = []
    for _ in range(400):
        p = laws(300, classes)
        guesses = p.log() + torch.randn(300, classes)  # whatever it learned from others
        audits.append(
            audit_labels(
                guesses, draw(p), p, delta=delta, placebo=p.log() + torch.randn(300, classes)
            )
        )
    assert sum(audit.epsilon is None for audit in audits) <= 20
    assert sum((audit.epsilon or 0.0) > 0 for audit in audits) <= 20


def worst(n: int, tau: float) -> tuple[Tensor, Tensor]:
    """p and the p̂ that is furthest from it: one label is e^τ times as likely as p̂ says, the other
    e^−τ times.
    """
    p_hat = torch.tensor([1.0, math.exp(tau)], dtype=torch.float64).expand(n, 2) / (
        1 + math.exp(tau)
    )
    flipped = torch.rand(n, 1) < 0.5  # which one it is differs between people
    return torch.where(flipped, p_hat, p_hat.flip(1)), torch.where(flipped, p_hat.flip(1), p_hat)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("epsilon", "classes", "tau"), [(0.5, 2, 0.0), (1.5, 4, 0.0), (0.5, 2, 0.4), (1.5, 2, 0.2)]
)
def test_randomised_response_is_bounded_from_below(
    epsilon: float, classes: int, tau: float
) -> None:
    torch.manual_seed(7)

    def audit(n: int) -> float | None:
        p, reference = worst(n, tau) if tau else [laws(n, classes)] * 2
        labels = draw(p)
        return audit_labels(
            randomised_response(labels, p, epsilon), labels, reference, reference_error=tau
        ).epsilon

    several = [audit(1000) for _ in range(100)]
    assert several.count(None) <= 5
    assert sum((each or 0.0) > epsilon for each in several) <= 5
    assert 0.9 * epsilon < (audit(100_000) or 0.0) <= epsilon


def people(n: int = 4000) -> tuple[Tensor, Tensor, Tensor]:
    """p(y | x₁, x₂) of four labels, p(y | x₁), which is its mean over x₂, and the labels."""
    x1, x2 = torch.randint(3, (n,)), torch.randint(2, (n,))
    table = laws(6, 4).reshape(3, 2, 4)
    p = table[x1, x2]
    return p, table.mean(dim=1)[x1], draw(p)


@pytest.mark.parametrize("wrong", ["sharper", "flatter", "another class", "saw the labels"])
def test_placebos_notice_a_wrong_reference(wrong: str) -> None:
    torch.manual_seed(3)
    p, _, labels = people()
    reference = {
        "sharper": (p.log() * 1.5).softmax(dim=1),
        "flatter": (p.log() / 1.5).softmax(dim=1),
        "another class": (p.log() + torch.tensor([0.4, 0.0, 0.0, 0.0])).softmax(dim=1),
        "saw the labels": (p.log() + 0.5 * F.one_hot(labels, 4)).softmax(dim=1),
    }[wrong]
    audit = audit_labels(p.log(), labels, reference, claimed_label_epsilon=0.0)
    assert audit.epsilon is None
    assert audit.placebo > 0
    assert not audit.exceeds_label_claim
    assert audit_labels(p.log(), labels, reference, reference_error=2.0).epsilon == 0


def test_a_reference_that_knows_less_is_noticed_by_a_model_of_other_people_alone() -> None:
    torch.manual_seed(0)
    p, calibrated, labels = people()
    unnoticed = audit_labels(p.log(), labels, calibrated)
    assert unnoticed.placebo == 0
    assert (unnoticed.epsilon or 0.0) > 0
    assert audit_labels(p.log(), labels, calibrated, placebo=p.log()).epsilon is None


def test_a_model_that_memorised_is_found_and_contradicts_a_promise_about_labels_alone() -> None:
    torch.manual_seed(0)
    p, _, labels = people()
    outputs = (20 * F.one_hot(labels, 4) + torch.randn(len(labels), 4)).requires_grad_()
    audit = audit_labels(
        outputs, labels.numpy().astype("uint8"), p, claimed_label_epsilon=3.0, delta=1e-6
    )
    assert (audit.epsilon or 0.0) > 5
    assert audit.exceeds_label_claim
    assert not audit_labels(outputs, labels, p, claimed_label_epsilon=9.0).exceeds_label_claim


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"labels": torch.tensor([0, 1, 2, 3])}, r"rows \[3\]"),
        ({"reference": torch.zeros(4, 3)}, "sum to 1"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], match: str) -> None:
    fine = {
        "outputs": torch.zeros(4, 3),
        "labels": torch.tensor([0, 1, 2, 0]),
        "reference": torch.full((4, 3), 1 / 3),
    }
    with pytest.raises(ValueError, match=match):
        audit_labels(**{**fine, **change})
