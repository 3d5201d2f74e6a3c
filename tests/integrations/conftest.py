"""Lightning's metrics and Hugging Face's image models import torchvision, which may lack its
compiled part.
"""

from importlib.util import find_spec

import pytest

from tests.opacus_suite.vision import import_torchvision

if find_spec("torchvision") is not None:
    import_torchvision()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What Lightning and Hugging Face warn of is theirs."""
    for item in items:
        if "tests/integrations/test_" in str(item.path):
            for kind in ("UserWarning", "FutureWarning", "DeprecationWarning"):
                item.add_marker(pytest.mark.filterwarnings(f"ignore::{kind}"))
