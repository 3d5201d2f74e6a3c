"""Flags of a step's checks: they stay on the device, and are read together.

A failed check is then looked at closely, to say what is wrong.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchfil.engine.checks import Check
from torchfil.utils.trees import read_later


@dataclass(frozen=True)
class Flag:
    """A check whose result is still on the device.

    Attributes:
        failed: Whether it failed, bool [].
        error: Called only if it failed: raises or returns what is wrong, an exception or a warning
            to show once; None if a closer look finds nothing.
    """

    failed: Tensor
    error: Callable[[], Exception | None]


class Flags:
    """Those of a step."""

    def __init__(self) -> None:
        self.warned: set[str] = set()  # warnings appear only once
        self._pending: list[Flag] = []  # a GPU keeps computing until they are read, all at once
        self._reading: list[tuple[list[Flag], Callable[[], Tensor]]] = []
        self._late: list[Flag] = []  # read at the next step, because a GPU is still computing

    def begin_step(self) -> None:
        """Begin with what the last step has left to check."""
        self._pending, self._late, self._reading = self._late, [], []

    def forget_last_step(self) -> None:
        """Forget what a step has left to check: other weights were loaded since."""
        self._late = []

    def ask(self, checks: Sequence[Check], about: Any) -> None:
        """Ask these checks about something."""
        for check in checks:
            failed = check.flag(about)
            if failed is not None:
                late = check.is_late and failed.is_cuda
                flag = Flag(failed, partial(check.explain, about))
                (self._late if late else self._pending).append(flag)

    def start_reading(self) -> None:
        """Start to copy the results so far to the CPU, before work is queued that they need not
        wait for.
        """
        if self._pending:
            failed = torch.stack([flag.failed for flag in self._pending])
            self._reading.append(
                (self._pending, read_later(failed) if failed.is_cuda else failed.cpu)
            )
            self._pending = []

    def raise_if_any(self) -> None:
        """Read all flags so far; raise the first error, and show new warnings."""
        self.start_reading()
        reading, late = self._reading, self._late
        self._reading, self._late = [], []
        for flags, read in reading:
            for flag, bad in zip(flags, read().tolist(), strict=True):
                error = flag.error() if bad else None
                if isinstance(error, Warning):
                    self.warn_once(str(error))
                elif error is not None:
                    raise error
        self._late = late  # of a step that is not refused

    def warn_once(self, text: str) -> None:
        """Warn, unless it was said before."""
        if text not in self.warned:
            self.warned.add(text)
            warnings.warn(text, stacklevel=2)
