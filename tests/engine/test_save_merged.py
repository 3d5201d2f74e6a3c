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
from torchfil.report import SavedRun, load, write_report

DELTA = 1e-5


@pytest.fixture(scope="module")
def repeated() -> Any:
    """Three short runs with batches and noise of their own, which save_merged is to average."""
    engines = []
    for seed in range(3):
        torch.manual_seed(seed)
        engines.append(train(data(40), steps=6, seed=seed, poisson_sampling=True, track=("diagonal",)).engine)
    return engines


@pytest.fixture(scope="module")
def run(repeated: Any, tmp_path_factory: pytest.TempPathFactory) -> SavedRun:
    path = tmp_path_factory.mktemp("merged") / "run.parquet"
    return load(FILPrivacyEngine.save_merged(repeated, path, delta=DELTA, title="three"))


def test_the_numbers_are_those_of_merge(repeated: Any, run: SavedRun) -> None:
    columns = FILPrivacyEngine.merge(repeated).arrays()
    for name in ("fil", "mse_bound", "mse_bound_low", "fil_error"):
        assert np.array_equal(run.columns[name], columns[name])
    traces = torch.stack([engine.totals.get_trace().value for engine in repeated]).mean(dim=0)
    assert np.allclose(run.columns["fil"] ** 2 * run.about["dataset"]["num_coordinates"], traces.double().cpu())
    assert run.attributes is not None
    assert (run.about["title"], run.about["merged"]["runs"]) == ("three", 3)

    # what belongs to one run is left out
    assert "epsilon" not in run.columns
    assert run.history == {}
    assert (run.about["probe_seed"], run.about["exact"]) == (None, False)


def test_composition_is_told(repeated: Any, run: SavedRun, tmp_path: Path) -> None:
    """ε of all is that of one training three times as long; η̄ of all is √3 times the mean's."""
    longer = copy.deepcopy(repeated[0].accountant)
    for sigma, rate, steps in repeated[0].accountant.history:
        for _ in range(2 * steps):
            longer.step(noise_multiplier=sigma, sample_rate=rate)
    assert run.about["merged"]["epsilon_of_all"] == pytest.approx(longer.get_epsilon(DELTA))
    assert run.about["epsilon"] == pytest.approx(repeated[0].get_epsilon(DELTA))
    assert len(repeated[0].accountant.history) == 1, "the run's own accountant is left as it was"
    text = write_report(run, tmp_path / "page").read_text()
    assert "means over 3 trainings" in text
    assert f"{math.sqrt(3):.2f} times as large" in text
    assert "means over 3 runs: they speak of one release; several together leak more" in notes(run)
    assert "Several runs together" in write_report(run, tmp_path / "public", redacted=True).read_text()


def test_one_run_is_none_to_merge(repeated: Any, tmp_path: Path) -> None:
    for engines, message in ((repeated[:1], "use save_run"), ([repeated[0]] * 2, "one engine twice")):
        with pytest.raises(ValueError, match=message):
            FILPrivacyEngine.save_merged(engines, tmp_path / "run.parquet", delta=DELTA)
