"""Checkpoint files are read only if they are complete: an error names a damaged file, and nothing in it is used.

The SHA-256 of everything that ``torch.save`` has written follows at the end of the file, where ``torch.load`` does not
look. Files of earlier versions have no checksum, and are read without one.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import zipfile
from collections.abc import Iterator
from typing import IO, Any

import torch

from torchfil.utils.errors import CheckpointError
from torchfil.utils.files import replaced_when_complete, sha256

__all__ = ["MARK", "check_stored", "load_whole", "sealed_when_complete"]

MARK = {"torchfil_checksum": "sha256"}  # in the content: a file that has lost its checksum is not an earlier version's
_SEAL = b"torchfil-sha256:"
_LENGTH = len(_SEAL) + 64


@contextlib.contextmanager
def sealed_when_complete(path: str | os.PathLike[str] | IO[bytes]) -> Iterator[IO[bytes]]:
    """An open file for a content with :data:`MARK`; at the end it gets its checksum and replaces ``path``.

    See :func:`torchfil.utils.files.replaced_when_complete`.
    """
    if not isinstance(path, (str, os.PathLike)):
        content = io.BytesIO()
        yield content
        path.write(content.getvalue() + _seal_of(content))
        return
    with replaced_when_complete(path) as temporary:
        with open(temporary, "wb") as file:  # our own file, because torch's errors do not mention a full disk
            yield file
        with open(temporary, "rb+") as file:
            seal = _seal_of(file)
            file.seek(0, os.SEEK_END)
            file.write(seal)


def load_whole(path: str | os.PathLike[str] | IO[bytes], **options: Any) -> dict[str, Any]:
    """The content that ``torch.save`` has written to a file: only tensors and plain values; safe on files from others.

    Guarantees:
        * A file that was truncated, or in which any bit has changed, is refused; so is one that holds anything but
          tensors and plain values.

    Args:
        path: The file.
        **options: Options of ``torch.load``.

    Raises:
        OSError: The file cannot be read.
        CheckpointError: It is damaged, or not a checkpoint.

    Example:
        >>> import io
        >>> file = io.BytesIO()
        >>> with sealed_when_complete(file) as content:
        ...     torch.save({"step": 3, **MARK}, content)
        >>> load_whole(io.BytesIO(file.getvalue()))
        {'step': 3}
        >>> load_whole(io.BytesIO(file.getvalue()[:-1]))
        Traceback (most recent call last):
        ...
        torchfil.utils.errors.CheckpointError: the checkpoint is damaged or truncated (its checksum is missing)...
    """
    is_named = isinstance(path, (str, os.PathLike))
    named = str(path) if is_named else "the checkpoint"
    with open(path, "rb") if is_named else io.BytesIO(path.read()) as file:  # type: ignore[arg-type,union-attr]
        sealed = _check_seal(file, named)
        try:
            check_stored(file)
            content = torch.load(path if is_named else file, **{"weights_only": True, **options})
        except MemoryError:
            raise
        except Exception as error:  # torch, pickle and zipfile raise many kinds of errors
            unsafe = isinstance(error, pickle.UnpicklingError)  # its text recommends running what the file holds
            reason = "it cannot be unpickled safely" if unsafe else str(error).partition("\n")[0][:200]
            raise CheckpointError(_refusal(named, reason)) from error
    if not isinstance(content, dict):
        raise CheckpointError(_refusal(named, f"it holds a {type(content).__name__}"))
    marked = [content.pop(key, None) == value for key, value in MARK.items()]
    if any(marked) and not sealed:
        raise CheckpointError(_refusal(named, "its checksum is missing"))
    return content


def check_stored(file: IO[bytes]) -> None:
    """Raise where a file of ``torch.save`` would be larger in memory than on the disk; its position stays the same.

    ``torch.save`` compresses nothing. A file that is compressed, or whose parts overlap, was made to fill the memory.
    """
    place, size = file.tell(), file.seek(0, os.SEEK_END)
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    if any(entry.compress_type for entry in entries) or sum(entry.file_size for entry in entries) > size:
        raise ValueError("it is compressed, which torch.save does not do")
    file.seek(place)


def _seal_of(file: IO[bytes]) -> bytes:
    file.seek(0)
    return _SEAL + sha256(file).encode()


def _check_seal(file: IO[bytes], named: str) -> bool:
    """Whether the file has a checksum, after checking it; the position is then at the start."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _LENGTH))
    seal = file.read()
    file.seek(0)
    if not seal.startswith(_SEAL):
        return False
    if _SEAL + sha256(file, size - _LENGTH).encode() != seal:
        raise CheckpointError(_refusal(named, "its checksum does not fit its content"))
    file.seek(0)
    return True


def _refusal(named: str, reason: str) -> str:
    return (
        f"{named} is damaged or truncated ({reason}), or it is not a torchfil checkpoint, which holds only tensors and "
        "plain values. Nothing was loaded: copy the file again, or resume from an earlier checkpoint."
    )
