"""Columns of a million rows inside the page: bytes of one significance together, gzip, base64.

The page undoes it with the browser's own ``DecompressionStream`` (assets/page.js). Large runs keep eleven bits of each
mantissa (0.03 %, more than a cell shows); the files beside the page keep everything.
"""

from __future__ import annotations

import base64
import gzip
from dataclasses import dataclass

import numpy as np

__all__ = ["FULL_PRECISION_ROWS", "Packed", "pack", "pack_text"]

FULL_PRECISION_ROWS = 20_000
KEPT_BITS = 11


@dataclass(frozen=True)
class Packed:
    """An array as text: element type by its JavaScript name ("Float32", "Uint16", …), rows, base64."""

    kind: str
    length: int
    data: str


def pack(values: np.ndarray, *, short: bool | None = None) -> Packed:
    """Numbers in the smallest type that holds them; whole numbers stay exact up to 2³², others become float32.

    Args:
        values: [n].
        short: Whether to keep only eleven bits of the mantissa; None: from 20,000 rows on.
    """
    if values.dtype.kind in "biu" and values.size and values.min() >= 0 and values.max() < 2**32:
        top = int(values.max())
        kind, dtype = next(
            (kind, dtype)
            for kind, dtype, limit in (("Uint8", "<u1", 2**8), ("Uint16", "<u2", 2**16), ("Uint32", "<u4", 2**32))
            if top < limit
        )
        array = values.astype(dtype)
    elif values.dtype.kind in "biu":
        kind, array = "Float64", values.astype("<f8")
    else:
        with np.errstate(over="ignore"):
            kind, array = "Float32", values.astype("<f4")
        if len(array) > FULL_PRECISION_ROWS if short is None else short:
            array = _shortened(array)
    planes = array.view(np.uint8).reshape(len(array), array.dtype.itemsize).T
    return Packed(kind, len(array), _compressed(np.ascontiguousarray(planes).tobytes()))


def pack_text(texts: np.ndarray) -> tuple[Packed, Packed]:
    """Strings end to end, and their lengths in UTF-16 units, as JavaScript counts."""
    everything = texts.tolist()
    lengths = np.char.str_len(texts).astype(np.int64)
    joined = "".join(everything)
    if joined and max(joined) > "\uffff":
        lengths = np.array([len(text.encode("utf-16-le", "surrogatepass")) // 2 for text in everything])
    content = joined.encode("utf-8", "replace")
    return Packed("text", len(texts), _compressed(content)), pack(lengths)


def _shortened(array: np.ndarray) -> np.ndarray:
    """Float32 rounded to eleven bits of mantissa; infinities and NaN stay."""
    drop = 23 - KEPT_BITS
    bits = array.view(np.uint32)
    with np.errstate(over="ignore"):
        rounded = ((bits + np.uint32(1 << (drop - 1))) & np.uint32(0xFFFFFFFF << drop & 0xFFFFFFFF)).view(np.float32)
    return np.where(np.isfinite(array) & np.isfinite(rounded), rounded, array).astype("<f4")


def _compressed(content: bytes) -> str:
    return base64.b64encode(gzip.compress(content, compresslevel=6, mtime=0)).decode("ascii")
