"""Parameters outside layers, which meet the examples directly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from torchfil.fisher.precision import wide
from torchfil.fisher.rules.base import LayerRule
from torchfil.fisher.rules.call import Call

__all__ = ["ParameterRule", "ReparametrisedRule"]


class ParameterRule(LayerRule):
    """θ′ = f(θ), of which each example has a separate view with the gradient δ: g = J_fᵀ Σ δ, formed once.

    The sum runs over all positions to which one number of θ′ was broadcast.

    Args:
        value: θ′, attached to the parameters; it broadcasts to δ, but not along the batch.
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
        """Gradients at θ from those at θ′, both [batch, …]."""
        (name, leaf), *more = self.leaves.items()
        if self.value is leaf and not more:
            return {name: gradient}
        return _led_back([self.value], self.leaves, [gradient], by_example=True)


class ReparametrisedRule(LayerRule):
    """A layer whose weights are functions θ′ = f(θ) of parameters: its rule's gradients at θ′, multiplied by J_fᵀ.

    Examples are weight standardisation and normalisation, pruning, and slices of one weight.

    Args:
        rule: The layer's own rule.
        values: θ′ by local name, attached to the parameters.
        leaves: θ by name.
    """

    def __init__(self, rule: LayerRule, values: Mapping[str, Tensor], leaves: Mapping[str, Tensor]) -> None:
        self.rule = rule
        self.values = values
        self.leaves = leaves

    def gradients(self, call: Call) -> dict[str, Tensor]:
        """J_fᵀ times the layer's own gradients, formed once."""
        if not call.memo:
            by_value = self.rule.gradients(self._own_call(call))
            call.memo.update(self._way_back(by_value, by_example=True))
        return call.memo

    def weighted_sum(self, call: Call, weight: Tensor) -> dict[str, Tensor]:
        """As in :class:`LayerRule`; J_fᵀ is applied once, to the sum."""
        return self._way_back(self.rule.weighted_sum(self._own_call(call), weight), by_example=False)

    def _own_call(self, call: Call) -> Call:
        """The call in the form that the layer's own rule expects."""
        return replace(call, parameters={name: value.detach() for name, value in self.values.items()}, memo={})

    def _way_back(self, gradients: Mapping[str, Tensor], *, by_example: bool) -> dict[str, Tensor]:
        values = [self.values[name] for name in gradients]
        return _led_back(values, self.leaves, list(gradients.values()), by_example=by_example)


def _led_back(
    values: Sequence[Tensor], leaves: Mapping[str, Tensor], gradients: Sequence[Tensor], *, by_example: bool
) -> dict[str, Tensor]:
    """Gradients at θ from those at θ′; with ``by_example``, both are [batch, …]."""
    by_leaf = torch.autograd.grad(
        values,
        list(leaves.values()),
        [gradient.to(value.dtype) for gradient, value in zip(gradients, values, strict=True)],
        retain_graph=True,
        create_graph=by_example and torch.is_grad_enabled(),
        is_grads_batched=by_example,
    )
    return dict(zip(leaves, map(wide, by_leaf), strict=True))
