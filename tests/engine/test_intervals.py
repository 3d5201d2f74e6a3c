"""The probes' intervals of a run's sums: they cover, and are no wider than what is known of all
probes allows.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torchfil.accounting.ids import ExampleIds
from torchfil.accounting.leakage import Leakage
from torchfil.accounting.ledger import Contribution, Ledger
from torchfil.accounting.quantities import Conditions, columns_of
from torchfil.fisher.batch import Measurement
from torchfil.fisher.estimators import RunningMoments

D = 5


def run(
    rank: int,
    probes: int,
    *,
    steps: int = 12,
    rate: float = 1.0,
    unevenness: float = 0.5,
    known: float = 0.0,
    n: int = 3000,
    seed: int = 0,
) -> tuple[Leakage, Tensor]:
    """Every example takes part in every step with a Fisher information of that rank.

    And the true traces.

    The traces of the steps are log-normal, the more uneven the fewer steps make up the sum. A part
    of each is known, so many times what is sampled.
    """
    source = torch.Generator().manual_seed(seed)
    ledger, rows, truth = Ledger(n, D), torch.arange(n), torch.zeros(n, dtype=torch.float64)
    for _ in range(steps):
        trace = torch.exp(unevenness * torch.randn(n, generator=source, dtype=torch.float64))
        truth += trace * (1 + known)
        contribution = Contribution(rows, trace)
        if float(torch.rand((), generator=source)) < rate:
            normal = torch.randn(probes, n, rank, generator=source, dtype=torch.float64)
            seen = torch.nn.functional.pad(normal * (trace / rank).sqrt()[:, None], (0, D - rank))
            total = RunningMoments(spread=2.0)
            for row in seen:
                total.add(row.square().sum(dim=1))
            measurement = Measurement(
                {"trace": total.result(certain=known * trace)}, trace, None, None
            )
            contribution = Contribution(rows, trace, columns=columns_of(measurement), rate=rate)
        ledger.add(contribution)
    return Leakage(ledger, ExampleIds(n), Conditions(skipping=rate < 1)), truth


def coverage(rank: int, probes: int, repeats: int = 1, **options: float) -> float:
    """Of the traces, the MSE bounds and FIL at once: one number, since all three are one interval
    raised.
    """
    inside = []
    for seed in range(repeats):
        leakage, truth = run(rank, probes, seed=seed, **options)
        seen = leakage.get_trace().value > 0
        readings = leakage.get_trace(), leakage.get_mse_bound(), leakage.get_fil()
        covered = []
        for reading, true in zip(readings, (truth, D / truth, (truth / D).sqrt()), strict=True):
            low, high = reading.interval(0.95, "probes")
            covered.append(((low <= true) & (true <= high))[seen])
        assert torch.equal(covered[0], covered[1])
        assert torch.equal(covered[0], covered[2])
        inside.append(covered[0].double().mean())
    return float(torch.stack(inside).mean())


@pytest.mark.parametrize(("rank", "probes"), [(1, 1), (4, 1), (1, 2), (4, 2), (1, 8), (4, 8)])
def test_intervals_cover_whatever_the_rank(rank: int, probes: int) -> None:
    """Of a single probe, whose error is reported by its upper bound, more than they say where the
    rank is large.
    """
    covered = coverage(rank, probes)
    assert 0.92 <= covered <= (1 if probes == 1 else 0.985)


@pytest.mark.parametrize(("probes", "known"), [(1, 0.0), (1, 20.0), (3, 0.0), (3, 20.0)])
def test_intervals_of_a_single_step_cover(probes: int, known: float) -> None:
    """A small sampled part looks small by chance; a run does not keep what was known beside it."""
    assert coverage(2, probes, steps=1, known=known) >= (0.87 if known else 0.92)


@pytest.mark.product
@pytest.mark.parametrize("rate", [0.15, 0.4, 0.8])
@pytest.mark.parametrize("probes", [1, 2, 6])
def test_intervals_cover_where_steps_are_skipped(probes: int, rate: float) -> None:
    covered = coverage(3, probes, steps=40, rate=rate, unevenness=1.0, n=300, repeats=20)
    # six of forty steps say little about how far predictions were off
    assert (0.86 if rate < 0.2 else 0.94) <= covered <= 0.999


@pytest.mark.parametrize(("rank", "probes", "unevenness"), [(2, 1, 1.0), (4, 8, 1.0)])
def test_far_out_in_the_tail_ends_still_cover(rank: int, probes: int, unevenness: float) -> None:
    """As they must for many examples together: one in 1,000 upper ends of the trace may be too low,
    seldom more.
    """
    leakage, truth = run(rank, probes, steps=40, unevenness=unevenness, n=20_000)
    high = leakage.get_trace().interval(1 - 2e-3, "probes")[1]
    assert float((truth > high).double().mean()) <= 3e-3


@pytest.mark.parametrize(("rank", "probes", "unevenness"), [(1, 1, 1.0), (4, 8, 1.0)])
def test_one_end_holds_for_all_examples_together(rank: int, probes: int, unevenness: float) -> None:
    """Of many runs at most one in twenty has a true bound below it, and it is no worse than one
    example's own end.

    Examples share nothing where no step is skipped: one run of 50 · 400 of them is cut into 50
    runs.
    """
    together, truths = run(rank, probes, steps=40, unevenness=unevenness, n=50 * 400)
    wrong = []
    for rows in torch.arange(50 * 400).split(400):
        ledger = Ledger(400, D)
        for name, total in ledger.sums.items():
            total.copy_(together.ledger.sums[name][rows])
        leakage = Leakage(ledger, ExampleIds(400), together.conditions)
        smallest, low = leakage.get_smallest_mse_bound(0.95, "probes")
        assert smallest == float(leakage.get_mse_bound().value.min())
        assert low < smallest
        wrong.append(bool((D / truths[rows]).min() < low))
    # 2.5 are expected of the most exposed alone; more than 6 has a chance of 1 %
    assert sum(wrong) <= 6
