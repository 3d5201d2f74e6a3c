"""The fixture ``assert_private_step``, for every project that has torchfil installed.

It loads torch when used.
"""

import pytest


@pytest.fixture
def assert_private_step() -> object:
    """:func:`torchfil.testing.assert_private_step`."""
    from torchfil import testing

    return testing.assert_private_step
