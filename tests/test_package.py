"""What is installed, and that the functional core stands without Opacus."""

from __future__ import annotations

import subprocess
import sys
from importlib import resources
from pathlib import Path

import torchfil

ROOT = Path(__file__).parents[1]


def test_everything_promised_is_there() -> None:
    for module in (torchfil, torchfil.fisher, torchfil.bounds, torchfil.clipping, torchfil.smoothness):
        for name in module.__all__:
            assert getattr(module, name) is not None
    assert (resources.files("torchfil") / "py.typed").is_file()


def test_only_torchfil_is_installed_at_top_level() -> None:
    code = "from setuptools import Distribution as D; d = D(); d.parse_config_files(); print(d.packages)"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    packages = eval(found.stdout.strip().splitlines()[-1])
    assert "torchfil.fisher" in packages
    assert {name.split(".")[0] for name in packages} == {"torchfil"}


def test_the_core_imports_neither_opacus_nor_optional_packages() -> None:
    code = (
        "import sys, torchfil, torchfil.attacks; "
        "optional = ('opacus', 'torchvision', 'matplotlib', 'pandas', 'sklearn', 'torchmetrics'); "
        "print([m for m in optional if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
