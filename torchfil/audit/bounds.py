"""What one run with canaries shows about ε: lower bounds, p-values and the trade-off curve of the
run.

Each of m canaries takes part with probability ½, on its own. After the run somebody says "in" of
those with the highest scores and "out" of those with the lowest, r guesses in all, of which W are
right. A run that keeps its promise allows few right guesses. **Who takes part, the batches and the
noise are random; it is one run.** Two tests say how few.

* ``p_value_dp`` (Steinke, Nasr & Jagielski 2023) tests (ε, δ)-DP, whatever the mechanism.
* ``p_value_fdp`` (Mahloujifar, Melis & Chaudhuri 2025) tests a whole trade-off curve, that of the
  accountant's releases. An ε from it is the ε of the same run with another σ: it assumes that only
  the noise differs.

An ε that is rejected bounds the true one from below. It is never evidence of protection: the
canaries may be poor, the scores may be poor, and m canaries cannot show more than a ceiling. The
sets of guesses are fixed before anybody looks at who took part, and both levels are divided by the
number of tests (Bonferroni). The four sets in ``GUESSES`` were chosen on 47 simulated settings
(those below, and 100 steps), where each is a mean over 4 or 12 runs. There they reach 97 % of the
best of 14 sets on average, 74 % in the worst setting, which flatters them a little: the same runs
chose them. At q = 0.05, the correction costs 12 to 26 % of the f-DP end where 2 or more is claimed,
compared with the better one of two single sets at 95 %.

What to expect: audited ε, mean over fresh sound runs (10 for m = 1,000, 4 for 10,000; directions,
likelihood ratios, 1,000 steps, δ = 1e-5, 95 %; standard deviation 0.05 to 0.36), at sampling rate q
= 0.01, 0.05, 0.2.

    claimed ε       1                   2                   4                   8
    m = 1,000       0.19, 0.27, 0.24    0.65, 0.68, 0.76    1.18, 1.68, 1.81    2.33, 3.42, 3.77
    m = 10,000      0.51, 0.52, 0.55    1.07, 1.11, 1.10    1.72, 2.04, 2.11    3.04, 4.30, 4.57

With half the noise that is accounted for (4 runs each), the audit shows about the claimed ε, but
one run of 96 had a p-value below 0.001: at 99.9 % only a gross leak is contradicted. Replaying
steps finds such faults; this need not.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import special, stats

from torchfil.bounds import rero
from torchfil.guessing import largest_true_positive_rate

Releases = Sequence[tuple[float, float, int]]
# shares of the canaries called in and out
GUESSES = ((0.5, 0.5), (0.1, 0.1), (0.05, 0.05), (0.02, 0.0))
RATES = (0.01, 0.05, 0.1)  # of false positives
_GROUPS = 8  # of σ, if a scheduler changes it
_LOG_FACTORS = (-2.4, 4.76)  # of σ: σ/11 to 117 σ, in steps of 1.4 % by 9 halvings
_ENDS = np.geomspace(1e-9, 0.1, 370)
_GRID = np.concatenate([_ENDS, np.linspace(0.11, 0.89, 79), 1 - _ENDS[::-1]])


def p_value_dp(correct: int, guesses: int, canaries: int, epsilon: float, delta: float) -> float:
    """How likely so many right guesses are, at most, if the run is (ε, δ)-DP.

    With X ~ Bin(r, e^ε/(1 + e^ε)): P[W ≥ v] ≤ P[X ≥ v] + 2mδ·max_{1≤i≤v} P[v − i ≤ X < v]/i.

    Args:
        correct: v, the number of right guesses.
        guesses: r, fixed before the run or chosen without looking at who took part.
        canaries: m, those on whom nothing was guessed included.
        epsilon: ε ≥ 0.
        delta: δ of the claim.

    Example:
        >>> p_value_dp(10, 10, 10, epsilon=0.0, delta=0.0) == 2**-10
        True
    """
    _check_counts(correct, guesses, canaries)
    p = special.expit(epsilon)
    # P[v − i ≤ X < v], [i]
    below = np.cumsum(stats.binom.pmf(np.arange(correct - 1, -1, -1), guesses, p))
    worst = float(np.max(below / np.arange(1, correct + 1), initial=0.0))
    return min(1.0, float(stats.binom.sf(correct - 1, guesses, p)) + 2 * canaries * delta * worst)


def epsilon_dp(correct: int, guesses: int, canaries: int, delta: float, level: float) -> float:
    """The largest ε with :func:`p_value_dp` ≤ level, 0 if there is none: at that level, ε is
    larger.

    Example:
        >>> round(
        ...     epsilon_dp(1000, 1000, 1000, delta=1e-5, level=0.05), 2
        ... )  # more than this 1,000 canaries never show
        5.78
    """
    return _last(
        lambda epsilon: p_value_dp(correct, guesses, canaries, epsilon, delta) <= level, 0.0, 64.0
    )[0]


@dataclass(frozen=True, eq=False)
class TradeOff:
    """A concave curve F: P(E) ≤ F(P'(E)) for every event E, P and P' with and without one person,
    either way round.

    F is piecewise linear and never below the true curve; F = 1 − f for the trade-off function f.
    One way round is :func:`torchfil.bounds.rero`, F₁(α) = sup {P_with(E) : P_without(E) ≤ α}.
    Taking complements, the other way round is 1 − F₁⁻¹(1 − α): a point (α, β) becomes (1 − β, 1 −
    α). F is the concave hull of both, because the tests average over people and directions. Between
    the points of the grid, F₁ is concave and so below the extended chords of the neighbouring
    intervals. Both ends of an interval of width Δ are raised by Δ·(slope before − slope after)/4,
    the most that these lines rise above its own chord. To the left of the grid F is its first value
    at least, to the right 1.

    Attributes:
        outer: The vertices (α, F(α)) from (0, 0) to (1, 1), [vertices, 2]; the second is (0, F(0)).
        inner: Points on or below the true curves, [points, 2].

    Example:
        >>> curve = TradeOff.of_run([(1.0, 0.01, 1000)])
        >>> round(curve.epsilon(1e-5), 2), round(float(np.interp(0.01, *curve.outer.T)), 3)
        (1.83, 0.029)
    """

    outer: np.ndarray
    inner: np.ndarray

    @classmethod
    def of_run(cls, releases: Releases, scale: float = 1.0) -> TradeOff:
        """The curve of releases (σ, q, steps) under Poisson sampling, with all σ multiplied by
        ``scale``.
        """
        if not len(releases) > 0:
            raise ValueError(
                "releases is empty: nothing was released, so there is nothing to audit"
            )
        sigma, q, steps = zip(*releases, strict=True)
        bracket = rero(
            _GRID.tolist(),
            q=q,
            noise_multiplier=[scale * s for s in sigma],
            steps=steps,
            tolerance=0.02,
        )
        low, high = bracket.low.numpy(), bracket.high.numpy()

        # the slope is at most that of the ray from 0, and at least 0
        slopes = np.concatenate([[high[0] / _GRID[0]], np.diff(high) / np.diff(_GRID), [0.0]])
        above = np.diff(_GRID) * np.maximum(slopes[:-2] - slopes[2:], 0) / 4
        raised = (high + np.maximum(np.append(above, 0), np.append(0, above))).clip(max=1)
        ends = [[0, raised[0]], [_GRID[-1], 1], [1, 1]]
        outer, inner = (_both_ways(np.stack([_GRID, power], axis=1)) for power in (raised, low))
        hull = _concave_hull(np.concatenate([outer, _both_ways(np.array(ends))]))
        return cls(hull, inner[inner[:, 0] > 1e-12])  # below that, 1 − power is rounding

    def epsilon(self, delta: float) -> float:
        """The ε with sup_α F(α) − e^ε α = δ, from the inner points: at most, and to 0.1 % or so,
        that of the run.
        """
        alpha, power = self.inner.T
        return math.log(max(1.0, float(((power - delta) / alpha).max())))


def _grouped(releases: Releases, end: Callable[..., float]) -> Releases:
    """The same releases, those with about the same σ given the smallest or largest one: a curve
    costs 0.1 s for each σ.

    With ``end=min`` the curve is never below that of the run, with ``end=max`` never above it.
    """
    logs, groups = np.log([sigma for sigma, *_ in releases]), defaultdict[Any, list[Any]](list)
    places = np.digitize(
        logs, np.linspace(min(logs, default=1), max(logs, default=1), _GROUPS)
    ).tolist()
    for place, (sigma, q, steps) in zip(places, releases, strict=True):
        groups[q, place].append((sigma, steps))
    parts = [(q, *zip(*each, strict=True)) for (q, _), each in groups.items()]
    return [(end(sigmas), q, sum(steps)) for q, sigmas, steps in parts]


def _both_ways(points: np.ndarray) -> np.ndarray:
    return np.concatenate([points, 1 - points[:, ::-1]])


def _concave_hull(points: np.ndarray) -> np.ndarray:
    """The upper hull's vertices from left to right, [vertices, 2], after the lowest of the leftmost
    points.
    """
    points, below = np.unique(points, axis=0), np.array([True])
    while below.any():  # below the line between their neighbours, so they are no vertices
        dx, dy = np.diff(points, axis=0).T
        below = dy[:-1] * dx[1:] <= dy[1:] * dx[:-1]
        points = np.delete(points, 1 + np.flatnonzero(below), axis=0)
    return points


def p_value_fdp(correct: int, guesses: int, canaries: int, curve: TradeOff) -> float:
    """How likely so many right guesses are, at most, if the run's trade-off curve is F or less.

    Let p_i = P[i right of r guesses]. Flip who takes part for one canary; on the average over
    canaries and their bits, Σ_{i≥j} (i/m) p_i ≤ F(Σ_{i≥j} ((r − i + 1)/m) p_{i−1}) for every j,
    because F is concave (Jensen). The p-value is the largest τ = P[W ≥ v] that all these allow (a
    linear program). Its solution: mass above v may move down to v, and mass that no inequality
    needs may move down by one, which lowers left sides and raises right sides. So all of τ is at v,
    each p_{i−1} is the least that the inequality of i allows, and τ is possible if their sum is at
    most 1.

    Args:
        correct: v, the number of right guesses.
        guesses: r, fixed before the run or chosen without looking at who took part.
        canaries: m, those on whom nothing was guessed included.
        curve: F.

    Returns:
        The p-value, by bisection to 1e-10 of itself and not below 9e-13.
    """
    _check_counts(correct, guesses, canaries)
    return math.exp(
        _last(lambda x: _possible(math.exp(x), correct, guesses, canaries, curve), -27.7, 0.0)[1]
    )


def _last(
    holds: Callable[[float], bool], low: float, high: float, halvings: int = 40
) -> tuple[float, float]:
    """Neighbours between which the answer changes from yes to no, by bisection.

    The ends are not asked.
    """
    for _ in range(halvings):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low, high


def _possible(tau: float, correct: int, guesses: int, canaries: int, curve: TradeOff) -> bool:
    """Whether P[W ≥ correct] can be τ."""
    alphas, powers = curve.outer.T.tolist()  # numpy's scalars are slow in loops
    right, wrong, place = correct * tau / canaries, (guesses - correct) * tau / canaries, 1
    for i in range(correct, 0, -1):
        while right > powers[place]:  # the last one is 1
            place += 1
        part = (powers[place] - right) / (powers[place] - powers[place - 1])
        needed = alphas[place] - part * (alphas[place] - alphas[place - 1])  # F⁻¹(right)
        if needed <= wrong:
            break  # nothing changes any more
        right += (needed - wrong) * (i - 1) / (guesses - i + 1)
        wrong = needed
        if right + wrong > guesses / canaries:
            return False
    return True


def _check_counts(correct: int, guesses: int, canaries: int) -> None:
    if not 0 <= correct <= guesses <= canaries:
        raise ValueError(f"0 ≤ {correct=} ≤ {guesses=} ≤ {canaries=} must hold")


@dataclass(frozen=True)
class Audit:
    """What one run's canaries show about ε; ``print(audit)`` says it in sentences.

    Attributes:
        epsilon: The lower end of ε at ``confidence``: the larger one of both methods, corrected for
            all tests.
        by_method: Each method's own, "dp" and "fdp" (corrected, too); without noise "dp" alone.
        claimed: ε of the run's accountant; infinity without noise.
        delta: δ of both.
        p_value: How likely such guesses are, at most, if the claim holds; corrected. 1 if no finite
            ε is claimed.
        exceeds_claim: Whether the claim is contradicted: p_value < 0.001, so that sound runs do not
            fail.
        num_canaries: m.
        kind: What the canaries are.
        confidence: Of ``epsilon``.
        ceiling: The ``epsilon`` that the audit would show if every guess were right.
        rates: At some false-positive rates "fpr": the true-positive rate "tpr" that was seen over
            all canaries, and "bound", the largest that the canaries' mean D allows on the average
            over runs (None: D was not given).
    """

    epsilon: float
    by_method: dict[str, float]
    claimed: float
    delta: float
    p_value: float
    exceeds_claim: bool
    num_canaries: int
    kind: str
    confidence: float
    ceiling: float
    rates: list[dict[str, float | None]]

    def as_dict(self) -> dict[str, object]:
        """All numbers, for JSON as run files write it (an infinite ε is Infinity)."""
        return asdict(self)

    def __str__(self) -> str:
        verdict = (
            "does not contradict the claim"
            if self.claimed < math.inf
            else "has no finite claim to contradict"
        )
        verdict = (
            "contradicts the claim: the run reveals more than it accounts for"
            if self.exceeds_claim
            else verdict
        )
        least = math.floor(100 * self.epsilon) / 100  # a lower bound is not rounded up
        return (
            f"claimed ε {self.claimed:.3g}, audited ε ≥ {least:g} "
            f"({self.num_canaries:,} canaries)\n"
            f"The audit {verdict} (δ = {self.delta:g}, p = {self.p_value:.2g}). "
            f"Each canary ({self.kind}) took part with chance ½.\n"
            f"At {100 * self.confidence:g} % confidence, the run's ε is at least {least:g}.\n"
            "Who takes part, batches and noise are random, and this is one run. "
            "Were every guess right, the audit would show\n"
            f"ε ≥ {self.ceiling:.2g}, and it cannot show more. "
            "A low number is no evidence of protection: others may learn more."
        )


def audit_scores(
    scores: ArrayLike,
    taken: ArrayLike,
    *,
    delta: float,
    releases: Releases,
    claimed: float,
    kind: str = "directions",
    divergences: Any = None,
    confidence: float = 0.95,
) -> Audit:
    """Compare guesses from the scores with who took part.

    Everything is fixed before ``taken`` is looked at.

    Args:
        scores: [canaries], higher for those that look as if they took part; none is NaN.
        taken: Which of them took part, [canaries] bools, drawn with probability ½ each.
        delta: δ.
        releases: (σ, q, steps) of each part of the run, from its accountant.
        claimed: The accountant's ε at δ; infinity if there is none, and then nothing exceeds it.
        kind: What the canaries are, for the sentences.
        divergences: D of each canary's membership, [canaries] (:mod:`torchfil.guessing`); None: not
            known.
        confidence: Of the lower end of ε.

    Example:
        >>> taken = np.arange(1000) % 2 == 0
        >>> audit = audit_scores(
        ...     1.0 * taken, taken, delta=1e-5, releases=[(1.0, 0.01, 1000)], claimed=2.0
        ... )
        >>> audit.exceeds_claim, audit.epsilon == audit.ceiling
        (True, True)
    """
    scores, taken, m = np.asarray(scores, dtype=float), np.asarray(taken, dtype=bool), len(scores)
    if not (scores.shape == taken.shape == (m,) and m > 0 and not np.isnan(scores).any()):
        raise ValueError(
            f"scores {scores.shape} and taken {taken.shape} must hold one entry per canary, and "
            "no score be NaN"
        )
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence} must be above 0 and below 1, for example 0.95")

    # equal scores are ordered by chance, not by place: those that took part may all stand first
    order = np.random.default_rng(0).permutation(m)
    ranked = taken[order[np.argsort(-scores[order], kind="stable")]]
    sizes = [(int(called_in * m), int(called_out * m)) for called_in, called_out in GUESSES]
    counts = [
        (int(ranked[:top].sum() + (~ranked[m - low :]).sum()), top + low) for top, low in sizes
    ]
    tests = 2 * len(GUESSES)
    curve = cache(
        lambda log_factor, end=min: TradeOff.of_run(_grouped(releases, end), math.exp(log_factor))
    )

    def lower_ends(counts: list[tuple[int, int]]) -> dict[str, float]:
        """The largest ε that each method rejects by one of the counts (right guesses, guesses)."""
        level = (1 - confidence) / tests
        ends = {"dp": max(epsilon_dp(*each, m, delta, level) for each in counts)}
        if all(sigma > 0 for sigma, *_ in releases):
            # more noise is rejected more easily; of two neighbours, the one that is rejected has
            # less ε
            noise = _last(
                lambda x: all(_possible(level, *each, m, curve(x)) for each in counts),
                *_LOG_FACTORS,
                9,
            )[1]
            ends["fdp"] = curve(noise, max).epsilon(delta) if noise < _LOG_FACTORS[1] else 0.0
        return ends

    by_method, ceilings = (
        lower_ends(counts),
        lower_ends([(guesses, guesses) for _, guesses in counts]),
    )
    p_values = [p_value_dp(*each, m, claimed, delta) for each in counts]  # 1 if ε is infinite
    p_values += [p_value_fdp(*each, m, curve(0.0)) for each in counts] if claimed < math.inf else []
    p_value = min(1.0, tests * min(p_values))

    # kl is convex in both rates, so the mean of D bounds the mean of the rates
    wrong = np.cumsum(~ranked)
    seen = [
        float(ranked[wrong <= int(rate * wrong[-1])].sum() / max(1, ranked.sum())) for rate in RATES
    ]
    bounds = (
        [None] * 3
        if divergences is None
        else largest_true_positive_rate(np.mean(divergences), RATES).tolist()
    )
    rates = [
        {"fpr": fpr, "tpr": tpr, "bound": bound}
        for fpr, tpr, bound in zip(RATES, seen, bounds, strict=True)
    ]
    epsilon, ceiling = max(by_method.values()), max(ceilings.values())
    return Audit(
        epsilon,
        by_method,
        claimed,
        delta,
        p_value,
        p_value < 0.001,
        m,
        kind,
        confidence,
        ceiling,
        rates,
    )
