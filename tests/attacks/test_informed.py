"""Informed reconstruction: exact without noise to speak of, and at the Cramér–Rao bound where noise
is small.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.cases import DEVICE
from torchfil import bounds, fisher
from torchfil.attacks.transcripts import (
    Transcripts,
    expected_information,
    informed_reconstruction,
    record_dpsgd,
)

C = 1.0


def problem(d: int) -> tuple[nn.Module, Tensor, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(d, 6), nn.Tanh(), nn.Linear(6, 1)).double()
        x = torch.randn(12, d, dtype=torch.float64)
    x = x.to(DEVICE)
    return model.to(DEVICE), x, torch.sin(x.sum(dim=1, keepdim=True)) + 0.3


def record(d: int, sigma: float, **options: object) -> Transcripts:
    model, x, y = problem(d)
    settings: dict[str, object] = {"steps": 4, "lr": 0.5, "runs": 1, "seed": 1, **options}
    return record_dpsgd(
        model, nn.MSELoss(), x, y, max_grad_norm=C, noise_multiplier=sigma, **settings
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("d", [1, 5])
def test_error_lies_at_the_bound_where_noise_is_small(d: int) -> None:
    """From a start nearby; examples/attack_informed.py searches from afar."""
    transcripts = record(d, 0.03, runs=2000)
    result = informed_reconstruction(transcripts, 3, starts=problem(d)[1][3:4] + 0.3)
    bound = bounds.mse_from_fim(expected_information(transcripts, 3)[None]).item()
    assert result.achieved[0] > bound - 4 * result.standard_error[0]
    assert result.achieved[0] < 1.5 * bound
    assert result.squared_bias[0] < 0.01 * bound


def test_in_a_linear_gaussian_model_the_guess_and_its_error_have_closed_forms() -> None:
    """ℓ = ⟨w, z⟩ has the gradient z at all weights: T noisy copies, whose mean is the guess, with
    variance s²/T.
    """
    runs, steps, d, s = 400, 6, 3, 0.5
    z = torch.randn(5, d, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(
        DEVICE
    )
    transcripts = record_dpsgd(
        nn.Linear(d, 1, bias=False).double().to(DEVICE),
        lambda outputs, targets: outputs.mean(),
        z,
        torch.zeros(5, device=DEVICE),
        steps=steps,
        lr=0.1,
        max_grad_norm=100.0,
        noise_multiplier=s / 100,
        clip="hard",
        runs=runs,
        seed=0,
    )
    found = informed_reconstruction(transcripts, 2, restarts=1, seed=0)
    copies = transcripts.noisy_sums - (z.sum(dim=0) - z[2])  # [runs, steps, d]
    np.testing.assert_allclose(found.guesses[0], copies.mean(dim=1).cpu().numpy(), atol=1e-5)
    information = expected_information(transcripts, 2).cpu()
    torch.testing.assert_close(information, torch.eye(d, dtype=torch.float64) * steps / s**2)
    bound = bounds.mse_from_fim(information[None]).item()
    assert bound == pytest.approx(s**2 / steps)
    assert found.achieved[0] == pytest.approx(bound, rel=4 * (2 / (runs * d)) ** 0.5)


def test_information_is_that_of_the_package() -> None:
    """One step from known weights: the same Fisher information matrix as torchfil.fisher gives."""
    model, x, y = problem(5)
    transcripts = record(5, 0.7, steps=1)
    truth = fisher.exact_fim(model, nn.MSELoss(), x, y, max_grad_norm=C, noise_multiplier=0.7)
    for row in (0, 7):
        torch.testing.assert_close(expected_information(transcripts, row), truth[row])


def test_the_targets_own_inputs_are_not_read() -> None:
    """The guess comes from what was released, not from the example that lies in the attacker's
    hands.
    """
    transcripts = record(2, 0.01)
    honest = informed_reconstruction(transcripts, 3, restarts=1, iterations=5, seed=5).guesses
    transcripts.gradients.examples.z[3] += 10
    moved = informed_reconstruction(transcripts, 3, restarts=1, iterations=5, seed=5).guesses
    assert moved is not None
    assert np.array_equal(moved, honest)


def test_weights_follow_sgd_on_the_noisy_sums() -> None:
    transcripts = record(2, 1.0, sample_rate=0.5, steps=2)
    moved = transcripts.weights[0, 0] - 0.5 / (0.5 * 12) * transcripts.noisy_sums[0, 0]
    torch.testing.assert_close(transcripts.weights[0, 1], moved)
