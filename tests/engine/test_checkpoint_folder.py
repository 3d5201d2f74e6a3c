"""Checkpoints as folders, in one process; those of several are in tests/distributed."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.engine.damage import cut_short, flipped
from tests.engine.test_state import same, start
from torchfil.engine.distributed import checkpoints
from torchfil.engine.distributed.checkpoints import is_folder, read_folder, write_folder
from torchfil.utils.errors import CheckpointError
from torchfil.utils.files import atomic_write_checked

pytestmark = pytest.mark.torch_versions
FULL = OSError(28, "No space left on device")


def tree(value: float = 1.0) -> dict[str, Any]:
    return {
        "weights": {"large": torch.full((3000,), value), "small": torch.full((2,), value)},
        "state": {0: [torch.full((700, 3), value, dtype=torch.float64), (1, "text")]},
        "nothing": None,
    }


def write(folder: Path, value: float = 1.0, *, asynchronous: bool = False) -> Any:
    return write_folder(folder, tree(value), None, asynchronous=asynchronous)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_the_newest_replaces_the_last_and_what_a_kill_left(tmp_path: Path) -> None:
    write(tmp_path)
    begun = tmp_path / "checkpoint-0123456789ab"
    begun.mkdir()
    (begun / "0.pt").write_bytes(b"half")
    assert same(read_folder(tmp_path), tree(1.0))
    write(tmp_path, 2.0)
    assert same(read_folder(tmp_path), tree(2.0))
    assert not begun.exists()
    assert sorted(path.name[:11] for path in tmp_path.iterdir()) == ["checkpoint-", "latest"]
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.glob("checkpoint-*"))
    paths = tmp_path, f"{tmp_path}/new/", tmp_path / "new"
    assert [is_folder(path) for path in paths] == [True, True, False]


@pytest.mark.parametrize("at", ["write_file", "write_bytes"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_failed_save_keeps_the_last(tmp_path: Path, at: str, asynchronous: bool) -> None:
    write(tmp_path)
    before = files(tmp_path)
    with mock.patch.object(checkpoints, at, side_effect=FULL):
        if asynchronous:
            assert "No space left" in str(write(tmp_path, 2.0, asynchronous=True).exception())
        else:
            with pytest.raises(OSError, match="No space left") as caught:
                write(tmp_path, 2.0)
            assert caught.value.filename == str(tmp_path)
    assert files(tmp_path) == before
    assert same(read_folder(tmp_path), tree(1.0))


def test_what_was_changed_is_refused(tmp_path: Path) -> None:
    """A bit of any file; a file that is cut; one that is gone."""
    write(tmp_path)
    for file in files(tmp_path):
        content = file.read_bytes()
        for spoilt in (*flipped(content, 12), *cut_short(content, 2), None):
            file.unlink() if spoilt is None else file.write_bytes(spoilt)
            with pytest.raises((ValueError, OSError), match=str(tmp_path)):
                read_folder(tmp_path)
        file.write_bytes(content)
    assert same(read_folder(tmp_path), tree())


class Evil:
    def __reduce__(self) -> Any:
        return print, ("code that runs",)


def test_a_file_cannot_run_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path)
    (part,) = tmp_path.glob("*/0.pt")
    with atomic_write_checked(part) as file:
        torch.save({"tree": Evil(), "pieces": {}, "ranks": 1}, file)
    with pytest.raises(CheckpointError, match="safely"):
        read_folder(tmp_path)
    assert "code that runs" not in capsys.readouterr().out


def test_the_next_save_waits_and_tells_what_went_wrong(tmp_path: Path) -> None:
    engine, model, *_ = start()
    with mock.patch.object(checkpoints, "write_file", side_effect=FULL):
        engine.save_checkpoint(path=f"{tmp_path}/", module=model, asynchronous=True)
        with pytest.raises(Exception, match="No space left"):
            engine.save_checkpoint(path=f"{tmp_path}/", module=model)
    engine.save_checkpoint(path=f"{tmp_path}/", module=model)
    assert "fil_engine_state_dict" in read_folder(tmp_path)


def test_what_files_and_folders_cannot_do(tmp_path: Path) -> None:
    engine, model, *_ = start()
    save, load = engine.save_checkpoint, engine.load_checkpoint
    for use, path, options, error, noun in (
        (save, tmp_path / "run.pt", {"asynchronous": True}, ValueError, "folder"),
        (save, tmp_path, {"torch_save_kwargs": {"pickle_protocol": 4}}, ValueError, "torch_save_kwargs"),
        (save, tmp_path, {"optimiser": None}, TypeError, "optimiser"),
        (load, tmp_path, {}, ValueError, "no complete checkpoint"),
        (load, tmp_path, {"torch_load_kwargs": {"map_location": "cpu"}}, ValueError, "is for files"),
    ):
        with pytest.raises(error, match=noun):
            use(path=str(path), module=model, **options)
    assert not files(tmp_path)
