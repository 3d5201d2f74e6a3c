"""Activation checkpointing, left out in passes that keep what each layer saw.

``torch.utils.checkpoint`` runs a part of the model again on the way back, when the weights that a pass was called with
are put away and its layers are watched no more. A recorded pass needs all of it anyway, as the start of a second
derivative. So inside such passes the part runs as if it stood there by itself; what a pass holds is bounded by
``max_memory``, which cuts a batch into pieces. The training loop's own forward pass keeps its checkpoints, but under
Opacus's hooks, which would see a layer twice.
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
    """Inside, ``torch.utils.checkpoint`` calls its function plainly, whoever has imported it, under whatever name.

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
    """Stands for the autograd function of checkpoints with ``use_reentrant=True``."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        _tell()
        return function(*args)


def _nothing_around(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Stands for what checkpoints with ``use_reentrant=False`` do before and after the function."""
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
