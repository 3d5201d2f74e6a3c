"""A saved run as one Parquet file; docs/run-file.md describes its columns.

What has an entry for an example is a column, and everything else is one JSON document in the file's
metadata. Just before the footer stand the 64 hexadecimal digits of the SHA-256 of all other bytes:
readers of Parquet find the footer from the file's end and the columns by their places, so that they
do not look there. Page checksums guard what is read later, and let other programs check what they
read.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import IO, Any

from torchfil.run.saved_run import SavedRun
from torchfil.utils.errors import RunFileError
from torchfil.utils.files import check_regular, replaced_when_complete, sha256, update_digest
from torchfil.utils.text import visible

ROWS_AT_ONCE = 2**18  # examples of a row group; a file of one row group is read into memory
_MAGIC, _CHECKSUM = b"PAR1", b"torchfil-sha256:"
_CHECKSUM_SIZE = len(_CHECKSUM) + 64
_LARGEST_FOOTER = 2**26  # bytes
_FOREIGN = (
    "is not a saved run of torchfil, or another program changed it; a run is saved by "
    "engine.save_run"
)


def save(run: SavedRun, path: str | os.PathLike[str], *, rows_at_once: int = ROWS_AT_ONCE) -> Path:
    """Write a run; the file is replaced only when complete, and only its owner may read it (mode
    0600).

    Args:
        run: What to write.
        path: The file; ``run.parquet`` by custom.
        rows_at_once: Examples of a row group.

    Returns:
        The path written.

    Raises:
        RunFileError: Names and settings take more than 4 MiB.
    """
    from torchfil.run.columns import write_run  # needs pyarrow

    with replaced_when_complete(path) as temporary:
        write_run(run, temporary, rows_at_once)
        with open(temporary, "rb+") as file:
            _insert_checksum(file)
    return Path(path)


def load(path: str | os.PathLike[str]) -> SavedRun:
    """Read a run. Safe on files from others: nothing in it is executed.

    Every byte is checked. The columns of a run of many examples stay on the disk until they are
    asked for.

    Raises:
        FileNotFoundError: There is no such file.
        OSError: It cannot be read, or is a pipe.
        RunFileError: It is no saved run, is cut short or damaged, or was written by another
            version.
    """
    where = Path(path)
    if not where.exists():
        raise FileNotFoundError(
            f"no file {where}; a run is saved by engine.save_run or `torchfil demo`"
        )
    check_regular(where)
    if where.is_dir():
        raise RunFileError(
            f"{where} is a folder, not a saved run; name the file in it, such as run.parquet"
        )
    try:
        return _read(where)
    except (RunFileError, MemoryError):
        raise
    except Exception as error:
        # whatever a file of others makes the readers of JSON and Parquet raise
        if isinstance(error, OSError) and error.errno is not None:
            raise
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        text = visible(" ".join(f"{kind}{error}".split()))
        raise RunFileError(f"{where} is damaged ({text}). Save the run again.") from error


def _read(where: Path) -> SavedRun:
    import pyarrow as pa

    from torchfil.run.columns import ARROW_SCHEMA, VERSION, read_facts, read_run

    file = pa.OSFile(str(where))  # one handle: the file may be replaced meanwhile
    _check_whole(file, where, ARROW_SCHEMA)
    facts = read_facts(file)
    if facts is None:
        raise RunFileError(f"{where} {_FOREIGN}")
    if facts.get("version") != VERSION:
        raise RunFileError(
            f"{where} is of run format {visible(str(facts.get('version')))}; this torchfil reads "
            f"format {VERSION}. Install the torchfil that wrote it, or save the run again with "
            "this one."
        )
    return read_run(file, facts)


def _insert_checksum(file: IO[bytes]) -> None:
    """Put the SHA-256 of a Parquet file in front of its footer."""
    file.seek(0)
    digest = sha256(file)
    file.seek(-8, os.SEEK_END)
    footer = int.from_bytes(file.read(4), "little") + 8
    file.seek(-footer, os.SEEK_END)
    content = file.read()
    file.seek(-footer, os.SEEK_END)
    file.write(_CHECKSUM + digest.encode() + content)


def _check_whole(file: Any, where: Path, forbidden: bytes) -> None:
    """Raise unless this is a run file of which no byte has changed, and whose footer does not hold
    ``forbidden``.
    """
    size, foreign = file.size(), f"{where} {_FOREIGN}"
    if file.read(4) != _MAGIC[:size]:
        raise RunFileError(foreign)

    # the file ends with the footer's length and the magic word; the checksum stands in front of the
    # footer
    file.seek(max(0, size - 8))
    tail = file.read()
    footer = int.from_bytes(tail[:4], "little") + 8
    if not (tail[4:] == _MAGIC and size >= 12):
        raise RunFileError(
            f"{where} is cut short: it holds {size:,} bytes of a longer file. Copy it again."
        )
    data = size - footer - _CHECKSUM_SIZE
    if not (footer <= _LARGEST_FOOTER and data >= len(_MAGIC)):
        raise RunFileError(foreign)
    file.seek(data)
    found = file.read(_CHECKSUM_SIZE)
    if not found.startswith(_CHECKSUM):
        raise RunFileError(foreign)

    # all bytes but the checksum's own
    content = file.read()
    digest = hashlib.sha256()
    file.seek(0)
    update_digest(digest, file, data)
    digest.update(content)
    if found != _CHECKSUM + digest.hexdigest().encode():
        raise RunFileError(
            f"{where} is damaged: its checksum does not fit its content. Save the run again."
        )
    # opening the file would build the types that it names, with code of their own
    if forbidden in content:
        raise RunFileError(foreign)
