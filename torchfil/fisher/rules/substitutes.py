"""Layers and functions whose own second derivative is slow, computed in another way inside a recorded pass.

The outputs are the same; derivatives with respect to the layers' weights are not defined, which a recorded pass takes
as constants. The families of layers register what they have.
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
_NAMED: dict[str, tuple[str, Callable[[Any], Callable[..., Any]]]] = {}  # of packages that are not imported here
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
        make: From a module to what stands for its method.
        method: Which of the module's methods is replaced.
        overwrite: Whether to replace the class's present substitute.

    Raises:
        ValueError: The class has a substitute, and ``overwrite`` is False.
    """
    if kind in _SUBSTITUTES and not overwrite:
        raise ValueError(
            f"{kind.__name__} has a substitute already, {_SUBSTITUTES[kind][1].__qualname__}; pass overwrite=True to "
            "replace it"
        )
    _SUBSTITUTES[kind] = method, make
    _substitute_of.cache_clear()


def register_named_substitute(name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
    """As :func:`register_substitute`, for ``forward`` of a class of a package that may be missing.

    Args:
        name: Of the class, with its module: "transformers.activations.NewGELUActivation".
        make: From a module to what stands for its method.
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
    """Compute this torch function by ``substitute`` inside recorded passes on such a device; by itself for None.

    Raises:
        ValueError: The function has a substitute, and ``overwrite`` is False.
    """
    if (device, function) in _FUNCTIONS and not overwrite:
        raise ValueError(
            f"{function.__name__} has a substitute already, {_FUNCTIONS[device, function].__qualname__}; pass "
            "overwrite=True to replace it"
        )
    _FUNCTIONS[device, function] = substitute


@contextlib.contextmanager
def with_substitutes(model: nn.Module, but: Collection[nn.Module] = ()) -> Iterator[None]:
    """Inside, the model's layers that have a substitute are computed by it.

    Left alone are methods set on a module itself, subclasses with a forward pass of their own, and the modules ``but``.
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
    """Inside, functions that have a substitute on such a device ("cpu", "cuda") are computed by it."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._substitutes = {function: other for (kind, function), other in _FUNCTIONS.items() if kind == device}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        substitute = self._substitutes.get(func)
        result = substitute(*args, **kwargs) if substitute is not None else None
        return func(*args, **kwargs) if result is None else result


def is_served(value: Any) -> bool:
    """Whether functions' substitutes are for a value: a tensor, differentiated, on a CPU, float32 or float64.

    Under autocast none is, which would not look into them.
    """
    return (
        isinstance(value, Tensor)
        and value.requires_grad
        and value.device.type == "cpu"
        and value.dtype in (torch.float32, torch.float64)
        and not torch.is_autocast_enabled("cpu")
    )
