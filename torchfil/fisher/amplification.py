r"""What an attacker loses by not knowing which steps used the example: factors on the Fisher information.

An example that takes part in a step adds (κ⊥ (J̃ᵀJ̃ − a aᵀ) + κ∥ a aᵀ) / s² to its Fisher information;
this module gives κ⊥ and κ∥. With ρ = ‖g̃‖/s, ξ ~ N(0, 1) and w(ξ) = q / (q + (1−q) exp(−ρξ − ρ²/2)),

    exact, Poisson sampling:   κ⊥ = E[w(ξ)],   κ∥ = E[ξ² w(ξ)]
    Theorem 4 (Guo et al. 2022):  κ⊥ = κ∥ = q / (q + (1−q) e^{−ε}), which fails with probability δ
    none:                      κ⊥ = κ∥ = 1

Threat model of the exact factors: the attacker sees every noisy gradient and knows every other example,
the hyper-parameters and who else is in each batch, but not which steps used the target.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal, Protocol

import torch
from scipy import optimize, special
from torch import Tensor

from torchfil.fisher.poisson import check_rate, poisson_amplification

__all__ = [
    "Adjacency",
    "Amplification",
    "NoAmplification",
    "PoissonAmplification",
    "Theorem4Amplification",
    "agreed_rate",
    "analytic_gaussian_epsilon",
    "available_amplifications",
    "check_amplification",
    "classical_gaussian_epsilon",
    "get_amplification",
    "name_of_amplification",
    "register_amplification",
]

Adjacency = Literal["replace-one", "add-remove"]
_SENSITIVITIES = {"replace-one": 2.0, "add-remove": 1.0}  # over C


class Amplification(Protocol):
    """Maps ρ = ‖g̃‖/s, the sampling rate q and the noise multiplier σ to the factors (κ⊥, κ∥).

    :class:`torchfil.fisher.Mechanism` passes q and σ at every use, so that the factors follow a noise scheduler.

    Attributes:
        secret_batches: Whether the attacker does not know who was in a batch. If so, which batches draw an example is
            part of the randomness of a run, and q must be known.
    """

    @property
    def secret_batches(self) -> bool:
        """Whether the attacker does not know who was in a batch."""
        ...

    def factors(self, rho: Tensor, q: float | None, sigma: float) -> tuple[Tensor, Tensor]:
        """κ⊥ and κ∥ at each ρ, [batch] each.

        Args:
            rho: ‖g̃‖/s, [batch].
            q: The rate at which examples are drawn; None: unknown, which secret batches do not allow.
            sigma: The noise multiplier.
        """
        ...


@dataclass(frozen=True)
class NoAmplification:
    """κ⊥ = κ∥ = 1: the attacker knows which batches held the example, or the sampler is not Poisson."""

    secret_batches: ClassVar[bool] = False

    def factors(self, rho: Tensor, q: float | None = None, sigma: float | None = None) -> tuple[Tensor, Tensor]:
        """Ones."""
        return torch.ones_like(rho), torch.ones_like(rho)


@dataclass(frozen=True)
class PoissonAmplification:
    """The exact factors of Poisson sampling with rate q; no δ, no failure probability.

    Attributes:
        q: The probability with which an example is in a batch, in (0, 1]; None: that of the mechanism.

    Example:
        >>> perp, par = PoissonAmplification(q=0.01).factors(torch.tensor([0.5]))
        >>> round(perp.item(), 4), round(par.item(), 4)
        (0.0128, 0.0158)
    """

    q: float | None = None
    secret_batches: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.q is not None:
            check_rate(self.q)

    def factors(self, rho: Tensor, q: float | None = None, sigma: float | None = None) -> tuple[Tensor, Tensor]:
        """κ⊥ = E[w(ξ)], κ∥ = E[ξ² w(ξ)]."""
        return poisson_amplification(rho, agreed_rate(self, q))


@dataclass(frozen=True)
class Theorem4Amplification:
    """Guo et al. 2022, Theorem 4: κ = q / (q + (1−q) e^{−ε}), valid up to a failure probability δ per step.

    Attributes:
        q: The sampling rate, in (0, 1]; None: that of the mechanism.
        delta: The chance that the bound fails in one step.
        epsilon_method: "analytic" (Balle & Wang 2018, exact for every σ) or "classical" (the paper's
            sqrt(2 ln(1.25/δ)) Δ/σ, a theorem only if it is below 1).
        adjacency: "replace-one" (the paper's; sensitivity 2C) or "add-remove" (sensitivity C).
        norm_bound: The largest clipped norm over C: 1 for a calibrated clip, 1.11522 for "gelu-paper".

    Example:
        >>> amplification = Theorem4Amplification(epsilon_method="classical", norm_bound=1.115)
        >>> round(amplification.epsilon(sigma=5.0), 3)
        2.887
        >>> round(amplification.kappa(q=0.01, sigma=5.0), 4)
        0.1534
    """

    q: float | None = None
    delta: float = 1e-9
    epsilon_method: Literal["analytic", "classical"] = "analytic"
    adjacency: Adjacency = "replace-one"
    norm_bound: float = 1.0
    secret_batches: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.q is not None:
            check_rate(self.q)
        if not 0 < self.delta < 1:
            raise ValueError(f"delta={self.delta} must lie strictly between 0 and 1")
        if self.adjacency not in _SENSITIVITIES:
            raise ValueError(f"adjacency={self.adjacency!r} must be one of {list(_SENSITIVITIES)}")
        if self.epsilon_method not in ("analytic", "classical"):
            raise ValueError(f"epsilon_method={self.epsilon_method!r} must be 'analytic' or 'classical'")

    def epsilon(self, sigma: float) -> float:
        """ε of one step with noise multiplier σ, at δ."""
        return _epsilon(self.epsilon_method, sigma / (_SENSITIVITIES[self.adjacency] * self.norm_bound), self.delta)

    def kappa(self, q: float | None, sigma: float) -> float:
        """κ = q / (q + (1−q) e^{−ε})."""
        rate = agreed_rate(self, q)
        return rate / (rate + (1 - rate) * math.exp(-self.epsilon(sigma)))

    def factors(self, rho: Tensor, q: float | None, sigma: float) -> tuple[Tensor, Tensor]:
        """κ for both."""
        kappa = self.kappa(q, sigma)
        return torch.full_like(rho, kappa), torch.full_like(rho, kappa)


def agreed_rate(amplification: Amplification, q: float | None) -> float:
    """The rate of an amplification or, if it has none, the rate q.

    Raises:
        ValueError: Neither is known, or they differ.
    """
    own: float | None = getattr(amplification, "q", None)
    name = type(amplification).__name__
    if own is None and q is None:
        raise ValueError(
            f"{name} needs the rate at which examples are drawn, which is unknown: give it as {name}(q=…), or as "
            "sample_rate to the mechanism; if the attacker knows the batches, use NoAmplification()"
        )
    if own is not None and q is not None and not math.isclose(own, q, rel_tol=1e-9):
        raise ValueError(
            f"{name} was made for the sampling rate q={own:g}, but examples are drawn at rate {q:g}; leave q out of "
            f"{name}(), so that it follows the sampler"
        )
    rate = q if own is None else own
    assert rate is not None
    check_rate(rate)
    return rate


_REGISTRY: dict[str, Amplification] = {}


def available_amplifications() -> tuple[str, ...]:
    """The names of all registered amplifications."""
    return tuple(sorted(_REGISTRY))


def get_amplification(amplification: str | Amplification) -> Amplification:
    """The amplification of that name; an object is checked and returned.

    Example:
        >>> get_amplification("poisson")
        PoissonAmplification(q=None)
    """
    if not isinstance(amplification, str):
        check_amplification(amplification)
        return amplification
    if amplification not in _REGISTRY:
        raise ValueError(
            f"amplification={amplification!r} is unknown; use one of {', '.join(available_amplifications())}, an "
            "object, or register your own with torchfil.fisher.register_amplification"
        )
    return _REGISTRY[amplification]


def register_amplification(name: str, amplification: Amplification, *, overwrite: bool = False) -> None:
    """Register an amplification under a name, for everything that takes ``amplification=``.

    Raises:
        ValueError: The name is taken.
        TypeError: The object is not an :class:`Amplification`.
    """
    if name in _REGISTRY and not overwrite:
        raise ValueError(f"amplification {name!r} is already registered; pass overwrite=True to replace it")
    check_amplification(amplification)
    _REGISTRY[name] = amplification


def name_of_amplification(amplification: Amplification) -> str:
    """The name of an equal registered object, else of one of the same class; else the object's own description.

    Example:
        >>> name_of_amplification(NoAmplification())
        'none'
    """
    alike = [name for name, registered in _REGISTRY.items() if registered == amplification]
    of_class = [name for name, registered in _REGISTRY.items() if type(registered) is type(amplification)]
    return next(iter(alike + of_class), repr(amplification))


def check_amplification(amplification: Any) -> None:
    """Raise unless the object says whether batches are secret and its ``factors`` takes ρ, q and σ."""
    name = type(amplification).__name__
    if not callable(getattr(amplification, "factors", None)):
        raise TypeError(
            f"amplification={amplification!r} has no method factors(rho, q, sigma); use an object that has it, or one "
            f"of the names {', '.join(available_amplifications())}"
        )
    if not isinstance(getattr(amplification, "secret_batches", None), bool):
        raise TypeError(
            f"{name} does not say whether the attacker knows who was in a batch; set secret_batches = True on it if "
            "batches are secret, False if they are known"
        )
    try:
        inspect.signature(amplification.factors).bind(None, None, None)
    except TypeError as error:
        raise TypeError(
            f"{name}.factors{inspect.signature(amplification.factors)} would be called with three arguments, ρ, the "
            f"sampling rate q and the noise multiplier σ ({error}); define factors(self, rho, q, sigma)"
        ) from error


register_amplification("none", NoAmplification())
register_amplification("poisson", PoissonAmplification())
register_amplification("theorem4", Theorem4Amplification())


def classical_gaussian_epsilon(noise_multiplier: float, delta: float) -> float:
    """ε = sqrt(2 ln(1.25/δ)) / σ for sensitivity 1; a theorem only if it is below 1 (Dwork & Roth 2014)."""
    _check_noise_and_delta(noise_multiplier, delta)
    return math.sqrt(2 * math.log(1.25 / delta)) / noise_multiplier


def analytic_gaussian_epsilon(noise_multiplier: float, delta: float) -> float:
    """The smallest ε ≥ 0 with δ(ε) = Φ(1/2σ − εσ) − e^ε Φ(−1/2σ − εσ) ≤ δ, for sensitivity 1.

    Exact for every σ (Balle & Wang 2018).

    Example:
        >>> round(analytic_gaussian_epsilon(1.0, 1e-5), 4)
        4.3772
    """
    _check_noise_and_delta(noise_multiplier, delta)
    sigma = noise_multiplier

    def excess(epsilon: float) -> float:
        log_first = special.log_ndtr(0.5 / sigma - epsilon * sigma)
        log_second = epsilon + special.log_ndtr(-0.5 / sigma - epsilon * sigma)
        log_delta = log_first + math.log1p(-math.exp(min(log_second - log_first, -1e-300)))
        return float(log_delta - math.log(delta))

    if excess(0.0) <= 0:
        return 0.0
    high = 1.0
    while excess(high) > 0:
        high *= 2
    return float(optimize.brentq(excess, 0.0, high, xtol=1e-13, rtol=1e-13))


@lru_cache(maxsize=64)
def _epsilon(method: str, noise_multiplier: float, delta: float) -> float:
    """ε for sensitivity 1; cached, because every step needs it."""
    compute = analytic_gaussian_epsilon if method == "analytic" else classical_gaussian_epsilon
    return compute(noise_multiplier, delta)


def _check_noise_and_delta(noise_multiplier: float, delta: float) -> None:
    if not noise_multiplier > 0:
        raise ValueError(f"noise_multiplier={noise_multiplier} must be positive: without noise no ε is finite")
    if not 0 < delta < 1:
        raise ValueError(f"delta={delta} must lie strictly between 0 and 1")
