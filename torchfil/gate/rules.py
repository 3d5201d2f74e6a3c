"""Every rule of a policy in one place: how it is measured, what a broken rule means, what helps.

A measuring function is named for its key. The first line of its docstring says what is compared;
the decorator has the rest. They stand in the order of the template (``presets/default.toml``),
which explains every key in the same words. Gate and page are made from :data:`RULES`.

Rules on single examples take the conservative end of every 95 % interval. What a run does not tell
is unknown. Examples that were drawn too rarely to tell (:mod:`torchfil.run.baselines`) have a rule
of their own and count in no other.

Rules that rest on Fisher information (``fisher``) cannot be answered if the model is not smooth:
the gradient jumps, its Jacobian misses the jumps, and the Cramér–Rao bound can fail
(:mod:`torchfil.smoothness`). Those on ε, D and draws are judged all the same; ``min_attacks`` and
``max_violated_bounds`` count what attacks did.

What would keep a broken rule is found by the same rules, from a prediction
(:mod:`torchfil.report.options`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from inspect import getdoc
from typing import Any

import numpy as np

from torchfil.gate.policy import Policy, PolicyError
from torchfil.run import baselines
from torchfil.run.matching import EXPOSED, worsening
from torchfil.run.saved_run import SavedRun, audited_epsilon, jumps_of
from torchfil.run.statistics import disparity_of, group_levels, is_spared
from torchfil.run.unit import Facts, Unit, counted, plural, unit_of
from torchfil.utils.text import nearest

# the states of a verdict, the worst first, in the words of page, terminal and files
STATES = {"broken": "broken", "unknown": "cannot be answered", "warning": "warning", "kept": "kept"}
_TRACKED, _ASKED = "make_private(track=('diagonal',))", "make_private(…, questions={…}) keeps them"


@dataclass(frozen=True, eq=False)
class Verdict:
    """What one rule found.

    Attributes:
        key: Its key in the policy.
        passed: Whether it holds.
        limit: The threshold.
        found: The value that is compared with it; None where the run does not tell.
        rows: The places in ``ids`` of the examples that break it, [m].
        detail: What was compared; where ``found`` is None, what is missing and how to get it.
        subject: The attribute, question or grouping that it is about; "" where there is none.
        note: What is known besides, such as the worst attribute.
        unit: What the run's examples are.
        level: "error" or "warn", as the policy's levels say.
        source: Of several runs, the one that decides.
        hidden: Whether what was found is left out.
    """

    key: str
    passed: bool
    limit: float
    found: float | None
    rows: np.ndarray
    detail: str
    subject: str = ""
    note: str = ""
    unit: Unit = field(default_factory=lambda: unit_of({}))
    level: str = "error"
    source: str = ""
    hidden: bool = False

    @property
    def state(self) -> str:
        """One of :data:`STATES`: "warning" at the level "warn", "unknown" where the run cannot
        answer.
        """
        if self.passed or self.level == "warn":
            return "kept" if self.passed else "warning"
        return "broken" if self.tells else "unknown"

    @property
    def asked_about(self) -> str:
        """The subject, where the policy or the run's questions and groups name it, and not what was
        found.
        """
        return "" if self.key == "min_attribute_error_share" else self.subject

    @property
    def rule(self) -> str:
        """The key with its subject, as the policy writes it."""
        if not self.subject:
            return self.key
        table = isinstance(getattr(Policy(), self.key), dict)
        return f"{self.key}.{self.subject}" if table else f"{self.key} ({self.subject})"

    @property
    def tells(self) -> bool:
        """Whether the run could answer: it broke or kept the rule, and not for want of
        measurements.
        """
        return self.found is not None and (self.passed or self.key != "max_share_too_few_draws")

    @property
    def offending(self) -> int:
        """How many examples break it."""
        return len(self.rows)

    def as_dict(self) -> dict[str, object]:
        """For JSON: without the examples, of which the number is told."""
        names = ("rule", "level", "passed", "limit", "found", "offending", "detail", "source")
        told = {name: getattr(self, name) for name in names} | (
            {"offending": None} if self.hidden else {}
        )
        return told | {"state": STATES[self.state]}


@dataclass(frozen=True)
class RuleCheck:
    """What a policy asks of a run by one rule, and the verdicts that may come of it."""

    rule: Rule
    run: SavedRun
    policy: Policy
    limit: Any
    subject: str = ""
    baseline: SavedRun | None = None

    @cached_property
    def told(self) -> np.ndarray:
        """Which examples were drawn often enough to tell, [n] booleans."""
        self.run.column("fil")
        return baselines.is_told(self.run)

    def smallest(self, values: np.ndarray, note: str = "") -> Verdict:
        """No told example's value is below the limit; [n] values."""
        wrong = np.flatnonzero(self.told & ~(values >= self.limit))
        return self.verdict(
            not len(wrong), float(np.min(values[self.told], initial=math.inf)), wrong, note
        )

    def largest(self, values: np.ndarray, known: np.ndarray, subject: str = "") -> Verdict:
        """No known example's value is above the limit; [n] values, NaN for all where the run does
        not tell.
        """
        if len(values) and np.isnan(values).all():
            name = subject or self.subject
            return replace(self.unknown(f"“{name}” was not asked in every release"), subject=name)
        wrong = np.flatnonzero(known & ~(values <= self.limit))
        return self.verdict(
            not len(wrong), float(np.max(values[known], initial=0.0)), wrong, "", subject
        )

    def share(self, which: np.ndarray, note: str = "") -> Verdict:
        """At most this share of all examples; [n] booleans."""
        rows = np.flatnonzero(which)
        share = len(rows) / max(1, len(which))
        return self.verdict(share <= self.limit, share, rows, note)

    def everybody(self, passed: bool, found: float, note: str = "") -> Verdict:
        """What is the same for all examples."""
        return self.verdict(passed, found, np.arange(0 if passed else len(self.run)), note)

    def count(self, rows: np.ndarray, note: str = "") -> Verdict:
        """At most so many of these examples."""
        return self.verdict(len(rows) <= self.limit, len(rows), rows, note)

    def unknown(
        self, missing: str, how: str = "", remedy: str = "let the developers add it, or "
    ) -> Verdict:
        """The run does not tell, so that nobody keeps the rule: what is missing, and what the
        developers call.
        """
        detail, note = (
            f"{missing}: {how}" if how else missing,
            f"{missing}: {remedy}take the rule out of the policy.",
        )
        return Verdict(
            self.rule.key,
            False,
            self.limit,
            None,
            np.arange(len(self.run)),
            detail,
            self.subject,
            note,
        )

    def not_smooth(self, jumps: str) -> Verdict:
        """Of what rests on Fisher information, which misses where the gradient jumps."""
        remedy = f"replace {jumps} by something smooth (softplus, GELU, tanh, average pooling)"
        note = f"{remedy} and train again, or take the rule out of the policy."
        return replace(self.unknown("the model is not smooth", remedy), note=note)

    def verdict(
        self, passed: bool, found: float, rows: np.ndarray, note: str = "", subject: str = ""
    ) -> Verdict:
        """Any other."""
        detail = self.run.unit.say(self.rule.compared) + f"; {note}" * bool(note)
        return Verdict(
            self.rule.key, passed, self.limit, found, rows, detail, subject or self.subject, note
        )


Measuring = Callable[[RuleCheck], Iterable[Verdict]]


@dataclass(frozen=True)
class Rule:
    """A key of a policy that judges a run; others are settings, which rules read.

    Attributes:
        key: Its name.
        compared: What is compared with the limit, in half a sentence.
        find: Measures it.
        title: What was measured and who is bound, for readers without training in machine learning;
            the fields are those of :meth:`row`.
        found: What was found, likewise; a value before a % is told in per cent.
        above: What limit and value are told above of.
        baseline: What needs no model and the value is measured against, in words; "" where it is a
            number by itself.
        advice: What helps where neither more noise nor more steps do, in a sentence.
        fisher: Whether it rests on Fisher information, so that it cannot be answered if the model
            is not smooth.
    """

    key: str
    compared: str
    find: Measuring
    title: str
    found: str
    above: float = 0.0
    baseline: str = ""
    advice: str = (
        "More noise than any prediction was tested for, or another model: only a trial tells."
    )
    fisher: bool = False

    def measure(
        self, run: SavedRun, policy: Policy, baseline: SavedRun | None = None
    ) -> list[Verdict]:
        """What the rule finds, for every attribute or question that the policy names.

        Nothing where it asks nothing.
        """
        limit, level = getattr(policy, self.key), policy.levels.get(self.key, "error")
        if limit is None or level == "off":
            return []
        limits = limit if isinstance(limit, dict) else {"": limit}
        jumps, verdicts = jumps_of(run.about), list[Verdict]()
        for name, each in limits.items():
            asked = RuleCheck(self, run, policy, each, name, baseline)
            found = self.find(asked)
            if self.fisher and jumps:
                found = [
                    replace(asked.not_smooth(jumps), subject=verdict.asked_about)
                    for verdict in found
                ]
            verdicts += [replace(verdict, unit=run.unit, level=level) for verdict in found]
        return verdicts

    def named(self, verdict: Verdict, who: str = "") -> str:
        """Its title; without a subject, of a rule by name that found none."""
        title = verdict.unit.say(self.title).format(subject=verdict.subject, who=who)
        return (
            title
            if verdict.subject
            else title.replace("“”", "A question").removesuffix(", ").removesuffix(" by ")
        )

    def row(self, verdict: Verdict) -> tuple[str, str, str]:
        """The rule with whom a broken one concerns, what was found and the limit, as short texts
        for a table.
        """
        who = (
            f" ({counted(verdict.offending, verdict.unit.one)})"
            if not (verdict.passed or verdict.hidden)
            else ""
        )
        title = self.named(verdict, who if verdict.found is not None else "")
        limit, found, note, percent = (
            verdict.limit,
            verdict.found,
            verdict.note,
            "{value} %" in self.found,
        )
        if percent:
            limit, found = (
                100 * (limit + self.above),
                None if found is None else 100 * (found + self.above),
            )
        limit_shown, found_shown = format_distinct(limit, found)
        told = {
            "yes": "yes" if found else "no",
            "note": f" ({note})" * bool(note),
            "unit": f" {note}".rstrip(),
        }
        shown = "not shown" if verdict.hidden else self.found.format(value=found_shown, **told)
        shown = "not known" if found is None else shown
        if self.key == "unit":
            return title, note or shown, f"whole {plural(verdict.unit.person)}"
        if self.key.startswith("allow_"):
            return title, shown, "allowed" if limit else "not allowed"
        beside = {"min": "at least ", "audited": "claimed "}.get(self.key.partition("_")[0], "")
        return title, shown, f"{beside}{limit_shown}{' %' * percent}"

    def sentence(self, verdict: Verdict) -> str:
        """The same in a sentence."""
        title, found, limit = self.row(verdict)
        asks = {
            "min": "policy asks for",
            "unit": "policy asks for",
            "allow": "policy says",
            "audited": "run",
        }
        return (
            f"{title}: {found}; the {asks.get(self.key.partition('_')[0], 'policy allows')} "
            f"{limit}."
        )

    def remedy(self, verdict: Verdict) -> str:
        """What helps, in a sentence, where neither more noise nor more steps are known to."""
        if verdict.found is None:
            return f"{verdict.note[:1].upper()}{verdict.note[1:]}"
        return verdict.unit.say(self.advice)


RULES: dict[str, Rule] = {}  # in the order of the template


def _rule(title: str, found: str, **more: Any) -> Callable[[Measuring], Rule]:
    """A measuring function as a rule: its name is the key, and its docstring begins with what is
    compared.
    """

    def register(find: Measuring) -> Rule:
        key, first = find.__name__.removeprefix("_"), (getdoc(find) or "").partition("\n")[0]
        compared = first.removeprefix("The ").rstrip(".")
        RULES[key] = Rule(key, compared[:1].lower() + compared[1:], find, title, found, **more)
        return RULES[key]

    return register


_fisher_rule = functools.partial(_rule, fisher=True)
_BLIND_ERROR = "the error of a blind guess"
_NO_BLIND_ERROR = (
    "what a blind guess errs by is not known",
    "save_run(input_range=…) or the policy’s blind_error tells",
)


def _by_ratio(asked: RuleCheck, judge: Callable[[np.ndarray, str], Verdict]) -> list[Verdict]:
    """What is judged of the errors over a blind guess's, [n].

    Here no estimate stands in for the lower end.
    """
    asked.run.column("mse_bound_low")
    ratios = baselines.error_ratios(asked.run, asked.policy.blind_error)
    if ratios is None:
        return [asked.unknown(*_NO_BLIND_ERROR)]
    blind = baselines.typical_blind_error(asked.run, asked.policy.blind_error)
    return [judge(ratios, f"a blind guess errs by {blind:.3g}")]


@_fisher_rule(
    "Least error of an unbiased estimate{who}",
    "{value} of a blind guess’s error",
    baseline=_BLIND_ERROR,
)
def _min_error_share(asked: RuleCheck) -> Iterable[Verdict]:
    """The least error of an unbiased guess (lower end) over that of a blind guess.

    Unbiased is an attacker whose guesses are right on average over repeated trainings, and who
    knows everything else. 1: as far off as a blind guess; 0.5: twice as close. A biased attacker,
    who starts from beliefs about the data, may come closer.
    """
    return _by_ratio(asked, asked.smallest)


@_fisher_rule("Exposed examples", "{value} %", baseline=_BLIND_ERROR)
def _max_share_exposed(asked: RuleCheck) -> Iterable[Verdict]:
    """The share of the examples whose least error (lower end) is under a blind guess's.

    They are exposed: not protected against an unbiased estimate that is closer than a blind guess.
    """
    return _by_ratio(asked, lambda ratios, note: asked.share(ratios < 1, note))


@_fisher_rule(
    "Least error for one attribute, {subject}{who}",
    "{value} of a blind guess’s error",
    baseline=_BLIND_ERROR,
)
def _min_attribute_error_share(asked: RuleCheck) -> Iterable[Verdict]:
    """The least error of an unbiased guess of an attribute (lower end) over that of a blind guess.

    As min_error_share, for every attribute that the run tracked
    (make_private(track=("diagonal",))).
    """
    attributes, policy = asked.run.attributes, asked.policy
    if attributes is None or attributes.error_low is None:
        missing = (
            "attributes were not tracked"
            if attributes is None
            else "how far attributes are off is not known"
        )
        return [asked.unknown(missing, _TRACKED)]
    for name in policy.attribute_spread:
        if name not in attributes.names:
            raise PolicyError(
                "attribute_spread: the run has no attribute "
                f"{name!r}{nearest(name, attributes.names)}"
            )

    # by attribute its own spread; one without fails, for nobody knows what its error means
    blind = baselines.blind_errors(asked.run, policy.attribute_spread, policy.blind_error)
    for name, error in zip(attributes.names, blind.mean(axis=0), strict=True):
        if math.isnan(error):
            how = "attribute_spread in the policy, or save_run(input_range=…)"
            return [asked.unknown(f"the spread of “{name}” is not known", how)]

    least, wrong = np.full(blind.shape[1], math.inf), np.zeros(len(asked.run), dtype=bool)
    for rows, shares in baselines.attribute_ratio_parts(asked.run, attributes.error_low, blind):
        wrong[rows] = asked.told[rows] & ~(shares >= asked.limit).all(axis=1)
        least = np.minimum(least, shares[asked.told[rows]].min(axis=0, initial=math.inf))
    worst = int(np.argmin(np.where(np.isnan(least), -math.inf, least)))
    return [
        asked.verdict(
            not wrong.any(), float(least[worst]), np.flatnonzero(wrong), "", attributes.names[worst]
        )
    ]


@_rule(
    "“{subject}” told by any attacker{who}",
    "{value} % correct (50 % without the model)",
    above=0.5,
    baseline="a coin, which is right half of the time",
)
def _max_gain_over_guessing(asked: RuleCheck) -> Iterable[Verdict]:
    """How much more often than 50 % any attacker tells the true answer from another, equally likely
    one (upper end).

    For every attacker, whatever it knows except which steps drew the example, and every question
    that the run kept (make_private(…, questions={…})). 0.1: 60 % instead of 50 %.
    """
    if not asked.run.questions:
        yield asked.unknown("the run was trained without questions", _ASKED)
    for question in asked.run.questions:
        yield asked.largest(question.success() - 0.5, asked.told, question.name)


@_rule("Who is bound", "{note}", advice="Train again with the person as the unit of privacy.")
def _unit(asked: RuleCheck) -> Iterable[Verdict]:
    """Whether every number binds a whole person, with all of its rows.

    "person": the run must have been trained with make_private(owner_of=…). A run of single rows
    fails, also where each may be another person, because nobody told it so.
    """
    unit, whole = asked.run.unit, asked.run.unit.kind == "owner"
    bound = f"{'whole' if whole else 'single'} {unit.many}"
    return [replace(asked.everybody(whole, int(whole), bound), limit=1)]


@_rule("ε for everybody", "{value}{note}", advice="Train again with the noise that this ε takes.")
def _max_epsilon(asked: RuleCheck) -> Iterable[Verdict]:
    """The run's ε, for everybody.

    It binds every attacker, at the δ that the run was saved with.
    """
    about = asked.run.about
    epsilon = about.get("epsilon")
    if epsilon is None:
        if about.get("kind") == "linear":
            missing = "a linear model’s release has no accountant’s ε"
            return [asked.unknown(missing, "take the rule out", "")]
        return [asked.unknown("the run’s ε is not known")]
    at = f"at δ = {about.get('delta')}".replace("e-0", "e-")
    return [asked.everybody(epsilon <= asked.limit, epsilon, at)]


@_rule("Largest individual ε, an estimate{who}", "{value}")
def _max_individual_epsilon(asked: RuleCheck) -> Iterable[Verdict]:
    """The largest individual ε (an estimate for these outputs).

    It belongs to this run's outputs, and is no guarantee; train with Accounting(norm_refresh=…)
    before you rely on it.
    """
    values = asked.run.columns.get("epsilon")
    if values is None:
        return [asked.unknown("individual ε was not computed")]
    return [asked.largest(values, np.ones(len(values), dtype=bool))]


@_rule(
    "Audited ε",
    "≥ {value}{note}",
    advice="Find out first whether the accounting or the training code is wrong.",
)
def _audited_epsilon_below_claimed(asked: RuleCheck) -> Iterable[Verdict]:
    """The ε that an audit with canaries shows (a lower bound at 95 %), beside the ε that the run
    claims.

    true: the run must have an audit (make_private(…, canaries=torchfil.Canaries(1000))), and its ε
    must not be above the claimed one. Of sound runs at most one in twenty is; an audit below the
    claim proves nothing. Whatever this key says, a run fails whose audit refutes the claim at 99.9
    %: it leaks more than its claim allows.
    """
    claim: Any = asked.run.about.get("epsilon")
    audit = asked.run.about.get("audit")
    if audit is None:
        missing = asked.unknown(
            "the run was not audited", "make_private(…, canaries=torchfil.Canaries(1000))"
        )
        return [replace(missing, limit=claim)] * asked.limit
    claimed, refuted = min(audit["claimed"], claim or math.inf), audit["exceeds_claim"]
    kept = audit["epsilon"] <= claimed and not refuted
    above = (
        "; refutes the claim at 99.9 %"
        if refuted
        else f"; above the claim at {100 * audit['confidence']:g} %"
    )
    note = f"{audit['num_canaries']:,} canaries{'' if kept else above}"
    found = asked.everybody(kept, audited_epsilon(audit), note)
    return [replace(found, limit=claimed, detail=audit_in_words(audit))] * (asked.limit or refuted)


@_fisher_rule("Smallest MSE bound of an unbiased estimate{who}", "{value}")
def _min_mse_bound(asked: RuleCheck) -> Iterable[Verdict]:
    """The smallest MSE bound of unbiased attackers, lower end of its interval.

    Per private coordinate, in the squared unit of the inputs: an unbiased attacker who knows
    everything else guesses a coordinate with at least this mean squared error, on average.
    """
    return [asked.smallest(asked.run.column("mse_bound_low"))]


@_fisher_rule("Examples with an MSE bound of concern", "{value} %{note}")
def _max_share_of_concern(asked: RuleCheck) -> Iterable[Verdict]:
    """The share of the examples whose MSE bound (lower end) is under mse_bound_of_concern."""
    bound = asked.policy.mse_bound_of_concern
    assert bound is not None
    return [
        asked.share(asked.told & (asked.run.column("mse_bound_low") < bound), f"here {bound:g}")
    ]


@_rule(
    "Leakage above the earlier run’s, beyond chance, {subject}",
    "{value} %{note}",
    baseline="an earlier run",
)
def _max_worsening(asked: RuleCheck) -> Iterable[Verdict]:
    """The share by which a run leaks more than an earlier one, beyond chance: η̄, sqrt(D) of
    questions, ε for everybody.

    0.1: a tenth more is allowed. By η̄, all examples that both runs tell of, the 5 % most exposed
    and the most exposed one are judged, at three standard errors of their intervals; negative: it
    does not leak more for certain. Bounds on η̄ are about unbiased attackers, D and ε about every
    attacker. `torchfil gate --fail-if-worse` sets it.
    """
    if asked.baseline is None:
        return [
            asked.unknown(
                "no earlier run was given", "torchfil gate RUN --baseline EARLIER", "name it, or "
            )
        ]
    (found, moved, count), limit = worsening(asked.baseline, asked.run), asked.limit
    known, compared = (
        int(baselines.is_told(asked.baseline).sum()),
        counted(count, asked.run.unit.one),
    )
    if 2 * count < max(known, 1):
        few = "fewer than half of what the earlier run tells of could be compared"
        remedies = (
            "save both with the same ids, after enough measured steps",
            "compare like runs, or ",
        )
        return [asked.unknown(few, *remedies)]
    verdicts, who = [], {True: moved[:0], False: moved}
    jumps = jumps_of(asked.run.about) or jumps_of(asked.baseline.about)
    for name, more in found.items():
        if name in EXPOSED and jumps:
            verdicts.append(replace(asked.not_smooth(jumps), subject=name))
            continue
        missing = asked.unknown(
            f"the earlier run tells {name}, and this one does not at the same settings"
        )
        told = asked.verdict(more <= limit, more, who[more <= limit], f"of {compared}", name)
        verdicts.append(told if more == more else replace(missing, subject=name))
    return verdicts


@_fisher_rule(
    "Typical leakage of groups by {subject}",
    "{value} times{note}",
    advice="More noise does not make groups alike: train again with smaller weights for the group "
    "that leaks more.",
)
def _max_group_disparity(asked: RuleCheck) -> Iterable[Verdict]:
    """The typical FIL (geometric mean) of one group over that of another, in every grouping that
    was saved.

    It cannot be answered where there is none, or where a grouping has fewer than two groups to
    compare.
    """
    run, limit, size = asked.run, asked.limit, asked.policy.min_group_size
    if not run.groups:
        yield replace(asked.unknown("the run was saved without groups"), rows=np.arange(0))
    for grouping in run.groups:
        names, codes = run.coded_group(grouping)
        drawn = baselines.status_of(run) != baselines.NOT_MEASURED
        levels = group_levels(run.column("fil")[drawn], codes[drawn], names.tolist(), size)
        found = disparity_of(levels)
        if found is None:
            missing = (
                f"fewer than two groups of at least {size} measured {run.unit.many}: the "
                "disparity is not known"
            )
            yield replace(asked.unknown(missing), rows=np.arange(0), subject=grouping)
            continue

        # compared as products: a group with level 0 has no quotient
        worse = [
            label for label, level in levels.items() if not level <= limit * levels[found.least]
        ]
        # all alike, also where all are infinite
        worse = [] if found.ratio == 1 and limit >= 1 else worse
        rows = np.flatnonzero(np.isin(codes, [names.tolist().index(label) for label in worse]))
        note = (
            f"{found.most} over {found.least}, of groups of at least {size} measured "
            f"{run.unit.many}"
        )
        yield asked.verdict(not worse, found.ratio, rows, note, grouping)


@_rule(
    "Attacks that tested the bounds",
    "{value}{note}",
    advice="Save the run with a repeated attack on the model.",
)
def _min_attacks(asked: RuleCheck) -> Iterable[Verdict]:
    """The number of attacks that saw the model, several times, and so could have broken a bound."""
    if asked.limit == 0:
        return []
    testable = sum(attack.testable for attack in asked.run.attacks)
    why = [
        f"{each.name}: {each.untestable or 'one trial'}"
        for each in asked.run.attacks
        if not each.testable
    ]
    note = f"not testable: {', '.join(why)}" if why else ""
    return [asked.verdict(testable >= asked.limit, testable, np.arange(0), note)]


@_rule(
    "Bounds that an attack beat",
    "{value}{note}",
    advice="Find out first why an attack beat a bound.",
)
def _max_violated_bounds(asked: RuleCheck) -> Iterable[Verdict]:
    """The number of examples whose bound an attack beat beyond chance.

    More than 0: look into it.
    """
    tested = [attack for attack in asked.run.attacks if attack.testable]
    beaten = [attack.rows[np.asarray(attack.violated, dtype=bool)] for attack in tested]
    rows = np.unique(np.concatenate([np.arange(0), *beaten]))
    names = [attack.name for attack in tested if attack.violated.any()]
    return [asked.count(rows, ", ".join(names))]


@_rule(
    "Examples with a smaller weight",
    "{value} %",
    advice="Down-weight fewer examples; take more noise for all.",
)
def _max_share_spared(asked: RuleCheck) -> Iterable[Verdict]:
    """The share of the examples that were trained with a smaller weight (make_private(…,
    clip_weights=…)).

    Bounds and ε take the weights as fixed; the more examples have one, the more the weights
    themselves may tell.
    """
    return [asked.share(is_spared(asked.run))]


@_rule(
    "Too few draws to tell{who}",
    "{value} %",
    advice="Train longer, or average over runs, to draw all often.",
)
def _max_share_too_few_draws(asked: RuleCheck) -> Iterable[Verdict]:
    """The share of the examples that were drawn too rarely to tell: in fewer than five steps, or
    without an estimate above 0.

    Nothing is claimed for them, neither leakage nor protection. Poisson sampling at rate q draws an
    example a Binomial(steps, q) number of times; longer runs, or averages over runs, leave fewer
    untold.
    """
    return [asked.share(~asked.told)]


@_rule(
    "Examples in paused steps",
    "{value}",
    advice="Train again and pause no step.",
)
def _max_examples_missed(asked: RuleCheck) -> Iterable[Verdict]:
    """The number of examples in paused steps (engine.paused), which were not measured: their bounds
    are no guarantees.
    """
    columns = asked.run.columns
    unknown = np.full(len(asked.run), "missed" not in columns)
    rows = np.flatnonzero(columns.get("paused", unknown) > 0)
    return [asked.count(rows)]


@_rule(
    "Seeded noise, which whoever has the seed can subtract",
    "{yes}",
    advice="Train again without seeding the noise.",
)
def _allow_seeded_noise(asked: RuleCheck) -> Iterable[Verdict]:
    """Whether noise and draws were seeded (noise_seed=, noise_generator=), as for a test.

    Whoever has the seed or a checkpoint can subtract the noise, and then no bound holds.
    """
    noise = (asked.run.about.get("mechanism") or {}).get("noise")
    if noise is None:
        return []
    seeded = noise == "seeded"
    found = asked.everybody(not seeded or asked.limit, int(seeded), f"here: {noise}")
    return [replace(found, limit=int(asked.limit))]


@_fisher_rule("Least error of an unbiased estimate of “{subject}”{who}", "± {value}{unit}")
def _min_attribute_error(asked: RuleCheck) -> Iterable[Verdict]:
    """The smallest average error (root mean square) of unbiased guesses of an attribute, lower end
    of its interval.

    In the attribute's own unit, by the names given to save_run.
    """
    attributes = asked.run.attributes
    if attributes is None:
        return [asked.unknown("attributes were not tracked", _TRACKED)]
    if asked.subject not in attributes.names:
        raise PolicyError(
            f"the run has no attribute {asked.subject!r}{nearest(asked.subject, attributes.names)}"
        )
    if attributes.error_low is None:
        return [asked.unknown("how far the errors of guesses are off is not known", _TRACKED)]
    place = attributes.names.index(asked.subject)
    return [asked.smallest(attributes.error_low[:, place], attributes.units[place])]


@_rule(
    "“{subject}” told by any attacker, with few false alarms{who}",
    "{value} % of the runs",
    baseline="the false-positive rate, at which a blind guess is right",
)
def _max_true_positive_rate(asked: RuleCheck) -> Iterable[Verdict]:
    """The largest true-positive rate of any attacker at the false-positive rate
    at_false_positive_rate, upper end.

    How often it may say rightly that an example has its true answer to a question (not the other).
    For every attacker, whatever it knows except which steps drew the example. By the names of
    make_private(…, questions={…}).
    """
    by_name = {question.name: question for question in asked.run.questions}
    if asked.subject not in by_name:
        how = nearest(asked.subject, list(by_name)) or ": make_private(…, questions={…}) keeps them"
        raise PolicyError(f"the run has no question {asked.subject!r}{how}")
    return [
        asked.largest(by_name[asked.subject].rate(asked.policy.at_false_positive_rate), asked.told)
    ]


def audit_in_words(audit: Facts) -> str:
    """What a run claims and what its audit shows; above the claim, what that means.

    Example:
        >>> audit_in_words(
        ...     {"claimed": 2.9, "epsilon": 1.1, "num_canaries": 1000, "exceeds_claim": False}
        ... )
        'claimed ε 2.9, audited ε ≥ 1.1 (1,000 canaries)'
    """
    least = in_digits(audited_epsilon(audit))
    shown = (
        f"claimed ε {in_digits(audit['claimed'])}, audited ε ≥ {least} "
        f"({audit['num_canaries']:,} canaries)"
    )
    if audit["exceeds_claim"]:
        wrong = (
            "either the accounting or the training code is wrong, and no other number of the "
            "report can be trusted"
        )
        return f"{shown}: the run leaks more than its claim allows, so {wrong}"
    if audit["epsilon"] <= audit["claimed"]:
        return shown
    return (
        f"{shown}: above the claim at {100 * audit['confidence']:g} %, not at 99.9 %; chance "
        "or a fault, audit again"
    )


def format_distinct(limit: float | None, value: float | None, digits: int = 3) -> tuple[str, str]:
    """Two numbers as texts of so many digits, or of as many as it takes to see which is larger.

    Example:
        >>> format_distinct(1.05, 1.0499), format_distinct(1.05, 2.0), format_distinct(1.05, None)
        (('1.05', '1.0499'), ('1.05', '2'), ('1.05', 'not known'))
    """
    texts = in_digits(limit, digits), in_digits(value, digits)
    if None in (limit, value) or digits == 17 or limit == value or texts[0] != texts[1]:
        return texts
    return format_distinct(limit, value, digits + 1)


def in_digits(value: float | None, digits: int = 3) -> str:
    """A number to so many digits, or what it is."""
    if value is None:
        return "not known"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    return f"{value:,}" if isinstance(value, int) else f"{value:.{digits}g}"
