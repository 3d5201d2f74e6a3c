"""The method of Guo et al. 2022, as the paper computes it, against weight probes: cost and spread.

tr J̃ᵀJ̃ ≈ d/k · Σ_i ‖J̃e_i‖² over k random coordinates i, each column J̃e_i from one forward-mode product (jvp) of the
clipped per-example gradient, mapped over the examples (vmap): ``vmap(jvp(clip(grad(loss))))``. The paper uses k = 50.
Weight probes estimate the same trace from products J̃ᵀu, u ∈ {±1}^p.

k of d coordinates, drawn without replacement, have the relative standard error r_c·sqrt(1/k − 1/d), where r_c is the
relative standard deviation of one coordinate.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.func import grad, jvp, vmap

from benchmarks.loops import Model
from benchmarks.measuring import peak_gigabytes, timed
from torchfil.clipping import get_clip
from torchfil.fisher.batch import PrivateBatch
from torchfil.fisher.gradients import ExampleGradients, differentiable_twice
from torchfil.fisher.mechanism import Mechanism
from torchfil.fisher.operator import ClippedJacobian
from torchfil.fisher.recording import plan

__all__ = [
    "PAPER_COORDINATES",
    "clipped_column_norms",
    "column_estimates",
    "coordinate_cost",
    "error_of_coordinates",
    "examples_of",
    "mapped_coordinate_cost",
    "random_directions",
    "relative_std",
    "traces",
]

PAPER_COORDINATES = 50
CLIP = get_clip("gelu")
LOSS = nn.CrossEntropyLoss()
_VECTORS = 6  # of length p per example: gradient, clipped gradient and their tangents


def clipped_column_norms(gradients: ExampleGradients, directions: Tensor, max_grad_norm: float = 1.0) -> Tensor:
    """‖J̃v‖² of every example, [batch], from vmap(jvp(clip(grad(loss)))), for v of shape [batch, d]."""

    def one(z: Tensor, public: object, v: Tensor) -> Tensor:
        def clipped_gradient(z: Tensor) -> Tensor:
            parts = grad(gradients.loss_of_one)(gradients.parameters, z, public)
            g = torch.cat([part.reshape(-1) for part in parts.values()])
            over = g.square().sum().sqrt() / CLIP.threshold(max_grad_norm) - 1
            return g / (over * torch.special.ndtr(over) + 1)  # GELU(t − 1) + 1, in a form that jvp supports everywhere

        return jvp(clipped_gradient, (z,), (v,))[1].square().sum()

    examples = gradients.examples
    with differentiable_twice():
        return vmap(one, in_dims=(0, examples.in_dims, 0))(examples.z, examples.public, directions).detach()


def random_directions(like: Tensor, count: int, generator: torch.Generator) -> list[Tensor]:
    """``count`` times one unit vector per example, [batch, d] as ``like``; an example's coordinates are distinct."""
    order = torch.rand(like.shape, generator=generator).argsort(dim=1)[:, :count].to(like.device)
    return [torch.zeros_like(like).scatter(1, order[:, k : k + 1], 1.0) for k in range(order.shape[1])]


def examples_of(model: Model, count: int, device: str, *, train_steps: int = 0) -> ExampleGradients:
    """Examples of the model's data, with its initial weights or its weights after some plain steps."""
    torch.manual_seed(0)
    network = model.build().to(device)
    x, y = (part.to(device) for part in model.data(max(count, 64 * train_steps)))
    optimizer = torch.optim.Adam(network.parameters(), lr=5e-4)
    for _ in range(train_steps):
        rows = torch.randint(len(y), (64,)).to(device)
        optimizer.zero_grad()
        LOSS(network(x[rows]), y[rows]).backward()
        optimizer.step()
    return ExampleGradients.build(network, LOSS, x[:count], y[:count], model.private)


def coordinate_cost(
    model: Model, device: str, examples: int, repeats: int, max_memory: int = 2**34
) -> dict[str, float | None]:
    """The cost of one coordinate for a whole batch: seconds and, on a GPU, GB.

    It is timed on ``examples`` examples, in pieces that fit into ``max_memory`` bytes, and extrapolated linearly.
    """
    gradients = examples_of(model, examples, device)
    (directions,) = random_directions(gradients.examples.z, 1, torch.Generator().manual_seed(0))
    at_once = max(1, max_memory // (_VECTORS * gradients.num_parameters * gradients.dtype.itemsize))

    def whole_batch() -> None:
        for rows, part in gradients.examples.chunks(at_once):
            clipped_column_norms(replace(gradients, examples=part), directions[rows])

    peak = peak_gigabytes(lambda: whole_batch, device, calls=1)
    timed(whole_batch, device)
    seconds = statistics.median(timed(whole_batch, device) for _ in range(repeats))
    return {"coordinate_seconds": seconds * model.batch(device) / examples, "coordinate_peak_gb": peak}


def mapped_coordinate_cost(model: Model, device: str, examples: int) -> float:
    """The same, reverse over reverse, as torchfil's products with J."""
    gradients = examples_of(model, examples, device)
    jacobian = ClippedJacobian(gradients, CLIP, 1.0)
    (direction,) = random_directions(gradients.examples.z, 1, torch.Generator().manual_seed(0))
    seconds = [timed(lambda: jacobian.matvec(direction), device) for _ in range(4)][1:]
    return statistics.median(seconds) * model.batch(device) / examples


def error_of_coordinates(r_coordinate: float, count: float, d: int) -> float:
    """The relative standard error of ``count`` of d coordinates, if one has ``r_coordinate``."""
    return r_coordinate * math.sqrt(1 / count - 1 / d)


def column_estimates(gradients: ExampleGradients, coordinates: int, generator: torch.Generator) -> Tensor:
    """Estimates d·‖J̃e_i‖² of the trace from single coordinates, [coordinates, batch], distinct for each example."""
    d = gradients.num_coordinates
    directions = random_directions(gradients.examples.z, min(coordinates, d), generator)
    return torch.stack([d * clipped_column_norms(gradients, v) for v in directions]).double()


def traces(gradients: ExampleGradients, probes: int, draws: int, generator: torch.Generator) -> Tensor:
    """Estimates of tr I from a number of probes, drawn repeatedly, [draws, batch]."""
    batch = PrivateBatch(gradients, Mechanism.build(1.0, 1.0), plan(gradients))
    estimates = [batch.estimate("trace", "weight-probes", probes, generator).value for _ in range(draws)]
    return torch.stack(estimates).double()


def relative_std(samples: Tensor) -> float:
    """Root mean square over examples of std/mean over samples, [samples, batch]."""
    return float((samples.var(dim=0) / samples.mean(dim=0).square()).mean().sqrt())
