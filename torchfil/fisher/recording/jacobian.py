"""The clipped Jacobian's products with weight probes, from one recorded pass over the batch."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from torchfil.clipping import ClipFunction
from torchfil.fisher.gradients import ExampleGradients
from torchfil.fisher.mechanism import Mechanism
from torchfil.fisher.operator import Jacobian, safe_reciprocal
from torchfil.fisher.recording.cut import Cotangents, cut, gradient_products, squared_norm, weighted_sum
from torchfil.fisher.recording.record import RecordedForward, backward_pass, forward_pass, record
from torchfil.fisher.rules.base import UnsupportedCallError

__all__ = ["RecordedJacobian"]

logger = logging.getLogger(__name__)


class RecordedJacobian(Jacobian):
    """A :class:`Jacobian` that forms no gradient for norms and shared weight probes.

    Making it runs the pass: one forward and one backward pass are recorded. ‖g‖² and ⟨u, g⟩ are functions of each
    layer's inputs and output gradients in them, and one more backward pass through both gives ∇‖g‖², or Jᵀu, for the
    whole batch.

    If it is not ``measured``, only norms, sums, losses and products with other passes are available. The pass then
    keeps no graph of its backward half, layers below the first trainable one keep nothing, and attention may use
    torch's fused kernels, which have no second derivative.

    Args:
        gradients: The examples with model and loss.
        clip: The clip function.
        max_grad_norm: C.
        forward: An earlier forward pass over the same examples at the same weights; None: run one.
        measured: Whether something will be differentiated twice.

    Attributes:
        recording: What the pass left.
        scale: ωφ(n), [batch].
        scale_derivative: ωφ′(n), [batch], if measured.
    """

    def __init__(
        self,
        gradients: ExampleGradients,
        clip: ClipFunction,
        max_grad_norm: float,
        forward: RecordedForward | None = None,
        *,
        measured: bool = True,
    ) -> None:
        z = gradients.examples.z.detach()
        if forward is not None and forward.z.shape != z.shape:
            raise ValueError(
                f"the forward pass was over {tuple(forward.z.shape)} examples and coordinates, not over "
                f"{tuple(z.shape)}; run forward_pass on these examples, or pass forward=None"
            )
        super().__init__(gradients if measured else replace(gradients, twice=False), clip, max_grad_norm)
        if forward is None:
            forward = forward_pass(self.gradients, z.requires_grad_() if measured else z)
        self.recording = backward_pass(self.gradients, forward, differentiable=measured)
        self.losses, self.output_gradients = self.recording.losses.detach(), self.recording.output_gradients
        with self.gradients.backward_state():
            if measured:
                self._cut = cut(self.recording)
                self._square = self._cut.squared_norm()
                self.norm = self._square.total.sqrt()
            else:
                self.norm = squared_norm(self.recording).sqrt()
        self.scale = self.weighted(clip.scale(self.norm, max_grad_norm))
        self.clipped_norm = self.norm * self.scale
        if measured:
            self.scale_derivative = self.weighted(clip.scale_derivative(self.norm, max_grad_norm))
        self._norm_gradient: Tensor | None = None

    def norm_gradient(self) -> Tensor:
        """∇n = ∇(n²)/(2n), 0 if g = 0, [batch, d]; computed once."""
        if self._norm_gradient is None:
            cotangents: Cotangents = {}
            with self.gradients.backward_state(probes=True):
                self._square.add_derivative(cotangents)
                slope = self._cut.pulled_back(cotangents)
            self._norm_gradient = 0.5 * safe_reciprocal(self.norm)[:, None] * slope
        return self._norm_gradient

    def clipped_norm_gradient(self) -> Tensor:
        """a = ∂‖g̃‖/∂z = (φ + nφ′) ∇n, [batch, d]."""
        return (self.scale + self.norm * self.scale_derivative)[:, None] * self.norm_gradient()

    def perpendicular_rmatvec(self, u: Tensor) -> Tensor:
        """φJᵀPu = φ(Jᵀu − (ĝ·u)∇n), [batch, d], for u of shape [p]."""
        slope = self.norm_gradient()
        with self.gradients.backward_state(probes=True):
            products, cotangents = self._cut.inner_products(self.gradients.unflatten(u))
            across = self._cut.pulled_back(cotangents)
        along = products * safe_reciprocal(self.norm)
        return self.scale[:, None] * (across - along[:, None] * slope)

    def perpendicular_rows(self, probes: Iterable[Tensor], at_once: int = 1) -> Iterator[Tensor]:
        """As in :class:`Jacobian`; ``at_once`` probes share the same, larger operations."""
        if at_once == 1:
            yield from map(self.perpendicular_rmatvec, probes)
            return
        given, facts = torch.stack(list(probes)), self.gradients.facts
        self.norm_gradient()  # the same for all probes, so computed outside the map
        for part in given.tensor_split(-(-len(given) // at_once)):
            rows: Iterable[Tensor] = ()
            if not facts.probes_apart:
                try:
                    with _maps_that_pay():
                        rows = vmap(self.perpendicular_rmatvec)(part)
                except (RuntimeError, UnsupportedCallError) as error:
                    logger.info("probes are processed one by one: %s", error)
                    facts.probes_apart = True
            yield from map(self.perpendicular_rmatvec, part) if facts.probes_apart else rows

    def folded_row(self, mechanism: Mechanism, u: Tensor) -> Tensor:
        r"""r = J̃ᵀM^{1/2}(Pu + ĝ)/s, [batch, d], for u of shape [p]; E[r rᵀ] = I. It needs one derivative.

        With w = M^{1/2}(Pu + ĝ) = sqrt(κ⊥)u + βĝ, β = sqrt(κ∥) − sqrt(κ⊥)(ĝ·u), r is ∇_z⟨h, g⟩ for the fixed vector
        h = φw + φ′(g·w)ĝ = φ sqrt(κ⊥) u + (φβ + φ′n sqrt(κ∥)) ĝ, where ∇_z⟨g, g⟩/2 = ∇(n²)/2.
        """
        perpendicular, parallel = mechanism.weights(self.clipped_norm)
        root, reciprocal = perpendicular.sqrt(), safe_reciprocal(self.norm)
        with self.gradients.backward_state(probes=True):
            products, cotangents = self._cut.inner_products(self.gradients.unflatten(u))
            beta = parallel.sqrt() - root * products * reciprocal
            extra = self.scale * beta + self.scale_derivative * self.norm * parallel.sqrt()

            # φ sqrt(κ⊥) is a common factor, so only one of the two parts has to be scaled for each example.
            before = self.scale * root
            self._square.add_derivative(cotangents, 0.5 * extra * reciprocal * safe_reciprocal(before))
            return before[:, None] * self._cut.pulled_back(cotangents)

    def clipped_sum(self, mask: Tensor | None = None) -> dict[str, Tensor]:
        """Σ_i φ_i g_i by parameter name, over the examples that ``mask`` (1 or 0, [batch]) keeps; 0 if unused."""
        weight, dtype = self.scale if mask is None else self.scale * mask, self.gradients.dtype
        with self.gradients.backward_state():
            sums = weighted_sum(self.recording, weight.to(dtype))
        return {
            name: sums[name] if name in sums else torch.zeros_like(value, dtype=dtype)
            for name, value in self.gradients.parameters.items()
        }

    def products_with(self, others: ExampleGradients) -> Tensor:
        """As in :class:`Jacobian`, from one more forward and backward pass, which is not kept."""
        recording = record(others, others.examples.z.detach(), differentiable=False)
        with self.gradients.backward_state():
            return gradient_products(self.recording, recording)


@contextlib.contextmanager
def _maps_that_pay() -> Iterator[None]:
    """Inside, an operation that vmap could only run as a loop (with a warning) raises an error."""
    functorch: Any = torch._C._functorch
    before = functorch._is_vmap_fallback_enabled()
    functorch._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        functorch._set_vmap_fallback_enabled(before)
