"""The code of the README and of the pages in docs runs as it stands.

The README's diff is two lines.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from torchfil import fisher

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [
    pytest.param(page.name, code, id=f"{page.name} block {number}")
    for page in PAGES
    for number, code in enumerate(
        re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    )
]
OPTIONAL = ("lightning", "transformers", "trl")


@pytest.mark.usefixtures("noise_of_users")
@pytest.mark.parametrize(("page", "code"), BLOCKS)
def test_code_blocks_run(page: str, code: str) -> None:
    for package in OPTIONAL:
        if re.search(rf"^(import|from) {package}\b", code, flags=re.MULTILINE):
            pytest.importorskip(package)
    namespace: dict[str, object] = {}
    exec(compile(code, page, "exec"), namespace)
    assert len(namespace) > 1


def test_the_table_of_subsampling_factors_is_right() -> None:
    page = (ROOT / "docs" / "guide" / "choosing-noise.md").read_text()
    header = next(line for line in page.splitlines() if line.startswith("| q | σ = "))
    sigmas = [float(cell.replace("σ = ", "")) for cell in header.strip("| ").split(" | ")[1:]]
    rows = re.findall(r"^\| (0\.\d+) \| (.* / .*) \|$", page, flags=re.MULTILINE)
    assert len(rows) == 3
    for q, cells in rows:
        for sigma, cell in zip(sigmas, cells.split(" | "), strict=True):
            factors = fisher.PoissonAmplification(float(q)).factors(
                torch.tensor([1 / sigma], dtype=torch.float64)
            )
            printed = [float(part) for part in cell.split(" / ")]
            assert printed == pytest.approx([float(kappa) for kappa in factors], rel=0.05), (
                q,
                sigma,
            )


def test_the_diff_to_plain_opacus_is_two_lines() -> None:
    (diff,) = re.findall(r"```diff\n(.*?)```", README, flags=re.DOTALL)
    removed = [line[1:] for line in diff.splitlines() if line.startswith("-")]
    added = [line[1:] for line in diff.splitlines() if line.startswith("+")]
    assert len(removed) == len(added) == 2
    replaced = [
        line.replace("FILPrivacyEngine", "PrivacyEngine").replace("torchfil", "opacus")
        for line in added
    ]
    assert replaced == removed
    kept = "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("-"))
    setup = (
        "import torch\nfrom torch import nn\nfrom torch.utils.data import DataLoader, "
        "TensorDataset\n"
        "model, criterion = nn.Linear(3, 2), nn.CrossEntropyLoss()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "loader = DataLoader(TensorDataset(torch.randn(40, 3), torch.randint(2, (40,))), "
        "batch_size=8)\n"
    )
    namespace: dict[str, object] = {}
    exec(compile(setup + kept, "diff", "exec"), namespace)
    assert namespace["engine"].totals.summary().largest_fil > 0  # type: ignore[attr-defined]
