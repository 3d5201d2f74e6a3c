"""One-run audits against enumeration, a linear program, closed forms, dp-accounting and simulated
sound runs.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from scipy import optimize, stats

from tests.engine.loops import exact_epsilon
from tests.refused import all_refused
from torchfil.audit.bounds import (
    GUESSES,
    Audit,
    TradeOff,
    _grouped,
    audit_scores,
    epsilon_dp,
    p_value_dp,
    p_value_fdp,
)
from torchfil.bounds import rero
from torchfil.guessing import largest_true_positive_rate

RUN = [(1.0, 0.01, 1000)]


def randomised_response(epsilon: float) -> TradeOff:
    """Its exact curve: min(e^ε α, 1 − e^{−ε}(1 − α))."""
    p = 1 / (1 + math.exp(-epsilon))
    vertices = np.array([[0, 0], [1 - p, p], [1, 1]])
    return TradeOff(vertices, vertices[1:2])


def law_of_right_guesses(m: int, called_in: int, called_out: int, epsilon: float) -> np.ndarray:
    """P[W = w] by enumeration: every canary reports who took part, each report true with
    probability p.
    """
    p = 1 / (1 + math.exp(-epsilon))
    law = np.zeros(called_in + called_out + 1)
    for taken, report in itertools.product(itertools.product((0, 1), repeat=m), repeat=2):
        ranked = sorted(range(m), key=lambda canary: -report[canary])
        right = sum(taken[c] for c in ranked[:called_in]) + sum(
            1 - taken[c] for c in ranked[m - called_out :]
        )
        true = sum(t == r for t, r in zip(taken, report, strict=True))
        law[right] += 0.5**m * p**true * (1 - p) ** (m - true)
    return law


@pytest.mark.parametrize(("called_in", "called_out"), [(3, 3), (2, 2), (2, 0), (1, 3)])
@pytest.mark.parametrize(
    ("epsilon", "delta"), [(0.0, 0.0), (0.7, 0.0), (2.0, 0.0), (0.7, 0.05), (2.0, 0.2)]
)
def test_no_sound_mechanism_beats_the_p_values(
    called_in: int, called_out: int, epsilon: float, delta: float
) -> None:
    """With probability δ everything is revealed, which (ε, δ)-DP allows."""
    m, guesses = 6, called_in + called_out
    tails = law_of_right_guesses(m, called_in, called_out, epsilon)[::-1].cumsum()[::-1]
    by_dp = [p_value_dp(right, guesses, m, epsilon, delta) for right in range(guesses + 1)]
    assert (delta + (1 - delta) * tails <= np.array(by_dp) + 1e-12).all()
    by_fdp = [
        p_value_fdp(right, guesses, m, randomised_response(epsilon)) for right in range(guesses + 1)
    ]
    assert (tails <= np.array(by_fdp) + 1e-9).all()


@pytest.mark.parametrize(
    ("counts", "epsilon", "delta", "expected"),
    [
        ((1000, 1000, 1000), 5.0, 1e-5, 0.0031309177952803533),
        ((83, 100, 1000), 1.0, 1e-5, 0.015285739023091324),
        ((6100, 10000, 10000), 0.3, 1e-6, 4.353674230877371e-05),
    ],
)
def test_numbers_of_jax_privacy(
    counts: tuple[int, int, int], epsilon: float, delta: float, expected: float
) -> None:
    assert p_value_dp(*counts, epsilon, delta) == pytest.approx(expected, rel=1e-10)


def test_largest_rejected_epsilon() -> None:
    # the ceiling of 1,000 canaries
    assert round(epsilon_dp(1000, 1000, 1000, 1e-5, 0.05), 2) == 5.78
    epsilon = epsilon_dp(170, 200, 1000, 1e-5, 0.01)
    assert p_value_dp(170, 200, 1000, epsilon, 1e-5) == pytest.approx(0.01, rel=1e-9)
    assert epsilon_dp(100, 200, 1000, 1e-5, 0.01) < 1e-9


@pytest.mark.parametrize("sigma", [0.5, 1.0, 4.0])
def test_curve_of_the_gaussian(sigma: float) -> None:
    curve = TradeOff.of_run([(sigma, 1.0, 1)])
    alphas = np.concatenate([np.geomspace(1e-13, 0.5, 9001), 1 - np.geomspace(0.5, 1e-11, 9001)])
    excess = (
        np.interp(alphas, *curve.outer.T) / stats.norm.sf(stats.norm.isf(alphas) - 1 / sigma) - 1
    )
    assert excess.min() > -1e-13  # never below the truth
    assert excess[alphas > 1e-7].max() < 0.01
    slopes = np.diff(curve.outer[1:, 1]) / np.diff(curve.outer[1:, 0])
    assert (np.diff(slopes) < 0).all()
    exact = exact_epsilon(1 / sigma, 1e-5)
    assert 0.999 * exact < curve.epsilon(1e-5) <= exact


def test_curve_of_a_subsampled_run() -> None:
    """Between the points of the grid, too, no direction is above the curve.

    And ε is dp-accounting's.
    """
    curve = TradeOff.of_run(RUN)
    priors = np.random.default_rng(0).permutation(np.geomspace(1e-8, 0.999, 400))
    low = rero(priors.tolist(), q=0.01, noise_multiplier=1.0, steps=1000).low.numpy()
    for alpha, power in ((priors, low), (1 - low, 1 - priors)):
        assert (np.interp(alpha, *curve.outer.T) >= power).all()
    assert np.allclose(
        np.interp(priors, *curve.outer.T)[priors > 1e-6], low[priors > 1e-6], rtol=0.02
    )

    accounting = pytest.importorskip("dp_accounting")
    accountant = accounting.pld.PLDAccountant()
    accountant.compose(
        accounting.PoissonSampledDpEvent(0.01, accounting.GaussianDpEvent(1.0)), 1000
    )
    assert curve.epsilon(1e-5) == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-3)
    assert TradeOff.of_run([(0.5, 0.01, 1000)], 2.0).epsilon(1e-5) == curve.epsilon(1e-5)


@pytest.mark.parametrize(
    "counts", [(9, 10, 10), (8, 10, 10), (6, 6, 12), (17, 20, 20), (9, 10, 30), (1, 1, 1)]
)
def test_p_value_is_the_linear_program(counts: tuple[int, int, int]) -> None:
    """The largest P[W ≥ v] over all laws p with Σ_{i≥j} i p_i/m ≤ slope·Σ_{i≥j−1} (r − i) p_i/m +
    offset.
    """
    (right, guesses, m), curve = counts, TradeOff.of_run([(1.0, 1.0, 1)])
    w = np.arange(guesses + 1)
    dx, dy = np.diff(curve.outer[1:], axis=0).T
    slopes, offsets = dy / dx, curve.outer[1:-1, 1] - dy / dx * curve.outer[1:-1, 0]
    rows, ends = [], []
    for j, slope, offset in (
        (j, *line) for j in w[1:] for line in zip(slopes, offsets, strict=True)
    ):
        scale = max(1, slope)
        rows.append(
            (np.where(w >= j, w, 0) - slope * np.where(w >= j - 1, guesses - w, 0)) / m / scale
        )
        ends.append(offset / scale)
    solved = optimize.linprog(-1.0 * (w >= right), rows, ends, np.ones((1, guesses + 1)), [1])
    assert p_value_fdp(*counts, curve) == pytest.approx(-solved.fun, rel=1e-6)


def test_a_schedule_of_the_noise_is_audited_by_few_curves_on_the_safe_side() -> None:
    releases = [(0.8 + 0.02 * step, 0.1, 2) for step in range(25)]
    few = [_grouped(releases, end) for end in (min, max)]
    assert all(len(each) == 8 and sum(steps for *_, steps in each) == 50 for each in few)
    largest, true, least = (TradeOff.of_run(each) for each in (few[0], releases, few[1]))
    alphas = np.geomspace(1e-6, 0.9, 50)
    powers = [np.interp(alphas, *curve.outer.T) for curve in (largest, true, least)]
    assert (powers[0] >= powers[1] - 1e-4).all()
    assert (powers[1] >= powers[2] - 1e-4).all()
    assert 1 < largest.epsilon(1e-5) / true.epsilon(1e-5) < 1.1


def simulated(
    m: int, sigma: float, seed: int, q: float = 1.0, steps: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Scores of directions as canaries, and who took part."""
    generator = np.random.default_rng(seed)
    taken, scores = generator.random(m) < 0.5, np.zeros(m)
    for _ in range(steps):
        y = sigma * generator.standard_normal(m) + (taken & (generator.random(m) < q))
        scores += np.log1p(q * np.expm1((y - 0.5) / sigma**2))
    return scores, taken


def test_p_values_of_sound_runs() -> None:
    runs, m, sigma, delta = 3000, 100, 1.0, 1e-3
    curve, epsilon = TradeOff.of_run([(sigma, 1.0, 1)]), exact_epsilon(1 / sigma, delta)
    ranked = np.array(
        [
            taken[np.argsort(-scores)]
            for scores, taken in (simulated(m, sigma, s) for s in range(runs))
        ]
    )
    for called_in, called_out in ((int(a * m), int(b * m)) for a, b in GUESSES):
        right = ranked[:, :called_in].sum(axis=1) + (~ranked[:, m - called_out :]).sum(axis=1)
        guesses = called_in + called_out
        for p_of in (
            [p_value_fdp(v, guesses, m, curve) for v in range(guesses + 1)],
            [p_value_dp(v, guesses, m, epsilon, delta) for v in range(guesses + 1)],
        ):
            for level in (0.01, 0.05, 0.2, 0.5):
                share = float((np.array(p_of)[right] <= level).mean())
                assert share <= level + 3 * math.sqrt(level * (1 - level) / runs)


def audited(scores: Any, taken: Any, claimed: float = 4.4, **options: Any) -> Audit:
    return audit_scores(
        scores, taken, **{"delta": 1e-5, "releases": [(1.0, 1.0, 1)], "claimed": claimed} | options
    )


def test_leak_exceeds_the_claim() -> None:
    taken = np.arange(1000) < 500
    audit = audited(taken, taken, releases=RUN, claimed=1.83)
    assert audit.exceeds_claim
    assert audit.epsilon == audit.ceiling > 5
    assert audit.by_method["dp"] == epsilon_dp(1000, 1000, 1000, 1e-5, 0.05 / (2 * len(GUESSES)))
    assert "contradicts the claim" in str(audit)


def test_without_noise_nothing_exceeds() -> None:
    taken = np.arange(100) < 50
    audit = audited(taken, taken, math.inf, releases=[(0.0, 1.0, 1)])
    assert list(audit.by_method) == ["dp"]
    assert audit.p_value == 1
    assert not audit.exceeds_claim


def test_ties_do_not_look_at_who_took_part() -> None:
    audit = audited(np.zeros(1000), np.arange(1000) < 500)
    assert audit.epsilon < 1e-9


def test_rates_beside_their_bounds() -> None:
    scores, taken = simulated(4000, 1.0, seed=1)
    # KL(N(1, 1) ‖ N(0, 1)) = ½
    audit = audited(scores, taken, divergences=np.linspace(0.4, 0.6, 4000))
    for rate in audit.rates:
        threshold = np.sort(scores[~taken])[::-1][int(rate["fpr"] * (~taken).sum())]
        assert rate["tpr"] == (scores[taken] > threshold).mean()
        assert rate["bound"] == pytest.approx(float(largest_true_positive_rate(0.5, rate["fpr"])))
        assert rate["tpr"] < rate["bound"]
    assert audited(scores[:50], taken[:50]).rates[0]["bound"] is None


def test_refusals() -> None:
    all_refused(
        {
            "correct=3": lambda: p_value_dp(3, 2, 5, 1.0, 0.0),
            "guesses=9": lambda: p_value_fdp(3, 9, 5, randomised_response(1.0)),
            "NaN": lambda: audited([math.nan, 1.0], [True, False]),
            "one entry per canary": lambda: audited([1.0], [True, False]),
            "releases is empty": lambda: audited([1.0], [True], releases=[]),
        }
    )
