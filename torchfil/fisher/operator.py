r"""The Jacobian of the clipped gradient, as a linear operator per example.

With g, J = ∂g/∂z, n = ‖g‖, ĝ = g/n, ∇n = Jᵀĝ (0 if g = 0) and the clip's scale φ(n),

    g̃ = φ g,   J̃ = ∂g̃/∂z = φ J + φ′ g ∇nᵀ,   a = ∂‖g̃‖/∂z = J̃ᵀĝ = (φ + nφ′) ∇n.

If an example has a weight ω ∈ (0, 1], φ stands for ωφ and φ′ for ωφ′, because the weighted gradient
is released. ω is held fixed: it does not depend on z.

With P = I − ĝĝᵀ, the Gram matrix splits into a part without the derivative of clipping and a
rank-one part along ĝ:

    J̃ᵀJ̃ = φ² JᵀPJ + a aᵀ.

Thus ∇n, from one product Jᵀg, is enough for the clipping of every vector, for the subsampling
factors κ⊥, κ∥ (which weight the two parts differently) and for every probe.

Opacus's ``clipping="per_layer"`` clips parameter by parameter. With g_l the part of g that belongs
to parameter l, n_l = ‖g_l‖, ĝ_l = g_l/n_l (0 if g_l = 0) and a threshold C_l for each parameter,

    g̃_l = φ_l g_l,   φ_l = φ(n_l; C_l),   ‖g̃‖² = Σ_l ‖g̃_l‖² ≤ ‖C‖² = Σ_l C_l²,

so σ‖C‖ is the noise's standard deviation on every parameter. With D the symmetric matrix whose
blocks are

    D_l = φ_l I + n_l φ_l′ ĝ_l ĝ_lᵀ,   J̃ = D J,   u = g̃/‖g̃‖,   Q = I − u uᵀ,
    a = ∂‖g̃‖/∂z = JᵀDu,   J̃ᵀJ̃ = JᵀDQDJ + a aᵀ,   I = (κ⊥ JᵀDQDJ + κ∥ a aᵀ) / (σ‖C‖)².

Clipping as a whole is the case of one block: u = ĝ, DQD = φ²P.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from torchfil.clipping import ClipFunction
from torchfil.fisher.gradients import ExampleGradients
from torchfil.fisher.mechanism import Mechanism


class Jacobian:
    """What an estimator receives: norms of every example's gradient, and products of J̃ᵀ with
    vectors of length p.

    Attributes:
        gradients: The examples with model and loss, and their weights ω.
        clip: The clip function.
        max_grad_norm: C.
        losses: ℓ, [batch].
        norm: n = ‖g‖, [batch].
        clipped_norm: ‖g̃‖, [batch].
        output_gradients: ∂ℓ_i/∂output_i of every example, for every tensor of the model's output;
            None: not known.
    """

    losses: Tensor
    norm: Tensor
    norms: Tensor
    clipped_norm: Tensor
    by_parameter: bool = False
    output_gradients: tuple[Tensor, ...] | None = None

    def __init__(
        self, gradients: ExampleGradients, clip: ClipFunction, max_grad_norm: float
    ) -> None:
        self.gradients, self.clip, self.max_grad_norm = gradients, clip, max_grad_norm

    def weighted(self, by_example: Tensor) -> Tensor:
        """The values times the examples' weights ω, [batch, …]."""
        weights = self.gradients.examples.clip_weights
        if weights is None:
            return by_example
        return weights.to(by_example.dtype).reshape(-1, *(1,) * (by_example.ndim - 1)) * by_example

    def clipped_norm_gradient(self) -> Tensor:
        """a = ∂‖g̃‖/∂z, 0 if g = 0, [batch, d]; computed once."""
        raise NotImplementedError

    def clipped_sum(self, mask: Tensor | None = None) -> dict[str, Tensor]:
        """Σ_i g̃_i by parameter name, over the examples that ``mask`` (1 or 0, [batch]) keeps."""
        raise NotImplementedError

    def inner_products(self, direction: Mapping[str, Tensor]) -> Tensor:
        """⟨g̃, u⟩, [batch], for u by parameter name."""
        raise NotImplementedError

    def products_alone(self) -> Tensor:
        """The products with a gradient of 0: ‖g‖², 0 and 0, [3, batch], or [3, batch, parameters]
        if clipped apart.
        """
        square = (self.norms if self.by_parameter else self.norm).square()
        return torch.stack([square, torch.zeros_like(square), torch.zeros_like(square)])

    def products_with(self, others: ExampleGradients) -> Tensor:
        """‖g‖², ‖g′‖² and ⟨g, g′⟩, [3, batch], where g′ are the gradients of the changed
        examples.
        """
        raise NotImplementedError

    def perpendicular_rmatvec(self, u: Tensor) -> Tensor:
        """φJᵀPu, [batch, d], for u of shape [p]; E[r rᵀ] = φ²JᵀPJ for u of ±1."""
        raise NotImplementedError

    def perpendicular_rows(self, probes: Iterable[Tensor], at_once: int = 1) -> Iterator[Tensor]:
        """φJᵀPu, [batch, d], of one u after the other; ``at_once`` may be computed together."""
        return map(self.perpendicular_rmatvec, probes)

    def folded_row(self, mechanism: Mechanism, u: Tensor) -> Tensor:
        """r = J̃ᵀM^{1/2}(Pu + ĝ)/s, [batch, d], for u of shape [p]; E[r rᵀ] = I for u of ±1.

        M = κ⊥P + κ∥ĝĝᵀ weights the part along the gradient as subsampling does. That part, aaᵀ, is
        not random: u's component along ĝ is set to 1, which has the same mean square; cross terms
        vanish on average.
        """
        raise NotImplementedError


class ClippedJacobian(Jacobian):
    """J̃ from gradients mapped over examples: products, dense form, Gram matrix, and ‖g̃‖ with its
    input gradient.

    Guarantees:
        * A zero gradient gives ∇n = 0 and a = 0, never NaN: J̃ = φ(0) J there.
        * Every product costs one gradient of a gradient; only :meth:`dense` and :meth:`gram` form
          anything of size p×d.

    Args:
        gradients: The examples with model and loss, and their weights ω.
        clip: The clip function.
        max_grad_norm: C; ‖C‖ if each parameter is clipped separately.
        shares: C_l/‖C‖ by parameter name, if each parameter's gradient is clipped separately; None:
            as a whole.

    Attributes:
        gradient: g, the unclipped gradients, [batch, p].
        norms: n_l, [batch, parameters]; n, [batch, 1], if the gradient is clipped as a whole.
    """

    def __init__(
        self,
        gradients: ExampleGradients,
        clip: ClipFunction,
        max_grad_norm: float,
        shares: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(gradients, clip, max_grad_norm)
        self.by_parameter = shares is not None
        self._sizes = [value.numel() for value in gradients.parameters.values()]
        thresholds: float | Tensor = max_grad_norm
        if shares is not None:
            by_name = [shares[name] for name in gradients.parameters]
            thresholds = max_grad_norm * torch.tensor(
                by_name, dtype=gradients.dtype, device=gradients.device
            )

        self.gradient, self.losses = gradients.gradients_and_losses()
        self.norm = torch.linalg.vector_norm(self.gradient, dim=1)
        self.norms = (
            self._sums_of(self.gradient.square()).sqrt()
            if self.by_parameter
            else self.norm[:, None]
        )
        self._scales = self.weighted(clip.scale(self.norms, thresholds))
        self._slopes = self.weighted(clip.scale_derivative(self.norms, thresholds))
        if self.by_parameter:
            self.clipped_norm = torch.linalg.vector_norm(self.clipped_gradient, dim=1)
        else:
            self.clipped_norm = self.norm * self._scales[:, 0]
        self._a: Tensor | None = None

    @property
    def clipped_gradient(self) -> Tensor:
        """g̃ = ωφ g, [batch, p]."""
        return self._spread(self._scales) * self.gradient

    @property
    def direction(self) -> Tensor:
        """u = g̃/‖g̃‖, 0 if g̃ = 0, [batch, p]."""
        if self.by_parameter:
            return self.clipped_gradient * safe_reciprocal(self.clipped_norm)[:, None]
        return self.gradient * safe_reciprocal(self.norm)[:, None]

    def norm_gradient(self) -> Tensor:
        """∇n = ∂‖g‖/∂z = Jᵀĝ, 0 if g = 0, [batch, d]."""
        return self.gradients.vjp(self.gradient * safe_reciprocal(self.norm)[:, None])

    def clipped_norm_gradient(self) -> Tensor:
        """a = ∂‖g̃‖/∂z = JᵀDu, [batch, d]; as a whole, (φ + nφ′) ∇n. Computed once."""
        if self._a is None:
            whole = self._scales + self.norms * self._slopes  # [batch, 1]
            self._a = (
                self.rmatvec(self.direction) if self.by_parameter else whole * self.norm_gradient()
            )
        return self._a

    def clipped_sum(self, mask: Tensor | None = None) -> dict[str, Tensor]:
        """Σ_i g̃_i by parameter name, over the examples that ``mask`` (1 or 0, [batch]) keeps."""
        if self.by_parameter:
            clipped = self.clipped_gradient
            return self.gradients.unflatten(
                (clipped if mask is None else clipped * mask[:, None]).sum(dim=0)
            )
        weight = self._scales[:, 0] if mask is None else self._scales[:, 0] * mask
        return self.gradients.unflatten(weight.to(self.gradient.dtype) @ self.gradient)

    def inner_products(self, direction: Mapping[str, Tensor]) -> Tensor:
        """⟨g̃, u⟩, [batch], for u by parameter name."""
        return self.clipped_gradient @ torch.cat(
            [direction[name].flatten() for name in self.gradients.parameters]
        )

    def products_with(self, others: ExampleGradients) -> Tensor:
        """‖g‖², ‖g′‖² and ⟨g, g′⟩, [3, batch], or of each parameter's part, [3, batch,
        parameters].
        """
        g, h = self.gradient, others.gradients_and_losses()[0]
        products = torch.stack([self._sums_of(g * g), self._sums_of(h * h), self._sums_of(g * h)])
        return products if self.by_parameter else products[..., 0]

    def matvec(self, v: Tensor) -> Tensor:
        """J̃v, [batch, p], for v of shape [batch, d]."""
        return self._clip_derivative(self.gradients.jvp(v))

    def rmatvec(self, u: Tensor) -> Tensor:
        """J̃ᵀu, [batch, d], for u of shape [p] (shared by the batch) or [batch, p]."""
        return self.gradients.vjp(self._clip_derivative(u.expand(len(self.gradients), -1)))

    def dense(self, coordinates: slice = slice(None)) -> Tensor:
        """J̃, [batch, p, d], or the columns of these coordinates."""
        return self._clip_derivative(self.gradients.jacobian_columns(coordinates))

    def gram(self, columns_at_once: int | None = None) -> Tensor:
        """J̃ᵀJ̃, [batch, d, d].

        Args:
            columns_at_once: How many columns of J (vectors of length p) to hold at a time; None:
                all d.
        """
        a = self.clipped_norm_gradient()
        return self.perpendicular_gram(columns_at_once) + a[:, :, None] * a[:, None, :]

    def perpendicular_rmatvec(self, u: Tensor) -> Tensor:
        """JᵀDQu, [batch, d], for u of shape [p] or [batch, p]; as a whole, φJᵀPu."""
        direction = self.direction
        return self.rmatvec(u - (direction * u).sum(dim=1, keepdim=True) * direction)

    def folded_row(self, mechanism: Mechanism, u: Tensor) -> Tensor:
        """r = J̃ᵀM^{1/2}(Qu + u₀)/s, [batch, d], u₀ = g̃/‖g̃‖; E[r rᵀ] = I for u of ±1.

        See the base class.
        """
        perpendicular, parallel = mechanism.weights(self.clipped_norm)
        root, direction = perpendicular.sqrt(), self.direction
        beta = parallel.sqrt() - root * (direction * u).sum(dim=1)
        return self.rmatvec(root[:, None] * u + beta[:, None] * direction)

    def perpendicular_gram(self, columns_at_once: int | None = None) -> Tensor:
        """JᵀDQDJ, [batch, d, d]; ``columns_at_once`` as in :meth:`gram`."""
        d, a = self.gradients.num_coordinates, self.clipped_norm_gradient()
        if columns_at_once is None or columns_at_once >= d:
            dense = self.dense()
            return dense.mT @ dense - a[:, :, None] * a[:, None, :]
        rows = []
        for start in range(0, d, max(1, columns_at_once)):
            block = self.dense(slice(start, start + max(1, columns_at_once)))  # [batch, p, columns]
            rows += [self.perpendicular_rmatvec(column) for column in block.unbind(dim=2)]
        return torch.stack(rows, dim=1)

    def perpendicular_diagonal(self, columns_at_once: int | None = None) -> Tensor:
        """The diagonal of JᵀDQDJ, [batch, d], without the matrix; ``columns_at_once`` as in
        :meth:`gram`.
        """
        d = self.gradients.num_coordinates
        width = d if columns_at_once is None else max(1, columns_at_once)
        squares = [
            self.dense(slice(start, start + width)).square().sum(dim=1)
            for start in range(0, d, width)
        ]
        return (torch.cat(squares, dim=1) - self.clipped_norm_gradient().square()).clamp(min=0)

    def _clip_derivative(self, u: Tensor) -> Tensor:
        """Du, for u of shape [batch, p] or [batch, p, columns]."""
        unit = self.gradient * self._spread(safe_reciprocal(self.norms))  # ĝ_l, one after the other
        scale, steepness = self._scales, self.norms * self._slopes
        if u.ndim == 3:
            unit, scale, steepness = unit[..., None], scale[..., None], steepness[..., None]
        along = self._spread(steepness * self._sums_of(unit * u))
        return torch.addcmul(unit * along, self._spread(scale), u)

    def _sums_of(self, values: Tensor) -> Tensor:
        """The sum over each parameter's coordinates, [batch, parameters or 1, …], of [batch, p,
        …].
        """
        if not self.by_parameter:
            return values.sum(dim=1, keepdim=True)
        return torch.stack([part.sum(dim=1) for part in values.split(self._sizes, dim=1)], dim=1)

    def _spread(self, by_parameter: Tensor) -> Tensor:
        """[batch, parameters, …] at each parameter's coordinates, [batch, p, …].

        One part broadcasts as it is.
        """
        if not self.by_parameter:
            return by_parameter
        return by_parameter.repeat_interleave(
            torch.tensor(self._sizes, device=by_parameter.device), dim=1
        )


def safe_reciprocal(norm: Tensor) -> Tensor:
    """1/norm, and 0 where the norm is 0."""
    return torch.where(
        norm > 0, 1.0 / norm.where(norm > 0, torch.ones_like(norm)), torch.zeros_like(norm)
    )
