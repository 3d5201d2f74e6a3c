"""Checkpoints as folders, in one process; those of several are in tests/distributed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils import _pytree as pytree

from tests.engine.test_state import epochs, start
from tests.engine.test_state import same as same_state
from torchfil.engine.distributed import checkpoints
from torchfil.engine.distributed.checkpoints import is_folder, read_folder, write_folder
from torchfil.utils.errors import CheckpointError
from torchfil.utils.files import atomic_write_checked

pytestmark = pytest.mark.torch_versions


def tree(value: float = 1.0) -> dict[str, Any]:
    return {
        "weights": {"large": torch.full((3000,), value), "small": torch.full((2,), value)},
        "state": {0: [torch.full((700, 3), value, dtype=torch.float64), (1, "text")]},
        "nothing": None,
    }


def same(ours: Any, theirs: Any) -> bool:
    (a, form), (b, other) = pytree.tree_flatten(ours), pytree.tree_flatten(theirs)
    return form == other and all(same_state(x, y) for x, y in zip(a, b, strict=True))


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_tree_comes_back(tmp_path: Path) -> None:
    write_folder(tmp_path / "run", tree(), None, asynchronous=False)
    assert same(read_folder(tmp_path / "run"), tree())


def test_the_newest_replaces_the_last(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        write_folder(tmp_path, tree(value), None, asynchronous=False)
    assert same(read_folder(tmp_path), tree(2.0))
    assert sorted(path.name[:11] for path in tmp_path.iterdir()) == ["checkpoint-", "latest"]
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.glob("checkpoint-*"))


def test_a_path_that_is_a_folder(tmp_path: Path) -> None:
    assert is_folder(tmp_path)
    assert is_folder(f"{tmp_path}/new/")
    assert not is_folder(tmp_path / "new")


@pytest.mark.parametrize("at", ["write_file", "write_bytes"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_failed_save_keeps_the_last(tmp_path: Path, at: str, asynchronous: bool) -> None:
    write_folder(tmp_path, tree(1.0), None, asynchronous=False)
    before = files(tmp_path)
    full = OSError(28, "No space left on device")
    with mock.patch.object(checkpoints, at, side_effect=full):
        if asynchronous:
            saving = write_folder(tmp_path, tree(2.0), None, asynchronous=True)
            assert saving is not None
            assert "No space left" in str(saving.exception())
        else:
            with pytest.raises(OSError, match="No space left") as caught:
                write_folder(tmp_path, tree(2.0), None, asynchronous=False)
            assert caught.value.filename == str(tmp_path)
    assert files(tmp_path) == before
    assert same(read_folder(tmp_path), tree(1.0))


def test_a_save_that_was_killed_leaves_the_last_and_is_removed_by_the_next(tmp_path: Path) -> None:
    write_folder(tmp_path, tree(1.0), None, asynchronous=False)
    begun = tmp_path / "checkpoint-0123456789ab"
    begun.mkdir()
    (begun / "0.pt").write_bytes(b"half")
    assert same(read_folder(tmp_path), tree(1.0))
    write_folder(tmp_path, tree(2.0), None, asynchronous=False)
    assert not begun.exists()
    assert same(read_folder(tmp_path), tree(2.0))


def test_what_was_changed_is_refused(tmp_path: Path) -> None:
    """A bit of any file; a file that is cut; one that is gone."""
    write_folder(tmp_path, tree(), None, asynchronous=False)
    chance = random.Random(0)
    for file in files(tmp_path):
        content = file.read_bytes()
        for place in [0, len(content) - 1, *(chance.randrange(len(content)) for _ in range(12))]:
            spoilt = bytearray(content)
            spoilt[place] ^= 1 << chance.randrange(8)
            file.write_bytes(spoilt)
            with pytest.raises((ValueError, OSError), match=str(tmp_path)):
                read_folder(tmp_path)
        file.write_bytes(content[: len(content) // 2])
        with pytest.raises((ValueError, OSError), match=str(tmp_path)):
            read_folder(tmp_path)
        file.unlink()
        with pytest.raises((ValueError, OSError), match=str(tmp_path)):
            read_folder(tmp_path)
        file.write_bytes(content)
    assert same(read_folder(tmp_path), tree())


class Evil:
    def __reduce__(self) -> Any:
        return print, ("code that runs",)


def test_a_file_cannot_run_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(tmp_path, tree(), None, asynchronous=False)
    (part,) = tmp_path.glob("*/0.pt")
    with atomic_write_checked(part) as file:
        torch.save({"tree": Evil(), "pieces": {}, "ranks": 1}, file)
    with pytest.raises(CheckpointError, match="cannot be unpickled safely"):
        read_folder(tmp_path)
    assert "code that runs" not in capsys.readouterr().out


def test_a_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """Also from a checkpoint that was written while the run went on."""
    whole, model, optimizer, private = start()
    epochs(model, optimizer, private, 2)
    path = f"{tmp_path}/run/"
    saving = whole.save_checkpoint(path=path, module=model, optimizer=optimizer, asynchronous=True)
    epochs(model, optimizer, private, 2)
    saving.result()

    second, model, optimizer, private = start(seed=99)
    second.load_checkpoint(path=path, module=model, optimizer=optimizer)
    epochs(model, optimizer, private, 2)
    assert same(second.state_dict(), whole.state_dict())
    assert second.get_epsilon(1e-5) == whole.get_epsilon(1e-5)


def test_the_next_save_waits_and_tells_what_went_wrong(tmp_path: Path) -> None:
    engine, model, optimizer, private = start()
    epochs(model, optimizer, private, 1)
    with mock.patch.object(checkpoints, "write_file", side_effect=OSError(28, "No space left on device")):
        engine.save_checkpoint(path=f"{tmp_path}/", module=model, asynchronous=True)
        with pytest.raises(Exception, match="No space left"):
            engine.save_checkpoint(path=f"{tmp_path}/", module=model)
    engine.save_checkpoint(path=f"{tmp_path}/", module=model)
    assert "fil_engine_state_dict" in read_folder(tmp_path)


def test_what_files_and_folders_cannot_do(tmp_path: Path) -> None:
    engine, model, *_ = start()
    with pytest.raises(ValueError, match=r"run.pt' is a file; .* need a folder: path='.*/'"):
        engine.save_checkpoint(path=str(tmp_path / "run.pt"), module=model, asynchronous=True)
    with pytest.raises(ValueError, match="torch_save_kwargs= is for files"):
        engine.save_checkpoint(path=tmp_path, module=model, torch_save_kwargs={"pickle_protocol": 4})
    with pytest.raises(TypeError, match="no option optimiser"):
        engine.save_checkpoint(path=tmp_path, module=model, optimiser=None)
    with pytest.raises(ValueError, match="no complete checkpoint"):
        engine.load_checkpoint(path=tmp_path, module=model)
    engine.save_checkpoint(path=tmp_path, module=model)
    with pytest.raises(ValueError, match="is for files"):
        engine.load_checkpoint(path=tmp_path, module=model, torch_load_kwargs={"map_location": "cpu"})
