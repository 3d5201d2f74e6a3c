"""Loops under autocast, and models held in bfloat16: trained in the user's precision, accounted for
as in float64.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.cases import DEVICE
from tests.engine.architectures import Encoder
from tests.engine.ways import LOSS, start
from torchfil import FILPrivacyEngine, Private
from torchfil.fisher.gradients import ExampleGradients
from torchfil.fisher.mechanism import Mechanism
from torchfil.fisher.recording import RecordedJacobian
from torchfil.report import load

BF16, BF16_ERROR = torch.bfloat16, 0.03


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 16),
        nn.Tanh(),
        nn.LayerNorm(16),
        nn.Linear(16, 16),
        nn.GELU(),
        nn.Linear(16, 3),
    )


def convolutional() -> nn.Module:
    layers = (
        nn.Unflatten(1, (1, 6, 6)),
        nn.Conv2d(1, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.Tanh(),
    )
    return nn.Sequential(*layers, nn.AvgPool2d(2), nn.Flatten(), nn.Linear(36, 3))


MODELS: dict[str, Any] = {
    "perceptron": (perceptron, 6),
    "convolutional": (convolutional, 36),
    "text": (Encoder, None),
}


def run(
    name: str,
    cast: bool = False,
    *,
    way: str = "auto",
    held_in: torch.dtype = torch.float32,
    steps: int = 1,
    **options: Any,
) -> tuple[Tensor, Tensor, FILPrivacyEngine]:
    """Each example's trace, the last released sum, and the engine, after so many steps over all 8
    examples.
    """
    build, width = MODELS[name]
    torch.manual_seed(0)
    x = torch.randint(9, (8, 4)) if width is None else torch.randn(8, width).to(held_in)
    private = Private(submodule="embedding") if width is None else None
    # of so little noise p.grad is the sum of clipped gradients
    noise = torch.Generator(DEVICE).manual_seed(5)
    given = {
        "noise_multiplier": 1e-6,
        "max_grad_norm": 0.5,
        "private": private,
        "noise_generator": noise,
        "seed": 3,
    }
    given |= {
        "grad_sample_mode": "hooks" if way == "hooks" else "auto",
        "batch": 8,
        "lr": 1e-3,
        **options,
    }
    data = x, torch.randint(3, (8,))
    engine, model, optimizer, loader = start(build().to(held_in), data, way, **given)
    for _ in range(steps):
        inputs, targets = (part.to(DEVICE) for part in next(iter(loader)))
        optimizer.zero_grad()
        with torch.autocast(DEVICE, dtype=BF16, enabled=cast):
            if way == "train_step":
                engine.train_step(inputs, targets)
                continue
            outputs = model(inputs)
            loss = F.cross_entropy(outputs, targets)
        # outside of autocast
        (loss if steps == 1 else F.cross_entropy(outputs.float(), targets)).backward()
        optimizer.step()
    released = torch.cat([p.grad.flatten().double() for p in optimizer.params])
    return engine.totals.get_trace().value, released, engine


@cache
def in_double(name: str, **options: Any) -> tuple[Tensor, Tensor, FILPrivacyEngine]:
    return run(name, held_in=torch.float64, **options)


def apart(ours: Tensor, truth: Tensor) -> float:
    return float(((ours.double() - truth.double()).abs() / truth.double().abs().max()).max())


@pytest.mark.product
@pytest.mark.parametrize("way", ["auto", "train_step", "hooks"])
@pytest.mark.parametrize("name", MODELS)
def test_autocast_and_models_held_in_bfloat16(name: str, way: str) -> None:
    truth, released, _ = in_double(name)
    ours, sums, engine = run(name, cast=True, way=way)
    assert 0 < apart(ours, truth) < BF16_ERROR
    assert 0 < apart(sums, released) < BF16_ERROR
    assert engine.ledger.sums["trace"].dtype == torch.float64
    ours, _, engine = run(name, held_in=BF16, way=way)
    assert apart(ours, truth) < 2 * BF16_ERROR
    assert engine.get_epsilon(1e-5) > 0


@pytest.mark.parametrize("way", ["auto", "train_step"])
def test_the_whole_loop_inside_one_autocast(way: str) -> None:
    """The casts of weights that autocast keeps must not outlive an update of the weights."""
    truth, *_ = run("perceptron", cast=True, way=way, steps=3)
    with torch.autocast(DEVICE, dtype=BF16):
        ours, *_ = run("perceptron", cast=True, way=way, steps=3)
    assert apart(ours, truth) < 1e-3


def test_norms_are_summed_in_float32() -> None:
    """Of a layer with many outputs: a sum of squares in bfloat16 is off by percents."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 4)).to(DEVICE)
    x, y = torch.randn(4, 64, device=DEVICE), torch.randint(4, (4,), device=DEVICE)
    with torch.autocast(DEVICE, dtype=BF16):
        losses = F.cross_entropy(model(x), y, reduction="none")
        gradients = ExampleGradients.build(model, LOSS, x, y)
    parts = [
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in losses
    ]
    truth = torch.stack(
        [torch.cat([part.double().flatten() for part in by_one]).norm() for by_one in parts]
    )
    norm = RecordedJacobian(gradients, Mechanism.build(1.0, 1.0)).norm
    assert norm.dtype == torch.float32
    assert apart(norm, truth) < 2e-3


@pytest.mark.product
@pytest.mark.parametrize(
    ("name", "cast"), [("perceptron", True), ("convolutional", False), ("text", False)]
)
@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
def test_precision_of_probes(name: str, precision: str, cast: bool, tmp_path: Path) -> None:
    """What is released stays as it is to the last digit.

    Tr I is off by less than a tenth of a probe's own error.
    """
    truth, released, _ = run(name, cast)
    ours, sums, engine = run(name, cast, probe_precision=precision)
    # gradients of a repeated token are added in any order there
    if DEVICE == "cuda" and name == "text":
        assert torch.allclose(sums, released, rtol=1e-5, atol=1e-7)
    else:
        assert torch.equal(sums, released)
    assert apart(ours, truth) < 0.02
    if precision == "bfloat16" and name == "text":
        assert apart(ours, truth) > 0
    saved = load(engine.save_run(tmp_path / "run.parquet", delta=1e-5))
    assert saved.about["mechanism"]["probe_precision"] == precision
