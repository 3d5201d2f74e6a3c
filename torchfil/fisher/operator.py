r"""The Jacobian of the clipped gradient, as a linear operator per example.

With g, J = ∂g/∂z, n = ‖g‖, ĝ = g/n, ∇n = Jᵀĝ (0 if g = 0) and the clip's scale φ(n),

    g̃ = φ g,   J̃ = ∂g̃/∂z = φ J + φ′ g ∇nᵀ,   a = ∂‖g̃‖/∂z = J̃ᵀĝ = (φ + nφ′) ∇n.

If an example has a weight ω ∈ (0, 1], φ stands for ωφ and φ′ for ωφ′, because the weighted gradient is released. ω is
held fixed: it does not depend on z.

With P = I − ĝĝᵀ, the Gram matrix splits into a part without the derivative of clipping and a rank-one part along ĝ:

    J̃ᵀJ̃ = φ² JᵀPJ + a aᵀ.

Thus ∇n, from one product Jᵀg, is enough for the clipping of every vector, for the subsampling factors κ⊥, κ∥ (which
weight the two parts differently) and for every probe.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property

import torch
from torch import Tensor

from torchfil.clipping import ClipFunction
from torchfil.fisher.gradients import ExampleGradients
from torchfil.fisher.mechanism import Mechanism

__all__ = ["ClippedJacobian"]


class ClippedJacobian:
    """J̃ of every example of a batch: products, dense form, Gram matrix, and ‖g̃‖ with its input gradient.

    Guarantees:
        * A zero gradient gives ∇n = 0 and a = 0, never NaN: J̃ = φ(0) J there.
        * Every product costs one gradient of a gradient; only :meth:`dense` and :meth:`gram` form anything of size
          p×d.

    Args:
        gradients: The examples with model and loss, and their weights ω.
        clip: The clip function.
        max_grad_norm: C.
    """

    def __init__(self, gradients: ExampleGradients, clip: ClipFunction, max_grad_norm: float) -> None:
        self.gradients = gradients
        self.clip = clip
        self.max_grad_norm = max_grad_norm

    @cached_property
    def gradient(self) -> Tensor:
        """g, the unclipped gradients, [batch, p]."""
        return self._gradients_and_losses[0]

    @cached_property
    def _gradients_and_losses(self) -> tuple[Tensor, Tensor]:
        return self.gradients.gradients_and_losses()

    @cached_property
    def norm(self) -> Tensor:
        """n = ‖g‖, [batch]."""
        return torch.linalg.vector_norm(self.gradient, dim=1)

    @cached_property
    def unit_gradient(self) -> Tensor:
        """ĝ = g/n, 0 if g = 0, [batch, p]."""
        return self.gradient * safe_reciprocal(self.norm)[:, None]

    @cached_property
    def norm_gradient(self) -> Tensor:
        """∇n = ∂‖g‖/∂z = Jᵀĝ, 0 if g = 0, [batch, d]."""
        return self.gradients.vjp(self.unit_gradient)

    @cached_property
    def scale(self) -> Tensor:
        """ωφ(n), [batch]."""
        return self.weighted(self.clip.scale(self.norm, self.max_grad_norm))

    @cached_property
    def scale_derivative(self) -> Tensor:
        """ωφ′(n), [batch]."""
        return self.weighted(self.clip.scale_derivative(self.norm, self.max_grad_norm))

    def weighted(self, by_example: Tensor) -> Tensor:
        """The values times the examples' weights ω, [batch, …]."""
        weights = self.gradients.examples.clip_weights
        if weights is None:
            return by_example
        return weights.to(by_example.dtype).reshape(-1, *(1,) * (by_example.ndim - 1)) * by_example

    @property
    def clipped_gradient(self) -> Tensor:
        """g̃ = ωφ(n) g, [batch, p]."""
        return self.scale[:, None] * self.gradient

    @property
    def clipped_norm(self) -> Tensor:
        """‖g̃‖ = nωφ(n), [batch]."""
        return self.norm * self.scale

    @cached_property
    def clipped_norm_gradient(self) -> Tensor:
        """a = ∂‖g̃‖/∂z = (φ + nφ′) ∇n, [batch, d]."""
        return (self.scale + self.norm * self.scale_derivative)[:, None] * self.norm_gradient

    @property
    def losses(self) -> Tensor:
        """ℓ of every example, [batch]."""
        return self._gradients_and_losses[1]

    @property
    def output_gradients(self) -> tuple[Tensor, ...] | None:
        """∂ℓ_i/∂output_i of every example, for every tensor of the model's output; None: not known."""
        return None

    def clipped_sum(self, mask: Tensor | None = None) -> dict[str, Tensor]:
        """Σ_i φ_i g_i by parameter name, over the examples that ``mask`` (1 or 0, [batch]) keeps."""
        weight = self.scale if mask is None else self.scale * mask
        return self.gradients.unflatten(weight.to(self.gradient.dtype) @ self.gradient)

    @property
    def products_alone(self) -> Tensor:
        """‖g‖², 0 and 0, [3, batch]: the products with a gradient of 0."""
        square = self.norm.square()
        return torch.stack([square, torch.zeros_like(square), torch.zeros_like(square)])

    def products_with(self, others: ExampleGradients) -> Tensor:
        """‖g‖², ‖g′‖² and ⟨g, g′⟩, [3, batch], where g′ are the gradients of the changed examples."""
        g, h = self.gradient, others.gradients_and_losses()[0]
        return torch.stack([(g * g).sum(dim=1), (h * h).sum(dim=1), (g * h).sum(dim=1)])

    def matvec(self, v: Tensor) -> Tensor:
        """J̃v, [batch, p], for v of shape [batch, d]."""
        along = (self.norm_gradient * v).sum(dim=1)
        return self.scale[:, None] * self.gradients.jvp(v) + (self.scale_derivative * along)[:, None] * self.gradient

    def rmatvec(self, u: Tensor) -> Tensor:
        """J̃ᵀu, [batch, d], for u of shape [p] (shared by the batch) or [batch, p]."""
        along = (self.gradient * u).sum(dim=1)
        return (
            self.scale[:, None] * self.gradients.vjp(u) + (self.scale_derivative * along)[:, None] * self.norm_gradient
        )

    def dense(self) -> Tensor:
        """J̃, [batch, p, d]."""
        jacobian = self.gradients.jacobian_columns(slice(None))
        rank_one = self.gradient[:, :, None] * self.norm_gradient[:, None, :]
        return self.scale[:, None, None] * jacobian + self.scale_derivative[:, None, None] * rank_one

    def gram(self, columns_at_once: int | None = None) -> Tensor:
        """J̃ᵀJ̃, [batch, d, d].

        Args:
            columns_at_once: How many columns of J (vectors of length p) to hold at a time; None: all d.
        """
        a = self.clipped_norm_gradient
        return self.perpendicular_gram(columns_at_once) + a[:, :, None] * a[:, None, :]

    def perpendicular_rmatvec(self, u: Tensor) -> Tensor:
        """φJᵀPu, [batch, d], for u of shape [p]; E[r rᵀ] = φ²JᵀPJ for u of ±1."""
        along = (self.unit_gradient * u).sum(dim=1)
        return self.scale[:, None] * (self.gradients.vjp(u) - along[:, None] * self.norm_gradient)

    def perpendicular_rows(self, probes: Iterable[Tensor], at_once: int = 1) -> Iterator[Tensor]:
        """φJᵀPu, [batch, d], of one u after the other; ``at_once`` may be computed together."""
        return map(self.perpendicular_rmatvec, probes)

    def folded_row(self, mechanism: Mechanism, u: Tensor) -> Tensor:
        """r = J̃ᵀM^{1/2}(Pu + ĝ)/s, [batch, d], for u of shape [p]; E[r rᵀ] = I for u of ±1.

        M = κ⊥P + κ∥ĝĝᵀ weights the part along the gradient as subsampling does. That part, aaᵀ, is not random: u's
        component along ĝ is set to 1, which has the same mean square; cross terms vanish on average.
        """
        perpendicular, parallel = mechanism.weights(self.clipped_norm)
        root = perpendicular.sqrt()
        beta = parallel.sqrt() - root * (self.unit_gradient * u).sum(dim=1)
        return self.rmatvec(root[:, None] * u + beta[:, None] * self.unit_gradient)

    def perpendicular_squared_norm(self, v: Tensor) -> Tensor:
        """‖φPJv‖² = φ²(‖Jv‖² − (∇n·v)²), [batch], for v of shape [batch, d]."""
        along = (self.norm_gradient * v).sum(dim=1)
        square = torch.linalg.vector_norm(self.gradients.jvp(v), dim=1).square()
        return self.scale.square() * (square - along.square()).clamp(min=0)

    def perpendicular_gram_matvec(self, v: Tensor) -> Tensor:
        """φ²JᵀPJv, [batch, d], for v of shape [batch, d]."""
        along = (self.norm_gradient * v).sum(dim=1)
        return self.scale.square()[:, None] * (
            self.gradients.vjp(self.gradients.jvp(v)) - along[:, None] * self.norm_gradient
        )

    def perpendicular_gram(self, columns_at_once: int | None = None) -> Tensor:
        """φ²JᵀPJ, [batch, d, d]; ``columns_at_once`` as in :meth:`gram`."""
        d = self.gradients.num_coordinates
        width = d if columns_at_once is None else max(1, columns_at_once)
        if width >= d:
            jacobian = self.gradients.jacobian_columns(slice(None))
            gram = jacobian.mT @ jacobian
        else:
            gram = torch.empty(len(self.gradients), d, d, dtype=self.gradients.dtype, device=self.gradients.device)
            for start in range(0, d, width):
                block = self.gradients.jacobian_columns(slice(start, start + width))  # [batch, p, width]
                for k in range(block.shape[2]):
                    gram[:, start + k] = self.gradients.vjp(block[:, :, k])
        rank_one = self.norm_gradient[:, :, None] * self.norm_gradient[:, None, :]
        return self.scale.square()[:, None, None] * (gram - rank_one)

    def perpendicular_diagonal(self, columns_at_once: int | None = None) -> Tensor:
        """The diagonal of φ²JᵀPJ, [batch, d], without the matrix; ``columns_at_once`` as in :meth:`gram`."""
        d = self.gradients.num_coordinates
        width = d if columns_at_once is None else max(1, columns_at_once)
        squares = [
            self.gradients.jacobian_columns(slice(start, start + width)).square().sum(dim=1)
            for start in range(0, d, width)
        ]
        square = torch.cat(squares, dim=1)
        return self.scale.square()[:, None] * (square - self.norm_gradient.square()).clamp(min=0)


def safe_reciprocal(norm: Tensor) -> Tensor:
    return torch.where(norm > 0, 1.0 / norm.where(norm > 0, torch.ones_like(norm)), torch.zeros_like(norm))
