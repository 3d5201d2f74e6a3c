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
    wait = copy_later(values, seen)

    def read() -> Tensor:
        wait()
        return seen

    return read


def copy_later(values: Tensor, into: Tensor) -> Callable[[], object]:
    """Start to copy ``values`` into pinned memory; the returned function waits until the copy is complete."""
    if values.device.type != "cuda":
        return lambda: into.copy_(values)
    into.copy_(values, non_blocking=True)
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(values.device))
    return done.synchronize


def pinned_bytes(size: int) -> Tensor:
    """Pinned memory, which a GPU reads and writes directly, uint8 [size]; plain memory if there is no GPU."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
