"""Files and folders on a full disk, of processes that were killed, and of several that write at
once.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.loops import data, train
from torchfil.utils.files import replaced_when_complete, temporary_beside, write_bytes


@contextlib.contextmanager
def killed_while_writing(path: Path, *, folder: bool = False) -> Iterator[None]:
    """Inside, another process is in the middle of writing ``path`` (a folder: has moved it away).

    Then it is killed.
    """
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        with temporary_beside(path, folder=folder) as temporary:
            if folder:
                os.rename(path, temporary + "/old")
            os.write(tell, b"1")
            time.sleep(60)
        os._exit(1)
    try:
        assert os.read(ready, 1) == b"1"
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(tell)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_leftovers_of_a_killed_process_go_with_the_next_file_in_the_folder(tmp_path: Path) -> None:
    for name in (".x.tmp", "x.torchfil-tmp"):  # other hidden files are left alone
        (tmp_path / name).write_text("somebody's")
    with killed_while_writing(tmp_path / "run.pt"):
        write_bytes(tmp_path / "other.pt", b"new")
        assert len(names(tmp_path)) == 4, "what a living process writes is left alone"
    assert len(names(tmp_path)) == 4
    write_bytes(tmp_path / "other.pt", b"newer")
    assert names(tmp_path) == [".x.tmp", "other.pt", "x.torchfil-tmp"]


def test_a_folder_that_was_being_replaced_comes_back(tmp_path: Path) -> None:
    (tmp_path / "report.v1").mkdir()
    (tmp_path / "report.v1" / "index.html").write_text("old")
    with killed_while_writing(tmp_path / "report.v1", folder=True):
        assert not (tmp_path / "report.v1").exists()
    write_bytes(tmp_path / "other", b"")
    assert names(tmp_path) == ["other", "report.v1"]
    assert (tmp_path / "report.v1" / "index.html").read_text() == "old"


def test_errors_name_the_file_and_not_the_temporary_and_others_come_through(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"")
    for place, kind in (("file/run.pt", NotADirectoryError), ("folder", OSError)):
        with pytest.raises(kind) as found:
            write_bytes(tmp_path / place, b"")
        assert found.value.filename == str(tmp_path / place)
    with pytest.raises(KeyError), replaced_when_complete(tmp_path / "run.pt"):
        raise KeyError("x")
    with pytest.raises(PermissionError), temporary_beside(tmp_path / "run.pt"):
        raise PermissionError(13, "no", "elsewhere")
    assert names(tmp_path) == ["file", "folder"]


def test_a_limit_on_files_keeps_what_stood_there(tmp_path: Path) -> None:
    """Everything is saved twice, the second time where no file may be longer than a page."""
    run = train(data(60), steps=2)
    engine, parts = run.engine, {"module": run.model, "optimizer": run.optimizer}
    about: dict[str, Any] = {"delta": 1e-5, "hash_data": False}
    saves: dict[str, Callable[[Path], Any]] = {
        "run.pt": lambda path: engine.save_checkpoint(path=path, **parts),
        "folder/": lambda path: engine.save_checkpoint(path=f"{path}/", **parts),
        "run.parquet": lambda path: engine.save_run(path, **about),
        "report": lambda path: engine.report(path, **about),
    }
    for name, save in saves.items():
        save(tmp_path / name)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        for name, save in saves.items():
            with pytest.raises(OSError, match="The earlier file is intact") as no:
                save(tmp_path / name)
            assert no.value.filename == str(tmp_path / name) + "/" * name.endswith("/")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    engine.load_checkpoint(path=tmp_path / "run.pt", **parts)
