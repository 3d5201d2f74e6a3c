"""The papers' data sets for examples and benchmarks: the real ones where their files are, else
small stand-ins.

Files are looked for in the folder that ``TORCHFIL_DATA`` names, else in ``../shared/data``;
README.md lists them. Nothing is downloaded. Numbers from a stand-in say nothing about the data set
it stands in for.
"""

from __future__ import annotations

import gzip
import io
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from torchfil.glm.guesses import NominalAttribute

# bytes [n, …], labels [n], the labels' names
Pictures = tuple[np.ndarray, np.ndarray, Sequence[str]]


@dataclass(frozen=True)
class Source:
    """A data set: its name, its publisher's page, the files of which one must exist, and what
    stands in for it.
    """

    name: str
    page: str
    files: tuple[str, ...]
    stand_in: str


SOURCES = {
    "mnist": Source(
        "MNIST",
        "http://yann.lecun.com/exdb/mnist/",
        ("MNIST/raw/train-images-idx3-ubyte", "MNIST/raw/train-images-idx3-ubyte.gz"),
        "scikit-learn's 1,797 small digits, enlarged",
    ),
    "cifar10": Source(
        "CIFAR-10",
        "https://www.cs.toronto.edu/~kriz/cifar.html",
        ("cifar-10-batches-py", "cifar10/train.npz"),
        "1,500 pictures of coloured stripes",
    ),
    "pneumoniamnist": Source(
        "PneumoniaMNIST (MedMNIST)",
        "https://medmnist.com",
        ("pneumoniamnist/pneumoniamnist.npz",),
        "1,300 drawn chests, half of them with a blotch",
    ),
    "adult": Source(
        "Adult (UCI)",
        "https://archive.ics.uci.edu/dataset/2/adult",
        ("adult/adult.data", "adult/adult.data.gz"),
        "1,500 people made up by rule",
    ),
    "iwpc": Source(
        "IWPC (warfarin doses)",
        "https://www.clinpgx.org/downloads",
        ("iwpc/iwpc-scaled.csv", "iwpc/iwpc-scaled.csv.gz"),
        "1,000 patients made up by rule",
    ),
}


class ResidentDataset(Dataset[tuple[int]]):
    """Tensors that stay on one device, [n, …] each; a whole batch is indexed at once.

    A sample is its number; pass :meth:`collate` to the loader. A loader that fetches and stacks
    thousands of images one by one takes longer than the step itself.
    """

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors
        self.device = tensors[0].device

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
    """A binary classification task: inputs [n, d] in the unit ball or projected from it, targets 0
    or 1.
    """

    train_inputs: np.ndarray
    train_targets: np.ndarray
    test_inputs: np.ndarray
    test_targets: np.ndarray


@dataclass(frozen=True)
class TabularTask(BinaryTask):
    """A task on named attributes: numerical ones in one column each, nominal ones one-hot with one
    level dropped.

    Attributes:
        columns: The d columns' names: ``"age"`` for a numerical attribute, ``"vkorc1=CT"`` for a
            nominal one's level.
        attributes: Each attribute's columns.
        levels: Each nominal attribute's levels, including the one without a column (all zeros).
    """

    columns: tuple[str, ...]
    attributes: dict[str, tuple[int, ...]]
    levels: dict[str, tuple[str, ...]]

    def encode(self, attribute: str, level: str) -> np.ndarray:
        """The entries of the attribute's columns, [its columns], for this level.

        Zeros for the dropped level.
        """
        names = [self.columns[column] for column in self.attributes[attribute]]
        return np.asarray([name == f"{attribute}={level}" for name in names], dtype=float)

    def question(self, attribute: str) -> NominalAttribute:
        """Which level of this nominal attribute does a row have?"""
        levels = self.levels[attribute]
        # [levels, its columns]
        codes = np.stack([self.encode(attribute, level) for level in levels])
        return NominalAttribute(list(self.attributes[attribute]), codes, levels)

    def level_numbers(self, attribute: str, inputs: np.ndarray) -> np.ndarray:
        """The index in ``levels[attribute]`` of every row's level, [n]: the inverse of
        :meth:`encode`.
        """
        return self.question(attribute).levels(inputs)


class PaperData:
    """PaperData of these data sets; one printed line for each says which data it is.

    Args:
        names: Keys of :data:`SOURCES`.
        folder: The folder; None: that of ``TORCHFIL_DATA``, or ``../shared/data``.
        say: Prints a line.

    Attributes:
        made: The names of the data sets that are stand-ins.
    """

    def __init__(
        self,
        *names: str,
        folder: str | os.PathLike[str] | None = None,
        say: Callable[[str], object] = print,
    ) -> None:
        self.folder = Path(folder or os.environ.get("TORCHFIL_DATA") or "../shared/data")
        self.made = frozenset(
            name
            for name in names
            if not any((self.folder / file).exists() for file in SOURCES[name].files)
        )
        for name in names:
            origin = SOURCES[name]
            if name not in self.made:
                say(f"Data: {origin.name}, from {self.folder}.")
                continue
            say(
                f"Data: a stand-in for {origin.name}: {origin.stand_in}. Results will differ from "
                f"the papers'. For the real data, get the files from {origin.page} and set "
                "TORCHFIL_DATA."
            )

    def mnist(self, split: str = "train") -> tuple[Tensor, Tensor]:
        """All digits of MNIST (60,000 or 10,000): images [n, 1, 28, 28] in [0, 1] and labels
        [n].
        """
        images, labels = self._digits(split)
        return torch.tensor(images)[:, None].float() / 255, torch.tensor(labels).long()

    def mnist_zero_one(self, *, components: int | None = 20, scaled: bool = True) -> BinaryTask:
        """Digits 0 and 1 of MNIST (12,665 + 2,115), as Hannun et al. 2021 prepare them.

        Each split is divided by its own largest norm, centred at the training mean and projected
        onto the training set's first principal components; ``components=None`` keeps the 784 scaled
        pixels.

        Args:
            components: The number of principal components.
            scaled: Whether to divide by the largest norm; if not, pixels stay in [0, 1] (Guo et al.
                2022).
        """
        parts = []
        for split in ("train", "test"):
            images, labels = self._digits(split)
            parts.append(
                (images[labels < 2].reshape(-1, 784) / 255.0, labels[labels < 2].astype(float))
            )
        return _projected(parts[0], parts[1], components, scaled)

    def cifar10(self, split: str = "train") -> tuple[Tensor, Tensor]:
        """The photographs of CIFAR-10: images [n, 3, 32, 32] in [0, 1] and labels [n].

        Read from torchvision's folder ``cifar-10-batches-py`` (by torchvision), or from
        ``cifar10/train.npz`` and ``test.npz`` of JPEG files (``jpeg``, ``offsets``, ``labels``,
        ``classes``; needs Pillow). A copy may hold more of some classes and be sorted by class, so
        draw rows at random before you use a part.
        """
        images, labels, _ = self._photographs(split)
        return torch.tensor(images).permute(0, 3, 1, 2).float() / 255, torch.tensor(labels).long()

    def cifar_plane_car(self, *, components: int | None = 20, scaled: bool = True) -> BinaryTask:
        """Airplanes (0) and automobiles (1) of CIFAR-10 (10,000 + 2,000), prepared as
        :meth:`mnist_zero_one`.
        """
        parts = []
        for split in ("train", "test"):
            images, labels, classes = self._photographs(split)
            planes, cars = (
                np.flatnonzero(labels == classes.index(name)) for name in ("airplane", "automobile")
            )
            rows = np.concatenate([planes, cars])
            parts.append(
                (
                    images[rows].reshape(len(rows), -1) / 255.0,
                    np.repeat([0.0, 1.0], [len(planes), len(cars)]),
                )
            )
        return _projected(parts[0], parts[1], components, scaled)

    def chest_xrays(self, split: str = "train") -> tuple[Tensor, Tensor]:
        """MedMNIST's chest x-rays: images [n, 1, 28, 28] in [0, 1] and pneumonia (1) or not (0),
        [n].

        A split ("train", "val" or "test") may be sorted by label, so draw rows at random before you
        use a part.
        """
        if "pneumoniamnist" in self.made:
            return made_chests(split)
        with np.load(
            self.folder / "pneumoniamnist" / "pneumoniamnist.npz", allow_pickle=False
        ) as archive:
            images, labels = archive[f"{split}_images"], archive[f"{split}_labels"]
        return torch.tensor(images).unsqueeze(1).float() / 255, torch.tensor(labels[:, 0]).long()

    def iwpc(self, *, seed: int = 0) -> TabularTask:
        """Warfarin doses (3,855 + 964 patients, 14 columns): Yeom et al. 2018, as Hannun et al.
        2021 prepare them.

        Columns are in alphabetical order. Race, cyp2c9 and vkorc1 are one-hot without their first
        level. Age (in decades), height, weight and the dose (the square root of mg per week) are
        scaled to mean 0 and deviation 1. Amiodarone and decr (a drug that induces enzymes) are 0 or
        1.

        Args:
            seed: The seed of the random split, with 80 % for training; 0 is the split of the
                authors' code.
        """
        table = (
            made_patients()
            if "iwpc" in self.made
            else _texts(_packed_or_not(self.folder / "iwpc/iwpc-scaled.csv"))
        )
        levels = {name: tuple(sorted(set(table[name]))) for name in ("cyp2c9", "race", "vkorc1")}
        names = sorted(set(table.columns) - {"dose"})
        columns, attributes, inputs = _one_hot(table, names, levels, dropped=0)
        targets = table["dose"].to_numpy(dtype=object).astype(float)
        order = torch.randperm(len(table), generator=torch.Generator().manual_seed(seed)).numpy()
        train, test = np.split(order, [int(0.8 * len(table))])
        return TabularTask(
            inputs[train], targets[train], inputs[test], targets[test], columns, attributes, levels
        )

    def adult(self) -> TabularTask:
        """Income above 50,000 dollars (1) or not (0): UCI Adult (30,162 + 15,060 rows), prepared by
        Hannun et al. 2021.

        Rows with a missing value are dropped. Marital status becomes married (a civil or an
        armed-forces spouse, or an absent one) or unmarried, and relationship is removed, as in
        Mehnaz et al. 2020. The 6 numerical columns are standardised by the training rows (n − 1);
        the 80 columns of one-hot attributes lack their last level.

        education-num is a function of education, so the 86 columns span the constant, barely:
        without l2 > 0 the Hessian is ill-conditioned (2e8 for least squares), and with an intercept
        it is singular.
        """
        train, test = (self._people(split) for split in ("train", "test"))
        names = [name for name in FIELDS if name not in ("relationship", "income")]
        levels = {name: tuple(sorted(set(train[name]))) for name in names if name not in NUMERICAL}
        levels["marital-status"] = ("unmarried", "married")
        columns, attributes, inputs = _one_hot(train, names, levels, dropped=-1)
        test_inputs = _one_hot(test, names, levels, dropped=-1)[2]

        numerical = [attributes[name][0] for name in NUMERICAL]
        mean, deviation = (
            inputs[:, numerical].mean(axis=0),
            inputs[:, numerical].std(axis=0, ddof=1),
        )
        for part in (inputs, test_inputs):
            part[:, numerical] = (part[:, numerical] - mean) / deviation
        targets, test_targets = (
            (rows["income"] == ">50K").to_numpy(dtype=float) for rows in (train, test)
        )
        return TabularTask(inputs, targets, test_inputs, test_targets, columns, attributes, levels)

    def _digits(self, split: str) -> tuple[np.ndarray, np.ndarray]:
        if "mnist" in self.made:
            return made_digits(split)
        parts = []
        for kind, header in (("images-idx3", 16), ("labels-idx1", 8)):
            name = f"{'train' if split == 'train' else 't10k'}-{kind}-ubyte"
            path = _packed_or_not(self.folder / "MNIST" / "raw" / name)
            content = (
                gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            )
            parts.append(np.frombuffer(content, np.uint8, offset=header))
        return parts[0].reshape(-1, 28, 28), parts[1]

    def _photographs(self, split: str) -> Pictures:
        if "cifar10" in self.made:
            return made_stripes(split)
        if (self.folder / "cifar-10-batches-py").exists():
            from torchvision.datasets import CIFAR10

            data = CIFAR10(self.folder, train=split == "train")
            return data.data, np.asarray(data.targets), data.classes
        from PIL import Image

        with np.load(self.folder / "cifar10" / f"{split}.npz", allow_pickle=False) as archive:
            content, offsets, labels = (
                archive["jpeg"].tobytes(),
                archive["offsets"],
                archive["labels"],
            )
            classes = [str(name) for name in archive["classes"]]
        files = (io.BytesIO(content[start:end]) for start, end in pairwise(offsets))
        return (
            np.stack([np.asarray(Image.open(file).convert("RGB")) for file in files]),
            labels,
            classes,
        )

    def _people(self, split: str) -> Any:
        """The complete rows; the test file's first line is not a row, and its labels end in a full
        stop.
        """
        if "adult" in self.made:
            return made_people().iloc[slice(1000) if split == "train" else slice(1000, None)]
        path = _packed_or_not(
            self.folder / "adult" / ("adult.data" if split == "train" else "adult.test")
        )
        table = _texts(path, names=FIELDS, skipinitialspace=True, na_values=["?", ""]).dropna()
        married = table["marital-status"].isin(
            ["Married-AF-spouse", "Married-civ-spouse", "Married-spouse-absent"]
        )
        status = np.where(married, "married", "unmarried")
        return table.assign(**{"marital-status": status, "income": table["income"].str.rstrip(".")})


def real_data(*names: str) -> PaperData:
    """Readers of the real data sets alone.

    Raises:
        FileNotFoundError: The files of one of them are not in the folder.
    """
    data = PaperData(*names, say=lambda line: None)
    if data.made:
        raise FileNotFoundError(
            f"{data.folder} has no files of {', '.join(sorted(data.made))}: set TORCHFIL_DATA"
        )
    return data


FIELDS = (
    *(
        "age",
        "workclass",
        "fnlwgt",
        "education",
        "education-num",
        "marital-status",
        "occupation",
        "relationship",
    ),
    *("race", "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country", "income"),
)
NUMERICAL = ("age", "fnlwgt", "education-num", "capital-gain", "capital-loss", "hours-per-week")


def _packed_or_not(path: Path) -> Path:
    return path if path.exists() else path.with_name(f"{path.name}.gz")


def _texts(path: Path, **options: Any) -> Any:
    """A table of texts; empty entries are missing ones."""
    import pandas

    return pandas.read_csv(path, dtype=str, keep_default_na=False, **options)


def _one_hot(
    table: Any, names: Sequence[str], levels: Mapping[str, tuple[str, ...]], dropped: int
) -> tuple[tuple[str, ...], dict[str, tuple[int, ...]], np.ndarray]:
    """The columns' names, each attribute's columns and the entries, [n, d].

    Attributes without levels are numbers.
    """
    columns: list[str] = []
    attributes: dict[str, tuple[int, ...]] = {}
    parts = []
    for name in names:
        values = table[name].to_numpy(dtype=object)
        titles = [name]
        if name in levels:
            kept = [level for level in levels[name] if level != levels[name][dropped]]
            titles = [f"{name}={level}" for level in kept]
            parts.append((values[:, None] == np.asarray(kept, dtype=object)).astype(float))
        else:
            parts.append(values.astype(float)[:, None])
        attributes[name] = tuple(range(len(columns), len(columns) + len(titles)))
        columns += titles
    return tuple(columns), attributes, np.concatenate(parts, axis=1)


def _projected(
    train: tuple[np.ndarray, np.ndarray],
    test: tuple[np.ndarray, np.ndarray],
    components: int | None,
    scaled: bool,
) -> BinaryTask:
    """Inputs [n, d] and targets [n] of both splits; see :meth:`PaperData.mnist_zero_one`."""
    inputs, test_inputs = train[0], test[0]
    if scaled:
        inputs, test_inputs = (
            part / np.linalg.norm(part, axis=1).max() for part in (inputs, test_inputs)
        )
    if components is not None:
        mean = inputs.mean(axis=0)
        centred = inputs - mean
        if len(centred) < centred.shape[1]:
            directions = np.linalg.svd(centred, full_matrices=False)[2].T
        else:
            directions = np.linalg.eigh(centred.T @ centred)[1][:, ::-1]  # the largest first
        directions = directions[:, :components]
        inputs, test_inputs = centred @ directions, (test_inputs - mean) @ directions
    return BinaryTask(inputs, train[1], test_inputs, test[1])


def small_digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's 1,797 handwritten digits: [1797, 1, 8, 8] in [0, 1], labels [1797]."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return torch.tensor(data.images, dtype=torch.float32)[:, None] / 16, torch.tensor(data.target)


def made_digits(split: str) -> tuple[np.ndarray, np.ndarray]:
    """1,500 or 297 small digits, enlarged to [n, 28, 28], in [0, 255]."""
    images, labels = small_digits()
    enlarged = torch.nn.functional.interpolate(
        images, size=(28, 28), mode="bilinear", align_corners=False
    )
    rows = slice(1500) if split == "train" else slice(1500, None)
    return 255 * enlarged[rows, 0].numpy(), labels[rows].numpy()


def made_stripes(split: str) -> Pictures:
    """Stripes with a colour and a direction for each of ten classes, [n, 32, 32, 3] in [0, 255]."""
    count, seed = {"train": (1200, 0), "test": (300, 1)}[split]
    draws = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=draws)
    angle = labels / 10 * torch.pi + 0.1 * torch.randn(count, generator=draws)
    phase = 2 * torch.pi * torch.rand(count, generator=draws)
    rows, columns = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    along = angle.cos()[:, None, None] * columns + angle.sin()[:, None, None] * rows
    stripes = 0.5 + 0.3 * torch.sin(0.8 * along + phase[:, None, None])  # [n, 32, 32]
    colours = 0.4 + 0.6 * torch.rand(10, 3, generator=torch.Generator().manual_seed(2))
    noise = 0.1 * torch.randn(count, 32, 32, 3, generator=draws)
    pictures = (stripes[..., None] * colours[labels][:, None, None] + noise).clamp(0, 1)
    return 255 * pictures.numpy(), labels.numpy(), ("airplane", "automobile")


def made_chests(split: str) -> tuple[Tensor, Tensor]:
    """Two dark lungs and a heart.

    Pneumonia is a bright blotch in a lung: [n, 1, 28, 28] in [0, 1], labels [n].
    """
    count, seed = {"train": (800, 0), "val": (100, 1), "test": (400, 2)}[split]
    draws = torch.Generator().manual_seed(seed)
    rows, columns = torch.meshgrid(torch.arange(28.0), torch.arange(28.0), indexing="ij")

    def spots(
        centre_row: Tensor | float, centre_column: Tensor | float, height: float, width: float
    ) -> Tensor:
        """A soft ellipse in every picture, [n, 28, 28], with its centre moved slightly at
        random.
        """
        moved = torch.randn(2, count, 1, 1, generator=draws)
        down = (rows - centre_row - moved[0]) / height
        across = (columns - centre_column - moved[1]) / width
        return torch.exp(-(down.square() + across.square()))

    ill = torch.randint(2, (count,), generator=draws)
    side = torch.where(torch.rand(count, 1, 1, generator=draws) < 0.5, 8.0, 20.0)
    height = 8 + 12 * torch.rand(count, 1, 1, generator=draws)
    blotch = 0.5 * ill[:, None, None] * spots(height, side, 3.5, 3.5)
    lungs = spots(14, 8, 9, 4) + spots(14, 20, 9, 4)
    heart = 0.3 * spots(17, 16, 5, 4)  # on one side, so a mirrored chest is a different one
    noise = 0.05 * torch.randn(count, 28, 28, generator=draws)
    return (0.7 - 0.55 * lungs + heart + blotch + noise).clamp(0, 1)[:, None], ill


def made_patients() -> Any:
    """Yeom et al.'s fields and levels, and a dose computed from them and noise: 1,000 rows of
    texts.
    """
    import pandas

    draws, count = np.random.default_rng(0), 1000
    race = draws.choice(["white", "asian", "black"], count, p=[0.6, 0.3, 0.1])
    cyp2c9 = draws.choice(
        ["11", "12", "13", "22", "23", "33"], count, p=[0.72, 0.13, 0.09, 0.02, 0.02, 0.02]
    )
    vkorc1 = draws.choice(["CC", "CT", "TT"], count, p=[0.3, 0.37, 0.33])
    age, height, weight = draws.standard_normal((3, count))
    amiodarone, decr = (draws.random((2, count)) < [[0.05], [0.02]]).astype(int)

    # sensitive genotypes and age lower the dose, weight raises it
    dose = (
        0.4 * weight
        - 0.3 * age
        - 0.6 * (vkorc1 == "CT")
        - 1.2 * (vkorc1 == "TT")
        - 0.5 * (cyp2c9 != "11")
    )
    dose = dose - 0.5 * amiodarone + 0.6 * decr + 0.6 * draws.standard_normal(count)
    nominal = {
        "race": race,
        "cyp2c9": cyp2c9,
        "vkorc1": vkorc1,
        "amiodarone": amiodarone,
        "decr": decr,
    }
    numbers = {
        "age": age,
        "height": height,
        "weight": weight,
        "dose": (dose - dose.mean()) / dose.std(),
    }
    return pandas.DataFrame({**nominal, **numbers}).astype(str)


def made_people() -> Any:
    """Adult's attributes with fewer levels, some of which determine the income: 1,500 rows of
    texts.
    """
    import pandas

    draws, count = np.random.default_rng(0), 1500
    education_num = draws.integers(7, 15, count)
    married, male, gains = draws.random((3, count)) < [[0.47], [0.67], [0.1]]
    age, hours = draws.integers(18, 80, count), draws.integers(20, 60, count)
    margin = (
        1.5 * married
        + 0.7 * male
        + 0.4 * (education_num - 10)
        + 0.02 * age
        - 3.2
        + draws.logistic(size=count)
    )
    columns = {
        "age": age,
        "workclass": draws.choice(["Private", "Self-emp", "State-gov"], count, p=[0.7, 0.2, 0.1]),
        "fnlwgt": draws.integers(20_000, 400_000, count),
        "education": [f"level {number:02}" for number in education_num],
        "education-num": education_num,
        "marital-status": np.where(married, "married", "unmarried"),
        "occupation": draws.choice(
            ["Craft-repair", "Exec-managerial", "Prof-specialty", "Sales"], count
        ),
        "race": draws.choice(["Asian-Pac-Islander", "Black", "White"], count, p=[0.05, 0.12, 0.83]),
        "sex": np.where(male, "Male", "Female"),
        "capital-gain": np.where(gains, draws.integers(1000, 15_000, count), 0),
        "capital-loss": np.where(draws.random(count) < 0.05, draws.integers(500, 2500, count), 0),
        "hours-per-week": hours,
        "native-country": draws.choice(
            ["Mexico", "Philippines", "United-States"], count, p=[0.06, 0.04, 0.9]
        ),
        "income": np.where(margin > 0, ">50K", "<=50K"),
    }
    return pandas.DataFrame(columns).astype(str)
