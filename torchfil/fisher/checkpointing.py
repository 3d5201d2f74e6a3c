"""Activation checkpointing, switched off in recorded passes.

``torch.utils.checkpoint`` runs a part of the model again in the backward pass. By then the weights that the pass was
called with are gone, and its layers are no longer watched. A recorded pass needs all activations anyway, as the start
of a second derivative. Inside such passes, the part therefore runs as if it were not checkpointed; ``max_memory``
bounds the memory of a pass by cutting the batch into pieces. The training loop's own forward pass keeps its
checkpoints, except under Opacus's hooks, which would see a layer twice.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch.utils.checkpoint as torch_checkpoint

__all__ = ["without_checkpoints"]

logger = logging.getLogger(__name__)

_told = False


@contextlib.contextmanager
def without_checkpoints() -> Iterator[None]:
    """Inside, ``torch.utils.checkpoint`` simply calls its function, wherever and under whatever name it was imported.

    Example:
        >>> import torch
        >>> x = torch.ones(2, requires_grad=True)
        >>> with without_checkpoints():
        ...     y = torch.utils.checkpoint.checkpoint(torch.tanh, x, use_reentrant=False)
        >>> type(y.grad_fn).__name__
        'TanhBackward0'
    """
    plain = {"CheckpointFunction": _PlainCall, "_checkpoint_without_reentrant_generator": _nothing_around}
    before = {name: getattr(torch_checkpoint, name) for name in plain}
    for name, value in plain.items():
        setattr(torch_checkpoint, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(torch_checkpoint, name, value)


class _PlainCall:
    """Replaces the autograd function of checkpoints with ``use_reentrant=True``."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        _tell()
        return function(*args)


def _nothing_around(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Replaces what checkpoints with ``use_reentrant=False`` do before and after the function."""
    _tell()
    yield


def _tell() -> None:
    global _told
    if not _told:
        _told = True
        logger.info(
            "activation checkpoints are skipped in the accounting's passes, which keep what each layer saw; "
            "Execution(max_memory=…) limits their memory"
        )
