"""Linear layers: a weight applied at every position."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchfil.fisher.precision import probe_inputs
from torchfil.fisher.rules.base import OuterProductRule, per_example, register_rule
from torchfil.fisher.rules.call import Call

__all__ = ["LinearRule", "TransposedLinearRule"]


class LinearRule(OuterProductRule):
    """Inputs [batch, …, in], outputs [batch, …, out]."""

    narrow_probes = True

    def output(self, call: Call, direction: Mapping[str, Tensor]) -> Tensor:
        """aUᵀ + b."""
        if "weight" not in direction:
            return direction["bias"].expand(call.delta.shape)
        return F.linear(*probe_inputs(call.input, direction["weight"], direction.get("bias")))

    def way_back(self, call: Call, direction: Mapping[str, Tensor], delta: Tensor) -> Tensor:
        """δU."""
        if "weight" not in direction:
            return torch.zeros_like(call.input)
        factors = probe_inputs(delta, direction["weight"])
        return torch.matmul(*factors)

    def weighted_sum(self, call: Call, weight: Tensor) -> dict[str, Tensor]:
        """As in :class:`LayerRule`, one product over examples and positions."""
        result = {}
        with torch.no_grad():
            delta = (call.delta * per_example(weight, call.delta)).flatten(0, -2)
            if "weight" in call.parameters:
                result["weight"] = delta.mT @ call.input.flatten(0, -2)
            if "bias" in call.parameters:
                result["bias"] = delta.sum(dim=0)
        return result

    def factors(self, call: Call) -> tuple[Tensor, Tensor]:
        """All dimensions between batch and channels are positions."""
        a, delta = call.input, call.delta
        return a.reshape(len(a), 1, -1, a.shape[-1]), delta.reshape(len(delta), 1, -1, delta.shape[-1])


class TransposedLinearRule(LinearRule):
    """A weight [in, out], as in GPT-2's Conv1D and in plain products x @ W.

    Norms and products with another pass do not depend on the weight's orientation.
    """

    def gradients(self, call: Call) -> dict[str, Tensor]:
        """Σ_t a_t δ_tᵀ and Σ_t δ_t of every example."""
        return _with_weight(super().gradients(_turned(call)), _transposed)

    def output(self, call: Call, direction: Mapping[str, Tensor]) -> Tensor:
        """aU + b."""
        return super().output(call, _with_weight(direction, _transposed))

    def way_back(self, call: Call, direction: Mapping[str, Tensor], delta: Tensor) -> Tensor:
        """δUᵀ."""
        return super().way_back(call, _with_weight(direction, _transposed), delta)

    def weighted_sum(self, call: Call, weight: Tensor) -> dict[str, Tensor]:
        """As in :class:`LinearRule`, transposed."""
        return _with_weight(super().weighted_sum(call, weight), _transposed)


def _turned(call: Call) -> Call:
    """The call of a layer with the weight [out, in] instead."""
    return replace(call, parameters=_with_weight(call.parameters, _transposed))


def _transposed(weight: Tensor) -> Tensor:
    return weight.mT


def _with_weight(tensors: Mapping[str, Tensor], function: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    return {name: function(value) if name == "weight" else value for name, value in tensors.items()}


register_rule(nn.Linear, LinearRule())
register_rule("transformers.pytorch_utils.Conv1D", TransposedLinearRule())
