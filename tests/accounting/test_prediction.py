"""Predicted and corrected sums: without bias whatever is predicted, and never clamped."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from torchfil.accounting.ids import ExampleIds
from torchfil.accounting.leakage import Leakage
from torchfil.accounting.ledger import Contribution, Ledger
from torchfil.accounting.quantities import QuestionSpec

Q, STEPS, COPIES = 0.15, 30, 4000
LEVELS = torch.tensor([0.3, 1.0, 2.0], dtype=torch.float64)


def estimated(
    rate: float, scale: float = 0.0, seed: int = 0, *, known: bool = False
) -> tuple[Ledger, dict[str, Tensor]]:
    """Sums of the copies of three examples, one after the other, and their true means, [3, …].

    Copies draw and are measured independently, with errors of 30 %, and norms say something of X.
    ``scale``: of a random trend at first; 0: none. ``known``: every step draws everybody.
    """
    source = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=source, dtype=torch.float64)

    asked, n = {"age": QuestionSpec(("old", "young"))}, len(LEVELS) * COPIES
    ledger = Ledger(n, 2, track=("diagonal",), questions=asked, draw_rate=None if known else Q)
    q, trends = 1.0 if known else Q, ledger.trends().items()
    ledger.load_trends({name: scale * drawn(*each.shape) for name, each in trends})
    truth = dict.fromkeys(("trace", "question age", "diagonal"), torch.zeros(()).double())
    for _ in range(STEPS):
        x, share = LEVELS * (0.2 + drawn(3)), drawn(3)
        both = torch.stack([share, 1 - share], dim=1)
        means = x, x[:, None] * drawn(3, 2), x[:, None] * both
        norm = (x * (0.5 + drawn(3))).sqrt()
        rows, is_measured = (drawn(n) < q).nonzero().flatten(), drawn(n) < rate
        error = 1 + 0.3 * torch.randn(n, generator=source, dtype=torch.float64)
        batches: list[Contribution] = []
        for here in (rows[is_measured[rows]], rows[~is_measured[rows]]):
            columns = {}
            for name, mean in zip(truth, means, strict=True):
                x = mean[here // COPIES]
                noisy = x * error[here].view(-1, *(1,) * (x.ndim - 1))
                columns[name] = {"value": noisy, "variance": (0.3 * x).square()}
            own = norm[here // COPIES]
            batches.append(Contribution(here, own.square(), {} if batches else columns, rate))
        ledger.add(*batches)
        added = zip(truth.items(), means, strict=True)
        truth = {name: total + q * mean for (name, total), mean in added}
    return ledger, truth


@pytest.mark.parametrize("scale", [0.0, 5.0])
@pytest.mark.parametrize("rate", [1.0, 0.25])
def test_sums_are_unbiased(rate: float, scale: float) -> None:
    """Trace, D of two answers and two coordinates of examples that leak little, more and most, with
    a good trend and a bad one.
    """
    ledger, truth = estimated(rate, scale)
    for name, mean in truth.items():
        value = ledger.sums[name].unflatten(0, (3, COPIES))
        error = value.std(dim=1) / math.sqrt(COPIES)
        assert bool((error < mean / 2).all())
        assert bool(((value.mean(dim=1) - mean).abs() < 4 * error).all()), name


@pytest.mark.parametrize("rate", [1.0, 0.5, 0.25])
def test_variances_of_measuring_are_not_too_small(rate: float) -> None:
    ledger, truth = estimated(rate, known=True)
    for name, mean in truth.items():
        value, told = (
            ledger.sums[each].double().unflatten(0, (3, COPIES))
            for each in (name, "variance" if name == "trace" else f"{name}_variance")
        )
        error = value.std(dim=1) / math.sqrt(COPIES)
        assert bool(((value.mean(dim=1) - mean).abs() < 4 * error).all()), name
        ratio = told.mean(dim=1) / value.var(dim=1)
        # coordinates borrow the error of skipped steps from the trace
        least = 0.7 if name == "diagonal" else 0.9
        assert bool(((ratio > least) & (ratio < 3)).all()), name


def test_sums_below_zero_are_kept_and_say_nothing() -> None:
    ids, runs = ExampleIds(len(LEVELS) * COPIES), []
    for seed in range(2):
        ledger, _ = estimated(0.25, 5.0, seed)
        runs.append(Leakage(ledger, ids))
        runs.append(Leakage(Ledger.from_state_dict(ledger.state_dict()), ids))
    traces = [run.ledger.sums["trace"] for run in runs]
    for leakage, trace in (
        (runs[1], traces[0]),
        (Leakage.average(runs[::2]), (traces[0] + traces[2]) / 2),
    ):
        assert 0.05 < float((trace < 0).double().mean()) < 0.5
        torch.testing.assert_close(leakage.get_trace().value, trace, rtol=1e-12, atol=0)
        told, bound = leakage.was_measured(), leakage.get_mse_bound()
        assert torch.equal(told, (trace > 0) & (leakage.ledger.sums["measured"] > 0))
        for value in (leakage.get_fil().value, bound.value, torch.tensor(leakage.arrays()["fil"])):
            assert torch.equal(value.isnan(), ~told)
        diagonal = leakage.ledger.sums["diagonal"]
        assert bool((diagonal[told] < 0).any())
        unknown = ~told[:, None] | (diagonal < 0)
        assert torch.equal(leakage.get_attribute_fil().value.isnan(), unknown)
        for of in ("run", "probes"):
            low, high = (end[trace < 0] for end in bound.interval(of=of))
            assert bool((low == 0).all())
            assert bool(high.isinf().all())
        assert leakage.summary().measured == int(told.sum())
