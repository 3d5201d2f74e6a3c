"""The tabular data: exact arrays from small files, published counts from the real ones where they are at hand."""

from __future__ import annotations

import gzip
import io
from pathlib import Path

import numpy as np
import pytest
import torch

from torchfil.datasets import DataNotFoundError, TabularTask, adult, cifar10, cifar_plane_car, data_folder, iwpc
from torchfil.glm import LinearRegression, SingularHessianError

IWPC = """race,age,height,weight,amiodarone,decr,cyp2c9,vkorc1,dose
white,0.5,2.0,1.5,0,0,11,CT,1.1
asian,-0.5,0.0,3.0,0,1,12,TT,0.7
black,0.25,1.0,-1.0,1,0,11,CC,-0.5
white,1.0,-2.0,0.5,0,0,13,TT,-1.25
asian,-1.0,0.5,0.0,1,1,11,CT,0.0
"""
IWPC_COLUMNS = (
    *("age", "amiodarone", "cyp2c9=12", "cyp2c9=13", "decr", "height"),
    *("race=black", "race=white", "vkorc1=CT", "vkorc1=TT", "weight"),
)
IWPC_INPUTS = np.array(
    [
        [0.5, 0, 0, 0, 0, 2.0, 0, 1, 1, 0, 1.5],
        [-0.5, 0, 1, 0, 1, 0.0, 0, 0, 0, 1, 3.0],
        [0.25, 1, 0, 0, 0, 1.0, 1, 0, 0, 0, -1.0],
        [1.0, 0, 0, 1, 0, -2.0, 0, 1, 0, 1, 0.5],
        [-1.0, 1, 0, 0, 1, 0.5, 0, 0, 1, 0, 0.0],
    ]
)
IWPC_DOSE = np.array([1.1, 0.7, -0.5, -1.25, 0.0])

ADULT = """20, Private, 1, HS-grad, 9, Never-married, Sales, Own-child, White, Male, 0, 3, 40, Cuba, <=50K
30, State-gov, 3, Masters, 14, Married-AF-spouse, Sales, Wife, Black, Female, 0, 0, 38, Peru, >50K
99, ?, 3, Masters, 14, Married-AF-spouse, Sales, Wife, Black, Female, 0, 0, 38, Peru, >50K
40, Private, 5, 10th, 6, Married-spouse-absent, Craft-repair, Husband, White, Male, 6, 0, 42, Cuba, >50K

"""
ADULT_TEST = """|1x3 Cross validator
50, Private, 3, Masters, 14, Married-civ-spouse, Sales, Husband, White, Male, 2, 1, 40, Cuba, >50K.
10, State-gov, 3, 10th, 6, Widowed, Sales, Wife, Black, Female, 0, 0, 44, ?, <=50K.
10, State-gov, 3, 10th, 6, Separated, Sales, Wife, Black, Female, 0, 0, 44, Peru, <=50K.
"""
ADULT_COLUMNS = (
    *("age", "workclass=Private", "fnlwgt", "education=10th", "education=HS-grad", "education-num"),
    *("marital-status=unmarried", "occupation=Craft-repair", "race=Black", "sex=Female"),
    *("capital-gain", "capital-loss", "hours-per-week", "native-country=Cuba"),
)


def write(path: Path, text: str, *, packed: bool = False) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())


def idx(array: np.ndarray) -> bytes:
    """An array of bytes in the IDX format."""
    header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    return header + array.astype(np.uint8).tobytes()


def write_adult(folder: Path, test: str = ADULT_TEST) -> None:
    write(folder / "adult" / "adult.data.gz", ADULT, packed=True)
    write(folder / "adult" / "adult.test", test)


@pytest.mark.parametrize("packed", [True, False])
def test_iwpc_entry_by_entry(tmp_path: Path, packed: bool) -> None:
    write(tmp_path / "iwpc" / ("iwpc-scaled.csv.gz" if packed else "iwpc-scaled.csv"), IWPC, packed=packed)
    task = iwpc(tmp_path, seed=3)
    order = torch.randperm(5, generator=torch.Generator().manual_seed(3)).numpy()
    assert task.columns == IWPC_COLUMNS
    np.testing.assert_array_equal(np.concatenate([task.train_inputs, task.test_inputs]), IWPC_INPUTS[order])
    np.testing.assert_array_equal(np.concatenate([task.train_targets, task.test_targets]), IWPC_DOSE[order])
    assert len(task.train_targets) == 4
    assert task.levels["vkorc1"] == ("CC", "CT", "TT")
    assert (task.attributes["age"], task.attributes["vkorc1"]) == ((0,), (8, 9))


def test_the_split_depends_on_the_seed_alone(tmp_path: Path) -> None:
    write(tmp_path / "iwpc" / "iwpc-scaled.csv", IWPC)
    first = [iwpc(tmp_path, seed=seed).train_targets.tolist() for seed in range(5)]
    again = [iwpc(tmp_path, seed=seed).train_targets.tolist() for seed in range(5)]
    assert first == again
    assert len({tuple(targets) for targets in first}) > 1


def test_adult_entry_by_entry(tmp_path: Path) -> None:
    write_adult(tmp_path)
    task = adult(tmp_path)
    root = np.sqrt(3)
    education = (np.array([9, 14, 6, 14, 6]) - 29 / 3) / np.std([9, 14, 6], ddof=1)
    assert task.columns == ADULT_COLUMNS
    expected = [
        [-1, 1, -1, 0, 1, education[0], 1, 0, 0, 0, -1 / root, 2 / root, 0, 1],
        [0, 0, 0, 0, 0, education[1], 0, 0, 1, 1, -1 / root, -1 / root, -1, 0],
        [1, 1, 1, 1, 0, education[2], 0, 1, 0, 0, 2 / root, -1 / root, 1, 1],
    ]
    np.testing.assert_allclose(task.train_inputs, expected, atol=1e-12)
    expected = [
        [2, 1, 0, 0, 0, education[3], 0, 0, 0, 0, 0, 0, 0, 1],
        [-2, 0, 0, 1, 0, education[4], 1, 0, 1, 1, -1 / root, -1 / root, 2, 0],
    ]
    np.testing.assert_allclose(task.test_inputs, expected, atol=1e-12)
    assert task.train_targets.tolist() == [0, 1, 1]
    assert task.test_targets.tolist() == [1, 0]
    assert task.levels["marital-status"] == ("unmarried", "married")
    assert "relationship" not in task.attributes
    assert task.encode("marital-status", "married").tolist() == [0]


def test_a_level_that_the_training_set_lacks_is_refused(tmp_path: Path) -> None:
    write_adult(tmp_path, ADULT_TEST.replace("Cuba", "Narnia"))
    with pytest.raises(ValueError, match=r"no native-country \['Narnia'\]"):
        adult(tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataNotFoundError, match="iwpc-scaled.csv.gz exists"):
        iwpc(tmp_path)
    write_adult(tmp_path)
    (tmp_path / "adult" / "adult.test").unlink()
    with pytest.raises(DataNotFoundError, match=str(tmp_path / "adult" / "adult.test")):
        adult(tmp_path)


def test_photographs_pixel_by_pixel(tmp_path: Path) -> None:
    """Of an archive of lossless pictures, which is read as one of JPEG files is."""
    image = pytest.importorskip("PIL.Image")
    pixels, labels = np.random.default_rng(0).integers(256, size=(5, 32, 32, 3), dtype=np.uint8), [1, 0, 2, 1, 0]
    files = []
    for picture in pixels:
        image.fromarray(picture).save(file := io.BytesIO(), format="PNG")
        files.append(np.frombuffer(file.getvalue(), dtype=np.uint8))
    (tmp_path / "cifar10").mkdir()
    for split in ("train", "test"):
        with pytest.raises(DataNotFoundError, match=f"{split}.npz exists"):
            cifar10(split, tmp_path)
        np.savez(
            tmp_path / "cifar10" / f"{split}.npz",
            jpeg=np.concatenate(files),
            offsets=np.cumsum([0, *map(len, files)]),
            labels=np.array(labels),
            classes=np.array(["automobile", "airplane", "bird"]),
        )
        images, found = cifar10(split, tmp_path)
        assert found.tolist() == labels
        torch.testing.assert_close(images, torch.tensor(pixels / 255).float().permute(0, 3, 1, 2), rtol=0, atol=0)
    task = cifar_plane_car(tmp_path, components=None, scaled=False)
    assert task.train_targets.tolist() == [0, 0, 1, 1]
    want = pixels[[0, 3, 1, 4]].reshape(4, -1) / 255
    np.testing.assert_allclose(task.train_inputs, want, rtol=0, atol=1e-12)


def test_a_named_folder_that_does_not_exist_is_not_replaced_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHFIL_DATA", str(tmp_path))
    assert data_folder() == tmp_path
    with pytest.raises(DataNotFoundError, match="no data folder .*absent"):
        data_folder(tmp_path / "absent")
    monkeypatch.setenv("TORCHFIL_DATA", str(tmp_path / "missing"))
    with pytest.raises(DataNotFoundError, match="no data folder .*missing"):
        data_folder()


def check_codes(task: TabularTask) -> None:
    """Every row's columns are its level's code; the attributes share out the columns; one level has none."""
    assert sorted(c for columns in task.attributes.values() for c in columns) == list(range(len(task.columns)))
    for name, columns in task.attributes.items():
        assert len(columns) == len(task.levels.get(name, "ab")) - 1
    for name, levels in task.levels.items():
        numbers = task.level_numbers(name, task.train_inputs)
        codes = np.stack([task.encode(name, level) for level in levels])
        np.testing.assert_array_equal(task.train_inputs[:, list(task.attributes[name])], codes[numbers])


def test_codes_of_levels(tmp_path: Path) -> None:
    write(tmp_path / "iwpc" / "iwpc-scaled.csv", IWPC)
    task = iwpc(tmp_path)
    check_codes(task)
    assert [task.encode("vkorc1", level).tolist() for level in ("CC", "CT", "TT")] == [[0, 0], [1, 0], [0, 1]]
    assert task.level_numbers("vkorc1", IWPC_INPUTS).tolist() == [1, 2, 0, 2, 1]
    with pytest.raises(ValueError, match="'age' is not a nominal attribute; those are"):
        task.encode("age", "50")
    with pytest.raises(ValueError, match="'age' is not a nominal attribute; those are"):
        task.level_numbers("age", IWPC_INPUTS)
    with pytest.raises(ValueError, match="'XY' is not a level of 'vkorc1'; those are"):
        task.encode("vkorc1", "XY")
    with pytest.raises(ValueError, match="row 1 has .* does not encode a level"):
        task.level_numbers("vkorc1", IWPC_INPUTS[:2] * [[1], [0.5]])


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return data_folder()
    except DataNotFoundError as error:
        pytest.skip(str(error))


def check_real(task: TabularTask, train: int, test: int, columns: int) -> None:
    assert task.train_inputs.shape == (train, columns)
    assert task.test_inputs.shape == (test, columns)
    assert task.train_targets.shape == (train,)
    assert task.test_targets.shape == (test,)
    for array in (task.train_inputs, task.train_targets, task.test_inputs, task.test_targets):
        assert np.isfinite(array).all()
    check_codes(task)
    assert LinearRegression().fit(task.train_inputs, task.train_targets).gradient_norm_ < 1e-10


def test_iwpc_as_published(folder: Path) -> None:
    """Counts; the columns 11 and 12 that the authors attack; their prior's accuracy 0.367, so the same split."""
    task = iwpc(folder)
    check_real(task, 3855, 964, 14)
    assert task.attributes["vkorc1"] == (11, 12)
    shares = np.bincount(task.level_numbers("vkorc1", task.train_inputs)) / 3855
    assert shares.max() == pytest.approx(0.367, abs=5e-4)


def test_adult_as_published(folder: Path) -> None:
    """Counts; the column 24 that the authors attack; numerical columns standardised; the constant in the span."""
    task = adult(folder)
    check_real(task, 30162, 15060, 86)
    assert task.attributes["marital-status"] == (24,)
    assert task.train_targets.sum() == 7508
    numerical = [columns[0] for name, columns in task.attributes.items() if name not in task.levels]
    np.testing.assert_allclose(task.train_inputs[:, numerical].mean(axis=0), 0, atol=1e-12)
    np.testing.assert_allclose(task.train_inputs[:, numerical].std(axis=0, ddof=1), 1, atol=1e-12)
    with pytest.raises(SingularHessianError, match="are linear combinations of the others"):
        LinearRegression(fit_intercept=True).fit(task.train_inputs, task.train_targets)
