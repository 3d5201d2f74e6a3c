"""What is installed, and that the functional core stands without Opacus."""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import torchfil

ROOT = Path(__file__).parents[1]


def test_heavy_packages_are_imported_when_needed() -> None:
    """Nothing by torchfil itself; the functional core stands without Opacus, which brings scipy.stats."""
    code = """
import sys
heavy = {"matplotlib", "pandas", "pyarrow", "scipy.stats", "sklearn", "torchmetrics", "torchvision"}
import torchfil
print(sorted(heavy & sys.modules.keys()))
import torchfil.attacks, torchfil.cli
print("opacus" in sys.modules)
import torchfil.engine
print(sorted(heavy & sys.modules.keys()))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == ["[]", "False", "['scipy.stats']"]


def extras() -> dict[str, list[str]]:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return {name: lines.split() for name, lines in config["options.extras_require"].items()}


def test_extras_that_people_guess() -> None:
    """Extras that stand for others name existing ones, and "all" reaches all that a user can need."""
    lists = extras()
    assert {"all", "hf", "glm", "report"} <= set(lists)

    def reached(name: str) -> set[str]:
        found = set()
        for line in lists[name]:
            inner = re.fullmatch(r"torchfil\[(.*)\]", line)
            found |= set().union(*map(reached, inner[1].split(","))) if inner else {line}
        return found

    assert reached("all") == set().union(*(reached(name) for name in set(lists) - {"vision", "docs", "dev"}))


def test_actions_are_pinned_by_hash() -> None:
    """A tag can be moved to other code by whoever holds the action's repository; a hash cannot."""
    files = [*(ROOT / ".github/workflows").glob("*.yml"), ROOT / "docs/tutorials/ci-gate.md"]
    used = [name for path in files for name in re.findall(r"- uses: (?!\./)(\S+)", path.read_text())]
    assert len(used) > 10
    assert [name for name in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", name)] == []


def test_what_errors_tell_to_install_can_be_installed() -> None:
    named = set()
    for path in (ROOT / "torchfil").rglob("*.py"):
        named |= set(re.findall(r"torchfil\[(\w+)\]", path.read_text()))
    assert named
    assert named <= set(extras())


def test_files_that_github_reads() -> None:
    yaml = pytest.importorskip("yaml")
    read = {name: yaml.safe_load(text) for name, text in workflows().items()}
    assert {"lint.yml", "tests.yml", "docs.yml", "wheel.yml"} <= set(read)
    assert all(workflow["permissions"] == {"contents": "read"} for workflow in read.values())
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == torchfil.__version__
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert headings[:2] == ["[Unreleased]", f"[{torchfil.__version__}] - {citation['date-released']}"]


def workflows() -> dict[str, str]:
    return {path.name: path.read_text() for path in (ROOT / ".github/workflows").glob("*.yml")}


def test_the_oldest_versions_are_those_that_can_be_installed() -> None:
    """setup.cfg's minimum is what a workflow runs, and what VERSIONS.md promises."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    needed = dict(line.split(">=") for line in config["options"]["install_requires"].split("\n") if ">=" in line)
    tests, promise = workflows()["tests.yml"], (ROOT / "VERSIONS.md").read_text()
    assert f"torch=={needed['torch']}.*" in tests
    assert f"opacus=={needed['opacus']}" in tests
    assert f"torch {needed['torch']} to" in promise
    assert f"Opacus {needed['opacus']}" in promise


@pytest.mark.slow
def test_sdist_and_wheel_hold_what_they_must(tmp_path: Path) -> None:
    """Built from a copy of the files that git knows; no network is needed."""
    listed = subprocess.run(["git", "ls-files", "-z", "-c", "-o", "--exclude-standard"], cwd=ROOT, capture_output=True)
    if listed.returncode:
        pytest.skip("this is no git checkout")
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "tree" / name).write_bytes((ROOT / name).read_bytes())
    code = "from setuptools import build_meta as b; b.build_sdist({0!r}); b.build_wheel({0!r})".format(str(tmp_path))
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path / "tree", capture_output=True, check=True)

    (wheel,), (sdist,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (name for name in names if name.endswith("METADATA"))
        text = archive.read(metadata).decode()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"torchfil"}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "torchfil").rglob("*.py")}
    assert modules <= names
    assert {"torchfil/py.typed", "torchfil/report/templates/page.html"} <= names
    assert "Provides-Extra: all" in text
    assert f"Version: {torchfil.__version__}" in text

    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert {"examples/README.md", "docs/index.md", "LICENSE", "SECURITY.md", "CITATION.cff", "Makefile"} <= packed
    assert ".github/workflows/tests.yml" in packed  # what the tests read
    tests = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.py")}  # packages, with their __init__.py
    assert modules | tests <= packed
    assert not [name for name in packed if name.startswith("changes-") or "__pycache__" in name]
