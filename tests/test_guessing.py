"""What a divergence means for attackers: closed forms, properties, and attackers of simulated
transcripts.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special
from torch import Tensor

from tests.refused import all_refused
from torchfil import guessing
from torchfil.fisher.mechanism import step_divergence
from torchfil.fisher.results import Estimate
from torchfil.guessing import Guess

INFINITY = float("inf")
open_rates = st.floats(1e-9, 1 - 1e-9)
quick = settings(max_examples=25, deadline=None, derandomize=True)


def binary(true: float, false: float) -> float:
    """kl(t ‖ α)."""
    return float(special.rel_entr(true, false) + special.rel_entr(1 - true, 1 - false))


# --- the trade-off of true and false positives


@quick
@given(open_rates, open_rates)
def test_a_binary_release_attains_the_bound(first: float, second: float) -> None:
    false, true = sorted((first, second))
    got = guessing.largest_true_positive_rate(binary(true, false), false).item()
    assert got == pytest.approx(true, abs=1e-12 + 1e-15 / max(true - false, 1e-7))


# --- posteriors and several answers


@quick
@given(st.floats(1e-4, 10), st.floats(1e-4, 1 - 1e-4))
def test_expected_posterior_solves_its_equations(divergence: float, prior: float) -> None:
    mean = guessing.expected_posterior_bound(divergence, prior).item()
    other = prior * (1 - mean) / (1 - prior)
    assert prior < mean <= 1
    if mean < 1 - 1e-6:
        assert binary(mean, other) == pytest.approx(divergence, rel=1e-6)

    # the same by way of the mixture is no better
    mixture = guessing.divergence_from_mixture([0.0, divergence], [prior, 1 - prior])
    assert mean <= guessing.largest_true_positive_rate(mixture, prior).item() + 1e-12


def test_mixture() -> None:
    priors = [0.2, 0.3, 0.5]
    got = guessing.divergence_from_mixture(
        [[0.0, 0.0, 0.0], [0.0, INFINITY, INFINITY], [0.0, 1.0, 2.0]], priors
    )
    last = -math.log(0.2 + 0.3 * math.exp(-1) + 0.5 * math.exp(-2))
    np.testing.assert_allclose(got, [0, -math.log(0.2), last], atol=1e-15)
    by_row = guessing.divergence_from_mixture([[0.0, 1.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 1.0]])
    np.testing.assert_allclose(by_row, [0, 1])
    assert guessing.divergence_from_mixture([INFINITY, 0.0], [1.0, 0.0]) == INFINITY


def test_fano_is_the_textbook_inequality() -> None:
    for information, prior in (
        (0.3, [0.25] * 4),
        (0.2, [0.6, 0.3, 0.1]),
        (0.05, [0.9, 0.1, 0.0]),
        (0.4, [0.5, 0.5]),
    ):
        probabilities = [p for p in prior if p > 0]
        entropy, m = float(special.entr(probabilities).sum()), len(probabilities)

        def textbook(s: float, entropy: float = entropy, m: int = m) -> float:
            return entropy - float(special.entr([s, 1 - s]).sum()) - (1 - s) * math.log(m - 1)

        got = guessing.fano_success(information, prior).item()
        assert textbook(got) <= information + 1e-9
        assert binary(got, max(prior)) <= information + 1e-9
        assert max(textbook(got), binary(got, max(prior))) == pytest.approx(information, abs=1e-9)
    assert guessing.fano_success([0.1, 0.2], 4).equal(guessing.fano_success([0.1, 0.2], [0.25] * 4))
    assert guessing.fano_success(math.log(4), 4).item() == pytest.approx(1)
    assert guessing.fano_success(0.0, 1).item() == 1


# --- attackers of simulated transcripts


class Transcripts(NamedTuple):
    """Log likelihoods of sampled transcripts, [answers it was drawn from, runs, answers], over
    noise alone.
    """

    scores: Tensor
    divergences: Tensor  # KL(P_a ‖ P_b), [answers, answers]


def simulate(q: float, steps: int = 8, runs: int = 60_000, num_answers: int = 3) -> Transcripts:
    """Steps whose clipped gradients do not depend on the past, so that D is exactly Σ_t KL_t."""
    generator = torch.Generator().manual_seed(5)
    shifts = torch.randn(num_answers, steps, 2, generator=generator, dtype=torch.float64)
    shifts[-1] = 0  # absent
    inner = torch.einsum("atk,btk->abt", shifts, shifts)
    squares = shifts.square().sum(dim=-1)
    pairs = torch.broadcast_tensors(squares[:, None], squares[None], inner)

    drawn = torch.rand(num_answers, runs, steps, 1, generator=generator) < q
    noise = torch.randn(num_answers, runs, steps, 2, generator=generator, dtype=torch.float64)
    released = noise + drawn * shifts[:, None]
    exponent = torch.einsum("artk,btk->arbt", released, shifts) - squares / 2
    scores = torch.log1p(q * torch.expm1(exponent)).sum(dim=-1)
    return Transcripts(scores, step_divergence(*pairs, q).sum(dim=-1))


@pytest.fixture(scope="module", params=[0.1, 0.4])
def transcripts(request: pytest.FixtureRequest) -> Transcripts:
    return simulate(request.param)


def mean_and_error(sample: Tensor) -> tuple[float, float]:
    return sample.mean().item(), sample.std().item() / math.sqrt(len(sample))


PAIRS = [(0, 1), (1, 0), (0, 2), (2, 1)]


@pytest.mark.parametrize(("true", "other"), PAIRS)
def test_best_attacker_keeps_to_the_bounds(transcripts: Transcripts, true: int, other: int) -> None:
    divergence = transcripts.divergences[true, other].item()
    under_true, under_other = (
        transcripts.scores[a, :, true] - transcripts.scores[a, :, other] for a in (true, other)
    )
    runs = len(under_true)
    mean, error = mean_and_error(under_true)
    assert mean == pytest.approx(divergence, abs=4 * error)

    for alpha in (0.001, 0.01, 0.05, 0.1, 0.3):
        threshold = torch.quantile(under_other, 1 - alpha)
        rate = (under_true > threshold).double().mean().item()
        error = math.sqrt((rate + threshold.exp().item() ** 2 * alpha) / runs)
        assert rate - 4 * error <= guessing.largest_true_positive_rate(divergence, alpha).item()

    variation, error = mean_and_error((-torch.expm1(-under_true)).clamp(min=0))
    assert variation - 4 * error <= guessing.largest_total_variation(divergence).item()

    for prior in (0.05, 0.39, 0.5, 0.9):
        logit = math.log(prior / (1 - prior))
        right = (
            prior * (under_true > -logit).double().mean()
            + (1 - prior) * (under_other <= -logit).double().mean()
        )
        assert (
            right.item() - 4 / math.sqrt(runs) <= guessing.largest_success(divergence, prior).item()
        )
        mean, error = mean_and_error(torch.sigmoid(logit + under_true))
        assert mean - 4 * error <= guessing.expected_posterior_bound(divergence, prior).item()
        assert mean >= prior - 4 * error
        mean, error = mean_and_error(torch.nn.functional.logsigmoid(logit + under_true))
        assert mean - 4 * error <= guessing.expected_log_posterior_bound(divergence, prior).item()


@pytest.mark.parametrize("priors", [[1 / 3] * 3, [0.6, 0.3, 0.1]])
def test_several_answers(transcripts: Transcripts, priors: list[float]) -> None:
    prior = torch.tensor(priors, dtype=torch.float64)
    scores = transcripts.scores + prior.log()
    mixture = guessing.divergence_from_mixture(transcripts.divergences, prior)
    information, success, variance = 0.0, 0.0, 0.0
    # [true, named]
    named = torch.nn.functional.one_hot(scores.argmax(dim=-1), 3).double().mean(dim=1)
    overall = prior @ named
    for answer in range(3):
        to_mixture = transcripts.scores[answer, :, answer] - torch.logsumexp(scores[answer], dim=-1)
        mean, error = mean_and_error(to_mixture)
        assert mean - 4 * error <= mixture[answer].item()

        bound = guessing.largest_naming_rate(
            transcripts.divergences[answer], prior, overall[answer]
        )
        assert named[answer, answer].item() - 4 / math.sqrt(len(to_mixture)) <= bound.item()
        information += priors[answer] * mean
        success += priors[answer] * named[answer, answer].item()
        variance += (priors[answer] * error) ** 2

    # the maximum a posteriori names best; the true information is below its bound, and so is what
    # Fano makes of it
    assert (
        success - 0.01 <= guessing.fano_success(information + 4 * math.sqrt(variance), prior).item()
    )
    assert information - 4 * math.sqrt(variance) <= (prior @ mixture).item()


# --- the result


def test_guess_among_several() -> None:
    value = torch.tensor([[0.1, 0.4], [0.2, INFINITY]], dtype=torch.float64)
    guess = Guess(Estimate.exact(value), ("AA", "AG"))
    priors = torch.tensor([0.5, 0.3, 0.2])
    want = guessing.divergence_from_mixture([[0.0, 0.1, 0.4], [0.0, 0.2, INFINITY]], priors)
    assert guess.mixture_divergence(priors).equal(want)
    assert guess.mixture_divergence(priors.expand(2, 3)).equal(want)
    assert guess.several(priors, [0.5, 0.1])[:, 1].equal(
        guessing.largest_true_positive_rate(want, 0.1)
    )


def test_an_estimate_below_0_is_none() -> None:
    assert float(Guess(Estimate.exact(torch.tensor([-0.1]))).true_positive_rate(0.05)) == 0.05


def test_what_is_refused() -> None:
    refused = {
        "divergence=.*clamp": lambda: guessing.largest_true_positive_rate(-0.1, 0.1),
        "prior=.*strictly": lambda: guessing.expected_posterior_bound(0.1, 1.0),
        "sum to 1": lambda: guessing.divergence_from_mixture([0.0, 0.1], [0.5, 0.4]),
        "one entry per answer": lambda: guessing.divergence_from_mixture([0.1], [0.5, 0.5]),
        "2 names for 1": lambda: Guess(Estimate.exact(torch.ones(1)), ("a", "b")),
    }
    all_refused(refused)
