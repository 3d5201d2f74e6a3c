"""A device that has memory for so many examples at once, as far as the engine's own passes go."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from torchfil.fisher.gradients import ExampleGradients
from torchfil.fisher.recording.record import _run


@contextlib.contextmanager
def room_for(most: int, skipped: int = 0) -> Iterator[SimpleNamespace]:
    """Inside, recorded passes and mapped ones over more examples run out of memory, half-way
    through.

    ``skipped`` passes succeed before. Gives the sizes of those that were ``served`` and
    ``refused``.
    """
    device, passes = SimpleNamespace(served=[], refused=[]), itertools.count()

    def asking(plain: Callable[..., Any]) -> Callable[..., Any]:
        def ask(gradients: ExampleGradients, *args: Any, **options: Any) -> Any:
            # random numbers are drawn and memory is taken
            done = plain(gradients, *args, **options)
            if next(passes) >= skipped and len(gradients) > most:
                device.refused.append(len(gradients))
                raise torch.OutOfMemoryError(
                    "CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has …"
                )
            device.served.append(len(gradients))
            return done

        return ask

    with (
        mock.patch("torchfil.fisher.recording.record._run", asking(_run)),
        mock.patch.object(ExampleGradients, "_map", asking(ExampleGradients._map)),
    ):
        yield device
