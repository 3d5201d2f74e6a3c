"""Rows of many examples: wherever they lie, the run says the same."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.cases import DEVICE
from tests.engine.loops import data, train
from torchfil import Accounting, FILPrivacyEngine
from torchfil.accounting.ledger import Contribution, Ledger
from torchfil.accounting.norms import NormHistory
from torchfil.accounting.quantities import path_additions
from torchfil.report import load

OPTIONS: dict[str, Any] = {"steps": 6, "norm_refresh": 4, "extra_probes": 5, "clip": "gelu"}


def told(engine: FILPrivacyEngine, folder: Path) -> dict[str, np.ndarray]:
    """All columns of the saved run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dict(load(engine.save_run(folder / "run.parquet", delta=1e-5)).columns)


def assert_same(ours: FILPrivacyEngine, theirs: FILPrivacyEngine, folder: Path) -> None:
    for name, value in theirs.ledger.sums.items():
        assert torch.equal(ours.ledger.sums[name].cpu(), value.cpu()), name
    columns = told(ours, folder)
    for name, values in told(theirs, folder).items():
        if values.dtype.kind == "f":  # of the same sums; a GPU rounds a square root as it likes
            rounding = 0 if DEVICE == "cpu" else 1e-15
            np.testing.assert_allclose(columns[name], values, rtol=rounding, atol=0, err_msg=name)
        else:
            np.testing.assert_array_equal(columns[name], values, err_msg=name)


@pytest.mark.parametrize("place", ["cpu", "folder"])
def test_rows_lie_elsewhere(tmp_path: Path, place: str) -> None:
    where = place if place == "cpu" else tmp_path
    usual, elsewhere = (train(data(60), rows_at=rows_at, **OPTIONS).engine for rows_at in (None, where))
    assert elsewhere.ledger.device.type == "cpu"
    assert list(tmp_path.iterdir()) == [], "files have no name, so that none is left"
    assert_same(elsewhere, usual, tmp_path)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnAGpu:
    """What steps on the GPU add travels to the rows, and no step waits for it."""

    N, BATCH = 4096, 256

    def tables(self, place: Any) -> tuple[Ledger, NormHistory]:
        return Ledger(self.N, 5, device=place), NormHistory(self.N, place)

    def book(self, ledger: Ledger, history: NormHistory, step: int) -> None:
        """A step's booking; two successive batches share half of their examples."""
        examples = torch.arange(step * 128, step * 128 + self.BATCH) % self.N
        source = torch.Generator(device="cuda").manual_seed(step)
        trace = torch.rand(self.BATCH, generator=source, dtype=torch.float64, device="cuda")
        noise = torch.full_like(trace, 0.01)
        added = {"trace": trace, "variance": noise, "certain": trace, **path_additions("trace", trace, noise, 1.0)}
        ledger.add(Contribution(examples, trace, True, added))
        history.step(examples, trace.float(), 1.0, 0.1)

    @pytest.mark.parametrize("place", ["cpu", "folder"])
    def test_tables_are_equal_bit_for_bit(self, place: str, tmp_path: Path) -> None:
        there, here = self.tables(torch.device("cuda")), self.tables(tmp_path if place == "folder" else "cpu")
        for step in range(50):
            for tables in (there, here):
                self.book(*tables, step)
        for name, value in there[0].sums.items():
            assert torch.equal(here[0].sums[name], value.cpu()), name
        for name, value in there[1].state_dict().items():
            ours = here[1].state_dict()[name]
            assert torch.equal(ours, value.cpu()) if isinstance(value, torch.Tensor) else ours == value, name

    def test_booking_waits_for_nothing_that_is_queued(self) -> None:
        tables = self.tables("cpu")
        for step in range(3):
            self.book(*tables, step)
        queued = torch.rand(8192, 8192, device="cuda")
        torch.cuda.synchronize()
        for _ in range(60):
            queued = (queued @ queued).clamp(max=1)
        torch.cuda.set_sync_debug_mode("error")
        try:
            self.book(*tables, 3)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert not torch.cuda.current_stream().query(), "the GPU is still at work on what came before"
        assert int(tables[0].sums["participations"].sum()) == 4 * self.BATCH


@pytest.mark.parametrize(
    ("track", "expected"),
    [((), 136), ("diagonal", 136 + 12 * 5), ("plis", 136 + 8 * 5), ("sketch", 136 + 8 * 5 * 4), ("fim", 136 + 8 * 25)],
)
def test_bytes_per_example_are_stated_and_met(track: str | tuple[str, ...], expected: int) -> None:
    assert Accounting(track=track, estimator="exact").bytes_per_example(5) == expected
    engine = train(data(60), steps=1, track=track, estimator="exact").engine
    assert engine.ledger.sums.num_bytes + engine._training.run.history.num_bytes == 60 * expected


IDS = (41, 3, 17, 59)


def chosen(track: Any, **options: Any) -> FILPrivacyEngine:
    return train(data(60), steps=8, estimator="exact", track=track, **options).engine


def test_quantities_of_chosen_examples(tmp_path: Path) -> None:
    """track={name: ids}: the same numbers for whom it is kept, NaN for all others, and less memory."""
    whole, some = chosen(("diagonal", "plis")), chosen({"diagonal": IDS, "plis": None})
    expected, found = (engine.get_attribute_fil().value for engine in (whole, some))
    is_chosen = torch.zeros(60, dtype=torch.bool)
    is_chosen[list(IDS)] = True
    assert torch.equal(found[is_chosen], expected[is_chosen])
    assert bool(found[~is_chosen].isnan().all())
    assert torch.equal(some.get_attribute_fil([17, 3]).value, expected[[17, 3]])
    assert torch.equal(some.get_plis(), whole.get_plis())
    assert torch.equal(some.get_fil().value, whole.get_fil().value)
    assert whole.ledger.sums.num_bytes - some.ledger.sums.num_bytes == 60 * (12 * 5 - 4) - 5 * 12 * 5
    saved = load(some.save_run(tmp_path / "run.parquet", delta=1e-5))
    assert np.array_equal(np.isnan(np.asarray(saved.attributes.shown)).all(axis=1), ~is_chosen.numpy())
    some.report(tmp_path / "report", delta=1e-5)


def test_chosen_ids_in_states_averages_and_errors() -> None:
    first, second, third = (chosen({"diagonal": IDS}, seed=seed) for seed in (3, 3, 1))
    second.load_state_dict(first.state_dict())
    assert torch.equal(second.get_attribute_fil(IDS).value, first.get_attribute_fil(IDS).value)
    assert FILPrivacyEngine.merge([first, third]).get_attribute_fil(IDS).value.shape == (4, 5)
    with pytest.raises(ValueError, match="other ids"):
        chosen({"diagonal": [1, 2]}).load_state_dict(first.state_dict())
    with pytest.raises(KeyError, match="unknown example ids"):
        chosen({"diagonal": [60]})
    with pytest.raises(ValueError, match="colour"):
        Accounting(track={"colour": [1]})
    with pytest.raises(ValueError, match="rows_at"):
        Accounting(rows_at="nowhere")
    assert Accounting(track={"diagonal": None}).track == ("diagonal",)
