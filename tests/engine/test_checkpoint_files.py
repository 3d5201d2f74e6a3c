"""Checkpoints as files and as folders (of one process): what is damaged, foreign or half written is
refused by name.
"""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils import _pytree as pytree

from tests.cases import grouped
from tests.engine.damage import cut_short, flipped
from tests.engine.loops import data, loader, network
from tests.engine.test_state import OPTIONS, epochs, same, start
from torchfil import FILPrivacyEngine
from torchfil.engine.distributed import checkpoints
from torchfil.engine.distributed.checkpoints import is_folder, read_folder, write_file, write_folder
from torchfil.utils.errors import CheckpointError

pytestmark = pytest.mark.torch_versions
FULL = OSError(28, "No space left on device")


class Evil:
    def __reduce__(self) -> Any:
        return print, ("code that runs",)


def state_of(engine: Any, parts: dict[str, Any]) -> Any:
    states = [dict(part.state_dict()) for part in parts.values()]
    return copy.deepcopy([engine.state_dict(), *states, torch.get_rng_state()])


def test_damaged_files_are_refused_and_change_nothing(tmp_path: Path) -> None:
    engine, model, optimizer, private = start()
    epochs(model, optimizer, private, 1)
    path, parts = tmp_path / "run.pt", {"module": model, "optimizer": optimizer}
    engine.save_checkpoint(path=path, **parts)
    whole, bare, before = path.read_bytes(), io.BytesIO(), state_of(engine, parts)
    # without a checksum, which torch does not miss
    torch.save(torch.load(path, weights_only=True), bare)
    for content in (*flipped(whole, 150), *cut_short(whole, 30), b"", bare.getvalue()):
        path.write_bytes(content)
        for place in (path, io.BytesIO(content)):
            with pytest.raises(
                CheckpointError, match="resume from an earlier checkpoint"
            ) as refused:
                engine.load_checkpoint(path=place, **parts)
            assert place is not path or str(path) in str(refused.value)
    assert same(state_of(engine, parts), before)
    engine.load_checkpoint(path=io.BytesIO(whole), **parts)
    assert same(state_of(engine, parts), before)


def test_files_that_do_not_fit_change_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, model, optimizer, private = start()
    epochs(model, optimizer, private, 1)
    engine.save_checkpoint(path=tmp_path / "groups", module=model, optimizer=optimizer)
    saved = torch.load(tmp_path / "groups", weights_only=True)
    write_file(
        tmp_path / "random",
        {**saved, "random_state": [{"cpu": saved["random_state"][0]["cpu"][:3]}]},
    )
    write_file(tmp_path / "other", {"module_state_dict": {}})
    write_file(tmp_path / "evil", {"fil_engine_state_dict": Evil()})

    other, model, optimizer, private = start(groups=True)
    epochs(model, optimizer, private, 2)
    parts = {"module": model, "optimizer": optimizer}
    before = state_of(other, parts)
    for name, error, noun in (
        ("groups", ValueError, "parameter groups"),
        ("random", RuntimeError, "RNG state"),
        ("other", ValueError, "no Fisher accounting"),
        ("evil", CheckpointError, "safely"),
        ("none", FileNotFoundError, "none"),
    ):
        given = parts if name == "groups" else {"module": model}
        with pytest.raises(error, match=noun):
            other.load_checkpoint(path=tmp_path / name, **given)
        assert same(state_of(other, parts), before)
    assert "code that runs" not in capsys.readouterr().out


def changed(content: Any, place: tuple[Any, ...], value: Any) -> Any:
    """The content with another leaf."""
    if not place:
        return value
    key, *rest = (getattr(place[0], "key", getattr(place[0], "idx", None)), *place[1:])
    inside = {**content} if isinstance(content, dict) else list(content)
    inside[key] = changed(inside[key], tuple(rest), value)
    return inside if isinstance(content, dict) else type(content)(inside)


def wrong(leaf: Any) -> list[Any]:
    """Values that no run saves in place of this one."""
    if isinstance(leaf, torch.Tensor):
        return ["x", -5, torch.zeros(1, dtype=leaf.dtype).expand(10**9)]
    if isinstance(leaf, bool | str | None):
        return [[]] if isinstance(leaf, str) else []
    return ["x", -5, 10**30, float("nan"), None]


@pytest.mark.parametrize("kept", [torch.optim.SGD, torch.optim.Adam])
def test_what_no_run_saves_is_refused_before_anything_is_taken(tmp_path: Path, kept: Any) -> None:
    torch.manual_seed(0)
    engine, net = FILPrivacyEngine(), network()
    given: dict[str, Any] = {"momentum": 0.9} if kept is torch.optim.SGD else {}
    inner = kept(net.parameters(), lr=0.1, **given)
    model, optimizer, private = engine.make_private(
        net, inner, loader(data(60)), **grouped(**OPTIONS)
    )
    epochs(model, optimizer, private, 1)
    path, parts = tmp_path / "run.pt", {"module": model, "optimizer": optimizer}
    engine.save_checkpoint(path=path, **parts)
    good, before, tried = checkpoints.read_file(path), state_of(engine, parts), 0
    for place, leaf in pytree.tree_flatten_with_path(good)[0]:
        name = pytree.keystr(place)
        # compared with the run's own, or by torch
        if "settings" in name or "questions" in name or "'params'" in name:
            continue
        for value in wrong(leaf):
            if "module_state" in name and not isinstance(value, torch.Tensor):
                continue  # torch says which weight does not fit
            if name.endswith("['lowest']") and value == 10**30:
                continue  # infinite before the first step
            if name.endswith("['seed']") and isinstance(value, int):
                continue  # any number is a seed
            if name.endswith("['draw_rate']") and value is None:
                continue  # of known batches; this run goes on with its own
            read = mock.patch.object(
                checkpoints, "read_file", return_value=changed(good, place, value)
            )
            with (
                read,
                pytest.raises(
                    CheckpointError, match=r"holds what no run saves: .* Nothing was loaded"
                ),
            ):
                engine.load_checkpoint(path=path, **parts)
            tried += 1
    assert tried > 150
    assert same(state_of(engine, parts), before)
    momentum = next(iter(good["optimizer_state_dict"]["state"][0]))
    for shape in ((3, 2), (99,), (2, 3, 1)):
        spoilt = copy.deepcopy(good)
        spoilt["optimizer_state_dict"]["state"][0][momentum] = torch.zeros(shape)
        write_file(path, spoilt)
        with pytest.raises(CheckpointError, match=rf"{momentum} of parameter 0 has shape"):
            engine.load_checkpoint(path=path, **parts)
    assert same(state_of(engine, parts), before)


# ------------------------------------------------------------------ folders


def tree(value: float = 1.0) -> dict[str, Any]:
    return {
        "weights": {"large": torch.full((3000,), value), "small": torch.full((2,), value)},
        "state": {0: [torch.full((700, 3), value, dtype=torch.float64), (1, "text")]},
        "nothing": None,
    }


def write(folder: Path, value: float = 1.0) -> None:
    write_folder(folder, tree(value), None)


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
    assert sorted(path.name[:11] for path in tmp_path.iterdir()) == ["checkpoint-", "latest"]
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.glob("checkpoint-*"))
    paths = tmp_path, f"{tmp_path}/new/", tmp_path / "new"
    assert [is_folder(path) for path in paths] == [True, True, False]


@pytest.mark.parametrize("at", ["write_file", "write_bytes"])
def test_a_failed_save_keeps_the_last(tmp_path: Path, at: str) -> None:
    engine, model, *_ = start()
    engine.save_checkpoint(path=f"{tmp_path}/", module=model)
    before = files(tmp_path)
    with (
        mock.patch.object(checkpoints, at, side_effect=FULL),
        pytest.raises(OSError, match="No space left"),
    ):
        engine.save_checkpoint(path=f"{tmp_path}/", module=model)
    assert files(tmp_path) == before
    assert "fil_engine_state_dict" in read_folder(tmp_path)


def test_what_was_changed_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A bit of any file; a file that is cut; one that is gone; one that would run code."""
    write(tmp_path)
    for file in files(tmp_path):
        content = file.read_bytes()
        for spoilt in (*flipped(content, 12), *cut_short(content, 2), None):
            file.unlink() if spoilt is None else file.write_bytes(spoilt)
            with pytest.raises((ValueError, OSError), match=str(tmp_path)):
                read_folder(tmp_path)
        file.write_bytes(content)
    assert same(read_folder(tmp_path), tree())
    (part,) = tmp_path.glob("*/0.pt")
    write_file(part, {"tree": Evil(), "pieces": {}, "ranks": 1})
    with pytest.raises(CheckpointError, match="safely"):
        read_folder(tmp_path)
    assert "code that runs" not in capsys.readouterr().out


def test_an_empty_folder_is_no_checkpoint(tmp_path: Path) -> None:
    engine, model, *_ = start()
    with pytest.raises(ValueError, match="no complete checkpoint"):
        engine.load_checkpoint(path=str(tmp_path), module=model)
