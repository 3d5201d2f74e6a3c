"""A run beside an earlier one: chance alone does not fail it, and a run that leaks clearly more is
found.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.report.run_cases import made_up
from tests.test_cli import call, refused
from torchfil.gate.gate import check
from torchfil.gate.policy import Policy
from torchfil.report import save
from torchfil.run.matching import clearly_more, worsening
from torchfil.run.saved_run import SavedRun

OFF = {
    "max_violated_bounds": "off",
    "max_share_too_few_draws": "off",
    "max_examples_missed": "off",
    "allow_seeded_noise": "off",
}


def fails(before: SavedRun, after: SavedRun, tolerance: float) -> bool:
    return not all(
        each.passed for each in check(after, Policy(max_worsening=tolerance, levels=OFF), before)
    )


def repeated(
    seed: int, *, times: float = 1.0, shared: float = 0.015, error: float = 0.15, n: int = 200
) -> SavedRun:
    """A run of one recipe: each log η̄ is off by chance of its own, and all together by the
    weights' course.
    """
    rng, truth = np.random.default_rng(seed), np.random.default_rng(0).lognormal(sigma=0.7, size=n)
    fil = times * truth * np.exp(error * rng.normal(size=n) + shared * rng.normal())
    columns = {
        "fil": fil,
        "mse_bound": fil**-2,
        "mse_bound_low": (fil * math.exp(1.96 * error)) ** -2,
    }
    columns |= {"participations": np.full(n, 9), "missed": np.zeros(n, dtype=np.int64)}
    return SavedRun(about={"epsilon": 2.0, "delta": 1e-5}, ids=np.arange(n), columns=columns)


def test_chance_alone_fails_at_most_one_pair_in_twenty() -> None:
    """The quick sister: 300 pairs whose standard errors are right, and whose common deviation no
    interval has.
    """
    pairs = [(repeated(2 * seed), repeated(2 * seed + 1)) for seed in range(1, 301)]
    assert np.mean([fails(*pair, 0.0) for pair in pairs]) <= 0.05
    assert not any(fails(*pair, 0.1) for pair in pairs)


def test_half_the_noise_is_found_and_twice_is_welcome() -> None:
    for seed in range(1, 40):
        before = repeated(seed)
        assert fails(before, repeated(seed + 100, times=2.0), 0.1)
        assert not fails(before, repeated(seed + 100, times=0.5), 0.0)


def test_one_person_is_enough() -> None:
    """The typical example stays as it was, and the most exposed one leaks four times as much."""
    before, after = repeated(1), repeated(2)
    worst = int(np.argmax(before.columns["fil"]))
    for name, power in (("fil", 1), ("mse_bound", -2), ("mse_bound_low", -2)):
        after.columns[name][worst] *= 4.0**power
    (found,) = [
        each
        for each in check(after, Policy(max_worsening=0.1, levels=OFF), before)
        if not each.passed
    ]
    assert found.subject == "the most exposed"
    assert worst in after.ids[found.rows]


def test_closed_forms_are_compared_as_they_are() -> None:
    run = made_up()
    exact = replace(run, columns=run.columns | {"mse_bound_low": run.columns["mse_bound"]})
    worse = {
        name: values / (1.21 if name.startswith("mse") else 1 / 1.1)
        for name, values in exact.columns.items()
    }
    after = replace(
        exact,
        columns=exact.columns
        | {name: worse[name] for name in ("fil", "mse_bound", "mse_bound_low")},
    )
    found, moved, count = worsening(exact, after)
    of_fil = [
        found[name]
        for name in ("all examples together", "the 5 % most exposed", "the most exposed")
    ]
    assert of_fil == pytest.approx([0.1] * 3)
    assert (len(moved), count) == (40, 40)
    assert found["ε for everybody"] == found["question “sex”"] == 0.0
    assert fails(exact, after, 0.099)
    assert not fails(exact, after, 0.101)


def test_the_margin_by_hand() -> None:
    """exp(mean difference − 3 standard errors) − 1, of the two largest of four."""
    before, after = np.array([1.0, 2.0, 3.0, 4.0]), np.array([5.0, 1.0, 6.0, 2.0])
    errors = np.array([0.1, 0.9, 0.2, 0.3]), np.array([0.05, 0.9, 0.1, 0.9])
    change = (math.log(5) + math.log(6) - math.log(3) - math.log(4)) / 2
    chance = math.sqrt((0.2**2 + 0.3**2 + 0.05**2 + 0.1**2) / 4)
    assert clearly_more((before, after), errors, 0.5) == pytest.approx(
        math.exp(change - 3 * chance) - 1
    )


def test_epsilon_and_questions_count_too() -> None:
    run = made_up()
    assert fails(run, replace(run, about=run.about | {"epsilon": 3.0}), 0.1)
    ends = {
        name: 9 * np.asarray(getattr(run.questions[0], name))
        for name in ("divergence", "divergence_high")
    }
    asked = replace(run.questions[0], **ends)
    (found,) = [
        v
        for v in check(replace(run, questions=[asked]), Policy(max_worsening=0.1), run)
        if not v.passed
    ]
    assert found.subject == "question “sex”"


def test_nobody_passes_by_leaving_things_out() -> None:
    """What the earlier run tells and the later one does not is unknown.

    So is all, where few examples are compared.
    """

    def states(after: SavedRun, before: SavedRun) -> dict[str, str]:
        verdicts = [
            each
            for each in check(after, Policy(max_worsening=0.1), before)
            if each.key == "max_worsening"
        ]
        return {each.subject: each.state for each in verdicts}

    run = made_up()
    known = states(run, run)
    assert set(known.values()) == {"kept"}
    for change in ({"epsilon": 20.0, "delta": 1e-4}, {"epsilon": None}):
        assert states(replace(run, about=run.about | change), run) == known | {
            "ε for everybody": "unknown"
        }
    found = states(replace(run, questions=[]), run)
    assert found == {name: "unknown" if "question" in name else "kept" for name in known}
    assert (
        states(run, replace(run, questions=[], about=run.about | {"epsilon": None})).keys()
        < known.keys()
    )
    endless = replace(run, about=run.about | {"epsilon": math.inf})
    assert states(endless, endless) == known
    assert states(endless, run)["ε for everybody"] == "broken"

    strangers = run.ids.copy()
    strangers[:19] += 1000
    assert set(states(replace(run, ids=strangers), run).values()) == {"kept"}
    strangers[19:21] += 1000
    assert states(replace(run, ids=strangers), run) == {"": "unknown"}


@pytest.mark.parametrize("which", ["before", "after"])
def test_who_took_part_in_paused_steps_is_not_compared(which: str) -> None:
    """They leak more than the run shows."""
    before, after = repeated(1), repeated(1, times=0.5)
    columns = {"before": before, "after": after}[which].columns
    for many, states in ((99, {"kept"}), (101, {"unknown"})):
        columns["paused"] = np.arange(200) < many
        found = [
            each
            for each in check(after, Policy(max_worsening=0.1), before)
            if each.key == "max_worsening"
        ]
        assert {each.state for each in found} == states
        assert worsening(before, after)[2] == 200 - many


@pytest.mark.parametrize("which", ["before", "after", "both"])
def test_one_person_about_whom_nothing_leaked_decides_for_nobody_else(which: str) -> None:
    before, after = repeated(1), repeated(101, times=2.0)
    for name, run in (("before", before), ("after", after)):
        if which in (name, "both"):
            run.columns["fil"][7], run.columns["mse_bound"][7], run.columns["mse_bound_low"][7] = (
                0.0,
                math.inf,
                5.0,
            )
    assert 0.5 < worsening(before, after)[0]["all examples together"] < 1.1
    assert worsening(after, before)[0]["all examples together"] < 0


def test_the_command(tmp_path: Path) -> None:
    before, after = (
        save(repeated(seed, times=times), tmp_path / f"{seed}.parquet")
        for seed, times in ((1, 1.0), (2, 2.0))
    )
    options = ("--baseline", before, "--fail-if-worse")
    found = call("gate", after, *options, "--json")
    rules = json.loads(found.stdout)["rules"]
    assert found.exit_code == 1
    # nothing else counts
    assert {rule["rule"].partition(" ")[0] for rule in rules} == {"max_worsening"}
    kept = call("gate", before, "--baseline", after, "--fail-if-worse")
    assert kept.exit_code == 0
    assert "released" not in kept.stdout, "it says nothing about a release"
    assert call("gate", after, *options, "--tolerance", 3).exit_code == 0

    strangers = save(replace(repeated(1), ids=np.arange(200) + 1000), tmp_path / "other.parquet")
    assert "1000" not in refused("gate", strangers, *options), "errors name nobody"

    policy = tmp_path / "policy.toml"
    policy.write_text("max_epsilon = 8\nmax_worsening = 3.0")
    assert call("gate", after, "--policy", policy, *options).exit_code == 0
    assert call("gate", after, "--policy", policy, *options, "--tolerance", 0.1).exit_code == 1
    assert call("gate", after, "--policy", policy).exit_code == 3
    policy.write_text("max_epsilon = 8")
    for args, message in (
        (("--policy", policy, "--baseline", before), "no effect"),
        (("--fail-if-worse",), "--baseline"),
        (("--baseline", before, "--tolerance", 0.2), "--fail-if-worse"),
        (("--baseline", after, "--fail-if-worse"), "twice"),
    ):
        assert message in refused("gate", after, *args)
    strangers = save(
        replace(repeated(1), ids=np.arange(200) + 1000), tmp_path / "strangers.parquet"
    )
    assert "no ids" in refused("gate", after, "--baseline", strangers, "--fail-if-worse")
