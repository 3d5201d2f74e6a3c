"""Where data lies on this machine, and the content of a file there, packed or not."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

from torchfil.datasets.sources import source

__all__ = ["DataFormatError", "DataNotFoundError", "Folder", "content", "data_folder", "first_existing", "not_found"]

Folder = str | os.PathLike[str] | None


class DataNotFoundError(FileNotFoundError):
    """The data set's files are not where they were looked for."""


class DataFormatError(ValueError):
    """A file is not in its publisher's format: truncated, damaged, or another one."""


def data_folder(folder: Folder = None, *, create: bool = False) -> Path:
    """The folder given, or else that of ``TORCHFIL_DATA``, ``../shared/data``, or the user's cache.

    The last two count where they exist. The cache is ``$XDG_CACHE_HOME/torchfil`` or ``~/.cache/torchfil``.

    Args:
        folder: Taken as it is.
        create: Make it where it is missing, to download into.

    Raises:
        DataNotFoundError: It does not exist, and is not to be made.
    """
    shared = Path("../shared/data")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchfil"
    named = folder if folder is not None else os.environ.get("TORCHFIL_DATA")
    path = Path(named) if named is not None else shared if shared.is_dir() else cache
    if create:
        path.mkdir(parents=True, exist_ok=True)

    if path.is_dir():
        return path
    raise DataNotFoundError(
        f"no data folder {path}: pass it, set the environment variable TORCHFIL_DATA to the folder that holds "
        "MNIST/raw, pneumoniamnist, cifar10, adult and iwpc, or pass download=True if this machine may download"
    )


def not_found(name: str, looked_for: Sequence[Path]) -> DataNotFoundError:
    """The error that names the files that were looked for and the page they come from."""
    origin = source(name)
    listed = " nor ".join(str(path) for path in looked_for)
    sentence = f"neither {listed} exists" if len(looked_for) > 1 else f"{listed} does not exist"
    remedy = "pass download=True, or get it" if origin.downloadable else "get it"
    return DataNotFoundError(f"{sentence}: {remedy} from {origin.page} ({origin.name}, licence: {origin.licence})")


def first_existing(name: str, candidates: Sequence[Path]) -> Path:
    """The first of these paths that exists; raises :class:`DataNotFoundError` where none does."""
    for path in candidates:
        if path.exists():
            return path
    raise not_found(name, candidates)


def content(name: str, path: Path) -> bytes:
    """What the file holds, or the same file with ``.gz`` at the end of its name, unpacked.

    Args:
        name: The data set's, for the error.
        path: Without ``.gz``.

    Raises:
        DataNotFoundError: There is neither.
        DataFormatError: The gzip file is damaged.
    """
    existing = first_existing(name, (path, path.with_name(f"{path.name}.gz")))
    return existing.read_bytes() if existing == path else unpacked(existing)


def unpacked(path: Path) -> bytes:
    """What a gzip file holds.

    Raises:
        DataFormatError: It is damaged.
    """
    try:
        return gzip.decompress(path.read_bytes())
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataFormatError(f"{path} is not a complete gzip file ({error}); copy or download it again") from error
