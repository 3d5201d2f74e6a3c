"""MNIST, from the IDX files of its publisher and torchvision."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from torchfil.datasets.downloads import download as download_files
from torchfil.datasets.folders import DataFormatError, Folder, content, data_folder
from torchfil.datasets.tasks import BinaryTask, projected

__all__ = ["mnist", "mnist_zero_one", "read_idx"]

_UNSIGNED_BYTES = 0x08


def read_idx(data: bytes, name: str = "the file") -> np.ndarray:
    """An array of bytes in the IDX format: two zeros, a type, the number of axes, their lengths, the entries.

    Args:
        data: The file's unpacked content.
        name: The file's name in errors.

    Raises:
        DataFormatError: The file has another format, a type other than unsigned bytes, or is truncated.

    Example:
        >>> read_idx(bytes([0, 0, 8, 2, 0, 0, 0, 1, 0, 0, 0, 3, 7, 8, 9]))
        array([[7, 8, 9]], dtype=uint8)
    """
    if len(data) < 4 or data[:2] != b"\0\0":
        raise DataFormatError(
            f"{name} is not an IDX file: it starts with {data[:4]!r}, not with two zeros, a type and a number of axes"
        )
    if data[2] != _UNSIGNED_BYTES:
        raise DataFormatError(f"{name} is an IDX file of type {data[2]:#04x}; only unsigned bytes (0x08) can be read")

    axes = data[3]
    start = 4 + 4 * axes
    if len(data) < start:
        raise DataFormatError(f"{name} ends inside its header, after {len(data)} bytes; copy or download it again")
    shape = struct.unpack(f">{axes}I", data[4:start])
    entries = np.frombuffer(data, np.uint8, offset=start)
    if entries.size != np.prod(shape, dtype=object):
        raise DataFormatError(f"{name} declares shape {shape} but has {entries.size} entries; copy it again")
    return entries.reshape(shape)


def mnist(
    split: Literal["train", "test"] = "train", folder: Folder = None, *, download: bool = False
) -> tuple[Tensor, Tensor]:
    """All digits of MNIST (60,000 or 10,000): images [n, 1, 28, 28] in [0, 1] and labels [n].

    Args:
        split: "train" or "test".
        folder: The folder with ``MNIST/raw`` and its four IDX files, gzipped or not, like torchvision's root.
        download: Whether to download missing files (12 MB).
    """
    images, labels = _split(split, folder, download)
    return torch.tensor(images)[:, None].float() / 255, torch.tensor(labels).long()


def mnist_zero_one(
    folder: Folder = None, *, components: int | None = 20, scaled: bool = True, download: bool = False
) -> BinaryTask:
    """Digits 0 and 1 of MNIST (12,665 + 2,115), as Hannun et al. 2021 prepare them.

    Each split is divided by its own largest norm, centred at the training mean and projected onto the training
    set's first principal components; ``components=None`` keeps the 784 scaled pixels.

    Args:
        folder: As for :func:`mnist`.
        components: The number of principal components.
        scaled: Whether to divide by the largest norm; if not, pixels stay in [0, 1] (Guo et al. 2022).
        download: Whether to download missing files (12 MB).
    """
    parts = []
    for split in ("train", "test"):
        images, labels = _split(split, folder, download)
        parts += [images[labels < 2].reshape(-1, 784) / 255.0, labels[labels < 2].astype(float)]
    return projected(parts[0], parts[1], parts[2], parts[3], components, scaled)


def _split(split: str, folder: Folder, download: bool) -> tuple[np.ndarray, np.ndarray]:
    root: Path = download_files("mnist", folder) if download else data_folder(folder)
    name = {"train": "train", "test": "t10k"}[split]
    paths = [root / "MNIST" / "raw" / f"{name}-{part}-ubyte" for part in ("images-idx3", "labels-idx1")]
    images, labels = (read_idx(content("mnist", path), str(path)) for path in paths)
    if images.shape[1:] != (28, 28) or labels.shape != images.shape[:1]:
        raise DataFormatError(f"{paths[0]} has images {images.shape} and {paths[1]} labels {labels.shape}")
    return images, labels
