"""Small data in the papers' shapes, for examples on machines without the papers' files; nothing is downloaded.

Numbers from a stand-in say nothing about the data set it stands in for.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from torchfil.datasets.pictures import BinaryTask, projected
from torchfil.datasets.tables import TabularTask, adult_task, iwpc_task

DESCRIPTIONS = {
    "mnist": "1,797 small digits (scikit-learn's, or drawn ones without it), enlarged",
    "cifar10": "1,500 pictures of coloured stripes",
    "pneumoniamnist": "1,200 drawn chests, half of them with a blotch",
    "adult": "1,500 people made up by rule",
    "iwpc": "1,000 patients made up by rule",
}

# 3 columns and 5 rows of each digit
_GLYPHS = (
    *("111101101101111", "010110010010111", "111001111100111", "111001111001111", "101101111001001"),
    *("111100111001111", "111100111101111", "111001010010010", "111101111101111", "111101111001111"),
)


def small_digits() -> tuple[Tensor, Tensor]:
    """1,797 digits, [1797, 1, 8, 8] in [0, 1], and their labels: scikit-learn's, or drawn ones without it."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        return _drawn_digits(1797)
    data = load_digits()
    return torch.tensor(data.images, dtype=torch.float32)[:, None] / 16, torch.tensor(data.target)


def small_digits_in_words() -> str:
    """Which digits :func:`small_digits` returns on this machine."""
    if find_spec("sklearn") is None:
        return "1,797 digits drawn by rule (scikit-learn, which has handwritten ones, is not installed)"
    return "scikit-learn's 1,797 handwritten digits"


def _drawn_digits(count: int) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(0)
    glyphs = torch.tensor([[float(pixel) for pixel in glyph] for glyph in _GLYPHS]).reshape(10, 5, 3)
    labels = torch.randint(10, (count,), generator=draws)
    images = 0.1 * torch.rand(count, 1, 8, 8, generator=draws)
    for image, label in zip(images, labels.tolist(), strict=True):
        row, column = (1 + torch.randint(2, (2,), generator=draws)).tolist()
        ink = 0.6 + 0.3 * torch.rand(5, 3, generator=draws)
        image[0, row : row + 5, column : column + 3] += glyphs[label] * ink
    return images, labels


def mnist(split: Literal["train", "test"] = "train") -> tuple[Tensor, Tensor]:
    """As :func:`torchfil.datasets.mnist`: 1,500 or 297 small digits, enlarged to [n, 1, 28, 28]."""
    images, labels = small_digits()
    enlarged = torch.nn.functional.interpolate(images, size=(28, 28), mode="bilinear", align_corners=False)
    rows = slice(1500) if split == "train" else slice(1500, None)
    return enlarged[rows], labels[rows]


def mnist_zero_one(*, components: int | None = 20, scaled: bool = True) -> BinaryTask:
    """As :func:`torchfil.datasets.mnist_zero_one`, from the digits above."""
    return _two_classes(mnist("train"), mnist("test"), components, scaled)


def cifar10(split: Literal["train", "test"] = "train") -> tuple[Tensor, Tensor]:
    """As :func:`torchfil.datasets.cifar10`: stripes with a colour and a direction for each class, [n, 3, 32, 32]."""
    count, seed = {"train": (1200, 0), "test": (300, 1)}[split]
    draws = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=draws)
    angle = labels / 10 * torch.pi + 0.1 * torch.randn(count, generator=draws)
    phase = 2 * torch.pi * torch.rand(count, generator=draws)
    rows, columns = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    along = angle.cos()[:, None, None] * columns + angle.sin()[:, None, None] * rows
    stripes = 0.5 + 0.3 * torch.sin(0.8 * along + phase[:, None, None])  # [n, 32, 32]
    colours = 0.4 + 0.6 * torch.rand(10, 3, generator=torch.Generator().manual_seed(2))
    noise = 0.1 * torch.randn(count, 3, 32, 32, generator=draws)
    return (stripes[:, None] * colours[labels][:, :, None, None] + noise).clamp(0, 1), labels


def cifar_plane_car(*, components: int | None = 20, scaled: bool = True) -> BinaryTask:
    """As :func:`torchfil.datasets.cifar_plane_car`, from the stripes above."""
    train, test = (
        (images.permute(0, 2, 3, 1), labels) for images, labels in (cifar10("train"), cifar10("test"))
    )  # rows of [32, 32, 3], like the real data
    return _two_classes(train, test, components, scaled)


def _two_classes(
    train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], components: int | None, scaled: bool
) -> BinaryTask:
    """All of class 0, then all of class 1, as vectors."""
    parts = []
    for images, labels in (train, test):
        order = labels.argsort(stable=True)
        order = order[labels[order] < 2]
        parts.append((images[order].flatten(1).double().numpy(), labels[order].double().numpy()))
    return projected(parts[0], parts[1], components, scaled)


def chest_xrays(split: Literal["train", "val", "test"] = "train") -> tuple[Tensor, Tensor]:
    """As :func:`torchfil.datasets.chest_xrays`: two dark lungs and a heart; pneumonia is a bright blotch in a lung."""
    count, seed = {"train": (800, 0), "val": (100, 1), "test": (400, 2)}[split]
    draws = torch.Generator().manual_seed(seed)
    rows, columns = torch.meshgrid(torch.arange(28.0), torch.arange(28.0), indexing="ij")

    def spots(centre_row: Tensor | float, centre_column: Tensor | float, height: float, width: float) -> Tensor:
        """A soft ellipse in every picture, [n, 28, 28], with its centre moved slightly at random."""
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


def iwpc(*, seed: int = 0) -> TabularTask:
    """As :func:`torchfil.datasets.iwpc`: the same fields and levels, and a dose computed from them and noise."""
    draws, count = np.random.default_rng(0), 1000
    race = draws.choice(["white", "asian", "black"], count, p=[0.6, 0.3, 0.1])
    cyp2c9 = draws.choice(["11", "12", "13", "22", "23", "33"], count, p=[0.72, 0.13, 0.09, 0.02, 0.02, 0.02])
    vkorc1 = draws.choice(["CC", "CT", "TT"], count, p=[0.3, 0.37, 0.33])
    age, height, weight = draws.standard_normal((3, count))
    amiodarone, decr = (draws.random((2, count)) < [[0.05], [0.02]]).astype(int)

    # sensitive genotypes and age lower the dose, weight raises it
    dose = 0.4 * weight - 0.3 * age - 0.6 * (vkorc1 == "CT") - 1.2 * (vkorc1 == "TT") - 0.5 * (cyp2c9 != "11")
    dose = dose - 0.5 * amiodarone + 0.6 * decr + 0.6 * draws.standard_normal(count)
    columns = {
        "race": race,
        "age": age,
        "height": height,
        "weight": weight,
        "amiodarone": amiodarone,
        "decr": decr,
        "cyp2c9": cyp2c9,
        "vkorc1": vkorc1,
        "dose": (dose - dose.mean()) / dose.std(),
    }
    return iwpc_task(_rows(columns), seed)


def adult() -> TabularTask:
    """As :func:`torchfil.datasets.adult`: the same attributes with fewer levels; some of them determine the income."""
    draws, count = np.random.default_rng(0), 1500
    education_num = draws.integers(7, 15, count)
    married, male, gains = draws.random((3, count)) < [[0.47], [0.67], [0.1]]
    age, hours = draws.integers(18, 80, count), draws.integers(20, 60, count)
    margin = 1.5 * married + 0.7 * male + 0.4 * (education_num - 10) + 0.02 * age - 3.2 + draws.logistic(size=count)
    columns = {
        "age": age,
        "workclass": draws.choice(["Private", "Self-emp", "State-gov"], count, p=[0.7, 0.2, 0.1]),
        "fnlwgt": draws.integers(20_000, 400_000, count),
        "education": [f"level {number:02}" for number in education_num],
        "education-num": education_num,
        "marital-status": np.where(married, "married", "unmarried"),
        "occupation": draws.choice(["Craft-repair", "Exec-managerial", "Prof-specialty", "Sales"], count),
        "race": draws.choice(["Asian-Pac-Islander", "Black", "White"], count, p=[0.05, 0.12, 0.83]),
        "sex": np.where(male, "Male", "Female"),
        "capital-gain": np.where(gains, draws.integers(1000, 15_000, count), 0),
        "capital-loss": np.where(draws.random(count) < 0.05, draws.integers(500, 2500, count), 0),
        "hours-per-week": hours,
        "native-country": draws.choice(["Mexico", "Philippines", "United-States"], count, p=[0.06, 0.04, 0.9]),
        "income": np.where(margin > 0, ">50K", "<=50K"),
    }
    rows = _rows(columns)
    return adult_task(rows[:1000], rows[1000:])


def _rows(columns: dict[str, Any]) -> list[dict[str, str]]:
    """Columns as rows of texts, as in a file."""
    return [dict(zip(columns, map(str, row), strict=True)) for row in zip(*columns.values(), strict=True)]
