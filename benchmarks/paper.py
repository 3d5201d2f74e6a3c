"""The method of Guo et al. 2022, as the paper computes it: what a coordinate costs.

tr J̃ᵀJ̃ ≈ d/k · Σ_i ‖J̃e_i‖² over k random coordinates i, each column J̃e_i from one forward-mode
product (jvp) of the clipped per-example gradient, mapped over the examples (vmap):
``vmap(jvp(clip(grad(loss))))``. The paper uses k = 50.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.func import grad, jvp, vmap

from benchmarks.loops import Model
from benchmarks.measuring import peak_gigabytes, timed
from torchfil.clipping import get_clip
from torchfil.fisher.gradients import ExampleGradients, differentiable_twice

__all__ = ["PAPER_COORDINATES", "clipped_column_norms", "coordinate_cost", "examples_of"]

PAPER_COORDINATES = 50
CLIP = get_clip("gelu")
LOSS = nn.CrossEntropyLoss()
_VECTORS = 6  # of length p per example: gradient, clipped gradient and their tangents


def clipped_column_norms(
    gradients: ExampleGradients, directions: Tensor, max_grad_norm: float = 1.0
) -> Tensor:
    """‖J̃v‖² of every example, [batch], from vmap(jvp(clip(grad(loss)))), for v of shape [batch,
    d].
    """

    def one(z: Tensor, public: object, v: Tensor) -> Tensor:
        def clipped_gradient(z: Tensor) -> Tensor:
            parts = grad(gradients.loss_of_one)(gradients.parameters, z, public)
            g = torch.cat([part.reshape(-1) for part in parts.values()])
            over = g.square().sum().sqrt() / CLIP.threshold(max_grad_norm) - 1
            # GELU(t − 1) + 1, in a form that jvp supports everywhere
            return g / (over * torch.special.ndtr(over) + 1)

        return jvp(clipped_gradient, (z,), (v,))[1].square().sum()

    examples = gradients.examples
    with differentiable_twice():
        return vmap(one, in_dims=(0, examples.in_dims, 0))(
            examples.z, examples.public, directions
        ).detach()


def examples_of(model: Model, count: int, device: str) -> ExampleGradients:
    """Examples of the model's data, with its initial weights."""
    torch.manual_seed(0)
    network = model.build().to(device)
    x, y = (part.to(device) for part in model.data(count))
    return ExampleGradients.build(network, LOSS, x, y, model.private)


def coordinate_cost(
    model: Model, device: str, examples: int, repeats: int, max_memory: int = 2**34
) -> dict[str, float | None]:
    """The cost of one coordinate for a whole batch: seconds and, on a GPU, GB.

    It is timed on ``examples`` examples, in pieces that fit into ``max_memory`` bytes, and
    extrapolated linearly.
    """
    gradients = examples_of(model, examples, device)
    directions = torch.zeros_like(gradients.examples.z)
    directions[:, 0] = 1.0
    at_once = max(1, max_memory // (_VECTORS * gradients.num_parameters * gradients.dtype.itemsize))

    def whole_batch() -> None:
        for rows, part in gradients.examples.chunks(at_once):
            clipped_column_norms(replace(gradients, examples=part), directions[rows])

    peak = peak_gigabytes(lambda: whole_batch, device, calls=1)
    timed(whole_batch, device)
    seconds = statistics.median(timed(whole_batch, device) for _ in range(repeats))
    return {
        "coordinate_seconds": seconds * model.batch(device) / examples,
        "coordinate_peak_gb": peak,
    }
