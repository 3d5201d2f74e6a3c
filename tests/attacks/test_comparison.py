"""Bounds beside attacks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchfil
from tests.refused import all_refused
from torchfil.attacks import AttackResult, GLMReconstruction
from torchfil.attacks.base import make_generator, mean_of_trials
from torchfil.glm import Composition, LogisticRegression
from torchfil.report import AttackRecord, SavedRun

compare = torchfil.compare_with_bounds


def result(achieved: list[float], error: list[float] | None, **options: object) -> AttackResult:
    return AttackResult(
        "test",
        "knows all",
        options.pop("ids", range(len(achieved))),  # type: ignore[arg-type]
        np.array(achieved),
        measure=str(options.pop("measure", "mse")),
        trials=101,
        standard_error=None if error is None else np.array(error),
    )


def test_violated_only_beyond_chance() -> None:
    attack = result([0.5, 0.5, 2.0], [0.1, 0.3, 0.1], ids=["a", "b", "c"])
    found = compare({"a": 1.0, "b": 1.0, "c": 1.0, "d": 7.0}, attack)
    assert found.violated.tolist() == [True, False, False]
    assert found.ratio.tolist() == [0.5, 0.5, 2.0]
    assert found.violations == pytest.approx(1 / 3)
    assert (found.ratio_interval[1] < 1).tolist() == found.violated.tolist()
    assert found.ratio_interval[0].tolist() == found.achieved_low.tolist()
    assert found.achieved_high[0] == pytest.approx(0.5 + 1.98397 * 0.1, rel=1e-4)
    together = compare([1.0] * 3, attack, simultaneous=True)
    assert (together.achieved_high > found.achieved_high).all()
    assert not compare([1.0] * 3, result([0.1] * 3, None)).violated.any()


def test_an_honest_attacker_is_rarely_accused() -> None:
    """Unbiased guesses at the bound: violations as rare as the confidence promises (one side of 95 %: 2.5 %)."""
    errors = torch.as_tensor(np.random.default_rng(0).normal(size=(4000, 200)) ** 2)
    attack = mean_of_trials("efficient", "all", range(4000), errors, "mse")
    assert 0.01 < compare(np.ones(4000), attack).violations < 0.06
    assert compare(np.full(4000, 2.0), attack).violations > 0.99


def test_table_record_and_picture(tmp_path: Path) -> None:
    pandas, _ = pytest.importorskip("pandas"), pytest.importorskip("matplotlib")
    found = compare([1.0, 1.0], result([0.5, 3.0], [0.01, 0.1], ids=[4, 2]))
    table = found.table()
    assert isinstance(table, pandas.DataFrame)
    assert table.index.tolist() == [4, 2]
    assert table.loc[4, "violated"]
    record = found.record([2, 3, 4])
    assert isinstance(record, AttackRecord)
    assert record.rows.tolist() == [2, 0]
    SavedRun({}, np.arange(3), {}, attacks=[record])
    with pytest.raises(ValueError, match="attacked examples .2. are not among the run's 2 ids"):
        found.record([3, 4])
    figure = found.plot(blind=0.25)
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert labels == ["bound held (1)", "below the bound beyond chance (1)", "the bound", "blind guess (0.25)"]
    figure.savefig(tmp_path / "scatter.png")


def test_a_linear_model_against_its_reconstruction() -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(40, 3))
    y = (rng.random(40) < 0.5).astype(float)
    model = LogisticRegression(l2=0.05, fit_intercept=True).fit(X, y)
    attack = GLMReconstruction(model, X, y).run(1e-6, 300, rows=[5, 1], seed=0)
    found = compare(model, attack, X=X, y=y)
    assert found.predicted.tolist() == model.mse_bound(X, y, 1e-6, private_target=False)[[5, 1]].tolist()
    assert not found.violated.any()
    whole = compare(model, attack, X=X, y=y, sigma=1e-6, private_target=True)
    assert (whole.predicted != found.predicted).all()
    both = compare(Composition([(model, 1e-6), (model, 1e-6)]), attack, X=X, y=y)
    assert both.predicted == pytest.approx(found.predicted / 2)
    all_refused(
        {
            "need ..X., .y..: compare_with_bounds": lambda: compare(model, attack),
            "need ..sigma..": lambda: compare(model, result([1.0], None), X=X, y=y),
            "sigma=0": lambda: compare(model, attack, X=X, y=y, sigma=0.1),
            "whole examples": lambda: compare(model, attack, X=X, y=y, groups=["a"] * 40),
            "attacked examples": lambda: compare(model, result([1.0, 1.0], None, ids=[40, "a"]), X=X, y=y, sigma=1.0),
        }
    )


def test_an_engine_gives_its_bounds() -> None:
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(3, 2)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(12, 3), torch.randint(2, (12,)))
    engine = torchfil.FILPrivacyEngine()
    model, optimizer, loader = engine.make_private(model, optimizer, DataLoader(data, batch_size=6))
    for x, t in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), t).backward()
        optimizer.step()
    found = compare(engine, result([1e9, 1e9], [1.0, 1.0], ids=[7, 3]))
    assert found.predicted.tolist() == engine.get_mse_bound([7, 3]).value.tolist()
    assert (found.predicted_low <= found.predicted).all()
    low, high = found.ratio_interval
    assert (low <= found.ratio).all()
    assert (found.ratio <= high).all()
    assert low.tolist() == (found.achieved_low / found.predicted_high).tolist()


def test_what_cannot_be_compared_is_refused() -> None:
    all_refused(
        {
            "measure is 'accuracy'": lambda: compare([1.0], result([1.0], None, measure="accuracy")),
            r"\[2\] bounds for 1 attacked": lambda: compare([1.0, 2.0], result([1.0], None)),
            "achieved error is NaN": lambda: compare([1.0], result([float("nan")], None)),
        }
    )
    all_refused(
        {
            "negative or NaN": lambda: compare([float("nan")], result([1.0], None)),
            "negative": lambda: compare([-1.0], result([1.0], None)),
            "there is no bound for the": lambda: compare({1: 1.0}, result([1.0], None)),
            "a Linear gives no bounds": lambda: compare(nn.Linear(2, 2), result([1.0], None)),
            "confidence=1": lambda: compare([1.0], result([1.0], None), confidence=1.0),
        }
    )


def test_a_guess_that_never_saw_the_model_is_not_testable() -> None:
    """The mean of the data beats every bound above the data's spread: that was reported as a violated bound."""
    seen = result([1.0] * 50, [0.0] * 50)
    found = compare([100.0] * 50, replace(seen, saw_model=False))
    assert compare([100.0] * 50, seen).violated.all()
    assert found.verdicts == ["not testable"] * 50
    assert not found.violated.any()
    assert np.isnan(found.violations)
    assert (found.record(range(50)).testable, found.record(range(50)).untestable) == (False, "never saw the model")


def test_the_blind_guess_stands_beside_the_attack() -> None:
    attack = AttackResult("test", "all", range(4), [1.0, 3.0, 5.0, 7.0], "mse", trials=1, blind=[1.0, 1.0, 9.0, 9.0])
    found = compare([4.0] * 4, attack)
    assert (found.share_below, found.blind_share_below) == (0.5, 0.5)
    assert "blind" in found.table()
    record = found.record(range(4))
    assert record.blind is not None
    assert record.blind.tolist() == [1.0, 1.0, 9.0, 9.0]
    assert record.untestable == "one trial"
    assert np.isnan(compare([4.0], result([1.0], None)).blind_share_below)
    with pytest.raises(ValueError, match="blind has shape"):
        AttackResult("test", "all", range(4), [1.0] * 4, "mse", trials=1, blind=[1.0])


def test_tensors_become_arrays_and_lengths_are_checked() -> None:
    found = AttackResult("a", "t", torch.tensor([3, 1]), torch.tensor([0.5, 1.0]), measure="mse", trials=2)
    assert found.ids == [3, 1]
    assert isinstance(found.achieved, np.ndarray)
    own = torch.Generator()
    assert make_generator(own, None) is own
    assert make_generator(None, 5).initial_seed() == 5
    all_refused(
        {
            "standard_error": lambda: AttackResult("a", "t", [3, 1], np.ones(2), "mse", 2, standard_error=np.ones(3)),
            "trials=0": lambda: AttackResult("a", "t", [3], np.ones(1), "mse", 0),
            "generator": lambda: make_generator(own, 5),
        }
    )
