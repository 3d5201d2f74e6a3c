"""For tests of private training: ``assert_private_step``, also a fixture of that name
(``torchfil.pytest_plugin``).
"""

from typing import Any

from torchfil.audit.replay import Train, replay
from torchfil.utils.given import Rows

__all__ = ["assert_private_step"]


def assert_private_step(train: Train, dataset: Rows, **options: Any) -> None:
    """Replay training on neighbours of a data set.

    See :func:`torchfil.audit.replay.replay` for the arguments.

    Raises:
        AssertionError: A step is not what its accountant assumes; the message names each fault and
            a remedy.
    """
    found = replay(train, dataset, **options)
    if not found.passed:
        raise AssertionError(str(found))
