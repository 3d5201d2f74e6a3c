"""``rel_error`` and ``extra_probes``: targets are met at a price, error bars stay true, sums
unbiased.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.cases import DEVICE
from tests.engine import ways
from tests.engine.loops import SIGMA, C, data, loader, network, step, train
from torchfil import FILPrivacyEngine
from torchfil.accounting.ids import ExampleIds
from torchfil.accounting.leakage import Leakage
from torchfil.accounting.ledger import Contribution, Ledger
from torchfil.accounting.pace import Pace, choose
from torchfil.accounting.quantities import columns_of
from torchfil.engine.executor import StepValues
from torchfil.fisher.batch import Measurement
from torchfil.fisher.results import Estimate


def test_the_choice_spends_what_is_allowed_and_probes_come_where_needed() -> None:
    """After the remaining passes at the chosen k and π, the relative variance is the target's
    square.
    """
    spread = 0.16
    for target, m, remaining, error in (
        (0.05, 40.0, 60.0, 0.06),
        (0.1, 1.0, 30.0, 0.3),
        (0.1, 100.0, 30.0, 0.1),
    ):
        for trend in (1.0, 0.5):
            probes, rate = choose(target, error**2, m, remaining, spread, trend)
            assert rate < 1
            added = trend**2 * remaining * ((1 + spread / probes) / rate - 1)
            assert (error**2 * m**2 + added) / (m + trend * remaining) ** 2 == pytest.approx(
                target**2
            )
    assert choose(0.05, 0.0, 1.0, 999.0, 0.16) == (
        2,
        pytest.approx((1 + 0.08) / (1 + 0.0025 * 1000**2 / 999)),
    )
    probes, rate = choose(0.05, 0.08, 1.0, 19.0, 0.16)
    assert probes == 4
    assert 0.95 < rate < 1


class Simulated:
    """A run of equal examples whose Fisher information per step is known, with log-normal
    probes.
    """

    def __init__(self, target: float, epochs: float | None, seed: int, *, unevenness: float = 0.0):
        passes, spread = 40, 0.16
        self.n, self.share, generator = 300, 0.2, torch.Generator().manual_seed(seed)
        ledger = Ledger(self.n, 1)
        self.pace = Pace.steered(target, epochs)
        self.truth = torch.zeros(self.n, dtype=torch.float64)
        self.probes_used = 0
        scale = torch.rand(self.n, generator=generator, dtype=torch.float64) + 0.5
        for taken in range(1, int(passes / self.share) + 1):
            rows = (torch.rand(self.n, generator=generator) < self.share).nonzero().flatten()
            x = scale[rows] * (0.3 + torch.exp(torch.tensor(-3.0 * taken * self.share / passes)))
            x = x * torch.exp(
                unevenness * torch.randn(len(rows), generator=generator, dtype=torch.float64)
            )
            self.truth[rows] += x
            contribution = Contribution(rows, x)
            if float(torch.rand((), generator=generator)) < self.pace.rate and len(rows):
                k, rate = self.pace.num_probes, self.pace.rate
                self.probes_used += k
                width = torch.tensor(1 + spread).log().sqrt()
                noise = torch.exp(
                    width * torch.randn(k, len(rows), generator=generator) - width**2 / 2
                )
                samples = x * noise
                error = samples.std(dim=0) / k**0.5
                estimate = Estimate(samples.mean(dim=0), error, "estimate", k - 1.0)
                columns = columns_of(Measurement({"trace": estimate}, x, None, None))
                contribution = Contribution(rows, x, columns=columns, rate=rate)
            ledger.add(contribution)
            self.pace.note([contribution])
            if taken % 2 == 0:
                self.pace.update(ledger, taken * self.share)
        self.trace = Leakage(ledger, ExampleIds(self.n)).get_trace()

    def relative_error(self) -> float:
        return float((self.trace.standard_error / self.trace.value).median())


simulated = cache(Simulated)


def test_a_probes_spread_is_followed_whatever_their_number_and_rate() -> None:
    for probes, rate in ((1, 1.0), (4, 0.5)):
        pace = Pace(probes, rate, target=0.1, spread=0.2)
        trace = torch.tensor([1.0, 3.0])
        pace.noted = trace, 0.6 * trace.square() / probes
        pace.update(Ledger(2, 1), 1.0)
        assert pace.spread == pytest.approx(0.7 * 0.2 + 0.3 * 0.6)
        assert pace.level == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("target", "epochs"),
    [
        (0.1, 40),
        (0.1, None),
        *(pytest.param(target, 40, marks=pytest.mark.slow) for target in (0.05, 0.2)),
    ],
)
def test_target_bias_and_coverage(target: float, epochs: float | None) -> None:
    runs = [simulated(target, epochs, seed) for seed in range(6)]
    reached = torch.tensor([run.relative_error() for run in runs]).median()
    assert 0.8 * target < float(reached) <= target
    ratio = torch.stack([run.trace.value / run.truth for run in runs]) - 1
    by_run = ratio.mean(dim=1)  # the examples of a batch share their luck
    assert abs(float(by_run.mean())) < 4 * float(by_run.std()) / len(runs) ** 0.5 + 1e-12
    low, high = zip(*(run.trace.interval(0.95, "probes") for run in runs), strict=True)
    inside = [
        (a <= run.truth) & (run.truth <= b) for a, b, run in zip(low, high, runs, strict=True)
    ]
    assert 0.90 <= float(torch.stack(inside).double().mean()) <= 0.99


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
    truth = go_on(start(estimator="exact"), 6).get_fil().value.square()
    engines = [go_on(start(seed, rel_error=0.2, epochs=6), 6) for seed in range(4)]
    assert any(engine._training.run.pace.rate < 0.7 for engine in engines)
    drawn = truth > 0
    ratio = torch.stack(
        [engine.get_fil().value.square()[drawn] / truth[drawn] for engine in engines]
    )
    by_run = ratio.mean(dim=1)
    assert abs(float(by_run.mean()) - 1) < 4 * float(by_run.std()) / len(engines) ** 0.5
    table = engines[0].leakage()
    assert 0.05 < float(table["rel_error"][table["fil"] > 0].median()) < 0.4
    loop = go_on(start(0, rel_error=0.2, epochs=6), 6, whole=False)
    paces = [engine._training.run.pace for engine in (loop, engines[0])]
    assert paces[0].num_probes == paces[1].num_probes
    assert paces[0].rate == pytest.approx(paces[1].rate, rel=1e-6)
    assert torch.allclose(loop.get_fil().value, engines[0].get_fil().value, rtol=1e-5)


def test_a_run_that_is_stopped_between_two_looks_resumes_bit_for_bit(tmp_path: Path) -> None:
    made, again = (start(seed, 188, 4, rel_error=0.45) for seed in (5, 9))
    path, run = tmp_path / "run.pt", go_on(made, 1)._training.run
    assert run.history.steps % run._steps_between_looks != 0
    run.pace.noted = torch.ones(2).double(), torch.zeros(2).double()
    made[0].save_checkpoint(path=path, module=made[1], optimizer=made[2])
    again[0].load_checkpoint(path=path, module=again[1], optimizer=again[2])
    pace = again[0]._training.run.pace
    assert all(map(torch.equal, pace.noted, run.pace.noted))
    run.pace.noted = pace.noted = None
    assert torch.equal(go_on(again, 1).get_fil().value, go_on(made, 1).get_fil().value)
    assert (pace.rate, pace.spread) == (run.pace.rate, run.pace.spread)


# --------------------------------------------------------------- more probes for the few that count


def frozen_run(seed: int, steps: int = 80, **options: Any) -> FILPrivacyEngine:
    """The same batches at the same weights (lr = 0), other probes."""
    torch.manual_seed(0)
    given = {
        "noise_multiplier": SIGMA,
        "max_grad_norm": C,
        "poisson_sampling": True,
        "seed": seed,
        **options,
    }
    engine, *_, private = ways.start(network(), loader(data(24), 12), "auto", **given)
    while True:
        for batch in private:
            engine.train_step(*batch)
            if engine.ledger.steps == steps:
                return engine


def test_few_are_measured_anew_after_the_first_passes() -> None:
    """What is certain is known of several probes only: it tells who was measured anew."""
    early, late = (frozen_run(0, steps, num_probes=1, extra_probes=4) for steps in (32, 52))
    drawn = early.ledger.sums["participations"]
    assert bool((early.ledger.sums["certain"][drawn > 0] > 0).all())
    assert bool((late.ledger.sums["variance"] > 0).all())
    assert bool((late.ledger.sums["certain"] > early.ledger.sums["certain"]).any())
    exact = frozen_run(0, 52, estimator="exact").totals.get_trace()
    assert torch.allclose(late.totals.get_trace().value.sum(), exact.value.sum(), rtol=0.2)
    added = late.ledger.sums["participations"].sum() - drawn.sum()
    # more examples than the two of a batch that are measured anew
    assert int(added) > 2 * (52 - 32)
    low, high = late.totals.get_trace().interval(0.999, "probes")
    assert bool(((low <= exact.value) & (exact.value <= high)).all())


def test_what_is_measured_anew_replaces_what_was() -> None:
    values = StepValues(None, torch.ones(3), torch.ones(3), {}, {"trace": {"value": torch.ones(3)}})
    anew = {"trace": {"value": torch.tensor([30.0, 10.0])}}
    found = values.measured_anew(torch.tensor([2, 0]), anew).columns or {}
    assert found["trace"]["value"].tolist() == [10, 1, 30]


@pytest.mark.slow
def test_sums_with_extra_probes_stay_unbiased() -> None:
    truth = frozen_run(0, 44, estimator="exact").totals.get_trace().value
    seeds = 12
    runs = [frozen_run(seed, 44, num_probes=1, extra_probes=6) for seed in range(seeds)]
    found = torch.stack([engine.totals.get_trace().value for engine in runs]) / truth
    for ratio in (found.T, found.mean(dim=1)[None]):  # of each example, and of all together
        error = ratio.std(dim=1) / seeds**0.5
        assert bool(((ratio.mean(dim=1) - 1).abs() < 4 * error).all())


def test_every_measurement_of_physical_batches_adds_up() -> None:
    sums = train(
        data(40), steps=44, physical=5, batch_size=20, num_probes=1, extra_probes=3
    ).engine.totals.ledger.sums
    assert torch.equal(sums["trace_measured"], sums["participations"].double())
    assert bool(sums["trace"].isfinite().all())


def test_a_logical_batch_is_measured_as_a_whole() -> None:
    """All of its physical batches, or none: everybody is in each."""
    given = {"physical": 5, "batch_size": 40, "poisson_sampling": False, "fil_rate": 0.5}
    measured = train(data(40), steps=8, **given).engine.totals.ledger.sums["trace_measured"]
    assert bool((measured == measured[0]).all())
    assert 0 < int(measured[0]) < 8
