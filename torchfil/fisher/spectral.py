"""The spectral norm of a Fisher information matrix from its products with vectors.

Both methods work on all examples of a batch at once and give Ritz values, which never exceed the true
norm: lower bounds that converge to it. Lanczos (with full reorthogonalisation) needs far fewer products.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["lanczos", "largest_eigenvalue", "nystrom_norm", "power_iteration"]


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
    if matrix.shape[0] == 0:
        return matrix.new_zeros(0)
    finite = matrix.isfinite().all(dim=(1, 2))
    largest = torch.linalg.eigvalsh(matrix.where(finite[:, None, None], torch.zeros_like(matrix)))[:, -1].clamp(min=0)
    return torch.where(finite, largest, torch.inf)


def nystrom_norm(sketch: Tensor, test_matrix: Tensor) -> Tensor:
    """The largest eigenvalue of Y (ΩᵀY)⁺ Yᵀ for Y = IΩ, [batch]; never above ‖I‖₂ for a PSD matrix I.

    With C = (ΩᵀY)^{-1/2}, it is the largest eigenvalue of C YᵀY C, an r×r matrix. It is infinite if Y is not finite.
    """
    if sketch.shape[0] == 0:
        return sketch.new_zeros(0)
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
