"""Augmentation multiplicity: the mean gradient over an example's views, clipped once, accounted for exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.cases import DEVICE
from tests.engine.brute_force import Run, assert_true, make, train
from tests.engine.loops import assert_same_run, data, network
from tests.engine.ways import LOSS
from torchfil.engine.assembly import ManyViews, MeanOverViews

K, SIGMA = 3, 0.9


def fixed_views(x: Tensor) -> Tensor:
    return torch.stack([x, x.flip(-1), 0.5 * x.sin()], dim=1)


def random_views(x: Tensor) -> Tensor:
    """Scaled and shifted at random, each view its own way."""
    shift = torch.randn(len(x), K, x.shape[1], dtype=x.dtype, device=x.device)
    return x[:, None] * (1 + torch.rand(len(x), K, 1, dtype=x.dtype, device=x.device)) + shift


class OfViews(nn.Module):
    """The outputs of all views, [batch, K, classes], with the plain model's names of weights."""

    def __init__(self, module: Any, views: Any) -> None:
        super().__init__()
        self.views = views
        for name, child in module.named_children():
            self.add_module(name, child)

    def forward(self, x: Tensor) -> Tensor:
        views = self.views(x) if callable(self.views) else x
        for layer in self.children():
            views = layer(views)
        return views


def mean_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.stack([F.cross_entropy(outputs[:, k], targets) for k in range(outputs.shape[1])]).mean()


def made(views: Any, dataset: Any = None, **options: Any) -> Run:
    given = {"criterion": LOSS, "noise_multiplier": SIGMA, "amplification": None, "views": views, **options}
    run = make(network(), dataset or data(12), **given)
    run.plain, run.true_loss = OfViews(run.plain, views), mean_loss
    return run


@pytest.mark.parametrize("way", ["auto", "train_step"])
@pytest.mark.parametrize("views", [fixed_views, random_views, K])
def test_the_ledger_is_the_truth(views: Any, way: str) -> None:
    x, y = data(12).tensors
    dataset = TensorDataset(fixed_views(x), y) if views == K else data(12)
    run = train(made(views, dataset, clip_weights=torch.linspace(0.3, 1, 12).double()), steps=2, way=way)
    assert_true(run, 5e-6)
    assert run.engine.ledger.num_coordinates == (5 * K if views == K else 5)


def test_one_view_is_the_plain_run() -> None:
    runs = [train(made(views, estimator="weight-probes")) for views in (None, lambda x: x[:, None])]
    assert_same_run(*((run.engine, run.module) for run in runs), 1e-9)


def test_outside_of_training() -> None:
    run, x = made(fixed_views), torch.randn(4, 5, dtype=torch.float64, device=DEVICE)
    run.model.eval()
    assert torch.equal(run.model(x), run.module(x)), "evaluation sees examples as they are"
    outputs, targets = torch.randn(4, K, 3), torch.tensor([0, 1, 2, 0])
    each = torch.stack([F.cross_entropy(outputs[:, k], targets, reduction="none") for k in range(K)]).mean(dim=0)
    assert torch.allclose(MeanOverViews(nn.CrossEntropyLoss(reduction="sum"), "sum")(outputs, targets), each.sum())
    assert torch.allclose(MeanOverViews(LOSS, "mean")(outputs, targets), each.mean())
    with pytest.raises(ValueError, match="views=2"):
        ManyViews(nn.Linear(3, 2), 2)(torch.ones(4, 3, 3))
    for options in ({"criterion": None}, {"grad_sample_mode": "hooks"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            made(fixed_views, **options)
