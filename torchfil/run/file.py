"""A saved run as a file: arrays and a JSON header, nothing that is executed; docs/run-file.md describes it.

A run of many examples has its rows in part files beside it (:mod:`torchfil.run.parts`), which are mapped into
memory and read when they are asked for.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load as from_bytes
from safetensors.numpy import save as to_bytes

from torchfil.run.arrays import FORMAT, VERSION, contiguous, pack, pack_rest, pack_rows, unpack
from torchfil.run.parts import PartWriter, open_parts, parts_named_in, remove_parts
from torchfil.run.saved_run import SavedRun
from torchfil.utils.errors import RunFileError
from torchfil.utils.files import write_bytes
from torchfil.utils.text import visible

__all__ = ["ROWS_PER_PART", "SUFFIX", "VERSION_IN_PARTS", "load", "save"]

VERSION_IN_PARTS = 2
SUFFIX = ".fil"
ROWS_PER_PART = 2**20  # of a run with more examples than that
_LARGEST_HEADER = 2**23  # bytes; as JSON it takes thirty times the memory


def save(run: SavedRun, path: str | os.PathLike[str], *, rows_per_part: int = ROWS_PER_PART) -> Path:
    """Write a run; the file is replaced only when complete, and only its owner may read it (mode 0600).

    Args:
        run: What to write.
        path: The file. Rows beyond ``rows_per_part`` go into a folder beside it, ``NAME.parts``.
        rows_per_part: A run of more examples is written in parts of so many.

    Returns:
        The path written.
    """
    target = Path(path)
    if len(run) <= rows_per_part:
        before = parts_named_in(target)
        write_bytes(target, _whole_file(*pack(run)))
        remove_parts(before)
        return target

    coded_groups = {name: run.coded_group(name) for name in run.groups}
    arrays, header = pack_rest(run, {name: levels for name, (levels, _) in coded_groups.items()})
    with PartWriter(target) as writer:
        for start in range(0, len(run), rows_per_part):
            rows = slice(start, start + rows_per_part)
            codes = {name: codes[rows] for name, (_, codes) in coded_groups.items()}
            writer.add(to_bytes(contiguous(pack_rows(run.take(rows), codes))))
        header |= {"version": str(VERSION_IN_PARTS), "parts": writer.listed}
        before = parts_named_in(target)  # the main file names its parts, and takes its place last
        write_bytes(target, _whole_file(contiguous(arrays), header))
    remove_parts(before)
    return target


def load(path: str | os.PathLike[str]) -> SavedRun:
    """Read a run. Safe on files from others: nothing in it is executed.

    Every byte is checked, of part files too; the rows of these stay on the disk until they are asked for.

    Raises:
        FileNotFoundError: There is no such file.
        RunFileError: It is no saved run, is cut short or damaged, lacks a part, or was written by another version.
    """
    where = Path(path)
    if not where.exists():
        raise FileNotFoundError(f"no file {where}; a run is saved by engine.save_run or `torchfil demo`")
    if where.is_dir():
        raise RunFileError(f"{where} is a folder, not a saved run; name the file in it (its suffix is {SUFFIX})")
    try:
        content = _checked_content(where)
        header = _checked_header(content, where)
        arrays: dict[str, Any] = from_bytes(content)
        del content
        if _digest(arrays, header) != header.get("sha256"):
            raise RunFileError(f"{where} is damaged: its checksum does not fit its content. Save the run again.")
        if "parts" in header:
            arrays |= open_parts(where, header["parts"])
        return unpack(arrays, header)
    except (RunFileError, OSError, MemoryError):
        raise
    except Exception as error:  # whatever a file of others makes the readers of JSON and arrays raise
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise RunFileError(f"{where} is damaged ({kind}{error}). Save the run again.") from error


def _checked_content(where: Path) -> bytes:
    """The whole file, once its first bytes say that it may be ours: the header's length in 8, then JSON."""
    with open(where, "rb") as file:
        start = file.read(9)
        if start and (int.from_bytes(start[:8], "little") > _LARGEST_HEADER or start[8:] not in (b"{", b"")):
            raise RunFileError(f"{where} is not a saved run of torchfil; a run is saved by engine.save_run")
        return start + file.read()


def _checked_header(content: bytes, where: Path) -> dict[str, str]:
    """The header's strings, once the file is whole and ours."""
    foreign = RunFileError(f"{where} is not a saved run of torchfil; a run is saved by engine.save_run")
    short = RunFileError(f"{where} is cut short: it holds {len(content):,} bytes of a longer file. Copy it again.")
    if len(content) == 0:
        raise RunFileError(f"{where} is empty. Copy it again.")

    # safetensors: the header's length in 8 bytes, the header as JSON, the arrays
    size = int.from_bytes(content[:8], "little")
    if len(content) < 8 + size:
        raise short
    try:
        entries = json.loads(content[8 : 8 + size])
        header = entries.pop("__metadata__", {})
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise foreign from error

    # ours, of this version, and whole: in this order, so that the message names the first cause
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise foreign
    if header.get("version") not in (str(VERSION), str(VERSION_IN_PARTS)):
        raise RunFileError(
            f"{where} is of run format {visible(str(header.get('version')))}; this torchfil reads formats {VERSION} "
            f"and {VERSION_IN_PARTS}. Install the torchfil that wrote it, or save the run again with this one."
        )
    if len(content) < 8 + size + end:
        raise short
    return header


def _whole_file(arrays: dict[str, np.ndarray], header: dict[str, str]) -> bytes:
    content = to_bytes(arrays, {**header, "sha256": _digest(arrays, header)})
    if int.from_bytes(content[:8], "little") > _LARGEST_HEADER:
        raise RunFileError(f"names and settings take more than {_LARGEST_HEADER:,} bytes; shorten title and levels")
    return content


def _digest(arrays: Mapping[str, np.ndarray], header: Mapping[str, str]) -> str:
    """SHA-256 over the header's strings and every array, in the order of their names."""
    digest = hashlib.sha256()
    for key in sorted(header.keys() - {"sha256"}):
        digest.update(f"{key}\0{header[key]}\0".encode())
    for name in sorted(arrays):
        values = arrays[name]
        digest.update(f"{name}\0{values.dtype}\0{values.shape}\0".encode())
        digest.update(np.ascontiguousarray(values).data if values.size else b"")
    return digest.hexdigest()
