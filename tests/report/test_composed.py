"""Several released models together: closed forms, the ledgers of engine runs, and what must not get
lost.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from opacus.accountants import RDPAccountant
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.report.run_cases import ABOVE, AUDIT, REFUTED, made_up
from torchfil import FILPrivacyEngine
from torchfil.gate.gate import check, notes
from torchfil.gate.policy import Policy
from torchfil.glm import Absent as AbsentRow
from torchfil.glm import Composition, LinearRegression, LogisticRegression
from torchfil.questions import Absent
from torchfil.run.baselines import is_told
from torchfil.run.composed import compose, epsilon_at
from torchfil.run.file import load
from torchfil.run.linear_run import linear_run
from torchfil.run.saved_run import QuestionRecord, SavedRun

RNG = np.random.default_rng(3)
X, Y = RNG.normal(size=(40, 3)), RNG.normal(size=40)


@pytest.mark.parametrize("kind", [LinearRegression, LogisticRegression])
def test_two_releases_of_a_linear_model_add_as_in_closed_form(kind: Any) -> None:
    y = Y if kind is LinearRegression else (Y > 0).astype(int)
    model = kind(l2=0.1).fit(X, y)
    both = compose([linear_run(model, X, y, sigma) for sigma in (0.5, 0.8)])
    exact = linear_run(Composition([(model, 0.5), (model, 0.8)]), X, y, None)
    for name in ("fil", "mse_bound", "mse_bound_low"):
        assert both.columns[name] == pytest.approx(exact.columns[name], rel=1e-12)
    assert both.attributes is not None
    assert exact.attributes is not None
    assert np.asarray(both.attributes.error) == pytest.approx(
        np.asarray(exact.attributes.error), rel=1e-6
    )
    assert both.baselines is not None


def test_two_looks_at_a_normal_law_are_one_with_less_noise() -> None:
    """Φ(sqrt(D/2)) of the sum is that of one release at 1/σ² = 1/σ₁² + 1/σ₂², to which no bound is
    needed.
    """
    model, ask = LinearRegression(l2=0.1).fit(X, Y), {"questions": {"member": AbsentRow()}}
    both = compose([linear_run(model, X, Y, sigma, **ask) for sigma in (0.5, 0.8)])
    one = linear_run(model, X, Y, (0.5**-2 + 0.8**-2) ** -0.5, **ask)
    assert both.questions[0].success() == pytest.approx(one.questions[0].success(), rel=1e-9)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[SavedRun, Any]]:
    """Two trainings on the same people, the second without the first three, with what their ledgers
    summed.
    """
    found = []
    for seed, left_out in ((1, 0), (2, 3)):
        torch.manual_seed(seed)
        x, y = (
            torch.tensor(X, dtype=torch.float32)[left_out:],
            torch.tensor(Y > 0).long()[left_out:],
        )
        engine, model = FILPrivacyEngine(noise_seed=seed), nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ids = [f"p{i}" for i in range(left_out, 40)]
        *_, loader = engine.make_private(
            model,
            optimizer,
            DataLoader(TensorDataset(x, y), batch_size=20),
            criterion=nn.CrossEntropyLoss(),
            noise_multiplier=1.0 + seed / 4,
            max_grad_norm=1.0,
            id_of=ids,
            questions={"member": Absent()},
            track=("diagonal",),
        )
        for _ in range(10):
            for batch in loader:
                engine.train_step(*batch)
        path = engine.save_run(tmp_path_factory.mktemp("runs") / "run.parquet", delta=1e-3)
        found.append(
            (load(path), dict(zip(ids, engine.ledger.sums["trace"].tolist(), strict=True)))
        )
    return found


def test_ledgers_of_two_trainings_add(trained: list[tuple[SavedRun, Any]]) -> None:
    runs, traces = zip(*trained, strict=True)
    both = compose(runs)
    by_id = dict(zip(both.ids.tolist(), both.columns["mse_bound"].tolist(), strict=True))
    summed = {key: 3 / sum(trace.get(key, 0.0) for trace in traces) for key in traces[0]}
    assert by_id == pytest.approx(summed, rel=1e-5)
    one, other = (
        dict(zip(run.ids.tolist(), np.asarray(run.questions[0].divergence)[:, 0], strict=True))
        for run in runs
    )
    together = dict(
        zip(both.ids.tolist(), np.asarray(both.questions[0].divergence)[:, 0], strict=True)
    )
    assert together == pytest.approx({key: one[key] + other.get(key, 0.0) for key in one}, rel=1e-6)

    # conservative: the lower end is under each run's own, and under the sum of estimates
    low = both.columns["mse_bound_low"]
    assert (low <= runs[0].columns["mse_bound_low"]).all()
    assert (low <= both.columns["mse_bound"]).all()


def test_epsilon_is_that_of_one_accountant_that_saw_both(
    trained: list[tuple[SavedRun, Any]],
) -> None:
    runs = [run for run, _ in trained]
    both, accountant = compose(runs), RDPAccountant()
    for run in runs:
        facts = run.about["mechanism"]
        accountant.history.append((facts["noise_multiplier"], facts["sample_rate"], facts["steps"]))
    assert both.about["epsilon"] == pytest.approx(accountant.get_epsilon(1e-3), rel=1e-6)
    assert both.about["epsilon"] < sum(run.about["epsilon"] for run in runs)
    assert both.about["delta"] == 1e-3
    assert both.about["released"] == {"runs": 2, "epsilon": "sum of Rényi divergences"}

    # files that do not tell the mechanism, or whose noise changed: ε and δ add
    for change in (
        {"epsilon": 2 * runs[0].about["epsilon"]},
        {"accountant": "prv"},
        {"mechanism": {}},
    ):
        plain = compose([replace(runs[0], about=runs[0].about | change), runs[1]])
        spent = change.get("epsilon", runs[0].about["epsilon"]) + runs[1].about["epsilon"]
        assert (plain.about["epsilon"], plain.about["delta"]) == pytest.approx((spent, 2e-3))
        assert "sum of ε" in notes(plain)[0]


def of(ids: list[int], fil: list[float], **changes: Any) -> SavedRun:
    """A run of few examples."""
    run = made_up(len(ids), attacks=[], texts=None)
    own = np.asarray(fil)
    columns = {**run.columns, "fil": own, "mse_bound": own**-2.0, "mse_bound_low": 0.9 * own**-2.0}
    return replace(run, ids=np.asarray(ids), columns=columns, **changes)


def test_who_is_missing_in_a_run_keeps_its_bound_and_who_is_untold_in_one_is_untold() -> None:
    first, second = of([5, 1, 3], [1.0, 2.0, 3.0]), of([7, 3], [4.0, 5.0])
    second.columns["mse_bound_low"][1] = 0.0  # example 3 was drawn too rarely
    both = compose([first, second])
    found = dict(zip(both.ids.tolist(), both.columns["mse_bound"].tolist(), strict=True))
    assert found == pytest.approx({5: 1.0, 1: 1 / 4, 3: 1 / 34, 7: 1 / 16})
    assert is_told(both)[both.ids == 3].tolist() == [False]
    assert is_told(both).sum() == 3
    assert both.groups == {}  # of example 7 none is known from the first run
    assert set(compose([first, of([3, 5], [1.0, 1.0])]).groups) == {"sex", "site"}


def test_whom_a_run_never_drew_nobody_tells_of() -> None:
    """It was in the data, and another time it leaks: an unknown bound of that run is no
    protection.
    """
    first, second = of([1, 2], [1.0, 2.0]), of([1, 2], [3.0, 4.0])
    second.columns["fil"][0] = second.columns["mse_bound"][0] = math.nan
    assert is_told(compose([first, second])).tolist() == [False, True]


def test_nothing_passes_because_a_run_did_not_tell_it() -> None:
    """What one release leaves out is unknown of all, and never taken for nothing."""
    first = made_up(20)
    unasked = replace(
        first,
        questions=[QuestionRecord("other", ["a", "b"], True, np.zeros((20, 2)), np.zeros((20, 2)))],
    )
    with pytest.raises(ValueError, match="questions"):
        compose([first, unasked])
    silent = compose([first, replace(first, questions=[], attributes=None)])
    policy = Policy(
        max_gain_over_guessing=0.5,
        max_true_positive_rate={"sex": 1.0},
        min_attribute_error_share=0.0,
    )
    verdicts = {verdict.rule: verdict for verdict in check(silent, policy)}
    for rule in (
        "max_gain_over_guessing (sex)",
        "max_true_positive_rate.sex",
        "min_attribute_error_share",
    ):
        assert (verdicts[rule].state, verdicts[rule].found) == ("unknown", None)
    assert "every release" in verdicts["max_gain_over_guessing (sex)"].detail

    no_epsilon = compose([first, replace(first, about=first.about | {"epsilon": None})])
    assert no_epsilon.about["epsilon"] is None


@pytest.mark.parametrize(
    ("audits", "kept"),
    [
        ((AUDIT, None), None),
        ((AUDIT, AUDIT), AUDIT),
        ((None, REFUTED), REFUTED),
        ((AUDIT, ABOVE), ABOVE),
    ],
)
def test_the_audit_that_speaks_most_against_its_claim_is_kept(audits: Any, kept: Any) -> None:
    run = made_up(20)
    assert (
        compose([replace(run, about=run.about | {"audit": each}) for each in audits]).about["audit"]
        == kept
    )


def test_seeds_weights_pauses_and_violated_bounds_of_any_release_count() -> None:
    run = made_up(20)
    seeded = replace(
        run,
        about=run.about | {"mechanism": run.about["mechanism"] | {"noise": "seeded"}},
        columns={**run.columns, "paused": np.arange(20) // 18},
    )
    beaten = replace(run.attacks[0], violated=np.asarray([True, False, False]))
    both = compose([run, replace(seeded, attacks=[beaten], ids=run.ids[::-1].copy())])
    broken = {
        verdict.key: verdict
        for verdict in check(both, Policy(max_share_spared=0.0))
        if not verdict.passed
    }
    assert broken.keys() >= {"allow_seeded_noise", "max_violated_bounds", "max_share_spared"}
    assert both.ids[broken["max_violated_bounds"].rows].tolist() == [19]
    assert both.ids[broken["max_examples_missed"].rows].tolist() == [0, 1]
    assert broken["max_share_spared"].offending == 6  # three of each


def test_linear_runs_that_count_in_other_units_do_not_add() -> None:
    """A column's standard deviation is another one in other data; the error names no deviation."""
    model = LinearRegression(l2=0.1)
    runs = [
        linear_run(model.fit(x, Y), x, Y, 0.5)
        for x in (X, X * [1.0, 1.001, 1.0], X * [1.0, 9.0, 1.0])
    ]
    compose(runs[:2])
    with pytest.raises(ValueError, match=r"deviations that differ; save with scales=None$"):
        compose([runs[0], runs[2]])
    given = [
        linear_run(model.fit(x, Y), x, Y, 0.5, scales=[1.0, 2.0, 3.0, 4.0]) for x in (X, X * 9)
    ]
    assert compose(given).about["unit_of_inputs"] == "given units"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": np.arange(20) + 100}, "no ids"),
        ({"ids": np.zeros(20, dtype=np.int64)}, "repeat"),
        ({"about": {"dataset": {"num_coordinates": 4}}}, "private inputs"),
        ({"about": {"dataset": {"most_coordinates": 3}}}, "num_coordinates"),
        ({"about": {"mechanism": {"unit": "owner", "unit_names": ["patient", "visit"]}}}, "unit"),
    ],
)
def test_runs_that_do_not_add_are_refused(change: dict[str, Any], message: str) -> None:
    run = made_up(20)
    about = run.about | {"mechanism": {"unit": "example"}} | change.get("about", {})
    with pytest.raises(ValueError, match=message):
        compose([run, replace(run, **{**change, "about": about})])


def test_an_unknown_epsilon_is_not_0() -> None:
    assert math.isnan(epsilon_at(np.array([math.nan]), 1e-5))
    assert epsilon_at(np.array([0.0]), 0.9) == 0
