"""Runs that somebody made to mislead: names that act on a terminal or a page, absurd numbers, files that swell."""

from __future__ import annotations

import dataclasses
import unicodedata
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from tests.report.run_cases import made_up
from tests.test_cli import call, refused
from torchfil.report import SavedRun, load, save, write_report
from torchfil.report.comparison import compare_runs
from torchfil.report.run_arrays import pack
from torchfil.report.run_file import _whole_file

# clears the screen, writes a table that passes, hides what follows; a one-byte CSI, marks that turn text around
FAKE = "\x1b[2J\x1b[Hmax_epsilon  50  1.0  pass\n\npassed\x1b[8m \x9b31m\r\u202egnp.exe\u2066 \u2028\x7f\x00\x07"


def acting(text: str) -> list[str]:
    """The characters of a text that are not seen but do something."""
    return [s for s in text if s != "\n" and not s.isprintable() and unicodedata.category(s) != "Zs"]


def with_fake_names(n: int = 40) -> SavedRun:
    name, run = FAKE, made_up(n)
    assert run.attributes is not None
    return dataclasses.replace(
        run,
        about={**run.about, "title": name, "dataset": {"data_sha256": name}, "accountant": name},
        ids=np.asarray([f"{name} {i}" for i in range(n)]),
        groups={name: np.asarray([f"{name} a", f"{name} b"] * (n // 2))},
        attributes=dataclasses.replace(run.attributes, names=[name, "b", "c"], units=[name, "", ""]),
        questions=[dataclasses.replace(run.questions[0], name=name)],
        attacks=[dataclasses.replace(run.attacks[0], name=name, testable=False, untestable=name)],
    )


class TestNames:
    @pytest.fixture
    def files(self, tmp_path: Path) -> tuple[Path, Path]:
        policy = tmp_path / "policy.toml"
        policy.write_text("max_epsilon = 1\nmax_group_disparity = 1.0\nmin_attacks = 1\n")
        return save(with_fake_names(), tmp_path / "fake.fil"), policy

    def test_the_terminal_shows_them_and_obeys_none(self, files: tuple[Path, Path]) -> None:
        run, policy = files
        gated = call("gate", run, "--policy", policy)
        assert gated.exit_code == 1
        assert gated.stdout.splitlines()[-1].startswith("FAILED: ")
        assert "passed" not in gated.stdout.splitlines()
        compared = call("compare", run, save(made_up(40), run.with_name("other.fil")))
        texts = [gated.output, call("inspect", run).stdout, compared.output, call("compare", run, run).stdout]
        texts += [call(*command, "--json").stdout for command in (("inspect", run), ("gate", run, "--policy", policy))]
        for text in texts:
            assert acting(text.replace("\x7f", "")) == []  # JSON leaves the harmless DEL
        assert "\\x1b[2J" in gated.stdout, "shown, not dropped"

    def test_errors(self, files: tuple[Path, Path]) -> None:
        run, policy = files
        other = save(made_up(40, questions=[]), run.with_name("other.fil"))
        assert acting(refused("compare", run, other)) == []
        with pytest.raises(ValueError, match="share no ids") as found:
            compare_runs(load(run), load(other))
        assert acting(str(found.value)) == []
        arrays, header = pack(load(run))
        run.write_bytes(_whole_file(arrays, {**header, "version": FAKE}))
        assert acting(refused("gate", run, "--policy", policy)) == []

    def test_files_for_pipelines(self, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
        run, policy = files
        junit, steps = run.with_name("gate.xml"), run.with_name("summary.md")
        monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(steps))
        call("gate", run, "--policy", policy, "--junit", junit)
        assert any("\\x1b[2J" in str(case.get("name")) for case in ElementTree.parse(junit).getroot())
        for path in (junit, steps):
            assert acting(path.read_text(encoding="utf-8")) == []

    def test_pages(self, tmp_path: Path, no_png: None) -> None:
        for redacted in (False, True):
            page = write_report(with_fake_names(), tmp_path / f"report {redacted}", redacted=redacted)
            assert acting(page.read_text(encoding="utf-8")) == []
