"""Checkpoints and run files of which a bit has changed, or that end too early: refused by name, with a remedy."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from tests.engine.damage import cut_short, flipped
from tests.engine.loops import data, train
from tests.engine.test_state import epochs, same, start
from torchfil.cli import main
from torchfil.utils.errors import CheckpointError
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


@pytest.mark.parametrize("command", ["inspect", "gate", "report"])
def test_commands_name_a_damaged_run_in_one_line(tmp_path: Path, command: str) -> None:
    path, policy = tmp_path / "run.parquet", tmp_path / "policy.toml"
    whole = train(data(40), steps=6).engine.save_run(path, delta=1e-5).read_bytes()
    policy.write_text("min_mse_bound = 1e-9")
    more = {"inspect": [], "gate": ["--policy", policy], "report": ["-o", tmp_path / "report"]}[command]
    for content in (*flipped(whole, 12), *cut_short(whole, 4)):
        path.write_bytes(content)
        found = CliRunner().invoke(main, [command, str(path), *map(str, more)])
        assert (found.exit_code, found.stdout) == (2, ""), found.output
        (line,) = found.stderr.strip().splitlines()
        assert str(path) in line
    assert not (tmp_path / "report").exists()
