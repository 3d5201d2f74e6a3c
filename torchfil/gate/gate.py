"""A run against a policy: which thresholds hold, how many examples break the others, and what would
help.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from torchfil.gate.policy import Policy, PolicyError, nearest, parse_policy, preset
from torchfil.gate.rules import RULES, Verdict, audit_in_words
from torchfil.run.saved_run import SavedRun, jumps_of, value_at
from torchfil.run.statistics import is_spared
from torchfil.run.unit import counted
from torchfil.utils.errors import RunFileError

__all__ = [
    "check",
    "concerned",
    "decision",
    "default_policy",
    "in_words",
    "large_delta",
    "notes",
    "template",
]
__all__ += ["OUTCOMES", "Outcome", "outcome", "public", "worst_of"]

_ROUNDING = 1e-5  # of numbers in float32


@dataclass(frozen=True)
class Outcome:
    """How a gate ends.

    Attributes:
        word: Its name.
        code: The exit code.
        decision: What is advised, in three words; "": nothing.
        meaning: When it comes to that.
    """

    word: str
    code: int
    decision: str
    meaning: str


OUTCOMES = (
    Outcome(
        "passed",
        0,
        "May be released",
        "The run keeps every rule at the level error. Warnings may be shown.",
    ),
    Outcome("failed", 1, "Do not release", "The run breaks a rule at the level error."),
    Outcome("bad input", 2, "", "A file or an option cannot be used. Nothing was judged."),
    Outcome(
        "cannot tell",
        3,
        "Cannot tell yet",
        "No rule at the level error is broken, but one cannot be answered.",
    ),
)


def check(run: SavedRun, policy: Policy, baseline: SavedRun | None = None) -> list[Verdict]:
    """Every rule that the policy asks for, in the order of the template.

    Args:
        run: A saved run.
        policy: Thresholds.
        baseline: An earlier run, for ``max_worsening``.

    Raises:
        PolicyError: It names an attribute that the run does not have, or gives a level to what is
            no rule.
        RunFileError: The run has no examples, or numbers that no training ends with.
    """
    for key in policy.levels.keys() - RULES:
        raise PolicyError(f"levels: {key!r} is no rule{nearest(key, list(RULES))}")
    if not len(run):
        raise RunFileError(
            "the run has no examples, so that every rule would hold; save a run after training"
        )
    _check_possible(run)
    return [verdict for rule in RULES.values() for verdict in rule.measure(run, policy, baseline)]


def _check_possible(run: SavedRun) -> None:
    """Raise for numbers that contradict each other, so that no rule holds because of them."""
    about, columns, of = run.about, run.columns, run.attributes
    finite = about.get("epsilon") is not None and about["epsilon"] < math.inf
    pairs = [(own.divergence, own.divergence_high) for own in run.questions]
    if {"mse_bound", "mse_bound_low"} <= columns.keys():
        pairs.append((columns["mse_bound_low"], columns["mse_bound"]))
    if of is not None and of.error_low is not None:
        pairs.append((of.error_low, of.error))
    contradictions = {
        "two examples have one id": len(set(np.asarray(run.ids).tolist())) < len(run),
        "it has a finite ε without noise": finite
        and value_at(about, "mechanism.noise_multiplier") == 0,
        "it has ε without δ": finite and about.get("delta") is None,
        "an interval does not contain its estimate": any(
            bool((np.asarray(low) > (1 + _ROUNDING) * np.asarray(high)).any())
            for low, high in pairs
        ),
    }
    for what, holds in contradictions.items():
        if holds:
            raise RunFileError(f"the run cannot be true: {what}; save it again after training")


def concerned(broken: Sequence[Verdict]) -> np.ndarray:
    """The places of all examples that break one of the rules, ascending."""
    return np.unique(np.concatenate([np.arange(0), *(verdict.rows for verdict in broken)]))


def in_words(verdict: Verdict) -> str:
    """What a broken rule means: whom it concerns, what was found, what the policy says and which
    attacker is bound.

    Example:
        >>> in_words(
        ...     Verdict("max_epsilon", False, 8.0, 12.5, np.arange(3), "ε", note="at δ = 1e-5")
        ... )
        'ε for everybody: 12.5 (at δ = 1e-5); the policy allows 8.'
    """
    return RULES[verdict.key].sentence(verdict)


def public(verdict: Verdict) -> Verdict:
    """The same without what was measured, for a log that others read: the rule, its limit and its
    state stay.

    An unknown one still says what is missing. Whether a rule is broken depends on private data,
    too.
    """
    if verdict.found is None:
        return replace(verdict, rows=np.arange(0), hidden=True)
    return replace(
        verdict,
        subject=verdict.asked_about,
        detail=verdict.unit.say(RULES[verdict.key].compared),
        found=math.nan,
        rows=np.arange(0),
        note="",
        source="",
        hidden=True,
    )


def outcome(verdicts: Sequence[Verdict]) -> Outcome:
    """What the verdicts come to; rules at the level "warn" change nothing."""
    states, (passed, failed, _, cannot_tell) = {verdict.state for verdict in verdicts}, OUTCOMES
    return failed if "broken" in states else cannot_tell if "unknown" in states else passed


def decision(verdicts: Sequence[Verdict]) -> str:
    """What the verdicts ask for, in three words.

    Example:
        >>> unknown = Verdict(
        ...     "max_epsilon", False, 8.0, None, np.arange(3), "the run's ε is not known"
        ... )
        >>> decision([unknown]), decision([]), decision([replace(unknown, level="warn")])
        ('Cannot tell yet', 'May be released', 'May be released')
    """
    return outcome(verdicts).decision


def worst_of(judged: Mapping[str, Sequence[Verdict]]) -> list[Verdict]:
    """Of several runs of one recipe, by name, the worst verdict on each rule: broken before unknown
    before kept.
    """

    def badness(verdict: Verdict) -> tuple[int, float]:
        found = -math.inf if verdict.found is None else float(verdict.found)
        return 0 if verdict.passed else 1 + verdict.tells, -found if verdict.key.startswith(
            "min_"
        ) else found

    by_rule: dict[tuple[str, str], list[Verdict]] = {}
    for name, verdicts in judged.items():
        for verdict in verdicts:
            by_rule.setdefault((verdict.key, verdict.asked_about), []).append(
                replace(verdict, source=name)
            )
    return [max(verdicts, key=badness) for verdicts in by_rule.values()]


def default_policy(run: SavedRun) -> Policy:
    """The policy of the template, for a run that nobody gave one for.

    Without ε for a linear model, which has none.
    """
    off = {"max_epsilon": "off"} if run.about.get("kind") == "linear" else {}
    return parse_policy({"extends": "default", "name": "torchfil’s default policy", "levels": off})


def template() -> str:
    """A policy to start from, with a comment for every key: what ``torchfil gate --init``
    writes.
    """
    return preset("default")


def notes(run: SavedRun, *, redacted: bool = False) -> list[str]:
    """What a reader of the verdicts should know and no rule judges: choices that bounds and ε take
    as given.

    ``redacted`` leaves out how many examples had a smaller weight, and what an audit showed.

    Example:
        >>> weights = np.array([1.0, 0.5, 1.0])
        >>> notes(SavedRun(about={}, ids=np.arange(3), columns={"clip_weight": weights}))
        ['1 example was trained with a smaller weight, of 3: bounds and ε take the weights as ...']
    """
    found, count = [], 0 if redacted else int(is_spared(run).sum())
    if jumps := jumps_of(run.about):
        found.append(
            f"the model is not smooth ({jumps}): its error bounds are no guarantees; ε and "
            "questions hold"
        )
    if delta := large_delta(run.about.get("delta"), len(run)):
        found.append(delta)
    if count:
        were = f"{counted(count, run.unit.one)} {'was' if count == 1 else 'were'}"
        found.append(
            f"{were} trained with a smaller weight, of {len(run):,}: bounds and ε take the "
            "weights as fixed"
        )
    if run.about.get("kind") == "linear":
        weights = "; weights that were chosen from the data are taken as fixed" * (
            "sample_weight" in run.columns
        )
        found.append(
            "a linear model’s release: closed forms, no ε; what is random is its noise "
            f"alone{weights}"
        )
    if released := run.about.get("released"):
        adds = (
            "Fisher information and D add by id, and a run without an example adds nothing about it"
        )
        found.append(
            f"{released['runs']} released models together: {adds}; ε: {released['epsilon']}"
        )
    runs = (run.about.get("merged") or {}).get("runs")
    if runs is not None:
        found.append(
            f"means over {runs} runs: they speak of one release; several together leak more"
        )
    if choice := run.about.get("noise_choice"):
        found.append(
            f"σ was chosen by pilots, for this target: {choice.get('target')}; bounds and ε take "
            "σ as given"
        )
    audit = run.about.get("audit")
    if (
        audit is not None
        and not redacted
        and (audit["exceeds_claim"] or not audit["epsilon"] <= audit["claimed"])
    ):
        found.append(audit_in_words(audit))
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
    little = (
        "publishing one record at random would keep to it, so ε says little. Save the run "
        "with a smaller δ"
    )
    return f"δ = {delta:g} is not below 1/{examples}: {little}"
