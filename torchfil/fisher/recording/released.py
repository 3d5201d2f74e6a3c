"""The recorded pass of a step that is not measured: norms, sums and losses; nothing is differentiated twice."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from torchfil.clipping import ClipFunction
from torchfil.fisher.gradients import ExampleGradients
from torchfil.fisher.recording.jacobian import RecordedJacobian
from torchfil.fisher.recording.norms import squared_norms
from torchfil.fisher.recording.passes import RecordedForward, Recording, forward_pass, targets_at

__all__ = ["ReleasedGradients"]


class ReleasedGradients(RecordedJacobian):
    """The part of a :class:`RecordedJacobian` that needs only gradients: ‖g‖, Σφg, ℓ, products with other passes.

    The pass keeps no graph of its backward half, layers below the first trainable one keep nothing, and attention may
    use torch's fused kernels, which have no second derivative.

    Args:
        gradients: The examples with model and loss.
        clip: The clip function.
        max_grad_norm: C.
        forward: An earlier forward pass over the same examples; None: run one.
    """

    def __init__(
        self,
        gradients: ExampleGradients,
        clip: ClipFunction,
        max_grad_norm: float,
        forward: RecordedForward | None = None,
    ) -> None:
        super().__init__(replace(gradients, twice=False), clip, max_grad_norm, forward)

    @cached_property
    def _forward(self) -> RecordedForward:
        if self._given_forward is not None:
            return self._given_forward
        return forward_pass(self.gradients, self.gradients.examples.z.detach())

    @cached_property
    def _recording(self) -> Recording:
        targets = targets_at(self.gradients, self._forward.z)
        return self._forward.recording(self.gradients.loss_fn, targets, differentiable=False)

    @cached_property
    def norm(self) -> Tensor:
        """n = ‖g‖, [batch]."""
        recording = self._recording
        with torch.no_grad(), self.gradients.backward_state():
            total = torch.zeros_like(recording.losses)
            for part in squared_norms(recording):
                total = total + part.value()
        return total.sqrt()
