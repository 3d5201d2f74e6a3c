"""The Fisher information of one private step about each example of a batch: matrix, trace,
diagonal.

Every function takes the model, an ordinary torch loss, a batch and the settings of DP-SGD, and
returns results per example. With s = σC and J̃ the Jacobian of the clipped gradient with respect to
the private coordinates,

    I = J̃ᵀJ̃ / s²                                   (batch membership known)
    I = (κ⊥ (J̃ᵀJ̃ − a aᵀ) + κ∥ a aᵀ) / s²           (subsampled; see torchfil.fisher.amplification)

Memory: the gradients, probes and Jacobian blocks held at once stay below ``max_memory`` bytes,
unless one example needs more. The model's own activations and the result come on top.

These functions and the training engine both use :class:`PrivateBatch`, which processes a batch
chunk by chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from typing_extensions import Required, Unpack  # of torch; in typing since Python 3.11

from torchfil.clipping import ClipFunction, check_clip_weights
from torchfil.fisher.amplification import Amplification, NoAmplification
from torchfil.fisher.estimators import ESTIMATORS, EXACT, Draws, Quantity, check_estimator
from torchfil.fisher.gradients import DEFAULT_MAX_MEMORY, ExampleGradients, LossFunction
from torchfil.fisher.mechanism import Mechanism
from torchfil.fisher.operator import ClippedJacobian, Jacobian
from torchfil.fisher.recording import Plan, RecordedJacobian, UnsupportedCallError
from torchfil.fisher.recording import plan as make_plan
from torchfil.fisher.results import Estimate
from torchfil.private import Inputs, Private
from torchfil.utils.trees import concatenated

# vectors of length p per example: g, ĝ, a probe's image and what autograd holds
_WORKING_VECTORS = 8
_FEW_CONVOLUTIONS = 0.25  # of the layers
_SMALL_PASS = 2**24  # bytes; above, several probes no longer fit into a CPU's cache
_MOST_PROBES_AT_ONCE = 8
# a block of Jacobian columns, as vmap's inner and outer results and their square
_COPIES_OF_COLUMNS = 3


class StepSettings(TypedDict, total=False):
    """The settings of one private step, as every function here takes them.

    Attributes:
        max_grad_norm: C, as in Opacus. Required.
        noise_multiplier: σ, as in Opacus. Required.
        clip: "smooth" (the default), "gelu", "gelu-paper", "hard", "rsqrt", or a registered
            function.
        amplification: The effect of subsampling; None: none.
        private: Which coordinates are private; None: every floating-point input.
        clip_weights: ω in (0, 1] of each example, [batch], which multiplies its clipped gradient;
            held fixed.
    """

    max_grad_norm: Required[float]
    noise_multiplier: Required[float]
    clip: str | ClipFunction
    amplification: str | Amplification | None
    private: Private | None
    clip_weights: Tensor | Sequence[float] | None


@dataclass(frozen=True)
class Measurement:
    """The results of one pass over a batch.

    Attributes:
        estimates: The requested quantities of the FIM.
        norm: ‖g‖ before clipping, [batch].
        susceptibility: ∂(‖g̃‖/s)²/∂z = 2‖g̃‖a/s², [batch, d] (PLIS), if requested.
        repeated: Whether errors come from the spread of probes; a single probe has a limit instead.
    """

    estimates: dict[Quantity, Estimate]
    norm: Tensor
    susceptibility: Tensor | None = None
    repeated: bool = True

    def without_noise(self) -> Measurement:
        """The measurement without any noise: exactly ±∞ in place of every number that is not 0."""

        def limit(value: Tensor) -> Tensor:
            return torch.where(value == 0, value, value.sign() * math.inf)

        estimates = {
            name: Estimate.exact(limit(estimate.value)) for name, estimate in self.estimates.items()
        }
        slope = None if self.susceptibility is None else limit(self.susceptibility)
        return Measurement(estimates, self.norm, slope)


@dataclass(frozen=True)
class PrivateBatch:
    """Examples with their model and loss, and the mechanism that releases their gradients.

    Attributes:
        gradients: The examples' gradients.
        mechanism: How they are released.
        plan: The result of an earlier trial of the recorded pass; None: not tried yet.
    """

    gradients: ExampleGradients
    mechanism: Mechanism
    plan: Plan | None = None

    @classmethod
    def build(
        cls,
        model: nn.Module,
        loss_fn: LossFunction,
        inputs: Inputs,
        targets: object,
        private: Private | None = None,
        clip_weights: Tensor | Sequence[float] | None = None,
        **settings: Any,
    ) -> PrivateBatch:
        """Check everything and bind it together.

        The other settings are those of :meth:`Mechanism.build`.
        """
        mechanism = Mechanism.build(**settings)
        gradients = ExampleGradients.build(model, loss_fn, inputs, targets, private)
        if clip_weights is None:
            return cls(gradients, mechanism)

        weights = torch.as_tensor(clip_weights, dtype=torch.float64, device=gradients.device)
        if weights.shape != (len(gradients),):
            raise ValueError(
                f"clip_weights has shape {list(weights.shape)} for a batch of {len(gradients)} "
                "examples; give one weight for each"
            )
        check_clip_weights(weights)
        return cls(
            replace(gradients, examples=replace(gradients.examples, clip_weights=weights)),
            mechanism,
        )

    def estimate(self, quantity: Quantity, *options: Any, **named: Any) -> Estimate:
        """One quantity of each example's FIM; the other arguments are those of :meth:`measure`."""
        return self.measure((quantity,), *options, **named).estimates[quantity]

    def measure(
        self,
        quantities: Sequence[Quantity],
        estimator: str,
        num_probes: int = 1,
        generator: torch.Generator | None = None,
        max_memory: int = DEFAULT_MAX_MEMORY,
        susceptibility: bool = False,
    ) -> Measurement:
        """Several quantities of each example's FIM from the same probes, and the gradients' norms.

        Args:
            quantities: Any of "trace", "diagonal", "matrix".
            estimator: The name of an estimator.
            num_probes: The number of probes.
            generator: Source of randomness.
            max_memory: See the module's docstring.
            susceptibility: Whether to compute the PLIS, too.
        """
        if not num_probes >= 1:
            raise ValueError(f"num_probes={num_probes} must be at least 1")
        check_estimator(estimator)
        exact = estimator == EXACT

        # the exact estimator holds columns of J and draws nothing; any other holds one vector and
        # draws probes
        columns, vectors = working_vectors(self.gradients, estimator, max_memory)
        seeds = () if exact else Draws.seeds_from(num_probes, generator)
        one_pass = not exact and self.mechanism.shares is None and len(self.gradients)
        batch = replace(self, plan=(self.plan or make_plan(self.gradients)) if one_pass else None)
        draws = Draws(seeds, columns, batch.probes_at_once(num_probes, max_memory))

        def measured(batch: PrivateBatch) -> Measurement:
            parts = [
                batch.measured(jacobian, quantities, estimator, draws, susceptibility)
                for _, jacobian in batch.chunks(max_memory, vectors)
            ]
            return concatenated(parts)

        try:
            return measured(batch)
        except UnsupportedCallError:  # of a batch that is not as the trial's
            return measured(replace(self, plan=None))

    def measured(
        self,
        jacobian: Jacobian,
        quantities: Sequence[Quantity],
        estimator: str,
        draws: Draws,
        susceptibility: bool = False,
    ) -> Measurement:
        """:meth:`measure` for one chunk of the batch, with given draws."""
        mechanism, noiseless = self.mechanism, self.mechanism.noiseless
        if noiseless:  # infinite weights times 0 would be NaN: measure with noise, then remove it
            mechanism = replace(mechanism, noise_multiplier=1.0, amplification=NoAmplification())
        estimates = ESTIMATORS[estimator](jacobian, mechanism, quantities, draws)
        slope = None
        if susceptibility:
            factor = 2 * jacobian.clipped_norm / mechanism.noise_std**2
            slope = factor[:, None] * jacobian.clipped_norm_gradient()
        found = Measurement(estimates, jacobian.norm, slope, len(draws.seeds) != 1)
        return found.without_noise() if noiseless else found

    def probes_at_once(self, num_probes: int, max_memory: int) -> int:
        """How many weight probes to process together: several if they fit and this is known to be
        faster.

        On a CPU, small passes take up to half the time with eight probes; convolutions take
        slightly more.
        """
        if (
            self.plan is None
            or self.plan.convolutions > _FEW_CONVOLUTIONS
            or self.gradients.device.type != "cpu"
        ):
            return 1
        held = max(1, self.plan.bytes_per_example * len(self.gradients))
        return (
            1
            if held > _SMALL_PASS
            else max(1, min(num_probes, _MOST_PROBES_AT_ONCE, max_memory // held))
        )

    def chunks(
        self, max_memory: int, vectors: int, *, measured: bool = True
    ) -> Iterator[tuple[slice, Jacobian]]:
        """The batch as Jacobians, in pieces that ``max_memory`` allows.

        Each from a recorded pass if the plan fits.

        If it is not ``measured``, only the gradients' norms, sums and products are needed.
        """
        mechanism, recorded = (
            self.mechanism,
            self.plan if self.plan is not None and self.plan.fits else None,
        )
        size = (
            vectors * self.gradients.bytes_per_vector
            if recorded is None
            else recorded.bytes_per_example
        )
        for rows, part in self.gradients.chunks(max_memory, size):
            if recorded is not None:
                yield rows, RecordedJacobian(part, mechanism, measured=measured)
            else:
                yield (
                    rows,
                    ClippedJacobian(
                        part, mechanism.clip, mechanism.max_grad_norm, mechanism.shares
                    ),
                )


def working_vectors(
    gradients: ExampleGradients, estimator: str, max_memory: int
) -> tuple[int, int]:
    """How many columns of J to hold per example, and how many vectors of length p are needed."""
    if estimator != EXACT:
        return 1, _WORKING_VECTORS
    room = max_memory // gradients.bytes_per_vector - _WORKING_VECTORS
    columns = min(gradients.num_coordinates, max(1, room // _COPIES_OF_COLUMNS))
    return columns, _COPIES_OF_COLUMNS * columns + _WORKING_VECTORS


def exact_fim(
    model: nn.Module,
    loss_fn: LossFunction,
    inputs: Inputs,
    targets: object,
    *,
    max_memory: int = DEFAULT_MAX_MEMORY,
    **step: Unpack[StepSettings],
) -> Tensor:
    """The full Fisher information matrix of each example, [batch, d, d].

    Args:
        model: Any module that treats the examples of a batch independently.
        loss_fn: ``loss_fn(outputs, targets)``, an ordinary torch loss; mean or sum reduction.
        inputs: A tensor, a tuple of positional inputs or a dict of keyword inputs, [batch, …] each.
        targets: The targets for ``loss_fn``, [batch, …].
        max_memory: See the module's docstring.
        **step: ``max_grad_norm`` and ``noise_multiplier``, and if needed ``clip``,
            ``amplification``, ``private`` and ``clip_weights``: see :class:`StepSettings`.

    Example:
        Linear regression, clipped softly by c = sqrt(1 + t²), at a gradient of norm 0 (a perfect
        fit): the Jacobian of g = 2 (w·x − y) x at w·x = y is J = 2 x wᵀ, and J̃ = J.

        >>> model = nn.Linear(2, 1, bias=False)
        >>> _ = model.weight.data.copy_(torch.tensor([[1.0, 2.0]]))
        >>> x, y = torch.tensor([[1.0, 1.0]]), torch.tensor([[3.0]])
        >>> exact_fim(
        ...     model, nn.MSELoss(), x, y, max_grad_norm=1.0, noise_multiplier=2.0, clip="rsqrt"
        ... )
        tensor([[[2., 4.],
                 [4., 8.]]])
    """
    batch = PrivateBatch.build(model, loss_fn, inputs, targets, **step)
    return batch.estimate("matrix", EXACT, max_memory=max_memory).value


def fim_trace(
    model: nn.Module,
    loss_fn: LossFunction,
    inputs: Inputs,
    targets: object,
    *,
    estimator: str = "weight-probes",
    num_probes: int = 8,
    generator: torch.Generator | None = None,
    max_memory: int = DEFAULT_MAX_MEMORY,
    **step: Unpack[StepSettings],
) -> Estimate:
    """The trace of each example's Fisher information matrix, [batch]; η̄² = trace / d.

    Args:
        model: As in :func:`exact_fim`, and so for all arguments that are not named here.
        loss_fn: See there.
        inputs: See there.
        targets: See there.
        estimator: "exact" or "weight-probes".
        num_probes: The number of random vectors. "exact" needs none.
        generator: Source of randomness; None: torch's global one. The result does not depend on how
            ``max_memory`` cuts the batch.
        max_memory: See the module's docstring.
        **step: See :class:`StepSettings`.
    """
    batch = PrivateBatch.build(model, loss_fn, inputs, targets, **step)
    return batch.estimate("trace", estimator, num_probes, generator, max_memory)


def fim_diagonal(
    model: nn.Module,
    loss_fn: LossFunction,
    inputs: Inputs,
    targets: object,
    *,
    estimator: str = "weight-probes",
    num_probes: int = 8,
    generator: torch.Generator | None = None,
    max_memory: int = DEFAULT_MAX_MEMORY,
    **step: Unpack[StepSettings],
) -> Estimate:
    """The Fisher information about each single coordinate, [batch, d]; "exact" or "weight-probes".

    An attacker's unbiased guess of coordinate j errs by at least 1/sqrt(I_jj). Arguments as in
    :func:`fim_trace`.
    """
    batch = PrivateBatch.build(model, loss_fn, inputs, targets, **step)
    return batch.estimate("diagonal", estimator, num_probes, generator, max_memory)


def lanczos(matvec: Callable[[Tensor], Tensor], start: Tensor, iterations: int) -> Tensor:
    """The largest Ritz value of the Krylov space after ``iterations`` products, [batch]; ``start``
    is [batch, d].

    It is exact (up to rounding) for ``iterations`` ≥ d, or if the space closes earlier; infinite
    for an example whose products are not finite.

    Example:
        >>> matrix = torch.diag(torch.tensor([1.0, 2.0, 5.0]))
        >>> bool(lanczos(lambda v: v @ matrix, torch.ones(1, 3), 3).allclose(torch.tensor([5.0])))
        True
    """
    batch, d = start.shape
    steps = min(iterations, d)
    basis = torch.zeros(steps, batch, d, dtype=start.dtype, device=start.device)
    tridiagonal = torch.zeros(batch, steps, steps, dtype=start.dtype, device=start.device)
    normalised = partial(nn.functional.normalize, dim=1, eps=torch.finfo(start.dtype).tiny)
    v = normalised(start)
    scale = torch.zeros_like(start[:, 0])
    for k in range(steps):
        basis[k] = v
        image = matvec(v)
        tridiagonal[:, k, k] = (v * image).sum(dim=1)
        for _ in range(2):  # twice is enough
            image = image - torch.einsum(
                "kbd,kb->bd", basis, torch.einsum("kbd,bd->kb", basis, image)
            )
        beta = torch.linalg.vector_norm(image, dim=1)
        scale = torch.maximum(scale, torch.maximum(tridiagonal[:, k, k].abs(), beta))
        closed = beta <= 10 * torch.finfo(start.dtype).eps * scale
        beta = torch.where(closed, torch.zeros_like(beta), beta)
        v = torch.where(closed[:, None], torch.zeros_like(image), normalised(image))
        if k + 1 < steps:
            tridiagonal[:, k, k + 1] = tridiagonal[:, k + 1, k] = beta
    return largest_eigenvalue(tridiagonal)


def largest_eigenvalue(matrix: Tensor) -> Tensor:
    """λ_max of symmetric matrices, [batch] from [batch, d, d], at least 0.

    Infinite if an entry is not finite.
    """
    finite = matrix.isfinite().all(dim=(1, 2))
    largest = torch.linalg.eigvalsh(matrix.where(finite[:, None, None], torch.zeros_like(matrix)))[
        :, -1
    ].clamp(min=0)
    return torch.where(finite, largest, torch.inf)
