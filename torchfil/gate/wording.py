"""Broken rules of a policy in words that need no training in machine learning."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

from torchfil.gate.verdict import Verdict, nobody, told_apart

__all__ = ["concerned", "in_words", "kind_and_subject"]


def kind_and_subject(rule: str) -> tuple[str, str]:
    """A rule's key in the policy, and the attribute, question or grouping that it is about; "" where there is none.

    Example:
        >>> kind_and_subject("max_gain_over_guessing (genotype)"), kind_and_subject("min_attribute_error.age")
        (('max_gain_over_guessing', 'genotype'), ('min_attribute_error', 'age'))
    """
    kind = re.match(r"\w+", rule)
    assert kind is not None
    return kind[0], rule[kind.end() :].strip(" .").removeprefix("(").removesuffix(")")


def concerned(broken: Sequence[Verdict]) -> np.ndarray:
    """The places of all examples that break one of the rules, ascending."""
    return np.unique(np.concatenate([nobody(), *(verdict.rows for verdict in broken)]))


def in_words(verdict: Verdict) -> str:
    """What a broken rule means: whom it concerns, what was found, what the policy says and which attacker is bound.

    Example:
        >>> in_words(Verdict("max_epsilon", False, 8.0, 12.5, np.arange(3), "ε at δ = 1e-5, for everybody"))
        'ε is 12.5; the policy allows 8 (every attacker).'
    """
    kind, subject = kind_and_subject(verdict.rule)
    if verdict.found is None:
        return f"Not known, and so not kept: {verdict.detail}."
    if kind not in _SENTENCES:
        limit, found = told_apart(verdict.limit, verdict.found)
        return f"{verdict.detail[:1].upper()}{verdict.detail[1:]}: {found}; the policy says {limit}."
    return _SENTENCES[kind](verdict, subject)


def _who(verdict: Verdict) -> str:
    return f"{verdict.offending:,} example{'s' if verdict.offending != 1 else ''}"


def _shares(verdict: Verdict, above: float = 0.0) -> tuple[str, str]:
    """Limit and value in per cent, told apart."""
    found = None if verdict.found is None else 100 * (verdict.found + above)
    limit, value = told_apart(100 * (verdict.limit + above), found)
    return f"{limit} %", f"{value} %"


def _untold(verdict: Verdict) -> str:
    """What a value of 0 means where it is the lower end of an interval."""
    return " (a low end of 0: one run does not tell how close)" if verdict.found == 0 else ""


def _of_several(verdict: Verdict) -> str:
    """That a number is the worst of several examples', not everybody's."""
    return ", in the worst case" if verdict.offending > 1 else ""


def _error_share(verdict: Verdict, subject: str) -> str:
    limit, found = _shares(verdict)
    return (
        f"An unbiased estimate of {_who(verdict)} could come as close as {found} of a blind guess's error"
        f"{_of_several(verdict)}{_untold(verdict)}; the policy asks for {limit}."
    )


def _share_exposed(verdict: Verdict, subject: str) -> str:
    limit, found = _shares(verdict)
    return (
        f"{found} of the examples could be estimated more closely than by a blind guess (without prior beliefs); the "
        f"policy allows {limit}."
    )


def _smallest_bound(verdict: Verdict, subject: str) -> str:
    limit, found = told_apart(verdict.limit, verdict.found)
    return (
        f"The MSE bound of {_who(verdict)} is too small, {found} at the least{_untold(verdict)}; the policy asks for "
        f"{limit} (unbiased attackers)."
    )


def _share_of_concern(verdict: Verdict, subject: str) -> str:
    limit, found = _shares(verdict)
    return f"{found} of the examples have an MSE bound of concern (unbiased attackers); the policy allows {limit}."


def _attribute_share(verdict: Verdict, subject: str) -> str:
    limit, found = _shares(verdict)
    worst = verdict.detail.rpartition("; ")[2]
    return (
        f"An unbiased estimate of an attribute of {_who(verdict)} could come as close as {found} of a blind guess's "
        f"error{_of_several(verdict)} ({worst}); the policy asks for {limit}."
    )


def _attribute_error(verdict: Verdict, subject: str) -> str:
    limit, found = told_apart(verdict.limit, verdict.found)
    return (
        f"An unbiased guess of “{subject}” of {_who(verdict)} may be off by no more than {found}"
        f"{_of_several(verdict)}; the policy asks for {limit}."
    )


def _gain(verdict: Verdict, subject: str) -> str:
    limit, found = _shares(verdict, above=0.5)
    return (
        f"Any attacker may guess “{subject}” of {_who(verdict)} right up to {found} of the time instead of 50 % "
        f"(between two equally likely answers); the policy allows {limit}."
    )


def _rate(verdict: Verdict, subject: str) -> str:
    limit, found = _shares(verdict)
    return (
        f"Any attacker may tell “{subject}” of {_who(verdict)} rightly in up to {found} of the runs, with few false "
        f"alarms; the policy allows {limit}."
    )


def _epsilon(verdict: Verdict, subject: str) -> str:
    limit, found = told_apart(verdict.limit, verdict.found)
    return f"ε is {found}; the policy allows {limit} (every attacker)."


def _disparity(verdict: Verdict, subject: str) -> str:
    limit, found = told_apart(verdict.limit, verdict.found)
    return f"By {subject}, groups leak unequally: {verdict.detail} is {found}; the policy allows {limit}."


def _attacks(verdict: Verdict, subject: str) -> str:
    untestable = verdict.detail.partition("; ")[2]
    why = f" ({untestable})" if untestable else ""
    return f"{verdict.found:g} attacks tested the bounds{why}; the policy asks for {verdict.limit:g}."


def _violated(verdict: Verdict, subject: str) -> str:
    return (
        f"An attack beat the bound of {_who(verdict)}: do not rely on any number here before the cause is found "
        f"({verdict.detail})."
    )


def _not_measured(verdict: Verdict, subject: str) -> str:
    limit, found = _shares(verdict)
    return (
        f"{found} of the examples ({verdict.offending:,}) were not measured: the run says nothing about them; the "
        f"policy allows {limit}."
    )


def _missed(verdict: Verdict, subject: str) -> str:
    return (
        f"{_who(verdict)} took part in steps that were not measured and leak more than shown; the policy allows "
        f"{verdict.limit:g}."
    )


def _seeded(verdict: Verdict, subject: str) -> str:
    return (
        "The noise was seeded, as for a test: whoever has the seed or a checkpoint can subtract it, and then nothing "
        "here holds. Train again without noise_seed= and noise_generator=."
    )


_SENTENCES: dict[str, Callable[[Verdict, str], str]] = {
    "min_error_share": _error_share,
    "max_share_exposed": _share_exposed,
    "min_mse_bound": _smallest_bound,
    "max_share_of_concern": _share_of_concern,
    "min_attribute_error_share": _attribute_share,
    "min_attribute_error": _attribute_error,
    "max_gain_over_guessing": _gain,
    "max_true_positive_rate": _rate,
    "max_epsilon": _epsilon,
    "max_group_disparity": _disparity,
    "min_attacks": _attacks,
    "max_violated_bounds": _violated,
    "max_share_not_measured": _not_measured,
    "max_examples_missed": _missed,
    "allow_seeded_noise": _seeded,
}
