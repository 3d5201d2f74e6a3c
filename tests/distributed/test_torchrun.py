"""The guide's script under torchrun, as a user starts it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "scale.md"


@pytest.mark.slow
def test_the_guides_script_runs_under_torchrun(tmp_path: Path) -> None:
    code, *_ = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)
    script = tmp_path / "train.py"
    script.write_text(code)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(GUIDE.parents[2])}
    ended = subprocess.run(torchrun, capture_output=True, text=True, timeout=240, env=variables, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("individual_epsilon") == 1  # of rank 0 alone
