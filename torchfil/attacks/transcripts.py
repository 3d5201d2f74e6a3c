"""Recorded runs of DP-SGD as an attacker sees them, and the most likely example behind such a run.

A recording holds weights, noisy sums and batches. The informed attacker sees the weights θ_t and
the noisy sums of every step and knows all examples except one. Subtracting the others' clipped
gradients leaves, for each step in which the unknown example z took part,

    r_t = g̃(z; θ_t) + s ξ_t,   ξ_t ~ N(0, I),   s = σC,

and the guess is the maximum of the likelihood, argmin_z Σ_t ‖r_t − g̃(z; θ_t)‖². The Fisher
information E[Σ_t J̃ᵀJ̃] / s² is about this attacker: at small noise the guess reaches the
Cramér–Rao bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from torchfil.attacks.base import AttackResult, Seed, make_generator, mean_of_trials
from torchfil.clipping import DEFAULT_CLIP, ClipFunction
from torchfil.fisher.gradients import ExampleGradients, LossFunction, flatten
from torchfil.fisher.mechanism import Mechanism
from torchfil.private import Inputs, Private
from torchfil.utils.given import Targets
from torchfil.utils.text import with_progress
from torchfil.utils.trees import map_tensors

VALUES_AT_ONCE = 2**24
_DAMPING, _DAMPING_RANGE = 1e-3, (1e-9, 1e9)


@dataclass(frozen=True)
class Transcripts:
    """What DP-SGD released in several runs, and what else the attacker knows.

    Attributes:
        weights: θ_t before each step, [runs, steps, p].
        noisy_sums: Σ g̃ + s ξ_t of each step, [runs, steps, p].
        batches: Which examples took part, [runs, steps, n] booleans; known to the attacker.
        gradients: The model, the loss and all examples; an attack reads the other examples and the
            target's label.
        mechanism: Clipping and noise.
        sample_rate: q.
        noise: sξ_t, [runs, steps, p]: an attacker who knows all others gets it from the sums; this
            saves computing their part.
    """

    weights: Tensor
    noisy_sums: Tensor
    batches: Tensor
    gradients: ExampleGradients
    mechanism: Mechanism
    sample_rate: float
    noise: Tensor

    def clipped(self, weights: Tensor, z: Tensor, public: object) -> Tensor:
        """g̃ of one example at one vector of weights, [p]; a function of z [d]."""
        g = flatten(grad(self.gradients.loss_of_one)(self.gradients.unflatten(weights), z, public))
        return g * self.mechanism.clip.scale(g.norm(), self.mechanism.max_grad_norm)

    def clipped_jacobian(self, weights: Tensor, z: Tensor, public: object) -> Tensor:
        """J̃ = φ J + φ′ ĝ (gᵀJ), ĝ = g/‖g‖, of one example, [p, d].

        The columns of J = ∂g/∂z by Je = ∂⟨∂ℓ/∂z, e⟩/∂θ.
        """
        here = replace(self.gradients, parameters=self.gradients.unflatten(weights))
        basis = torch.eye(len(z), dtype=z.dtype, device=z.device)
        J = vmap(lambda e: here.jvp_of_one(z, public, e), out_dims=1)(basis)
        g = flatten(grad(here.loss_of_one)(here.parameters, z, public))
        norm, clip, bound = g.norm(), self.mechanism.clip, self.mechanism.max_grad_norm
        unit = g / norm.clamp(min=torch.finfo(g.dtype).tiny)
        return clip.scale(norm, bound) * J + clip.scale_derivative(norm, bound) * torch.outer(
            unit, g @ J
        )

    def public(self, row: int) -> object:
        """The public part of one example: its target, its public inputs."""
        return map_tensors(lambda leaf: leaf[row], self.gradients.examples.public)

    def pieces(self, vectors: int) -> list[slice]:
        """Runs that fit in memory together, with that many vectors of length p in every step."""
        runs, steps, p = self.weights.shape
        size = max(1, VALUES_AT_ONCE // (steps * p * vectors))
        return [slice(i, min(i + size, runs)) for i in range(0, runs, size)]


def record_dpsgd(
    model: nn.Module,
    loss_fn: LossFunction,
    inputs: Inputs,
    targets: Targets,
    *,
    steps: int,
    lr: float,
    max_grad_norm: float,
    noise_multiplier: float,
    sample_rate: float = 1.0,
    clip: str | ClipFunction = DEFAULT_CLIP,
    private: Private | None = None,
    runs: int = 1,
    seed: Seed = None,
    absent: Sequence[int] = (),
    progress: bool = False,
) -> Transcripts:
    """Train ``runs`` times side by side from the model's current weights: θ ← θ − lr (Σ g̃ + s ξ) /
    (q n).

    This is for tiny networks: all weights of all runs are kept. It uses plain SGD with Poisson
    batches at rate q.

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
        seed: The seed of noise and batches, or a generator.
        absent: Rows that no batch draws; everything else stays the same.
        progress: Whether to show a bar.
    """
    if not 0 < sample_rate <= 1:
        raise ValueError(f"sample_rate={sample_rate} must lie in (0, 1]")
    gradients = ExampleGradients.build(model, loss_fn, inputs, targets, private)
    mechanism = Mechanism.build(max_grad_norm, noise_multiplier, clip)
    n, p = len(gradients), gradients.num_parameters
    source = make_generator(seed, gradients.device)

    theta = flatten(gradients.parameters).expand(runs, p)
    weights, sums, noises = (theta.new_empty(runs, steps, p) for _ in range(3))
    batches = torch.rand(runs, steps, n, generator=source, device=gradients.device) < sample_rate
    batches[:, :, list(absent)] = False
    transcripts = Transcripts(weights, sums, batches, gradients, mechanism, sample_rate, noises)
    for t in with_progress(range(steps), progress, "private steps", steps):
        weights[:, t] = theta
        noise = torch.randn(runs, p, generator=source, dtype=theta.dtype, device=theta.device)
        noises[:, t] = mechanism.noise_std * noise
        sums[:, t] = sum_of_clipped(transcripts, theta, batches[:, t]) + noises[:, t]
        theta = theta - lr / (sample_rate * n) * sums[:, t]
    return transcripts


def at_every_step(
    function: Callable[[Tensor, Tensor], Tensor], weights: Tensor, z: Tensor
) -> Tensor:
    """function(w, z) at weights w of [runs, steps, p], and at z of [runs, d], the same in all steps
    of a run.
    """
    return vmap(vmap(function, in_dims=(0, None)))(weights, z)


def sum_of_clipped(transcripts: Transcripts, weights: Tensor, members: Tensor) -> Tensor:
    """Σ g̃ over the members [runs, n] of each run's batch at its weights [runs, p]; [runs, p]."""
    examples = transcripts.gradients.examples
    by_example = vmap(transcripts.clipped, in_dims=(None, 0, examples.in_dims))
    sums = []
    # a GPU spends its time launching many small kernels
    room = VALUES_AT_ONCE * (16 if weights.is_cuda else 1)
    size = max(1, room // max(1, len(examples) * weights.shape[1]))
    for w, m in zip(weights.split(size), members.split(size), strict=True):
        # [runs, n, p]
        clipped = vmap(by_example, in_dims=(0, None, None))(w, examples.z, examples.public)
        sums.append(torch.einsum("rn,rnp->rp", m.to(clipped.dtype), clipped))
    return torch.cat(sums)


def informed_reconstruction(
    transcripts: Transcripts,
    target: int | Sequence[int],
    *,
    starts: Tensor | None = None,
    restarts: int = 4,
    iterations: int = 50,
    seed: Seed = None,
    progress: bool = False,
) -> AttackResult:
    """The maximum-likelihood guess of an example from each transcript, by Levenberg–Marquardt from
    several starts.

    Threat model: the attacker sees all weights and noisy sums, knows who took part in which step,
    knows every other example and the target's label, and has no prior; its guesses are nearly
    unbiased if the noise is small. The target's own private coordinates are read only to measure
    the error.

    Args:
        transcripts: The releases of one or many runs.
        target: Rows of the attacked examples.
        starts: The starting points of the search, [k, d]; None: the mean of the other examples, and
        restarts: This many of the other examples, drawn at random.
        iterations: The iterations of each search.
        seed: The seed of the random starts, or a generator.
        progress: Whether to show a bar.

    Returns:
        The mean squared error per private coordinate over runs, its standard error and squared bias
        (corrected for the variance of the mean, at least 0); ``guesses`` has the guesses of all
        runs, [m, runs, d].
    """
    rows = [target] if isinstance(target, int) else list(target)
    examples = transcripts.gradients.examples
    source = make_generator(seed, examples.z.device)

    by_example = []
    for row in with_progress(rows, progress, "examples", len(rows)):
        begin = _starts(examples.z, row, restarts, source) if starts is None else starts
        by_example.append(_most_likely(transcripts, row, begin.to(examples.z), iterations))

    guesses = torch.stack(by_example)  # [m, runs, d]
    runs = guesses.shape[1]
    truth = examples.z[rows].unsqueeze(1)
    own = torch.ones_like(examples.z) if examples.is_own is None else examples.is_own.to(examples.z)
    # of each coordinate in a mean; 0 at padding
    share = (own / own.sum(dim=1, keepdim=True).clamp(min=1))[rows]
    squared = ((guesses - truth).square() * share.unsqueeze(1)).sum(dim=2)  # [m, runs]
    bias = ((guesses.mean(dim=1) - truth[:, 0]).square() * share).sum(dim=1)
    if runs > 1:  # the mean guess has a random error, too
        bias = (bias - (guesses.var(dim=1) * share).sum(dim=1) / runs).clamp(min=0)

    # the guess of a blind attacker, [d]
    middle = (examples.z * own).sum(dim=0) / own.sum(dim=0).clamp(min=1)
    blind = ((truth[:, 0] - middle).square() * share).sum(dim=1)
    threat_model = (
        "sees every noisy gradient, knows the batches, all other examples and the label; no prior"
    )
    more = {"squared_bias": bias if runs > 1 else None, "guesses": guesses, "blind": blind}
    return mean_of_trials("informed reconstruction", threat_model, rows, squared, "mse", **more)


def expected_information(transcripts: Transcripts, row: int) -> Tensor:
    """E[Σ_t J̃ᵀJ̃] / s² of one example, the mean over the recorded runs, [d, d].

    Its bounds: :func:`torchfil.bounds.mse_from_fim` and :func:`torchfil.bounds.mse_from_trace`.
    """
    z, public = transcripts.gradients.examples.z[row], transcripts.public(row)
    total = torch.zeros(len(z), len(z), dtype=torch.float64, device=z.device)
    for runs in transcripts.pieces(len(z) + 1):
        weights = transcripts.weights[runs]
        # [runs, steps, p, d]
        J = _jacobians(transcripts, weights, z.expand(len(weights), -1), public)
        J = J * transcripts.batches[runs, :, row, None, None]
        total += torch.einsum("rtpi,rtpj->ij", J, J).double()
    return total / (len(transcripts.weights) * transcripts.mechanism.noise_std**2)


def mean_jacobian(transcripts: Transcripts, row: int, guesses: Tensor) -> Tensor:
    """∂E[ẑ]/∂z of an attacker, from its guesses [runs, d] in the recorded runs, [d, d].

    The identity if unbiased.

    It is Cov(ẑ, ∇ log likelihood), with ∇ log likelihood = Σ_t J̃ᵀ(r_t − g̃) / s². With it, the
    bound holds for biased guesses, too: :func:`torchfil.bounds.mse_biased`.
    """
    truth, scores = transcripts.gradients.examples.z[row], []
    for runs in transcripts.pieces(len(truth) + 1):
        problem = _problem(transcripts, runs, row)
        z = truth.expand(len(problem.weights), -1)
        scores.append(
            problem.normal_equations(z, problem.residuals(z))[1]
            / transcripts.mechanism.noise_std**2
        )
    score = torch.cat(scores)
    guesses = guesses.to(score)
    return (guesses - guesses.mean(dim=0)).mT @ (score - score.mean(dim=0)) / (len(score) - 1)


def _most_likely(transcripts: Transcripts, row: int, starts: Tensor, iterations: int) -> Tensor:
    """The best of the searches from all starts, [runs, d]."""
    pieces = []
    for runs in transcripts.pieces(starts.shape[1] + 1):
        problem = _problem(transcripts, runs, row)
        ends = [
            _levenberg_marquardt(problem, start.repeat(len(problem.weights), 1), iterations)
            for start in starts
        ]
        best = torch.stack([misfit for _, misfit in ends]).argmin(dim=0)  # [runs]
        pieces.append(
            torch.stack([z for z, _ in ends])[best, torch.arange(len(best), device=best.device)]
        )
    return torch.cat(pieces)


@dataclass(frozen=True)
class _Problem:
    """min_z ‖r − g̃(z)‖² in several runs: weights [runs, steps, p], membership [runs, steps, 1], r
    [runs, steps, p].
    """

    transcripts: Transcripts
    weights: Tensor
    member: Tensor
    remainder: Tensor
    public: object

    def __getitem__(self, runs: Tensor) -> _Problem:
        return replace(
            self,
            weights=self.weights[runs],
            member=self.member[runs],
            remainder=self.remainder[runs],
        )

    def residuals(self, z: Tensor) -> Tensor:
        """r − g̃(z), 0 in steps without the example, [runs, steps, p], for guesses z [runs, d] that
        differ by run.
        """
        clipped = at_every_step(
            lambda w, z: self.transcripts.clipped(w, z, self.public), self.weights, z
        )
        return (self.remainder - clipped) * self.member

    def normal_equations(self, z: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
        """JᵀJ, [runs, d, d], and Jᵀ(r − g̃), [runs, d]."""
        J = _jacobians(self.transcripts, self.weights, z, self.public) * self.member.unsqueeze(-1)
        return torch.einsum("rtpi,rtpj->rij", J, J), torch.einsum("rtpi,rtp->ri", J, left)


def _problem(transcripts: Transcripts, runs: slice, row: int) -> _Problem:
    """That of an example, whose r is the noisy sums without the clipped gradients of all others."""
    weights, members = transcripts.weights[runs], transcripts.batches[runs].clone()
    members[..., row] = False
    others = [
        sum_of_clipped(transcripts, weights[:, t], members[:, t]) for t in range(weights.shape[1])
    ]
    remainder = transcripts.noisy_sums[runs] - torch.stack(others, dim=1)
    return _Problem(
        transcripts,
        weights,
        transcripts.batches[runs, :, row, None],
        remainder,
        transcripts.public(row),
    )


def _levenberg_marquardt(problem: _Problem, z: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """Guesses [runs, d] and the remaining sum of squares, [runs].

    A step solves (JᵀJ + μ diag JᵀJ) Δ = Jᵀ(r − g̃); it is kept if it helps, and μ falls or rises
    accordingly. A run is done when its step is below 1e-6 of the guess.
    """
    z = z.clone()
    left = problem.residuals(z)
    misfit, damping = left.square().sum(dim=(1, 2)), torch.full_like(z[:, 0], _DAMPING)
    active = torch.arange(len(z), device=z.device)

    for _ in range(iterations):
        part, here = problem[active], z[active]
        gram, pull = part.normal_equations(here, left[active])
        diagonal = gram.diagonal(dim1=1, dim2=2)
        floor = 1e-12 * diagonal.amax(dim=1, keepdim=True) + torch.finfo(z.dtype).tiny
        system = gram + torch.diag_embed(damping[active].unsqueeze(1) * diagonal + floor)
        step = torch.linalg.solve_ex(system, pull)[0].nan_to_num(0.0)

        # Kept if it helps; a residual that overflows does not help.
        left_there = part.residuals(here + step)
        there = left_there.square().sum(dim=(1, 2)).nan_to_num(torch.inf)
        better = there < misfit[active]
        kept = active[better]
        z[kept], left[kept], misfit[kept] = (here + step)[better], left_there[better], there[better]
        damping[active] = torch.where(better, damping[active] / 4, damping[active] * 4).clamp(
            *_DAMPING_RANGE
        )

        active = active[step.abs().amax(dim=1) > 1e-6 * (1 + z[active].abs().amax(dim=1))]
        if len(active) == 0:
            break
    return z, misfit


def _jacobians(transcripts: Transcripts, weights: Tensor, z: Tensor, public: object) -> Tensor:
    """J̃ = ∂g̃/∂z at weights [runs, steps, p] and guesses z [runs, d], [runs, steps, p, d]."""
    return at_every_step(lambda w, z: transcripts.clipped_jacobian(w, z, public), weights, z)


def _starts(z: Tensor, row: int, restarts: int, source: torch.Generator) -> Tensor:
    """The mean of the other examples, and some of them; the origin if there are none."""
    others = torch.cat([z[:row], z[row + 1 :]])
    if len(others) == 0:
        return torch.zeros_like(z)
    drawn = torch.randperm(len(others), generator=source, device=others.device)[:restarts]
    return torch.cat([others.mean(dim=0, keepdim=True), others[drawn]])
