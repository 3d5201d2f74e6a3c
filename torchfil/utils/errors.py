"""Errors that more than one module raises, under names that users of Opacus know."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, SupportsIndex

import torch

from torchfil.utils.trees import tensors_of

_OUT_OF_MEMORY = (
    "DefaultCPUAllocator: ",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


class UnsupportedModuleError(ValueError):
    """The model holds a module for which per-example quantities are undefined or not smooth.

    If Opacus is loaded, this is also an ``opacus.validators.errors.UnsupportedModuleError``: a loop
    that catches Opacus's error catches this one. The class is chosen when the error is created,
    just as creating an ``OSError`` can yield a ``FileNotFoundError``. A loop that names Opacus's
    class has loaded it, so this module need not.
    """

    def __new__(cls, *args: object) -> UnsupportedModuleError:
        """An error of this class, and of Opacus's if that is loaded."""
        kind: Any = cls
        opacus_errors = sys.modules.get("opacus.validators.errors")
        if opacus_errors is not None:
            kind = _also(kind, opacus_errors.UnsupportedModuleError)
        return super().__new__(kind, *args)


@cache
def _also(ours: type[Any], theirs: type[ValueError]) -> type[Any]:
    """A class that is both, under our name; its errors are pickled as ours."""
    if issubclass(ours, theirs):
        return ours
    own = {
        "__module__": ours.__module__,
        "__qualname__": ours.__qualname__,
        "__doc__": ours.__doc__,
    }
    return type(
        ours.__name__, (ours, theirs), {**own, "__reduce__": lambda error: (ours, error.args)}
    )


class RunFileError(ValueError):
    """A file is not a saved run, is damaged, or was written by another version."""


class CheckpointError(ValueError):
    """A checkpoint file is damaged or truncated, or was not written by torchfil."""


class OfRun:
    """A part of a run, which is neither copied nor pickled: nobody would count what a copy
    releases.

    Besides, torch's optimizer changes its class while it is copied, and every private optimizer of
    the process failed.
    """

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """As for any object of an engine before make_private, which launchers of processes copy.

        Otherwise refused.

        Raises:
            TypeError: It belongs to a run.
        """
        if getattr(self, "_made", self) is None:
            return super().__reduce_ex__(protocol)
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled: nobody would count what the copy "
            "releases. Save the run with engine.save_checkpoint, or make a new engine for "
            "another run. Weights and optimizer state are in state_dict()."
        )


def ran_out(error: RuntimeError) -> bool:
    """Whether a device ran out of memory.

    Example:
        >>> (
        ...     ran_out(torch.OutOfMemoryError("CUDA out of memory.")),
        ...     ran_out(RuntimeError("shapes differ")),
        ... )
        (True, False)
    """
    return isinstance(error, torch.OutOfMemoryError) or any(
        text in str(error) for text in _OUT_OF_MEMORY
    )


@contextlib.contextmanager
def installed_by(extra: str, needs: str) -> Iterator[None]:
    """Inside, an import that fails tells what needs it, and which extra of torchfil installs it."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{needs}: pip install 'torchfil[{extra}]'") from error


@contextlib.contextmanager
def all_or_nothing(*parts: tuple[Callable[[], Any], Callable[[Any], Any]]) -> Iterator[None]:
    """If an error occurs inside, changes are undone.

    A part is a pair of functions that read and set its state.

    Tensors are kept in main memory until then: a GPU need not hold two copies.
    """
    before: list[tuple[Callable[[Any], Any], Any]] = []
    for read, set_state in parts:
        state = read()
        copies = {id(leaf): leaf.detach().to("cpu", copy=True) for leaf in tensors_of(state)}
        # deepcopy takes these, and copies the rest
        before.append((set_state, copy.deepcopy(state, copies)))
    try:
        yield
    except BaseException:
        for set_state, state in before:
            set_state(state)
        raise


@contextlib.contextmanager
def put_back_after_errors(dicts: Iterable[dict[Any, Any]]) -> Iterator[None]:
    """If an error occurs inside, or Ctrl-C, these dicts hold what they held before.

    Lists in them are copied.
    """
    before = [
        (own, {key: each[:] if type(each) is list else each for key, each in own.items()})
        for own in dicts
    ]
    try:
        yield
    except BaseException:
        for own, values in before:
            own.update(values)
        raise


def require(holds: bool, message: str) -> None:
    """Raise ValueError with this message unless the condition holds; NaN satisfies no comparison.

    Example:
        >>> require(1 <= 0, "num_probes=0 must be at least 1")
        Traceback (most recent call last):
        ValueError: num_probes=0 must be at least 1
    """
    if not holds:
        raise ValueError(message)
