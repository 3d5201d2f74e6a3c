"""The papers' data sets as the papers prepare them, from files that the user has.

Nothing is downloaded: the folder is given, or named by the environment variable ``TORCHFIL_DATA``.
"""

from __future__ import annotations

import gzip
import io
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

__all__ = ["BinaryTask", "DataNotFoundError", "cifar_plane_car", "data_folder", "mnist_zero_one"]


class DataNotFoundError(FileNotFoundError):
    """The data set's files are not where they were looked for."""


@dataclass(frozen=True)
class BinaryTask:
    """A binary classification task: inputs [n, d] in the unit ball or projected from it, targets 0 or 1."""

    train_inputs: np.ndarray
    train_targets: np.ndarray
    test_inputs: np.ndarray
    test_targets: np.ndarray


def data_folder(folder: str | os.PathLike[str] | None = None) -> Path:
    """The folder given, or that of ``TORCHFIL_DATA``, or ``../shared/data`` where it exists.

    Raises:
        DataNotFoundError: None of them exists.
    """
    candidates = [folder, os.environ.get("TORCHFIL_DATA"), "../shared/data"]
    for candidate in candidates:
        if candidate is not None and Path(candidate).is_dir():
            return Path(candidate)
    raise DataNotFoundError(
        "no data folder: pass it, or set the environment variable TORCHFIL_DATA to the folder that holds MNIST/raw, "
        "cifar10, adult and iwpc"
    )


def mnist_zero_one(
    folder: str | os.PathLike[str] | None = None, *, components: int | None = 20, scaled: bool = True
) -> BinaryTask:
    """Digits 0 and 1 of MNIST (12,665 + 2,115), as Hannun et al. 2021 prepare them.

    Each split is divided by its own largest norm, centred at the training mean and projected onto the training
    set's first principal components; ``components=None`` leaves the 784 scaled pixels.

    Args:
        folder: Holds ``MNIST/raw`` with the four IDX files, gzipped or not.
        components: How many principal components.
        scaled: Whether to divide by the largest norm; otherwise pixels stay in [0, 1] (Guo et al. 2022).
    """
    raw = data_folder(folder) / "MNIST" / "raw"
    parts = []
    for split in ("train", "t10k"):
        images = _idx(raw, f"{split}-images-idx3-ubyte", 16).reshape(-1, 784) / 255.0
        labels = _idx(raw, f"{split}-labels-idx1-ubyte", 8)
        parts += [images[labels < 2], labels[labels < 2].astype(float)]
    return _prepared(parts[0], parts[1], parts[2], parts[3], components, scaled)


def cifar_plane_car(
    folder: str | os.PathLike[str] | None = None, *, components: int | None = 20, scaled: bool = True
) -> BinaryTask:
    """Airplanes (0) and automobiles (1) of CIFAR-10 (10,000 + 2,000), prepared as :func:`mnist_zero_one`.

    Args:
        folder: Holds ``cifar10/train.npz`` and ``test.npz`` of JPEG files: ``jpeg``, ``offsets``, ``labels``,
            ``classes``. Needs Pillow.
        components: How many principal components.
        scaled: Whether to divide by the largest norm; otherwise pixels stay in [0, 1] (Guo et al. 2022).
    """
    where = data_folder(folder) / "cifar10"
    parts = []
    for split in ("train", "test"):
        path = where / f"{split}.npz"
        if not path.exists():
            raise DataNotFoundError(f"{path} does not exist")
        images, labels = _jpegs(path, ("airplane", "automobile"))
        parts += [images, labels]
    return _prepared(parts[0], parts[1], parts[2], parts[3], components, scaled)


def _prepared(
    inputs: np.ndarray,
    targets: np.ndarray,
    test_inputs: np.ndarray,
    test_targets: np.ndarray,
    components: int | None,
    scaled: bool,
) -> BinaryTask:
    if scaled:
        inputs = inputs / np.linalg.norm(inputs, axis=1).max()
        test_inputs = test_inputs / np.linalg.norm(test_inputs, axis=1).max()
    if components is not None:
        mean = inputs.mean(axis=0)
        centred = inputs - mean
        directions = np.linalg.eigh(centred.T @ centred)[1][:, ::-1][:, :components]
        inputs, test_inputs = centred @ directions, (test_inputs - mean) @ directions
    return BinaryTask(inputs, targets, test_inputs, test_targets)


def _idx(folder: Path, name: str, header: int) -> np.ndarray:
    plain, packed = folder / name, folder / f"{name}.gz"
    if plain.exists():
        content = plain.read_bytes()
    elif packed.exists():
        content = gzip.decompress(packed.read_bytes())
    else:
        raise DataNotFoundError(f"neither {plain} nor {packed} exists")
    return np.frombuffer(content, np.uint8, offset=header)


def _jpegs(path: Path, wanted: tuple[str, str]) -> tuple[np.ndarray, np.ndarray]:
    from PIL import Image

    with np.load(path) as archive:
        content, offsets = archive["jpeg"].tobytes(), archive["offsets"]
        labels, classes = archive["labels"], [str(name) for name in archive["classes"]]
    images, targets = [], []
    for target, name in enumerate(wanted):
        for i in np.flatnonzero(labels == classes.index(name)):
            with Image.open(io.BytesIO(content[offsets[i] : offsets[i + 1]])) as picture:
                images.append(np.asarray(picture.convert("RGB"), dtype=float).reshape(-1) / 255.0)
            targets.append(float(target))
    return np.stack(images), np.asarray(targets)
