"""The rows of a saved run of many examples, in part files beside it.

Parts lie in ``NAME.parts/TOKEN/00000.part`` and on, safetensors files of consecutive rows each. The main file names the
token and every part's rows, size and SHA-256. It is replaced last, so that at any time it names parts that are whole;
those of the file that it replaces are removed after that.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import re
import secrets
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from torchfil.run.parted import PartedArray, PartedTexts
from torchfil.utils.errors import RunFileError
from torchfil.utils.files import file_sha256, write_bytes

__all__ = ["PartWriter", "open_parts", "parts_named_in", "remove_parts"]

_DTYPES = {
    "BOOL": "?",
    **{f"{kind}{8 * size}": f"<{letter}{size}" for kind, letter in (("I", "i"), ("U", "u")) for size in (1, 2, 4, 8)},
    **{f"F{8 * size}": f"<f{size}" for size in (2, 4, 8)},
}
_BLOCK = 2**22


def remove_parts(folder: Path | None) -> None:
    """Delete the parts in a folder, if there is one, and the folder around it where it is empty then."""
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.parent.rmdir()


def parts_named_in(main: Path) -> Path | None:
    """The folder with the parts of a file, which may be a run in parts, anything else, or not there (then None)."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        with open(main, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(size, _BLOCK)))["__metadata__"]
        return _folder(main, json.loads(header["parts"])["token"])
    return None


class PartWriter:
    """Writes parts into a folder of their own, which goes again if anything fails before the main file is written.

    Args:
        main: The main file.

    Attributes:
        listed: What the main file says of the parts, JSON.
    """

    def __init__(self, main: Path) -> None:
        self._token = secrets.token_hex(8)
        self._folder = _folder(main, self._token)
        self._parts: list[dict[str, Any]] = []

    def __enter__(self) -> PartWriter:
        self._folder.parent.mkdir(mode=0o700, exist_ok=True)
        self._folder.mkdir(mode=0o700)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            remove_parts(self._folder)

    def add(self, content: bytes) -> None:
        """Write one part."""
        write_bytes(self._folder / _name(len(self._parts)), content)
        self._parts.append({"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()})

    @property
    def listed(self) -> str:
        """See above."""
        return json.dumps({"token": self._token, "parts": self._parts})


def open_parts(main: Path, listed: str) -> dict[str, PartedArray]:
    """The arrays by example, in the order of the parts; every byte is checked, and none is kept in memory.

    Raises:
        RunFileError: A part is missing, cut short or damaged, or the parts do not fit together.
    """
    told = json.loads(listed)
    folder, parts = _folder(main, told["token"]), list[dict[str, np.ndarray]]()
    for number, part in enumerate(told["parts"]):
        path = folder / _name(number)
        _check_part(path, part["bytes"], part["sha256"], main)
        parts.append(_mapped_arrays(path))
    if not parts or any(part.keys() != parts[0].keys() for part in parts):
        raise ValueError("its parts hold different arrays")

    arrays: dict[str, PartedArray] = {}
    for name in parts[0]:
        if name == "ids/bytes":
            arrays["ids"] = PartedTexts([(part[name], part["ids/offsets"]) for part in parts])
        elif name != "ids/offsets":
            arrays[name] = PartedArray([part[name] for part in parts])
    return arrays


def _check_part(path: Path, size: int, digest: str, main: Path) -> None:
    """Raise where a part is not what was written."""
    if not path.is_file():
        raise RunFileError(
            f"{main} lacks its part {path}. Copy the folder {main.name}.parts with the file, to the same place."
        )
    if path.stat().st_size != size:
        raise RunFileError(f"{path} is cut short: it holds {path.stat().st_size:,} of {size:,} bytes. Copy it again.")
    if file_sha256(path) != digest:
        raise RunFileError(f"{path} is damaged: its checksum does not fit its content. Save the run again.")


def _mapped_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a safetensors file, read-only, on the disk until they are touched."""
    with open(path, "rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    start = 8 + int.from_bytes(content[:8], "little")
    arrays = {}
    for name, entry in json.loads(content[8:start]).items():
        if name == "__metadata__":
            continue
        dtype, shape = np.dtype(_DTYPES[entry["dtype"]]), tuple(entry["shape"])
        count = int(np.prod(shape, dtype=np.int64))
        values = np.frombuffer(content, dtype, count, start + entry["data_offsets"][0]) if count else np.empty(0, dtype)
        arrays[name] = values.reshape(shape)
    return arrays


def _folder(main: Path, token: str) -> Path:
    """Where the parts of a token lie; a token from a file of others must not lead elsewhere."""
    if not re.fullmatch(r"[0-9a-f]{16}", token):
        raise ValueError(f"its parts have the token {token!r}")
    return main.parent / f"{main.name}.parts" / token


def _name(number: int) -> str:
    return f"{number:05d}.part"
