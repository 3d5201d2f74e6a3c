"""Whether the GPU kernels of :mod:`torchfil.fisher.rules.kernels` serve a tensor; torch computes everything else.

A pass that is traced for compilation uses only torch's operations: the compiler makes its own kernels.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor

__all__ = ["kernels_for"]

logger = logging.getLogger(__name__)

_DTYPES = (torch.float32, torch.float64)
_WITH_REDUCED = (*_DTYPES, torch.bfloat16, torch.float16)


def kernels_for(tensor: Tensor, *, reduced: bool = False) -> Any:
    """The module of kernels, or None if torch must compute: on CPUs, without Triton, for other dtypes or GPUs.

    ``reduced`` says that bfloat16 and float16 are served, too.

    Triton launches on the current GPU, whichever GPU holds the tensors.
    """
    if (
        not tensor.is_cuda
        or tensor.dtype not in (_WITH_REDUCED if reduced else _DTYPES)
        or tensor.device.index != torch.cuda.current_device()
    ):
        return None
    return _kernels(tensor.device)


@functools.cache
def _kernels(device: torch.device) -> Any:
    """The kernels, tried once: Triton may be missing, lack a compiler, or not support the GPU."""
    try:
        from torchfil.fisher.rules import kernels

        probe = torch.ones(8, device=device)
        kernels.tanh_pulled_twice(probe, probe, probe)
    except Exception as error:
        logger.info("Triton does not work on %s, so second derivatives are slower: %s", device, error)
        return None
    return kernels
