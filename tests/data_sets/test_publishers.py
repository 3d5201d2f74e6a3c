"""The publishers' own formats, each from a small file made here; the real files where they are at hand."""

from __future__ import annotations

import gzip
import io
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.test_datasets import idx
from torchfil.datasets import (
    SOURCES,
    DataFormatError,
    DataNotFoundError,
    chest_xrays,
    cifar10,
    cifar_plane_car,
    data_folder,
    iwpc,
    mnist,
    mnist_zero_one,
    read_idx,
)
from torchfil.datasets.files import checksum_of

DRAWS = np.random.default_rng(0)


class TestIdx:
    def test_any_number_of_axes(self) -> None:
        for shape in ((5,), (2, 3), (2, 3, 4)):
            array = DRAWS.integers(256, size=shape, dtype=np.uint8)
            np.testing.assert_array_equal(read_idx(idx(array)), array)

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            (b"", "not an IDX file"),
            (b"\x1f\x8b\x08\x00", "not an IDX file"),
            (bytes([0, 0, 0x0D, 1, 0, 0, 0, 0]), "of type 0x0d"),
            (bytes([0, 0, 8, 3, 0, 0]), "ends inside its header"),
            (bytes([0, 0, 8, 1, 0, 0, 0, 5, 1, 2]), r"shape \(5,\) but has 2 entries"),
            (bytes([0, 0, 8, 4]) + bytes([255] * 16), r"but has 0 entries"),
        ],
    )
    def test_what_is_none_says_why(self, data: bytes, message: str) -> None:
        with pytest.raises(DataFormatError, match=message):
            read_idx(data)


def write_digits(folder: Path, *, packed: bool) -> tuple[np.ndarray, np.ndarray]:
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    images, labels = DRAWS.integers(256, size=(6, 28, 28), dtype=np.uint8), np.array([0, 1, 2, 1, 0, 9])
    for part in ("train", "t10k"):
        for name, array in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels)):
            path = raw / (f"{name}.gz" if packed else name)
            path.write_bytes(gzip.compress(idx(array)) if packed else idx(array))
    return images, labels


@pytest.mark.parametrize("packed", [True, False])
def test_digits(tmp_path: Path, packed: bool) -> None:
    images, labels = write_digits(tmp_path, packed=packed)
    for split in ("train", "test"):
        read, digits = mnist(split, tmp_path)  # type: ignore[arg-type]
        torch.testing.assert_close(read, torch.tensor(images / 255).float()[:, None], rtol=0, atol=0)
        assert digits.tolist() == labels.tolist()
    task = mnist_zero_one(tmp_path, components=None, scaled=False)
    assert task.train_targets.tolist() == [0, 1, 1, 0]
    np.testing.assert_allclose(task.test_inputs, images[[0, 1, 3, 4]].reshape(4, 784) / 255)


def test_digits_cut_short(tmp_path: Path) -> None:
    write_digits(tmp_path, packed=True)
    path = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataFormatError, match=r"ubyte.gz is not a complete gzip file"):
        mnist(folder=tmp_path)
    path.write_bytes(gzip.compress(idx(np.zeros((7, 28, 28)))))
    with pytest.raises(DataFormatError, match=r"images \(7, 28, 28\) and .* labels \(6,\)"):
        mnist(folder=tmp_path)


def cifar_batches() -> dict[str, tuple[np.ndarray, list[int]]]:
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    return {
        name: (DRAWS.integers(256, size=(3, 3, 32, 32), dtype=np.uint8), [i % 10, 1, 0]) for i, name in enumerate(names)
    }


def pickled(images: np.ndarray, labels: list[int]) -> bytes:
    return pickle.dumps({"data": images.reshape(len(images), -1), "labels": labels, "batch_label": "x"}, protocol=2)


@pytest.mark.parametrize("packed", [True, False])
def test_photographs_from_pickles(tmp_path: Path, packed: bool) -> None:
    batches = cifar_batches()
    if packed:
        with tarfile.open(tmp_path / "cifar-10-python.tar.gz", "w:gz") as archive:
            for name, batch in batches.items():
                member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
                member.size = len(pickled(*batch))
                archive.addfile(member, io.BytesIO(pickled(*batch)))
    else:
        (tmp_path / "cifar-10-batches-py").mkdir()
        for name, batch in batches.items():
            (tmp_path / "cifar-10-batches-py" / name).write_bytes(pickled(*batch))

    images, labels = cifar10("train", tmp_path)
    expected = np.concatenate([batch for name, (batch, _) in batches.items() if name != "test_batch"])
    torch.testing.assert_close(images, torch.tensor(expected / 255).float(), rtol=0, atol=0)
    assert labels.tolist() == [0, 1, 0, 1, 1, 0, 2, 1, 0, 3, 1, 0, 4, 1, 0]
    assert cifar10("test", tmp_path)[1].tolist() == [5, 1, 0]
    task = cifar_plane_car(tmp_path, components=None, scaled=False)
    assert task.train_targets.tolist() == [0] * 6 + [1] * 6
    assert task.test_targets.tolist() == [0, 1]
    want = batches["test_batch"][0][[2, 1]].transpose(0, 2, 3, 1).reshape(2, -1) / 255
    np.testing.assert_allclose(task.test_inputs, want)


def test_photographs_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(DataNotFoundError, match=r"batches-py nor .*tar.gz nor .*download=True.*kriz/cifar.html"):
        cifar10(folder=tmp_path)
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(b"no archive")
    with pytest.raises(DataFormatError, match="not a complete archive of CIFAR-10"):
        cifar10(folder=tmp_path)
    (tmp_path / "cifar-10-batches-py").mkdir()
    with pytest.raises(DataNotFoundError, match="data_batch_1 does not exist"):
        cifar10(folder=tmp_path)
    for batch, message in (
        ({"labels": [1]}, "no array 'data'"),
        ([1], "no array 'data'"),
        ({"data": np.zeros((2, 3072), dtype=np.uint8), "labels": [1]}, "no list 'labels' of 2"),
    ):
        (tmp_path / "cifar-10-batches-py" / "data_batch_1").write_bytes(pickle.dumps(batch, protocol=2))
        with pytest.raises(DataFormatError, match=message):
            cifar10(folder=tmp_path)


def test_xrays(tmp_path: Path) -> None:
    with pytest.raises(DataNotFoundError, match=r"pneumoniamnist.npz exists.*medmnist.com.*CC BY 4.0"):
        chest_xrays(folder=tmp_path)
    images = DRAWS.integers(256, size=(4, 28, 28), dtype=np.uint8)
    np.savez(tmp_path / "pneumoniamnist.npz", test_images=images, test_labels=np.array([[0], [1], [1], [0]]))
    read, labels = chest_xrays("test", tmp_path)
    torch.testing.assert_close(read, torch.tensor(images / 255).float()[:, None], rtol=0, atol=0)
    assert labels.tolist() == [0, 1, 1, 0]
    with pytest.raises(DataFormatError, match="with the split 'train'"):
        chest_xrays("train", tmp_path)


def test_xrays_that_are_pickles_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "pneumoniamnist.npz", train_images=np.array([{}], dtype=object), train_labels=np.zeros((1, 1)))
    with pytest.raises(DataFormatError, match="Object arrays cannot be loaded"):
        chest_xrays(folder=tmp_path)


PATIENTS = """PharmGKB Subject ID,Race (OMB),Age,Height (cm),Weight (kg),Amiodarone (Cordarone),\
Carbamazepine (Tegretol),Phenytoin (Dilantin),Rifampin or Rifampicin,\
Therapeutic Dose of Warfarin,CYP2C9 consensus,VKORC1 -1639 consensus
PA1,White,60 - 69,193.04,115.7,0,0,0,0,49,*1/*1,A/G
PA2,Asian,90+,150,50,1,NA,,1,16,*1/*3,A/A
PA3,Black or African American,50 - 59,170,80,0,0,0,0,36,*1/*2,G/G
PA4,Unknown,50 - 59,170,80,0,0,0,0,36,*1/*2,G/G
PA5,White,50 - 59,NA,80,0,0,0,0,36,*1/*2,G/G
PA6,White,50 - 59,170,80,0,0,0,0,36,*1/*5,G/G
PA7,White,,170,80,0,0,0,0,36,*1/*1,G/G
PA8,Asian,40 - 49,160,60,0,0,0,1,25,*1/*1,A/A
"""


def test_the_consortiums_spreadsheet(tmp_path: Path) -> None:
    """Complete patients alone, with Yeom et al.'s names and scale; from a CSV file."""
    (tmp_path / "iwpc").mkdir()
    (tmp_path / "iwpc" / "PS206767-553247439.csv").write_text(PATIENTS)
    task = iwpc(tmp_path)
    inputs = np.concatenate([task.train_inputs, task.test_inputs])
    order = torch.randperm(4, generator=torch.Generator().manual_seed(0)).tolist()
    inputs, doses = (
        inputs[np.argsort(order)],
        np.concatenate([task.train_targets, task.test_targets])[np.argsort(order)],
    )

    def scaled(*values: float) -> np.ndarray:
        return (np.array(values) - np.mean(values)) / np.std(values)

    assert task.levels == {
        "cyp2c9": ("11", "12", "13"),
        "race": ("asian", "black", "white"),
        "vkorc1": ("CC", "CT", "TT"),
    }
    assert task.columns[0] == "age"
    np.testing.assert_allclose(inputs[:, task.attributes["age"][0]], scaled(6, 9, 5, 4))
    np.testing.assert_allclose(inputs[:, task.attributes["height"][0]], scaled(193.04, 150, 170, 160))
    np.testing.assert_allclose(doses, scaled(7, 4, 6, 5))
    assert inputs[:, task.attributes["amiodarone"][0]].tolist() == [0, 1, 0, 0]
    assert inputs[:, task.attributes["decr"][0]].tolist() == [0, 1, 0, 1]
    assert task.level_numbers("vkorc1", inputs).tolist() == [1, 2, 0, 2]


def test_another_spreadsheet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "iwpc").mkdir()
    path = tmp_path / "iwpc" / "PS206767-1.csv"
    path.write_text(PATIENTS.replace("VKORC1 -1639 consensus", "genotype"))
    with pytest.raises(DataFormatError, match=r"has no columns \['VKORC1 -1639 consensus'\]"):
        iwpc(tmp_path)
    path.write_text(PATIENTS.splitlines()[0])
    with pytest.raises(DataFormatError, match="has no patient with all of"):
        iwpc(tmp_path)


def test_the_papers_doses_are_square_roots() -> None:
    """The commonest of the scaled doses lie as √35, √17.5, √21, √28 and √14 mg a week do, so that is their scale."""
    try:
        task = iwpc()
    except DataNotFoundError as error:
        pytest.skip(str(error))
    doses, counts = np.unique(np.concatenate([task.train_targets, task.test_targets]), return_counts=True)
    common = doses[np.argsort(-counts)[:5]]
    roots = np.sqrt([35, 17.5, 21, 28, 14])
    slope, start = np.polyfit(roots, common, 1)
    np.testing.assert_allclose(slope * roots + start, common, atol=2e-4)


def test_the_files_at_hand_have_the_checksums_that_downloads_must_have() -> None:
    """Those of MNIST, whatever they were packed with; Adult's files here lack a line, so theirs are made up again."""
    try:
        folder = data_folder()
    except DataNotFoundError as error:
        pytest.skip(str(error))
    for file in SOURCES["mnist"].files:
        if (folder / file.path).exists():
            assert checksum_of(folder / file.path, file) == file.checksum


def test_adult_as_its_publisher_has_it(tmp_path: Path) -> None:
    try:
        folder = data_folder()
    except DataNotFoundError as error:
        pytest.skip(str(error))
    for file, first in zip(SOURCES["adult"].files, (b"", b"|1x3 Cross validator\n"), strict=True):
        packed = folder / f"{file.path}.gz"
        if not packed.exists():
            pytest.skip(f"{packed} is not there")
        (tmp_path / "published").write_bytes(first + gzip.decompress(packed.read_bytes()) + b"\n")
        assert checksum_of(tmp_path / "published", file) == file.checksum
