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


def test_what_errors_tell_to_install_can_be_installed() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    modules = (ROOT / "torchfil").rglob("*.py")
    named = {name for path in modules for name in re.findall(r"torchfil\[(\w+)\]", path.read_text())}
    assert named
    assert named <= set(config["options.extras_require"])


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
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "torchfil").rglob("*.py")}
    tests = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.py")}  # packages, with their __init__.py
    assert {name.split("/")[0].split("-")[0] for name in names} == {"torchfil"}
    assert modules | {"torchfil/py.typed", "torchfil/report/templates/page.html"} <= names
    assert modules | tests | {"examples/README.md", "docs/index.md", "reproduction/rows.py", "LICENSE"} <= packed
    assert not [name for name in packed if "__pycache__" in name]
