"""MNIST, CIFAR-10 and MedMNIST's chest x-rays, from their publishers' own files."""

from __future__ import annotations

import io
import struct
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from torchfil.datasets.files import DataFormatError, Folder, content, data_folder, first_existing
from torchfil.datasets.files import download as download_files
from torchfil.datasets.pickles import load_plain_pickle


class ResidentDataset(Dataset[tuple[int]]):
    """Tensors that stay on one device, [n, …] each; a whole batch is indexed at once.

    A sample is its number; pass :meth:`collate` to the loader. A loader that fetches and stacks thousands of images
    one by one takes longer than the step itself.

    Example:
        >>> data = ResidentDataset(torch.arange(4.0) ** 2, torch.arange(4))
        >>> data.collate([data[3], data[1]])
        (tensor([9., 1.]), tensor([3, 1]))
    """

    def __init__(self, *tensors: Tensor) -> None:
        sizes = {len(tensor) for tensor in tensors}
        if len(sizes) != 1 or len({tensor.device for tensor in tensors}) != 1:
            raise ValueError(
                f"tensors of lengths {[len(tensor) for tensor in tensors]} on {[str(t.device) for t in tensors]} must "
                "have one length and one device: row i of each belongs to example i"
            )
        self.tensors = tensors

    @property
    def device(self) -> torch.device:
        """The tensors' device."""
        return self.tensors[0].device

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, number: int) -> tuple[int]:
        return (number,)

    def __getitems__(self, numbers: list[int]) -> list[tuple[int]]:
        """The samples of these numbers."""
        return [(number,) for number in numbers]

    def collate(self, samples: list[tuple[int]]) -> tuple[Tensor, ...]:
        """The rows of these samples; an empty batch if there are none."""
        rows = torch.tensor([number for (number,) in samples], dtype=torch.long, device=self.device)
        return tuple(tensor[rows] for tensor in self.tensors)


@dataclass(frozen=True)
class BinaryTask:
    """A binary classification task: inputs [n, d] in the unit ball or projected from it, targets 0 or 1."""

    train_inputs: np.ndarray
    train_targets: np.ndarray
    test_inputs: np.ndarray
    test_targets: np.ndarray


def _principal(centred: np.ndarray) -> np.ndarray:
    """The principal directions of rows [n, d] as columns, largest first; from an SVD if n < d."""
    if len(centred) < centred.shape[1]:
        return np.linalg.svd(centred, full_matrices=False)[2].T
    return np.linalg.eigh(centred.T @ centred)[1][:, ::-1]


def projected(
    train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray], components: int | None, scaled: bool
) -> BinaryTask:
    """Pictures as Hannun et al. 2021 prepare them.

    Args:
        train: Inputs [n, d] and targets [n], 0 or 1.
        test: The same for m test examples.
        components: Centre at the training mean and project onto this many principal components of the training set;
            ``None``: leave the inputs as they are.
        scaled: Whether to divide each split by its own largest norm.
    """
    inputs, test_inputs = train[0], test[0]
    if scaled:
        inputs, test_inputs = (part / np.linalg.norm(part, axis=1).max() for part in (inputs, test_inputs))
    if components is not None:
        mean = inputs.mean(axis=0)
        centred = inputs - mean
        directions = _principal(centred)[:, :components]
        inputs, test_inputs = centred @ directions, (test_inputs - mean) @ directions
    return BinaryTask(inputs, train[1], test_inputs, test[1])


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
    if data[2] != 0x08:
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
        parts.append((images[labels < 2].reshape(-1, 784) / 255.0, labels[labels < 2].astype(float)))
    return projected(parts[0], parts[1], components, scaled)


def _split(split: str, folder: Folder, download: bool) -> tuple[np.ndarray, np.ndarray]:
    root: Path = download_files("mnist", folder) if download else data_folder(folder)
    name = {"train": "train", "test": "t10k"}[split]
    paths = [root / "MNIST" / "raw" / f"{name}-{part}-ubyte" for part in ("images-idx3", "labels-idx1")]
    images, labels = (read_idx(content("mnist", path), str(path)) for path in paths)
    if images.shape[1:] != (28, 28) or labels.shape != images.shape[:1]:
        raise DataFormatError(f"{paths[0]} has images {images.shape} and {paths[1]} labels {labels.shape}")
    return images, labels


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
    images, labels, _ = _read(split, folder, download)
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
        images, labels, classes = _read(split, folder, download)
        planes, cars = (np.flatnonzero(labels == classes.index(name)) for name in ("airplane", "automobile"))
        rows = np.concatenate([planes, cars])
        parts.append((images[rows].reshape(len(rows), -1) / 255.0, np.repeat([0.0, 1.0], [len(planes), len(cars)])))
    return projected(parts[0], parts[1], components, scaled)


def _read(split: str, folder: Folder, download: bool) -> tuple[np.ndarray, np.ndarray, Sequence[str]]:
    """The pictures [n, 32, 32, 3], their labels [n] and the labels' names, in the form that the folder has."""
    root = download_files("cifar10", folder) if download else data_folder(folder)
    unpacked, packed = root / "cifar-10-batches-py", root / "cifar-10-python.tar.gz"
    archive = root / "cifar10" / f"{split}.npz"
    found = first_existing("cifar10", (unpacked, packed, archive))
    if found == archive:
        return _from_jpegs(archive)
    return *_joined(_from_folder(unpacked, split) if found == unpacked else _from_tar(packed, split)), CLASSES


def _from_folder(folder: Path, split: str) -> Iterator[tuple[str, bytes]]:
    for name in _BATCHES[split]:
        path = first_existing("cifar10", (folder / name,))
        yield str(path), path.read_bytes()


def _from_tar(path: Path, split: str) -> Iterator[tuple[str, bytes]]:
    """Each batch, read from the archive: nothing is unpacked into a folder."""
    try:
        with tarfile.open(path) as archive:
            for name in _BATCHES[split]:
                yield f"{path}: {name}", archive.extractfile(f"cifar-10-batches-py/{name}").read()  # type: ignore[union-attr]
    except (tarfile.TarError, KeyError, EOFError, OSError, AttributeError) as error:
        raise DataFormatError(f"{path} is not a complete archive of CIFAR-10 ({error}); download it again") from error


def _joined(batches: Iterator[tuple[str, bytes]]) -> tuple[np.ndarray, np.ndarray]:
    """The batches' rows [3 · 32 · 32] as pictures [32, 32, 3], all batches in one array."""
    images, labels = [], []
    for name, data in batches:
        batch = load_plain_pickle(data, name)
        rows, numbers = (batch.get("data"), batch.get("labels")) if isinstance(batch, dict) else (None, None)
        if not isinstance(rows, np.ndarray) or rows.ndim != 2 or rows.shape[1] != 3072 or rows.dtype != np.uint8:
            raise DataFormatError(f"{name} is not a batch of CIFAR-10: it has no array 'data' of bytes, [n, 3072]")
        if not isinstance(numbers, list) or len(numbers) != len(rows):
            raise DataFormatError(f"{name} is not a batch of CIFAR-10: it has no list 'labels' of {len(rows)} numbers")
        images.append(rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
        labels.append(np.asarray(numbers, dtype=np.int64))
    return np.concatenate(images), np.concatenate(labels)


def _from_jpegs(path: Path) -> tuple[np.ndarray, np.ndarray, Sequence[str]]:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("JPEG files need Pillow, which is not installed: pip install pillow") from error
    with np.load(path, allow_pickle=False) as archive:
        data, offsets, labels = archive["jpeg"].tobytes(), archive["offsets"], archive["labels"]
        classes = [str(name) for name in archive["classes"]]
    files = (io.BytesIO(data[start:end]) for start, end in pairwise(offsets))
    return np.stack([np.asarray(Image.open(file).convert("RGB")) for file in files]), labels, classes


def chest_xrays(
    split: Literal["train", "val", "test"] = "train", folder: Folder = None, *, download: bool = False
) -> tuple[Tensor, Tensor]:
    """The chest x-rays of MedMNIST: images [n, 1, 28, 28] in [0, 1] and pneumonia (1) or not (0), [n].

    Rows are in the file's order: copies differ in size and balance (4,708 are published for training), and a split may
    be sorted by label, so draw rows at random before you use a part.

    Args:
        split: "train", "val" or "test".
        folder: The folder with ``pneumoniamnist.npz``, directly or in ``pneumoniamnist``.
        download: Whether to download it if it is missing (4 MB).
    """
    name = "pneumoniamnist"
    root = download_files(name, folder) if download else data_folder(folder)
    path = first_existing(name, (root / name / f"{name}.npz", root / f"{name}.npz"))
    try:
        with np.load(path, allow_pickle=False) as archive:
            images, labels = archive[f"{split}_images"], archive[f"{split}_labels"]
    except (zipfile.BadZipFile, KeyError, ValueError, EOFError) as error:
        raise DataFormatError(f"{path} is not a MedMNIST file with the split {split!r} ({error})") from error

    if images.ndim != 3 or labels.ndim != 2 or len(labels) != len(images):
        raise DataFormatError(f"{path} has images {images.shape} and labels {labels.shape}, not [n, 28, 28] and [n, 1]")
    return torch.tensor(images).unsqueeze(1).float() / 255, torch.tensor(labels[:, 0]).long()
