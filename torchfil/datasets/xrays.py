"""MedMNIST's small medical images, from its npz files."""

from __future__ import annotations

import zipfile
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from torchfil.datasets.downloads import download as download_files
from torchfil.datasets.folders import DataFormatError, Folder, data_folder, first_existing

__all__ = ["chest_xrays"]


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
