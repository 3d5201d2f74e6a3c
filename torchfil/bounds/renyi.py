"""What the order-2 Rényi divergence of a run means for a reconstruction attack (Theorem 1 of Guo et al. 2022)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from scipy import optimize
from torch import Tensor


def mse_from_rdp(epsilon: float, diameters: Tensor | Sequence[float]) -> float:
    """Theorem 1 of Guo et al. 2022: MSE ≥ Σ_i diam_i² / (4d (e^ε − 1)), for every unbiased attacker.

    Args:
        epsilon: The order-2 Rényi divergence between runs on data sets that differ in **the value of one
            example**. For an accountant that adds and removes examples (Opacus), use
            :func:`replace_one_rdp`; the paper's own reading uses the accountant's ε_RDP(2) directly, which is not a
            theorem for such accountants.
        diameters: The range of each private coordinate, [d].

    Example:
        The paper's example: ages in [0, 100] at ε = 2 are safe up to about ±19.

        >>> round(mse_from_rdp(2.0, [100.0]) ** 0.5, 1)
        19.8
    """
    squares = torch.as_tensor(diameters, dtype=torch.float64).square()
    if squares.ndim != 1 or squares.numel() == 0:
        raise ValueError(f"diameters must be one number per private coordinate, got shape {tuple(squares.shape)}")
    if not epsilon >= 0:
        raise ValueError(f"epsilon={epsilon} must be ≥ 0")
    if epsilon == 0:
        return math.inf
    return squares.mean().item() / 4 * math.exp(-epsilon) / -math.expm1(-epsilon)


def replace_one_rdp(rdp: Callable[[float], float], *, order: float = 2.0) -> float:
    """D_α between neighbours that differ in one example's value, from RDP under adding or removing one.

    Both neighbours are one removal away from the data set without the example, R. For every p > 1 with
    1/p + 1/p′ = 1 the Rényi divergence has the weak triangle inequality

        D_α(P‖Q) ≤ (α − 1/p)/(α − 1) · D_{pα}(P‖R) + D_{p′(α − 1/p)}(R‖Q).

    At α = 2, p = 2 this is 1.5·ε(4) + ε(3); the smallest value over p is returned.

    Args:
        rdp: α ↦ ε(α), the add/remove RDP of the whole run, from an accountant.
        order: α.

    Example:
        For a Gaussian mechanism, ε(α) = α/2σ², at σ = 1 the true replace-one divergence D₂ is 4:

        >>> bound = replace_one_rdp(lambda alpha: alpha / 2)
        >>> 4 <= bound <= 1.5 * 4 / 2 + 3 / 2
        True
    """
    if not order > 1:
        raise ValueError(f"order={order} must exceed 1")

    def total(p: float) -> float:
        conjugate = p / (p - 1)
        return (order - 1 / p) / (order - 1) * rdp(p * order) + rdp(conjugate * (order - 1 / p))

    best = optimize.minimize_scalar(lambda t: total(1 + math.exp(t)), bounds=(-4.0, 4.0), method="bounded")
    return min(float(best.fun), total(2.0))
