"""Averages over runs: of repetitions only; who was never drawn, who was not measured."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import torchfil
from tests.engine.ways import examples, mlp, start, step
from torchfil import FILPrivacyEngine, Private
from torchfil.attacks import AttackResult


def sampled(seed: int, steps: int = 2, **options: Any) -> FILPrivacyEngine:
    """Two steps of Poisson sampling: some examples are never drawn."""
    torch.manual_seed(seed)
    options = {"poisson_sampling": True, "batch": 4, "seed": seed} | options
    engine, model, optimizer, loader = start(mlp(), examples(), **options)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    for _, (x, y) in zip(range(steps), batches, strict=False):
        step(engine, model, optimizer, x, y, "hooks")
    return engine  # type: ignore[no-any-return]


def test_an_average_tells_who_was_never_drawn() -> None:
    engines = [sampled(seed) for seed in (1, 2)]
    drawn = np.stack([engine.leakage()["participations"] for engine in engines]).sum(axis=0)
    assert 0 < (drawn == 0).sum() < 24
    table = FILPrivacyEngine.merge(engines).leakage()
    assert (np.isinf(table["sampling_error"]) == (drawn == 0)).all()
    assert ((table["participations"] == 0) == (drawn == 0)).all()
    alone = FILPrivacyEngine.merge(engines[:1]).leakage()
    assert alone["sampling_error"].tolist() == engines[0].leakage()["sampling_error"].tolist()


def test_runs_of_other_noise_are_not_averaged() -> None:
    with pytest.raises(ValueError, match="must share noise, clipping"):
        FILPrivacyEngine.merge([sampled(1), sampled(2, noise_multiplier=2.0)])
    engine = sampled(1)
    with pytest.raises(ValueError, match="one engine twice"):
        FILPrivacyEngine.merge([engine, engine])


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        ({}, {"steps": 3}, "2 steps of σ = 1.0.*3 steps of σ = 1.0"),
        ({}, {"amplification": "none"}, "amplification by "),
        (
            {"private": Private(coordinates=torch.tensor([True, False, True]))},
            {"private": Private(coordinates=torch.tensor([True, True, False]))},
            r"coordinates=\[True, False, True\].*coordinates=\[True, True, False\]",
        ),
        ({"private": Private(coordinates=[0])}, {"private": Private(coordinates=[1])}, "Private"),
    ],
)
def test_runs_that_differ_otherwise_are_not_averaged(first: Any, second: Any, told: str) -> None:
    with pytest.raises(ValueError, match=rf"the number of steps and what is private; got .*{told}"):
        FILPrivacyEngine.merge([sampled(1, **first), sampled(2, **second)])
    FILPrivacyEngine.merge([sampled(1, **second), sampled(2, **second)])


def test_repetitions_that_are_spelled_differently_are_averaged() -> None:
    class Twice:
        secret_batches = True

        def factors(self, rho: Tensor, q: float | None, sigma: float) -> tuple[Tensor, Tensor]:
            return 2 * torch.ones_like(rho), 2 * torch.ones_like(rho)

    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"noise_multiplier": 1}, {"noise_multiplier": 1.0}),
        ({"private": Private(coordinates=[0, 1])}, {"private": Private(coordinates=(0, 1))}),
        ({"amplification": Twice()}, {"amplification": Twice()}),
    ]
    for first, second in pairs:
        assert FILPrivacyEngine.merge([sampled(1, **first), sampled(2, **second)]).get_fil().value.max() > 0


@pytest.mark.parametrize("read", [lambda engine: engine, lambda engine: FILPrivacyEngine.merge([engine])])
def test_an_example_that_was_not_measured_has_no_bound_to_violate(read: Callable[[FILPrivacyEngine], Any]) -> None:
    attack = AttackResult(
        "the mean", "nothing", range(24), np.full(24, 1e-9), measure="mse", trials=9, standard_error=np.full(24, 1e-12)
    )
    for steps in (2, 30):
        engine = sampled(1, steps)
        source = read(engine)
        drawn = engine.leakage()["participations"]
        assert source.was_measured().tolist() == (drawn > 0).tolist()
        violated = torchfil.compare_with_bounds(source, attack).violated
        assert violated.tolist() == (drawn >= 5).tolist()  # fewer do not tell how far one run is off
    assert 0 < violated.sum() < 24
