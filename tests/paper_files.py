"""Small files in the formats of the papers' data sets, the real ones where they are at hand, and
small stand-ins.
"""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import paper_data
import pytest

IWPC = """race,age,height,weight,amiodarone,decr,cyp2c9,vkorc1,dose
white,0.5,2.0,1.5,0,0,11,CT,1.1
asian,-0.5,0.0,3.0,0,1,12,TT,0.7
black,0.25,1.0,-1.0,1,0,11,CC,-0.5
white,1.0,-2.0,0.5,0,0,13,TT,-1.25
asian,-1.0,0.5,0.0,1,1,11,CT,0.0
"""


def real_data(*names: str) -> paper_data.PaperData:
    """Readers of the real data; the test is skipped where there are none."""
    try:
        return paper_data.real_data(*names)
    except FileNotFoundError as error:
        pytest.skip(str(error))


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content))


def idx(array: np.ndarray) -> bytes:
    """An array of bytes in the IDX format."""
    header = bytes([0, 0, 8, array.ndim]) + b"".join(
        size.to_bytes(4, "big") for size in array.shape
    )
    return header + array.astype(np.uint8).tobytes()


def write_mnist(folder: Path, train: int, test: int) -> None:
    """Digits that can be learned: a bright row for each label."""
    for name, count in (("train", train), ("t10k", test)):
        labels = np.arange(count) % 10
        images = np.zeros((count, 28, 28), dtype=np.uint8)
        images[np.arange(count), 4 + 2 * labels] = 255
        write(folder / "MNIST" / "raw" / f"{name}-images-idx3-ubyte.gz", idx(images))
        write(folder / "MNIST" / "raw" / f"{name}-labels-idx1-ubyte.gz", idx(labels))


def few_made_up(monkeypatch: pytest.MonkeyPatch, digits: int, chests: int, stripes: int) -> None:
    """Stand-ins of few rows, forests of few trees: what is learned is not looked at."""
    ensemble = pytest.importorskip("sklearn.ensemble")
    forest = ensemble.RandomForestClassifier
    monkeypatch.setattr(
        ensemble, "RandomForestClassifier", lambda trees, **options: forest(trees // 40, **options)
    )
    for name, count in (
        ("made_digits", digits),
        ("made_chests", chests),
        ("made_stripes", stripes),
    ):
        whole = getattr(paper_data, name)
        monkeypatch.setattr(
            paper_data, name, lambda split, w=whole, n=count: tuple(part[:n] for part in w(split))
        )
