"""What Fisher information, Rényi divergence and trade-off functions mean for a reconstruction attack.

Each function is a theorem's right-hand side; its docstring says about which attacker it speaks. MSE is the
mean squared error per private coordinate, E‖ẑ − z‖²/d, in the squared unit of the data. A bound of infinity
means that the release carries no information; these values depend on private data and are confidential.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from scipy import optimize
from torch import Tensor

from torchfil.fisher.results import Estimate

__all__ = [
    "attribute_error",
    "mse_biased",
    "mse_from_fim",
    "mse_from_rdp",
    "mse_from_spectral_norm",
    "mse_from_trace",
    "replace_one_rdp",
    "rero",
]


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

    It holds for the MSE in every single direction too. η² must not be an underestimate: an iterated
    ("lower bound") spectral norm gives an approximation of this bound, not the bound.
    """
    return 1.0 / _non_negative(eta_squared, "eta_squared")


def mse_from_fim(fim: Tensor) -> Tensor:
    """Theorem 2, the tightest form: MSE ≥ tr(I⁻¹)/d for every unbiased attacker; [batch] from [batch, d, d].

    Eigenvalues below d·eps·λ_max cannot be told from zero in floating point and are raised to that floor, so
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
        The bound, [batch]. Eigenvalues are floored as in :func:`mse_from_fim`. A zero matrix I leaves the
        squared bias where J_μ is zero (a constant guess), and infinity elsewhere.
    """
    d = fim.shape[-1]
    return (_inverse_trace(fim, mean_jacobian) + bias.square().sum(dim=-1)) / d


def attribute_error(diagonal: Tensor) -> Tensor:
    """The standard error of an unbiased guess of one coordinate: at least 1/sqrt(I_jj), in its own unit.

    The attacker may know every other coordinate. Elementwise; infinity where I_jj = 0.

    Example:
        >>> attribute_error(torch.tensor([0.04, 0.0]))  # an age, in years
        tensor([5., inf])
    """
    return _non_negative(diagonal, "diagonal").rsqrt()


def mse_from_rdp(epsilon: float, diameters: Tensor | Sequence[float]) -> float:
    """Theorem 1 of Guo et al. 2022: MSE ≥ Σ_i diam_i² / (4d (e^ε − 1)), for every unbiased attacker.

    Args:
        epsilon: The order-2 Rényi divergence between runs on data sets that differ in **the value of one
            example**. From an accountant that adds and removes examples (Opacus), take
            :func:`replace_one_rdp`; the paper's own reading, ε_RDP(2) of the accountant, is its ``epsilon``
            taken as is, and is not a theorem for such accountants.
        diameters: The range of each private coordinate, [d].

    Example:
        The paper's: ages in [0, 100] at ε = 2 are safe up to about ±19.

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

    Both neighbours lie one removal from the data set without the example, R. For every p > 1 with
    1/p + 1/p′ = 1 the Rényi divergence has the weak triangle inequality

        D_α(P‖Q) ≤ (α − 1/p)/(α − 1) · D_{pα}(P‖R) + D_{p′(α − 1/p)}(R‖Q).

    At α = 2, p = 2 this is 1.5·ε(4) + ε(3); the smallest value over p is returned.

    Args:
        rdp: α ↦ ε(α), the add/remove RDP of the whole run, as an accountant gives it.
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


def rero(
    prior_success: float | Sequence[float],
    *,
    q: float,
    noise_multiplier: float,
    steps: int,
    num_samples: int = 100_000,
    generator: torch.Generator | None = None,
) -> Estimate:
    """Reconstruction robustness (Hayes et al. 2023): the best success rate of any attacker, biased or not.

    An attacker whose guess from the prior alone succeeds with probability π₀ succeeds after seeing the run
    with probability at most sup {P_μ(E) : P_ν(E) ≤ π₀}, where ν = N(0, σ²I_T) and μ = N(B, σ²I_T) with
    B ~ Bernoulli(q)^T. By Neyman–Pearson, E is a threshold on the likelihood ratio; both sides are sampled.

    Args:
        prior_success: π₀ in (0, 1); several: a curve, from the same sampled runs.
        q: The sampling rate, in (0, 1].
        noise_multiplier: σ > 0; the clipped norm must not exceed ``max_grad_norm``.
        steps: T ≥ 1.
        num_samples: Sampled runs for each of ν and μ.
        generator: Source of randomness.

    Returns:
        An estimate whose standard error covers the sampled threshold and the sampled success, in the shape of
        ``prior_success``: a scalar, or [priors].

    Example:
        Without subsampling and in one step it is Φ(Φ⁻¹(π₀) + 1/σ):

        >>> e = rero(0.1, q=1.0, noise_multiplier=2.0, steps=1, generator=torch.Generator().manual_seed(0))
        >>> exact = torch.special.ndtr(torch.special.ndtri(torch.tensor(0.1)) + 0.5).item()
        >>> abs(e.value.item() - exact) < 4 * e.standard_error.item()
        True
    """
    prior = torch.as_tensor(prior_success, dtype=torch.float64)
    if not bool(((prior > 0) & (prior < 1)).all()) or prior.numel() == 0:
        raise ValueError(f"prior_success={prior_success} must lie strictly between 0 and 1")
    if not 0 < q <= 1:
        raise ValueError(f"q={q} must lie in (0, 1]")
    if not noise_multiplier > 0:
        raise ValueError(f"noise_multiplier={noise_multiplier} must be positive: without noise nothing is robust")
    if steps < 1 or num_samples < 100:
        raise ValueError(f"steps={steps} must be ≥ 1 and num_samples={num_samples} ≥ 100")
    smallest = float(prior.min())
    if smallest * num_samples < 10:
        raise ValueError(
            f"num_samples={num_samples} is too few for prior_success={smallest:g}: the threshold would rest on "
            f"{smallest * num_samples:.1g} samples; take at least {math.ceil(10 / smallest)}"
        )

    # by Neyman and Pearson: E is where the likelihood ratio exceeds its upper quantile under ν
    under_nu = _log_likelihood_ratio(False, q, noise_multiplier, steps, num_samples, generator)
    under_mu = _log_likelihood_ratio(True, q, noise_multiplier, steps, num_samples, generator)
    prior = prior.to(under_nu.device)
    threshold = torch.as_tensor(np.quantile(under_nu.cpu().numpy(), 1 - prior.cpu().numpy())).to(under_nu)

    success = (under_mu > threshold[..., None]).double().mean(dim=-1)
    slope = threshold.exp()  # dP_μ/dP_ν on the border of E
    variance = success * (1 - success) + slope.square() * prior * (1 - prior)
    return Estimate(success, (variance / num_samples).sqrt(), "estimate")


def _log_likelihood_ratio(
    participates: bool,
    q: float,
    sigma: float,
    steps: int,
    num_samples: int,
    generator: torch.Generator | None,
) -> Tensor:
    """log dμ/dν of ``num_samples`` runs drawn from μ (or from ν), [num_samples], one step at a time."""
    device = generator.device if generator is not None else torch.device("cpu")
    total = torch.zeros(num_samples, dtype=torch.float64, device=device)
    log_out = math.log1p(-q) if q < 1 else -math.inf
    for _ in range(steps):
        output = sigma * torch.randn(num_samples, generator=generator, dtype=torch.float64, device=device)
        if participates:
            output += torch.rand(num_samples, generator=generator, dtype=torch.float64, device=device) < q
        inside = math.log(q) + (output - 0.5) / sigma**2
        total += torch.logaddexp(inside, torch.full_like(inside, log_out))
    return total


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
