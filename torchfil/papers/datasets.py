"""The papers' data sets as the papers prepare them, from files that the user has.

Nothing is downloaded: the folder is given, or named by the environment variable ``TORCHFIL_DATA``.
"""

from __future__ import annotations

import csv
import gzip
import io
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

__all__ = [
    "BinaryTask",
    "DataNotFoundError",
    "ResidentDataset",
    "TabularTask",
    "adult",
    "chest_xrays",
    "cifar10",
    "cifar_plane_car",
    "data_folder",
    "iwpc",
    "levels_of",
    "mnist",
    "mnist_zero_one",
    "one_hot",
]

_ADULT_FIELDS = (
    "age",
    "workclass",
    "fnlwgt",
    "education",
    "education-num",
    "marital-status",
    "occupation",
    "relationship",
    "race",
    "sex",
    "capital-gain",
    "capital-loss",
    "hours-per-week",
    "native-country",
    "income",
)
_ADULT_NUMERICAL = ("age", "fnlwgt", "education-num", "capital-gain", "capital-loss", "hours-per-week")
_MARRIED = ("Married-AF-spouse", "Married-civ-spouse", "Married-spouse-absent")


class DataNotFoundError(FileNotFoundError):
    """The data set's files are not where they were looked for."""


class ResidentDataset(Dataset[tuple[int]]):
    """Tensors that stay on one device, [n, …] each; a batch is cut out of them at once.

    A sample is its number; the loader takes :meth:`collate`. A loader that fetches and stacks thousands of images one
    by one takes longer than the step itself.

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
        """Where the tensors lie."""
        return self.tensors[0].device

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, number: int) -> tuple[int]:
        return (number,)

    def __getitems__(self, numbers: list[int]) -> list[tuple[int]]:
        """The samples of these numbers."""
        return [(number,) for number in numbers]

    def collate(self, samples: list[tuple[int]]) -> tuple[Tensor, ...]:
        """The rows of these samples; an empty batch where there are none."""
        rows = torch.tensor([number for (number,) in samples], dtype=torch.long, device=self.device)
        return tuple(tensor[rows] for tensor in self.tensors)


@dataclass(frozen=True)
class BinaryTask:
    """A binary classification task: inputs [n, d] in the unit ball or projected from it, targets 0 or 1."""

    train_inputs: np.ndarray
    train_targets: np.ndarray
    test_inputs: np.ndarray
    test_targets: np.ndarray


@dataclass(frozen=True)
class TabularTask:
    """A task on named attributes, numerical ones in one column, nominal ones one-hot with one level dropped.

    Attributes:
        train_inputs: [n, d].
        train_targets: [n].
        test_inputs: [m, d].
        test_targets: [m].
        columns: The d columns' names: ``"age"`` of a numerical attribute, ``"vkorc1=CT"`` of a nominal one's level.
        attributes: Each attribute's columns.
        levels: Each nominal attribute's levels, that without a column (all zeros) included.
    """

    train_inputs: np.ndarray
    train_targets: np.ndarray
    test_inputs: np.ndarray
    test_targets: np.ndarray
    columns: tuple[str, ...]
    attributes: dict[str, tuple[int, ...]]
    levels: dict[str, tuple[str, ...]]

    def encode(self, attribute: str, level: str) -> np.ndarray:
        """The entries of the attribute's columns, [its columns], where it has this level; zeros for the dropped one.

        Raises:
            ValueError: There is no such nominal attribute or level.
        """
        if attribute not in self.levels:
            raise ValueError(f"{attribute!r} is no nominal attribute; those are {list(self.levels)}")
        if level not in self.levels[attribute]:
            raise ValueError(f"{level!r} is no level of {attribute!r}; those are {list(self.levels[attribute])}")
        names = [self.columns[column] for column in self.attributes[attribute]]
        return np.asarray([name == f"{attribute}={level}" for name in names], dtype=float)

    def level_numbers(self, attribute: str, inputs: np.ndarray) -> np.ndarray:
        """The place in ``levels[attribute]`` of every row's level, [n], the inverse of :meth:`encode`.

        Raises:
            ValueError: There is no such nominal attribute, or a row's columns are no level's.
        """
        if attribute not in self.levels:
            raise ValueError(f"{attribute!r} is no nominal attribute; those are {list(self.levels)}")
        codes = np.stack([self.encode(attribute, level) for level in self.levels[attribute]])  # [levels, its columns]
        values = inputs[:, list(self.attributes[attribute])]
        equal = (values[:, None, :] == codes).all(axis=2)  # [n, levels]
        if not equal.any(axis=1).all():
            wrong = int(equal.any(axis=1).argmin())
            raise ValueError(f"row {wrong} has {values[wrong].tolist()} for {attribute!r}, which encodes no level")
        return equal.argmax(axis=1)


def data_folder(folder: str | os.PathLike[str] | None = None) -> Path:
    """The folder given, or else that of ``TORCHFIL_DATA``, or else ``../shared/data``.

    Raises:
        DataNotFoundError: It does not exist.
    """
    named = folder if folder is not None else os.environ.get("TORCHFIL_DATA")
    path = Path("../shared/data" if named is None else named)
    if path.is_dir():
        return path
    raise DataNotFoundError(
        f"no data folder {path}: pass it, or set the environment variable TORCHFIL_DATA to the folder that holds "
        "MNIST/raw, pneumoniamnist, cifar10, adult and iwpc"
    )


def mnist(
    split: Literal["train", "test"] = "train", folder: str | os.PathLike[str] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """All digits of MNIST (60,000 or 10,000): images [n, 1, 28, 28] in [0, 1] and labels [n].

    Args:
        split: "train" or "test".
        folder: Holds ``MNIST/raw`` with the four IDX files, gzipped or not.
    """
    raw = data_folder(folder) / "MNIST" / "raw"
    name = {"train": "train", "test": "t10k"}[split]
    images = torch.tensor(_idx(raw, f"{name}-images-idx3-ubyte", 16)).reshape(-1, 1, 28, 28)
    return images.float() / 255, torch.tensor(_idx(raw, f"{name}-labels-idx1-ubyte", 8)).long()


def chest_xrays(
    split: Literal["train", "val", "test"] = "train", folder: str | os.PathLike[str] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The chest x-rays of MedMNIST: images [n, 1, 28, 28] in [0, 1] and pneumonia (1) or not (0), [n].

    As the file has them: copies differ in size and balance (4,708 are published for training), and a split may be
    sorted by label, so draw rows at random before taking a part.

    Args:
        split: "train", "val" or "test".
        folder: Holds ``pneumoniamnist/pneumoniamnist.npz``.
    """
    path = data_folder(folder) / "pneumoniamnist" / "pneumoniamnist.npz"
    if not path.exists():
        raise DataNotFoundError(f"{path} does not exist")
    with np.load(path) as archive:
        images, labels = archive[f"{split}_images"], archive[f"{split}_labels"]
    return torch.tensor(images).unsqueeze(1).float() / 255, torch.tensor(labels[:, 0]).long()


def cifar10(
    split: Literal["train", "test"] = "train", folder: str | os.PathLike[str] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The photographs of CIFAR-10: images [n, 3, 32, 32] in [0, 1] and labels [n].

    As the file has them: a copy may hold more of some classes than of others and be sorted by class, so draw rows at
    random before taking a part.

    Args:
        split: "train" or "test".
        folder: Holds ``cifar10/train.npz`` and ``test.npz`` of JPEG files: ``jpeg``, ``offsets``, ``labels``,
            ``classes``. Needs Pillow.
    """
    pictures, labels, _ = _jpegs(data_folder(folder) / "cifar10" / f"{split}.npz")
    images = torch.tensor(np.stack([picture() for picture in pictures]))
    return images.permute(0, 3, 1, 2).float() / 255, torch.tensor(labels).long()


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
    parts = []
    for split in ("train", "test"):
        pictures, labels, classes = _jpegs(data_folder(folder) / "cifar10" / f"{split}.npz")
        rows = [np.flatnonzero(labels == classes.index(name)) for name in ("airplane", "automobile")]
        images = [pictures[i]().reshape(-1) / 255.0 for i in np.concatenate(rows)]
        parts += [np.stack(images), np.repeat([0.0, 1.0], [len(part) for part in rows])]
    return _prepared(parts[0], parts[1], parts[2], parts[3], components, scaled)


def iwpc(folder: str | os.PathLike[str] | None = None, *, seed: int = 0) -> TabularTask:
    """Warfarin doses (3,855 + 964 patients, 14 columns), as Hannun et al. 2021 prepare the data of Yeom et al. 2018.

    Columns in alphabetical order; race, cyp2c9 and vkorc1 are one-hot without their first level; age, height, weight
    and the dose come scaled to mean 0 and deviation 1, amiodarone and decr are 0 or 1.

    Args:
        folder: Holds ``iwpc/iwpc-scaled.csv``, gzipped or not.
        seed: Of the random split, 80 % to train; 0 is the split of the authors' code.
    """
    content = _content(data_folder(folder) / "iwpc", "iwpc-scaled.csv").decode()
    rows = list(csv.DictReader(io.StringIO(content)))
    names = sorted(set(rows[0]) - {"dose"})
    levels = {name: levels_of(rows, name) for name in ("cyp2c9", "race", "vkorc1")}
    columns, attributes, inputs = one_hot(rows, names, levels, {name: own[0] for name, own in levels.items()})
    targets = np.asarray([row["dose"] for row in rows], dtype=float)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).numpy()
    train, test = np.split(order, [int(0.8 * len(rows))])
    return TabularTask(inputs[train], targets[train], inputs[test], targets[test], columns, attributes, levels)


def adult(folder: str | os.PathLike[str] | None = None) -> TabularTask:
    """Income above 50,000 dollars (1) or not (0), UCI Adult (30,162 + 15,060 rows), as Hannun et al. 2021 prepare it.

    Rows with a missing value are dropped. Marital status becomes married (a civil or an armed-forces spouse, or an
    absent one) or unmarried (divorced, never married, separated, widowed), and relationship is removed, as in Mehnaz
    et al. 2020. Levels are those of the training set. Columns stand in the file's order:

    * 6 numerical ones, less the training mean and over its deviation (n − 1): age, fnlwgt, education-num,
      capital-gain, capital-loss, hours-per-week;
    * 80 of one-hot attributes without their last level: workclass 6, education 15, marital-status 1 (the column
      "unmarried"), occupation 13, race 4, sex 1, native-country 40.

    education-num is a function of education, so that the 86 columns span the constant, barely: without l2 > 0 the
    Hessian is ill-conditioned (2e8 for least squares), and with an intercept it is singular.

    Args:
        folder: Holds ``adult/adult.data`` and ``adult/adult.test``, gzipped or not.
    """
    where = data_folder(folder) / "adult"
    train, test = _adult_rows(where, "adult.data"), _adult_rows(where, "adult.test")
    names = [name for name in _ADULT_FIELDS if name not in ("relationship", "income")]
    levels = {name: levels_of(train, name) for name in names if name not in _ADULT_NUMERICAL}
    levels["marital-status"] = ("unmarried", "married")
    dropped = {name: own[-1] for name, own in levels.items()}
    columns, attributes, inputs = one_hot(train, names, levels, dropped)
    test_inputs = one_hot(test, names, levels, dropped)[2]
    numerical = [attributes[name][0] for name in _ADULT_NUMERICAL]
    mean, deviation = inputs[:, numerical].mean(axis=0), inputs[:, numerical].std(axis=0, ddof=1)
    for part in (inputs, test_inputs):
        part[:, numerical] = (part[:, numerical] - mean) / deviation
    targets, test_targets = (np.asarray([float(row["income"] == ">50K") for row in rows]) for rows in (train, test))
    return TabularTask(inputs, targets, test_inputs, test_targets, columns, attributes, levels)


def _adult_rows(folder: Path, name: str) -> list[dict[str, str]]:
    """The complete rows; the test file's first line is none, and its labels end in a full stop."""
    rows = []
    for fields in csv.reader(io.StringIO(_content(folder, name).decode()), skipinitialspace=True):
        if len(fields) != len(_ADULT_FIELDS) or "?" in fields:
            continue
        row = dict(zip(_ADULT_FIELDS, fields, strict=True))
        row["marital-status"] = "married" if row["marital-status"] in _MARRIED else "unmarried"
        row["income"] = row["income"].rstrip(".")
        rows.append(row)
    return rows


def levels_of(rows: Sequence[Mapping[str, str]], name: str) -> tuple[str, ...]:
    """The levels of a nominal attribute, sorted."""
    return tuple(sorted({row[name] for row in rows}))


def one_hot(
    rows: Sequence[Mapping[str, str]],
    names: Sequence[str],
    levels: Mapping[str, tuple[str, ...]],
    dropped: Mapping[str, str],
) -> tuple[tuple[str, ...], dict[str, tuple[int, ...]], np.ndarray]:
    """The columns' names, each attribute's columns and the entries, [n, d]; attributes without levels are numbers."""
    columns: list[str] = []
    attributes: dict[str, tuple[int, ...]] = {}
    parts = []
    for name in names:
        values = np.asarray([row[name] for row in rows])
        if name in levels:
            unknown = sorted(set(values.tolist()) - set(levels[name]))
            if unknown:
                raise ValueError(f"the training set has no {name} {unknown}; its levels are {list(levels[name])}")
            kept = [level for level in levels[name] if level != dropped[name]]
            titles, part = [f"{name}={level}" for level in kept], (values[:, None] == np.asarray(kept)).astype(float)
        else:
            titles, part = [name], values.astype(float)[:, None]
        parts.append(part)
        attributes[name] = tuple(range(len(columns), len(columns) + len(titles)))
        columns += titles
    return tuple(columns), attributes, np.concatenate(parts, axis=1)


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


def _content(folder: Path, name: str) -> bytes:
    plain, packed = folder / name, folder / f"{name}.gz"
    if plain.exists():
        return plain.read_bytes()
    if packed.exists():
        return gzip.decompress(packed.read_bytes())
    raise DataNotFoundError(f"neither {plain} nor {packed} exists")


def _idx(folder: Path, name: str, header: int) -> np.ndarray:
    return np.frombuffer(_content(folder, name), np.uint8, offset=header)


def _jpegs(path: Path) -> tuple[list[Callable[[], np.ndarray]], np.ndarray, list[str]]:
    """An archive's pictures, each to be decoded to bytes [height, width, 3], their labels, and the labels' names."""
    if not path.exists():
        raise DataNotFoundError(f"{path} does not exist")
    from PIL import Image

    with np.load(path) as archive:
        content, offsets = archive["jpeg"].tobytes(), archive["offsets"]
        labels, classes = archive["labels"], [str(name) for name in archive["classes"]]

    def decoded(i: int) -> np.ndarray:
        with Image.open(io.BytesIO(content[offsets[i] : offsets[i + 1]])) as picture:
            return np.asarray(picture.convert("RGB"))

    return [partial(decoded, i) for i in range(len(labels))], labels, classes
