"""The data folder of this machine, and the content of its files, packed or not."""

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
    """The data set's files were not found."""


class DataFormatError(ValueError):
    """A file is not in its publisher's format: it is truncated, damaged, or another file."""


def data_folder(folder: Folder = None, *, create: bool = False) -> Path:
    """The given folder; without one, that of ``TORCHFIL_DATA``, ``../shared/data`` if it exists, or the user's cache.

    The cache is ``$XDG_CACHE_HOME/torchfil`` or ``~/.cache/torchfil``.

    Args:
        folder: The folder; None: as above.
        create: Whether to create it if it does not exist, for a download.

    Raises:
        DataNotFoundError: It does not exist, and ``create`` is false.
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
    """The error that names the missing files and the page they come from."""
    origin = source(name)
    listed = " nor ".join(str(path) for path in looked_for)
    sentence = f"neither {listed} exists" if len(looked_for) > 1 else f"{listed} does not exist"
    remedy = "pass download=True, or get it" if origin.downloadable else "get it"
    return DataNotFoundError(f"{sentence}: {remedy} from {origin.page} ({origin.name}, licence: {origin.licence})")


def first_existing(name: str, candidates: Sequence[Path]) -> Path:
    """The first of these paths that exists; raises :class:`DataNotFoundError` if none does."""
    for path in candidates:
        if path.exists():
            return path
    raise not_found(name, candidates)


def content(name: str, path: Path) -> bytes:
    """The content of the file, or of the same file with ``.gz`` at the end of its name, unpacked.

    Args:
        name: The data set's name, for the error.
        path: The path without ``.gz``.

    Raises:
        DataNotFoundError: Neither file exists.
        DataFormatError: The gzip file is damaged.
    """
    existing = first_existing(name, (path, path.with_name(f"{path.name}.gz")))
    return existing.read_bytes() if existing == path else unpacked(existing)


def unpacked(path: Path) -> bytes:
    """The content of a gzip file.

    Raises:
        DataFormatError: The file is damaged.
    """
    try:
        return gzip.decompress(path.read_bytes())
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataFormatError(f"{path} is not a complete gzip file ({error}); copy or download it again") from error
