"""How far one run can be off: followed from participation to participation, and never told too
small.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from benchmarks.simulated_runs import Setting, shares
from torchfil.accounting.ids import ExampleIds
from torchfil.accounting.leakage import Leakage
from torchfil.accounting.ledger import Contribution, Ledger
from torchfil.accounting.quantities import Conditions
from torchfil.accounting.sums import path_sums, relative_change, run_variance


def booked(
    values: Tensor,
    *,
    drawn: Tensor | None = None,
    noise: Tensor | None = None,
    rate: float = 1.0,
    seed: int = 0,
) -> Ledger:
    """A ledger after steps with these traces, [steps, n], in which ``drawn`` took part.

    Measured with that rate.
    """
    source = torch.Generator().manual_seed(seed)
    ledger = Ledger(values.shape[1], 2)
    drawn = torch.ones_like(values, dtype=torch.bool) if drawn is None else drawn
    noise = torch.zeros_like(values) if noise is None else noise
    for step in range(len(values)):
        rows = drawn[step].nonzero().flatten()
        x, variance = values[step, rows], noise[step, rows]
        zero = torch.zeros_like(x)
        if float(torch.rand((), generator=source)) < rate:
            column = {"value": x, "variance": variance, "noise": variance, "limit": zero}
            ledger.add(Contribution(rows, zero, columns={"trace": column}, rate=rate))
        else:
            ledger.add(Contribution(rows, zero))
    return ledger


def variances(ledger: Ledger, sample_rate: float | None = 0.1) -> tuple[Tensor, Tensor]:
    relative, known = relative_change("trace", ledger.sums, ledger.sums["participations"])
    typical = relative.sum(dim=0) / known.sum(dim=0).clamp(min=1)
    return run_variance("trace", ledger.sums, ledger.sums["participations"], sample_rate, typical)


@pytest.mark.parametrize("rate", [1.0, 0.6])
def test_sums_are_those_of_the_measured_participations(rate: float) -> None:
    source = torch.Generator().manual_seed(1)
    values = torch.rand(90, 5, generator=source, dtype=torch.float64)
    drawn = torch.rand(90, 5, generator=source) < 0.6
    ledger = booked(values, drawn=drawn, rate=rate)
    # a paused step is passed over
    ledger.add(Contribution(torch.arange(5), torch.ones(5), measured=False))
    chance = torch.Generator().manual_seed(0)
    measured = torch.tensor([float(torch.rand((), generator=chance)) < rate for _ in range(90)])
    for example in range(5):
        seen = values[drawn[:, example] & measured, example]
        square, last, changed, count = (
            ledger.sums[name][example].item() for name in path_sums("trace")
        )
        assert count == len(seen)
        places = torch.tensor(
            [place for place in (0, 4, 8, 12, 16, 24, 32, 48, 64) if place < len(seen)]
        )
        changes = seen[places].diff().square() * places.diff()
        assert last == pytest.approx(seen[places[-1]].item(), rel=1e-6)  # float32
        assert changed == pytest.approx(changes.sum().item())
        assert square == pytest.approx(seen.square().sum().item() / rate)


def test_noise_of_probes_is_no_change() -> None:
    """Steady traces, measured with errors whose variance is known: the changes vanish in the
    mean.
    """
    source = torch.Generator().manual_seed(2)
    error = torch.randn(20, 4000, generator=source, dtype=torch.float64) * 0.3
    changes = booked(2 + error, noise=torch.full_like(error, 0.09)).sums["trace_changes"]
    assert abs(float(changes.mean())) < 4 * float(changes.std()) / math.sqrt(4000)


class TestVariance:
    def test_by_hand(self) -> None:
        values = torch.tensor([[1.0, 3.0]] * 4 + [[2.0, 3.0]] * 4 + [[4.0, 3.0]] * 2).double()
        batches, path = variances(booked(values), 0.25)
        torch.testing.assert_close(batches, 0.75 * values.square().sum(dim=0))
        # from 1 to 2, from 2 to 4; the other never changes
        typical = (4 * 1 + 4 * 4) / 8 / 2.0**2 / 2
        torch.testing.assert_close(path, typical / 2 * values.sum(dim=0).square())
        assert torch.equal(variances(booked(values), None)[0], torch.zeros(2).double())

    def test_too_few_participations_tell_nothing(self) -> None:
        values = torch.ones(6, 4, dtype=torch.float64)
        drawn = torch.ones(6, 4, dtype=torch.bool)
        drawn[2:, 1] = False  # drawn twice
        drawn[:, 2] = False  # never
        values[:, 3] = 0  # leaks nothing, in every step
        ledger = booked(values, drawn=drawn)
        batches, path = variances(ledger)
        assert path.tolist() == [0.0, math.inf, 0.0, 0.0]
        assert batches.isinf().tolist() == [False, False, True, False]
        leakage = Leakage(ledger, ExampleIds(4), Conditions(sample_rate=0.1))
        low, high = leakage.get_mse_bound().interval(0.95)
        assert low[0] > 0
        assert low[1:].tolist() == [0.0, 0.0, math.inf]
        assert high.isinf().tolist() == [False, True, True, True]
        # the attacker knows that no batch held it
        known = Leakage(ledger, ExampleIds(4), Conditions())
        assert known.get_mse_bound([2]).interval(0.95)[0].item() == math.inf

    def test_averages_over_runs_hold_it_already_and_infinite_sums_are_certain(self) -> None:
        values = torch.ones(6, 2, dtype=torch.float64)
        values[3, 0] = math.inf
        runs = [
            Leakage(booked(values, seed=k), ExampleIds(2), Conditions(sample_rate=0.1))
            for k in range(3)
        ]
        assert runs[0].get_trace().run_error is not None
        assert Leakage.average(runs).get_trace().run_error is None
        low, high = runs[0].get_mse_bound().interval(0.95)
        assert low[0] == high[0] == 0
        assert low[1] > 0
        assert not bool(runs[0].get_sampling_error().isnan().any())


@pytest.mark.parametrize(
    "setting",
    [
        Setting("random", "momentum", 0.05, 0.3, 60, 0.97, 40),
        pytest.param(Setting("random", "Adam", 0.03, 0.3, 80, 0.9, 60), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_lower_ends_keep_their_word_whatever_the_optimizer(setting: Setting) -> None:
    found = shares(setting, 25)
    assert found["claimed"] > 90
    assert found["too high"] <= 4
    assert found["too high, most exposed 5 %"] <= 4
