"""The report's folder: what is in it, who may read it, that it is whole."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.report.pages import files_of, summary_of
from tests.report.run_cases import made_up
from torchfil.report import write_report


def test_the_folder_is_complete_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    page = write_report(made_up(), tmp_path / "report")
    folder = page.parent
    assert page == tmp_path / "report" / "index.html"
    names = {path.name for path in folder.iterdir()}
    assert names == {"index.html", "leakage.csv", "summary.json"}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report"]
    summary = summary_of(page)
    assert summary["confidential"]
    assert set(summary["files"]) == names - {"index.html"}


def test_an_older_report_stays_until_the_new_one_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "report"
    write_report(made_up(), target)
    before = files_of(target / "index.html")
    with monkeypatch.context() as patch:
        patch.setattr("torchfil.report.page.render", lambda report: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            write_report(made_up(seed=1), target)
    with monkeypatch.context() as patch:
        rename = Path.rename
        patch.setattr(
            Path,
            "rename",
            lambda self, to: rename(self, to) if self.name != "new" else os.stat("/no/such"),
        )
        with pytest.raises(FileNotFoundError):
            write_report(made_up(seed=1), target)
    assert files_of(target / "index.html") == before
    assert [path.name for path in tmp_path.iterdir()] == ["report"]
    write_report(made_up(seed=1), target, redacted=True)
    assert "leakage.csv" not in files_of(target / "index.html")


def test_a_folder_of_something_else_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("years of work")
    report = write_report(made_up(), tmp_path / "report").parent
    (report / "notes.txt").write_text("mine")
    for folder, kind, why in (
        (tmp_path / "thesis", FileExistsError, "holds chapter.tex"),
        (report, FileExistsError, "holds notes.txt"),
        (report / "notes.txt", FileExistsError, "is a file"),
    ):
        with pytest.raises(kind, match=why):
            write_report(made_up(), folder)
    assert (report / "notes.txt").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    assert write_report(made_up(), tmp_path / "empty").exists()


def test_a_training_needs_nothing_that_reports_are_made_with() -> None:
    code = """
import sys, torch, torchfil
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
engine, model = torchfil.FILPrivacyEngine(), nn.Linear(3, 2)
data = TensorDataset(torch.randn(8, 3), torch.arange(8) % 2)
optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=4)
given = {"criterion": nn.CrossEntropyLoss(), "noise_multiplier": 1.0, "max_grad_norm": 1.0}
engine.train_step(*next(iter(engine.make_private(model, optimizer, loader, **given)[-1])))
print(sorted({"jinja2", "msgspec", "pyarrow"} & sys.modules.keys()))
"""
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True
    )
    assert found.stdout == "[]\n"
