"""What an engine saves of its run: everything it knows, and nothing changes by saving."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from opacus.accountants import RDPAccountant
from torch.utils.data import TensorDataset

import torchfil
from tests.engine.loops import data, train
from tests.report.pages import files_of
from torchfil.accounting.ledger import MAX_POINTS, Timeline
from torchfil.attacks import AttackResult
from torchfil.engine.reading import epsilon_over_time
from torchfil.engine.saving.data import data_sha256
from torchfil.report import load, write_report

DELTA = 1e-5


@pytest.fixture(scope="module")
def trained() -> Any:
    keys = [f"patient {i}" for i in range(60)]
    return train(data(60), steps=12, track=("diagonal",), id_of=keys)


def test_the_file_says_what_the_engine_says(trained: Any, tmp_path: Path) -> None:
    engine = trained.engine
    sides = ["left" if i % 3 else "right" for i in range(60)]
    attributes = {"attribute_names": list("abcde"), "attribute_units": ["cm"] * 5}
    groups = {"side": sides, "same": {f"patient {i}": 7 for i in range(60)}}
    about = {"delta": DELTA, "title": "a trial", "input_range": (-5.0, 5.0)}
    run = load(engine.save_run(tmp_path / "run.parquet", groups=groups, **about, **attributes))
    table = engine.leakage(delta=DELTA)
    assert run.ids.tolist() == [f"patient {i}" for i in range(60)]
    for column in (
        "fil",
        "fil_error",
        "sampling_error",
        "mse_bound",
        "mse_bound_low",
        "participations",
        "missed",
    ):
        np.testing.assert_array_equal(run.columns[column], table[column])
    np.testing.assert_array_equal(run.columns["epsilon"], table["individual_epsilon"])
    about = run.about
    assert (about["title"], about["epsilon"], about["probe_seed"]) == (
        "a trial",
        engine.get_epsilon(DELTA),
        3,
    )
    assert about["model"] == {"name": "Sequential", "num_parameters": 57, "not_smooth": []}
    assert (about["dataset"]["input_shape"], about["dataset"]["input_range"]) == ([5], [-5, 5])
    assert about["dataset"]["data_sha256"] == data_sha256(data(60))
    assert [
        about["mechanism"][name] for name in ("steps", "num_probes", "fil_rate", "rel_error")
    ] == [12, 3, 1.0, None]
    attribute_fil = engine.get_attribute_fil()
    np.testing.assert_allclose(run.attributes.error, 1 / attribute_fil.value.cpu(), rtol=1e-6)
    np.testing.assert_allclose(
        run.attributes.error_low, 1 / attribute_fil.interval(0.95)[1].cpu(), rtol=1e-6
    )
    assert (run.groups["side"].tolist(), set(run.groups["same"])) == (sides, {"7"})
    assert run.bounds["rdp_mse_bound"]["replace_one"] == engine.get_rdp_mse_bound(10.0)
    success = run.bounds["rero"]["success"]
    assert all(s >= p - 0.01 for s, p in zip(success, run.bounds["rero"]["prior"], strict=True))
    assert success == sorted(success)
    assert run.history["step"].tolist() == [8, 12]
    fil = np.nan_to_num(run.columns["fil"])  # those that were not measured count as 0
    assert run.history["fil_max"][-1] == pytest.approx(fil.max())
    assert run.history["fil_median"][-1] == pytest.approx(
        np.quantile(fil, 0.5, method="inverted_cdf")
    )
    assert run.history["epsilon"][-1] == pytest.approx(run.about["epsilon"])


def test_an_attack_goes_into_the_file_as_it_is(tmp_path: Path) -> None:
    """Set beside the run's bounds, by id; a comparison with other bounds is kept as it is."""
    wanted = ["patient 3", "patient 7"]
    keys = [f"patient {i}" for i in range(20)]
    # all are clipped: their norms are the same, and few ε need be computed
    engine = train(data(20), steps=40, id_of=keys, max_grad_norm=0.01).engine
    assert min(engine.leakage_columns(wanted)[1]["participations"]) >= 5  # so that one run tells
    bound = engine.get_mse_bound(wanted).value.tolist()
    attack = AttackResult(
        "a guess",
        "knows all else",
        wanted,
        [1e-9, 2 * bound[1]],
        "mse",
        9,
        standard_error=[1e-12, 1e-12],
    )
    other = torchfil.compare_with_bounds({"patient 3": 0.0, "patient 7": 1e9}, attack)
    first, second = load(
        engine.save_run(tmp_path / "run.parquet", delta=DELTA, attacks=[attack, other])
    ).attacks
    assert first.rows.tolist() == second.rows.tolist() == [3, 7]
    assert first.predicted.tolist() == bound
    assert first.achieved.tolist() == attack.achieved.tolist()
    assert first.violated.tolist() == [True, False]
    assert (second.predicted.tolist(), second.violated.tolist()) == ([0.0, 1e9], [False, True])


ELSEWHERE = torchfil.compare_with_bounds([1.0], AttackResult("a", "t", [0], [0.5], "mse", 1))


@pytest.mark.parametrize(
    ("options", "noun"),
    [
        ({"attribute_names": ["region", "b", "region", "d", "e"]}, "'region'"),
        ({"groups": {"side": ["x"] * 3}}, "'side' has 3 labels"),
        ({"input_range": (-math.inf, 1)}, "finite"),
        ({"attacks": [AttackResult("a", "t", ["patient 0"], [0.5], "accuracy", 1)]}, "'accuracy'"),
        ({"attacks": [ELSEWHERE]}, "unknown example ids"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    trained: Any, tmp_path: Path, options: dict[str, Any], noun: str
) -> None:
    with pytest.raises((ValueError, KeyError), match=noun):
        trained.engine.save_run(tmp_path / "run.parquet", delta=DELTA, **options)
    assert not list(tmp_path.iterdir())


def test_metrics_are_kept_and_never_public(trained: Any, tmp_path: Path) -> None:
    given = {
        "accuracy": (0.918273, "on 360 held out"),
        "loss": torch.tensor(0.5),
        "AUC": np.float32(0.25),
    }
    run = load(trained.engine.save_run(tmp_path / "run.parquet", delta=DELTA, metrics=given))
    assert run.about["metrics"] == {
        "accuracy": {"value": 0.918273, "on": "360 held out"},
        "loss": {"value": 0.5, "on": ""},
        "AUC": {"value": 0.25, "on": ""},
    }
    public = b"".join(
        files_of(write_report(run, tmp_path / "public", redacted=True)).values()
    ).decode()
    assert "918273" not in public
    assert "held out" not in public
    assert b"918273" in files_of(write_report(run, tmp_path / "private"))["summary.json"]
    wrong = ({"accuracy": "0.9"}, {"accuracy": math.nan}, {3: 0.9})
    for metrics in wrong:
        with pytest.raises(ValueError, match=r"^metrics="):
            trained.engine.save_run(tmp_path / "no.parquet", delta=DELTA, metrics=metrics)


def test_points_of_the_timeline_stay_few_and_evenly_spaced() -> None:
    for steps in (1, 199, 200, 1000, 5000):
        timeline = Timeline()
        for step in range(1, steps + 1):
            timeline.note(step, torch.full((3,), float(step)), 1)
        noted, points = timeline.table(steps, torch.full((3,), float(steps)), 1)
        assert min(steps, MAX_POINTS // 2) <= len(noted) <= MAX_POINTS
        assert noted[-1] == steps
        assert len(set(np.diff(noted[:-1]))) <= 1
        assert torch.equal(points[:, 2].square().round(), torch.tensor(noted, dtype=points.dtype))


def test_epsilon_over_time_composes_unequal_steps() -> None:
    accountant = RDPAccountant()
    accountant.history = [(1.0, 0.1, 5), (2.0, 0.2, 3)]
    found = epsilon_over_time(accountant.history, [5, 8], DELTA)
    assert found[1] == pytest.approx(accountant.get_epsilon(DELTA))
    accountant.history = [(1.0, 0.1, 5)]
    assert found[0] == pytest.approx(accountant.get_epsilon(DELTA))


def test_the_checksum_of_the_data_tells_order_and_dtype() -> None:
    x = torch.randn(4, 2)
    others = x, x.flip(0), x.double(), x.reshape(4, 2, 1), torch.cat([x, x[:1]]), x + 1e-7
    assert len({data_sha256(TensorDataset(part)) for part in others}) == 6
    assert data_sha256(TensorDataset(x, x[:, 0])) == data_sha256([(row, row[0]) for row in x])
    assert data_sha256([torch.ones(2), torch.ones(3)]) != data_sha256(
        [torch.ones(3), torch.ones(2)]
    )
