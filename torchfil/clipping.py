"""Per-example gradient clipping as a smooth (or hard) function of the gradient's norm.

With g the gradient of one example, n = ‖g‖, C the ``max_grad_norm`` and K the ``norm_bound`` of a
clip function c, the clipped gradient is

    g̃ = φ(n) g,   φ(n) = 1 / c(n / C′),   C′ = C / K if calibrated else C,   K = sup_t t / c(t).

A calibrated clip never exceeds C in norm, so every differential-privacy accountant that assumes the
sensitivity C stays valid. An uncalibrated clip reaches at most K·C.

    "smooth"      (1 + t⁸)^(1/8), the default: K = 1, 0.1 % from "hard" for t < 0.54 and t > 1.86
    "hard"        max(1, t), Opacus's; lacks the derivative that the Cramér–Rao bound needs at t = 1
    "rsqrt"       sqrt(1 + t²): K = 1, and scales gradients down long before they reach C
    "gelu"        GELU(t − 1) + 1 (Guo et al. 2022), calibrated: K = 1.1153
    "gelu-paper"  the same with the paper's threshold: ‖g̃‖ reaches 1.1152 C
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from scipy import optimize
from torch import Tensor
from torch.func import grad, vmap

__all__ = [
    "DEFAULT_CLIP",
    "ClipFunction",
    "available_clips",
    "check_clip_weights",
    "get_clip",
    "register_clip",
    "supremum_of_ratio",
]

DEFAULT_CLIP = "smooth"

_RATIO_GRID = np.concatenate(
    [
        [0.0],
        np.geomspace(1e-12, 1e-3, 2_000)[:-1],
        np.linspace(1e-3, 20.0, 20_000),
        np.geomspace(20.0, 1e9, 4_000),
    ]
)
_ROUND_UP = 1e-4


@dataclass(frozen=True)
class ClipFunction:
    """A clip function c(t), t = n / C′ ≥ 0, with its derivative and K = sup_t t / c(t).

    Guarantees:
        * ``scale`` is finite for every finite norm, zero included; φ(0) = 1 / c(0).
        * calibrated: ‖g̃‖ ≤ ``max_grad_norm`` for every gradient; otherwise ‖g̃‖ ≤ K ·
          ``max_grad_norm``.

    Attributes:
        name: The name under which the function is registered.
        c: t ↦ c(t), elementwise on tensors.
        derivative: t ↦ c′(t), elementwise on tensors.
        norm_bound: K, an upper bound of t / c(t).
        calibrated: Whether the threshold is divided by K.
        smooth: Whether c is continuously differentiable, as the Cramér–Rao bound requires.

    Example:
        >>> clip = get_clip("rsqrt")
        >>> norms = torch.tensor([0.0, 3.0, 4.0e6], dtype=torch.float64)
        >>> clip.scale(norms, 4.0) * norms  # n / sqrt(1 + n²/16)
        tensor([0.0000, 2.4000, 4.0000], dtype=torch.float64)
    """

    name: str
    c: Callable[[Tensor], Tensor] = field(repr=False)
    derivative: Callable[[Tensor], Tensor] = field(repr=False)
    norm_bound: float
    calibrated: bool
    smooth: bool = True

    def threshold(self, max_grad_norm: float | Tensor) -> float | Tensor:
        """C′, the norm at which c's argument is 1."""
        return max_grad_norm / self.norm_bound if self.calibrated else max_grad_norm

    def max_norm(self, max_grad_norm: float) -> float:
        """The largest norm that a clipped gradient can have."""
        return max_grad_norm if self.calibrated else self.norm_bound * max_grad_norm

    def scale(self, norm: Tensor, max_grad_norm: float | Tensor) -> Tensor:
        """φ(n) = 1 / c(n / C′), elementwise; g̃ = φ(n) g."""
        return 1.0 / self.c(norm / self.threshold(max_grad_norm))

    def scale_derivative(self, norm: Tensor, max_grad_norm: float | Tensor) -> Tensor:
        """φ′(n) = −c′(n / C′) / (C′ c(n / C′)²), elementwise."""
        threshold = self.threshold(max_grad_norm)
        t = norm / threshold
        return -self.derivative(t) / (threshold * self.c(t) ** 2)


def check_clip_weights(weights: Tensor, ids: Sequence[Hashable] | None = None) -> None:
    """Raise an error unless every ω, the factor of an example's clipped gradient, lies in (0, 1].

    Args:
        weights: ω, [n].
        ids: The examples' names; None: their numbers.

    Raises:
        ValueError: An ω lies outside; the text names the first such example.

    Example:
        >>> check_clip_weights(torch.tensor([1.0, 0.25]))
    """
    outside = (~((weights > 0) & (weights <= 1))).nonzero().flatten().tolist()
    if not outside:
        return
    row = outside[0]
    value, name = float(weights[row]), row if ids is None else ids[row]
    why = (
        "its clipped gradient could exceed max_grad_norm, and ε would be too small; give at most 1"
    )
    if value == 0:
        why = (
            "an example that adds nothing must not be in the data set at all; leave it out, or "
            "give a small weight"
        )
    elif not value > 1:
        why = "a weight shrinks a gradient; give a number above 0 and at most 1"
    more = f" (and {len(outside) - 1} more)" if len(outside) > 1 else ""
    raise ValueError(f"clip_weights of example {name!r} is {value:g}{more}, not in (0, 1]: {why}")


_REGISTRY: dict[str, ClipFunction] = {}


def available_clips() -> tuple[str, ...]:
    """The names of all registered clip functions."""
    return tuple(sorted(_REGISTRY))


def get_clip(clip: str | ClipFunction) -> ClipFunction:
    """The clip function of that name (a :class:`ClipFunction` is returned unchanged)."""
    if isinstance(clip, ClipFunction):
        return clip
    if clip not in _REGISTRY:
        raise ValueError(
            f"clip={clip!r} is not a registered clip function ({', '.join(available_clips())}); "
            "register your own with torchfil.clipping.register_clip"
        )
    return _REGISTRY[clip]


def supremum_of_ratio(c: Callable[[Tensor], Tensor]) -> float:
    """sup over t in [0, 1e9] of t / c(t), on a grid (0, then from 1e-12 up), refined locally in
    float64.

    Raises:
        ValueError: c returns no tensor; or it is not finite and positive on the grid (including t =
            0, where the gradient is divided by c(0)); or t / c(t) still grows at an end of the
            grid, so no norm bound is known.
    """
    given = c(torch.from_numpy(_RATIO_GRID))
    shape = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
    if shape != _RATIO_GRID.shape:
        raise ValueError(f"a clip function must be elementwise on tensors, got {shape}")
    values = given.detach().to(torch.float64).numpy()
    wrong = _RATIO_GRID[~(np.isfinite(values) & (values > 0))][:3].tolist()
    if wrong:
        raise ValueError(
            f"a clip function must be finite and positive, but c(t) is not at t = {wrong}"
        )

    # t / c(t) must not be largest at an end of the grid: it could be larger still beyond
    ratio = _RATIO_GRID / values
    top = int(ratio.argmax())
    if not bool(ratio[1] <= ratio[2:].max() * (1 + 1e-9)):
        raise ValueError(
            "t / c(t) is largest at the smallest t tried, so its bound is unknown: c(0) = "
            f"{values[0]:.3g}"
        )
    growth = ratio[-1] / ratio[-1000]  # over the last decades of t
    if not bool(growth <= 1.001):
        raise ValueError(
            "t / c(t) grows without bound: c(t) must grow at least linearly in t to clip"
        )

    bracket = _RATIO_GRID[max(top - 1, 0)], _RATIO_GRID[min(top + 1, len(_RATIO_GRID) - 1)]

    def negative(t: float) -> float:
        return -t / float(c(torch.tensor(t, dtype=torch.float64)))

    precision = {"xatol": 1e-7 * (bracket[1] - bracket[0])}
    refined = optimize.minimize_scalar(
        negative, bounds=bracket, method="bounded", options=precision
    )
    return max(float(ratio[top]), -float(refined.fun))


def register_clip(
    name: str,
    c: Callable[[Tensor], Tensor],
    *,
    derivative: Callable[[Tensor], Tensor] | None = None,
    norm_bound: float | None = None,
    calibrated: bool = True,
    smooth: bool = True,
    overwrite: bool = False,
) -> ClipFunction:
    """Register c(t) under a name, after checking its norm bound and its derivative numerically.

    Args:
        name: The name by which functions take it.
        c: t ↦ c(t) > 0, elementwise on tensors of t ≥ 0; g̃ = g / c(n / C′).
        derivative: t ↦ c′(t); None: computed by autograd.
        norm_bound: A claimed K ≥ sup t / c(t), which is checked; None: the supremum found
            numerically, rounded up in the fourth decimal.
        calibrated: Whether to divide the threshold by K so that ‖g̃‖ ≤ max_grad_norm.
        smooth: Whether c is continuously differentiable.
        overwrite: Whether a function of that name may be replaced.

    Raises:
        ValueError: The name is taken, c is not a clip function, the claimed bound is too small, or
            the derivative is wrong. Nothing is registered then.

    Example:
        >>> clip = register_clip("doctest-linear", lambda t: 1 + t)  # t / (1 + t) < 1
        >>> clip.norm_bound
        1.0
        >>> register_clip("doctest-bad", lambda t: 1 + t, norm_bound=0.5)
        Traceback (most recent call last):
        ...
        ValueError: norm_bound=0.5 of clip 'doctest-bad' is too small: t / c(t) reaches ...
    """
    if not overwrite and name in _REGISTRY:
        raise ValueError(f"clip {name!r} is already registered; replace it by overwrite=True")
    supremum = supremum_of_ratio(c)
    claimed = supremum if norm_bound is None else norm_bound
    if not claimed >= supremum * (1 - 1e-12):
        raise ValueError(
            f"norm_bound={claimed:g} of clip {name!r} is too small: t / c(t) reaches "
            f"{supremum:.6f}. Leave it out to have it computed."
        )
    if norm_bound is None:
        norm_bound = round(math.ceil(supremum / _ROUND_UP - 1e-6) * _ROUND_UP, 4)

    slope = (
        derivative
        if derivative is not None
        else lambda t: vmap(grad(c))(t.reshape(-1)).reshape(t.shape)
    )
    if smooth:
        _check_derivative(name, c, slope)
    clip = ClipFunction(name, c, slope, norm_bound, calibrated, smooth)
    _REGISTRY[name] = clip
    return clip


def _check_derivative(
    name: str, c: Callable[[Tensor], Tensor], derivative: Callable[[Tensor], Tensor]
) -> None:
    t = torch.linspace(0.01, 8.0, 800, dtype=torch.float64)
    step = 1e-4
    numeric = (c(t + step) - c(t - step)) / (2 * step)
    wrong = t[~((derivative(t) - numeric).abs() < 1e-5 * (1 + numeric.abs()))].tolist()[:3]
    if wrong:
        raise ValueError(
            f"the derivative of clip {name!r} disagrees with a finite difference at t = {wrong}; "
            "leave it out to use autograd, or pass smooth=False if c has a kink"
        )


def _eighth_root(x: Tensor) -> Tensor:
    return x.sqrt().sqrt().sqrt()


def _below_and_beyond(t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Whether t ≤ 1; min(t, 1); max(t, 1).

    Each branch of a ``where`` gets 1 where the other branch is used, so values and derivatives stay
    finite.
    """
    below, one = t <= 1, torch.ones_like(t)
    return below, torch.where(below, t, one), torch.where(below, one, t)


def _smooth(t: Tensor) -> Tensor:
    """(1 + t⁸)^(1/8), written t (1 + t⁻⁸)^(1/8) beyond 1, where t⁸ would overflow."""
    below, small, large = _below_and_beyond(t)
    return torch.where(
        below, _eighth_root(1 + small**8), large * _eighth_root(1 + large.reciprocal() ** 8)
    )


def _smooth_derivative(t: Tensor) -> Tensor:
    """t⁷ (1 + t⁸)^(−7/8), written (1 + t⁻⁸)^(−7/8) beyond 1."""
    below, small, large = _below_and_beyond(t)
    return (
        torch.where(
            below, small / _eighth_root(1 + small**8), 1 / _eighth_root(1 + large.reciprocal() ** 8)
        )
        ** 7
    )


def _gelu(t: Tensor) -> Tensor:
    return torch.nn.functional.gelu(t - 1) + 1


def _gelu_derivative(t: Tensor) -> Tensor:
    s = t - 1
    return torch.special.ndtr(s) + s * torch.exp(-0.5 * s * s) / math.sqrt(2 * math.pi)


register_clip("smooth", _smooth, derivative=_smooth_derivative, norm_bound=1.0)
register_clip("gelu", _gelu, derivative=_gelu_derivative)
register_clip(
    "gelu-paper", _gelu, derivative=_gelu_derivative, norm_bound=1.11522, calibrated=False
)
register_clip(
    "hard",
    lambda t: t.clamp(min=1),
    derivative=lambda t: (t > 1).to(t.dtype),
    norm_bound=1.0,
    smooth=False,
)
register_clip(
    "rsqrt",
    lambda t: torch.sqrt(1 + t * t),
    derivative=lambda t: t / torch.sqrt(1 + t * t),
    norm_bound=1.0,
)
