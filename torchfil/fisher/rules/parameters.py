"""Parameters outside of layers, which meet the examples by themselves."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from torchfil.fisher.precision import wide
from torchfil.fisher.rules.base import LayerRule
from torchfil.fisher.rules.call import Call

__all__ = ["ParameterRule"]


class ParameterRule(LayerRule):
    """θ′ = f(θ), handed to each example as a view of its own, with δ the gradient there: J_fᵀ Σ δ, formed once.

    The sum runs over all positions that one number of θ′ was broadcast to.

    Args:
        value: θ′, attached to the parameters; broadcast to δ, never along the batch.
        leaves: θ by name.
    """

    def __init__(self, value: Tensor, leaves: Mapping[str, Tensor]) -> None:
        self.value = value
        self.leaves = leaves

    def gradients(self, call: Call) -> dict[str, Tensor]:
        """J_fᵀ Σ δ of every example."""
        if not call.memo:
            delta, shape = call.delta, self.value.shape
            aligned = (1,) * (delta.ndim - len(shape)) + shape
            broadcast = [k for k in range(1, delta.ndim) if aligned[k] == 1 and delta.shape[k] > 1]
            summed = delta.sum(dim=broadcast) if broadcast else delta
            call.memo.update(self._way_back(summed.reshape(len(delta), *shape)))
        return call.memo

    def _way_back(self, gradient: Tensor) -> dict[str, Tensor]:
        """From θ′ to θ, [batch, …] both."""
        (name, leaf), *more = self.leaves.items()
        if self.value is leaf and not more:
            return {name: gradient}
        by_leaf = torch.autograd.grad(
            self.value,
            list(self.leaves.values()),
            gradient.to(self.value.dtype),
            retain_graph=True,
            create_graph=torch.is_grad_enabled(),
            is_grads_batched=True,
        )
        return dict(zip(self.leaves, map(wide, by_leaf), strict=True))
