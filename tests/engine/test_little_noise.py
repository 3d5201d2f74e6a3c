"""A run with next to no noise is saved like any other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.engine.loops import data, train
from torchfil.report import load


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("sigma", [1e-8, 1e-3])
def test_it_is_saved(tmp_path: Path, sigma: float) -> None:
    engine = train(data(40), steps=4, noise_multiplier=sigma).engine
    engine.save_run(tmp_path / "run.parquet", delta=1e-5, pictures=0, hash_data=False)
    curve = load(tmp_path / "run.parquet").bounds["rero"]
    assert np.allclose(curve["success"], 1 - (1 - 0.2) ** 4 * (1 - np.array(curve["prior"])))
    assert bool((engine.get_reconstruction_robustness([0, 1]).value <= 1).all())
