"""Probes: unbiased, honest about their error, and as good as their variance formula says."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.cases import SIGMA, Case
from torchfil import fisher
from torchfil.clipping import DEFAULT_CLIP
from torchfil.fisher import Estimate, ExampleGradients, PoissonAmplification
from torchfil.fisher.batch import PrivateBatch
from torchfil.fisher.estimators import draw_bits, signs_of
from torchfil.fisher.mechanism import Mechanism
from torchfil.fisher.recording import plan

SEEDS = 250
SETTINGS: dict[str, Any] = {
    "max_grad_norm": 1.2,
    "noise_multiplier": SIGMA,
    "amplification": PoissonAmplification(0.3),
}


def regression(width: int = 24, batch: int = 2) -> Case:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(width, 12), nn.Tanh(), nn.Linear(12, 4)).double()
        return Case(
            model,
            nn.CrossEntropyLoss(),
            torch.randn(batch, width).double(),
            torch.randint(4, (batch,)),
        )


def truth(case: Case, function: Any = fisher.fim_trace) -> Tensor:
    return function(*case.arguments, **SETTINGS, estimator="exact").value


def repeat(case: Case, quantity: Any, count: int = SEEDS, *, num_probes: int) -> list[Estimate]:
    """What ``fim_trace`` and ``fim_diagonal`` give for these seeds.

    The recorded pass is tried once for all.
    """
    gradients = ExampleGradients.build(*case.arguments)
    mechanism = Mechanism.build(1.2, SIGMA, DEFAULT_CLIP, SETTINGS["amplification"])
    batch = PrivateBatch(gradients, mechanism, plan(gradients))
    return [
        batch.estimate(quantity, "weight-probes", num_probes, torch.Generator().manual_seed(seed))
        for seed in range(count)
    ]


def coverage(results: list[Estimate], expected: Tensor) -> float:
    """How many of the 95 % intervals hold the truth."""
    ends = [result.interval(0.95) for result in results]
    return (
        torch.stack([(low <= expected) & (expected <= high) for low, high in ends])
        .double()
        .mean()
        .item()
    )


def moments(results: list[Estimate]) -> tuple[Tensor, Tensor]:
    """Values and errors by example, [SEEDS, 2] each."""
    assert {result.kind for result in results} == {"estimate"}
    return tuple(
        torch.stack([getattr(r, n) for r in results]).reshape(-1, 2)
        for n in ("value", "standard_error")
    )  # type: ignore[return-value]


@pytest.mark.parametrize("num_probes", [1, 3])
def test_trace_is_unbiased_and_its_interval_covers(num_probes: int) -> None:
    """The variance it reports is the variance it has.

    That of a single probe is larger, to be on the safe side.
    """
    results = repeat(regression(), "trace", num_probes=num_probes)
    (values, errors), expected = moments(results), truth(regression())
    limit = 4.5 if num_probes == 1 else 4
    assert (
        (values.mean(dim=0) - expected).abs() < limit * values.std(dim=0) / math.sqrt(SEEDS)
    ).all()
    covered, reported = coverage(results, expected), errors.square().mean(dim=0)
    if num_probes == 1:
        assert (reported >= values.var(dim=0)).all()
        assert covered >= 0.95
    else:
        assert 0.90 <= covered <= 0.99
        assert torch.allclose(reported.sqrt(), values.std(dim=0), rtol=0.2)


def test_diagonal_is_unbiased_and_its_interval_covers() -> None:
    case, count = regression(), 150
    results, expected = (
        repeat(case, "diagonal", count, num_probes=20),
        truth(case, fisher.fim_diagonal),
    )
    values = torch.stack([r.value for r in results])  # [seeds, batch, d]
    z = (values.mean(dim=0) - expected) / (values.std(dim=0) / math.sqrt(count))
    assert (z.abs() < 4.5).all(), "48 coordinates at once"
    assert z.abs().mean() < 1.2
    assert 0.90 <= coverage(results, expected) <= 0.99


def test_an_interval_from_one_probe_covers_a_single_entry() -> None:
    """One probe's entry of the diagonal is a squared normal number, nearly: far more skewed than a
    sum of many.
    """
    case = regression(3, 4)
    assert (
        coverage(repeat(case, "diagonal", 200, num_probes=1), truth(case, fisher.fim_diagonal))
        >= 0.94
    )


def test_probes_are_fair_and_independent() -> None:
    """Between weights and between seeds.

    The number of weights is no multiple of what one random number gives.
    """
    drawn = torch.stack(
        [draw_bits(seed, torch.empty((3, 371), dtype=torch.int8)).flatten() for seed in range(1000)]
    )
    assert torch.equal(drawn[7], draw_bits(7, torch.empty(drawn.shape[1], dtype=torch.int8)))
    signs = signs_of(drawn, torch.float64)
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    assert abs(float(signs.mean())) * signs.numel() ** 0.5 < 4
    for vectors in (signs, signs.T):
        products = vectors @ vectors.T / vectors.shape[1] ** 0.5  # nearly normal, with variance 1
        pairs = products[tuple(torch.triu_indices(*products.shape, offset=1))]
        assert float(pairs.abs().max()) < 6.5
        assert abs(float(pairs.square().mean()) - 1) < 0.01
