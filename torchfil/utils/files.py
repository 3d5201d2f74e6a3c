"""Files and folders that are replaced only when complete, whatever happens while they are
written.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # not on Windows, where leftovers stay
    fcntl = None  # type: ignore[assignment]

_SUFFIX = ".torchfil-tmp"
_CHECKSUM = b"torchfil-sha256:"  # before the 64 hexadecimal digits at the end of a file
_BLOCK = 2**20  # bytes read at once
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def replaced_when_complete(path: str | os.PathLike[str]) -> Iterator[str]:
    """A temporary file next to ``path`` that replaces it at the end, and is removed if anything
    fails.

    Guarantees:
        * At any time ``path`` holds the old content or all of the new, even if several processes
          write it.
        * Only the owner may read the file (mode 0600).
        * The content is on the disk before the name is.
        * An ``OSError`` about the temporary file, or about a lack of space, names ``path`` instead.
        * If a process is killed here, the next one that writes into the folder removes its
          leftovers.
    """
    with explain_disk_full(path), temporary_beside(path) as temporary:
        yield temporary
        flush(temporary)
        os.replace(temporary, path)


@contextlib.contextmanager
def temporary_beside(path: str | os.PathLike[str], *, folder: bool = False) -> Iterator[str]:
    """A new hidden file or folder next to ``path``, removed at the end unless it was moved.

    Missing folders above it are made. It is locked while in use. Unlocked ones were left by
    processes that were killed, and are removed first. In a folder, "old" holds the previous content
    of ``path``; it is moved back if the process died between the two moves. An ``OSError`` about
    the hidden one names ``path`` instead.
    """
    target = Path(path)
    if not target.parent.exists():  # a file in its place is named by the error below
        target.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(target.parent)
    try:
        handle, temporary = _new_temporary(target, folder)
        try:
            yield temporary
        finally:
            _remove(temporary)
            os.close(handle)
    except OSError as error:
        if not str(error.filename).endswith(_SUFFIX):
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


@contextlib.contextmanager
def explain_disk_full(path: str | os.PathLike[str]) -> Iterator[None]:
    """Inside, errors from a full disk, a quota or a limit on files name ``path`` and the space that
    is left.

    Libraries hide the operating system's error behind their own: ``torch.save`` raises a
    ``RuntimeError``.
    """
    try:
        yield
    except Exception as error:
        number = _number_of_no_space(error)
        if number is None:
            raise
        free = shutil.disk_usage(
            next(folder for folder in Path(path).absolute().parents if folder.exists())
        ).free
        raise OSError(
            number,
            f"{os.strerror(number)}; {free / 2**20:,.1f} MiB are free on that disk. The earlier "
            "file is intact, and the incomplete new one was removed. Free some space or choose "
            "another place, and save again",
            os.fspath(path),
        ) from error


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file with :func:`replaced_when_complete`."""
    with replaced_when_complete(path) as temporary, open(temporary, "wb") as file:
        file.write(content)


@contextlib.contextmanager
def atomic_write_checked(path: str | os.PathLike[str] | IO[bytes]) -> Iterator[IO[bytes]]:
    """An open file whose content gets a checksum at its end, and then replaces ``path`` (or is
    written to it if open).

    See :func:`replaced_when_complete` and :func:`append_checksum`.
    """
    if not isinstance(path, (str, os.PathLike)):
        content = io.BytesIO()
        yield content
        append_checksum(content)
        path.write(content.getvalue())
        return
    with replaced_when_complete(path) as temporary, open(temporary, "wb+") as file:
        yield file
        append_checksum(file)


def append_checksum(file: IO[bytes]) -> None:
    """Append the SHA-256 of a file's content to it.

    Readers of zip archives and pickles do not look there.

    Example:
        >>> file = io.BytesIO(b"content")
        >>> append_checksum(file)
        >>> check_checksum(file)
        >>> check_checksum(io.BytesIO(file.getvalue()[1:]))
        Traceback (most recent call last):
        ...
        ValueError: its checksum does not fit its content
    """
    file.seek(0)
    file.write(_CHECKSUM + sha256(file).encode())


def check_checksum(file: IO[bytes]) -> None:
    """Raise a ``ValueError`` unless a file ends with the checksum of what comes before.

    Then go to its start.
    """
    length = max(0, file.seek(0, os.SEEK_END) - len(_CHECKSUM) - 64)
    file.seek(length)
    found = file.read()
    if not found.startswith(_CHECKSUM):
        raise ValueError("its checksum is missing")
    file.seek(0)
    if _CHECKSUM + sha256(file, length).encode() != found:
        raise ValueError("its checksum does not fit its content")
    file.seek(0)


def sha256(file: IO[bytes], length: int | None = None) -> str:
    """The SHA-256, in hexadecimal digits, of the rest of a file, or of its next ``length`` bytes.

    Example:
        >>> import io
        >>> sha256(io.BytesIO(b"abc"))[:8], sha256(io.BytesIO(b"abcd"), 3)[:8]
        ('ba7816bf', 'ba7816bf')
    """
    digest = hashlib.sha256()
    update_digest(digest, file, length)
    return digest.hexdigest()


def update_digest(digest: hashlib._Hash, file: IO[bytes], length: int | None = None) -> None:
    """Add the rest of a file, or its next ``length`` bytes, to a digest."""
    while block := file.read(_BLOCK if length is None else min(_BLOCK, length)):
        digest.update(block)
        length = None if length is None else length - len(block)


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raise an ``OSError`` for a pipe or a device: reading it could wait forever, and twice gives
    other bytes.
    """
    where = Path(path)
    if where.exists() and not (where.is_file() or where.is_dir()):
        raise OSError(
            errno.EINVAL, "this is a pipe or a device; copy it into a file", os.fspath(path)
        )


def file_sha256(path: str | os.PathLike[str]) -> str:
    """The SHA-256 of a file's content, in hexadecimal digits."""
    check_regular(path)
    with open(path, "rb") as file:
        return sha256(file)


def flush(path: str | os.PathLike[str]) -> None:
    """Wait until a file's content is on the disk."""
    handle = os.open(path, os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _number_of_no_space(error: BaseException | None) -> int | None:
    """The operating system's number for a lack of space, from the error itself or from one that
    caused it.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in _NO_SPACE:
            return error.errno
        error = error.__cause__ or error.__context__
    return None


def _new_temporary(target: Path, folder: bool) -> tuple[int, str]:
    """An open handle that holds the lock, and the path."""
    while True:
        if folder:
            path = tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.", suffix=_SUFFIX)
            handle = os.open(path, os.O_RDONLY)
        else:
            handle, path = tempfile.mkstemp(
                dir=target.parent, prefix=f".{target.name}.", suffix=_SUFFIX
            )
        with contextlib.suppress(OSError):  # a file system without locks, where leftovers stay
            if fcntl is not None:
                fcntl.flock(handle, fcntl.LOCK_EX)
        if os.path.exists(path):  # no process removed it as a leftover before it was locked
            return handle, path
        os.close(handle)


def _remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of processes that have ended: their locks are free."""
    if fcntl is None or not folder.is_dir():
        return
    for name in os.listdir(folder):
        if not (name.startswith(".") and name.endswith(_SUFFIX)):
            continue
        with contextlib.suppress(OSError):  # in use, already gone, or another user's
            handle = os.open(folder / name, os.O_RDONLY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                replaced, target = folder / name / "old", folder / name[1:].rsplit(".", 2)[0]
                if replaced.exists() and not target.exists():
                    replaced.rename(target)
                _remove(folder / name)
            finally:
                os.close(handle)


def _remove(path: str | os.PathLike[str]) -> None:
    if os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
