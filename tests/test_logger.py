"""The leakage in dashboards: what real ones read back, what it rests on, and that training does not
change.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.engine.ways import start
from torchfil import FILPrivacyEngine, LeakageLogger
from torchfil.integrations.logger import EXPONENTS, point_of
from torchfil.questions import Absent
from torchfil.report.summary import summarise
from torchfil.run import baselines
from torchfil.run.disclosure import CountSeries, Levels

N, STEPS = 80, 24


def private(batch_size: int = 20) -> tuple[FILPrivacyEngine, Any]:
    torch.manual_seed(0)
    data, asked = (torch.randn(N, 3), torch.randint(0, 2, (N,))), {"member?": Absent()}
    options: dict[str, Any] = {"batch": batch_size, "lr": 0.5, "poisson_sampling": True}
    engine, _, _, loader = start(nn.Linear(3, 2), data, "auto", questions=asked, **options)
    return engine, loader


def train(engine: FILPrivacyEngine, loader: Any, steps: int = STEPS) -> None:
    while engine.ledger is None or engine.ledger.steps < steps:
        for x, y in loader:
            engine.train_step(x, y)


def logged(
    *writers: Any, **options: Any
) -> tuple[FILPrivacyEngine, list[tuple[int, dict[str, float]]]]:
    """A run, and the numbers that a function was given at each step."""
    engine, loader = private()
    numbers = list[tuple[int, dict[str, float]]]()
    options = {"delta": 1e-4, "every": 3, **options}
    with LeakageLogger(*writers, lambda told, step: numbers.append((step, told)), **options).attach(
        engine
    ):
        train(engine, loader)
    return engine, numbers


@pytest.mark.slow
def test_every_dashboard_holds_what_a_function_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    mlflow = pytest.importorskip("mlflow")
    from torch.utils.tensorboard import SummaryWriter

    class Board:
        """Any dashboard, by the methods that it has."""

        def __init__(self, *methods: str) -> None:
            self.calls = list[tuple[Any, ...]]()
            for method in methods:
                setattr(
                    self,
                    method,
                    lambda *args, **options: self.calls.append((*args, *options.values())),
                )

    lightning, wandb, aim = Board("log_metrics"), Board("define_metric", "log"), Board("track")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlflow").as_uri())
    with SummaryWriter(str(tmp_path / "board")) as writer, mlflow.start_run() as run:
        _, numbers = logged(writer, mlflow, lightning, wandb, aim)
    told = [(step, each["privacy/epsilon"]) for step, each in numbers]
    found = reading.EventAccumulator(str(tmp_path / "board"), {"scalars": 0}).Reload()
    assert [(each.step, each.value) for each in found.Scalars("privacy/epsilon")] == [
        (step, pytest.approx(epsilon)) for step, epsilon in told
    ]
    client = mlflow.MlflowClient()
    history = client.get_metric_history(run.info.run_id, "privacy/epsilon")
    assert [(each.step, each.value) for each in history] == told
    # a question mark is no part of a metric's name
    name = "privacy/question/member_3f/share_above_0.5"
    assert client.get_metric_history(run.info.run_id, name)
    assert lightning.calls == [(each, step) for step, each in numbers]
    assert [call[0] for call in wandb.calls if isinstance(call[0], dict)] == [
        {**each, "private_steps": step} for step, each in numbers
    ]
    assert [(step, value) for value, name, step in aim.calls if name == "privacy/epsilon"] == told
    with pytest.raises(ValueError, match="mlflow"):
        LeakageLogger(client, delta=1e-5)


class TestNumbers:
    def test_redacted_counts_are_the_runs_rounded(self) -> None:
        engine, loader = private()
        exact, public = (
            dict[int, tuple[np.ndarray, np.ndarray]](),
            dict[int, dict[str, int | str]](),
        )
        numbers = list[tuple[int, dict[str, float]]]()

        def note(step: int) -> None:
            run = engine._saved_run("test", 1e-4, records=False, hash_data=False)
            assert run is not None
            exact[step] = baselines.exposure_of(run), np.asarray(run.columns["mse_bound_low"])
            public[step] = summarise(run, redacted=True).questions[0].above

        engine.call_every(3, note)
        logger = LeakageLogger(
            lambda told, step: numbers.append((step, told)), delta=1e-4, every=3, prefix=""
        )
        logger.attach(engine)
        train(engine, loader, 24)
        shares = answers = 0
        for step, told in numbers:
            for rate, count in public[step].items():  # as on the page of that step
                if (name := f"question/member?/share_above_{rate}") in told:
                    answers += count > 0
                    assert N * told[name] == pytest.approx(count)
            exposure, low = exact[step]
            for place, tone in enumerate(("half", "below", "beyond", "untold")):
                if f"share/{tone}" in told:
                    shares += 1
                    assert abs(N * told[f"share/{tone}"] - (exposure == place).sum()) <= 10
            for name, value in told.items():
                if name.startswith("mse_bound_quantile/"):
                    share = float(name.rpartition("/")[2])
                    assert (low[exposure < 3] <= value).sum() <= share * (exposure < 3).sum()
            assert told["epsilon"] <= engine.get_epsilon(1e-4) + 1e-9
        assert min(shares, answers) > 5

    def test_a_quantile_holds_for_the_examples_themselves(self) -> None:
        """Counts are rounded, and that of the told examples may be left out.

        By counts that are taken for exact ones it would not hold.
        """
        rng, claims, gaps, wrong = np.random.default_rng(0), 0, 0, {10: 0, 0: 0}
        for _ in range(10):
            n, top, series = 95, len(EXPONENTS) + 1, CountSeries(10)
            codes = np.full(n, top)
            for _ in range(40):
                rows = rng.choice(n, 4, replace=False)
                codes[rows] = np.where(
                    codes[rows] == top, rng.integers(60, 70, 4), codes[rows] - rng.integers(0, 3, 4)
                )
                counts = series.publish({"bounds": Levels(codes.copy(), top + 1, with_empty=False)})
                gaps += len(EXPONENTS) not in counts["bounds"]
                told = codes[codes < top]
                for multiple in wrong:
                    for name, value in point_of(counts, n, multiple).items():
                        share = float(name.rpartition("/")[2])
                        place = np.abs(EXPONENTS - np.log10(value)).argmin()
                        claims += multiple > 0
                        wrong[multiple] += (told <= place).sum() > share * len(told)
        assert min(claims, gaps) > 20
        assert wrong[10] == 0 < wrong[0]

    def test_a_resumed_logger_remembers_what_was_published(self, tmp_path: Path) -> None:
        engine, loader = private()
        logger = LeakageLogger(lambda *_: None, delta=1e-4, every=3).attach(engine)
        train(engine, loader, 12)
        torch.save(logger.state_dict(), tmp_path / "logger.pt")
        other = LeakageLogger(lambda *_: None, delta=1e-4)
        other.load_state_dict(torch.load(tmp_path / "logger.pt", weights_only=True))
        kept, again = (
            np.hstack([np.concatenate(each, axis=None) for each in log._series.kept])
            for log in (logger, other)
        )
        assert len(kept) > 0
        assert (kept == again).all()


@pytest.mark.filterwarnings("error")
def test_a_dashboard_that_is_down_ends_neither_the_training_nor_the_other_logs() -> None:
    numbers = list[int]()

    def down(*_: Any) -> None:
        raise ConnectionError("no route")

    engine, loader = private()
    with pytest.warns(
        UserWarning, match=r"step 4 \(ConnectionError: no route\); training is not affected"
    ) as found:
        log = LeakageLogger(down, lambda _, step: numbers.append(step), delta=1e-4, every=4)
        with log.attach(engine):
            train(engine, loader)
    assert numbers == [4, 8, 12, 16, 20, 24, 24]
    assert len(found) == 1


def test_a_logger_serves_one_run_and_says_what_it_needs() -> None:
    engine, loader = private()
    logger = LeakageLogger(lambda *_: None, delta=1e-4).attach(engine)
    train(engine, loader, 4)
    logger.close()
    with pytest.raises(ValueError, match="belongs"):  # with what the first run published
        logger.attach(private()[0])
    with pytest.raises(ValueError, match="no writer"):
        LeakageLogger(delta=1e-4).attach(engine)
