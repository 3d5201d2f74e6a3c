"""Each rule of a policy passes and fails where it should, and what is not known never passes as safe."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.report.run_cases import made_up, worrying
from torchfil.gate.gate import check, notes
from torchfil.gate.policy import TEMPLATE, Policy, PolicyError, load_policy, parse_policy
from torchfil.gate.verdict import Verdict, told_apart
from torchfil.guessing import largest_true_positive_rate
from torchfil.report.writer import write_report
from torchfil.run.file import load, save
from torchfil.run.saved_run import SavedRun


def run_with(**columns: Any) -> SavedRun:
    run = made_up(20)
    changed = {name: np.asarray(values) for name, values in columns.items()}
    return dataclasses.replace(run, columns={**run.columns, **changed})


def verdict(run: SavedRun, rule: str, **policy: Any) -> Verdict:
    (found,) = [v for v in check(run, parse_policy(policy)) if v.rule == rule]
    return found


LOW = np.linspace(0.1, 2.0, 20)


class TestRules:
    def test_smallest_bound(self) -> None:
        run = run_with(mse_bound_low=LOW, mse_bound=LOW + 10)
        assert verdict(run, "min_mse_bound", min_mse_bound=0.1).passed
        failed = verdict(run, "min_mse_bound", min_mse_bound=0.25)
        assert (failed.passed, failed.offending, failed.found) == (False, 2, 0.1)

    def test_share_of_concern(self) -> None:
        run = run_with(mse_bound_low=LOW)
        limits = {"mse_bound_of_concern": 0.25}
        assert verdict(run, "max_share_of_concern", max_share_of_concern=0.1, **limits).passed
        failed = verdict(run, "max_share_of_concern", max_share_of_concern=0.09, **limits)
        assert (failed.passed, failed.offending, failed.found) == (False, 2, 0.1)

    def test_attribute_errors_take_the_lower_end(self) -> None:
        run = made_up(20)
        assert run.attributes is not None
        error = np.full((20, 3), 6.0)
        low = error.copy()
        low[3, 0] = 4.0
        both = dataclasses.replace(run, attributes=dataclasses.replace(run.attributes, error=error, error_low=low))
        failed = verdict(both, "min_attribute_error.age", min_attribute_error={"age": 5})
        assert (failed.passed, failed.offending, failed.found) == (False, 1, 4.0)
        assert "in years, lower end" in failed.detail
        assert verdict(both, "min_attribute_error.height", min_attribute_error={"height": 5}).passed
        one = dataclasses.replace(run, attributes=dataclasses.replace(run.attributes, error=error))
        unknown = verdict(one, "min_attribute_error.age", min_attribute_error={"age": 5})
        assert (unknown.passed, unknown.offending, unknown.found) == (False, 20, None)
        assert "is not known: make_private(track=('diagonal',)) tells" in unknown.detail
        without = dataclasses.replace(run, attributes=None)
        assert not verdict(without, "min_attribute_error.age", min_attribute_error={"age": 5}).passed
        with pytest.raises(PolicyError, match="the run has no attribute 'aeg'; did you mean 'age'"):
            check(run, parse_policy({"min_attribute_error": {"aeg": 5}}))

    def test_guesses_of_any_attacker_take_the_upper_end(self) -> None:
        run = made_up(20)
        rate = float(run.questions[0].rate(0.01).max())
        assert rate == pytest.approx(float(largest_true_positive_rate(3.3, 0.01)))
        assert verdict(run, "max_true_positive_rate.sex", max_true_positive_rate={"sex": rate + 1e-9}).passed
        failed = verdict(run, "max_true_positive_rate.sex", max_true_positive_rate={"sex": rate - 1e-9})
        assert (failed.passed, failed.offending) == (False, 1)
        assert failed.found == pytest.approx(rate)
        limits = {"max_true_positive_rate": {"sex": 0.5}, "at_false_positive_rate": 0.5}
        assert "wrong 50 %" in verdict(run, "max_true_positive_rate.sex", **limits).detail
        with pytest.raises(PolicyError, match="did you mean 'sex'"):
            check(run, parse_policy({"max_true_positive_rate": {"sax": 0.1}}))
        with pytest.raises(PolicyError, match="questions="):
            check(dataclasses.replace(run, questions=[]), parse_policy({"max_true_positive_rate": {"sex": 0.1}}))

    def test_epsilon(self) -> None:
        run = made_up(20)
        assert verdict(run, "max_epsilon", max_epsilon=2.5).passed
        failed = verdict(run, "max_epsilon", max_epsilon=2)
        assert (failed.passed, failed.offending) == (False, 20)
        unknown = dataclasses.replace(run, about={})
        assert not verdict(unknown, "max_epsilon", max_epsilon=100).passed

    def test_individual_epsilon(self) -> None:
        run = run_with(epsilon=LOW)
        assert verdict(run, "max_individual_epsilon", max_individual_epsilon=2.0).passed
        failed = verdict(run, "max_individual_epsilon", max_individual_epsilon=1.85)
        assert (failed.passed, failed.offending, failed.found) == (False, 2, 2.0)
        without = dataclasses.replace(run, columns={k: v for k, v in run.columns.items() if k != "epsilon"})
        assert not verdict(without, "max_individual_epsilon", max_individual_epsilon=9).passed

    def test_group_disparity(self) -> None:
        sex = np.asarray(["f"] * 10 + ["m"] * 8 + ["x"] * 2)
        fil = np.asarray([1.0] * 10 + [3.0] * 8 + [100.0] * 2)
        run = dataclasses.replace(run_with(fil=fil), groups={"sex": sex})
        rule = "max_group_disparity (sex)"
        options = {"min_group_size": 5}
        assert verdict(run, rule, max_group_disparity=3, **options).passed
        failed = verdict(run, rule, max_group_disparity=2.9, **options)
        assert (failed.passed, failed.offending, failed.found) == (False, 8, 3.0)
        small = verdict(run, rule, max_group_disparity=2.9, min_group_size=10)
        assert (small.passed, small.found, small.offending) == (False, None, 0), "what is not known fails"
        assert "fewer than two groups of at least 10 measured examples, so the disparity is not known" in small.detail
        assert not [v for v in check(run, Policy()) if v.rule.startswith("max_group_disparity")]
        assert verdict(run, rule, max_group_disparity=3, min_group_size=1).found == 100
        without = dataclasses.replace(run, groups={})
        assert not verdict(without, "max_group_disparity", max_group_disparity=100).passed
        harmless = dataclasses.replace(run, columns={**run.columns, "fil": np.where(sex == "f", 0.0, fil)})
        assert verdict(harmless, rule, max_group_disparity=3, **options).found == np.inf

    def test_violated_bounds(self) -> None:
        run = made_up(20)
        assert verdict(run, "max_violated_bounds").passed
        attack = dataclasses.replace(run.attacks[0], violated=np.asarray([False, True, False]))
        broken = dataclasses.replace(run, attacks=[attack, attack])
        failed = verdict(broken, "max_violated_bounds")
        assert (failed.passed, failed.offending) == (False, 1), "the same example counts once"
        assert "gradient" in failed.detail
        assert verdict(broken, "max_violated_bounds", max_violated_bounds=1).passed

    def test_never_drawn_is_not_safe(self) -> None:
        run = run_with(
            participations=[0, 0] + [1] * 18,
            sampling_error=[np.inf] * 3 + [0.1] * 17,
            mse_bound_low=[np.inf] * 3 + [1.0] * 17,
        )
        failed = verdict(run, "max_share_not_measured", min_mse_bound=0.5)
        assert (failed.passed, failed.offending, failed.found) == (False, 3, 0.15)
        assert verdict(run, "max_share_not_measured", max_share_not_measured=0.15).passed
        share = verdict(run, "max_share_of_concern", mse_bound_of_concern=2.0, max_share_of_concern=0.9)
        assert share.found == 1.0, "the share is that of the measured examples"

    def test_missed_steps_are_not_safe(self) -> None:
        run = run_with(missed=[2] + [0] * 19)
        failed = verdict(run, "max_examples_missed")
        assert (failed.passed, failed.offending) == (False, 1)
        assert verdict(run, "max_examples_missed", max_examples_missed=1).passed
        unknown = dataclasses.replace(run, columns={k: v for k, v in run.columns.items() if k != "missed"})
        assert not verdict(unknown, "max_examples_missed").passed

    def test_not_a_number_fails(self) -> None:
        run = run_with(mse_bound_low=[np.nan] + [1.0] * 19, epsilon=[np.nan] + [1.0] * 19)
        assert verdict(run, "min_mse_bound", min_mse_bound=0.1).offending == 1
        assert not verdict(run, "max_individual_epsilon", max_individual_epsilon=5).passed


class TestAgainstABlindGuess:
    def test_errors_and_exposed(self) -> None:
        found = verdict(worrying(), "min_error_share", min_error_share=0.5)
        assert (found.passed, found.rows.tolist()) == (False, [7])
        assert found.found == pytest.approx(0.02**0.5 / 0.5)
        assert verdict(worrying(), "min_error_share", min_error_share=0.28).passed
        share = verdict(worrying(), "max_share_exposed", max_share_exposed=0.005)
        assert (share.passed, share.found, share.rows.tolist()) == (False, 0.01, [7])
        assert verdict(worrying(), "max_share_exposed", max_share_exposed=0.01).passed

    def test_lower_ends_count(self) -> None:
        run = worrying(safe=True)
        run.columns["mse_bound_low"] = run.columns["mse_bound_low"].copy()
        run.columns["mse_bound_low"][3] = 0.01
        assert verdict(run, "min_error_share", min_error_share=0.5).rows.tolist() == [3]
        assert verdict(run, "max_share_exposed", max_share_exposed=0.0).rows.tolist() == [3]

    def test_the_policy_may_know_better(self) -> None:
        found = verdict(worrying(), "min_error_share", min_error_share=0.5, blind_error=0.2)
        assert found.found == pytest.approx(0.02**0.5 / 0.2)
        assert found.passed
        spread = {"min_attribute_error_share": 0.5, "attribute_spread": {"age": 0.15}}
        assert verdict(worrying(), "min_attribute_error_share", **spread).passed
        with pytest.raises(PolicyError, match="attribute_spread: the run has no attribute 'aeg'; did you mean 'age'"):
            check(worrying(), parse_policy({"min_attribute_error_share": 0.5, "attribute_spread": {"aeg": 1.0}}))
        with pytest.raises(PolicyError, match="must be positive and finite"):
            parse_policy({"attribute_spread": {"age": 0}})

    @pytest.mark.parametrize("scale", [0.01, 0.1, 100.0])
    def test_the_unit_of_the_data_does_not_matter(self, tmp_path: Path, scale: float) -> None:
        """Before, the template's thresholds were numbers in a unit: the same data in another passed or failed."""
        path = tmp_path / "policy.toml"
        path.write_text(TEMPLATE)

        def judged(run: SavedRun) -> dict[str, bool]:
            return {found.rule: found.passed for found in check(run, load_policy(path))}

        for run in (worrying(), worrying(safe=True)):
            assert run.attributes is not None
            error = scale * np.asarray(run.attributes.error)
            other = dataclasses.replace(
                run,
                about=run.about | {"dataset": {"input_range": [0.0, scale]}},
                columns=run.columns | {name: scale**2 * run.columns[name] for name in ("mse_bound", "mse_bound_low")},
                attributes=dataclasses.replace(run.attributes, error=error, error_low=error),
            )
            assert judged(other) == judged(run)

    def test_attributes(self) -> None:
        found = verdict(worrying(), "min_attribute_error_share", min_attribute_error_share=0.5)
        assert (found.passed, found.rows.tolist()) == (False, [7])
        assert found.found == pytest.approx(0.2)
        assert "of 2 attributes; the worst is 'age'" in found.detail

    def test_questions(self) -> None:
        found = verdict(worrying(), "max_gain_over_guessing (smokes)", max_gain_over_guessing=0.1)
        assert (found.passed, found.rows.tolist()) == (False, [7])
        assert found.found is not None
        assert 0.3 < found.found <= 0.5

    def test_what_is_not_known_fails(self) -> None:
        bare = dataclasses.replace(worrying(), about={}, attributes=None, questions=[])
        limits = {
            "min_error_share": 0,
            "max_share_exposed": 1,
            "min_attribute_error_share": 0,
            "max_gain_over_guessing": 1,
        }
        for name, limit in limits.items():
            found = verdict(bare, name, **{name: limit})
            assert (found.passed, found.found, found.offending) == (False, None, 100)
            assert any(remedy in found.detail for remedy in ("save_run(", "make_private("))
        unknown = dataclasses.replace(worrying(), about={})
        found = verdict(unknown, "min_attribute_error_share", min_attribute_error_share=0)
        assert "the spread of 'age' is not known: attribute_spread in the policy" in found.detail


class TestAttacks:
    def test_untestable_attacks_do_not_count(self) -> None:
        run = made_up(20)
        assert verdict(run, "min_attacks", min_attacks=1).passed
        blind = dataclasses.replace(
            run.attacks[0], testable=False, untestable="never saw the model", violated=np.ones(3, bool)
        )
        only = dataclasses.replace(run, attacks=[blind])
        failed = verdict(only, "min_attacks", min_attacks=1)
        assert (failed.passed, failed.found) == (False, 0)
        assert failed.detail.endswith("not testable: gradient: never saw the model")
        assert verdict(only, "max_violated_bounds").passed, "what is not testable violates nothing"
        assert not verdict(dataclasses.replace(run, attacks=[]), "min_attacks", min_attacks=1).passed

    def test_the_reason_is_kept_in_the_file(self, tmp_path: Path) -> None:
        blind = dataclasses.replace(
            made_up(20).attacks[0], testable=False, untestable="never saw the model", blind=np.arange(3.0)
        )
        (again,) = load(save(made_up(20, attacks=[blind]), tmp_path / "run.parquet")).attacks
        assert (again.testable, again.untestable) == (False, "never saw the model")
        assert again.blind is not None
        assert again.blind.tolist() == [0.0, 1.0, 2.0]


def test_ties_have_enough_digits() -> None:
    assert told_apart(1.05, 1.0499999) == ("1.05", "1.0499999")
    assert told_apart(0.05, 0.05) == ("0.05", "0.05")
    assert told_apart(0, 3) == ("0", "3")
    limit, found = told_apart(0.3, 0.1 + 0.2)
    assert limit != found


class TestPolicies:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("min_mse_bond = 1", "unknown key 'min_mse_bond'; did you mean 'min_mse_bound'?"),
            ("epsilon = 1", "unknown key 'epsilon'; did you mean 'max_epsilon'?"),
            ("min_mse_bound = 'small'", "min_mse_bound = 'small' must be a number"),
            ("min_mse_bound = true", "min_mse_bound = True must be a number"),
            ("min_mse_bound = nan", "min_mse_bound = nan must be a number"),
            (f"min_mse_bound = 1{'0' * 400}", "must be a number"),
            ("min_mse_bound = -1", "min_mse_bound = -1 must not be negative"),
            ("min_group_size = 2.5", "min_group_size = 2.5 must be a whole number"),
            ("max_violated_bounds = true", "max_violated_bounds = True must be a whole number"),
            ("min_attribute_error = 3", "min_attribute_error = 3 must be a table"),
            ("max_share_not_measured = 5", "max_share_not_measured = 5 must be a share"),
            ("max_share_of_concern = 0.5", "belong together"),
            ("min_mse_bound = ", "cannot be read as TOML"),
        ],
    )
    def test_wrong_ones_are_refused(self, tmp_path: Path, text: str, message: str) -> None:
        path = tmp_path / "policy.toml"
        path.write_text(text)
        with pytest.raises(PolicyError, match=re.escape(message)) as found:
            load_policy(path)
        assert str(path) in str(found.value)

    def test_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(PolicyError, match="no policy .*`torchfil gate --init` writes a commented one"):
            load_policy(tmp_path / "none.toml")

    def test_the_template_explains_every_key(self, tmp_path: Path) -> None:
        path = tmp_path / "policy.toml"
        path.write_text(TEMPLATE)
        assert load_policy(path).min_error_share == 0.5
        path.write_text(re.sub(r"^# (?=\w+ = |\[)", "", TEMPLATE, flags=re.MULTILINE))
        everything = load_policy(path)
        for field in dataclasses.fields(Policy):
            assert re.search(rf"^(# )?\[?{field.name}", TEMPLATE, flags=re.MULTILINE), field.name
            assert getattr(everything, field.name) is not None
        assert everything.min_attribute_error == {"age": 5.0}

    def test_the_documentation_explains_every_key(self) -> None:
        page = (Path(__file__).parents[2] / "docs" / "report.md").read_text(encoding="utf-8")
        for field in dataclasses.fields(Policy):
            assert re.search(rf"^\| [^|]*`{field.name}`", page, flags=re.MULTILINE), field.name

    @pytest.mark.parametrize("text", ["", "# nothing\n", "min_group_size = 10\nmax_violated_bounds = 3\n"])
    def test_a_policy_that_limits_nothing_is_refused(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "policy.toml"
        path.write_text(text)
        with pytest.raises(PolicyError, match="the policy limits nothing, so that every run would pass; set at least"):
            load_policy(path)

    def test_a_worrying_run_fails_the_template(self, tmp_path: Path) -> None:
        """It passed the template of before, whose thresholds knew no unit and asked for no attribute or question."""
        path = tmp_path / "policy.toml"
        path.write_text(TEMPLATE)
        before = {"min_mse_bound": 0.01, "mse_bound_of_concern": 0.05, "max_share_of_concern": 0.05, "max_epsilon": 8}
        assert all(found.passed for found in check(worrying(), parse_policy(before)))
        broken = {found.rule for found in check(worrying(), load_policy(path)) if not found.passed}
        assert broken == {"min_error_share", "min_attribute_error_share", "max_gain_over_guessing (smokes)"}
        assert all(found.passed for found in check(worrying(safe=True), load_policy(path)))

    def test_the_template_tells_what_still_applies_when_left_out(self) -> None:
        numbers = {field.name: field.default for field in dataclasses.fields(Policy) if field.default is not None}
        for table in ("attribute_spread", "min_attribute_error", "max_true_positive_rate"):
            del numbers[table]
        assert {v.rule: v.limit for v in check(made_up(20), parse_policy({}))} == {
            name: value for name, value in numbers.items() if name.startswith("max_")
        }
        for name, value in numbers.items():
            (beside,) = [part for part in TEMPLATE.split("\n\n") if re.search(rf"^{name} = ", part, flags=re.MULTILINE)]
            shown = f"{value}".lower() if isinstance(value, bool) else f"{value:g}"
            assert f"left out, it is {shown}" in beside.lower(), name


def test_a_delta_that_promises_little_is_noted(tmp_path: Path) -> None:
    run = made_up(20)
    large = dataclasses.replace(run, about={**run.about, "delta": 0.05})
    assert any("δ = 0.05 is not below 1/20" in note for note in notes(large))
    assert not any("δ" in note for note in notes(dataclasses.replace(run, about={**run.about, "delta": 0.049})))
    for redacted in (False, True):
        page = write_report(large, tmp_path / str(redacted), redacted=redacted, min_group=2).read_text()
        assert "δ = 0.05 is not below 1/20" in page
