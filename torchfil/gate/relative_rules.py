"""Rules that compare what the model tells with a blind guess, which needs no model.

What a blind guess errs by, and who is exposed, is said in :mod:`torchfil.run.baselines`; the policy's
``blind_error`` and ``attribute_spread`` go before what the run knows.
"""

from __future__ import annotations

import math

import numpy as np

from torchfil.gate.policy import Policy, PolicyError, nearest
from torchfil.gate.verdict import Verdict, everybody, measured
from torchfil.run.baselines import blind_error_of_inputs, blind_errors, exposed_examples, gain_over_guessing
from torchfil.run.saved_run import SavedRun

__all__ = ["attribute_error_shares", "exposed_share", "gains_over_guessing", "smallest_error_share"]

_NO_BLIND_GUESS = "what a blind guess errs by is not known: save_run(input_range=…) or the policy’s blind_error tells"
_AT_ONCE = 2**16  # rows whose attributes are in memory together


def smallest_error_share(run: SavedRun, policy: Policy) -> list[Verdict]:
    """``min_error_share``: nobody's least error is a smaller share of a blind guess's."""
    limit, blind = policy.min_error_share, blind_error_of_inputs(run, policy.blind_error)
    if limit is None:
        return []
    if blind is None:
        return [Verdict("min_error_share", False, limit, None, everybody(run), _NO_BLIND_GUESS)]
    shares = np.sqrt(run.column("mse_bound_low")) / blind
    wrong = np.flatnonzero(measured(run) & ~(shares >= limit))
    least = float(np.min(shares[measured(run)], initial=math.inf))
    detail = f"least error of an unbiased guess (lower end) over that of a blind guess, {blind:.3g}"
    return [Verdict("min_error_share", not len(wrong), limit, least, wrong, detail)]


def exposed_share(run: SavedRun, policy: Policy) -> list[Verdict]:
    """``max_share_exposed``: of those measured, how many can be estimated more closely than by a blind guess."""
    limit = policy.max_share_exposed
    if limit is None:
        return []
    run.column("mse_bound_low")  # here no estimate stands in for the lower end
    exposed = exposed_examples(run, policy.blind_error)
    if exposed is None:
        return [Verdict("max_share_exposed", False, limit, None, everybody(run), _NO_BLIND_GUESS)]
    share = int(exposed.sum()) / max(1, int(measured(run).sum()))
    blind = blind_error_of_inputs(run, policy.blind_error)
    detail = f"share of the measured examples whose least error (lower end) is under a blind guess's, {blind:.3g}"
    return [Verdict("max_share_exposed", share <= limit, limit, share, np.flatnonzero(exposed), detail)]


def attribute_error_shares(run: SavedRun, policy: Policy) -> list[Verdict]:
    """``min_attribute_error_share``: of every attribute, nobody's least error is a smaller share of a blind guess's."""
    limit = policy.min_attribute_error_share
    if limit is None:
        return []
    rule = "min_attribute_error_share"
    if run.attributes is None or run.attributes.error_low is None:
        missing = "attributes were not tracked" if run.attributes is None else "how far attributes are off is not known"
        detail = f"{missing}: make_private(track=('diagonal',)), or take the rule out"
        return [Verdict(rule, False, limit, None, everybody(run), detail)]
    for name in policy.attribute_spread:
        if name not in run.attributes.names:
            raise PolicyError(
                f"attribute_spread: the run has no attribute {name!r}{nearest(name, run.attributes.names)}"
            )

    # by attribute its own spread; one without fails, for nobody knows what its error means
    blind = blind_errors(run, policy.attribute_spread, policy.blind_error)
    unknown = np.flatnonzero(np.isnan(blind))
    if len(unknown):
        name = run.attributes.names[unknown[0]]
        detail = f"the spread of {name!r} is not known: attribute_spread in the policy, or save_run(input_range=…)"
        return [Verdict(rule, False, limit, None, everybody(run), detail)]

    wrong, least = _too_close(run, blind, limit)
    worst = int(np.argmin(np.where(np.isnan(least), -math.inf, least)))
    detail = (
        f"least error of unbiased guesses (lower end) over that of blind ones, of {len(blind)} attributes; the "
        f"worst is {run.attributes.names[worst]!r}"
    )
    return [Verdict(rule, not len(wrong), limit, float(least[worst]), wrong, detail)]


def _too_close(run: SavedRun, blind: np.ndarray, limit: float) -> tuple[np.ndarray, np.ndarray]:
    """Who has an attribute whose error is under ``limit`` times the blind guess's, and the least share of each, [k]."""
    assert run.attributes is not None
    assert run.attributes.error_low is not None
    known, least = measured(run), np.full(len(blind), math.inf)
    wrong = np.zeros(len(run), dtype=bool)
    for start in range(0, len(run), _AT_ONCE):
        rows = slice(start, start + _AT_ONCE)
        errors = np.asarray(run.attributes.error_low[rows], dtype=np.float64)[known[rows]]
        with np.errstate(divide="ignore", invalid="ignore"):
            shares = np.where(blind == 0, math.inf, errors / blind)  # [rows, k]; nothing is left to guess at 0
        wrong[np.flatnonzero(known[rows]) + start] = ~(shares >= limit).all(axis=1)
        least = np.minimum(least, shares.min(axis=0, initial=math.inf))
    return np.flatnonzero(wrong), least


def gains_over_guessing(run: SavedRun, policy: Policy) -> list[Verdict]:
    """``max_gain_over_guessing``: of every question, how much more often than blindly any attacker is right."""
    limit = policy.max_gain_over_guessing
    if limit is None:
        return []
    if not run.questions:
        detail = "the run kept no question: make_private(…, questions={…}) keeps them, or take the rule out"
        return [Verdict("max_gain_over_guessing", False, limit, None, everybody(run), detail)]
    known, verdicts = measured(run), []
    for question in run.questions:
        gains = gain_over_guessing(question)
        wrong = np.flatnonzero(known & ~(gains <= limit))
        most = float(np.max(gains[known], initial=0.0))
        detail = (
            f"how much more often than 50 % any attacker tells the true answer to {question.name!r} from another, "
            "equally likely one (upper end)"
        )
        rule = f"max_gain_over_guessing ({question.name})"
        verdicts.append(Verdict(rule, not len(wrong), limit, most, wrong, detail))
    return verdicts
