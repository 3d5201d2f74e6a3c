"""A run against a policy: which thresholds hold, and how many examples break the others.

Every rule takes the conservative end of what is known, and what is not known fails: an example that was never drawn, or
whose steps were not all measured, has not been spared, and has rules of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from torchfil.gate.policy import Policy, PolicyError, nearest
from torchfil.gate.relative_rules import (
    attribute_error_shares,
    exposed_share,
    gains_over_guessing,
    smallest_error_share,
)
from torchfil.gate.verdict import Verdict, everybody, measured, nobody
from torchfil.run.disparity import disparity_of, group_levels
from torchfil.run.saved_run import SavedRun
from torchfil.run.spared import is_spared
from torchfil.utils.errors import RunFileError

__all__ = ["check", "large_delta", "notes"]


def check(run: SavedRun, policy: Policy) -> list[Verdict]:
    """Every rule that the policy asks for, in the policy's order.

    Raises:
        PolicyError: It names an attribute that the run does not have.
        RunFileError: The run has no examples.
    """
    if not len(run):
        raise RunFileError("the run has no examples, so that every rule would hold; save a run after training")
    return [verdict for rule in _RULES for verdict in rule(run, policy)]


def notes(run: SavedRun) -> list[str]:
    """What a reader of the verdicts should know and no rule judges: choices that bounds and ε take as given.

    Example:
        >>> weights = np.array([1.0, 0.5, 1.0])
        >>> notes(SavedRun(about={}, ids=np.arange(3), columns={"clip_weight": weights}))
        ['1 example was trained with a smaller weight, of 3: bounds and ε take the weights as fixed']
    """
    found, count = [], int(is_spared(run).sum())
    if delta := large_delta(run.about.get("delta"), len(run)):
        found.append(delta)
    if count:
        were = "example was" if count == 1 else "examples were"
        found.append(
            f"{count:,} {were} trained with a smaller weight, of {len(run):,}: bounds and ε take the weights as fixed"
        )
    if run.about.get("kind") == "linear":
        weights = "; weights that were chosen from the data are taken as fixed" * ("sample_weight" in run.columns)
        found.append(f"a linear model’s release: closed forms, no ε; what is random is its noise alone{weights}")
    runs = (run.about.get("merged") or {}).get("runs")
    if runs is not None:
        found.append(f"means over {runs} runs: they speak of one release; several together leak more")
    choice = run.about.get("noise_choice")
    if choice is not None:
        found.append(f"σ was chosen by pilots, for this target: {choice.get('target')}; bounds and ε take σ as given")
    return found


def large_delta(delta: float | None, examples: int) -> str:
    """What is wrong with a δ of 1/n or more; "" for a smaller one, or where none is known.

    Who publishes one of n records, drawn at random, keeps to (0, 1/n)-differential privacy.

    Example:
        >>> large_delta(1e-5, 100), large_delta(0.1, 100)[:40]
        ('', 'δ = 0.1 is not below 1/100: publishing o')
    """
    if delta is None or delta * examples < 1:
        return ""
    return (
        f"δ = {delta:g} is not below 1/{examples}: publishing one record at random would keep to it, so ε says little. "
        "Save the run with a smaller δ"
    )


def _smallest_bound(run: SavedRun, policy: Policy) -> list[Verdict]:
    limit = policy.min_mse_bound
    if limit is None:
        return []
    known, low = measured(run), run.column("mse_bound_low")
    least = float(np.min(low[known], initial=math.inf))
    wrong = np.flatnonzero(known & ~(low >= limit))
    detail = "smallest MSE bound of unbiased attackers, lower end of its interval"
    return [Verdict("min_mse_bound", not len(wrong), limit, least, wrong, detail)]


def _share_of_concern(run: SavedRun, policy: Policy) -> list[Verdict]:
    limit, bound = policy.max_share_of_concern, policy.mse_bound_of_concern
    if limit is None or bound is None:
        return []
    known = measured(run)
    wrong = np.flatnonzero(known & ~(run.column("mse_bound_low") >= bound))
    share = len(wrong) / max(1, int(known.sum()))
    detail = f"share of the measured examples whose MSE bound (lower end) is under {bound:g}"
    return [Verdict("max_share_of_concern", share <= limit, limit, share, wrong, detail)]


def _attribute_errors(run: SavedRun, policy: Policy) -> list[Verdict]:
    verdicts = []
    for name, limit in policy.min_attribute_error.items():
        rule = f"min_attribute_error.{name}"
        if run.attributes is None:
            detail = "attributes were not tracked: make_private(track=('diagonal',))"
            verdicts.append(Verdict(rule, False, limit, None, everybody(run), detail))
            continue
        if name not in run.attributes.names:
            raise PolicyError(f"the run has no attribute {name!r}{nearest(name, run.attributes.names)}")
        if run.attributes.error_low is None:
            detail = "how far the errors of guesses may be off is not known: make_private(track=('diagonal',)) tells"
            verdicts.append(Verdict(rule, False, limit, None, everybody(run), detail))
            continue
        place = run.attributes.names.index(name)
        known, values = measured(run), run.attributes.error_low[:, place]
        wrong = np.flatnonzero(known & ~(values >= limit))
        least = float(np.min(values[known], initial=math.inf))
        unit = f" in {run.attributes.units[place]}" if run.attributes.units[place] else ""
        detail = f"smallest average error of unbiased guesses{unit}, lower end of its interval"
        verdicts.append(Verdict(rule, not len(wrong), limit, least, wrong, detail))
    return verdicts


def _guesses(run: SavedRun, policy: Policy) -> list[Verdict]:
    alpha = policy.at_false_positive_rate
    detail = f"largest true-positive rate of any attacker who is wrong {100 * alpha:g} % of the time, upper end"
    by_name = {question.name: question for question in run.questions}
    verdicts = []
    for name, limit in policy.max_true_positive_rate.items():
        if name not in by_name:
            remedy = nearest(name, list(by_name)) or ": make_private(…, questions={…}) keeps them"
            raise PolicyError(f"the run has no question {name!r}{remedy}")
        known, rates = measured(run), by_name[name].rate(alpha)
        wrong = np.flatnonzero(known & ~(rates <= limit))
        largest = float(np.max(rates[known], initial=0.0))
        verdicts.append(Verdict(f"max_true_positive_rate.{name}", not len(wrong), limit, largest, wrong, detail))
    return verdicts


def _epsilon(run: SavedRun, policy: Policy) -> list[Verdict]:
    limit = policy.max_epsilon
    if limit is None:
        return []
    epsilon = run.about.get("epsilon")
    passed = epsilon is not None and epsilon <= limit
    none = "a linear model's release has no accountant's ε: take the rule out for it"
    unknown = none if run.about.get("kind") == "linear" else "the run's ε is not known"
    detail = unknown if epsilon is None else f"ε at δ = {run.about.get('delta')}, for everybody"
    return [Verdict("max_epsilon", passed, limit, epsilon, nobody() if passed else everybody(run), detail)]


def _individual_epsilon(run: SavedRun, policy: Policy) -> list[Verdict]:
    limit = policy.max_individual_epsilon
    if limit is None:
        return []
    values = run.columns.get("epsilon")
    if values is None:
        detail = "individual ε was not computed"
        return [Verdict("max_individual_epsilon", False, limit, None, everybody(run), detail)]
    wrong = np.flatnonzero(~(values <= limit))
    largest = float(np.max(values, initial=0.0))
    detail = "largest individual ε (an estimate for these outputs)"
    return [Verdict("max_individual_epsilon", not len(wrong), limit, largest, wrong, detail)]


def _group_disparity(run: SavedRun, policy: Policy) -> list[Verdict]:
    limit = policy.max_group_disparity
    if limit is None:
        return []
    if not run.groups:
        return [Verdict("max_group_disparity", False, limit, None, nobody(), "the run was saved without groups")]
    return [_disparity(run, limit, policy.min_group_size, name) for name in run.groups]


def _disparity(run: SavedRun, limit: float, size: int, name: str) -> Verdict:
    rule, known = f"max_group_disparity ({name})", measured(run)
    names, codes = run.coded_group(name)
    levels = group_levels(run.column("fil")[known], codes[known], names.tolist(), size)
    found = disparity_of(levels)
    if found is None:
        detail = f"fewer than two groups of at least {size} measured examples, so the disparity is not known"
        return Verdict(rule, False, limit, None, nobody(), detail)

    # compared as products: a group with level 0 has no quotient
    worse = [label for label, level in levels.items() if not level <= limit * levels[found.least]]
    worse = [] if found.ratio == 1 and limit >= 1 else worse  # all alike, also where all are infinite
    rows = np.flatnonzero(np.isin(codes, [names.tolist().index(label) for label in worse]))
    detail = (
        f"typical FIL (geometric mean) of {found.most!r} over that of {found.least!r}, of groups of at least {size} "
        "measured examples"
    )
    return Verdict(rule, not worse, limit, found.ratio, rows, detail)


def _attacks(run: SavedRun, policy: Policy) -> list[Verdict]:
    """``min_attacks``: attacks that could have broken a bound; those that could not say nothing."""
    limit = policy.min_attacks
    if not limit:
        return []
    testable = sum(attack.testable for attack in run.attacks)
    detail = "attacks that saw the model, several times, and so could have broken a bound"
    untold = [f"{attack.name}: {attack.untestable or 'one trial'}" for attack in run.attacks if not attack.testable]
    if untold:
        detail += f"; not testable: {', '.join(untold)}"
    return [Verdict("min_attacks", testable >= limit, limit, testable, nobody(), detail)]


def _violated_bounds(run: SavedRun, policy: Policy) -> list[Verdict]:
    limit = policy.max_violated_bounds
    tested = [attack for attack in run.attacks if attack.testable]
    rows = [attack.rows[np.asarray(attack.violated, dtype=bool)] for attack in tested]
    broken = np.unique(np.concatenate(rows)) if rows else nobody()
    names = [attack.name for attack in tested if attack.violated.any()]
    detail = f"examples whose bound was beaten by {', '.join(names) or f'{len(tested)} testable attacks'}"
    return [Verdict("max_violated_bounds", len(broken) <= limit, limit, len(broken), broken, detail)]


def _spared(run: SavedRun, policy: Policy) -> list[Verdict]:
    limit = policy.max_share_spared
    if limit is None:
        return []
    rows = np.flatnonzero(is_spared(run))
    share = len(rows) / max(1, len(run))
    detail = "share of examples that were trained with a smaller weight (clip_weights)"
    return [Verdict("max_share_spared", share <= limit, limit, share, rows, detail)]


def _not_measured(run: SavedRun, policy: Policy) -> list[Verdict]:
    wrong = np.flatnonzero(~measured(run))
    share, limit = len(wrong) / max(1, len(run)), policy.max_share_not_measured
    detail = "share of examples about which the run says nothing (never drawn): not measured, not spared"
    return [Verdict("max_share_not_measured", share <= limit, limit, share, wrong, detail)]


def _seeded(run: SavedRun, policy: Policy) -> list[Verdict]:
    noise = (run.about.get("mechanism") or {}).get("noise")
    if noise is None:
        return []
    allowed, seeded = policy.allow_seeded_noise, noise == "seeded"
    rows = everybody(run) if seeded and not allowed else nobody()
    detail = f"whether noise and draws were seeded, as for a test, so that they can be subtracted (here: {noise})"
    return [Verdict("allow_seeded_noise", allowed or not seeded, int(allowed), int(seeded), rows, detail)]


def _missed(run: SavedRun, policy: Policy) -> list[Verdict]:
    missed = run.columns.get("missed")
    wrong = np.flatnonzero(missed > 0) if missed is not None else everybody(run)
    limit = policy.max_examples_missed
    detail = "examples in steps that were not measured: their bounds are no guarantees"
    return [Verdict("max_examples_missed", len(wrong) <= limit, limit, len(wrong), wrong, detail)]


_RULES: tuple[Callable[[SavedRun, Policy], list[Verdict]], ...] = (
    smallest_error_share,
    exposed_share,
    _smallest_bound,
    _share_of_concern,
    attribute_error_shares,
    _attribute_errors,
    gains_over_guessing,
    _guesses,
    _epsilon,
    _individual_epsilon,
    _group_disparity,
    _attacks,
    _violated_bounds,
    _spared,
    _not_measured,
    _missed,
    _seeded,
)
