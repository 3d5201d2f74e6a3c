r"""The Jacobian of gradients that are clipped parameter by parameter, as Opacus's ``clipping="per_layer"`` does.

With g_l the part of g that belongs to parameter l, n_l = ‖g_l‖, ĝ_l = g_l/n_l (0 if g_l = 0) and a threshold C_l for
each parameter,

    g̃_l = φ_l g_l,   φ_l = φ(n_l; C_l),   ‖g̃‖² = Σ_l ‖g̃_l‖² ≤ ‖C‖² = Σ_l C_l²,

so σ‖C‖ is the noise's standard deviation on every parameter. With D the symmetric matrix whose blocks are

    D_l = φ_l I + n_l φ_l′ ĝ_l ĝ_lᵀ,   J̃ = ∂g̃/∂z = D J.

Subsampling weights the parts along and across the whole clipped gradient differently, u = g̃/‖g̃‖, Q = I − u uᵀ:

    a = ∂‖g̃‖/∂z = JᵀDu,   J̃ᵀJ̃ = JᵀDQDJ + a aᵀ,   I = (κ⊥ JᵀDQDJ + κ∥ a aᵀ) / (σ‖C‖)².

With one parameter this is :mod:`torchfil.fisher.operator`: u = ĝ and DQD = φ²P. D acts on a vector of length p, so
every product costs one gradient of a gradient, as there.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor

from torchfil.clipping import ClipFunction
from torchfil.fisher.gradients import ExampleGradients
from torchfil.fisher.mechanism import Mechanism
from torchfil.fisher.operator import ClippedJacobian, safe_reciprocal

__all__ = ["LayerwiseJacobian"]


class LayerwiseJacobian(ClippedJacobian):
    """J̃ of every example if each parameter's gradient is clipped separately.

    Guarantees:
        * If a parameter's gradient is zero, its D_l is φ(0) I; if all are zero, a = 0. There is never a NaN.
        * ``norm`` is ‖g‖ of the whole gradient; ``clipped_norm`` is ‖g̃‖.

    Args:
        gradients: The examples with model and loss.
        clip: The clip function.
        max_grad_norm: ‖C‖.
        shares: C_l/‖C‖ by parameter name.
    """

    def __init__(
        self, gradients: ExampleGradients, clip: ClipFunction, max_grad_norm: float, shares: Mapping[str, float]
    ) -> None:
        super().__init__(gradients, clip, max_grad_norm)
        self._sizes = [value.numel() for value in gradients.parameters.values()]
        self._thresholds = max_grad_norm * torch.tensor(
            [shares[name] for name in gradients.parameters], dtype=gradients.dtype, device=gradients.device
        )

    @cached_property
    def norms(self) -> Tensor:
        """n_l, [batch, parameters]."""
        return self._sums_of(self.gradient.square()).sqrt()

    @cached_property
    def scale(self) -> Tensor:
        """ωφ_l at the coordinates of each parameter, [batch, p]."""
        return self._spread(self.weighted(self.clip.scale(self.norms, self._thresholds)))

    @cached_property
    def _unit_parts(self) -> Tensor:
        """ĝ_l, one after the other, [batch, p]."""
        return self.gradient * self._spread(safe_reciprocal(self.norms))

    @property
    def clipped_gradient(self) -> Tensor:
        """g̃, [batch, p]."""
        return self.scale * self.gradient

    @cached_property
    def clipped_norm(self) -> Tensor:
        """‖g̃‖, [batch]."""
        return torch.linalg.vector_norm(self.clipped_gradient, dim=1)

    @cached_property
    def direction(self) -> Tensor:
        """u = g̃/‖g̃‖, 0 if g̃ = 0, [batch, p]."""
        return self.clipped_gradient * safe_reciprocal(self.clipped_norm)[:, None]

    @cached_property
    def clipped_norm_gradient(self) -> Tensor:
        """a = ∂‖g̃‖/∂z = JᵀDu, [batch, d]."""
        return self.rmatvec(self.direction)

    def clipped_sum(self, mask: Tensor | None = None) -> dict[str, Tensor]:
        """Σ_i g̃_i by parameter name, over the examples that ``mask`` (1 or 0, [batch]) keeps."""
        clipped = self.clipped_gradient
        return self.gradients.unflatten((clipped if mask is None else clipped * mask[:, None]).sum(dim=0))

    @property
    def products_alone(self) -> Tensor:
        """‖g_l‖², 0 and 0, [3, batch, parameters]."""
        square = self.norms.square()
        return torch.stack([square, torch.zeros_like(square), torch.zeros_like(square)])

    def products_with(self, others: ExampleGradients) -> Tensor:
        """‖g_l‖², ‖g_l′‖² and ⟨g_l, g_l′⟩, [3, batch, parameters]."""
        g, h = self.gradient, others.gradients_and_losses()[0]
        return torch.stack([self._sums_of(g * g), self._sums_of(h * h), self._sums_of(g * h)])

    def matvec(self, v: Tensor) -> Tensor:
        """J̃v, [batch, p], for v of shape [batch, d]."""
        return self._clip_derivative(self.gradients.jvp(v))

    def rmatvec(self, u: Tensor) -> Tensor:
        """J̃ᵀu, [batch, d], for u of shape [p] (shared by the batch) or [batch, p]."""
        return self.gradients.vjp(self._clip_derivative(u.expand(len(self.gradients), -1)))

    def dense(self) -> Tensor:
        """J̃, [batch, p, d]."""
        return self._clip_derivative(self.gradients.jacobian_columns(slice(None)))

    def perpendicular_rmatvec(self, u: Tensor) -> Tensor:
        """JᵀDQu, [batch, d], for u of shape [p] or [batch, p]."""
        along = (self.direction * u).sum(dim=1)
        return self.rmatvec(u - along[:, None] * self.direction)

    def folded_row(self, mechanism: Mechanism, u: Tensor) -> Tensor:
        """r = J̃ᵀM^{1/2}(Qu + u₀)/s, [batch, d], u₀ = g̃/‖g̃‖; E[r rᵀ] = I for u of ±1; see the base class."""
        perpendicular, parallel = mechanism.weights(self.clipped_norm)
        root = perpendicular.sqrt()
        beta = parallel.sqrt() - root * (self.direction * u).sum(dim=1)
        return self.rmatvec(root[:, None] * u + beta[:, None] * self.direction)

    def perpendicular_squared_norm(self, v: Tensor) -> Tensor:
        """‖QDJv‖² = ‖J̃v‖² − (a·v)², [batch], for v of shape [batch, d]."""
        along = (self.clipped_norm_gradient * v).sum(dim=1)
        return (self.matvec(v).square().sum(dim=1) - along.square()).clamp(min=0)

    def perpendicular_gram_matvec(self, v: Tensor) -> Tensor:
        """JᵀDQDJv, [batch, d], for v of shape [batch, d]."""
        return self.perpendicular_rmatvec(self.matvec(v))

    def perpendicular_gram(self, columns_at_once: int | None = None) -> Tensor:
        """JᵀDQDJ, [batch, d, d]; ``columns_at_once`` as in the base class."""
        d, a = self.gradients.num_coordinates, self.clipped_norm_gradient
        if columns_at_once is None or columns_at_once >= d:
            dense = self.dense()
            return dense.mT @ dense - a[:, :, None] * a[:, None, :]
        directions = torch.eye(d, dtype=a.dtype, device=a.device)
        return torch.stack([self.perpendicular_gram_matvec(e.expand(len(a), -1)) for e in directions], dim=1)

    def perpendicular_diagonal(self, columns_at_once: int | None = None) -> Tensor:
        """The diagonal of JᵀDQDJ, [batch, d], without the matrix; ``columns_at_once`` as in the base class."""
        d = self.gradients.num_coordinates
        width = d if columns_at_once is None else max(1, columns_at_once)
        squares = [
            self._clip_derivative(self.gradients.jacobian_columns(slice(start, start + width))).square().sum(dim=1)
            for start in range(0, d, width)
        ]
        return (torch.cat(squares, dim=1) - self.clipped_norm_gradient.square()).clamp(min=0)

    def _clip_derivative(self, u: Tensor) -> Tensor:
        """Du, for u of shape [batch, p] or [batch, p, columns]."""
        slopes = self.weighted(self.clip.scale_derivative(self.norms, self._thresholds))
        steepness = self._spread(self.norms * slopes)
        unit, scale = self._unit_parts, self.scale
        if u.ndim == 3:
            unit, scale, steepness = unit[..., None], scale[..., None], steepness[..., None]
        return scale * u + steepness * unit * self._spread(self._sums_of(unit * u))

    def _sums_of(self, values: Tensor) -> Tensor:
        """The sum over each parameter's coordinates, [batch, parameters, …], of [batch, p, …]."""
        return torch.stack([part.sum(dim=1) for part in values.split(self._sizes, dim=1)], dim=1)

    def _spread(self, by_parameter: Tensor) -> Tensor:
        """[batch, parameters, …] at each parameter's coordinates, [batch, p, …]."""
        sizes = torch.tensor(self._sizes, device=by_parameter.device)
        return by_parameter.repeat_interleave(sizes, dim=1)
