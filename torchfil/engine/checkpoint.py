"""Files that are replaced only when complete, and torch's random state."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

__all__ = ["random_state", "replaced_when_complete", "set_random_state"]


@contextlib.contextmanager
def replaced_when_complete(path: str | os.PathLike[str]) -> Iterator[str]:
    """A temporary file beside ``path`` that takes its place at the end, and vanishes if anything fails."""
    target = Path(path)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.name, suffix=".tmp")
    os.close(handle)
    try:
        yield temporary
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def random_state() -> dict[str, Any]:
    """The state of torch's global generators."""
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """The inverse of :func:`random_state`."""
    torch.set_rng_state(state["cpu"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([part.cpu() for part in state["cuda"]])
