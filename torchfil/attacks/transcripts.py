"""Recordings of whole runs of DP-SGD, as an attacker sees them: weights, noisy sums, batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from torchfil.attacks.base import make_generator
from torchfil.clipping import DEFAULT_CLIP, ClipFunction
from torchfil.fisher.gradients import ExampleGradients, LossFunction, flatten
from torchfil.fisher.mechanism import Mechanism
from torchfil.private import Private
from torchfil.utils.text import with_progress
from torchfil.utils.trees import map_tensors

VALUES_AT_ONCE = 2**24


@dataclass(frozen=True)
class Transcripts:
    """What DP-SGD released in several runs, and what else the attacker knows.

    Attributes:
        weights: θ_t before each step, [runs, steps, p].
        noisy_sums: Σ g̃ + s ξ_t of each step, [runs, steps, p].
        batches: Which examples took part, [runs, steps, n] booleans; known to the attacker.
        gradients: The model, the loss and all examples; an attack reads the other examples and the target's label.
        mechanism: Clipping and noise.
        sample_rate: q.
        noise: sξ_t, [runs, steps, p]: an attacker who knows all others gets it from the sums; this saves computing
            their part.
    """

    weights: Tensor
    noisy_sums: Tensor
    batches: Tensor
    gradients: ExampleGradients
    mechanism: Mechanism
    sample_rate: float
    noise: Tensor

    def clipped(self, weights: Tensor, z: Tensor, public: Any) -> Tensor:
        """g̃ of one example at one vector of weights, [p]; a function of z [d]."""
        g = flatten(grad(self.gradients.loss_of_one)(self.gradients.unflatten(weights), z, public))
        return g * self.mechanism.clip.scale(g.norm(), self.mechanism.max_grad_norm)

    def clipped_jacobian(self, weights: Tensor, z: Tensor, public: Any) -> Tensor:
        """J̃ = φ J + φ′ ĝ (gᵀJ), ĝ = g/‖g‖, of one example, [p, d]; the columns of J = ∂g/∂z by Je = ∂⟨∂ℓ/∂z, e⟩/∂θ."""
        here = replace(self.gradients, parameters=self.gradients.unflatten(weights))
        basis = torch.eye(len(z), dtype=z.dtype, device=z.device)
        J = vmap(lambda e: here.jvp_of_one(z, public, e), out_dims=1)(basis)
        g = flatten(grad(here.loss_of_one)(here.parameters, z, public))
        norm, clip, bound = g.norm(), self.mechanism.clip, self.mechanism.max_grad_norm
        unit = g / norm.clamp(min=torch.finfo(g.dtype).tiny)
        return clip.scale(norm, bound) * J + clip.scale_derivative(norm, bound) * torch.outer(unit, g @ J)

    def public(self, row: int) -> Any:
        """The public part of one example: its target, its public inputs."""
        return map_tensors(lambda leaf: leaf[row], self.gradients.examples.public)


def record_dpsgd(
    model: nn.Module,
    loss_fn: LossFunction,
    inputs: Any,
    targets: Any,
    *,
    steps: int,
    lr: float,
    max_grad_norm: float,
    noise_multiplier: float,
    sample_rate: float = 1.0,
    clip: str | ClipFunction = DEFAULT_CLIP,
    private: Private | None = None,
    runs: int = 1,
    seed: int | None = None,
    generator: torch.Generator | None = None,
    absent: Sequence[int] = (),
    progress: bool = False,
) -> Transcripts:
    """Train ``runs`` times side by side from the model's current weights: θ ← θ − lr (Σ g̃ + s ξ) / (q n).

    This is for tiny networks: all weights of all runs are kept. It uses plain SGD with Poisson batches at rate q.

    Args:
        model: Left unchanged.
        loss_fn: ``loss_fn(outputs, targets)``.
        inputs: [n, …].
        targets: [n, …].
        steps: T.
        lr: The learning rate.
        max_grad_norm: C.
        noise_multiplier: σ.
        sample_rate: q; 1: every example takes part in every step.
        clip: As in :func:`torchfil.fisher.exact_fim`.
        private: What is private; None: every floating-point input.
        runs: The number of runs.
        seed: The seed of noise and batches; or
        generator: Their source.
        absent: Rows that no batch draws; everything else stays the same.
        progress: Whether to show a bar.
    """
    if not 0 < sample_rate <= 1:
        raise ValueError(f"sample_rate={sample_rate} must lie in (0, 1]")
    if steps < 1 or runs < 1:
        raise ValueError(f"steps={steps} and runs={runs} must both be at least 1")
    gradients = ExampleGradients.build(model, loss_fn, inputs, targets, private)
    mechanism = Mechanism.build(max_grad_norm, noise_multiplier, clip)
    n, p = len(gradients), gradients.num_parameters
    source = make_generator(generator, seed, gradients.device)

    theta = flatten(gradients.parameters).expand(runs, p)
    weights, sums = theta.new_empty(runs, steps, p), theta.new_empty(runs, steps, p)
    batches = torch.rand(runs, steps, n, generator=source, device=gradients.device) < sample_rate
    batches[:, :, list(absent)] = False
    noises = torch.empty_like(sums)
    transcripts = Transcripts(weights, sums, batches, gradients, mechanism, sample_rate, noises)
    for t in with_progress(range(steps), progress, "private steps", steps):
        weights[:, t] = theta
        noise = torch.randn(runs, p, generator=source, dtype=theta.dtype, device=theta.device)
        noises[:, t] = mechanism.noise_std * noise
        sums[:, t] = sum_of_clipped(transcripts, theta, batches[:, t]) + noises[:, t]
        theta = theta - lr / (sample_rate * n) * sums[:, t]
    return transcripts


def sum_of_clipped(transcripts: Transcripts, weights: Tensor, members: Tensor) -> Tensor:
    """Σ g̃ over the members [runs, n] of each run's batch at its weights [runs, p]; [runs, p]."""
    examples = transcripts.gradients.examples
    by_example = vmap(transcripts.clipped, in_dims=(None, 0, examples.in_dims))
    sums = []
    room = VALUES_AT_ONCE * (16 if weights.is_cuda else 1)  # a GPU spends its time launching many small kernels
    size = max(1, room // max(1, len(examples) * weights.shape[1]))
    for w, m in zip(weights.split(size), members.split(size), strict=True):
        clipped = vmap(by_example, in_dims=(0, None, None))(w, examples.z, examples.public)  # [runs, n, p]
        sums.append(torch.einsum("rn,rnp->rp", m.to(clipped.dtype), clipped))
    return torch.cat(sums)


def sum_of_others(transcripts: Transcripts, runs: slice, row: int) -> Tensor:
    """The clipped gradients of all examples except one, summed over the batches of these runs, [runs, steps, p]."""
    members = transcripts.batches[runs].clone()
    members[..., row] = False
    weights = transcripts.weights[runs]
    return torch.stack(
        [sum_of_clipped(transcripts, weights[:, t], members[:, t]) for t in range(weights.shape[1])], dim=1
    )
