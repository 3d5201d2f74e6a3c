"""noise_multiplier=0: the run trains, as people debug so, and says that nothing is private."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from opacus.schedulers import LambdaNoise
from torch import Tensor

from tests.engine.loops import data, network
from tests.engine.ways import start, step, trained
from torchfil import FILPrivacyEngine
from torchfil.run.baselines import HALF, UNTOLD, exposure_of, is_told
from torchfil.run.file import load

pytestmark = pytest.mark.filterwarnings("ignore:noise_multiplier=0")


def made(way: str = "auto", **options: Any) -> Any:
    torch.manual_seed(1)
    given = {"noise_multiplier": 0.0, "poisson_sampling": True, "lr": 0.3, "seed": 3, **options}
    return start(network(), data(24), way, **given)


def drawn(engine: FILPrivacyEngine) -> Tensor:
    return engine.ledger.sums["participations"] > 0


@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("hooks", {}),
        ("auto", {"estimator": "exact", "poisson_sampling": False}),
        ("train_step", {"num_probes": 1, "batch": 1}),
    ],
)
def test_what_it_says(way: str, options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="no privacy"):
        parts = made(way, **options)
    engine = trained(*parts, way)
    took_part, fil, bound = drawn(engine), engine.get_fil(), engine.get_mse_bound()
    assert bool((fil.value[took_part] == math.inf).all())
    assert bool((bound.value[took_part] == 0).all())
    for found in (fil, bound):
        assert bool((found.standard_error[took_part] == 0).all())
        assert bool(found.value[~took_part].isnan().all())  # nobody knows
    individual = engine.get_individual_epsilon(delta=1e-5).value
    assert engine.get_epsilon(1e-5) == math.inf
    assert bool(individual[took_part.cpu()].isposinf().all())
    assert not bool(individual.isnan().any())

    # which is told, of whoever took part
    run = load(engine.save_run(tmp_path / "run.parquet", delta=1e-5, input_range=(0.0, 1.0)))
    assert (is_told(run) == took_part.cpu().numpy()).all()
    assert (exposure_of(run) == np.where(took_part.cpu(), HALF, UNTOLD)).all()


def test_paused_and_noise_that_comes_later() -> None:
    """An example's first step without noise tells all, whatever follows.

    Others are as in a run with noise.
    """
    engine, model, optimizer, loader = made(
        noise_multiplier=1.0, poisson_sampling=False, estimator="exact"
    )
    scheduler = LambdaNoise(optimizer, noise_lambda=lambda step: float(step != 1))
    for k, (x, y) in enumerate(loader):
        if k == 3:
            with pytest.warns(UserWarning, match="paused"), engine.paused():
                step(engine, model, optimizer, x, y)
        else:
            step(engine, model, optimizer, x, y)
        scheduler.step()
    fil = engine.get_fil().value
    assert fil.isposinf().nonzero().flatten().tolist() == list(range(6, 12))
    assert bool((fil[[*range(6), *range(12, 18)]] > 0).all())
    assert engine.get_epsilon(1e-5) == math.inf


def test_every_step_without_noise_is_measured() -> None:
    """fil_rate chooses among steps that leave something to estimate."""
    engine = trained(*made(poisson_sampling=False, fil_rate=0.1))
    assert bool(engine.get_fil().value.isposinf().all())
