"""Modules that need a package that is not everywhere are not collected where it is not installed; long tests wait."""

import os
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec

import pytest

collect_ignore: list[str] = []
if find_spec("lightning") is None and find_spec("pytorch_lightning") is None:
    collect_ignore += ["torchfil/integrations/lightning.py", "tests/integrations/loop_ranks.py"]
if find_spec("transformers") is None or find_spec("accelerate") is None:
    collect_ignore += ["torchfil/integrations/huggingface.py", "tests/integrations/loop_ranks.py"]
if find_spec("triton") is None:
    collect_ignore += ["torchfil/fisher/rules/kernels.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that take minutes run where they are asked for: ``make test-long``."""
    if os.environ.get("TORCHFIL_LONG") == "1":
        return
    skipped = pytest.mark.skip(reason="takes minutes: make test-long, or TORCHFIL_LONG=1 in the environment")
    for item in items:
        if item.get_closest_marker("long") is not None:
            item.add_marker(skipped)


@pytest.fixture(autouse=True, scope="session")
def renyi_divergences_once() -> Iterator[None]:
    """Opacus's RDP of one step at one order is computed once for the same q, σ and α: the tests ask for few of them.

    A whole ε asks for 154 orders, half a second; hundreds of small runs share their q and σ. The function is pure.
    """
    from opacus.accountants.analysis import rdp

    plain = rdp._compute_rdp
    rdp._compute_rdp = cache(plain)
    yield
    rdp._compute_rdp = plain
