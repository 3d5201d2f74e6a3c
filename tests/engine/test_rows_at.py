"""Rows of many examples: wherever they lie, and whenever they are entered, the run says the same."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.cases import DEVICE
from tests.engine.loops import data, train
from torchfil import Accounting, FILPrivacyEngine
from torchfil.accounting.ledger import Contribution, Ledger
from torchfil.accounting.norms import NormHistory
from torchfil.accounting.quantities import path_additions
from torchfil.report import load

OPTIONS: dict[str, Any] = {"steps": 6, "norm_refresh": 4, "extra_probes": 5, "clip": "gelu"}


def columns(engine: FILPrivacyEngine, folder: Path) -> dict[str, np.ndarray]:
    """All columns of the saved run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dict(load(engine.save_run(folder / "run.parquet", delta=1e-5)).columns)


@pytest.mark.parametrize("place", ["cpu", "folder"])
def test_rows_lie_elsewhere(tmp_path: Path, place: str) -> None:
    where = place if place == "cpu" else tmp_path
    usual, elsewhere = (train(data(60), rows_at=rows_at, **OPTIONS).engine for rows_at in (None, where))
    assert elsewhere.ledger.device.type == "cpu"
    assert list(tmp_path.iterdir()) == [], "files have no name, so that none is left"
    for name, value in usual.ledger.sums.items():
        assert torch.equal(elsewhere.ledger.sums[name].cpu(), value.cpu()), name
    found = columns(elsewhere, tmp_path)
    for name, values in columns(usual, tmp_path).items():
        if values.dtype.kind == "f":  # of the same sums; a GPU rounds a square root as it likes
            rounding = 0 if DEVICE == "cpu" else 1e-15
            np.testing.assert_allclose(found[name], values, rtol=rounding, atol=0, err_msg=name)
        else:
            np.testing.assert_array_equal(found[name], values, err_msg=name)


def joined(value: Tensor) -> Tensor:
    """Brings together what one rank has, last norms first: the order in which ranks tell does not matter."""
    return value.flip(0)


@pytest.mark.parametrize("every", [1, 4, 100])
def test_entered_later_is_the_same(every: int) -> None:
    generator = torch.Generator().manual_seed(0)
    plain, shared = NormHistory(30), NormHistory(30, exchange=joined, every=every)
    for step in range(17):
        rows = (torch.rand(30, generator=generator) < 0.3).nonzero().flatten()
        ratio = torch.rand(len(rows), generator=generator)
        noise = 1.0 if step < 9 else 0.8  # the noise changes on the way
        for history in (plain, shared):
            history.step(rows, ratio, noise, 0.3)
            if step in (3, 16):
                history.set_ratios(torch.arange(30), torch.linspace(0.1, 1, 30) / (step + 1))
    assert shared.steps == 17
    assert not shared.is_complete
    shared.enter()
    assert shared.is_complete
    entered = shared.state_dict()
    for name, value in plain.state_dict().items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(entered[name])), name


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("place", ["cpu", "folder"])
def test_what_steps_on_a_gpu_add_travels_to_the_rows_and_no_step_waits(place: str, tmp_path: Path) -> None:
    """Tables are equal bit for bit; two successive batches share half of their examples."""
    n, batch = 4096, 256

    def book(tables: tuple[Ledger, NormHistory], step: int) -> None:
        examples = torch.arange(step * 128, step * 128 + batch) % n
        source = torch.Generator(device="cuda").manual_seed(step)
        trace = torch.rand(batch, generator=source, dtype=torch.float64, device="cuda")
        noise = torch.full_like(trace, 0.01)
        added = {"trace": trace, "variance": noise, "certain": trace, **path_additions("trace", trace, noise, 1.0)}
        tables[0].add(Contribution(examples, trace, True, added))
        tables[1].step(examples, trace.float(), 1.0, 0.1)

    where: Any = tmp_path if place == "folder" else "cpu"
    there, here = ((Ledger(n, 5, device=at), NormHistory(n, at)) for at in (torch.device("cuda"), where))
    for step in range(50):
        book(there, step)
        book(here, step)
    for ours, theirs in ((here[0].sums, there[0].sums), (here[1].state_dict(), there[1].state_dict())):
        for name, value in theirs.items():
            assert torch.equal(torch.as_tensor(ours[name]), torch.as_tensor(value).cpu()), name
    queued = torch.rand(8192, 8192, device="cuda")
    torch.cuda.synchronize()
    for _ in range(60):
        queued = (queued @ queued).clamp(max=1)
    if place == "cpu":
        torch.cuda.set_sync_debug_mode("error")
    try:
        book(here, 50)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert place == "folder" or not torch.cuda.current_stream().query(), "the GPU is still at work on what came before"


@pytest.mark.parametrize(
    ("track", "expected"), [((), 0), ("diagonal", 12 * 5), (("plis", "sketch"), 8 * 5 + 8 * 5 * 4), ("fim", 8 * 25)]
)
def test_bytes_per_example_are_stated_and_met(track: str, expected: int) -> None:
    assert Accounting(track=track, estimator="exact").bytes_per_example(5) == 136 + expected
    engine = train(data(60), steps=1, track=track, estimator="exact").engine
    assert engine.ledger.sums.num_bytes + engine._training.run.history.num_bytes == 60 * (136 + expected)


IDS = (41, 3, 17, 59)


def chosen(track: Any, **options: Any) -> FILPrivacyEngine:
    return train(data(60), steps=4, estimator="exact", track=track, **options).engine


def test_quantities_of_chosen_examples(tmp_path: Path) -> None:
    """track={name: ids}: the same numbers for whom it is kept, NaN for all others, and less memory."""
    whole, some = chosen(("diagonal", "plis")), chosen({"diagonal": IDS, "plis": None})
    expected, found = (engine.get_attribute_fil().value for engine in (whole, some))
    is_chosen = torch.isin(torch.arange(60), torch.tensor(IDS))
    assert torch.equal(found[is_chosen], expected[is_chosen])
    assert bool(found[~is_chosen].isnan().all())
    assert torch.equal(some.get_attribute_fil([17, 3]).value, expected[[17, 3]])
    assert torch.equal(some.get_plis(), whole.get_plis())
    assert torch.equal(some.get_fil().value, whole.get_fil().value)
    assert whole.ledger.sums.num_bytes - some.ledger.sums.num_bytes == 60 * (12 * 5 - 4) - 5 * 12 * 5
    saved = load(some.save_run(tmp_path / "run.parquet", delta=1e-5))
    assert np.array_equal(np.isnan(np.asarray(saved.attributes.shown)).all(axis=1), ~is_chosen.numpy())


def test_chosen_ids_in_states_averages_and_errors() -> None:
    first, second, third = (chosen({"diagonal": IDS}, seed=seed) for seed in (3, 3, 1))
    second.load_state_dict(first.state_dict())
    assert torch.equal(second.get_attribute_fil(IDS).value, first.get_attribute_fil(IDS).value)
    assert FILPrivacyEngine.merge([first, third]).get_attribute_fil(IDS).value.shape == (4, 5)
    with pytest.raises(ValueError, match="other ids"):
        chosen({"diagonal": [1, 2]}).load_state_dict(first.state_dict())
    with pytest.raises(KeyError, match="unknown example ids"):
        chosen({"diagonal": [60]})
    for wrong in ({"track": {"colour": [1]}}, {"rows_at": "nowhere"}):
        with pytest.raises(ValueError, match="colour|rows_at"):
            Accounting(**wrong)
