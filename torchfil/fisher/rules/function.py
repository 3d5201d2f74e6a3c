"""Autograd functions that are cheap to call: a pass calls hundreds of them, mostly for small tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import unwrap_dead_wrappers

__all__ = ["Function"]


class Function(torch.autograd.Function):
    """:class:`torch.autograd.Function` for positional arguments without defaults.

    torch binds the arguments to the signature of ``forward`` at every call, which takes longer than all the rest (on
    two CPU cores, a step of a ViT-Tiny took 6 % longer).
    """

    @classmethod
    def apply(cls, *args: Any) -> Tensor:
        """As in torch; a tuple if the function has several results."""
        if torch._C._are_functorch_transforms_active():
            return super().apply(*args)
        return super(torch.autograd.Function, cls).apply(*unwrap_dead_wrappers(args))  # type: ignore[misc]
