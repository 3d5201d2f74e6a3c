"""Clip weights as they are given, kept and told."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.cases import relative_error
from tests.engine.brute_force import Run, make, train
from tests.engine.loops import data, loader, network
from tests.engine.weighted_runs import DELTA, SIGMA, WEIGHTS, N, Truth, assert_equal, rate_of
from torchfil import Accounting, FILPrivacyEngine
from torchfil.report import load


class TestGiven:
    """What may be said, and how it is read."""

    def made(self, weights: Any, **options: Any) -> FILPrivacyEngine:
        engine, module = FILPrivacyEngine(), network()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        if weights is not None:
            options["clip_weights"] = weights
        engine.make_private(module, optimizer, loader(data(N), 6), **options)
        return engine

    def test_by_order_and_by_id(self) -> None:
        names = [f"person {i}" for i in range(N)]
        expected = torch.ones(N, dtype=torch.float64)
        expected[3] = 0.25
        for given, options in (
            (expected, {}),
            (expected.numpy(), {}),
            (expected.tolist(), {}),
            (expected.float(), {}),
            ({3: 0.25}, {}),
            ({"person 3": torch.tensor(0.25)}, {"id_of": names}),
        ):
            weights = self.made(given, **options).clip_weights
            assert weights is not None
            assert weights.dtype == torch.float64
            assert torch.equal(weights.cpu(), expected)
        assert self.made(None).clip_weights is None

    def test_what_was_given_may_change_afterwards(self) -> None:
        given = WEIGHTS.clone()
        engine = self.made(given)
        given.zero_()
        weights = engine.clip_weights
        assert weights is not None
        weights.zero_()
        assert torch.equal(engine.clip_weights.cpu(), WEIGHTS)  # type: ignore[union-attr]

    @pytest.mark.parametrize(
        ("given", "error", "message"),
        [
            ({4: 1.5}, ValueError, r"of example 4 is 1.5, not in \(0, 1\]: .*ε would be too small; give at most 1"),
            ({4: 0.0}, ValueError, "of example 4 is 0, not in .*leave it out, or give a small weight"),
            ({4: -1.0, 5: 2.0}, ValueError, r"of example 4 is -1 \(and 1 more\), .*above 0 and at most 1"),
            ({4: math.nan}, ValueError, "of example 4 is nan, .*give a number above 0"),
            ({99: 0.5}, KeyError, "unknown example ids .99.; ids are 0 to 19"),
            ([0.5] * 3, ValueError, r"clip_weights has shape \[3\] for 20 examples; give one weight for each"),
            (0.5, ValueError, r"clip_weights has shape \[\] for 20 examples"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, given: Any, error: Any, message: str) -> None:
        """And nothing has changed: the same parts can be made private afterwards."""
        engine, module = FILPrivacyEngine(), network()
        parts = (module, torch.optim.SGD(module.parameters(), lr=0.1), loader(data(N), 6))
        with pytest.raises(error, match=message):
            engine.make_private(*parts, clip_weights=given)
        engine.make_private(*parts, clip_weights=WEIGHTS)

    def test_the_id_is_named(self) -> None:
        with pytest.raises(ValueError, match="of example 'person 3' is 2, not in"):
            self.made({"person 3": 2.0}, id_of=[f"person {i}" for i in range(N)])

    def test_in_the_accounting(self) -> None:
        weights = self.made(None, accounting=Accounting(clip_weights=WEIGHTS.numpy())).clip_weights
        assert weights is not None
        assert torch.equal(weights.cpu(), WEIGHTS)
        with pytest.raises(ValueError, match="clip_weights is given twice"):
            self.made(WEIGHTS, accounting=Accounting(clip_weights=WEIGHTS.numpy()))

    def test_with_epsilon(self) -> None:
        engine, module = FILPrivacyEngine(), network()
        engine.make_private_with_epsilon(
            module, torch.optim.SGD(module.parameters(), lr=0.1), loader(data(N), 6), target_epsilon=5.0,
            target_delta=1e-3, epochs=2, epsilon_tolerance=1.0, max_grad_norm=1.0, clip_weights={0: 0.5},
        )  # fmt: skip
        assert engine.clip_weights is not None
        assert float(engine.clip_weights[0]) == 0.5


class TestKept:
    """Checkpoints, repetitions and run files."""

    def start(self, weights: Any = WEIGHTS) -> Run:
        return make(
            network(), data(N), batch_size=6, criterion=nn.CrossEntropyLoss(), clip_weights=weights,
            noise_multiplier=SIGMA, amplification="poisson", track=("fim",),
        )  # fmt: skip

    def epochs(self, run: Run, count: int) -> Run:
        for _ in range(count):
            train(run, steps=len(run.passes) + len(run.private))
        return run

    def test_a_resumed_run_is_the_truth(self, tmp_path: Path) -> None:
        whole = self.epochs(self.start(), 2)
        first = self.epochs(self.start(), 1)
        path = tmp_path / "checkpoint.pt"
        first.engine.save_checkpoint(path=path, module=first.model, optimizer=first.optimizer)
        second = self.start({i: float(w) for i, w in enumerate(WEIGHTS)})
        second.engine.load_checkpoint(path=path, module=second.model, optimizer=second.optimizer)
        self.epochs(second, 1)
        assert_equal(second, whole)

        first.passes += second.passes
        truth = Truth(first, WEIGHTS, SIGMA, rate_of(second))
        assert second.engine.ledger is not None
        assert relative_error(second.engine.ledger.sums["fim"], truth.fim) < 1e-6
        assert relative_error(second.engine.ledger.sums["squared_norm"], truth.squared_norm) < 1e-6

    def test_other_weights_are_refused(self) -> None:
        state = self.epochs(self.start(), 1).engine.state_dict()
        changed = WEIGHTS.clone()
        changed[4] = 0.125
        for other in (changed, None):
            run = self.start(other)
            with pytest.raises(ValueError, match=r"made with clip_weights=.*instead of .*for 19 of 20"):
                run.engine.load_state_dict(state)
            assert run.engine.ledger is None

    def test_weights_of_one_are_none(self) -> None:
        first = self.epochs(self.start(None), 1).engine
        resumed = self.start(torch.ones(N)).engine
        resumed.load_state_dict(first.state_dict())
        assert torch.equal(resumed.get_fil().value, first.get_fil().value)

    def test_only_repetitions_are_averaged(self) -> None:
        engines = [self.epochs(self.start(w), 1).engine for w in (WEIGHTS, WEIGHTS, WEIGHTS / 2, None)]
        FILPrivacyEngine.merge(engines[:2])
        for other in engines[2:]:
            with pytest.raises(ValueError, match=r"clipping \(and clip_weights\).*clip_weights below 1 for \d+ of 20"):
                FILPrivacyEngine.merge([engines[0], other])

    def test_tables_and_run_files(self, tmp_path: Path) -> None:
        engine = self.epochs(self.start(), 1).engine
        names, columns = engine.leakage_columns([5, 2])
        assert names == [5, 2]
        assert columns["clip_weight"] == WEIGHTS[[5, 2]].tolist()
        saved = load(engine.save_run(tmp_path / "run.parquet", delta=DELTA, pictures=0))
        assert saved.columns["clip_weight"].tolist() == WEIGHTS.tolist() == saved.clip_weights.tolist()

        plain = self.epochs(self.start(None), 1).engine
        assert "clip_weight" not in plain.leakage_columns()[1]
        saved = load(plain.save_run(tmp_path / "plain.parquet", delta=DELTA, pictures=0))
        assert "clip_weight" not in saved.columns
        assert saved.clip_weights.tolist() == [1.0] * N
