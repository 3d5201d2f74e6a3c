"""noise_multiplier=0: the run trains, as people debug so, and says that nothing is private."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from opacus.schedulers import LambdaNoise
from torch import Tensor

from tests.engine.loops import data, network
from tests.engine.ways import LOSS, WAYS, start, step, trained, weights_of
from torchfil import FILPrivacyEngine
from torchfil.run.file import load

pytestmark = pytest.mark.filterwarnings("ignore:noise_multiplier=0")


def made(way: str = "auto", **options: Any) -> Any:
    torch.manual_seed(1)
    given = {"noise_multiplier": 0.0, "poisson_sampling": True, "lr": 0.3, "seed": 3, **options}
    return start(network(), data(24), way, **given)


def drawn(engine: FILPrivacyEngine) -> Tensor:
    return engine.ledger.sums["participations"] > 0


def test_it_warns_and_takes_no_other_noise() -> None:
    with pytest.warns(UserWarning, match="no privacy"):
        made()
    for noise in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="noise_multiplier"):
            made(noise_multiplier=noise)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "options", [{}, {"estimator": "exact"}, {"num_probes": 1}, {"batch": 1}, {"poisson_sampling": False}], ids=str
)
def test_what_it_says(way: str, options: dict[str, Any]) -> None:
    parts = made(way, **options)
    engine = trained(*parts, way)
    took_part = drawn(engine)
    fil, bound = engine.get_fil(), engine.get_mse_bound()
    assert bool(fil.value[took_part].isposinf().all())
    assert bool((bound.value[took_part] == 0).all())
    assert bool((fil.value[~took_part] == 0).all())
    assert bool(bound.value[~took_part].isposinf().all())
    assert not bool((fil.standard_error.isnan() | bound.standard_error.isnan()).any())
    assert engine.get_epsilon(1e-5) == math.inf
    individual = engine.get_individual_epsilon(delta=1e-5).value
    assert bool(individual[took_part.cpu()].isposinf().all())
    assert not bool(individual.isnan().any())
    if options.get("poisson_sampling", True):
        assert sum(steps for *_, steps in engine.accountant.history) == len(parts[-1])


@pytest.mark.parametrize("way", WAYS)
def test_it_is_plain_training_where_nothing_is_clipped(way: str) -> None:
    torch.manual_seed(1)
    module, plain = network(), network()
    options = {"noise_multiplier": 0.0, "max_grad_norm": 1e6, "lr": 0.3}
    trained(*start(module, data(24), way, **options), way)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.3)
    for x, y in zip(*(part.to(weights_of(plain).device).split(6) for part in data(24).tensors), strict=True):
        optimizer.zero_grad()
        LOSS(plain(x), y).backward()
        optimizer.step()
    torch.testing.assert_close(weights_of(module), weights_of(plain), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("way", WAYS)
def test_paused_and_noise_that_comes_later(way: str) -> None:
    """An example's first step without noise tells all, whatever follows; others are as in a run with noise."""
    engine, model, optimizer, loader = made(way, noise_multiplier=1.0, poisson_sampling=False, estimator="exact")
    scheduler = LambdaNoise(optimizer, noise_lambda=lambda step: float(step != 1))
    for k, (x, y) in enumerate(loader):
        if k == 3:
            with pytest.warns(UserWarning, match="paused"), engine.paused():
                step(engine, model, optimizer, x, y, way)
        else:
            step(engine, model, optimizer, x, y, way)
        scheduler.step()
    fil = engine.get_fil().value
    assert fil.isposinf().nonzero().flatten().tolist() == list(range(6, 12))
    assert bool((fil[[*range(6), *range(12, 18)]] > 0).all())
    assert engine.get_epsilon(1e-5) == math.inf
    assert (engine.ledger.steps, engine.ledger.missed_steps) == (4, 1)


@pytest.mark.parametrize("track", [(), ("fim", "sketch"), ("diagonal", "plis")], ids=str)
def test_tables_files_and_reports(track: tuple[str, ...], tmp_path: Path) -> None:
    """NaN says nothing, and is nowhere."""
    engine = trained(*made(track=track))
    assert not engine.leakage(delta=1e-5).select_dtypes("number").isna().any().any()
    options: dict[str, Any] = {"delta": 1e-5, "input_range": (-1.0, 1.0), "groups": {"half": [0, 1] * 12}}
    saved = load(engine.save_run(tmp_path / "run.parquet", **options))
    for name, column in [*saved.columns.items(), *saved.history.items()]:
        assert not np.isnan(column).any(), name
    assert saved.about["epsilon"] == math.inf
    for redacted in (False, True):
        page = engine.report(tmp_path / f"report {redacted}", redacted=redacted, **options)
        words = re.sub(r"<(style|script).*?</\1>", " ", page.read_text(), flags=re.DOTALL)
        assert not re.search(r"\bnan\b", re.sub(r"<[^>]*>", " ", words), flags=re.IGNORECASE)


def test_checkpoints_and_averages(tmp_path: Path) -> None:
    first, model, optimizer, loader = made()
    trained(first, model, optimizer, loader, steps=2)
    first.save_checkpoint(path=tmp_path / "run.pt", module=model, optimizer=optimizer)
    second, model, optimizer, loader = made()
    second.load_checkpoint(path=tmp_path / "run.pt", module=model, optimizer=optimizer)
    assert torch.equal(second.get_fil().value, first.get_fil().value)
    trained(second, model, optimizer, loader, steps=1)
    assert bool(second.get_fil().value[drawn(second)].isposinf().all())
    merged = FILPrivacyEngine.merge([first, trained(*made(seed=2), steps=2)])
    assert not bool(merged.get_fil().value.isnan().any())
    assert bool(merged.get_fil().value[drawn(first)].isposinf().all())
    assert not merged.leakage().select_dtypes("number").isna().any().any()
