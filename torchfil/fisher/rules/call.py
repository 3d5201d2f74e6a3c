"""What a recorded pass keeps of one use of a layer: all that the layer's rule needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from torchfil.utils.trees import tensors_of

__all__ = ["Call", "UnsupportedCallError"]


class UnsupportedCallError(Exception):
    """The model uses a parameter in a way that a recorded pass cannot attribute to examples."""


@dataclass(frozen=True)
class Call:
    """One use of a module that holds trainable parameters.

    Attributes:
        name: The module's, as in ``named_modules``.
        module: The module.
        rule: What makes gradients of the rest.
        args: Its positional inputs.
        kwargs: Its keyword inputs.
        delta: δ, the gradient of the summed loss at its output, [batch, …]; differentiable.
        parameters: Its trainable parameters by local name, detached.
        constants: Its other parameters and buffers by local name.
        shared_names: The model's name of each trainable parameter; the same where weights are tied.
        memo: What a rule has computed for this call and may use again.
    """

    name: str
    module: nn.Module
    rule: Any  # a LayerRule, whose module imports this one
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    delta: Tensor
    parameters: dict[str, Tensor]
    constants: dict[str, Tensor]
    shared_names: dict[str, str]
    memo: dict[str, Tensor] = field(default_factory=dict, compare=False)

    @property
    def input(self) -> Tensor:
        """a, the first positional input, [batch, …].

        Raises:
            UnsupportedCallError: It is no tensor, or does not run over the examples first.
        """
        value = self.args[0] if self.args else None
        if not isinstance(value, Tensor) or value.ndim == 0 or value.shape[0] != self.delta.shape[0]:
            raise UnsupportedCallError(f"{self.name}: its input does not run over the examples first")
        return value

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """Its inputs and δ, where derivatives with respect to them can be taken; one that it is given twice, once."""
        values = tensors_of((self.args, dict(self.kwargs), self.delta))
        return tuple({id(value): value for value in values if value.requires_grad}.values())
