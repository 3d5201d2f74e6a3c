"""Membership inference where the answer is known: perfect, blind, and Gaussian with a closed
form.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from tests.cases import DEVICE
from tests.refused import all_refused
from torchfil.attacks.membership import (
    MembershipResult,
    ShadowRuns,
    gaussian_likelihood_ratio,
    loss_threshold,
    membership_inference,
    shadow_runs,
)


def gaussian_runs(shift: float, runs: int = 60, n: int = 300) -> ShadowRuns:
    """φ ~ N(hardness of the example + shift · member, 1): only the likelihood ratio knows the
    hardness.
    """
    source = torch.Generator().manual_seed(0)
    members = torch.rand(runs, n, generator=source) < 0.5
    hardness = 5 * torch.randn(n, generator=source)
    log_odds = hardness + shift * members + torch.randn(runs, n, generator=source)
    return ShadowRuns(log_odds.to(DEVICE), members.to(DEVICE))


def test_likelihood_ratio_reaches_the_gaussian_optimum() -> None:
    found = membership_inference(gaussian_runs(2.0))["likelihood ratio"]
    normal = torch.distributions.Normal(0.0, 1.0)
    assert found.auc == pytest.approx(normal.cdf(torch.tensor(2 / math.sqrt(2))).item(), abs=0.02)
    # P(N(2, 1) > 99 % quantile)
    optimum = 1 - normal.cdf(normal.icdf(torch.tensor(0.99)) - 2).item()
    assert found.tpr_at(0.01) == pytest.approx(optimum, abs=0.06)
    assert found.by_example().achieved.mean() == pytest.approx(
        normal.cdf(torch.tensor(1.0)).item(), abs=0.02
    )
    for found in membership_inference(gaussian_runs(0.0)).values():  # nothing leaks
        assert found.auc == pytest.approx(0.5, abs=0.02)
        assert found.tpr_at(0.1) < 0.14


def test_log_odds_and_splits() -> None:
    logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 80.0, 0.0]], device=DEVICE)
    labels = torch.tensor([0, 0], device=DEVICE)
    runs = shadow_runs(lambda rows, run: nn.Identity(), logits, labels, runs=5, seed=3)
    assert runs.log_odds[0].tolist() == pytest.approx([2 - math.log(2), -80.0])
    torch.testing.assert_close(loss_threshold(runs.log_odds[0]), logits.log_softmax(dim=1)[:, 0])
    assert (runs.members.sum(dim=1) == 1).all()


def test_refusals() -> None:
    """Runs that diverged: one NaN made the pooled variance NaN, and the ratio a coin."""
    diverged = torch.randn(6, 20)
    diverged[4, 3] = torch.nan
    refused = {
        "the likelihood ratio needs": lambda: gaussian_likelihood_ratio(
            gaussian_runs(1.0, runs=3), 0
        ),
        r"runs \[4\] are not finite": lambda: ShadowRuns(diverged, torch.rand(6, 20) < 0.5),
    }
    all_refused(refused)


def test_random_scores_are_right_half_of_the_time() -> None:
    """A threshold chosen on the scores that it judges would find members among them."""
    rng, targets, n, means = np.random.default_rng(0), 5, 40, []
    for _ in range(300):
        members = rng.permuted(np.tile(np.arange(n) < n // 2, (targets, 1)), axis=1)
        result = MembershipResult(
            "loss threshold", rng.normal(size=(targets, n)), members, 0.5, 0.0
        )
        means.append(result.by_example().achieved.mean())
    assert np.mean(means) == pytest.approx(0.5, abs=4 * np.std(means) / 300**0.5 + 0.5 / n)
