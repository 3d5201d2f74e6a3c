"""Informed reconstruction against DP-SGD: the most likely example behind a whole sequence of noisy gradients.

The attacker sees the weights θ_t and the noisy sums of every step and knows all examples except one. Subtracting the
others' clipped gradients leaves, for each step in which the unknown example z took part,

    r_t = g̃(z; θ_t) + s ξ_t,   ξ_t ~ N(0, I),   s = σC,

and the guess is the maximum of the likelihood, argmin_z Σ_t ‖r_t − g̃(z; θ_t)‖². The Fisher information
E[Σ_t J̃ᵀJ̃] / s² is about this attacker: at small noise the guess reaches the Cramér–Rao bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from torchfil.attacks.base import AttackResult, make_generator
from torchfil.attacks.transcripts import VALUES_AT_ONCE, Transcripts, sum_of_others
from torchfil.utils.text import with_progress

_DAMPING, _DAMPING_RANGE = 1e-3, (1e-9, 1e9)


def informed_reconstruction(
    transcripts: Transcripts,
    target: int | Sequence[int],
    *,
    starts: Tensor | None = None,
    restarts: int = 4,
    iterations: int = 50,
    seed: int | None = None,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> AttackResult:
    """The maximum-likelihood guess of an example from each transcript, by Levenberg–Marquardt from several starts.

    Threat model: the attacker sees all weights and noisy sums, knows who took part in which step, knows every other
    example and the target's label, and has no prior; its guesses are nearly unbiased if the noise is small. The
    target's own private coordinates are read only to measure the error.

    Args:
        transcripts: The releases of one or many runs.
        target: Rows of the attacked examples.
        starts: The starting points of the search, [k, d]; None: the mean of the other examples, and
        restarts: This many of the other examples, drawn at random.
        iterations: The iterations of each search.
        seed: The seed of the random starts; or
        generator: Their source.
        progress: Whether to show a bar.

    Returns:
        The mean squared error per private coordinate over runs, its standard error and squared bias (corrected for the
        variance of the mean, at least 0); ``guesses`` has the guesses of all runs, [m, runs, d].
    """
    rows = [target] if isinstance(target, int) else list(target)
    examples = transcripts.gradients.examples
    source = make_generator(generator, seed, examples.z.device)

    by_example = []
    for row in with_progress(rows, progress, "examples", len(rows)):
        if not 0 <= row < len(examples):
            raise ValueError(f"target={row} is not a row of the {len(examples)} examples")
        others = torch.cat([examples.z[:row], examples.z[row + 1 :]])
        begin = starts if starts is not None else _starts(others, restarts, source, examples.num_coordinates)
        by_example.append(_most_likely(transcripts, row, begin.to(examples.z), iterations))

    guesses = torch.stack(by_example)  # [m, runs, d]
    runs = guesses.shape[1]
    truth = examples.z[rows].unsqueeze(1)
    own = torch.ones_like(examples.z) if examples.is_own is None else examples.is_own.to(examples.z)
    share = (own / own.sum(dim=1, keepdim=True).clamp(min=1))[rows]  # of each coordinate in a mean; 0 at padding
    squared = ((guesses - truth).square() * share.unsqueeze(1)).sum(dim=2)  # [m, runs]
    bias = ((guesses.mean(dim=1) - truth[:, 0]).square() * share).sum(dim=1)
    if runs > 1:  # the mean guess has a random error, too
        bias = (bias - (guesses.var(dim=1) * share).sum(dim=1) / runs).clamp(min=0)

    middle = (examples.z * own).sum(dim=0) / own.sum(dim=0).clamp(min=1)  # the guess of a blind attacker, [d]
    return AttackResult(
        name="informed reconstruction",
        threat_model="sees every noisy gradient, knows the batches, all other examples and the label; no prior",
        ids=rows,
        achieved=squared.mean(dim=1).cpu().numpy(),
        measure="mse",
        trials=runs,
        standard_error=(squared.std(dim=1) / runs**0.5).cpu().numpy() if runs > 1 else None,
        squared_bias=bias.cpu().numpy() if runs > 1 else None,
        guesses=guesses.cpu().numpy(),
        blind=((truth[:, 0] - middle).square() * share).sum(dim=1).cpu().numpy(),
    )


def expected_information(transcripts: Transcripts, row: int) -> Tensor:
    """E[Σ_t J̃ᵀJ̃] / s² of one example, the mean over the recorded runs, [d, d].

    Its bounds: :func:`torchfil.bounds.mse_from_fim` and :func:`torchfil.bounds.mse_from_trace`.
    """
    examples = transcripts.gradients.examples
    total = torch.zeros(
        examples.num_coordinates, examples.num_coordinates, dtype=torch.float64, device=examples.z.device
    )
    for runs in _pieces(transcripts, examples.num_coordinates):
        weights = transcripts.weights[runs]
        z = examples.z[row].expand(len(weights), -1)
        J = _jacobians(transcripts, weights, z, transcripts.public(row))  # [runs, steps, p, d]
        J = J * transcripts.batches[runs, :, row, None, None]
        total += torch.einsum("rtpi,rtpj->ij", J, J).double()
    return total / (len(transcripts.weights) * transcripts.mechanism.noise_std**2)


def mean_jacobian(transcripts: Transcripts, row: int, guesses: Tensor) -> Tensor:
    """∂E[ẑ]/∂z of an attacker, from its guesses [runs, d] in the recorded runs, [d, d]; the identity if unbiased.

    It is Cov(ẑ, ∇ log likelihood), with ∇ log likelihood = Σ_t J̃ᵀ(r_t − g̃) / s². With it, the bound holds for
    biased guesses, too: :func:`torchfil.bounds.mse_biased`.
    """
    examples = transcripts.gradients.examples
    scores = []
    for runs in _pieces(transcripts, examples.num_coordinates):
        problem = _problem(transcripts, runs, row)
        z = examples.z[row].expand(len(problem.weights), -1)
        scores.append(problem.normal_equations(z, problem.residuals(z))[1] / transcripts.mechanism.noise_std**2)
    score = torch.cat(scores)
    guesses = guesses.to(score)
    return (guesses - guesses.mean(dim=0)).mT @ (score - score.mean(dim=0)) / (len(score) - 1)


def _most_likely(transcripts: Transcripts, row: int, starts: Tensor, iterations: int) -> Tensor:
    """The best of the searches from all starts, [runs, d]."""
    pieces = []
    for runs in _pieces(transcripts, starts.shape[1]):
        problem = _problem(transcripts, runs, row)
        ends = [_levenberg_marquardt(problem, start.repeat(len(problem.weights), 1), iterations) for start in starts]
        best = torch.stack([misfit for _, misfit in ends]).argmin(dim=0)  # [runs]
        pieces.append(torch.stack([z for z, _ in ends])[best, torch.arange(len(best), device=best.device)])
    return torch.cat(pieces)


@dataclass(frozen=True)
class _Problem:
    """min_z ‖r − g̃(z)‖² in several runs: weights [runs, steps, p], membership [runs, steps, 1], r [runs, steps, p]."""

    transcripts: Transcripts
    weights: Tensor
    member: Tensor
    remainder: Tensor
    public: Any

    def __getitem__(self, runs: Tensor) -> _Problem:
        return replace(self, weights=self.weights[runs], member=self.member[runs], remainder=self.remainder[runs])

    def residuals(self, z: Tensor) -> Tensor:
        """r − g̃(z), 0 in steps without the example, [runs, steps, p], for guesses z [runs, d] that differ by run."""
        by_step = vmap(lambda w, z: self.transcripts.clipped(w, z, self.public), in_dims=(0, None))
        return (self.remainder - vmap(by_step)(self.weights, z)) * self.member

    def normal_equations(self, z: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
        """JᵀJ, [runs, d, d], and Jᵀ(r − g̃), [runs, d]."""
        J = _jacobians(self.transcripts, self.weights, z, self.public) * self.member.unsqueeze(-1)
        return torch.einsum("rtpi,rtpj->rij", J, J), torch.einsum("rtpi,rtp->ri", J, left)


def _problem(transcripts: Transcripts, runs: slice, row: int) -> _Problem:
    remainder = transcripts.noisy_sums[runs] - sum_of_others(transcripts, runs, row)
    member = transcripts.batches[runs, :, row, None]
    return _Problem(transcripts, transcripts.weights[runs], member, remainder, transcripts.public(row))


def _levenberg_marquardt(problem: _Problem, z: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """Guesses [runs, d] and the remaining sum of squares, [runs].

    A step solves (JᵀJ + μ diag JᵀJ) Δ = Jᵀ(r − g̃); it is kept if it helps, and μ falls or rises accordingly. A run
    is done when its step is below 1e-6 of the guess.
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
        damping[active] = torch.where(better, damping[active] / 4, damping[active] * 4).clamp(*_DAMPING_RANGE)

        active = active[step.abs().amax(dim=1) > 1e-6 * (1 + z[active].abs().amax(dim=1))]
        if len(active) == 0:
            break
    return z, misfit


def _jacobians(transcripts: Transcripts, weights: Tensor, z: Tensor, public: Any) -> Tensor:
    """J̃ = ∂g̃/∂z at weights [runs, steps, p] and guesses z [runs, d], [runs, steps, p, d]."""
    by_step = vmap(lambda w, z: transcripts.clipped_jacobian(w, z, public), in_dims=(0, None))
    return vmap(by_step)(weights, z)


def _pieces(transcripts: Transcripts, d: int) -> list[slice]:
    """Runs that fit in memory together, with their Jacobians."""
    runs, steps, p = transcripts.weights.shape
    size = max(1, VALUES_AT_ONCE // (steps * p * (d + 1)))
    return [slice(i, min(i + size, runs)) for i in range(0, runs, size)]


def _starts(others: Tensor, restarts: int, source: torch.Generator, d: int) -> Tensor:
    """The mean of the other examples, and some of them; the origin if there are none."""
    if len(others) == 0:
        return others.new_zeros(1, d)
    drawn = torch.randperm(len(others), generator=source, device=others.device)[:restarts]
    return torch.cat([others.mean(dim=0, keepdim=True), others[drawn]])
