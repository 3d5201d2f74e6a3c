"""Stopping and resuming, averaging, pausing, tables and groups, and the statistics of a probed run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import nn

from tests.cases import DEVICE, grouped
from tests.engine.loops import SIGMA, C, data, loader, network, train
from torchfil import FILPrivacyEngine
from torchfil.accounting.leakage import Leakage
from torchfil.engine.distributed.checkpoints import write_file
from torchfil.fisher import NoAmplification, PoissonAmplification, estimators, register_estimator
from torchfil.utils.errors import CheckpointError

OPTIONS: dict[str, Any] = {
    "noise_multiplier": SIGMA,
    "max_grad_norm": C,
    "track": ("diagonal", "sketch"),
    "fil_rate": 0.7,
    "seed": 5,
}


def start(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    module = network()
    engine = FILPrivacyEngine()
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.9)
    noise = torch.Generator(device=DEVICE).manual_seed(8)
    return engine, *engine.make_private(
        module, optimizer, loader(data(60)), **grouped(noise_generator=noise, **OPTIONS)
    )


def epochs(model: Any, optimizer: Any, private: Any, count: int) -> None:
    for _ in range(count):
        for x, y in private:
            optimizer.zero_grad()
            F.cross_entropy(model(x.to(DEVICE)), y.to(DEVICE)).backward()
            optimizer.step()


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


class TestResume:
    def test_bit_for_bit(self, tmp_path: Path) -> None:
        whole, model, optimizer, private = start()
        epochs(model, optimizer, private, 4)

        first, model, optimizer, private = start()
        epochs(model, optimizer, private, 2)
        first.save_checkpoint(path=tmp_path / "run.pt", module=model, optimizer=optimizer)

        second, model, optimizer, private = start(seed=99)
        second.load_checkpoint(path=tmp_path / "run.pt", module=model, optimizer=optimizer)
        epochs(model, optimizer, private, 2)
        assert same(second.state_dict(), whole.state_dict())
        assert second.get_epsilon(1e-5) == whole.get_epsilon(1e-5)
        assert [path.name for path in tmp_path.iterdir()] == ["run.pt"], "no temporary file is left"

    def test_state_dict_round_trip_before_and_after_steps(self) -> None:
        engine, model, optimizer, private = start()
        before = engine.state_dict()
        epochs(model, optimizer, private, 1)
        after = engine.state_dict()
        other, *_ = start(seed=3)
        other.load_state_dict(after)
        assert same(other.state_dict(), after)
        other.load_state_dict(before)
        with pytest.raises(RuntimeError, match="no private step"):
            other.get_fil()

    def test_a_failed_save_keeps_the_old_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        engine, model, optimizer, private = start()
        epochs(model, optimizer, private, 1)
        path = tmp_path / "run.pt"
        engine.save_checkpoint(path=path, module=model)
        old = path.read_bytes()

        def full(*_args: Any, **_more: Any) -> None:
            raise OSError("No space left on device")

        monkeypatch.setattr(torch, "save", full)
        with pytest.raises(OSError, match="No space left"):
            engine.save_checkpoint(path=path, module=model)
        assert path.read_bytes() == old
        assert [p.name for p in tmp_path.iterdir()] == ["run.pt"]

    def test_foreign_states_are_refused_and_change_nothing(self, tmp_path: Path) -> None:
        engine, model, optimizer, private = start()
        epochs(model, optimizer, private, 1)
        before = engine.state_dict()
        other = train(data(40), steps=2, **{**OPTIONS, "track": ("diagonal", "sketch")}).engine
        with pytest.raises(ValueError, match="data_set='60 examples' instead of '40 examples'"):
            engine.load_state_dict(other.state_dict())
        plain = train(data(60), steps=2).engine
        with pytest.raises(ValueError, match=r"track=\['diagonal', 'sketch'\] instead of \[\]"):
            engine.load_state_dict(plain.state_dict())
        with pytest.raises(ValueError, match="the state lacks"):
            engine.load_state_dict({"run": {}})
        older = {k: v for k, v in before["run"].items() if k != "timeline"}
        with pytest.raises(ValueError, match="the state lacks 'timeline'"):
            engine.load_state_dict({**before, "run": older})
        with pytest.raises(ValueError, match="accountant='rdp' instead of 'prv'"):
            engine.load_state_dict({**before, "settings": {**before["settings"], "accountant": "prv"}})
        write_file(tmp_path / "other.pt", {"module_state_dict": {}})
        with pytest.raises(ValueError, match="holds no Fisher accounting"):
            engine.load_checkpoint(path=tmp_path / "other.pt", module=model)
        assert same(engine.state_dict(), before)

    def test_unsafe_files_are_refused(self, tmp_path: Path) -> None:
        engine, model, *_ = start()
        write_file(tmp_path / "evil.pt", {"fil_engine_state_dict": Leakage})
        with pytest.raises(
            CheckpointError, match=r"evil.pt .*cannot be unpickled safely.*only tensors and plain values"
        ):
            engine.load_checkpoint(path=tmp_path / "evil.pt", module=model)


class TestMerge:
    def test_mean_and_run_to_run_error(self) -> None:
        engines = [
            train(data(40), steps=6, estimator="exact", seed=s, module=network(seed=s)).engine for s in (1, 2, 3)
        ]
        traces = torch.stack([e.totals.get_trace().value for e in engines])
        merged = FILPrivacyEngine.merge(engines)
        assert torch.allclose(merged.get_trace().value, traces.mean(dim=0))
        assert torch.allclose(merged.get_trace().standard_error, traces.std(dim=0) / math.sqrt(3))
        assert merged.get_trace().degrees_of_freedom == 2
        assert merged.get_trace().kind == "estimate"
        assert len(merged.leakage()) == 40

    def test_one_run_is_itself(self) -> None:
        engine = train(data(40), steps=3, estimator="exact").engine
        merged = FILPrivacyEngine.merge([engine])
        assert torch.equal(merged.get_fil().value, engine.get_fil().value)
        assert merged.get_fil().kind == "exact"

    def test_different_data_is_refused(self) -> None:
        with pytest.raises(ValueError, match="runs to average must share data set"):
            FILPrivacyEngine.merge([train(data(40), steps=2).engine, train(data(41), steps=2).engine])
        with pytest.raises(ValueError, match="at least one engine"):
            FILPrivacyEngine.merge([])


class TestPaused:
    def test_totals_become_lower_bounds_loudly(self) -> None:
        engine, model, optimizer, private = start()
        epochs(model, optimizer, private, 1)
        complete = engine.totals.get_trace().value.clone()
        with pytest.warns(UserWarning, match="Fisher accounting is paused"), engine.paused():
            epochs(model, optimizer, private, 1)
        missed = engine.ledger.sums["missed"]
        assert missed.sum() > 0
        with pytest.warns(UserWarning, match="took part in paused steps"):
            fil = engine.get_fil()
        assert fil.kind == "lower bound"
        assert torch.equal(engine.ledger.sums["trace"], complete)
        with pytest.warns(UserWarning):
            assert engine.get_mse_bound().kind == "upper bound"
        untouched = (missed == 0).nonzero().flatten().tolist()
        assert engine.get_fil(untouched).kind == "estimate"
        with pytest.warns(UserWarning):
            kinds = engine.leakage()["fil_kind"]
        assert [kind == "lower bound" for kind in kinds] == (missed > 0).tolist()
        assert engine.accountant.history[-1][2] == engine._training.run.history.steps == 2 * len(private)

    def test_pausing_from_the_first_step_and_in_a_pause(self) -> None:
        engine, model, optimizer, private = start()
        with pytest.warns(UserWarning), engine.paused():
            with pytest.warns(UserWarning), engine.paused():
                pass
            epochs(model, optimizer, private, 1)
        with pytest.warns(UserWarning):
            assert engine.get_fil().value.max() == 0
        epochs(model, optimizer, private, 1)
        assert engine.ledger.sums["trace"].max() > 0
        assert engine.ledger.missed_steps == len(private)


class TestTables:
    def test_columns(self) -> None:
        engine = train(data(40), steps=8).engine
        table = engine.leakage()
        assert table.index.name == "id"
        assert list(table.columns) == [
            "fil",
            "fil_error",
            "sampling_error",
            "fil_kind",
            "mse_bound",
            "mse_bound_low",
            "rel_error",
            "participations",
            "missed",
            "squared_norm",
        ]
        seen = table[table.participations > 0]
        assert (seen.mse_bound_low < seen.mse_bound).all()
        assert torch.allclose(torch.tensor(seen.mse_bound.values), 1 / torch.tensor(seen.fil.values) ** 2)

    def test_without_pandas_a_dict_of_lists(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import sys

        engine = train(data(40), steps=3).engine
        monkeypatch.setitem(sys.modules, "pandas", None)
        table = engine.leakage([2, 5])
        assert table["id"] == [2, 5]
        assert len(table["fil"]) == 2

    def test_groups(self) -> None:
        engine = train(data(40), steps=8, estimator="exact").engine
        group_of = {i: "even" if i % 2 == 0 else "odd" for i in range(40)}
        table = engine.group_leakage(group_of, threshold=0.1, quantiles=(0.5,))
        values = engine.get_fil(range(0, 40, 2)).value
        row = table.loc["even"]
        assert row["count"] == 20
        assert row["mean"] == pytest.approx(values.mean().item())
        assert row["max"] == pytest.approx(values.max().item())
        assert row["q50"] == pytest.approx(values.quantile(0.5).item())
        assert row["share_above"] == pytest.approx((values > 0.1).double().mean().item())

    def test_what_was_not_tracked_is_told(self) -> None:
        engine = train(data(40), steps=2).engine
        with pytest.raises(ValueError, match=r"make_private with track=\('diagonal',\)"):
            engine.get_attribute_fil()
        with pytest.raises(ValueError, match=r"track=\('fim',\)"):
            engine.get_fil(kind="spectral")


def check_calibration(
    options: dict[str, Any], runs: int, critical: float = 4.0, coverage: Any = (0.90, 0.99), rtol: float = 0.15
) -> None:
    """Frozen weights (lr = 0), the same batches: many seeds of the probes against the exact sums.

    A bias of one example is looked for, and one that all share: their mean over a run is known far better. A skipped
    step is one for all, which leaves less to be learned of the spread from each run.
    """
    dataset = data(24)

    def run(**more: Any) -> FILPrivacyEngine:
        torch.manual_seed(0)
        module = nn.Linear(5, 3).double().to(DEVICE)
        engine = FILPrivacyEngine()
        optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.0)
        model, optimizer, private = engine.make_private(
            module, optimizer, loader(dataset, 12), **grouped(noise_multiplier=SIGMA, max_grad_norm=C, **more)
        )
        epochs(model, optimizer, private, 8)
        return engine

    truth = run(estimator="exact").totals.get_trace().value
    results = [run(seed=s, **options).totals.get_trace() for s in range(runs)]
    values = torch.stack([r.value for r in results])
    z = (values.mean(dim=0) - truth) / (values.std(dim=0) / math.sqrt(runs))
    assert (z.abs() < critical).all()
    by_run = (values / truth).mean(dim=1)
    assert abs(float(by_run.mean()) - 1) < critical * float(by_run.std()) / math.sqrt(runs)
    ends = [r.interval(0.95, "probes") for r in results]
    covered = torch.stack([(low <= truth) & (truth <= high) for low, high in ends])
    assert coverage[0] <= covered.double().mean().item() <= coverage[1]
    reported = torch.stack([r.standard_error.square() for r in results]).mean(dim=0).sqrt()
    assert torch.allclose(reported.mean(), values.std(dim=0).mean(), rtol=rtol)


PROBED: dict[str, dict[str, Any]] = {
    "three probes": {"num_probes": 3},
    "half of the steps": {"num_probes": 3, "fil_rate": 0.5},
    "input probes": {"num_probes": 2, "estimator": "input-probes"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROBED)
def test_probed_runs_are_unbiased_and_their_errors_calibrated(name: str) -> None:
    check_calibration(PROBED[name], 60 if name == "half of the steps" else 30)


def test_few_probed_runs_are_unbiased_and_their_errors_no_worse_than_told() -> None:
    """What few runs can tell: Student's t, as likely as four standard deviations are."""
    critical = float(stats.t.isf(stats.norm.sf(4), 7))
    check_calibration(PROBED["three probes"], 8, critical, coverage=(0.85, 1.0), rtol=0.4)


def test_sampling_error_is_the_spread_over_batches() -> None:
    """Frozen weights, many draws of the batches: the spread of η̄² about its mean is what one run reports.

    Examples are drawn independently: 96 of them in 15 runs tell as much of the spread as 24 in 60.
    """
    dataset = data(96)

    def run(seed: int) -> FILPrivacyEngine:
        torch.manual_seed(0)
        module = nn.Linear(5, 3).double().to(DEVICE)
        engine = FILPrivacyEngine()
        optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.0)
        plain = loader(dataset, 24, generator=torch.Generator().manual_seed(seed))
        model, optimizer, private = engine.make_private(
            module, optimizer, plain, **grouped(noise_multiplier=SIGMA, max_grad_norm=C, estimator="exact")
        )
        epochs(model, optimizer, private, 2)
        return engine

    engines = [run(seed) for seed in range(15)]
    traces = torch.stack([e.totals.get_trace().value for e in engines])
    squares = torch.stack([e._training.run.ledger.sums["trace_square"].double() for e in engines])
    reported = ((1 - 1 / 4) * squares.mean(dim=0)).sqrt()
    assert torch.allclose(reported.mean(), traces.std(dim=0).mean(), rtol=0.1)
    leakage = engines[0].totals
    error = leakage.get_sampling_error()
    never = leakage.ledger.sums["participations"] == 0
    assert torch.equal(torch.isinf(error), never)
    public = train(dataset, steps=4, poisson_sampling=False).engine.totals
    assert torch.equal(public.get_sampling_error(), torch.zeros(96, dtype=torch.float64, device=public.ledger.device))


def test_batches_are_known_however_it_is_said() -> None:
    """By name or by object: the same FIL, and no chance in which batches drew an example."""
    for options in ({"amplification": "none"}, {"amplification": NoAmplification()}):
        leakage = train(data(24), steps=4, estimator="exact", **options).engine.totals
        assert leakage.conditions.sample_rate is None
        assert float(leakage.get_sampling_error().abs().max()) == 0
    secret = train(data(24), steps=4, estimator="exact", amplification=PoissonAmplification()).engine.totals
    assert secret.conditions.sample_rate == pytest.approx(1 / 3)


def test_a_registered_exact_estimator_is_called_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimators, "_REGISTRY", dict(estimators._REGISTRY))
    register_estimator("columns", estimators.exact, quantities=("trace", "diagonal"), exact=True)
    engine = train(data(24), steps=2, estimator="columns", track=("diagonal",)).engine
    assert engine.get_fil().kind == engine.get_attribute_fil().kind == "exact"
    assert set(engine.leakage()["fil_kind"]) == {"exact"}


def test_a_registered_estimator_of_the_trace_cannot_track_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimators, "_REGISTRY", dict(estimators._REGISTRY))
    register_estimator("traces", estimators.exact)
    with pytest.raises(
        ValueError,
        match=r"track=\('diagonal',\) needs the diagonal, and estimator='traces' gives the trace only, not the "
        "diagonal; use estimator='exact' or 'weight-probes'",
    ):
        train(data(24), steps=2, estimator="traces", track=("diagonal",))


def test_accounting_leaves_the_training_alone() -> None:
    """Global random numbers and weights evolve as if nothing were accounted (exact, probed, skipped)."""
    finals = []
    for options in ({"estimator": "exact"}, {"num_probes": 1}, {"fil_rate": 0.3}):
        run = train(data(40), steps=6, **options)
        finals.append((torch.get_rng_state(), [p.clone() for p in run.engine._training.replica.live.parameters()]))
    for state, weights in finals[1:]:
        assert torch.equal(state, finals[0][0])
        assert all(torch.equal(a, b) for a, b in zip(weights, finals[0][1], strict=True))
