"""The clipped Jacobian's products with weight probes, from one recorded pass over the batch."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.func import vmap

from torchfil.clipping import ClipFunction
from torchfil.fisher.gradients import ExampleGradients
from torchfil.fisher.mechanism import Mechanism
from torchfil.fisher.operator import ClippedJacobian, safe_reciprocal
from torchfil.fisher.recording.cut import CutRecording, DifferentiableSum, cut
from torchfil.fisher.recording.norms import gradient_products, inner_products, squared_norms, weighted_sum
from torchfil.fisher.recording.passes import RecordedForward, Recording, forward_pass, targets_at
from torchfil.fisher.rules.base import UnsupportedCallError
from torchfil.utils.trees import map_tensors

__all__ = ["RecordedJacobian"]

logger = logging.getLogger(__name__)

_not_mapped: WeakSet[nn.Module] = WeakSet()  # models whose probes cannot be processed together


class RecordedJacobian(ClippedJacobian):
    """A :class:`ClippedJacobian` that forms no gradient for norms and shared weight probes.

    One forward and one backward pass are recorded. ‖g‖² and ⟨u, g⟩ are functions of each layer's inputs and output
    gradients in them, and one more backward pass through both gives ∇‖g‖², or Jᵀu, for the whole batch. Other products
    come from mapped gradients.

    Args:
        gradients: The examples with model and loss.
        clip: The clip function.
        max_grad_norm: C.
        forward: An earlier forward pass over the same examples at the same weights; None: run one.
    """

    def __init__(
        self,
        gradients: ExampleGradients,
        clip: ClipFunction,
        max_grad_norm: float,
        forward: RecordedForward | None = None,
    ) -> None:
        super().__init__(gradients, clip, max_grad_norm)
        if forward is not None and forward.z.shape != gradients.examples.z.shape:
            raise ValueError(
                f"the forward pass was over {tuple(forward.z.shape)} examples and coordinates, not over "
                f"{tuple(gradients.examples.z.shape)}; run forward_pass on these examples, or pass forward=None"
            )
        self._given_forward = forward

    @cached_property
    def _forward(self) -> RecordedForward:
        if self._given_forward is not None:
            return self._given_forward
        return forward_pass(self.gradients, self.gradients.examples.z.detach().requires_grad_())

    @property
    def _z(self) -> Tensor:
        return self._forward.z

    @cached_property
    def _recording(self) -> Recording:
        return self._forward.recording(self.gradients.loss_fn, targets_at(self.gradients, self._z))

    @cached_property
    def _cut(self) -> CutRecording:
        return cut(self._recording)

    @cached_property
    def _square(self) -> DifferentiableSum:
        """‖g‖², [batch], and its derivatives at the leaves of the cut."""
        with self.gradients.backward_state():
            return self._cut.differentiable_sum(squared_norms(self._cut.recording))

    @cached_property
    def norm(self) -> Tensor:
        """n = ‖g‖, [batch]."""
        return self._square.total.sqrt()

    @cached_property
    def norm_gradient(self) -> Tensor:
        """∇n = ∇(n²)/(2n), 0 if g = 0, [batch, d]."""
        cotangents: list[Tensor | None] = [None] * len(self._cut.leaves)
        self._add_square_derivative(cotangents)
        return 0.5 * safe_reciprocal(self.norm)[:, None] * self._pulled_back(cotangents)

    def perpendicular_rmatvec(self, u: Tensor) -> Tensor:
        """φJᵀPu = φ(Jᵀu − (ĝ·u)∇n), [batch, d], for u of shape [p]."""
        products, cotangents = self._products(u)
        along = products * safe_reciprocal(self.norm)
        return self.scale[:, None] * (self._pulled_back(cotangents) - along[:, None] * self.norm_gradient)

    def perpendicular_rows(self, probes: Iterable[Tensor], at_once: int = 1) -> Iterator[Tensor]:
        """As in :class:`ClippedJacobian`; ``at_once`` probes share the same, larger operations."""
        if at_once == 1:
            yield from super().perpendicular_rows(probes)
            return
        given, model = torch.stack(list(probes)), self.gradients.model
        _ = self.scale, self.norm_gradient  # the same for all probes, so computed outside the map
        for part in given.tensor_split(-(-len(given) // at_once)):
            rows: Iterable[Tensor] = super().perpendicular_rows(part)
            if model not in _not_mapped:
                try:
                    with _maps_that_pay():
                        rows = vmap(self.perpendicular_rmatvec)(part)
                except (RuntimeError, UnsupportedCallError) as error:
                    logger.info("probes are processed one by one: %s", error)
                    _not_mapped.add(model)
            yield from rows

    def folded_row(self, mechanism: Mechanism, u: Tensor) -> Tensor:
        r"""r = J̃ᵀM^{1/2}(Pu + ĝ)/s, [batch, d], for u of shape [p]; E[r rᵀ] = I. It needs one derivative.

        With w = M^{1/2}(Pu + ĝ) = sqrt(κ⊥)u + βĝ, β = sqrt(κ∥) − sqrt(κ⊥)(ĝ·u), r is ∇_z⟨h, g⟩ for the fixed vector
        h = φw + φ′(g·w)ĝ = φ sqrt(κ⊥) u + (φβ + φ′n sqrt(κ∥)) ĝ, where ∇_z⟨g, g⟩/2 = ∇(n²)/2.
        """
        perpendicular, parallel = mechanism.weights(self.clipped_norm)
        root, reciprocal = perpendicular.sqrt(), safe_reciprocal(self.norm)
        products, cotangents = self._products(u)
        beta = parallel.sqrt() - root * products * reciprocal
        extra = self.scale * beta + self.scale_derivative * self.norm * parallel.sqrt()

        # φ sqrt(κ⊥) is a common factor, so only one of the two parts has to be scaled for each example.
        before = self.scale * root
        self._add_square_derivative(cotangents, 0.5 * extra * reciprocal * safe_reciprocal(before))
        return before[:, None] * self._pulled_back(cotangents)

    def clipped_sum(self, mask: Tensor | None = None) -> dict[str, Tensor]:
        """Σ_i φ_i g_i by parameter name, over the examples that ``mask`` (1 or 0, [batch]) keeps; 0 if unused."""
        weight = self.scale if mask is None else self.scale * mask
        with self.gradients.backward_state():
            sums = weighted_sum(self._recording, weight.to(self.gradients.dtype))
        return {
            name: sums[name] if name in sums else torch.zeros_like(value, dtype=self.gradients.dtype)
            for name, value in self.gradients.parameters.items()
        }

    @property
    def losses(self) -> Tensor:
        """ℓ of every example, [batch]."""
        return self._recording.losses.detach()

    @property
    def outputs(self) -> Any:
        """The model's outputs for the whole batch."""
        return map_tensors(Tensor.detach, self._forward.outputs)

    @property
    def output_gradients(self) -> tuple[Tensor, ...]:
        """∂ℓ_i/∂output_i of every example, for every tensor of the model's output."""
        return self._recording.output_gradients

    def products_with(self, others: ExampleGradients) -> Tensor:
        """As in :class:`ClippedJacobian`, from one more forward and backward pass, which is not kept."""
        z = others.examples.z.detach()
        forward = forward_pass(others, z)
        recording = forward.recording(others.loss_fn, targets_at(others, z), differentiable=False)
        with self.gradients.backward_state():
            return gradient_products(self._recording, recording)

    def _products(self, u: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        """⟨g, u⟩, [batch], and the derivative of Σ_i ⟨g_i, u⟩ at the leaves of the cut."""
        with self.gradients.probe_state():
            return inner_products(self._cut, self.gradients.unflatten(u))

    def _add_square_derivative(self, cotangents: list[Tensor | None], weight: Tensor | None = None) -> None:
        """Add the derivative of Σ_i weight_i‖g_i‖², for weights [batch] (None: 1)."""
        square = self._square
        with self.gradients.probe_state():
            square.add_derivative(cotangents, weight)

    def _pulled_back(self, cotangents: Sequence[Tensor | None]) -> Tensor:
        with self.gradients.probe_state():
            return self._cut.pulled_back(cotangents, self._z)


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
