"""Rules that compare what the model tells with a blind guess, which needs no model.

A threshold in the data's unit says nothing by itself: an error of 0.3 is small for a grey value between 0 and 1, and
large for nothing. An unbiased guess that is off by as much as a blind one tells an attacker nothing new.

* Inputs between a and b: always answering the middle is off by (b − a)/2 at most. The policy's ``blind_error`` is taken
  instead where it is given: for inputs that were scaled to deviation 1 it is 1.
* An attribute: ``attribute_spread`` of the policy, what is known of its standard deviation; otherwise as inputs.
* A question: two answers, equally likely, are guessed right half of the time.
"""

from __future__ import annotations

import math

import numpy as np

from torchfil.report.policy import Policy, PolicyError, nearest
from torchfil.report.saved_run import SavedRun
from torchfil.report.summary import blind_guess
from torchfil.report.verdict import Verdict, everybody, measured

__all__ = ["attribute_error_shares", "exposed_share", "gains_over_guessing", "smallest_error_share"]

_NO_BLIND_GUESS = "what a blind guess errs by is not known: save_run(input_range=…) or the policy’s blind_error tells"


def smallest_error_share(run: SavedRun, policy: Policy) -> list[Verdict]:
    """``min_error_share``: nobody's least error is a smaller share of a blind guess's."""
    limit, blind = policy.min_error_share, _blind_error(run, policy)
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
    """``max_share_exposed``: of those measured, how many can be guessed better than blindly."""
    limit, blind = policy.max_share_exposed, _blind_error(run, policy)
    if limit is None:
        return []
    if blind is None:
        return [Verdict("max_share_exposed", False, limit, None, everybody(run), _NO_BLIND_GUESS)]
    known = measured(run)
    exposed = np.flatnonzero(known & ~(run.column("mse_bound_low") >= blind**2))
    share = len(exposed) / max(1, int(known.sum()))
    detail = f"share of the measured examples whose least error (lower end) is under a blind guess's, {blind:.3g}"
    return [Verdict("max_share_exposed", share <= limit, limit, share, exposed, detail)]


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
    inputs = _blind_error(run, policy)
    blind = [policy.attribute_spread.get(name, inputs) for name in run.attributes.names]
    unknown = [name for name, spread in zip(run.attributes.names, blind, strict=True) if spread is None]
    if unknown:
        detail = (
            f"the spread of {unknown[0]!r} is not known: attribute_spread in the policy, or save_run(input_range=…)"
        )
        return [Verdict(rule, False, limit, None, everybody(run), detail)]

    known = measured(run)
    shares = run.attributes.error_low / np.asarray(blind, dtype=np.float64)  # [n, k]
    wrong = np.flatnonzero(known & ~(shares >= limit).all(axis=1))
    least = shares[known].min(axis=0, initial=math.inf)
    worst = int(np.argmin(np.where(np.isnan(least), -math.inf, least)))
    detail = (
        f"least error of unbiased guesses (lower end) over that of blind ones, of {len(blind)} attributes; the "
        f"worst is {run.attributes.names[worst]!r}"
    )
    return [Verdict(rule, not len(wrong), limit, float(least[worst]), wrong, detail)]


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
        gains = question.success() - 0.5
        wrong = np.flatnonzero(known & ~(gains <= limit))
        most = float(np.max(gains[known], initial=0.0))
        detail = (
            f"how much more often than 50 % any attacker tells the true answer to {question.name!r} from another, "
            "equally likely one (upper end)"
        )
        rule = f"max_gain_over_guessing ({question.name})"
        verdicts.append(Verdict(rule, not len(wrong), limit, most, wrong, detail))
    return verdicts


def _blind_error(run: SavedRun, policy: Policy) -> float | None:
    """What a blind guess of an input is off by, in the inputs' unit; None: not known."""
    if policy.blind_error is not None:
        return policy.blind_error
    square = blind_guess(run.about)
    return None if square is None else math.sqrt(square)
