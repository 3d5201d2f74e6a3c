"""Whether operations run now, or are traced to run later."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

__all__ = ["being_traced", "has_no_value_yet"]


def being_traced() -> bool:
    """Whether operations are being traced for a compiler."""
    return get_proxy_mode() is not None


def has_no_value_yet(tensor: Tensor) -> bool:
    """Whether the tensor's numbers cannot be read: it is being traced, or captured in a CUDA graph."""
    return being_traced() or (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
