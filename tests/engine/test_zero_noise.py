"""noise_multiplier=0: the run trains, as people debug so, and says that nothing is private."""

from __future__ import annotations

import copy
import math
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from opacus.schedulers import LambdaNoise
from torch import nn

from tests.engine.brute_force import Run, make, take
from tests.engine.loops import data, loader, network
from torchfil import FILPrivacyEngine
from torchfil.run.file import load

WAYS = ("auto", "hooks", "train_step")


def start(way: str = "auto", **options: Any) -> Run:
    mode = "hooks" if way == "hooks" else "auto"
    given = {"noise_multiplier": 0.0, "grad_sample_mode": mode, "criterion": nn.CrossEntropyLoss(), **options}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="noise_multiplier=0")
        given = {"estimator": "weight-probes", "amplification": None, **given}
        return make(network(), data(24), **{"batch_size": 6, **given})


def train(run: Run, way: str = "auto", steps: int = 3) -> Run:
    for _, batch in zip(range(steps), run.private, strict=False):
        take(run, batch, way)
    return run


def drawn(engine: FILPrivacyEngine) -> torch.Tensor:
    ledger = engine.ledger
    assert ledger is not None
    return ledger.sums["participations"] > 0


def test_it_warns() -> None:
    module = network()
    with pytest.warns(UserWarning, match="the run has no privacy; ε and every FIL are infinite"):
        FILPrivacyEngine().make_private(
            module, torch.optim.SGD(module.parameters(), lr=0.1), loader(data(24)), noise_multiplier=0.0
        )


@pytest.mark.parametrize("noise", [-1.0, math.nan, math.inf])
def test_noise_that_is_none_is_refused(noise: float) -> None:
    with pytest.raises(ValueError, match="noise_multiplier"):
        start(noise_multiplier=noise)


@pytest.mark.product
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "options", [{}, {"estimator": "exact"}, {"num_probes": 1}, {"poisson_sampling": False}], ids=str
)
def test_what_it_says(way: str, options: dict[str, Any]) -> None:
    engine = train(start(way, **options), way).engine
    took_part = drawn(engine)
    fil, bound = engine.get_fil(), engine.get_mse_bound()
    assert bool(fil.value[took_part].isposinf().all())
    assert bool((bound.value[took_part] == 0).all())
    assert bool((fil.value[~took_part] == 0).all())
    assert bool(bound.value[~took_part].isposinf().all())
    assert not bool(fil.standard_error.isnan().any())
    assert not bool(bound.standard_error.isnan().any())
    assert engine.get_epsilon(1e-5) == math.inf
    individual = engine.get_individual_epsilon(delta=1e-5).value
    assert bool(individual[took_part.cpu()].isposinf().all())
    assert not bool(individual.isnan().any())


@pytest.mark.parametrize("way", WAYS)
def test_it_is_plain_training_where_nothing_is_clipped(way: str) -> None:
    run = start(way, max_grad_norm=1e6, poisson_sampling=False)
    plain = copy.deepcopy(run.plain)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.3)
    for batch in run.private:
        begun = take(run, batch, way)
        optimizer.zero_grad()
        F.cross_entropy(plain(begun.x), begun.y).backward()
        optimizer.step()
    for ours, theirs in zip(run.module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("way", WAYS)
def test_paused(way: str) -> None:
    run = start(way)
    batches = iter(run.private)
    take(run, next(batches), way)
    with pytest.warns(UserWarning, match="paused"), run.engine.paused():
        take(run, next(batches), way)
    take(run, next(batches), way)
    ledger = run.engine.ledger
    assert ledger is not None
    assert (ledger.steps, ledger.missed_steps) == (3, 1)
    assert [steps for *_, steps in run.engine.accountant.history] == [3]


@pytest.mark.parametrize("track", [(), ("diagonal",), ("plis",), ("fim",), ("sketch",), ("diagonal", "plis")], ids=str)
def test_tables_files_and_reports(track: tuple[str, ...], tmp_path: Path) -> None:
    engine = train(start(track=track)).engine
    table = engine.leakage(delta=1e-5)
    numbers = table.select_dtypes("number")
    assert not numbers.isna().any().any(), "NaN says nothing"
    options: dict[str, Any] = {"delta": 1e-5, "input_range": (-1.0, 1.0), "groups": {"half": [0, 1] * 12}}
    saved = load(engine.save_run(tmp_path / "run.parquet", **options))
    for name, column in saved.columns.items():
        assert not np.isnan(column).any(), name
    for name, values in saved.history.items():
        assert not np.isnan(values).any(), name
    assert saved.about["epsilon"] == math.inf
    for redacted in (False, True):
        page = engine.report(tmp_path / f"report {redacted}", redacted=redacted, **options)
        words = re.sub(r"<(style|script).*?</\1>", " ", page.read_text(), flags=re.DOTALL)
        assert not re.search(r"\bnan\b", re.sub(r"<[^>]*>", " ", words), flags=re.IGNORECASE)


@pytest.mark.parametrize("way", WAYS)
def test_noise_that_comes_later(way: str) -> None:
    """An example's first step without noise tells all, whatever follows; others are as in a run with noise."""
    run = start(way, noise_multiplier=1.0, poisson_sampling=False, estimator="exact")
    scheduler = LambdaNoise(run.optimizer, noise_lambda=lambda step: float(step != 1))
    for batch in run.private:
        take(run, batch, way)
        scheduler.step()
    fil = run.engine.get_fil().value
    infinite = fil.isposinf()
    assert infinite.nonzero().flatten().tolist() == list(range(6, 12))
    assert bool((fil[~infinite] > 0).all())
    assert run.engine.get_epsilon(1e-5) == math.inf


def test_a_checkpoint(tmp_path: Path) -> None:
    first = train(start(), steps=2)
    first.engine.save_checkpoint(path=tmp_path / "run.pt", module=first.model, optimizer=first.optimizer)
    second = start()
    second.engine.load_checkpoint(path=tmp_path / "run.pt", module=second.model, optimizer=second.optimizer)
    assert torch.equal(second.engine.get_fil().value, first.engine.get_fil().value)
    train(second, steps=1)
    assert bool(second.engine.get_fil().value[drawn(second.engine)].isposinf().all())


def test_averages_of_runs() -> None:
    engines = [train(start(seed=seed)).engine for seed in (1, 2)]
    merged = FILPrivacyEngine.merge(engines)
    fil = merged.get_fil()
    assert not bool(fil.value.isnan().any())
    assert bool(fil.value[drawn(engines[0])].isposinf().all())
    assert not merged.leakage().select_dtypes("number").isna().any().any()


@pytest.mark.parametrize("way", WAYS)
def test_empty_batches(way: str) -> None:
    run = start(way, batch_size=1)
    train(run, way, steps=24)
    assert sum(steps for *_, steps in run.engine.accountant.history) == 24
    assert bool(run.engine.get_fil().value[drawn(run.engine)].isposinf().all())
