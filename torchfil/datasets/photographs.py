"""CIFAR-10, from its publisher's pickles (which are not executed) or from an archive of JPEG files."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from torchfil.datasets.downloads import download as download_files
from torchfil.datasets.folders import DataFormatError, Folder, data_folder, not_found
from torchfil.datasets.pickles import load_plain_pickle
from torchfil.datasets.tasks import BinaryTask, projected

__all__ = ["cifar10", "cifar_plane_car"]

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_BATCHES = {"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)}


def cifar10(
    split: Literal["train", "test"] = "train", folder: Folder = None, *, download: bool = False
) -> tuple[Tensor, Tensor]:
    """The photographs of CIFAR-10: images [n, 3, 32, 32] in [0, 1] and labels [n].

    Read from the first of these in the folder: ``cifar-10-batches-py`` (as in torchvision's root), the publisher's
    ``cifar-10-python.tar.gz``, or ``cifar10/train.npz`` and ``test.npz`` of JPEG files (``jpeg``, ``offsets``,
    ``labels``, ``classes``; needs Pillow). Pickles are read without executing them.

    Rows are in the files' order: a copy may hold more of some classes than of others and be sorted by class, so draw
    rows at random before you use a part.

    Args:
        split: "train" or "test".
        folder: The folder with one of these.
        download: Whether to download the publisher's archive if it is missing (170 MB).
    """
    images, labels = _read(split, folder, download)
    return torch.tensor(images).permute(0, 3, 1, 2).float() / 255, torch.tensor(labels).long()


def cifar_plane_car(
    folder: Folder = None, *, components: int | None = 20, scaled: bool = True, download: bool = False
) -> BinaryTask:
    """Airplanes (0) and automobiles (1) of CIFAR-10 (10,000 + 2,000), prepared as :func:`mnist_zero_one`.

    Args:
        folder: As for :func:`cifar10`.
        components: The number of principal components.
        scaled: Whether to divide by the largest norm; if not, pixels stay in [0, 1] (Guo et al. 2022).
        download: Whether to download the publisher's archive if it is missing (170 MB).
    """
    parts = []
    for split in ("train", "test"):
        images, labels = _read(split, folder, download, kept=("airplane", "automobile"))
        order = np.argsort(labels, kind="stable")  # all airplanes, then all automobiles
        parts += [images[order].reshape(len(order), -1) / 255.0, labels[order].astype(float)]
    return projected(parts[0], parts[1], parts[2], parts[3], components, scaled)


def _read(
    split: str, folder: Folder, download: bool, kept: tuple[str, ...] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The pictures [n, 32, 32, 3] and labels [n] of all or some classes, in the form that the folder has."""
    root = download_files("cifar10", folder) if download else data_folder(folder)
    unpacked, packed = root / "cifar-10-batches-py", root / "cifar-10-python.tar.gz"
    archive = root / "cifar10" / f"{split}.npz"
    if unpacked.is_dir() or packed.exists():
        images, labels = _joined(_from_folder(unpacked, split) if unpacked.is_dir() else _from_tar(packed, split))
        rows, numbers = _chosen(labels, CLASSES, kept)
        return images[rows], numbers
    if archive.exists():
        return _from_jpegs(archive, kept)
    raise not_found("cifar10", (unpacked, packed, archive))


def _chosen(labels: np.ndarray, classes: Sequence[str], kept: tuple[str, ...] | None) -> tuple[np.ndarray, np.ndarray]:
    """The rows to keep and their labels: the file's labels if all are kept, else the class's place in ``kept``."""
    if kept is None:
        return np.arange(len(labels)), labels
    places = np.asarray([kept.index(name) if name in kept else -1 for name in classes])[labels]
    rows = np.flatnonzero(places >= 0)
    return rows, places[rows]


def _from_folder(folder: Path, split: str) -> Iterator[tuple[str, Any]]:
    for name in _BATCHES[split]:
        path = folder / name
        if not path.exists():
            raise not_found("cifar10", (path,))
        yield str(path), load_plain_pickle(path.read_bytes(), str(path))


def _from_tar(path: Path, split: str) -> Iterator[tuple[str, Any]]:
    """Each batch, read from the archive: nothing is unpacked into a folder."""
    try:
        with tarfile.open(path) as archive:
            for name in _BATCHES[split]:
                member = archive.extractfile(f"cifar-10-batches-py/{name}")
                if member is None:
                    raise DataFormatError(f"{path} has no file {name}")
                yield f"{path}: {name}", load_plain_pickle(member.read(), f"{path}: {name}")
    except (tarfile.TarError, KeyError, EOFError, OSError) as error:
        raise DataFormatError(f"{path} is not a complete archive of CIFAR-10 ({error}); download it again") from error


def _joined(batches: Iterator[tuple[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """The batches' rows [3 · 32 · 32] as pictures [32, 32, 3], all batches in one array."""
    images, labels = [], []
    for name, batch in batches:
        rows, numbers = (batch.get("data"), batch.get("labels")) if isinstance(batch, dict) else (None, None)
        if not isinstance(rows, np.ndarray) or rows.ndim != 2 or rows.shape[1] != 3072 or rows.dtype != np.uint8:
            raise DataFormatError(f"{name} is not a batch of CIFAR-10: it has no array 'data' of bytes, [n, 3072]")
        if not isinstance(numbers, list) or len(numbers) != len(rows):
            raise DataFormatError(f"{name} is not a batch of CIFAR-10: it has no list 'labels' of {len(rows)} numbers")
        images.append(rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
        labels.append(np.asarray(numbers, dtype=np.int64))
    return np.concatenate(images), np.concatenate(labels)


def _from_jpegs(path: Path, kept: tuple[str, ...] | None) -> tuple[np.ndarray, np.ndarray]:
    with np.load(path, allow_pickle=False) as archive:
        files, offsets = archive["jpeg"].tobytes(), archive["offsets"]
        labels, classes = archive["labels"], [str(name) for name in archive["classes"]]
    decoded = _decoder()
    rows, numbers = _chosen(labels, classes, kept)
    return np.stack([decoded(files[offsets[i] : offsets[i + 1]]) for i in rows]), numbers


def _decoder() -> Callable[[bytes], np.ndarray]:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("JPEG files need Pillow, which is not installed: pip install pillow") from error

    def decoded(file: bytes) -> np.ndarray:
        with Image.open(io.BytesIO(file)) as picture:
            return np.asarray(picture.convert("RGB"))

    return decoded
