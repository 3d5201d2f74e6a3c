"""Bounds beside attacks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import torchfil
from tests.engine.loops import make, step
from tests.refused import all_refused
from torchfil.attacks import AttackResult, GLMReconstruction
from torchfil.attacks.base import mean_of_trials
from torchfil.glm import LogisticRegression

compare = torchfil.compare_with_bounds


def result(
    achieved: list[float], error: list[float] | None = None, ids: Any = None, **options: Any
) -> AttackResult:
    ids = range(len(achieved)) if ids is None else ids
    error = None if error is None else np.array(error)  # type: ignore[assignment]
    given = {"measure": "mse", "trials": 101, "standard_error": error, **options}
    return AttackResult("test", "knows all", ids, np.array(achieved), **given)


def test_violated_only_beyond_chance() -> None:
    attack = result([0.5, 0.5, 2.0], [0.1, 0.3, 0.1], ids=["a", "b", "c"])
    found = compare({"a": 1.0, "b": 1.0, "c": 1.0, "d": 7.0}, attack)
    assert found.violated.tolist() == [True, False, False]
    assert found.ratio.tolist() == [0.5, 0.5, 2.0]
    assert found.violations == pytest.approx(1 / 3)
    assert (found.ratio_interval[1] < 1).tolist() == found.violated.tolist()
    assert found.achieved_high[0] == pytest.approx(0.5 + 1.98397 * 0.1, rel=1e-4)
    together = compare([1.0] * 3, attack, simultaneous=True)
    assert (together.achieved_high > found.achieved_high).all()
    assert not compare([1.0] * 3, result([0.1] * 3)).violated.any()


def test_an_honest_attacker_is_rarely_accused() -> None:
    """Unbiased guesses at the bound: violations as rare as the confidence promises (one side of 95
    %: 2.5 %).
    """
    errors = torch.as_tensor(np.random.default_rng(0).normal(size=(4000, 200)) ** 2)
    attack = mean_of_trials("efficient", "all", range(4000), errors, "mse")
    assert 0.01 < compare(np.ones(4000), attack).violations < 0.06
    assert compare(np.full(4000, 2.0), attack).violations > 0.99


def test_table_record_and_picture() -> None:
    found = compare([1.0, 1.0], result([0.5, 3.0], [0.01, 0.1], ids=[4, 2]))
    assert found.table().loc[4, "violated"]
    assert found.record([2, 3, 4]).rows.tolist() == [2, 0]
    assert found.plot(blind=0.25).axes[0].get_legend() is not None


def test_a_linear_model_against_its_reconstruction() -> None:
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(40, 3)), (rng.random(40) < 0.5).astype(float)
    model = LogisticRegression(l2=0.05, fit_intercept=True).fit(X, y)
    attack = GLMReconstruction(model, X, y).run(1e-6, 300, rows=[5, 1], seed=0)
    found = compare(model, attack, X=X, y=y)
    assert (
        found.predicted.tolist()
        == model.mse_bound(X, y, 1e-6, private_target=False)[[5, 1]].tolist()
    )
    assert not found.violated.any()
    assert (
        compare(model, attack, X=X, y=y, sigma=1e-6, private_target=True).predicted
        != found.predicted
    ).all()
    refused = {
        "need ..X., .y..": lambda: compare(model, attack),
        "sigma=0": lambda: compare(model, attack, X=X, y=y, sigma=0.1),
        "whole examples": lambda: compare(model, attack, X=X, y=y, groups=["a"] * 40),
    }
    all_refused(refused)
    with pytest.raises(KeyError, match="unknown example ids .40, 'a'.; ids are 0 to 39"):
        compare(model, result([1.0, 1.0], ids=[40, "a"]), X=X, y=y, sigma=1.0)


def test_an_engine_gives_its_bounds() -> None:
    engine, _, model, optimizer, loader = make()
    for batch in loader:
        step(model, optimizer, batch)
    found = compare(engine, result([1e9, 1e9], [1.0, 1.0], ids=[7, 3]))
    assert found.predicted.tolist() == engine.get_mse_bound([7, 3]).value.tolist()
    assert (found.predicted_low <= found.predicted).all()


def test_guesses_that_never_saw_the_model_and_blind_ones() -> None:
    """The mean of the data beats every bound above the data's spread: no bound is violated by
    it.
    """
    seen = result([1.0] * 50, [0.0] * 50)
    found = compare([100.0] * 50, replace(seen, saw_model=False))
    assert compare([100.0] * 50, seen).violated.all()
    assert found.verdicts == ["not testable"] * 50
    assert not found.violated.any()
    assert np.isnan(found.violations)
    assert found.record(range(50)).untestable == "never saw the model"

    found = compare([4.0] * 4, result([1.0, 3.0, 5.0, 7.0], trials=1, blind=[1.0, 1.0, 9.0, 9.0]))
    assert (found.share_below, found.blind_share_below) == (0.5, 0.5)
    assert found.record(range(4)).untestable == "one trial"


def test_what_cannot_be_compared_is_refused() -> None:
    refused = {
        "measure is 'accuracy'": lambda: compare([1.0], result([1.0], measure="accuracy")),
        r"\[2\] bounds for 1 attacked": lambda: compare([1.0, 2.0], result([1.0])),
        "negative or NaN": lambda: compare([float("nan")], result([1.0])),
    }
    all_refused(refused)
