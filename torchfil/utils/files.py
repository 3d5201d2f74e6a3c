"""Files that are replaced only when complete."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["flush", "replaced_when_complete", "write_bytes"]


@contextlib.contextmanager
def replaced_when_complete(path: str | os.PathLike[str]) -> Iterator[str]:
    """A temporary file beside ``path`` that takes its place at the end, and vanishes if anything fails.

    Guarantees:
        * ``path`` holds the old content or the whole new one at any time, also where several processes write it.
        * Only the owner may read the file (mode 0600).
        * The content is on the disk before the name is.
        * An ``OSError`` about the temporary file names ``path`` instead.
    """
    target = Path(path)
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error
    os.close(handle)
    try:
        yield temporary
        flush(temporary)
        os.replace(temporary, target)
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        if isinstance(error, OSError) and error.filename == temporary:
            raise OSError(error.errno, error.strerror, os.fspath(path)) from error
        raise


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file by :func:`replaced_when_complete`."""
    with replaced_when_complete(path) as temporary, open(temporary, "wb") as file:
        file.write(content)


def flush(path: str | os.PathLike[str]) -> None:
    """Wait until a file's content is on the disk."""
    handle = os.open(path, os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
