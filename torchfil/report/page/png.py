"""Small pictures as PNG data addresses, and PLIS laid over them."""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np

__all__ = ["as_data_url", "overlay", "thumbnail"]

ORANGE, PURPLE = np.array([179, 88, 6]), np.array([84, 39, 136])  # the ends of ColorBrewer's PuOr


def as_data_url(image: np.ndarray) -> str:
    """uint8 [H, W] or [H, W, 3] as a PNG inside an address."""
    height, width = image.shape[:2]
    rows = np.ascontiguousarray(image).reshape(height, -1)
    raw = np.concatenate([np.zeros((height, 1), np.uint8), rows], axis=1).tobytes()
    head = struct.pack(">IIBBBBB", width, height, 8, 2 if image.ndim == 3 else 0, 0, 0, 0)
    parts = [(b"IHDR", head), (b"IDAT", zlib.compress(raw, 9)), (b"IEND", b"")]
    chunks = b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in parts
    )
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + chunks).decode("ascii")


def overlay(image: np.ndarray, attribution: np.ndarray) -> np.ndarray:
    """A signed map over a paled image: orange positive, purple negative, white nothing; [H, W, 3] uint8.

    Colours saturate at the 98th percentile of the map's own magnitudes.
    """
    grey = image.mean(axis=-1) if image.ndim == 3 else image.astype(np.float64)
    base = (0.7 * 255 + 0.3 * grey)[..., None]
    heat = np.nan_to_num(np.asarray(attribution, dtype=np.float64))
    magnitudes = np.abs(heat[heat != 0])
    scale = np.percentile(magnitudes, 98) if magnitudes.size else 1.0
    strength = np.sqrt(np.clip(np.abs(heat) / scale, 0, 1))[..., None]
    colour = np.where(heat[..., None] >= 0, ORANGE, PURPLE)
    return np.round((1 - strength) * base + strength * colour).astype(np.uint8)


def thumbnail(image: np.ndarray, side: int = 128) -> np.ndarray:
    """The picture or map, averaged over square blocks until no side exceeds ``side``; its dtype stays."""
    block = -(-max(image.shape[:2]) // side)
    if block <= 1:
        return image
    height, width = (max(size // block, 1) for size in image.shape[:2])
    cut = image[: height * block, : width * block].astype(np.float64)
    blocks = cut.reshape(height, cut.shape[0] // height, width, cut.shape[1] // width, *image.shape[2:])
    mean = blocks.mean(axis=(1, 3))
    return (np.round(mean) if image.dtype == np.uint8 else mean).astype(image.dtype)
