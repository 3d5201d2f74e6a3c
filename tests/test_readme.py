"""The README's code runs as it stands, and its diff is two lines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("code", BLOCKS, ids=[f"block {k}" for k in range(len(BLOCKS))])
def test_code_blocks_run(code: str) -> None:
    namespace: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), namespace)
    assert "model" in namespace


def test_the_diff_to_plain_opacus_is_two_lines() -> None:
    (diff,) = re.findall(r"```diff\n(.*?)```", README, flags=re.DOTALL)
    removed = [line[1:] for line in diff.splitlines() if line.startswith("-")]
    added = [line[1:] for line in diff.splitlines() if line.startswith("+")]
    assert len(removed) == len(added) == 2
    assert [
        line.replace("FILPrivacyEngine", "PrivacyEngine").replace("torchfil", "opacus") for line in added
    ] == removed
    kept = "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("-"))
    setup = (
        "import torch\nfrom torch import nn\nfrom torch.utils.data import DataLoader, TensorDataset\n"
        "model, criterion = nn.Linear(3, 2), nn.CrossEntropyLoss()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "loader = DataLoader(TensorDataset(torch.randn(40, 3), torch.randint(2, (40,))), batch_size=8)\n"
    )
    namespace: dict[str, object] = {}
    exec(compile(setup + kept, "diff", "exec"), namespace)
    assert namespace["engine"].get_fil().value.max() > 0  # type: ignore[attr-defined]
