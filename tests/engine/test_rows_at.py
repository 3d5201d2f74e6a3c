"""Rows of many examples: wherever they lie and whenever they are given, the run says the same."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import DEVICE
from loops import data, train

from torchfil import Accounting, FILPrivacyEngine
from torchfil.accounting import rows
from torchfil.report import load

warnings.filterwarnings("ignore", message="Secure RNG")
OPTIONS: dict[str, Any] = {"steps": 6, "norm_refresh": 4, "min_mse_bound": 1e-3, "extra_probes": 5, "clip": "gelu"}


def told(engine: FILPrivacyEngine, folder: Path) -> dict[str, np.ndarray]:
    """All columns of the saved run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dict(load(engine.save_run(folder / "run.fil", delta=1e-5)).columns)


def assert_same(ours: FILPrivacyEngine, theirs: FILPrivacyEngine, folder: Path) -> None:
    assert ours.ledger is not None
    assert theirs.ledger is not None
    for name, value in theirs.ledger.sums.items():
        assert torch.equal(ours.ledger.sums[name].cpu(), value.cpu()), name
    columns = told(ours, folder)
    for name, values in told(theirs, folder).items():
        np.testing.assert_array_equal(columns[name], values, err_msg=name)


@pytest.mark.parametrize("place", ["cpu", "folder"])
def test_rows_lie_elsewhere(tmp_path: Path, place: str) -> None:
    where = place if place == "cpu" else tmp_path
    usual, elsewhere = (train(data(60), rows_at=rows_at, **OPTIONS).engine for rows_at in (None, where))
    assert elsewhere.ledger is not None
    assert elsewhere.ledger.device.type == "cpu"
    assert list(tmp_path.iterdir()) == [], "files have no name, so that none is left"
    assert_same(elsewhere, usual, tmp_path)


@pytest.mark.skipif(torch.device(DEVICE).type != "cpu", reason="rows are given when needed on CPUs only")
def test_rows_are_given_when_an_example_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = train(data(60), **OPTIONS).engine
    assert usual.ledger is not None
    drawn = int((usual.ledger.sums["participations"] > 0).sum())
    assert drawn < 60
    monkeypatch.setattr(rows, "LAZY_FROM", 1)
    lazy = train(data(60), **OPTIONS).engine
    assert lazy.ledger is not None
    assert lazy.ledger.sums.num_rows == drawn + 1
    assert_same(lazy, usual, tmp_path)

    # a state of either kind is read by the other
    monkeypatch.setattr(rows, "LAZY_FROM", 10**9)
    resumed = train(data(60), **OPTIONS).engine
    resumed.load_state_dict(lazy.state_dict())
    assert_same(resumed, usual, tmp_path)


def test_what_is_no_place_is_refused() -> None:
    with pytest.raises(ValueError, match="rows_at='nowhere' must be None, 'cpu' or a folder that exists"):
        Accounting(rows_at="nowhere")


@pytest.mark.parametrize(
    ("track", "expected"),
    [((), 136), ("diagonal", 136 + 12 * 5), ("plis", 136 + 8 * 5), ("sketch", 136 + 8 * 5 * 4), ("fim", 136 + 8 * 25)],
)
def test_bytes_per_example_are_stated_and_met(track: str | tuple[str, ...], expected: int) -> None:
    accounting = Accounting(track=track, estimator="exact")
    assert accounting.bytes_per_example(5) == expected
    engine = train(data(60), steps=1, track=track, estimator="exact").engine
    assert engine.ledger is not None
    assert engine.ledger.sums.num_bytes + engine._training.run.history.num_bytes == 60 * expected
