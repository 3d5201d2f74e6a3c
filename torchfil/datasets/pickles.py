"""Python's pickles as data: arrays, numbers, texts and containers. No code that they name is ever called.

A pickle is a program: it names functions, which unpickling imports and calls. Here, the few names in an array's pickle
are mapped to our own functions, which only read their arguments; every other name is refused. Even numpy's own reader
of array pickles does not run, because it trusts the types and sizes in the file.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from torchfil.datasets.files import DataFormatError

_TYPES = frozenset({"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"})


def load_plain_pickle(data: bytes, name: str = "the pickle") -> Any:
    """The content of a pickle of plain data; a pickle that needs any code is refused.

    Args:
        data: The pickle, of any protocol, including Python 2's (whose texts are read as latin-1).
        name: The file's name in errors.

    Raises:
        DataFormatError: The pickle names a class or function, holds an array of objects, or is damaged.

    Example:
        >>> load_plain_pickle(pickle.dumps({"data": np.arange(3, dtype=np.uint8), "labels": [1, 0, 2]}, protocol=2))
        {'data': array([0, 1, 2], dtype=uint8), 'labels': [1, 0, 2]}
        >>> load_plain_pickle(pickle.dumps(print))
        Traceback (most recent call last):
            ...
        torchfil.datasets.files.DataFormatError: the pickle asks for builtins.print, ...
    """
    try:
        return _finished(_PlainUnpickler(io.BytesIO(data)).load())
    except DataFormatError as error:
        raise DataFormatError(f"{name} {error}") from None
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise DataFormatError(
            f"{name} is not a complete pickle of plain data ({type(error).__name__}: {error})"
        ) from None


class _Type:
    """An array's type as a pickle describes it: first a name, later a byte order."""

    __slots__ = ("dtype",)

    def __init__(self, code: Any) -> None:
        text = code.decode("latin-1") if isinstance(code, bytes) else code
        if not isinstance(text, str) or text not in _TYPES:
            raise DataFormatError(f"holds an array of type {text!r}; only numbers can be read")
        self.dtype = np.dtype(text)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        order: Any = state[1].decode("latin-1") if isinstance(state[1], bytes) else state[1]
        if order not in ("<", ">", "|", "="):
            raise DataFormatError(f"holds an array with the byte order {order!r}")
        self.dtype = self.dtype.newbyteorder(order)


class _Array:
    """An array as a pickle describes it; its entries come as bytes."""

    __slots__ = ("array",)

    def __init__(self) -> None:
        self.array: np.ndarray | None = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, fortran, entries = state
        raw = entries.encode("latin-1") if isinstance(entries, str) else entries
        if not isinstance(kind, _Type) or not isinstance(raw, bytes):
            raise DataFormatError("holds an array of objects; only numbers can be read")
        if math.prod(shape) * kind.dtype.itemsize != len(raw):
            raise DataFormatError(f"holds an array of shape {shape} and type {kind.dtype} in {len(raw)} bytes")
        values = np.frombuffer(raw, kind.dtype)
        self.array = (values.reshape(shape[::-1]).T if fortran else values.reshape(shape)).copy()


class _PlainUnpickler(pickle.Unpickler):
    """Imports nothing: allowed names become bound methods of this object, which a pickle can call but not change."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, encoding="latin-1")

    def find_class(self, module: str, name: str) -> Any:
        """The method that replaces this name."""
        stands_for: dict[tuple[str, str], Callable[..., Any] | str] = {
            ("numpy.core.multiarray", "_reconstruct"): self._empty_array,
            ("numpy._core.multiarray", "_reconstruct"): self._empty_array,
            ("numpy.core.numeric", "_frombuffer"): self._array_from_bytes,
            ("numpy._core.numeric", "_frombuffer"): self._array_from_bytes,
            ("numpy", "ndarray"): "ndarray",
            ("numpy", "dtype"): self._type,
            ("_codecs", "encode"): self._encoded,
            ("__builtin__", "bytes"): self._no_bytes,
        }
        if (module, name) not in stands_for:
            raise DataFormatError(
                f"asks for {module}.{name}, which is not plain data; it was not called. Files from the publisher hold "
                "only arrays, texts and numbers: download the file again"
            )
        return stands_for[module, name]

    def _empty_array(self, *_: Any) -> _Array:
        return _Array()

    def _array_from_bytes(self, raw: Any, kind: Any, shape: Any, order: Any) -> _Array:
        array = _Array()
        array.__setstate__((1, shape, kind, order == "F", bytes(raw) if isinstance(raw, bytearray) else raw))
        return array

    def _type(self, code: Any, *_: Any) -> _Type:
        return _Type(code)

    def _no_bytes(self) -> bytes:
        return b""

    def _encoded(self, text: str, encoding: str) -> bytes:
        if encoding not in ("latin1", "latin-1"):
            raise DataFormatError(f"holds a text in {encoding!r}; only latin-1 can be read")
        return text.encode("latin-1")


def _finished(value: Any) -> Any:
    """The containers, with arrays in place of their descriptions."""
    if isinstance(value, dict):
        return {key: _finished(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_finished(entry) for entry in value)
    return value.array if isinstance(value, _Array) else value
