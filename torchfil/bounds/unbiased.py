"""What Fisher information and Rényi divergence mean for a reconstruction attack (Theorems 2 and 1 of Guo et al. 2022).

All functions except :func:`mse_biased` are about **unbiased** attackers. An attacker who knows what people are like may
err less, at the price of a bias: :mod:`torchfil.bounds.van_trees` and :mod:`torchfil.bounds.reconstruction` bound every
attacker.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from scipy import optimize
from torch import Tensor


def mse_from_trace(trace: Tensor, num_coordinates: int) -> Tensor:
    """Theorem 2 of Guo et al. 2022: MSE ≥ d / tr(I) = 1/η̄², for every unbiased attacker.

    Example:
        >>> mse_from_trace(torch.tensor([8.0, 0.0]), num_coordinates=4)
        tensor([0.5000,    inf])
    """
    if num_coordinates < 1:
        raise ValueError(f"num_coordinates={num_coordinates} must be at least 1")
    return num_coordinates / _non_negative(trace, "trace")


def mse_from_spectral_norm(eta_squared: Tensor) -> Tensor:
    """Theorem 2, the looser form: MSE ≥ 1/η², η² = ‖I‖₂, for every unbiased attacker.

    It also holds for the MSE in every single direction. η² must not be an underestimate: an iterated ("lower bound")
    spectral norm gives an approximation of this bound, not the bound.
    """
    return 1.0 / _non_negative(eta_squared, "eta_squared")


def mse_from_fim(fim: Tensor) -> Tensor:
    """Theorem 2, the tightest form: MSE ≥ tr(I⁻¹)/d for every unbiased attacker; [batch] from [batch, d, d].

    Eigenvalues below d·eps·λ_max cannot be distinguished from zero in floating point and are raised to it, so
    the number stays a valid lower bound; a zero matrix gives infinity.

    Example:
        >>> mse_from_fim(torch.diag(torch.tensor([1.0, 4.0]))[None])
        tensor([0.6250])
    """
    return _inverse_trace(fim, torch.eye(fim.shape[-1], dtype=fim.dtype, device=fim.device)) / fim.shape[-1]


def mse_biased(fim: Tensor, mean_jacobian: Tensor, bias: Tensor) -> Tensor:
    """Theorem 2 in full: MSE ≥ (tr(J_μ I⁻¹ J_μᵀ) + ‖μ(z) − z‖²) / d for an attacker with mean μ(z).

    Args:
        fim: I, [batch, d, d].
        mean_jacobian: J_μ = ∂μ/∂z, [batch, d, d] or [d, d]; the identity for an unbiased attacker.
        bias: μ(z) − z, [batch, d] or [d].

    Returns:
        The bound, [batch]. Eigenvalues are floored as in :func:`mse_from_fim`. With a zero matrix
        I, the bound is the squared bias if J_μ is zero (a constant guess), and infinite otherwise.
    """
    d = fim.shape[-1]
    return (_inverse_trace(fim, mean_jacobian) + bias.square().sum(dim=-1)) / d


def attribute_error(diagonal: Tensor) -> Tensor:
    """The standard error of an unbiased guess of one coordinate: at least 1/sqrt(I_jj), in its own unit.

    The attacker may know every other coordinate. The result is elementwise, and infinite if I_jj = 0.

    Example:
        >>> attribute_error(torch.tensor([0.04, 0.0]))  # an age, in years
        tensor([5., inf])
    """
    return _non_negative(diagonal, "diagonal").rsqrt()


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


def _inverse_trace(fim: Tensor, factor: Tensor) -> Tensor:
    """tr(F I⁻¹ Fᵀ), [batch], with the eigenvalues of I floored at d·eps·λ_max."""
    if fim.ndim != 3 or fim.shape[-1] != fim.shape[-2]:
        raise ValueError(f"fim must have shape [batch, d, d], got {tuple(fim.shape)}")
    if fim.shape[0] == 0:
        return fim.new_zeros(0)
    values, vectors = torch.linalg.eigh(fim)
    floor = fim.shape[-1] * torch.finfo(fim.dtype).eps * values[:, -1:].clamp(min=0)
    rotated = (factor @ vectors).square().sum(dim=-2).expand_as(values)  # [batch, d]
    terms = rotated / torch.maximum(values, floor)
    return torch.where(rotated == 0, torch.zeros_like(terms), terms).sum(dim=-1)


def _non_negative(value: Tensor, name: str) -> Tensor:
    if bool((value < 0).any()):
        raise ValueError(f"{name} must be ≥ 0, got {value[value < 0].flatten()[0].item():g}")
    return value
