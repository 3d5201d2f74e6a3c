"""What is installed, and that the functional core stands without Opacus."""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
from pathlib import Path

import torchfil

ROOT = Path(__file__).parents[1]


def test_heavy_packages_are_imported_when_needed() -> None:
    """Nothing by torchfil itself.

    The functional core stands without Opacus, which brings scipy.stats.
    """
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


def test_completion_knows_what_is_imported_when_asked_for() -> None:
    assert set(torchfil.__all__) <= set(dir(torchfil))
    assert {"report", "gate", "FILPrivacyEngine"} <= set(dir(torchfil))


def test_what_errors_tell_to_install_can_be_installed() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    modules = (ROOT / "torchfil").rglob("*.py")
    named = {
        name for path in modules for name in re.findall(r"torchfil\[(\w+)\]", path.read_text())
    }
    assert named
    assert named <= set(config["options.extras_require"])
