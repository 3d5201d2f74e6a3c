"""What a recorded pass keeps from one use of a layer: everything that the layer's rule needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from torchfil.fisher.precision import is_reduced, wide
from torchfil.utils.trees import map_tensors, tensors_of

__all__ = ["Call", "UnsupportedCallError"]


class UnsupportedCallError(Exception):
    """The model uses a parameter in a way that a recorded pass cannot attribute to examples."""


@dataclass(frozen=True)
class Call:
    """One use of a module that holds trainable parameters.

    Attributes:
        name: The module's name, as in ``named_modules``.
        module: The module.
        rule: The rule that computes gradients from the rest.
        args: Its positional inputs.
        kwargs: Its keyword inputs.
        delta: δ, the gradient of the summed loss at its output, [batch, …]; differentiable.
        parameters: Its trainable parameters by local name, detached.
        constants: Its other parameters and buffers by local name.
        shared_names: The model's name of each trainable parameter; tied weights share one name.
        memo: Results that a rule has computed for this call and may use again.
        narrow: The call as it was recorded, if this one is its :meth:`wide` form; None: this is the recorded one.
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
    narrow: Call | None = field(default=None, compare=False)

    @property
    def input(self) -> Tensor:
        """a, the first positional input, [batch, …].

        Raises:
            UnsupportedCallError: It is not a tensor, or its first dimension does not run over the examples.
        """
        value = self.args[0] if self.args else None
        if not isinstance(value, Tensor) or value.ndim == 0 or value.shape[0] != self.delta.shape[0]:
            raise UnsupportedCallError(f"{self.name}: the first dimension of its input does not run over the examples")
        return value

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """Its inputs and δ, if they can be differentiated; an input that is passed twice appears once."""
        if self.narrow is not None:
            return self.narrow.leaves
        values = self._tensors()
        return tuple({id(value): value for value in values if value.requires_grad}.values())

    @property
    def is_wide(self) -> bool:
        """Whether :meth:`wide` is the call itself."""
        return not any(is_reduced(value.dtype) for value in (*self._tensors(), *self.parameters.values()))

    def wide(self) -> Call:
        """The same call in float32 or wider, so that rules lose no digits in norms and sums; itself if it is wide.

        The leaves remain those of the recorded call; the wide tensors are attached to them.
        """
        if self.is_wide:
            return self
        with torch.enable_grad():
            args, kwargs, delta = map_tensors(wide, (self.args, dict(self.kwargs), self.delta))
        parameters, constants = map_tensors(wide, (self.parameters, self.constants))
        return replace(
            self, args=args, kwargs=kwargs, delta=delta, parameters=parameters, constants=constants, narrow=self
        )

    def origin(self, leaf: Tensor) -> Tensor:
        """The recorded tensor whose wide form this tensor of the call is."""
        if self.narrow is None:
            return leaf
        pairs = zip(self._tensors(), self.narrow._tensors(), strict=True)
        return next((recorded for own, recorded in pairs if own is leaf), leaf)

    def _tensors(self) -> list[Tensor]:
        return tensors_of((self.args, dict(self.kwargs), self.delta))
