"""Slow, obviously correct versions of everything in :mod:`torchfil.fisher`, for tests and for
sceptics.

They work on one example at a time. The clipped gradient is written as in its definition and
differentiated by ``torch.func.jacrev``, through the norm and the clip function; integrals are
computed by brute force.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import jacfwd, jacrev
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchfil.clipping import DEFAULT_CLIP, ClipFunction, get_clip
from torchfil.fisher.gradients import LossFunction
from torchfil.fisher.models import call_with
from torchfil.private import Examples, Inputs, Private, added_to_outputs

_ROWS_AT_ONCE = 256


def clipped_gradients(
    model: nn.Module, loss_fn: LossFunction, inputs: Inputs, targets: object, **settings: Any
) -> Tensor:
    """g̃ = ω g / c(‖g‖ / C′) of each example, [batch, p], for ω of ``clip_weights``, [batch] (None:
    1).

    Settings: max_grad_norm, clip, private and clip_weights, as in
    :func:`torchfil.fisher.exact_fim`.
    """
    functions = _clipped_gradient_functions(model, loss_fn, inputs, targets, **settings)
    return torch.stack([f(z) for f, z in functions]).detach()


def exact_jacobian(
    model: nn.Module,
    loss_fn: LossFunction,
    inputs: Inputs,
    targets: object,
    *,
    mode: str = "reverse",
    **settings: Any,
) -> Tensor:
    """J̃ = ∂g̃/∂z of each example, [batch, p, d].

    By jacrev, or in mode "forward" by jacfwd, cheaper for p ≫ d.

    Settings: max_grad_norm, clip, private and clip_weights, as in
    :func:`torchfil.fisher.exact_fim`.
    """
    differentiate = partial(jacrev, chunk_size=_ROWS_AT_ONCE) if mode == "reverse" else jacfwd
    functions = _clipped_gradient_functions(model, loss_fn, inputs, targets, **settings)
    with sdpa_kernel(SDPBackend.MATH):
        return torch.stack([differentiate(f)(z) for f, z in functions]).detach()


def exact_fim(
    model: nn.Module,
    loss_fn: LossFunction,
    inputs: Inputs,
    targets: object,
    *,
    noise_multiplier: float,
    **settings: Any,
) -> Tensor:
    """J̃ᵀJ̃ / (σC)² of each example, [batch, d, d]; other settings as in :func:`exact_jacobian`."""
    jacobian = exact_jacobian(model, loss_fn, inputs, targets, **settings)
    return jacobian.mT @ jacobian / (noise_multiplier * settings["max_grad_norm"]) ** 2


def poisson_fim(jacobian: Tensor, clipped_gradient: Tensor, noise_std: float, q: float) -> Tensor:
    """The exact Poisson-subsampled FIM of one participation, [batch, d, d], from J̃ [batch, p, d]
    and g̃ [batch, p].

    The factors come from :func:`poisson_amplification` below; a zero gradient counts with κ = q.
    """
    result = []
    for j, g in zip(jacobian.double(), clipped_gradient.double(), strict=True):
        norm = g.norm().item()
        perp, par = poisson_amplification(norm / noise_std, q)
        a = j.mT @ (g / norm) if norm > 0 else torch.zeros_like(j[0])
        result.append(
            (perp * (j.mT @ j - torch.outer(a, a)) + par * torch.outer(a, a)) / noise_std**2
        )
    return torch.stack(result)


def poisson_amplification(rho: float, q: float) -> tuple[float, float]:
    """κ⊥ and κ∥ by two-dimensional numerical integration of the mixture's own Fisher information.

    The release is o ~ q N(m, I) + (1−q) N(0, I) in the plane (s = 1), with m = (ρ, 0). Its Fisher
    information about a shift of m along or across itself is ∫ (∂p)² / p. The example takes part
    with probability q, so one participation counts κ = ∫ (∂p)² / p / q.
    """
    if rho == 0:
        return q, q
    step = min(0.1, 0.5 / rho)
    x = np.arange(-9.0, rho + 16.0, step)[:, None]
    y = np.arange(-9.0, 9.0, 0.1)[None, :]
    base = np.exp(-0.5 * (x**2 + y**2)) / (2 * math.pi)
    moved = np.exp(-0.5 * ((x - rho) ** 2 + y**2)) / (2 * math.pi)
    density = q * moved + (1 - q) * base
    along = q * (x - rho) * moved
    across = q * y * moved
    cell = step * 0.1 / q
    safe = np.where(density > 0, density, 1.0)
    return float((across**2 / safe).sum() * cell), float((along**2 / safe).sum() * cell)


def _clipped_gradient_functions(
    model: nn.Module,
    loss_fn: LossFunction,
    inputs: Inputs,
    targets: object,
    *,
    max_grad_norm: float,
    clip: str | ClipFunction = DEFAULT_CLIP,
    private: Private | None = None,
    clip_weights: Tensor | None = None,
) -> Iterator[tuple[Callable[[Tensor], Tensor], Tensor]]:
    """For each example the function z ↦ g̃, and its z, [d]."""
    clip = get_clip(clip)
    parameters = {k: v.detach() for k, v in model.named_parameters() if v.requires_grad}

    def clipped(one: Examples, z: Tensor) -> Tensor:
        args, kwargs, target, offsets = one.restore(z[None], one.public)

        def loss(parameters: dict[str, Tensor]) -> Tensor:
            with added_to_outputs(model, offsets):
                outputs = call_with(model, parameters, args, kwargs)
            return loss_fn(outputs, target).sum()

        gradient = torch.cat([g.reshape(-1) for g in torch.func.grad(loss)(parameters).values()])
        square = gradient.square().sum()
        # its derivative is 0 at 0
        norm = torch.where(square == 0, 0.0, square.where(square > 0, 1.0).sqrt())
        weight = 1.0 if one.clip_weights is None else float(one.clip_weights)
        return weight * gradient / clip.c(norm / clip.threshold(max_grad_norm))

    examples = replace(
        Examples.build(inputs, targets, private, model=model), clip_weights=clip_weights
    )
    for _, one in examples.chunks(1):
        yield partial(clipped, one), one.z[0]
