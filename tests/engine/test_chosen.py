"""What a run file keeps of choices made from the data: σ by pilots, clip weights by ``torchfil.equalise``."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchfil
from tests.cases import DEVICE
from tests.engine.loops import data, loader, network
from torchfil import FILPrivacyEngine
from torchfil.engine import Equalised
from torchfil.report import load, write_report

DELTA = 1e-5
pytestmark = pytest.mark.filterwarnings("ignore:The clip weights were computed from private data")
SIDES = ["left" if row % 3 else "right" for row in range(40)]


@pytest.fixture(scope="module")
def equalised() -> Equalised:
    """Two rounds on forty examples, of which the most exposed quarter is spared."""
    seeds = count()

    def train(weights: Tensor | None) -> tuple[FILPrivacyEngine, float]:
        torch.manual_seed(next(seeds))
        module, engine = network(), FILPrivacyEngine()
        _, _, private = engine.make_private(
            module,
            torch.optim.SGD(module.parameters(), lr=0.2),
            loader(data(40), generator=None),
            criterion=nn.CrossEntropyLoss(),
            clip_weights=weights,
        )
        for _ in range(3):
            for x, y in private:
                engine.train_step(x.to(DEVICE), y.to(DEVICE))
        return engine, 0.75

    return torchfil.equalise(train, share=0.25, confidence=None, groups=SIDES, max_rounds=2)


def test_rounds_and_the_exposure_before_come_back(equalised: Equalised, tmp_path: Path) -> None:
    path = equalised.engine.save_run(tmp_path / "run.parquet", delta=DELTA, groups={"side": SIDES}, equalised=equalised)
    run = load(path)
    assert run.about["equalised"] == {
        "question": None,
        "target": equalised.target,
        "met": equalised.met,
        "stopped": equalised.stopped,
        "epsilon_of_all_rounds": equalised.epsilon_of_all_rounds,
    }
    for name in ("worst", "num_spared", "group_ratio", "score", "fresh"):
        assert run.rounds[name].tolist() == [getattr(each, name) for each in equalised.history]
    assert np.isnan(run.rounds["epsilon"]).all()  # equalise was given no δ
    assert run.rounds["num_spared"][0] == 0 < run.rounds["num_spared"][1]

    # the groups' mean FIL of the first round is that of the column
    before, sides = run.columns["fil_before"], np.asarray(SIDES)
    means = {side: np.nanmean(before[sides == side]) for side in ("left", "right")}
    assert means == pytest.approx(dict(equalised.history[0].group_means), rel=1e-6)
    assert "What equalising did" in write_report(run, tmp_path / "report").read_text()


def test_report_takes_it_as_well(equalised: Equalised, tmp_path: Path) -> None:
    page = equalised.engine.report(tmp_path / "public", delta=DELTA, redacted=True, equalised=equalised)
    assert "What equalising did" in page.read_text()


def test_another_run_is_refused(equalised: Equalised, tmp_path: Path) -> None:
    module, other = network(), FILPrivacyEngine()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.2)
    weights = torch.full((40,), 0.5)
    _, _, private = other.make_private(
        module, optimizer, loader(data(40)), criterion=nn.CrossEntropyLoss(), clip_weights=weights
    )
    for x, y in private:
        other.train_step(x.to(DEVICE), y.to(DEVICE))
    with pytest.raises(ValueError, match=r"other clip weights than this run .* result.engine.save_run"):
        other.save_run(tmp_path / "run.parquet", delta=DELTA, equalised=equalised)
    assert not (tmp_path / "run.parquet").exists()
    run = load(other.save_run(tmp_path / "run.parquet", delta=DELTA))
    assert run.about["equalised"] is run.about["noise_choice"] is None
    assert run.rounds == {}


def test_rounds_that_began_with_weights_have_no_before() -> None:
    def train(weights: Tensor | None) -> FILPrivacyEngine:
        module, engine = network(), FILPrivacyEngine()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.2)
        _, _, private = engine.make_private(
            module, optimizer, loader(data(40), generator=None), criterion=nn.CrossEntropyLoss(), clip_weights=weights
        )
        for x, y in private:
            engine.train_step(x.to(DEVICE), y.to(DEVICE))
        return engine

    result = torchfil.equalise(train, target=1e-6, confidence=None, max_rounds=1, weights=torch.full((40,), 0.5))
    assert result.fil_before is None


def test_pilots(tmp_path: Path) -> None:
    module, engine = network(), FILPrivacyEngine()
    _, _, private = engine.make_private_with_bound(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.3),
        data_loader=loader(data(48), 16),
        epochs=2,
        target_mse_bound=2.0,
        criterion=nn.CrossEntropyLoss(),
        of="probes",
    )
    for _ in range(2):
        for x, y in private:
            engine.train_step(x.to(DEVICE), y.to(DEVICE))
    run = load(engine.save_run(tmp_path / "run.parquet", delta=DELTA))
    checked = engine.check_bound()
    assert run.about["noise_choice"] == {
        "target": "every MSE bound at least 2",
        "confidence": 0.95,
        "of": "probes",
        "num_pilots": len(engine.pilot.pilots),
        "headroom": checked.headroom,
        "measured": checked.measured,
    }
    page = write_report(run, tmp_path / "report").read_text()
    assert ("This run met it" in page) == (checked.headroom >= 1)
