"""PLIS against brute force, finite differences and the accounting's own direction a."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks import zoo
from tests.cases import CASES, CLIPS, DEVICE, build
from tests.fisher.recorded_cases import Model
from tests.refused import all_refused
from torchfil import PLIS, exposure
from torchfil.attribution.plis import column_norms, superpixel_norms
from torchfil.clipping import get_clip
from torchfil.fisher.gradients import ExampleGradients
from torchfil.fisher.operator import ClippedJacobian

STD, C = 0.7, 1.3


def privacy_loss(model: nn.Module, loss_fn: Any, x: Tensor, y: Tensor, clip: str | None) -> Tensor:
    """PL of one example as a differentiable function of its input, by plain autograd."""
    weights = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss_fn(model(x[None]), y[None]), weights, create_graph=True)
    square = torch.stack([g.square().sum() for g in gradients]).sum()
    if clip is None:
        return square
    return square * get_clip(clip).scale(square.sqrt(), C) ** 2 / STD**2


@pytest.mark.parametrize("clip", [None, "gelu"])
def test_a_transformer_against_plain_autograd(clip: str | None) -> None:
    torch.manual_seed(0)
    model = zoo.vit_tiny(3, 1, 8, width=8, depth=1, heads=2).to(DEVICE).double()
    x, y = torch.rand(3, 1, 8, 8).to(DEVICE).double(), torch.tensor([0, 2, 1], device=DEVICE)
    options: dict[str, Any] = (
        {} if clip is None else {"noise_std": STD, "max_grad_norm": C, "clip": clip}
    )
    plis = PLIS(model, nn.CrossEntropyLoss(), **options)
    got = plis.attribute(x, y)
    assert plis.method == "recorded pass"
    assert got.shape == x.shape
    for i in range(len(x)):
        one = x[i].clone().requires_grad_()
        value = privacy_loss(model, nn.CrossEntropyLoss(), one, y[i], clip)
        (want,) = torch.autograd.grad(value, one)
        # clipped hard, the slope is 0 up to rounding
        scale = max(float(want.abs().max()), float(value.detach()))
        assert torch.allclose(got[i], want, rtol=1e-8, atol=1e-8 * scale)
        assert torch.allclose(plis.privacy_loss(x, y)[i], value, rtol=1e-10)


@pytest.mark.product
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("name", CASES)
def test_it_is_the_parallel_direction_up_to_its_factor(name: str, clip: str) -> None:
    """PLIS = 2‖g̃‖a/s² = 2g̃ᵀJ̃/s², for columns, targets, embeddings and several inputs."""
    case = build(name, 4)
    options: dict[str, Any] = {
        "noise_std": STD,
        "max_grad_norm": case.C,
        "clip": clip,
        "private": case.private,
    }
    got = PLIS(case.model, case.loss_fn, **options).attribute(case.inputs, case.targets)
    gradients = ExampleGradients.build(*case.arguments, case.private)
    jacobian = ClippedJacobian(gradients, get_clip(clip), case.C)
    a = jacobian.clipped_norm_gradient()
    want = gradients.examples.maps(2 * jacobian.clipped_norm[:, None] * a / STD**2)
    product = 2 * jacobian.rmatvec(jacobian.clipped_gradient) / STD**2
    for key, values in gradients.examples.maps(product).items():
        assert torch.allclose(values, want[key], rtol=1e-8, atol=1e-12, equal_nan=True)
    got = got if isinstance(got, dict) else {next(iter(want)): got}
    assert set(got) == set(want)
    for key, values in want.items():
        assert torch.allclose(got[key], values, rtol=1e-8, atol=1e-10, equal_nan=True)


def test_the_memory_ceiling_does_not_change_the_result() -> None:
    case = build("transformer", 7)
    whole, parts = (
        PLIS(case.model, case.loss_fn, private=case.private, max_memory=memory).attribute(
            case.inputs, case.targets
        )
        for memory in (2**30, 1)
    )
    assert torch.allclose(whole, parts, rtol=1e-10, atol=1e-14, equal_nan=True)


def test_one_example_does_not_vouch_for_a_batch() -> None:
    """A model that mixes examples passes a trial of one; the next batch is tried again."""

    def mixing(m: Any, x: Tensor) -> Tensor:
        h = m.layer(x)
        return torch.tanh(h - 0.5 * h.mean(dim=0))

    torch.manual_seed(3)
    model, x, y = (
        Model(mixing, layer=nn.Linear(3, 2)).double(),
        torch.randn(4, 3).double(),
        torch.randn(4, 2).double(),
    )
    plis = PLIS(model, nn.MSELoss())
    alone = torch.cat([plis.attribute(x[i : i + 1], y[i : i + 1]) for i in range(4)])
    assert plis.method == "recorded pass"
    assert torch.allclose(plis.attribute(x, y), alone, rtol=1e-9)
    assert str(plis.method).startswith("mapped gradients")


def test_norms_of_subjects_columns_and_superpixels() -> None:
    case = build("groupnorm_residual", 3)
    plis = PLIS(case.model, case.loss_fn)
    maps = plis.attribute(case.inputs, case.targets)
    assert torch.allclose(plis.subject(case.inputs, case.targets), maps.flatten(1).norm(dim=1))
    assert torch.allclose(column_norms(maps), maps.square().sum(dim=(1, 2)).sqrt())
    segments = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 1], [5, 5, 5, 5], [5, 5, 5, 5]])
    want = torch.stack([maps[:, :, segments == k].flatten(1).norm(dim=1) for k in (0, 1, 5)], dim=1)
    for given in (segments, segments.expand(3, -1, -1)):
        assert torch.allclose(superpixel_norms(maps, given), want)


def test_refusals() -> None:
    model, loss, labels = zoo.mnist_cnn(), nn.CrossEntropyLoss(), torch.zeros(1, dtype=torch.long)
    refused = {
        "noise_std=0": lambda: PLIS(model, loss, noise_std=0),
        "clip='soft'": lambda: PLIS(model, loss, max_grad_norm=1.0, clip="soft"),
        "nothing private": lambda: PLIS(model, loss).attribute(labels.expand(1, 1, 28, 28), labels),
        "integer labels of shape": lambda: superpixel_norms(torch.ones(2, 1, 4, 4), labels),
        r"not finite at \[\[1\]\]": lambda: exposure.rank_by_exposure([0.1, float("nan")]),
        "0 of 2 are outliers": lambda: exposure.auroc([1.0, 2.0], [False, False]),
    }
    all_refused(refused)


class TestExposure:
    def test_auroc_against_pairs(self) -> None:
        rng = np.random.default_rng(0)
        scores, outlier = rng.integers(0, 6, 60) / 2.0, rng.random(60) < 0.3
        scores[outlier] += 0.5
        pairs = [(a > b) + 0.5 * (a == b) for a in scores[outlier] for b in scores[~outlier]]
        got = exposure.auroc(scores, outlier)
        assert got.value == pytest.approx(np.mean(pairs))
        assert got.low < got.value < got.high
        assert exposure.auroc(torch.tensor([1.0, 2.0]), torch.tensor([False, True])).low == 0
        table = exposure.rank_by_exposure([0.5, 2.0, 2.0, 0.1], ids=["a", "b", "c", "d"])
        assert table["rank"].to_dict() == {"b": 1, "c": 1, "a": 3, "d": 4}

    def test_its_interval_covers_the_truth(self) -> None:
        """Two normals one deviation apart: AUROC = Φ(1/sqrt 2) = 0.7602."""
        rng = np.random.default_rng(1)
        truth, covered, errors, values = 0.7602, 0, [], []
        for _ in range(300):
            scores = np.concatenate([rng.normal(size=40), rng.normal(1.0, size=30)])
            got = exposure.auroc(scores, np.arange(70) >= 40)
            covered += got.low <= truth <= got.high
            errors.append(got.standard_error)
            values.append(got.value)
        assert 0.92 <= covered / 300 <= 0.985
        assert np.mean(errors) == pytest.approx(np.std(values), rel=0.1)
