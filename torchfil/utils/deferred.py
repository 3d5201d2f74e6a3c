"""Numbers read from a GPU without waiting for what is queued after them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def read_later(values: Tensor) -> Callable[[], Tensor]:
    """Start to copy ``values`` to the CPU; the returned function waits for the copy and returns it."""
    if values.device.type != "cuda":
        return lambda: values.cpu()
    seen = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    seen.copy_(values, non_blocking=True)
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(values.device))

    def read() -> Tensor:
        done.synchronize()
        return seen

    return read
