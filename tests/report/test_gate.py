"""Each rule of a policy passes and fails where it should, and what is not known never passes as
safe.
"""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.report.run_cases import ABOVE, AUDIT, REFUTED, audited, made_up, owned, worrying
from torchfil.gate.gate import check, decision, notes, template
from torchfil.gate.policy import Policy, PolicyError, load_policy, parse_policy
from torchfil.gate.rules import RULES, Verdict
from torchfil.guessing import largest_true_positive_rate
from torchfil.run.saved_run import SavedRun

LOW = np.linspace(0.1, 2.0, 20)
# of the made-up question's worst answer, at its upper end
RATE = float(largest_true_positive_rate(3.3, 0.01))
GAIN = math.sqrt(1 - math.exp(-2.0)) / 2  # at D = 2, by Bretagnolle and Huber


def run_with(**columns: Any) -> SavedRun:
    """A run of 20 with these columns.

    None takes one out. A bound is its own lower end where that alone is given.
    """
    run = made_up(20)
    columns = (
        {"mse_bound": columns["mse_bound_low"], **columns}
        if "mse_bound_low" in columns
        else columns
    )
    changed = {**run.columns, **columns}
    return dataclasses.replace(
        run, columns={k: np.asarray(v) for k, v in changed.items() if v is not None}
    )


def run_of(**parts: Any) -> SavedRun:
    return dataclasses.replace(made_up(20), **parts)


def with_ages(low: bool = True, of_one: float = 4.0) -> SavedRun:
    """Errors of 6, of which one lower end is 4."""
    ends = np.full((20, 3), 6.0)
    ends[3, 0] = of_one
    table = dataclasses.replace(
        made_up(20).attributes, error=np.full((20, 3), 6.0), error_low=ends if low else None
    )
    return run_of(attributes=table)


def grouped(**parts: Any) -> SavedRun:
    sex, fil = np.repeat(["f", "m", "x"], [10, 8, 2]), np.repeat([1.0, 3.0, 100.0], [10, 8, 2])
    return dataclasses.replace(run_with(fil=fil), **{"groups": {"sex": sex}, **parts})


def attacked(**parts: Any) -> SavedRun:
    """Two attacks of the same three examples."""
    return run_of(attacks=[dataclasses.replace(made_up(20).attacks[0], **parts)] * 2)


def trained(noise: str) -> SavedRun:
    return run_of(about={**made_up().about, "mechanism": {"noise": noise}})


BARE = dataclasses.replace(worrying(), about={}, attributes=None, questions=[])
UNCERTAIN = worrying(safe=True)
UNCERTAIN.columns["mse_bound_low"] = np.where(np.arange(100) == 3, 0.01, 4.0)
DRAWN = run_with(
    fil=[np.nan] * 3 + [0.5] * 17,
    mse_bound=[np.nan] * 3 + [4.0] * 17,
    mse_bound_low=[np.inf] * 3 + [1.0] * 17,
)
RARE = run_with(mse_bound_low=[np.nan, 0.0] + [1.0] * 18, mse_bound=[1.0] * 20)
BEATEN = attacked(violated=np.asarray([False, True, False]))
BLIND = attacked(testable=False, untestable="never saw the model", violated=np.ones(3, bool))
CONCERN, FEW = ({"mse_bound_of_concern": limit} for limit in (0.25, 2.0))
MISSPELT = {"attribute_spread": {"aeg": 1.0}}
SIZE, SPREAD = {"min_group_size": 5}, {"attribute_spread": {"age": 0.15}}
# a smaller ε than was claimed refutes it too; the run's own ε counts, not the audit's claim
LITTLE = audited(REFUTED | {"epsilon": 1.0})
CLAIMED = audited(AUDIT | {"epsilon": 2.7, "claimed": 9})

# rule, run, limit, other keys; whether it holds, how many break it, what was found: a passing case,
# a failing one, and one of a run that does not tell
CASES: list[tuple[str, SavedRun, Any, dict[str, Any], bool, int, float | None]] = [
    ("min_error_share", worrying(), 0.28, {}, True, 0, 0.02**0.5 / 0.5),
    ("min_error_share", worrying(), 0.5, {}, False, 1, 0.02**0.5 / 0.5),
    ("min_error_share", worrying(), 0.5, {"blind_error": 0.2}, True, 0, 0.02**0.5 / 0.2),
    ("min_error_share", UNCERTAIN, 0.5, {}, False, 1, 0.2),  # the lower end
    ("min_error_share", dataclasses.replace(RARE, about=worrying().about), 0.5, {}, True, 0, 2.0),
    ("min_error_share", BARE, 0, {}, False, 100, None),
    ("max_share_exposed", worrying(), 0.01, {}, True, 1, 0.01),
    ("max_share_exposed", worrying(), 0.005, {}, False, 1, 0.01),
    ("max_share_exposed", dataclasses.replace(RARE, about=worrying().about), 0.0, {}, True, 0, 0.0),
    ("max_share_exposed", BARE, 1, {}, False, 100, None),
    ("min_attribute_error_share (age)", worrying(), 0.5, SPREAD, True, 0, 0.1 / 0.15),
    ("min_attribute_error_share (age)", worrying(), 0.5, {}, False, 1, 0.2),
    ("min_attribute_error_share", BARE, 0, {}, False, 100, None),
    ("max_gain_over_guessing (smokes)", worrying(), 0.5, {}, True, 0, GAIN),
    ("max_gain_over_guessing (smokes)", worrying(), 0.1, {}, False, 1, GAIN),
    ("max_gain_over_guessing", BARE, 1, {}, False, 100, None),
    ("max_epsilon", made_up(20), 2.5, {}, True, 0, 2.5),
    ("max_epsilon", made_up(20), 2, {}, False, 20, 2.5),
    ("max_epsilon", run_of(about={}), 100, {}, False, 20, None),
    ("max_individual_epsilon", run_with(epsilon=LOW), 2.0, {}, True, 0, 2.0),
    ("max_individual_epsilon", run_with(epsilon=LOW), 1.85, {}, False, 2, 2.0),
    ("max_individual_epsilon", run_with(epsilon=None), 9, {}, False, 20, None),
    ("max_individual_epsilon", run_with(epsilon=[np.nan] + [1.0] * 19), 5, {}, False, 1, math.nan),
    ("audited_epsilon_below_claimed", audited(AUDIT), True, {}, True, 0, 1.1),
    ("audited_epsilon_below_claimed", audited(AUDIT | {"epsilon": 2.5}), True, {}, True, 0, 2.5),
    ("audited_epsilon_below_claimed", audited(ABOVE), True, {}, False, 20, 2.7),
    ("audited_epsilon_below_claimed", CLAIMED, True, {}, False, 20, 2.7),
    # whatever the policy says
    ("audited_epsilon_below_claimed", audited(REFUTED), False, {}, False, 20, 3.4),
    ("audited_epsilon_below_claimed", LITTLE, False, {}, False, 20, 1.0),
    ("audited_epsilon_below_claimed", audited(None), True, {}, False, 20, None),
    ("min_mse_bound", run_with(mse_bound_low=LOW, mse_bound=LOW + 10), 0.1, {}, True, 0, 0.1),
    ("min_mse_bound", run_with(mse_bound_low=LOW, mse_bound=LOW + 10), 0.25, {}, False, 2, 0.1),
    ("min_mse_bound", RARE, 0.1, {}, True, 0, 1.0),  # too few draws to tell is a rule of its own
    ("max_share_of_concern", run_with(mse_bound_low=LOW), 0.1, CONCERN, True, 2, 0.1),
    ("max_share_of_concern", run_with(mse_bound_low=LOW), 0.09, CONCERN, False, 2, 0.1),
    ("max_share_of_concern", DRAWN, 0.8, FEW, False, 17, 0.85),  # of all examples
    ("max_group_disparity (sex)", grouped(), 3, SIZE, True, 0, 3.0),
    ("max_group_disparity (sex)", grouped(), 2.9, SIZE, False, 8, 3.0),
    ("max_group_disparity (sex)", grouped(), 3, {"min_group_size": 1}, False, 2, 100),
    ("max_group_disparity (sex)", grouped(), 2.9, {}, False, 0, None),
    ("min_attacks", made_up(20), 1, {}, True, 0, 1),
    ("min_attacks", run_of(attacks=[]), 1, {}, False, 0, 0),
    ("min_attacks", BLIND, 1, {}, False, 0, 0),  # it could not have broken a bound
    ("max_violated_bounds", made_up(20), 0, {}, True, 0, 0),
    ("max_violated_bounds", BEATEN, 1, {}, True, 1, 1),  # the same example counts once
    ("max_violated_bounds", BEATEN, 0, {}, False, 1, 1),
    ("max_violated_bounds", BLIND, 0, {}, True, 0, 0),  # what is not testable violates nothing
    ("max_share_spared", made_up(), 0.075, {}, True, 3, 0.075),
    ("max_share_spared", made_up(), 0.07, {}, False, 3, 0.075),
    ("max_share_spared", run_with(clip_weight=None), 0, {}, True, 0, 0),
    ("max_share_too_few_draws", DRAWN, 0.15, {}, True, 3, 0.15),
    ("max_share_too_few_draws", DRAWN, 0.0, {}, False, 3, 0.15),
    ("max_share_too_few_draws", RARE, 0.05, {}, False, 2, 0.1),
    ("max_examples_missed", run_with(paused=[2] + [0] * 19), 1, {}, True, 1, 1),
    ("max_examples_missed", run_with(paused=[2] + [0] * 19), 0, {}, False, 1, 1),
    ("max_examples_missed", run_with(missed=[2] * 20), 0, {}, True, 0, 0),  # skipped at random
    ("max_examples_missed", run_with(missed=None), 0, {}, False, 20, 20),
    ("unit", owned(20), "person", {}, True, 0, 1),
    ("unit", made_up(20), "person", {}, False, 20, 0),
    ("allow_seeded_noise", trained("secure"), False, {}, True, 0, 0),
    ("allow_seeded_noise", trained("seeded"), True, {}, True, 0, 1),
    ("allow_seeded_noise", trained("seeded"), False, {}, False, 20, 1),
    ("min_attribute_error.height", with_ages(), {"height": 5}, {}, True, 0, 6.0),
    ("min_attribute_error.age", with_ages(), {"age": 5}, {}, False, 1, 4.0),  # the lower end
    # not known
    ("min_attribute_error.age", with_ages(of_one=math.nan), {"age": 5}, {}, False, 1, math.nan),
    ("min_attribute_error.age", with_ages(low=False), {"age": 5}, {}, False, 20, None),
    ("min_attribute_error.age", run_of(attributes=None), {"age": 5}, {}, False, 20, None),
    ("max_true_positive_rate.sex", made_up(20), {"sex": RATE + 1e-9}, {}, True, 0, RATE),
    ("max_true_positive_rate.sex", made_up(20), {"sex": RATE - 1e-9}, {}, False, 1, RATE),
]


@pytest.mark.parametrize(("rule", "run", "limit", "more", "passed", "offending", "found"), CASES)
def test_rules(
    rule: str,
    run: SavedRun,
    limit: Any,
    more: dict[str, Any],
    passed: bool,
    offending: int,
    found: float | None,
) -> None:
    policy = parse_policy({re.split(r"\W", rule)[0]: limit, **more})
    (verdict,) = [verdict for verdict in check(run, policy) if verdict.rule == rule]
    assert (verdict.passed, verdict.offending) == (passed, offending)
    assert verdict.found == (
        found if found is None else pytest.approx(found, rel=1e-4, nan_ok=True)
    )
    assert RULES[verdict.key].remedy(verdict)


@pytest.mark.parametrize(
    ("run", "policy", "message"),
    [
        (made_up(20), {"min_attribute_error": {"aeg": 5}}, "did you mean 'age'"),
        (worrying(), {"min_attribute_error_share": 0.5, **MISSPELT}, "did you mean 'age'"),
        (made_up(20), {"max_true_positive_rate": {"sax": 0.1}}, "did you mean 'sex'"),
        (run_of(questions=[]), {"max_true_positive_rate": {"sex": 0.1}}, "questions="),
    ],
)
def test_a_name_that_the_run_does_not_have_is_refused(
    run: SavedRun, policy: dict[str, Any], message: str
) -> None:
    with pytest.raises(PolicyError, match=message):
        check(run, parse_policy(policy))


class TestPolicies:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("min_mse_bond = 1", "did you mean 'min_mse_bound'"),
            ("min_mse_bound = nan", "a number"),
            ("min_mse_bound = -1", "0 or more"),
            ("max_share_spared = 2", "a share"),
            ("min_group_size = 2.5", "a whole number"),
            ("allow_seeded_noise = 1", "true or false"),
            ("audited_epsilon_below_claimed = false", "limits nothing"),
            ("attribute_spread.age = 0", "positive and finite"),
            ("max_share_of_concern = 0.5", "belong together"),
            ("min_mse_bound = ", "TOML"),
            ("", "limits nothing"),
        ],
    )
    def test_wrong_ones_are_refused(self, tmp_path: Path, text: str, message: str) -> None:
        path = tmp_path / "policy.toml"
        path.write_text(text)
        with pytest.raises(PolicyError, match=message) as found:
            load_policy(path)
        assert str(path) in str(found.value)

    def test_they_are_checked_however_they_are_made(self, tmp_path: Path) -> None:
        with pytest.raises(PolicyError, match="max_epsilon = nan"):
            Policy(max_epsilon=math.nan)
        with pytest.raises(PolicyError, match="no policy"):
            load_policy(tmp_path / "none.toml")

    def test_a_worrying_run_fails_the_template(self, template_policy: Policy) -> None:
        broken = {found.rule for found in check(worrying(), template_policy) if not found.passed}
        assert broken == {"min_error_share", "max_gain_over_guessing (smokes)"}
        assert all(found.passed for found in check(worrying(safe=True), template_policy))


@pytest.fixture
def template_policy(tmp_path: Path) -> Policy:
    (tmp_path / "template.toml").write_text(template())
    return load_policy(tmp_path / "template.toml")


def audit_verdicts(run: SavedRun, policy: Policy) -> list[Verdict]:
    return [each for each in check(run, policy) if each.key == "audited_epsilon_below_claimed"]


@pytest.mark.parametrize(("audit", "tells"), [(None, False), (AUDIT, True), (ABOVE, True)])
def test_an_audit_that_refutes_nothing_is_judged_where_it_is_asked_for(
    audit: Any, tells: bool
) -> None:
    run = audited(audit)
    assert audit_verdicts(run, Policy()) == []
    (found,) = audit_verdicts(run, Policy(audited_epsilon_below_claimed=True))
    assert found.tells is tells
    noted = any("not at 99.9 %" in note for note in notes(run))
    assert noted is (audit is ABOVE)


def test_an_audit_that_refutes_the_claim_fails_every_policy(template_policy: Policy) -> None:
    run = audited(REFUTED)
    for policy in (Policy(), Policy(audited_epsilon_below_claimed=False), template_policy):
        (found,) = audit_verdicts(run, policy)
        assert "refutes the claim at 99.9 %" in RULES[found.key].sentence(found)
        assert "no other number of the report can be trusted" in found.detail
        assert found.detail in notes(run)
        assert decision(check(run, policy)) == "Do not release"
    run.about["audit"] = REFUTED | {"epsilon": math.nan}  # no file has it
    assert not any(each.passed for each in audit_verdicts(run, Policy()))


@pytest.mark.parametrize(("audit", "epsilon", "least"), [(AUDIT, 1.199, 1.1), (ABOVE, 2.559, 2.55)])
def test_an_audited_epsilon_is_a_lower_bound_and_never_rounded_up(
    audit: Any, epsilon: float, least: float
) -> None:
    """Of a claim of 2.5."""
    run = audited(audit | {"epsilon": epsilon})
    (found,) = audit_verdicts(run, Policy(audited_epsilon_below_claimed=True))
    assert (found.found, found.passed) == (least, least < 2.5)
    assert f"audited ε ≥ {least} (" in found.detail
