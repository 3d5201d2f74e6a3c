"""The same scores, given to jax_privacy's auditor at an explicit threshold (``make
test-audit``).
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from torchfil.audit.bounds import TradeOff, _possible, epsilon_dp, p_value_dp

auditing = pytest.importorskip("jax_privacy.auditing")


@pytest.mark.parametrize("delta", [1e-9, 1e-5, 1e-3])
@pytest.mark.parametrize(("threshold", "m"), [(-9.0, 300), (0.5, 300), (2.0, 1000), (3.0, 5000)])
def test_one_sided_audits_agree(threshold: float, m: int, delta: float) -> None:
    """P-values to 1e-10 at every ε.

    Its public method tells ε alone, found to 1e-6, and has r₋ = 0.
    """
    generator = np.random.default_rng(m)
    taken = generator.random(m) < 0.5
    scores = generator.standard_normal(m) + 2 * taken
    called = scores >= threshold
    counts = int((called & taken).sum()), int(called.sum()), m
    for epsilon in (0.0, 0.5, 1.0, 2.0, 4.0, 8.0):
        theirs = auditing._one_run_p_value(m, counts[1], counts[0], epsilon, delta)
        assert p_value_dp(*counts, epsilon, delta) == pytest.approx(theirs, rel=1e-10, abs=1e-10)

    auditor = auditing.CanaryScoreAuditor(scores[taken], scores[~taken])
    theirs = auditor.epsilon_one_run(0.05, delta, threshold_strategy=auditing.Explicit(threshold))
    assert epsilon_dp(*counts, delta, 0.05) == pytest.approx(theirs, abs=2e-6)


@pytest.mark.parametrize("counts", [(870, 1000, 1000), (95, 100, 1000), (300, 300, 300)])
def test_f_dp_audits_agree_for_a_gaussian(counts: tuple[int, int, int]) -> None:
    """Its ε is that of one Gaussian release without sampling: a little more ε is possible, a little
    less is not.
    """
    right, guesses, m = counts
    theirs = auditing._epsilon_one_run_fdp(0.0, m, guesses, right, 0.05, 1e-5)
    assert 0.5 < theirs < math.inf
    for share, possible in ((0.99, False), (1.01, True)):
        sigma = auditing.dp_accounting.get_sigma_gaussian(share * theirs, 1e-5)
        assert _possible(0.05, *counts, TradeOff.of_run([(sigma, 1.0, 1)])) == possible
