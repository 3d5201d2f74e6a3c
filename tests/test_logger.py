"""The leakage in dashboards: what real ones read back, what it rests on, and that training does not change."""

from __future__ import annotations

import json
import struct
import time
import warnings
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torchfil import FILPrivacyEngine, LeakageLogger
from torchfil.engine.saving import build
from torchfil.integrations.logger import EXPONENTS, Calls, levels_of, point_of
from torchfil.questions import Absent
from torchfil.report.summary import AttackSummary, AttributeSummary, summarise
from torchfil.run import baselines
from torchfil.run.series import CountSeries, Levels

N, STEPS = 80, 24


def private(batch_size: int = 20, question: str = "member?") -> tuple[FILPrivacyEngine, nn.Module, Any]:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(N, 3), torch.randint(0, 2, (N,)))
    model = nn.Linear(3, 2)
    engine = FILPrivacyEngine(noise_seed=0)
    options = {"noise_multiplier": 1.0, "criterion": nn.CrossEntropyLoss(), "questions": {question: Absent()}}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    private_model, _, loader = engine.make_private(model, optimizer, DataLoader(data, batch_size=batch_size), **options)
    return engine, private_model, loader


def train(engine: FILPrivacyEngine, loader: Any, steps: int = STEPS) -> None:
    while engine.ledger is None or engine.ledger.steps < steps:
        for x, y in loader:
            engine.train_step(x, y)


def logged(*writers: Any, **options: Any) -> tuple[FILPrivacyEngine, list[tuple[int, dict[str, float]]]]:
    """A run, and the numbers that a function was given at each step."""
    engine, _, loader = private()
    numbers = list[tuple[int, dict[str, float]]]()
    options = {"delta": 1e-4, "every": 3, **options}
    with LeakageLogger(*writers, lambda told, step: numbers.append((step, told)), **options).attach(engine):
        train(engine, loader)
    return engine, numbers


class TestDashboards:
    """Every dashboard holds what a plain function was given."""

    def test_tensorboard(self, tmp_path: Path) -> None:
        reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        from torch.utils.tensorboard import SummaryWriter

        (tmp_path / "leakage-report").mkdir()
        (tmp_path / "leakage-report" / "leakage.csv").write_text("of an earlier, confidential log")
        with SummaryWriter(str(tmp_path)) as writer:
            _, numbers = logged(writer)
        found = reading.EventAccumulator(str(tmp_path), {"scalars": 0, "histograms": 0})
        found.Reload()
        tags = {name for _, told in numbers for name in told}
        assert set(found.Tags()["scalars"]) == tags >= {"privacy/epsilon", "privacy/share/untold"}
        for name in tags:
            written = [(each.step, each.value) for each in found.Scalars(name)]
            assert written == [(step, pytest.approx(told[name])) for step, told in numbers if name in told]

        # bins of ten or more examples, with sums made from the bins alone
        histograms = found.Histograms("privacy/log10_mse_bound")
        assert histograms
        for each in histograms:
            value = each.histogram_value
            counts, edges = np.asarray(value.bucket), np.asarray([value.min, *value.bucket_limit])
            middles = (edges[:-1] + edges[1:]) / 2
            assert all(count % 10 == 0 for count in counts if sum(counts) < N)
            assert value.sum == pytest.approx(counts @ middles)
            assert value.sum_squares == pytest.approx(counts @ middles**2)
            assert np.allclose(8 * edges[1:-1], np.rint(8 * edges[1:-1])), "edges of the fixed scale"
        page = tmp_path / "leakage-report" / "index.html"
        assert "Public version" in page.read_text(encoding="utf-8")
        assert {each.name for each in page.parent.iterdir()} == {"index.html", "summary.json"}

    def test_mlflow(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        mlflow = pytest.importorskip("mlflow")
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        mlflow.set_tracking_uri(tmp_path.as_uri())
        mlflow.set_experiment("leakage")
        with mlflow.start_run() as run:
            _, numbers = logged(mlflow)
        client = mlflow.MlflowClient()
        history = client.get_metric_history(run.info.run_id, "privacy/epsilon")
        assert [(each.step, each.value) for each in history] == [(s, told["privacy/epsilon"]) for s, told in numbers]
        name = "privacy/question/member_3f/share_above_0.5"  # a question mark is no part of a metric's name
        assert client.get_metric_history(run.info.run_id, name)
        with pytest.raises(ValueError, match="MlflowClient"):
            LeakageLogger(client, delta=1e-5)
        assert {each.path for each in client.list_artifacts(run.info.run_id)} == {"leakage-report", "privacy"}
        bins = json.loads(next((tmp_path).rglob("log10_mse_bound/*.json")).read_text())
        assert len(bins["edges"]) == len(bins["counts"]) + 1

    def test_weights_and_biases(self, tmp_path: Path) -> None:
        wandb = pytest.importorskip("wandb")
        settings = wandb.Settings(console="off", silent=True)
        numbers = list[tuple[int, dict[str, float]]]()
        with wandb.init(mode="offline", dir=str(tmp_path), project="leakage", settings=settings) as run:
            engine, _, loader = private(question="3*4?")  # * stands for anything in W&B's names
            engine.call_every(1, lambda step: run.log({"loss": step}, step=step))
            logger = LeakageLogger(run, lambda told, step: numbers.append((step, told)), delta=1e-4, every=3)
            with logger.attach(engine):
                train(engine, loader)
        records, deadline = list[Any](), time.monotonic() + 30
        while not any(each.WhichOneof("record_type") == "exit" for each in records) and time.monotonic() < deadline:
            records = wandb_records(next(tmp_path.rglob("run-*.wandb")))  # another process writes it
        rows = [
            {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            for record in records
            if record.WhichOneof("record_type") == "history"
        ]
        written = [(row["private_steps"], row["privacy/epsilon"]) for row in rows if "privacy/epsilon" in row]
        assert written == [(step, pytest.approx(told["privacy/epsilon"])) for step, told in numbers]
        assert any(row.get("privacy/log10_mse_bound/_type") == "histogram" for row in rows)
        assert [row["loss"] for row in rows if "loss" in row] == list(range(1, engine.ledger.steps + 1))
        (artifact,) = (each.artifact for each in records if each.WhichOneof("record_type") == "artifact")
        assert artifact.name == "leakage-report"

    def test_aim_and_lightning_are_found_by_their_methods(self, tmp_path: Path) -> None:
        class Aim:
            tracked, folders = list[tuple[str, float, int]](), list[str]()

            def track(self, value: Any, name: str, step: int) -> None:
                self.tracked.append((name, value, step))

            def log_artifacts(self, path: str, name: str) -> None:
                self.folders.append(name)

        class Lightning:
            experiment, seen = object(), list[int]()

            def log_metrics(self, numbers: dict[str, float], step: int) -> None:
                self.seen.append(step)

        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(__import__("sys").modules, "aim", type("aim", (), {"Distribution": staticmethod(dict)}))
            _, numbers = logged(Aim(), Lightning())
        epsilons = [(step, value) for name, value, step in Aim.tracked if name == "privacy/epsilon"]
        assert epsilons == [(step, told["privacy/epsilon"]) for step, told in numbers]
        assert Lightning.seen == [step for step, _ in numbers]
        assert Aim.folders == ["leakage-report"]
        with pytest.raises(ValueError, match="SummaryWriter"):
            LeakageLogger(object(), delta=1e-5)


def wandb_records(path: Path) -> list[Any]:
    """The records of an offline run: LevelDB's log format, protobuf messages inside."""
    from wandb.proto import wandb_internal_pb2 as messages

    raw, place, part, found = path.read_bytes(), 7, b"", []
    while place + 7 <= len(raw):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", raw[place : place + 7])
        content = raw[place + 7 : place + 7 + length]
        place += 7 + length
        part = content if kind in (1, 2) else part + content
        if kind in (1, 4):
            record = messages.Record()
            record.ParseFromString(part)
            found.append(record)
    return found


class TestNumbers:
    def test_redacted_counts_are_the_runs_rounded(self) -> None:
        engine, _, loader = private()
        exact, public = dict[int, tuple[np.ndarray, np.ndarray]](), dict[int, dict[str, int | str]]()
        numbers = list[tuple[int, dict[str, float]]]()

        def note(step: int) -> None:
            run = engine._saved_run("test", 1e-4, records=False, hash_data=False)
            assert run is not None
            exact[step] = baselines.exposure_of(run), np.asarray(run.columns["mse_bound_low"])
            public[step] = summarise(run, redacted=True).questions[0].above

        engine.call_every(3, note)
        logger = LeakageLogger(lambda told, step: numbers.append((step, told)), delta=1e-4, every=3, prefix="")
        logger.attach(engine)
        train(engine, loader)
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
            assert "smallest_mse_bound" not in told
            assert told["epsilon"] <= engine.get_epsilon(1e-4) + 1e-9
        assert shares > 5
        assert answers > 5

    @pytest.mark.parametrize(("multiple", "holds"), [(10, True), (0, False)])
    def test_a_quantile_holds_for_the_examples_themselves(self, multiple: int, holds: bool) -> None:
        """Counts are rounded, and that of the told examples may be left out."""
        rng, claims, wrong, gaps = np.random.default_rng(0), 0, 0, 0
        for _ in range(25):
            n, top, series = 95, len(EXPONENTS) + 1, CountSeries(10)
            codes = np.full(n, top)
            for _ in range(40):
                rows = rng.choice(n, 4, replace=False)
                codes[rows] = np.where(codes[rows] == top, rng.integers(60, 70, 4), codes[rows] - rng.integers(0, 3, 4))
                counts = series.publish({"bounds": Levels(codes.copy(), top + 1, with_empty=False)})
                scalars, edges, _ = point_of(counts, n, multiple)
                gaps += len(EXPONENTS) not in counts["bounds"]
                assert len(edges) == 0 or len(EXPONENTS) in counts["bounds"]
                told = codes[codes < top]
                for name, value in scalars.items():
                    share, place = float(name.rpartition("/")[2]), np.abs(EXPONENTS - np.log10(value)).argmin()
                    claims += 1
                    wrong += (told <= place).sum() > share * len(told)
        assert min(claims, gaps) > 50
        assert (wrong == 0) == holds

    def test_no_two_published_counts_differ_by_few(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A point at every step, with batches of about four: plain counts show single people, published ones do not."""
        monkeypatch.setattr(build, "_bounds", lambda *_: {})  # they take time, and are not logged
        engine, _, loader = private(batch_size=4)
        logger = LeakageLogger(lambda *_: None, delta=1e-4, every=1).attach(engine)
        classes, publish = list[np.ndarray](), logger._series.publish

        def noted(levels: dict[str, Any]) -> Any:
            classes.append(levels["classes"].codes)
            return publish(levels)

        logger._series.publish = noted  # type: ignore[method-assign]
        train(engine, loader, 120)
        crossed = [int((one != other).sum()) for one, other in pairwise(classes)]
        assert 1 in crossed, "single people cross between two steps"

        sets = [(low <= codes) & (codes < high) for codes, counted in logger._series.kept for low, high in counted]
        assert len(logger._series.kept) > 10
        for one, other in combinations([np.zeros(N, dtype=bool), *sets], 2):
            apart = int((one != other).sum())
            assert apart in (0, N) or 10 <= apart <= N - 10

    def test_confidential_ones_are_exact_and_warned_of(self, tmp_path: Path) -> None:
        with pytest.warns(UserWarning, match="confidential"):
            engine, numbers = logged(confidential=True, prefix="")
        step, told = numbers[-1]
        assert step == engine.ledger.steps
        assert told["smallest_mse_bound"] == pytest.approx(float(engine.get_mse_bound().value.min()))
        shares = [told[f"share/{tone}"] for tone in ("half", "below", "beyond", "untold")]
        assert sum(shares) == pytest.approx(1)
        assert N * shares[0] == pytest.approx(round(N * shares[0]))

    def test_the_report_holds_no_count_beside_the_series(self, tmp_path: Path) -> None:
        """Between the last point and the report, three examples moved: the page leaves out what would show them."""
        from torchfil.integrations.logger import _withheld

        engine, _, loader = private()
        logger = LeakageLogger(lambda *_: None, delta=1e-4).attach(engine)
        train(engine, loader)
        run = engine._saved_run("test", 1e-4)
        levels = levels_of(run)
        logger._series.publish(levels)
        untold = np.flatnonzero(levels["classes"].codes != 2)
        run.columns["mse_bound_low"][np.flatnonzero(levels["classes"].codes == 2)[:3]] = 0.0
        counts = logger._series.publish(levels_of(run))
        summary = _withheld(summarise(run, redacted=True), counts)
        assert len(untold) < N - 10
        assert summary.classes[2] == summary.classes[3] == "not told"
        attributes = [AttributeSummary("age", "years", {}, True, exposed=20)]
        attacks = [AttackSummary("guess", "", 80, violated=20, below=30), AttackSummary("other", "", 80, violated=0)]
        grouped = replace(run, groups={"half": np.repeat(["a", "b"], N // 2)})
        found = _withheld(replace(summarise(grouped, redacted=True), attributes=attributes, attacks=attacks), counts)
        assert [(each.examples, each.measured) for each in found.groupings[0].groups] == 2 * [(N // 2, "not told")]
        assert found.mse_histogram is found.ratio_histogram is found.epsilon_histogram is None
        assert found.attributes[0].exposed == found.attacks[0].violated == "not told"
        assert found.attacks[0].below is None
        assert found.attacks[1].violated == 0

    def test_a_resumed_logger_remembers_what_was_published(self, tmp_path: Path) -> None:
        engine, _, loader = private()
        logger = LeakageLogger(lambda *_: None, delta=1e-4, every=3).attach(engine)
        train(engine, loader, 12)
        torch.save(logger.state_dict(), tmp_path / "logger.pt")
        other = LeakageLogger(lambda *_: None, delta=1e-4)
        other.load_state_dict(torch.load(tmp_path / "logger.pt", weights_only=True))
        assert len(other._series.kept) == len(logger._series.kept) > 0
        with pytest.raises(ValueError, match="80 examples and the run has 79"):
            other._series.publish({"x": Levels(np.zeros(N - 1, dtype=int), 2)})
        for (one, levels), (again, same) in zip(logger._series.kept, other._series.kept, strict=True):
            assert (one == again).all()
            assert (levels == same).all()


@pytest.mark.filterwarnings("error")
def test_a_dashboard_that_is_down_ends_neither_the_training_nor_the_other_logs() -> None:
    numbers = list[int]()

    class Down(Calls):
        def scalars(self, numbers: dict[str, float], step: int) -> None:
            raise ConnectionError("no route")

        def folder(self, path: Path) -> None:
            raise OSError("no room")

    engine, _, loader = private()
    with pytest.warns(UserWarning, match="not affected") as found:
        log = LeakageLogger(Down(dict), lambda _, step: numbers.append(step), delta=1e-4, every=4)
        with log.attach(engine):
            train(engine, loader)
    assert numbers == [4, 8, 12, 16, 20, 24, 24]
    first, last = [str(each.message) for each in found]
    assert first.startswith("writing to <class 'dict'> failed at step 4 (ConnectionError: no route)")
    assert last.startswith("writing to <class 'dict'> failed at step 24 (OSError: no room)")

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    engine, _, loader = private()
    LeakageLogger(interrupted, delta=1e-4, every=4).attach(engine)
    with pytest.raises(KeyboardInterrupt):
        train(engine, loader)


def test_training_is_the_same_with_and_without_it() -> None:
    plain, model, loader = private()
    train(plain, loader)
    engine, watched, loader = private()
    with LeakageLogger(lambda *_: None, delta=1e-4, every=2).attach(engine):
        train(engine, loader)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), watched.parameters(), strict=True))
    assert torch.equal(plain.get_fil().value, engine.get_fil().value)


def test_a_logger_serves_one_run_and_says_what_it_needs() -> None:
    engine, _, _ = private()
    logger = LeakageLogger(lambda *_: None, delta=1e-4).attach(engine)
    with pytest.raises(ValueError, match="belongs"):
        logger.attach(engine)
    with pytest.raises(ValueError, match="no writer"):
        LeakageLogger(delta=1e-4).attach(engine)
    with pytest.raises(ValueError, match="min_group=1"):
        LeakageLogger(delta=1e-4, min_group=1)
    with pytest.raises(ValueError, match="delta=2"):
        LeakageLogger(delta=2)
    with pytest.raises(TypeError, match="titles.*title"):
        LeakageLogger(delta=1e-4, titles="x")
    with pytest.raises(ValueError, match="steps=0"):
        LeakageLogger(print, delta=1e-4, every=0).attach(engine)
    logger.close()  # without a step there is nothing to report
    engine, _, loader = private()
    logger.attach(engine)
    train(engine, loader, 4)
    logger.close()
    with pytest.raises(ValueError, match="belongs"):  # with what the first run published
        logger.attach(private()[0])
    with pytest.raises(RuntimeError, match="make_private"), warnings.catch_warnings():
        LeakageLogger(lambda *_: None, delta=1e-4).attach(FILPrivacyEngine())


def test_the_scale_of_bounds_is_fixed() -> None:
    assert EXPONENTS[0] == -8
    assert EXPONENTS[-1] == 8
    assert np.allclose(np.diff(EXPONENTS), 1 / 8)
