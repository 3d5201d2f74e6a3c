"""The papers' data: exact arrays from small files, published counts from the real ones, stand-ins
of the same shape.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from paper_data import PaperData

from tests.paper_files import IWPC, real_data, write, write_mnist
from torchfil.glm import LinearRegression, SingularHessianError

IWPC_COLUMNS = (
    *("age", "amiodarone", "cyp2c9=12", "cyp2c9=13", "decr", "height"),
    *("race=black", "race=white", "vkorc1=CT", "vkorc1=TT", "weight"),
)


IWPC_DOSE = (1.1, 0.7, -0.5, -1.25, 0.0)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def read(folder: Path, name: str) -> PaperData:
    data = PaperData(name, folder=folder)
    assert not data.made
    return data


def test_iwpc_entry_by_entry(tmp_path: Path) -> None:
    write(tmp_path / "iwpc" / "iwpc-scaled.csv.gz", IWPC.encode())
    task = read(tmp_path, "iwpc").iwpc(seed=3)
    assert task.columns == IWPC_COLUMNS
    assert len(task.train_targets) == 4
    inputs = np.concatenate([task.train_inputs, task.test_inputs])
    found = dict(zip([*task.train_targets, *task.test_targets], inputs.tolist(), strict=True))
    assert list(found) == [IWPC_DOSE[i] for i in torch.randperm(5, generator=seeded(3))]
    # white, black and the reference
    assert found[1.1] == [0.5, 0, 0, 0, 0, 2, 0, 1, 1, 0, 1.5]
    assert found[-0.5] == [0.25, 1, 0, 0, 0, 1, 1, 0, 0, 0, -1]
    assert found[0.7] == [-0.5, 0, 1, 0, 1, 0, 0, 0, 0, 1, 3]
    assert task.levels["vkorc1"] == ("CC", "CT", "TT")
    assert (task.attributes["age"], task.attributes["vkorc1"]) == ((0,), (8, 9))
    codes = np.stack([task.encode("vkorc1", level) for level in ("CC", "CT", "TT")])
    assert codes.tolist() == [[0, 0], [1, 0], [0, 1]]
    assert (codes[task.level_numbers("vkorc1", inputs)] == inputs[:, 8:10]).all()


def test_digits_pixel_by_pixel(tmp_path: Path) -> None:
    write_mnist(tmp_path, 12, 3)
    images, labels = read(tmp_path, "mnist").mnist()
    assert labels.tolist() == [*range(10), 0, 1]
    assert images.sum(dim=(1, 3)).nonzero().tolist() == [
        [i, 4 + 2 * label] for i, label in enumerate(labels.tolist())
    ]


def test_iwpc_as_published() -> None:
    """Counts; the columns 11 and 12 that the authors attack.

    Their prior's accuracy 0.367, so the same split.
    """
    task = real_data("iwpc").iwpc()
    assert (task.train_inputs.shape, task.test_inputs.shape) == ((3855, 14), (964, 14))
    assert task.attributes["vkorc1"] == (11, 12)
    shares = np.bincount(task.level_numbers("vkorc1", task.train_inputs)) / 3855
    assert shares.max() == pytest.approx(0.367, abs=5e-4)


def test_adult_as_published() -> None:
    """Counts; the column 24 that the authors attack; the constant in the span."""
    task = real_data("adult").adult()
    assert (task.train_inputs.shape, task.test_inputs.shape) == ((30162, 86), (15060, 86))
    assert task.attributes["marital-status"] == (24,)
    assert task.train_targets.sum() == 7508
    with pytest.raises(SingularHessianError, match="linear combinations"):
        LinearRegression(fit_intercept=True).fit(task.train_inputs, task.train_targets)
