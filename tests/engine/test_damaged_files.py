"""Checkpoints and run files of which a bit has changed, or that end too early: refused by name, with a remedy."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from tests.engine.damage import cut_short, flipped
from tests.engine.loops import data, train
from tests.engine.test_state import epochs, same, start
from torchfil.cli import main
from torchfil.report import load
from torchfil.utils.errors import CheckpointError, RunFileError
from torchfil.utils.files import atomic_write_checked


class TestCheckpoints:
    @pytest.fixture
    def run(self) -> Any:
        engine, model, optimizer, private = start()
        epochs(model, optimizer, private, 1)
        return engine, model, optimizer

    def state_of(self, run: Any) -> Any:
        engine, model, optimizer = run
        parts = (engine.state_dict(), dict(model.state_dict()), optimizer.state_dict(), torch.get_rng_state())
        return dict(enumerate(parts))

    def test_500_flips_and_100_cuts_are_refused_and_change_nothing(self, run: Any, tmp_path: Path) -> None:
        engine, model, optimizer = run
        path = tmp_path / "run.pt"
        engine.save_checkpoint(path=path, module=model, optimizer=optimizer)
        whole, before = path.read_bytes(), self.state_of(run)
        for content in (*flipped(whole, 500), *cut_short(whole, 100), b""):
            path.write_bytes(content)
            with pytest.raises(CheckpointError) as refused:
                engine.load_checkpoint(path=path, module=model, optimizer=optimizer)
            assert str(path) in str(refused.value)
            assert "resume from an earlier checkpoint" in str(refused.value)
            assert "\n" not in str(refused.value)
        assert same(self.state_of(run), before)

    def test_a_file_without_a_checksum_is_refused(self, run: Any, tmp_path: Path) -> None:
        engine, model, optimizer = run
        engine.save_checkpoint(path=tmp_path / "run.pt", module=model, optimizer=optimizer)
        torch.save(torch.load(tmp_path / "run.pt", weights_only=True), tmp_path / "copy.pt")  # torch does not mind it
        with pytest.raises(CheckpointError, match=r"copy.pt .*its checksum is missing"):
            engine.load_checkpoint(path=tmp_path / "copy.pt", module=model, optimizer=optimizer)

    def test_open_files(self, run: Any) -> None:
        engine, model, optimizer = run
        file = io.BytesIO()
        engine.save_checkpoint(path=file, module=model, optimizer=optimizer)
        before = self.state_of(run)
        engine.load_checkpoint(path=io.BytesIO(file.getvalue()), module=model, optimizer=optimizer)
        assert same(self.state_of(run), before)
        with pytest.raises(CheckpointError, match="its checksum does not fit its content"):
            engine.load_checkpoint(path=io.BytesIO(b"x" + file.getvalue()[1:]), module=model)

    def test_other_contents(self, run: Any, tmp_path: Path) -> None:
        engine, model, _ = run
        with atomic_write_checked(tmp_path / "list.pt") as file:
            torch.save([1, 2], file)
        with pytest.raises(CheckpointError, match=r"list.pt .*it holds a list"):
            engine.load_checkpoint(path=tmp_path / "list.pt", module=model)
        with pytest.raises(FileNotFoundError, match="none.pt"):
            engine.load_checkpoint(path=tmp_path / "none.pt", module=model)


def alike(a: Any, b: Any) -> bool:
    if dataclasses.is_dataclass(a):
        return type(a) is type(b) and alike(vars(a), vars(b))
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind == "f"))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(alike, a, b))
    return bool(a == b)


class TestRunFiles:
    @pytest.fixture
    def whole(self, tmp_path: Path) -> bytes:
        engine = train(data(40), steps=6, track=("diagonal",)).engine
        engine.save_run(tmp_path / "whole.fil", delta=1e-5, groups={"half": [str(i % 2) for i in range(40)]})
        return (tmp_path / "whole.fil").read_bytes()

    def test_500_flips_and_100_cuts(self, whole: bytes, tmp_path: Path) -> None:
        """Each is refused by name and with a remedy, or changes nothing that is read."""
        path, truth = tmp_path / "run.fil", load(tmp_path / "whole.fil")
        refusals = []
        for content in (*flipped(whole, 500), *cut_short(whole, 100)):
            path.write_bytes(content)
            try:
                assert alike(load(path), truth)
            except RunFileError as error:
                refusals.append(str(error))
        assert len(refusals) > 590
        for text in refusals:
            assert text.startswith(str(path))
            assert any(remedy in text for remedy in ("again", "engine.save_run", "Install")), text
            assert "\n" not in text

    @pytest.mark.parametrize("command", ["inspect", "gate", "report"])
    def test_commands_say_it_in_one_line(self, whole: bytes, tmp_path: Path, command: str) -> None:
        path, policy = tmp_path / "run.fil", tmp_path / "policy.toml"
        policy.write_text("min_mse_bound = 1e-9")
        more = {"inspect": [], "gate": ["--policy", policy], "report": ["-o", tmp_path / "report"]}[command]
        for content in (*flipped(whole, 12), *cut_short(whole, 4)):
            path.write_bytes(content)
            found = CliRunner().invoke(main, [command, str(path), *map(str, more)])
            assert found.exit_code == 2, found.output
            assert found.stdout == ""
            (line,) = found.stderr.strip().splitlines()
            assert str(path) in line
        assert not (tmp_path / "report").exists()
