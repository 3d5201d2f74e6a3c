"""Substitutes for layers and functions with a slow second derivative, used inside a recorded pass.

The outputs are the same. Derivatives with respect to the layers' weights are not defined, because a recorded pass
treats weights as constants. Each family of layers registers its own substitutes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchfil.fisher.rules.inheritance import keeps_forward

__all__ = [
    "FastFunctions",
    "is_served",
    "register_function",
    "register_named_substitute",
    "register_substitute",
    "with_substitutes",
]

Layer = TypeVar("Layer", bound=nn.Module)

_SUBSTITUTES: dict[type[nn.Module], tuple[str, Callable[[Any], Callable[..., Any]]]] = {}
_NAMED: dict[str, tuple[str, Callable[[Any], Callable[..., Any]]]] = {}  # of packages not imported here
_FUNCTIONS: dict[tuple[str, Callable[..., Any]], Callable[..., Tensor | None]] = {}  # by device and function


def register_substitute(
    kind: type[Layer],
    make: Callable[[Layer], Callable[..., Any]],
    *,
    method: str = "forward",
    overwrite: bool = False,
) -> None:
    """Compute modules of this class, and of subclasses that keep its forward pass, by ``make(module)``.

    Args:
        kind: The class.
        make: Returns the substitute for the method of a module.
        method: The method that it replaces.
        overwrite: Whether to replace the class's current substitute.

    Raises:
        ValueError: The class already has a substitute, and ``overwrite`` is False.
    """
    if kind in _SUBSTITUTES and not overwrite:
        raise ValueError(
            f"{kind.__name__} already has a substitute, {_SUBSTITUTES[kind][1].__qualname__}; pass overwrite=True to "
            "replace it"
        )
    _SUBSTITUTES[kind] = method, make
    _substitute_of.cache_clear()


def register_named_substitute(name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
    """As :func:`register_substitute`, for ``forward`` of a class of a package that may be missing.

    Args:
        name: The full name of the class: "transformers.activations.NewGELUActivation".
        make: Returns the substitute for the method of a module.
    """
    _NAMED[name] = "forward", make
    _substitute_of.cache_clear()


def register_function(
    function: Callable[..., Any],
    substitute: Callable[..., Tensor | None],
    *,
    device: str = "cpu",
    overwrite: bool = False,
) -> None:
    """Compute this torch function by ``substitute`` inside recorded passes on this device; None from it: by torch.

    Raises:
        ValueError: The function already has a substitute, and ``overwrite`` is False.
    """
    if (device, function) in _FUNCTIONS and not overwrite:
        raise ValueError(
            f"{function.__name__} already has a substitute, {_FUNCTIONS[device, function].__qualname__}; pass "
            "overwrite=True to replace it"
        )
    _FUNCTIONS[device, function] = substitute


@contextlib.contextmanager
def with_substitutes(model: nn.Module, but: Collection[nn.Module] = ()) -> Iterator[None]:
    """Inside, layers that have a substitute are computed by it.

    Exceptions are methods set on a module itself, subclasses with another forward pass, and the modules ``but``.
    """
    changed: list[tuple[nn.Module, str]] = []
    try:
        for module in model.modules():
            method, make = _substitute_of(type(module))  # type: ignore[arg-type]
            if make is not None and method not in vars(module) and module not in but:
                setattr(module, method, make(module))
                changed.append((module, method))
        yield
    finally:
        for module, method in changed:
            delattr(module, method)


@functools.cache
def _substitute_of(kind: type[nn.Module]) -> tuple[str, Callable[[Any], Callable[..., Any]] | None]:
    for base in kind.__mro__:
        if base in _SUBSTITUTES and keeps_forward(kind, base):
            return _SUBSTITUTES[base]
    return _NAMED.get(f"{kind.__module__}.{kind.__qualname__}", ("", None))


class FastFunctions(TorchFunctionMode):
    """Inside, functions that have a substitute on this device ("cpu", "cuda") are computed by it."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._substitutes = {function: other for (kind, function), other in _FUNCTIONS.items() if kind == device}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        substitute = self._substitutes.get(func)
        result = substitute(*args, **kwargs) if substitute is not None else None
        return func(*args, **kwargs) if result is None else result


def is_served(value: Any) -> bool:
    """Whether substitutes of functions apply: to a differentiated tensor on a CPU, in float32 or float64.

    They do not apply under autocast, which cannot see inside them.
    """
    return (
        isinstance(value, Tensor)
        and value.requires_grad
        and value.device.type == "cpu"
        and value.dtype in (torch.float32, torch.float64)
        and not torch.is_autocast_enabled("cpu")
    )
