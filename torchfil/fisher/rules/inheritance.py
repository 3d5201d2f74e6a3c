"""Which subclasses compute the same as their base layer: mostly those of timm, Hugging Face and Opacus."""

from __future__ import annotations

from torch import nn

__all__ = ["keeps_forward"]

_HARMLESS = frozenset({"extra_repr", "reset_parameters"})  # the forward pass does not depend on them


def keeps_forward(kind: type[nn.Module], base: type[nn.Module]) -> bool:
    """Whether a subclass computes the same as its base: it overrides nothing that the base defines.

    Example:
        >>> class Named(nn.Linear):
        ...     def extra_repr(self):
        ...         return "mine"
        >>> class Other(nn.Linear):
        ...     def forward(self, x):
        ...         return 2 * super().forward(x)
        >>> keeps_forward(Named, nn.Linear), keeps_forward(Other, nn.Linear)
        (True, False)
    """
    if base is nn.Module:
        return True
    order = kind.__mro__
    below = order[: order.index(base)]
    vital = {"forward", "__call__", "__getattr__", "__getattribute__"}
    for part in base.__mro__:
        if part not in (nn.Module, object):
            names = {*vars(part), *getattr(part, "__annotations__", ())}
            vital |= {name for name in names if not name.startswith("__") and name not in _HARMLESS}
    return not any(vital & set(vars(part)) for part in below)
