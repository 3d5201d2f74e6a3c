"""Numbers read from a GPU without waiting for what is queued after them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["copy_later", "pinned_bytes", "read_later"]


def read_later(values: Tensor) -> Callable[[], Tensor]:
    """Begin to copy ``values`` to the CPU; the function that is returned waits for them and gives them."""
    if values.device.type != "cuda":
        return lambda: values.cpu()
    seen = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    wait = copy_later(values, seen)

    def read() -> Tensor:
        wait()
        return seen

    return read


def copy_later(values: Tensor, into: Tensor) -> Callable[[], object]:
    """Begin to copy ``values`` into pinned memory; the function that is returned waits until they are there."""
    if values.device.type != "cuda":
        return lambda: into.copy_(values)
    into.copy_(values, non_blocking=True)
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(values.device))
    return done.synchronize


def pinned_bytes(size: int) -> Tensor:
    """Memory that a GPU reads and writes by itself, uint8 [size]; plain memory where there is none."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
