"""The Fisher information of one private step about each example of a batch: matrix, trace, diagonal, norm.

Every function takes the model, an ordinary torch loss, a batch and the settings of DP-SGD, and returns results per
example. With s = σC and J̃ the Jacobian of the clipped gradient with respect to the private coordinates,

    I = J̃ᵀJ̃ / s²                                   (batch membership known)
    I = (κ⊥ (J̃ᵀJ̃ − a aᵀ) + κ∥ a aᵀ) / s²           (subsampled; see torchfil.fisher.amplification)

Memory: the gradients, probes and Jacobian blocks held at once stay below ``max_memory`` bytes, unless one example needs
more. The model's own activations and the result come on top.

:func:`power_iteration` and :func:`lanczos` find the norm from products with vectors, for all examples of a batch at
once. They give Ritz values, which never exceed the true norm: lower bounds that converge to it. Lanczos (with full
reorthogonalisation) needs far fewer products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor, nn
from typing_extensions import Required, Unpack  # of torch; in typing since Python 3.11

from torchfil.clipping import ClipFunction
from torchfil.fisher.amplification import Amplification
from torchfil.fisher.batch import PrivateBatch
from torchfil.fisher.gradients import DEFAULT_MAX_MEMORY, LossFunction
from torchfil.fisher.results import Estimate
from torchfil.private import Inputs, Private


class StepSettings(TypedDict, total=False):
    """The settings of one private step, as every function here takes them.

    Attributes:
        max_grad_norm: C, as in Opacus. Required.
        noise_multiplier: σ, as in Opacus. Required.
        clip: "smooth" (the default), "gelu", "gelu-paper", "hard", "rsqrt", or a registered function.
        amplification: The effect of subsampling; None: none.
        private: Which coordinates are private; None: every floating-point input.
        clip_weights: ω in (0, 1] of each example, [batch], which multiplies its clipped gradient; held fixed.
    """

    max_grad_norm: Required[float]
    noise_multiplier: Required[float]
    clip: str | ClipFunction
    amplification: str | Amplification | None
    private: Private | None
    clip_weights: Tensor | Sequence[float] | None


def exact_fim(
    model: nn.Module,
    loss_fn: LossFunction,
    inputs: Inputs,
    targets: Any,
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
        **step: ``max_grad_norm`` and ``noise_multiplier``, and if needed ``clip``, ``amplification``, ``private`` and
            ``clip_weights``: see :class:`StepSettings`.

    Example:
        Linear regression, clipped softly by c = sqrt(1 + t²), at a gradient of norm 0 (a perfect fit): the
        Jacobian of g = 2 (w·x − y) x at w·x = y is J = 2 x wᵀ, and J̃ = J.

        >>> model = nn.Linear(2, 1, bias=False)
        >>> _ = model.weight.data.copy_(torch.tensor([[1.0, 2.0]]))
        >>> x, y = torch.tensor([[1.0, 1.0]]), torch.tensor([[3.0]])
        >>> exact_fim(model, nn.MSELoss(), x, y, max_grad_norm=1.0, noise_multiplier=2.0, clip="rsqrt")
        tensor([[[2., 4.],
                 [4., 8.]]])
    """
    batch = PrivateBatch.build(model, loss_fn, inputs, targets, **step)
    return batch.estimate("matrix", "exact", max_memory=max_memory).value


def fim_matrix(
    model: nn.Module,
    loss_fn: LossFunction,
    inputs: Inputs,
    targets: Any,
    *,
    estimator: str = "exact",
    num_probes: int = 8,
    generator: torch.Generator | None = None,
    max_memory: int = DEFAULT_MAX_MEMORY,
    **step: Unpack[StepSettings],
) -> Estimate:
    """The full Fisher information matrix with its error, [batch, d, d]; "exact" or "weight-probes".

    Arguments as in :func:`exact_fim` and :func:`fim_trace`.
    """
    batch = PrivateBatch.build(model, loss_fn, inputs, targets, **step)
    return batch.estimate("matrix", estimator, num_probes, generator, max_memory)


def fim_trace(
    model: nn.Module,
    loss_fn: LossFunction,
    inputs: Inputs,
    targets: Any,
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
        estimator: "exact", "coordinates", "input-probes", "weight-probes", or a registered one.
        num_probes: The number of random vectors (or coordinates). "exact" needs none.
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
    targets: Any,
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


def fim_spectral_norm(
    model: nn.Module,
    loss_fn: LossFunction,
    inputs: Inputs,
    targets: Any,
    *,
    method: Literal["lanczos", "power", "exact"] = "lanczos",
    iterations: int = 20,
    generator: torch.Generator | None = None,
    max_memory: int = DEFAULT_MAX_MEMORY,
    **step: Unpack[StepSettings],
) -> Estimate:
    """η² = ‖I‖₂ of each example, [batch].

    Args:
        model: As in :func:`exact_fim`, and so for all arguments that are not named here.
        loss_fn: See there.
        inputs: See there.
        targets: See there.
        method: "lanczos" or "power" (lower bounds that converge to the norm from below, two Jacobian
            products per iteration), or "exact" (all of I and its eigenvalues).
        iterations: The number of products with I.
        generator: Source of the random starting vector.
        max_memory: See the module's docstring.
        **step: See :class:`StepSettings`.
    """
    if method not in ("lanczos", "power", "exact"):
        raise ValueError(f"method={method!r} must be 'lanczos', 'power' or 'exact'")
    if iterations < 1:
        raise ValueError(f"iterations={iterations} must be at least 1")
    batch = PrivateBatch.build(model, loss_fn, inputs, targets, **step)
    if method == "exact":
        return Estimate.exact(largest_eigenvalue(batch.estimate("matrix", "exact", max_memory=max_memory).value))
    solve = lanczos if method == "lanczos" else power_iteration
    value = batch.spectral_norm(solve, iterations, generator, max_memory)
    return Estimate(value, torch.zeros_like(value), "lower bound")


def power_iteration(matvec: Callable[[Tensor], Tensor], start: Tensor, iterations: int) -> Tensor:
    """vᵀIv after ``iterations`` products, [batch], with v the normalised iterate; ``start`` has shape [batch, d].

    Example:
        >>> matrix = torch.diag(torch.tensor([1.0, 2.0, 5.0]))
        >>> bool(power_iteration(lambda v: v @ matrix, torch.ones(1, 3), 20).allclose(torch.tensor([5.0])))
        True
    """
    v = _normalised(start)
    value = torch.zeros_like(start[:, 0])
    for _ in range(iterations):
        image = matvec(v)
        value = (v * image).sum(dim=1)
        v = _normalised(image)
    return value


def lanczos(matvec: Callable[[Tensor], Tensor], start: Tensor, iterations: int) -> Tensor:
    """The largest Ritz value of the Krylov space after ``iterations`` products, [batch]; ``start`` is [batch, d].

    It is exact (up to rounding) for ``iterations`` ≥ d, or if the space closes earlier; infinite for an example whose
    products are not finite.

    Example:
        >>> matrix = torch.diag(torch.tensor([1.0, 2.0, 5.0]))
        >>> bool(lanczos(lambda v: v @ matrix, torch.ones(1, 3), 3).allclose(torch.tensor([5.0])))
        True
    """
    batch, d = start.shape
    steps = min(iterations, d)
    basis = torch.zeros(steps, batch, d, dtype=start.dtype, device=start.device)
    tridiagonal = torch.zeros(batch, steps, steps, dtype=start.dtype, device=start.device)
    v = _normalised(start)
    scale = torch.zeros_like(start[:, 0])
    for k in range(steps):
        basis[k] = v
        image = matvec(v)
        tridiagonal[:, k, k] = (v * image).sum(dim=1)
        for _ in range(2):  # twice is enough
            image = image - torch.einsum("kbd,kb->bd", basis, torch.einsum("kbd,bd->kb", basis, image))
        beta = torch.linalg.vector_norm(image, dim=1)
        scale = torch.maximum(scale, torch.maximum(tridiagonal[:, k, k].abs(), beta))
        closed = beta <= 10 * torch.finfo(start.dtype).eps * scale
        beta = torch.where(closed, torch.zeros_like(beta), beta)
        v = torch.where(closed[:, None], torch.zeros_like(image), _normalised(image))
        if k + 1 < steps:
            tridiagonal[:, k, k + 1] = tridiagonal[:, k + 1, k] = beta
    return largest_eigenvalue(tridiagonal)


def largest_eigenvalue(matrix: Tensor) -> Tensor:
    """λ_max of symmetric matrices, [batch] from [batch, d, d], at least 0; infinite if an entry is not finite."""
    finite = matrix.isfinite().all(dim=(1, 2))
    largest = torch.linalg.eigvalsh(matrix.where(finite[:, None, None], torch.zeros_like(matrix)))[:, -1].clamp(min=0)
    return torch.where(finite, largest, torch.inf)


def nystrom_norm(sketch: Tensor, test_matrix: Tensor) -> Tensor:
    """The largest eigenvalue of Y (ΩᵀY)⁺ Yᵀ for Y = IΩ, [batch]; never above ‖I‖₂ for a PSD matrix I.

    With C = (ΩᵀY)^{-1/2}, it is the largest eigenvalue of C YᵀY C, an r×r matrix. It is infinite if Y is not finite.
    """
    finite = sketch.isfinite().all(dim=(1, 2))
    sketch = sketch.where(finite[:, None, None], torch.zeros_like(sketch))

    core = test_matrix.to(sketch).mT @ sketch  # ΩᵀIΩ, [batch, r, r]
    values, vectors = torch.linalg.eigh((core + core.mT) / 2)
    floor = values[:, -1:].clamp(min=0) * 1e-10
    keep = values > floor
    inverse_root = torch.where(keep, values.where(keep, torch.ones_like(values)).rsqrt(), torch.zeros_like(values))
    half = sketch @ (vectors * inverse_root[:, None, :])  # Y C, [batch, d, r]
    return torch.where(finite, torch.linalg.matrix_norm(half, ord=2).square(), torch.inf)


def _normalised(v: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(v, dim=1, keepdim=True)
    return v / norm.where(norm > 0, torch.ones_like(norm))
