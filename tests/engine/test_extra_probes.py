"""More probes for the few that count: unbiased, more precise for them, and told as precise as they are."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.loops import SIGMA, C, data, loader, network, train
from tests.engine.ways import start
from torchfil import FILPrivacyEngine
from torchfil.engine.executor import StepValues


def frozen_run(seed: int, steps: int = 80, **options: Any) -> FILPrivacyEngine:
    """The same batches at the same weights (lr = 0), other probes."""
    torch.manual_seed(0)
    given = {"noise_multiplier": SIGMA, "max_grad_norm": C, "poisson_sampling": True, "seed": seed, **options}
    engine, *_, private = start(network(), loader(data(24), 12), "auto", **given)
    while True:
        for batch in private:
            engine.train_step(*batch)
            if engine.ledger.steps == steps:
                return engine


def traces(count: int, **options: Any) -> tuple[Tensor, Tensor]:
    """tr Î and its standard error over seeds, [seeds, n] each."""
    found = [frozen_run(seed, **options).totals.get_trace() for seed in range(count)]
    return torch.stack([each.value for each in found]), torch.stack([each.standard_error for each in found])


@pytest.mark.long
def test_sums_stay_unbiased_and_the_exposed_are_known_better() -> None:
    truth = frozen_run(0, estimator="exact").totals.get_trace().value
    plain, _ = traces(60, num_probes=1)
    extra, errors = traces(60, num_probes=1, extra_probes=6)
    z = (extra.mean(dim=0) - truth) / (extra.std(dim=0) / math.sqrt(60))
    assert (z.abs() < 4).all()
    top = truth.topk(2).indices
    assert float((extra.std(dim=0) / plain.std(dim=0))[top].mean()) < 0.7
    reported = errors.square().mean(dim=0).sqrt()
    assert (reported[top] > 0.8 * extra.std(dim=0)[top]).all()


def test_few_are_measured_anew_after_the_first_passes() -> None:
    """What is certain is known of several probes only: it tells who was measured anew."""
    early, late = (frozen_run(0, steps, num_probes=1, extra_probes=4) for steps in (32, 52))
    drawn = early.ledger.sums["participations"]
    assert bool((early.ledger.sums["certain"][drawn > 0] > 0).all())
    assert bool((late.ledger.sums["variance"] > 0).all())
    exact = frozen_run(0, 52, estimator="exact").totals.get_trace()
    assert torch.allclose(late.totals.get_trace().value.sum(), exact.value.sum(), rtol=0.2)
    added = late.ledger.sums["participations"].sum() - drawn.sum()
    assert int(added) > 2 * (52 - 32)  # more examples than the two of a batch that are measured anew
    low, high = late.totals.get_trace().interval(0.999, "probes")
    assert bool(((low <= exact.value) & (exact.value <= high)).all())


def test_every_measurement_of_physical_batches_adds_up() -> None:
    sums = train(data(40), steps=44, physical=5, batch_size=20, num_probes=1, extra_probes=3).engine.totals.ledger.sums
    assert torch.equal(sums["trace_measured"], sums["participations"].double())
    assert bool(sums["trace"].isfinite().all())


def test_a_later_measurement_takes_the_place_of_the_first() -> None:
    norm = torch.ones(4)
    values = StepValues(None, norm, norm, {}, {"trace": torch.arange(4.0), "diagonal": torch.ones(4, 2)})
    anew = {"trace": torch.tensor([10.0, 20.0]), "diagonal": torch.zeros(2, 2), "certain": torch.tensor([1.0, 2.0])}
    found = values.measured_anew(torch.tensor([3, 1]), anew).additions
    assert found["trace"].tolist() == [0.0, 20.0, 2.0, 10.0]
    assert found["certain"].tolist() == [0.0, 2.0, 0.0, 1.0]
    assert found["diagonal"].sum(dim=1).tolist() == [2.0, 0.0, 2.0, 0.0]
