"""What is installed, and that the functional core stands without Opacus."""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_heavy_packages_are_imported_when_needed() -> None:
    """Nothing by torchfil itself, and by a training nothing that reports are made with.

    The functional core stands without Opacus, which brings scipy.stats.
    """
    code = """
import os, sys
reports = {"jinja2", "msgspec", "pyarrow"}
heavy = {"matplotlib", "pandas", "pyarrow", "scipy.stats", "sklearn", "torchmetrics", "torchvision"}
import torchfil
print(sorted(heavy & sys.modules.keys()), flush=True)
if os.fork() == 0:
    import torchfil.attacks, torchfil.cli
    sys.exit(bool({"opacus", *heavy - {"scipy.stats"}} & sys.modules.keys()))
print(os.wait()[1])
import torch
from torch.utils.data import DataLoader, TensorDataset
engine, model = torchfil.FILPrivacyEngine(), torch.nn.Linear(3, 2)
print(sorted(heavy & sys.modules.keys()))
data = TensorDataset(torch.randn(8, 3), torch.arange(8) % 2)
optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=4)
given = {"criterion": torch.nn.CrossEntropyLoss(), "noise_multiplier": 1.0, "max_grad_norm": 1.0}
engine.train_step(*next(iter(engine.make_private(model, optimizer, loader, **given)[-1])))
print(sorted(reports & sys.modules.keys()))
"""
    command = [sys.executable, "-W", "ignore", "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == ["[]", "0", "['scipy.stats']", "[]"]


def test_what_errors_tell_to_install_can_be_installed() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    modules = (ROOT / "torchfil").rglob("*.py")
    named = {
        name for path in modules for name in re.findall(r"torchfil\[(\w+)\]", path.read_text())
    }
    assert named
    assert named <= set(config["options.extras_require"])
