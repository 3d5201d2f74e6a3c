"""Layers that hold several weights: their substitutes report each use of a weight to the recorded pass.

From outside, a recorded pass sees only a layer's input and output. In between, a recurrent layer uses four weights at
every time step. Its substitute reports what each weight was applied to and the result, as if each were a layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

from torchfil.fisher.rules.base import LayerRule
from torchfil.fisher.rules.inheritance import keeps_forward
from torchfil.fisher.rules.substitutes import register_substitute

__all__ = ["listening", "register_telling", "tell_use", "tells_uses"]

Listener = Callable[[nn.Module, LayerRule, Tensor, Tensor, Mapping[str, str]], None]

_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)
_TELLING: set[type[nn.Module]] = set()


def register_telling(kind: type[nn.Module], make: Callable[[Any], Callable[..., Any]]) -> None:
    """Compute modules of exactly this class by ``make(module)``, which reports all uses of their parameters."""
    register_substitute(kind, make)
    _TELLING.add(kind)


def tells_uses(module: nn.Module) -> bool:
    """Whether the uses of the module's and its children's parameters are reported inside a recorded pass."""
    kind = type(module)
    return any(base in _TELLING and keeps_forward(kind, base) for base in kind.__mro__)


def tell_use(module: nn.Module, rule: LayerRule, a: Tensor, output: Tensor, names: Mapping[str, str]) -> Tensor:
    """Report that parameters were applied to ``a``, [batch, …], with the result ``output``, [batch, …].

    Args:
        module: The layer.
        rule: The rule of a layer with only these parameters.
        a: The tensor that they were applied to.
        output: The result.
        names: The parameters' names in the module by their names in the rule.

    Returns:
        The tensor to continue with instead of ``output``.
    """
    listener = _listener.get()
    if listener is None:
        return output
    if not output.requires_grad:
        output = output.detach().requires_grad_()
    listener(module, rule, a, output, names)
    return output


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Inside, ``listener`` is called with the arguments of every :func:`tell_use`."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
