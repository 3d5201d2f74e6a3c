"""Gradient inversion: the image behind one gradient (Geiping et al. 2020).

    x̂ = argmin_x  1 − ⟨∇ℓ(x), g⟩ / (‖∇ℓ(x)‖ ‖g‖) + α TV(x),    x in [low, high],

by Adam on the sign of the gradient, from several random starts; the start with the least objective
wins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, vmap

from torchfil.attacks.base import AttackResult, Seed, make_generator
from torchfil.fisher.gradients import ExampleGradients, LossFunction, flatten
from torchfil.fisher.models import trainable_and_constant
from torchfil.private.choice import NOTHING
from torchfil.utils.text import with_progress
from torchfil.viz.common import as_array


@dataclass(frozen=True)
class Inversion:
    """The images that explain the gradients best.

    Attributes:
        images: [n, …], in the range searched.
        objective: The final value of the objective, [n].
    """

    images: Tensor
    objective: Tensor

    def result(self, truth: Tensor) -> AttackResult:
        """The comparison with the truth, by example: the mean squared error per pixel."""
        shapes = [list(each.shape) for each in (truth, self.images)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"the truth has shape {shapes[0]}, the images {shapes[1]}")
        threat_model = "sees one example's gradient (noisy or not), knows the weights and the label"
        achieved = (self.images - truth).square().flatten(1).mean(dim=1)
        blind = (truth.mean(dim=0) - truth).square().flatten(1).mean(dim=1)
        return AttackResult(
            "gradient inversion",
            threat_model,
            range(len(truth)),
            as_array(achieved),
            "mse",
            trials=1,
            guesses=as_array(self.images),
            blind=as_array(blind),
        )


def observed_gradients(
    model: nn.Module,
    loss_fn: LossFunction,
    images: Tensor,
    targets: Tensor,
    *,
    max_grad_norm: float | None = None,
    noise_multiplier: float = 0.0,
    seed: Seed = None,
) -> Tensor:
    """What the attacker sees for each example: its gradient, [n, p], clipped to C and with noise
    N(0, (σC)²).
    """
    if not (noise_multiplier == 0 or (noise_multiplier > 0 and max_grad_norm is not None)):
        raise ValueError(
            f"noise_multiplier={noise_multiplier} must be at least 0, and noise needs max_grad_norm"
        )
    seen = ExampleGradients.build(model, loss_fn, images, targets, NOTHING).gradients()
    if max_grad_norm is None:
        return seen
    seen = seen * (max_grad_norm / seen.norm(dim=1, keepdim=True).clamp(min=max_grad_norm))
    source = make_generator(seed, seen.device)
    noise = torch.randn(seen.shape, generator=source, dtype=seen.dtype, device=seen.device)
    return seen + noise_multiplier * max_grad_norm * noise


def invert_gradients(
    model: nn.Module,
    loss_fn: LossFunction,
    gradients: Tensor,
    targets: Tensor,
    *,
    shape: tuple[int, ...],
    total_variation_weight: float = 1e-2,
    restarts: int = 2,
    steps: int = 1000,
    lr: float = 0.1,
    low: float = 0.0,
    high: float = 1.0,
    seed: Seed = None,
    progress: bool = False,
) -> Inversion:
    """The image behind each of several gradients, all searched in parallel.

    Threat model: the attacker sees the gradient of a single example, knows the network's weights,
    the loss and the label, and that the image lies in [low, high] and is smooth (total variation);
    nothing else. This prior biases the result, so the Cramér–Rao bound for unbiased guesses does
    not apply.

    Args:
        model: The network at the weights of the gradient; differentiable twice; not changed.
        loss_fn: ``loss_fn(outputs, targets)``.
        gradients: From :func:`observed_gradients`, [n, p].
        targets: Known labels, [n].
        shape: The shape of one image, [channels, height, width].
        total_variation_weight: α.
        restarts: Random starts for each gradient.
        steps: The steps of signed Adam; the rate falls to a tenth after 3/8, 5/8 and 7/8 of them,
            as in the paper.
        lr: The first rate.
        low: The smallest pixel value.
        high: The largest pixel value.
        seed: The seed of the starts, or a generator.
        progress: Whether to show a bar.
    """
    if not low < high:
        raise ValueError(f"low={low} must be below high={high}")
    n, (weights, constants) = len(targets), trainable_and_constant(model)

    def loss(values: dict[str, Tensor], x: Tensor, target: Tensor) -> Tensor:
        outputs = functional_call(model, {**values, **constants}, (x.unsqueeze(0),))
        return loss_fn(outputs, target.unsqueeze(0)).reshape(())

    def objective(x: Tensor, target: Tensor, seen: Tensor) -> Tensor:
        g = flatten(grad(loss)(weights, x, target))
        tiny = torch.finfo(g.dtype).tiny
        cosine = (g * seen).sum() / (
            (g.square().sum() + tiny).sqrt() * (seen.square().sum() + tiny).sqrt()
        )
        return 1 - cosine + total_variation_weight * total_variation(x)

    # All starts of all gradients are one batch.
    slopes = vmap(grad_and_value(objective))
    source = make_generator(seed, gradients.device)
    seen, labels = gradients.repeat(restarts, 1), targets.repeat(restarts)
    start = torch.rand(
        restarts * n, *shape, generator=source, dtype=gradients.dtype, device=gradients.device
    )
    x = (low + (high - low) * start).requires_grad_()

    # With signed steps the objective goes up and down: the best point counts, not the last.
    optimizer = torch.optim.Adam([x], lr=lr * (high - low))
    falls = torch.optim.lr_scheduler.MultiStepLR(
        optimizer, [int(steps * f) for f in (0.375, 0.625, 0.875)]
    )
    best, least = (
        x.detach().clone(),
        torch.full((restarts * n,), math.inf, dtype=x.dtype, device=x.device),
    )
    for _ in with_progress(range(steps), progress, "inversion", steps):
        slope, value = slopes(x.detach(), labels, seen)
        better = value < least
        best = torch.where(better.reshape(-1, *[1] * len(shape)), x.detach(), best)
        least = torch.where(better, value, least)
        x.grad = slope.sign()
        optimizer.step()
        falls.step()
        with torch.no_grad():
            x.clamp_(low, high)

    winner = least.reshape(restarts, n).argmin(dim=0)
    lost = (~least.reshape(restarts, n).isfinite().any(dim=0)).nonzero().flatten().tolist()
    if lost:
        raise ValueError(
            f"the objective of examples {lost[:5]} was never finite: check observed gradients and "
            "weights"
        )
    places = winner * n + torch.arange(n, device=winner.device)
    return Inversion(best[places], least[places])


def total_variation(x: Tensor) -> Tensor:
    """Mean absolute difference of neighbours, down plus across, [..., height, width] to a scalar.

    Example:
        >>> total_variation(torch.tensor([[0.0, 1.0], [0.0, 1.0]]))
        tensor(1.)
    """
    steps = [
        x.diff(dim=dim).abs().mean() for dim in (-2, -1) if x.ndim >= -dim and x.shape[dim] > 1
    ]
    return torch.stack(steps).sum() if steps else x.new_zeros(())
