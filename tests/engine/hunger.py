"""A device that has memory for so many examples at once, as far as the engine's own passes go."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from torchfil.fisher.gradients import ExampleGradients
from torchfil.fisher.recording.record import _run


@dataclass
class Device:
    """What was asked of it."""

    most: int
    refused: list[int] = field(default_factory=list)
    served: list[int] = field(default_factory=list)
    skipped: int = 0  # calls that are served whatever they ask for

    def __call__(self, rows: int) -> None:
        self.skipped -= 1
        if self.skipped < 0 and rows > self.most:
            self.refused.append(rows)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has …")
        self.served.append(rows)


@contextlib.contextmanager
def room_for(most: int, skipped: int = 0) -> Iterator[Device]:
    """Inside, recorded passes and mapped ones over more examples run out of memory, half-way through.

    ``skipped`` passes succeed before.
    """
    device = Device(most, skipped=skipped)

    def asking(plain: Callable[..., Any]) -> Callable[..., Any]:
        def ask(gradients: ExampleGradients, *args: Any, **options: Any) -> Any:
            done = plain(gradients, *args, **options)  # random numbers are drawn and memory is taken
            device(len(gradients))
            return done

        return ask

    with (
        mock.patch("torchfil.fisher.recording.record._run", asking(_run)),
        mock.patch.object(ExampleGradients, "_map", asking(ExampleGradients._map)),
    ):
        yield device
