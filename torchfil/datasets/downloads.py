"""Downloads on request, each checked against a checksum before it is kept."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from torchfil.datasets.folders import DataFormatError, Folder, data_folder, unpacked
from torchfil.datasets.sources import SourceFile, source

__all__ = ["checksum_of", "download"]


def download(name: str, folder: Folder = None, *, progress: bool = False) -> Path:
    """Download the missing files of a data set into the data folder; needs pooch.

    Args:
        name: One of :data:`torchfil.datasets.SOURCES`.
        folder: As for :func:`torchfil.datasets.data_folder`; created if it does not exist.
        progress: Whether to show a progress bar for each file.

    Returns:
        The data folder.

    Raises:
        ValueError: A file has no known address or no certain checksum; the message names the page.
        DataFormatError: A downloaded file does not match its checksum; it is removed.
        ImportError: pooch is not installed.
    """
    origin = source(name)
    if not origin.downloadable:
        raise ValueError(
            f"{origin.name} cannot be downloaded automatically: get {', '.join(file.path for file in origin.files)} "
            f"from {origin.page} into {folder if folder is not None else 'the data folder'} ({origin.note})"
        )
    root = data_folder(folder, create=True)
    for file in origin.files:
        if not (root / file.path).exists():
            _download_file(file, root, progress)
    return root


def _download_file(file: SourceFile, root: Path, progress: bool) -> None:
    """Download a file next to its place, and move it there if the checksum is right: a wrong file is never used."""
    pooch = _pooch()
    target = root / file.path
    arriving = target.with_name(f"{target.name}.part")
    target.parent.mkdir(parents=True, exist_ok=True)
    arriving.unlink(missing_ok=True)  # left by an interrupted download
    try:
        pooch.retrieve(file.url, known_hash=None, fname=arriving.name, path=arriving.parent, progressbar=progress)
        arrived = checksum_of(arriving, file)
        if arrived != file.checksum:
            raise DataFormatError(
                f"{file.url} returned a file with {arrived}, not {file.checksum}: it changed in transit or its "
                "publisher changed it, so it was not kept"
            )
        arriving.replace(target)
    finally:
        arriving.unlink(missing_ok=True)


def checksum_of(path: Path, file: SourceFile) -> str:
    """The checksum of the file at ``path``, of the same kind as that of ``file`` (sha256 if it has none)."""
    kind = "sha256" if file.checksum is None else file.checksum.partition(":")[0]
    digest = hashlib.new(kind, unpacked(path) if file.checksum_of == "content" else path.read_bytes())
    return f"{kind}:{digest.hexdigest()}"


def _pooch() -> Any:
    try:
        import pooch
    except ImportError as error:
        raise ImportError("downloads need pooch, which is not installed: pip install 'torchfil[data]'") from error
    return pooch
