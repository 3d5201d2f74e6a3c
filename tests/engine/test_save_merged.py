"""Several runs saved as one: means with the errors from run to run, and what releasing all of them would mean."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.loops import data, train
from torchfil import FILPrivacyEngine
from torchfil.gate.gate import notes
from torchfil.report import load, write_report

DELTA = 1e-5


@pytest.fixture(scope="module")
def repeated() -> Any:
    """Three short runs with batches and noise of their own, which save_merged is to average."""
    engines = []
    for seed in range(3):
        torch.manual_seed(seed)
        engines.append(train(data(40), steps=6, seed=seed, poisson_sampling=True, track=("diagonal",)).engine)
    return engines


def test_the_numbers_are_those_of_merge(repeated: Any, tmp_path: Path) -> None:
    average = FILPrivacyEngine.merge(repeated)
    run = load(FILPrivacyEngine.save_merged(repeated, tmp_path / "run.parquet", delta=DELTA, title="three"))
    columns = average.arrays()
    for name in ("fil", "mse_bound", "mse_bound_low", "fil_error"):
        assert np.array_equal(run.columns[name], columns[name])
    traces = torch.stack([engine.totals.get_trace().value for engine in repeated]).mean(dim=0)
    assert np.allclose(run.columns["fil"] ** 2 * run.about["dataset"]["num_coordinates"], traces.double().cpu())
    assert run.attributes is not None
    assert (run.about["title"], run.about["merged"]["runs"]) == ("three", 3)


def test_what_belongs_to_one_run_is_left_out(repeated: Any, tmp_path: Path) -> None:
    run = load(FILPrivacyEngine.save_merged(repeated, tmp_path / "run.parquet", delta=DELTA))
    assert "epsilon" not in run.columns
    assert run.history == {}
    assert run.about["probe_seed"] is None
    assert run.about["exact"] is False


def test_composition_is_told(repeated: Any, tmp_path: Path) -> None:
    """ε of all is that of one training three times as long; η̄ of all is √3 times the mean's."""
    run = load(FILPrivacyEngine.save_merged(repeated, tmp_path / "run.parquet", delta=DELTA))
    longer = copy.deepcopy(repeated[0].accountant)
    for sigma, rate, steps in repeated[0].accountant.history:
        for _ in range(2 * steps):
            longer.step(noise_multiplier=sigma, sample_rate=rate)
    assert run.about["merged"]["epsilon_of_all"] == pytest.approx(longer.get_epsilon(DELTA))
    assert run.about["epsilon"] == pytest.approx(repeated[0].get_epsilon(DELTA))
    assert len(repeated[0].accountant.history) == 1, "the run's own accountant is left as it was"

    text = write_report(run, tmp_path / "page").read_text()
    assert "means over 3 trainings" in text
    assert "one model is released" in text
    assert f"{math.sqrt(3):.2f} times as large" in text
    assert "an estimate from 3 runs together" in text
    assert "means over 3 runs: they speak of one release; several together leak more" in notes(run)
    assert "Several runs together" in write_report(run, tmp_path / "public", redacted=True).read_text()


def test_one_run_is_none_to_merge(repeated: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="use save_run for a single run"):
        FILPrivacyEngine.save_merged(repeated[:1], tmp_path / "run.parquet", delta=DELTA)
    with pytest.raises(ValueError, match="one engine twice"):
        FILPrivacyEngine.save_merged([repeated[0]] * 2, tmp_path / "run.parquet", delta=DELTA)
    run = load(repeated[0].save_run(tmp_path / "one.parquet", delta=DELTA))
    assert "Several runs together" not in write_report(run, tmp_path / "page").read_text()
