"""Files, pages and bars of a run that trains: they change nothing, keep to their time, and show the
run's numbers.
"""

from __future__ import annotations

import copy
import errno
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, TensorDataset

from tests.engine.loops import physical_batches
from torchfil import FILPrivacyEngine
from torchfil.accounting.sums import OWN_SUMS
from torchfil.engine.watching import TimeShare, show_every
from torchfil.questions import Absent
from torchfil.report import load
from torchfil.utils.errors import RunFileError


def private(accountant: str = "rdp", **options: Any) -> tuple[FILPrivacyEngine, Any, Any]:
    """An engine, its loader of four steps, and a step, with dropout.

    The same numbers at every call.
    """
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    data = TensorDataset(torch.rand(32, 1, 4, 4), torch.randint(3, (32,)))
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3)
    )
    engine = FILPrivacyEngine(noise_seed=0, accountant=accountant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {
        "noise_multiplier": 1.0,
        "questions": {"in?": Absent()},
        "track": ("diagonal",),
        **options,
    }
    model, optimizer, loader = engine.make_private(
        model, optimizer, DataLoader(data, batch_size=8), **given
    )

    def step(x: Any, y: Any) -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    step.model = model  # type: ignore[attr-defined]
    return engine, loader, step


def trained(engine: FILPrivacyEngine, loader: Any, step: Any, epochs: int = 3) -> dict[str, Any]:
    for _ in range(epochs):
        for x, y in loader:
            step(x, y)
    draws = torch.rand(3), np.random.rand(3), random.random()
    return {
        "weights": [p.detach().clone() for p in step.model.parameters()],
        "state": copy.deepcopy(engine.state_dict()),
        "draws": [torch.as_tensor(each) for each in draws],
    }


@pytest.mark.parametrize("way", ["save_every", "watch"])
def test_a_run_is_the_same_bit_for_bit(way: str, tmp_path: Path) -> None:
    plain = trained(*private())
    engine, loader, step = private()
    if way == "save_every":
        engine.save_every(tmp_path / "run.parquet", steps=2, delta=1e-5)
        found = trained(engine, loader, step)
        assert load(tmp_path / "run.parquet").about["mechanism"]["steps"] == 12
    else:
        with engine.watch(delta=1e-5, every=3, share=1.0) as watch:
            watch._repr_html_()
            found = trained(engine, loader, step)
            watch._repr_html_()
    # sums that are read in between are rounded once more, because what is predicted is added
    ours, theirs = (each["state"]["run"]["ledger"].pop("sums") for each in (found, plain))
    for name, value in theirs.items():
        exact = name in OWN_SUMS
        scale = float(value.abs().max())
        tolerance = 0 if exact else 1e-12 if value.dtype == torch.float64 else 1e-6
        torch.testing.assert_close(
            ours[name], value, rtol=tolerance, atol=tolerance * scale, msg=name
        )
    points, expected = (each["state"]["run"]["timeline"].pop("points") for each in (found, plain))
    torch.testing.assert_close(points, expected, rtol=1e-12, atol=0)
    for value, other in zip(pytree.tree_leaves(found), pytree.tree_leaves(plain), strict=True):
        assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other


@pytest.mark.filterwarnings("error")
def test_each_new_cause_is_one_warning_and_the_earlier_file_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, loader, step = private()
    path = tmp_path / "run.parquet"
    engine.save_every(path, steps=2, delta=1e-5)
    trained(engine, loader, step, epochs=1)
    whole = path.read_bytes()

    def fails(error: Exception) -> None:
        def broken(*_: Any) -> None:
            raise error

        monkeypatch.setattr("torchfil.run.columns.write_run", broken)

    for error in (
        OSError(errno.EIO, "disk"),
        PermissionError(errno.EACCES, "denied"),
        RunFileError("4 MiB"),
    ):
        fails(error)
        with pytest.warns(UserWarning, match=type(error).__name__) as found:
            trained(engine, loader, step, epochs=1)
        assert len(found) == 1
        assert path.read_bytes() == whole
    trained(engine, loader, step, epochs=1)  # it has warned of this
    monkeypatch.undo()
    path.unlink()
    tmp_path.rmdir()
    trained(engine, loader, step, epochs=1)
    assert load(path).about["mechanism"]["steps"] == 24


@pytest.mark.filterwarnings("error")
def test_a_bar_or_a_page_that_fails_warns_once_and_leaves_the_run_alone() -> None:
    def down(*_: Any) -> None:
        raise ConnectionError("is down")

    engine, loader, step = private()
    show_every(engine, down, 1e-5, steps=1, share=1.0)
    with (
        engine.watch(delta=1e-5, every=1) as watch,
        pytest.warns(UserWarning, match="is down") as found,
    ):
        watch._shown += [down]
        trained(engine, loader, step)
    assert len(found) == 2


def test_wrong_arguments_are_refused_before_the_training(tmp_path: Path) -> None:
    engine, *_ = private()
    for options, error, noun in (
        ({}, TypeError, "delta"),
        ({"delta": 1e-5, "titles": "x"}, TypeError, "title"),
        ({"delta": 1e-5, "steps": 0}, ValueError, "steps"),
        ({"delta": 1e-5, "share": 0}, ValueError, "share"),
    ):
        with pytest.raises(error, match=noun):
            engine.save_every(tmp_path / "run.parquet", **options)
    with pytest.raises(ValueError, match="delta"):
        engine.get_epsilon(2.0)
    assert engine._training.optimizer.watchers == []


@pytest.mark.parametrize("way", ["train_step", "physical batches"])
def test_a_function_is_called_after_whole_steps_whose_numbers_are_booked(way: str) -> None:
    engine, loader, step = private(criterion=nn.CrossEntropyLoss())
    seen: list[tuple[int, int]] = []
    stop = engine.call_every(2, lambda steps: seen.append((steps, engine.ledger.steps)))
    for _ in range(2):
        optimizer = engine._training.optimizer
        with physical_batches(loader, optimizer, None if way == "train_step" else 2) as batches:
            for x, y in batches:
                (engine.train_step if way == "train_step" else step)(x, y)
    assert seen == [(2, 2), (4, 4), (6, 6), (8, 8)]
    stop()
    trained(engine, loader, step, epochs=1)
    assert len(seen) == 4


def test_an_error_of_the_user_ends_the_loop_after_the_step() -> None:
    class PatienceError(Exception):
        pass

    def stop_early(_: int) -> None:
        raise PatienceError

    engine, loader, step = private()
    engine.call_every(3, stop_early)
    with pytest.raises(PatienceError):
        trained(engine, loader, step)
    assert engine.ledger is not None
    assert engine.ledger.steps == 3


def test_all_ranks_wait_for_the_latest() -> None:
    class Two:
        """Another rank that is late by so much."""

        late = 1.0

        def maximum(self, value: Any) -> Any:
            return value.clamp(min=self.late)

    two: Any = Two()
    pace, done = TimeShare(0.5, two), []
    pace.call(lambda: done.append(1))
    assert done == []
    two.late = -1.0
    pace.call(lambda: done.append(1))
    assert done == [1]


def test_a_watch_serves_until_it_stops_and_leaves_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    import urllib.error
    import urllib.request

    engine, loader, step = private()
    with engine.watch(delta=1e-5, every=2) as watch:
        assert watch.url in capsys.readouterr().err
        assert watch.path.parent.stat().st_mode & 0o777 == 0o700
        trained(engine, loader, step, epochs=1)
        assert watch.path.stat().st_mode & 0o777 == 0o600
        assert "of this run" in urllib.request.urlopen(watch.url, timeout=20).read().decode()
    assert not watch.path.parent.exists()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(watch.url, timeout=5)
    watch.stop()
    assert engine._training.optimizer.watchers == []
    trained(engine, loader, step, epochs=1)
