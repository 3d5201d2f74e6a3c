"""The plan for probes and measured steps: targets are met at a price, error bars stay true, sums
unbiased.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.cases import DEVICE
from tests.engine import ways
from tests.engine.loops import data, loader, step, train
from torchfil import Accounting, FILPrivacyEngine
from torchfil.accounting.ids import ExampleIds
from torchfil.accounting.leakage import Leakage
from torchfil.accounting.ledger import Contribution, Ledger
from torchfil.accounting.pace import Pace, choose
from torchfil.accounting.quantities import Conditions, columns_of
from torchfil.fisher.batch import Measurement
from torchfil.fisher.results import Estimate

ADDED = (1.05**2 - 1) ** 0.5  # of the error of exact measurements, by default


@pytest.mark.parametrize("trend", [1.0, 0.5])
@pytest.mark.parametrize("missed", [0.02, 0.3])
def test_the_choice_spends_what_is_allowed_at_the_lowest_cost(trend: float, missed: float) -> None:
    """After the remaining passes at the chosen k and π, the relative variance is the target's
    square; as much with other k costs more.
    """
    for target, m, ahead, error in ((0.05, 40, 60, 0.03), (0.1, 1, 30, 0.3), (0.07, 10, 8, 0.08)):
        probes, rate = choose(target, error**2, m, ahead, 0.16, missed, trend, 1.3)
        assert rate < 1
        added = 0.16 / (probes * rate) + missed * (1 - rate) / rate
        final = error**2 * m**2 + 1.3 * trend**2 * ahead * added
        assert final / (m + trend * ahead) ** 2 == pytest.approx(target**2)
        rates = {k: (0.16 / k + missed) / (added + missed) for k in (2, 3, 4, 6, 9, 13)}
        costs = [each * (k + 0.5) for k, each in rates.items() if each <= 1]
        assert rate * (probes + 0.5) == pytest.approx(min(costs))


def test_the_choice_stays_within_what_can_be_measured() -> None:
    plain = {"spread": 0.16, "missed": 0.3}
    assert choose(1e-3, 0.0, 1.0, 9.0, **plain) == (13, 1.0)
    assert choose(0.9, 0.0, 1.0, 99.0, **plain) == (2, 1 / 32)
    assert choose(0.1, 0.9, 100.0, 1.0, **plain) == choose(0.1, 0.5, 100.0, 1.0, **plain)  # missed


def test_what_is_planned() -> None:
    paces = [Accounting(epochs=3).pace(is_stream=True), Accounting(estimator="exact").pace()]
    assert paces == [Pace(3, 1.0)] * 2
    assert Accounting(num_probes=4, fil_rate=0.5).pace() == Pace(4, 0.5)
    planned = Accounting(rel_error=0.1, epochs=3).pace()
    assert planned == Pace(2, 1.0, is_planned=True, target=0.1, epochs=3)


def test_a_probes_spread_is_followed_whatever_their_number_and_rate() -> None:
    for probes, rate in ((1, 1.0), (4, 0.5)):
        pace = Pace(probes, rate, is_planned=True, spread=0.2)
        trace = torch.tensor([1.0, 3.0])
        pace.noted = trace, 0.6 * trace.square() / probes
        pace.update(Ledger(2, 1), 1.0)
        assert pace.spread == pytest.approx(0.7 * 0.2 + 0.3 * 0.6)
        assert pace.level == pytest.approx(2.0)


class Simulated:
    """A planned run whose X are known, with log-normal probes, and the same draws measured exactly.

    Runs differ by a path of their own, beside the draws.
    """

    def __init__(self, target: float | None, seed: int) -> None:
        n, share, passes, spread = 300, 0.2, 40, 0.16
        source = torch.Generator().manual_seed(seed)
        self.pace, self.skipped = Pace.planned(target, None if target else passes), 0

        def factor(width: float, *shape: int) -> Tensor:
            normal = torch.randn(*shape, generator=source, dtype=torch.float64)
            return (width * normal - width**2 / 2).exp()

        def columns(estimate: Estimate) -> Any:
            return columns_of(Measurement({"trace": estimate}, x, None, None))

        planned, exact = (Ledger(n, 1, draw_rate=share) for _ in range(2))
        scale = path = (0.7 * torch.linspace(-2.5, 2.5, n).double()).exp()
        for taken in range(1, int(passes / share) + 1):
            path = path * factor(0.3 * (share / passes) ** 0.5, n)
            rows = (torch.rand(n, generator=source) < share).nonzero().flatten()
            x, k, rate = path[rows] * factor(0.3, len(rows)), self.pace.num_probes, self.pace.rate
            assert taken * share > 1 or (k, rate) == (2, 1.0)
            samples = x * factor((1 + torch.tensor(spread)).log().sqrt(), k, len(rows))
            error, square = samples.std(dim=0) / k**0.5, x * factor(0.3, len(rows))
            told = columns(Estimate(samples.mean(dim=0), error, "estimate", k - 1.0))
            is_told = float(torch.rand((), generator=source)) < rate
            contribution = Contribution(rows, square, told if is_told else {}, rate)
            planned.add(contribution)
            self.skipped += 0 if is_told else len(rows)
            exact.add(Contribution(rows, square, columns(Estimate.exact(x))))
            self.pace.note([contribution])
            if taken % 2 == 0:
                self.pace.update(planned, taken * share)
        self.truth, self.exactly = scale * passes, exact.sums["trace"].clone()
        self.leakage = Leakage(planned, ExampleIds(n), Conditions(skipping=True))


@pytest.mark.parametrize("target", [None, 0.1, pytest.param(0.05, marks=pytest.mark.slow)])
def test_target_bias_and_coverage(target: float | None) -> None:
    """Of what is measured, beside the same draws measured exactly."""
    runs = [Simulated(target, seed) for seed in range(6)]
    traces = [run.leakage.get_trace() for run in runs]
    exactly = torch.stack([run.exactly for run in runs])
    off = torch.stack([trace.value for trace in traces]) - exactly

    def squares_of_top(errors: Tensor) -> Tensor:
        top = runs[0].truth.topk(15).indices
        return (errors / runs[0].truth)[:, top].square().mean(dim=1)

    found, allowed = squares_of_top(off), ADDED**2 * squares_of_top(exactly - runs[0].truth).mean()
    budget, chance = float(allowed) ** 0.5 if target is None else target, found.std() / 6**0.5
    assert float(found.mean() - 2 * chance) < budget**2 < 2 * float(found.mean() + 2 * chance)
    by_run = off.mean(dim=1)  # the examples of a batch share their luck
    assert abs(float(by_run.mean())) < 4 * float(by_run.std()) / len(runs) ** 0.5

    ends = zip(*(trace.interval(0.95, "probes") for trace in traces), strict=True)
    low, high = map(torch.stack, ends)
    inside = ((low <= exactly) & (exactly <= high)).double().mean(dim=1)
    assert abs(float(inside.mean()) - 0.95) < 0.02 + 2 * float(inside.std()) / 6**0.5

    # what the plan and the table say
    added = torch.tensor([run.pace.added for run in runs])
    assert float(added.mean()) == pytest.approx(float(found.mean()) ** 0.5, rel=0.3)
    numbers = (
        f"± {100 * runs[0].pace.error:.2g} %, of which measuring makes up {100 * added[0]:.2g} %"
    )
    assert str(runs[0].pace).endswith(f"; the most exposed 5 % are known to {numbers}")
    _, columns = runs[0].leakage.columns()
    assert columns["missed"].sum() == runs[0].skipped > 0
    assert set(columns["fil_kind"]) == {"estimate"}
    assert "paused" not in columns


def start(seed: int = 0, n: int = 93, batch: int = 8, **options: Any) -> Any:
    torch.manual_seed(0)
    # many steps are taken, and the pace does not depend on the model
    module = nn.Linear(5, 3).double().to(DEVICE)
    noise = torch.Generator(device=DEVICE).manual_seed(5)
    given = {"poisson_sampling": True, "noise_generator": noise, "lr": 0.1, **options}
    return ways.start(module, loader(data(n), batch), "auto", seed=seed, **given)


def go_on(made: Any, epochs: int, *, whole: bool = True) -> FILPrivacyEngine:
    engine, model, optimizer, private = made
    for _ in range(epochs):
        for batch in private:
            if whole:
                engine.train_step(*batch)
            else:
                step(model, optimizer, batch)
    return engine


def test_in_the_engine_the_sums_stay_unbiased() -> None:
    """The training does not depend on what is measured, so all runs share one truth.

    Nor does it matter who steps.
    """
    truth = go_on(start(estimator="exact"), 6).totals.get_trace().value
    engines = [go_on(start(seed, rel_error=0.3, epochs=6), 6) for seed in range(4)]
    assert any(engine._training.run.pace.rate < 0.7 for engine in engines)
    off = torch.stack([engine.totals.get_trace().value for engine in engines]) - truth
    by_run = off.mean(dim=1)
    assert abs(float(by_run.mean())) < 4 * float(by_run.std()) / len(engines) ** 0.5
    top = truth.topk(5).indices
    assert 0.1 < float((off / truth)[:, top].square().mean().sqrt()) < 0.4
    loop = go_on(start(0, rel_error=0.3, epochs=6), 6, whole=False)
    assert loop.plan == engines[0].plan
    traces = [engine.totals.get_trace().value for engine in (loop, engines[0])]
    assert torch.allclose(*traces, rtol=1e-5)


def test_a_run_that_is_stopped_between_two_looks_resumes_bit_for_bit(tmp_path: Path) -> None:
    made, again = (start(seed, 188, 4, rel_error=0.9) for seed in (5, 9))
    path, run = tmp_path / "run.pt", go_on(made, 2)._training.run
    assert run.history.steps % run._steps_between_looks != 0
    assert run.pace.rate < 1
    run.pace.noted = torch.ones(2).double(), torch.zeros(2).double()
    made[0].save_checkpoint(path=path, module=made[1], optimizer=made[2])
    again[0].load_checkpoint(path=path, module=again[1], optimizer=again[2])
    pace = again[0]._training.run.pace
    assert all(map(torch.equal, pace.noted, run.pace.noted))
    run.pace.noted = pace.noted = None
    traces = [go_on(each, 1).totals.get_trace().value for each in (made, again)]
    assert torch.equal(*traces)
    assert pace == run.pace


def test_a_logical_batch_is_measured_as_a_whole() -> None:
    """All of its physical batches, or none: everybody is in each."""
    given = {"physical": 5, "batch_size": 40, "poisson_sampling": False, "fil_rate": 0.5}
    measured = train(data(40), steps=8, **given).engine.totals.ledger.sums["measured"]
    assert bool((measured == measured[0]).all())
    assert 0 < int(measured[0]) < 8
