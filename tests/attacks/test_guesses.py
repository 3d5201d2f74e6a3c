"""D of a ledger is KL of whole runs, and no attacker, not even the best, does better than D
allows.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.fisher.recorded_cases import Model
from torchfil.attacks.guesses import best_guess, transcript_ratios, true_positive_rates
from torchfil.attacks.transcripts import record_dpsgd
from torchfil.guessing import largest_true_positive_rate
from torchfil.private import Private
from torchfil.questions import Absent, Change, Label, Question, Token

RATES = (0.01, 0.05, 0.1, 0.3, 0.5)
MODELS = ("logistic", "two layers", "tokens")


def problem(kind: str) -> tuple[nn.Module, Tensor, Tensor, Question, Private | None]:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        x, y = torch.randn(5, 2, dtype=torch.float64), torch.tensor([0, 1, 1, 0, 1])
        if kind == "logistic":
            changed = Change(lambda inputs, targets: (inputs + torch.tensor([1.0, -0.5]), targets))
            return nn.Linear(2, 2).double(), x, y, changed, None
        if kind == "two layers":
            return (
                nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double(),
                x,
                y,
                Label(2),
                None,
            )
        tokens = torch.randint(0, 3, (5, 2))
        tokens[0, 0] = 0
        # an activation without a derivative
        parts = {"table": nn.Embedding(3, 2), "out": nn.Linear(2, 2)}
        model = Model(lambda m, tokens: m.out(F.relu(m.table(tokens)).sum(dim=1)), **parts)
        return model.double(), tokens, y, Token(0, (1,)), Private(submodule="table")


def settings(q: float, sigma: float = 1.2, steps: int = 12) -> dict[str, float | int]:
    return {
        "steps": steps,
        "lr": 0.5,
        "max_grad_norm": 1.0,
        "noise_multiplier": sigma,
        "sample_rate": q,
    }


def check_ledger_and_bounds(
    kind: str, q: float, runs: int, rates: tuple[float, ...] = RATES
) -> None:
    model, inputs, targets, question, private = problem(kind)
    answer = 1 if kind == "two layers" else 0
    other = question.alternatives(inputs, targets)[answer]
    changed = inputs.clone(), targets.clone()
    for own, new in zip(changed, other, strict=True):
        own[0] = new[0]
    common = {
        "runs": runs,
        "seed": torch.Generator().manual_seed(7),
        "private": private,
        **settings(q),
    }
    true = record_dpsgd(model, nn.CrossEntropyLoss(), inputs, targets, **common)  # type: ignore[arg-type]
    false = record_dpsgd(model, nn.CrossEntropyLoss(), *changed, **common)  # type: ignore[arg-type]
    here, there = (
        transcript_ratios(made, 0, (inputs, targets), changed, private) for made in (true, false)
    )

    # E_P log P/P′ is KL(P ‖ P′); the booked sums must have the same mean
    ledger, ratio = here.divergence, here.log_ratio
    error = math.sqrt(float(ledger.var() + ratio.var()) / runs)
    assert float(ledger.mean()) > 5 * error, "the example would say nothing"
    assert abs(float(ledger.mean() - ratio.mean())) < 3 * error

    alpha = torch.tensor(rates, dtype=torch.float64)
    achieved = true_positive_rates(ratio, there.log_ratio, alpha)
    bound = largest_true_positive_rate(float(ledger.mean()), alpha)
    noise = 3 * ((achieved * (1 - achieved) + alpha * (1 - alpha)) / runs).sqrt()
    assert bool((achieved <= bound + noise).all()), (achieved, bound)
    assert bool((achieved > alpha - noise).all())


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("q", [0.3, 1.0])
def test_ledger_is_the_divergence_of_whole_runs(kind: str, q: float) -> None:
    check_ledger_and_bounds(kind, q, runs=1_000)


@pytest.mark.long
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("q", [0.05, 0.3, 1.0])
def test_ledger_is_the_divergence_of_forty_thousand_runs(kind: str, q: float) -> None:
    check_ledger_and_bounds(kind, q, runs=40_000)


def test_membership_and_known_batches() -> None:
    """Whether the run had the example; an attacker who knows the batches is told more."""
    model, inputs, targets, question, _ = problem("logistic")

    def attack(asked: Question, runs: int, **more: Any) -> Any:
        given = {"runs": runs, "seed": 2, **settings(0.3), **more}
        return best_guess(model, nn.CrossEntropyLoss(), inputs, targets, asked, [0], **given)

    member = attack(Absent(), 1_000, false_positive_rates=(0.1,))
    assert member.verdicts == [["held"]]
    assert (member.achieved > 0.1).all()
    secret, known = (
        attack(question, 500, secret_batches=secret).divergence[0] for secret in (True, False)
    )
    assert secret < known
