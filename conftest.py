"""Modules that need a package that is not everywhere are not collected where it is not installed; long tests wait."""

import os
from importlib.util import find_spec

import pytest

collect_ignore: list[str] = []
if find_spec("lightning") is None and find_spec("pytorch_lightning") is None:
    collect_ignore += ["torchfil/integrations/lightning.py"]
if find_spec("transformers") is None or find_spec("accelerate") is None:
    collect_ignore += ["torchfil/integrations/huggingface.py"]
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
