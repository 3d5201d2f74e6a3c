"""A module whose calls in training go through the engine, although other code holds and calls the module itself.

Lightning needs its own module, so the model cannot be wrapped. Instead, its ``forward`` is replaced on the instance,
and the engine gets a second module object with the same parts and parameters and the plain ``forward``.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

__all__ = ["Redirected"]


class Redirected:
    """Redirects a module's calls in training to a private module.

    Args:
        module: The module that other code calls.
        own: Names of attributes that belong to the other code and not to the model.

    Attributes:
        twin: The module for the engine: another object with the very same children, parameters and buffers.

    Example:
        >>> layer = nn.Linear(1, 1)
        >>> redirected = Redirected(layer)
        >>> redirected.twin.weight is layer.weight
        True
        >>> redirected.to(lambda x: x + 1)  # in place of what make_private returns
        >>> layer(torch.zeros(1)), layer.eval()(torch.zeros(1)).shape
        (tensor([1.]), torch.Size([1]))
        >>> redirected.undo()
        >>> "forward" in vars(layer)
        False
    """

    def __init__(self, module: nn.Module, own: Collection[str] = ()) -> None:
        self.module = module
        self.twin = copy.copy(module)
        self._own = frozenset(own) - {"training"} | {"forward"}
        for name in self._own & vars(self.twin).keys() - vars(nn.Module()).keys():
            vars(self.twin)[name] = None

    def to(self, private: Any) -> None:
        """From now on, calls in training go to the private module made from :attr:`twin`."""
        plain = self.module.forward
        for name in self._own & vars(self.module).keys():  # the copy left them out; the twin may need the trainer
            if not isinstance(vars(self.module)[name], int | float | str | dict | list | None):
                vars(self.twin)[name] = vars(self.module)[name]

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not (self.module.training and torch.is_grad_enabled()):
                return plain(*args, **kwargs)
            self._follow()
            return private(*args, **kwargs)

        self.module.forward = forward

    def undo(self) -> None:
        """Restore the module's own ``forward``."""
        vars(self.module).pop("forward", None)

    def _follow(self) -> None:
        """Copy the module's current mode and plain attributes to the twin."""
        vars(self.twin).update({name: value for name, value in vars(self.module).items() if name not in self._own})
