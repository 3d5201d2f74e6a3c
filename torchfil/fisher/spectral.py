"""The spectral norm of a Fisher information matrix from its products with vectors.

Both methods work on all examples of a batch at once and give Ritz values, which never exceed the true
norm: lower bounds that converge to it. Lanczos (with full reorthogonalisation) needs far fewer products.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["lanczos", "power_iteration"]


def power_iteration(matvec: Callable[[Tensor], Tensor], start: Tensor, iterations: int) -> Tensor:
    """vᵀIv after that many products, v the normalised iterate; [batch], for ``start`` of shape [batch, d].

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
    """The largest Ritz value of the Krylov space of that many products; [batch], ``start`` [batch, d].

    Exact (to rounding) for ``iterations`` ≥ d, and where the space closes earlier.

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
    if batch == 0:
        return start.new_zeros(0)
    return torch.linalg.eigvalsh(tridiagonal)[:, -1].clamp(min=0)


def _normalised(v: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(v, dim=1, keepdim=True)
    return v / norm.where(norm > 0, torch.ones_like(norm))
