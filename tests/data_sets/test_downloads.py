"""Downloads: asked for, checked, kept only where right; never from the network in a test."""

from __future__ import annotations

import gzip
import hashlib
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.test_datasets import ADULT, ADULT_TEST, idx
from torchfil.datasets import (
    SOURCES,
    DataFormatError,
    DataNotFoundError,
    Source,
    SourceFile,
    adult,
    data_folder,
    download,
    mnist,
    source,
)


class FakePooch(types.ModuleType):
    """What a server would give, without one."""

    def __init__(self, answers: dict[str, bytes]) -> None:
        super().__init__("pooch")
        self.answers, self.asked = answers, []  # type: ignore[var-annotated]

    def retrieve(self, url: str, known_hash: None, fname: str, path: Path, progressbar: bool) -> str:
        self.asked.append(url)
        (Path(path) / fname).write_bytes(self.answers[url])
        return str(Path(path) / fname)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakePooch:
    """Adult and digits of a few rows, with their own checksums."""
    files = []
    answers = {}
    for name, text in (("adult.data", ADULT), ("adult.test", ADULT_TEST)):
        answers[f"https://x/{name}"] = text.encode()
        digest = hashlib.md5(text.encode()).hexdigest()
        files.append(SourceFile(f"adult/{name}", f"https://x/{name}", f"md5:{digest}"))
    monkeypatch.setitem(SOURCES, "adult", Source("Adult", "https://page", "see page", "", tuple(files)))
    pooch = FakePooch(answers)
    monkeypatch.setitem(sys.modules, "pooch", pooch)
    return pooch


def test_what_is_missing_is_downloaded_once(tmp_path: Path, server: FakePooch) -> None:
    folder = tmp_path / "new" / "data"
    with pytest.raises(DataNotFoundError, match=r"no data folder .*pass download=True"):
        adult(folder)
    task = adult(folder, download=True)
    assert len(task.train_targets) == 3
    assert server.asked == ["https://x/adult.data", "https://x/adult.test"]
    adult(folder, download=True)
    assert len(server.asked) == 2
    (folder / "adult" / "adult.test").unlink()
    with pytest.raises(
        DataNotFoundError, match=r"adult.test.gz exists: pass download=True, or get it from https://page"
    ):
        adult(folder)
    assert download("adult", folder) == folder
    assert server.asked[2:] == ["https://x/adult.test"]
    assert sorted(path.name for path in (folder / "adult").iterdir()) == ["adult.data", "adult.test"]


def test_a_changed_file_is_not_kept(tmp_path: Path, server: FakePooch) -> None:
    server.answers["https://x/adult.data"] += b" "
    with pytest.raises(DataFormatError, match=r"https://x/adult.data returned a file with md5:\w+, not md5:\w+"):
        adult(tmp_path, download=True)
    assert list((tmp_path / "adult").iterdir()) == []


def test_the_checksum_of_what_a_gzip_file_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same however it was packed; a file that is none is not kept."""
    files, answers = [], {}
    for part, shape in (("images-idx3", (3, 28, 28)), ("labels-idx1", (3,))):
        for split in ("train", "t10k"):
            url, held = f"https://x/{split}-{part}", idx(np.ones(shape))
            answers[url] = gzip.compress(held, compresslevel=1)
            digest = hashlib.sha256(held).hexdigest()
            files.append(SourceFile(f"MNIST/raw/{split}-{part}-ubyte.gz", url, f"sha256:{digest}", "content"))
    monkeypatch.setitem(SOURCES, "mnist", Source("MNIST", "https://page", "see page", "", tuple(files)))
    pooch = FakePooch(answers)
    monkeypatch.setitem(sys.modules, "pooch", pooch)
    assert mnist("test", tmp_path, download=True)[1].tolist() == [1, 1, 1]
    pooch.answers["https://x/train-images-idx3"] = b"<html>moved</html>"
    with pytest.raises(DataFormatError, match="not a complete gzip file"):
        mnist("train", tmp_path / "other", download=True)


def test_pooch_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(ImportError, match=r"pip install 'torchfil\[data\]'"):
        mnist(folder=tmp_path, download=True)


def test_without_a_checksum_nothing_is_downloaded(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"cannot be downloaded automatically: get iwpc/PS206767-553247439.csv from https://"
    ):
        download("iwpc", tmp_path)
    with pytest.raises(ValueError, match="no data set 'imagenet'; there are mnist"):
        source("imagenet")


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_says_what_it_must(name: str) -> None:
    origin = SOURCES[name]
    assert origin.page.startswith("http")
    assert origin.licence
    assert origin.citation
    for file in origin.files:
        assert not Path(file.path).is_absolute()
        assert file.url is None or file.url.startswith("https://")
        if file.checksum is not None:
            kind, _, digest = file.checksum.partition(":")
            assert len(digest) == 2 * hashlib.new(kind).digest_size


def test_the_folder_that_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given, TORCHFIL_DATA, ../shared/data where it is, the user's cache where that is."""
    work = tmp_path / "project"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.delenv("TORCHFIL_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(DataNotFoundError, match=r"cache/torchfil"):
        data_folder()
    assert data_folder(create=True) == tmp_path / "cache" / "torchfil"
    assert data_folder() == tmp_path / "cache" / "torchfil"
    (tmp_path / "shared" / "data").mkdir(parents=True)
    assert data_folder() == Path("../shared/data")
    monkeypatch.setenv("TORCHFIL_DATA", str(tmp_path))
    assert data_folder() == tmp_path
    named: Any = work
    assert data_folder(named) == work
