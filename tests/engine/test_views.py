"""Augmentation multiplicity: the mean gradient over an example's views, clipped once, accounted for exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev
from torch.utils.data import TensorDataset

from tests.cases import DEVICE, grouped, relative_error
from tests.engine.loops import SIGMA, C, data, loader, network
from torchfil import FILPrivacyEngine
from torchfil.clipping import get_clip
from torchfil.engine.assembly import ManyViews, MeanOverViews
from torchfil.fisher import reference

K = 3


def fixed_views(x: Tensor) -> Tensor:
    return torch.stack([x, x.flip(-1), 0.5 * x.sin()], dim=1)


def random_views(x: Tensor) -> Tensor:
    """Scaled and shifted at random, each view its own way."""
    shift = torch.randn(len(x), K, x.shape[1], dtype=x.dtype, device=x.device)
    return x[:, None] * (1 + torch.rand(len(x), K, 1, dtype=x.dtype, device=x.device)) + shift


def clipped_and_jacobian(
    module: nn.Module, weights: dict[str, Tensor], views: Callable[[Tensor], Tensor], x: Tensor, y: Tensor
) -> tuple[Tensor, Tensor]:
    """g̃ [p] and J̃ [p, d] of one example, from the definition."""
    clip = get_clip("smooth")

    def clipped(z: Tensor) -> Tensor:
        def loss(weights: dict[str, Tensor]) -> Tensor:
            views_of_one = views(z)
            each = [F.cross_entropy(functional_call(module, weights, (v[None],)), y[None]) for v in views_of_one]
            return torch.stack(each).mean()

        g = torch.cat([part.flatten() for part in grad(loss)(weights).values()])
        return g / clip.c(g.norm() / clip.threshold(C))

    return clipped(x), jacrev(clipped)(x)


def make(views: Any, dataset: Any, **options: Any) -> Any:
    engine, module = FILPrivacyEngine(), network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.3)
    given = {
        "noise_multiplier": SIGMA,
        "max_grad_norm": C,
        "criterion": nn.CrossEntropyLoss(),
        "seed": 3,
        "estimator": "exact",
        **options,
    }
    return engine, module, *engine.make_private(module, optimizer, loader(dataset), views=views, **grouped(**given))


def step(way: str, engine: Any, model: Any, optimizer: Any, criterion: Any, x: Tensor, y: Tensor) -> None:
    if way == "train_step":
        engine.train_step(x, y)
        return
    optimizer.zero_grad()
    criterion(model(x), y).backward()
    optimizer.step()


@pytest.mark.product
@pytest.mark.parametrize("way", ["loop", "train_step"])
@pytest.mark.parametrize("kind", ["function", "random", "stacks"])
def test_the_ledger_is_the_truth(kind: str, way: str) -> None:
    """Σ over participations of the exact Poisson FIM of the clipped mean gradient, by jacrev in float64."""
    plain, dataset = network(), data(24)
    if kind == "stacks":
        dataset = TensorDataset(fixed_views(dataset.tensors[0]), dataset.tensors[1])
    views = {"function": fixed_views, "random": random_views, "stacks": K}[kind]
    engine, module, model, optimizer, criterion, batches = make(views, dataset)
    expected, sums = torch.zeros(24, dtype=torch.float64, device=DEVICE), []
    for number, (x, y) in enumerate(batches):
        weights = {name: value.detach().clone() for name, value in module.named_parameters()}
        x, y = x.to(DEVICE), y.to(DEVICE)
        torch.manual_seed(number)  # what the views draw, in their order
        shift = torch.randn(len(x), K, 5, dtype=x.dtype, device=DEVICE)
        drawn = shift, 1 + torch.rand(len(x), K, 1, dtype=x.dtype, device=DEVICE)
        total = torch.zeros(())
        for i, (row, target) in enumerate(zip(x, y, strict=True)):

            def own_views(z: Tensor, i: int = i, drawn: Any = drawn) -> Tensor:
                if kind == "stacks":
                    return z.reshape(K, -1)
                if kind == "function":
                    return fixed_views(z[None])[0]
                return z * drawn[1][i] + drawn[0][i]

            g, jacobian = clipped_and_jacobian(plain, weights, own_views, row.flatten(), target)
            fim = reference.poisson_fim(jacobian[None], g[None], SIGMA * C, batches.sample_rate)[0]
            rows = dataset.tensors[0].to(DEVICE).reshape(24, -1)
            expected[int((rows == row.flatten()).all(dim=1).nonzero())] += fim.trace()
            total = total + g
        torch.manual_seed(number)
        step(way, engine, model, optimizer, criterion, x, y)
        if way == "loop" and len(x):
            released = torch.cat([p.summed_grad.flatten() for p in optimizer.params])
            sums.append(relative_error(released, total))
    assert relative_error(engine.ledger.sums["trace"], expected) < 5e-6
    assert max(sums, default=0.0) < 1e-9
    assert engine.ledger.num_coordinates == (5 * K if kind == "stacks" else 5)


def test_one_view_is_the_plain_run() -> None:
    dataset = data(24)
    found = []
    for views in (None, lambda x: x[:, None]):
        engine, module, model, optimizer, *criterion, batches = make(
            views, dataset, noise_generator=torch.Generator(DEVICE).manual_seed(1)
        )
        for x, y in batches:
            step("loop", engine, model, optimizer, *(criterion or [F.cross_entropy]), x.to(DEVICE), y.to(DEVICE))
        found.append((torch.cat([p.detach().flatten() for p in module.parameters()]), engine.ledger.sums["trace"]))
    assert relative_error(found[1][0], found[0][0]) < 1e-9
    assert relative_error(found[1][1], found[0][1]) < 1e-9


def test_evaluation_sees_examples_as_they_are() -> None:
    _, module, model, *_ = make(fixed_views, data(24))
    x = torch.randn(4, 5, dtype=torch.float64, device=DEVICE)
    model.eval()
    assert torch.equal(model(x), module(x))


def test_a_sum_over_the_batch_is_a_mean_over_views() -> None:
    outputs, targets = torch.randn(4, K, 3), torch.tensor([0, 1, 2, 0])
    each = torch.stack([F.cross_entropy(outputs[:, k], targets, reduction="none") for k in range(K)]).mean(dim=0)
    assert torch.allclose(MeanOverViews(nn.CrossEntropyLoss(reduction="sum"), "sum")(outputs, targets), each.sum())
    assert torch.allclose(MeanOverViews(nn.CrossEntropyLoss(), "mean")(outputs, targets), each.mean())


@pytest.mark.parametrize(
    ("views", "options", "message"),
    [
        (fixed_views, {"criterion": None}, "views= needs criterion="),
        (fixed_views, {"grad_sample_mode": "hooks"}, "views= needs grad_sample_mode='auto'"),
    ],
)
def test_refusals(views: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(views, data(24), **options)


def test_views_of_another_shape_are_told() -> None:
    with pytest.raises(ValueError, match=r"views=2: they must be \[batch, K, …\]"):
        ManyViews(nn.Linear(3, 2), 2)(torch.ones(4, 3, 3))
