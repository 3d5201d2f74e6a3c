"""The code of the README and of the pages in docs runs as it stands; the README's diff is two lines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(page.name, code, id=f"{page.name} block {number}")
    for page in PAGES
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL))
]


@pytest.mark.parametrize(("page", "code"), BLOCKS)
def test_code_blocks_run(page: str, code: str) -> None:
    namespace: dict[str, object] = {}
    exec(compile(code, page, "exec"), namespace)
    assert "model" in namespace


def test_links_and_pictures_of_the_pages_exist() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


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
