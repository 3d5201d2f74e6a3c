"""A run against a policy: which thresholds hold, how many examples break the others, and what would help."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence

import numpy as np

from torchfil.gate.policy import Policy, parse_policy, tomllib
from torchfil.gate.rules import RULES, Verdict, audit_in_words
from torchfil.run.saved_run import SavedRun
from torchfil.run.statistics import is_spared
from torchfil.run.unit import counted
from torchfil.utils.errors import RunFileError

__all__ = ["check", "concerned", "decision", "default_policy", "in_words", "large_delta", "notes", "template"]


def check(run: SavedRun, policy: Policy) -> list[Verdict]:
    """Every rule that the policy asks for, in the order of the template.

    Raises:
        PolicyError: It names an attribute that the run does not have.
        RunFileError: The run has no examples.
    """
    if not len(run):
        raise RunFileError("the run has no examples, so that every rule would hold; save a run after training")
    return [verdict for rule in RULES.values() for verdict in rule.measure(run, policy)]


def concerned(broken: Sequence[Verdict]) -> np.ndarray:
    """The places of all examples that break one of the rules, ascending."""
    return np.unique(np.concatenate([np.arange(0), *(verdict.rows for verdict in broken)]))


def in_words(verdict: Verdict) -> str:
    """What a broken rule means: whom it concerns, what was found, what the policy says and which attacker is bound.

    Example:
        >>> in_words(Verdict("max_epsilon", False, 8.0, 12.5, np.arange(3), "ε", note="at δ = 1e-5"))
        'ε for everybody: 12.5 (at δ = 1e-5); the policy allows 8.'
    """
    return RULES[verdict.key].sentence(verdict)


def decision(verdicts: Sequence[Verdict]) -> str:
    """What the verdicts ask for, in three words.

    Example:
        >>> unknown = Verdict("max_epsilon", False, 8.0, None, np.arange(3), "the run's ε is not known")
        >>> decision([unknown]), decision([])
        ('Cannot tell yet', 'May be released')
    """
    broken = [verdict for verdict in verdicts if not verdict.passed]
    if any(verdict.tells for verdict in broken):
        return "Do not release"
    return "Cannot tell yet" if broken else "May be released"


def default_policy(run: SavedRun) -> Policy:
    """The policy of the template, for a run that nobody gave one for; without ε for a linear model, which has none."""
    values = {**tomllib.loads(template()), "name": "torchfil’s default policy"}
    if run.about.get("kind") == "linear":
        del values["max_epsilon"]
    return parse_policy(values)


def template() -> str:
    """A policy to start from, with a comment for every key: what ``torchfil gate --init`` writes."""
    asked = "min_attacks", "audited_epsilon_below_claimed"  # left out, they are not
    kept = [key for key, rule in RULES.items() if rule.find and rule.default not in (None, {}) and key not in asked]
    paragraphs = [
        "# A policy for `torchfil gate RUN --policy policy.toml`. Remove or comment out what you do not ask for.\n"
        "# What a rule asks for and the run does not tell fails: save the run with it, or take the rule out.\n"
        f"# Left out, {', '.join(kept[:-1])} and {kept[-1]} still apply, at their strictest.\n"
        "# Rules on single examples take the conservative end of every 95 % interval, of each example by itself."
    ]
    section = ""
    for rule in RULES.values():
        if rule.section != section:
            section = rule.section
            paragraphs.append(f"# --- {section} ---")
        left_out = "" if rule.default in (None, {}, "") else f" Left out, it is {str(rule.default).lower()}."
        comment = textwrap.fill(rule.help + left_out, 120, initial_indent="# ", subsequent_indent="# ")
        lines = [f"{rule.key} = {json.dumps(rule.example)}"]  # TOML writes these values as JSON does
        if isinstance(rule.default, dict):
            name, value = rule.example
            lines = [f"[{rule.key}]", f"{name} = {json.dumps(value)}"]
        paragraphs.append("\n".join([comment, *("# " * rule.off + line for line in lines)]))
    return "\n\n".join(paragraphs) + "\n"


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
        were = f"{counted(count, run.unit.one)} {'was' if count == 1 else 'were'}"
        found.append(f"{were} trained with a smaller weight, of {len(run):,}: bounds and ε take the weights as fixed")
    if run.about.get("kind") == "linear":
        weights = "; weights that were chosen from the data are taken as fixed" * ("sample_weight" in run.columns)
        found.append(f"a linear model’s release: closed forms, no ε; what is random is its noise alone{weights}")
    runs = (run.about.get("merged") or {}).get("runs")
    if runs is not None:
        found.append(f"means over {runs} runs: they speak of one release; several together leak more")
    choice = run.about.get("noise_choice")
    if choice is not None:
        found.append(f"σ was chosen by pilots, for this target: {choice.get('target')}; bounds and ε take σ as given")
    audit = run.about.get("audit")
    if audit is not None and (audit["exceeds_claim"] or not audit["epsilon"] <= audit["claimed"]):
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
    little = "publishing one record at random would keep to it, so ε says little. Save the run with a smaller δ"
    return f"δ = {delta:g} is not below 1/{examples}: {little}"
