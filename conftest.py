"""Modules that need a package that is not everywhere are not collected where it is not installed.

Long tests wait.
"""

import gc
import os
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec

import pytest

collect_ignore: list[str] = []
if find_spec("lightning") is None and find_spec("pytorch_lightning") is None:
    collect_ignore += ["torchfil/integrations/lightning.py"]
if find_spec("transformers") is None or find_spec("accelerate") is None:
    collect_ignore += ["torchfil/integrations/huggingface.py"]
if find_spec("triton") is None:
    collect_ignore += ["torchfil/fisher/rules/kernels.py"]


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Combinations that others stand for are slow.

    Tests that take minutes run where asked for: ``make test-long``.
    """
    _mark_products(items)
    if os.environ.get("TORCHFIL_LONG") == "1":
        return
    skipped = pytest.mark.skip(
        reason="takes minutes: make test-long, or TORCHFIL_LONG=1 in the environment"
    )
    for item in items:
        if item.get_closest_marker("long") is not None:
            item.add_marker(skipped)


def _mark_products(items: list[pytest.Item]) -> None:
    """Of a test marked ``product``, the combinations off the diagonal are slow."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("product") is not None:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for combinations in tests.values():
        given = [list(item.callspec.params.values()) for item in combinations]  # type: ignore[attr-defined]
        # a value is one object in all
        axes = [list(dict.fromkeys(map(id, axis))) for axis in zip(*given, strict=True)]
        quick = diagonal(tuple(map(len, axes)))
        for item, values in zip(combinations, given, strict=True):
            if (
                tuple(axis.index(id(value)) for axis, value in zip(axes, values, strict=True))
                not in quick
            ):
                item.add_marker(pytest.mark.slow)


def diagonal(lengths: tuple[int, ...]) -> set[tuple[int, ...]]:
    """Places in a grid: every value of every axis, and every combination of all axes but the
    longest where it fits.

    >>> sorted(diagonal((3, 2)))
    [(0, 0), (1, 1), (2, 0)]
    >>> sorted(diagonal((4, 2, 2)))
    [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)]
    """
    longest, strides, stride = lengths.index(max(lengths)), [], 1
    for axis, length in enumerate(lengths):
        strides.append(1 if axis == longest else stride)
        stride *= 1 if axis == longest else length
    count = max(lengths[longest], stride)
    return {
        tuple(k // step % length for step, length in zip(strides, lengths, strict=True))
        for k in range(count)
    }


def pytest_collection_finish() -> None:
    """What was imported stays: the garbage collector need not look at it again (0.2 s and more in
    every collection).
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def repeatable_noise() -> None:
    """Runs of the tests can be repeated.

    Tests of the noise, and of what users see, take ``noise_of_users``.
    """
    from tests.repeatable import inject

    inject()


@pytest.fixture
def noise_of_users() -> Iterator[None]:
    """Noise and draws as users have them."""
    from tests.repeatable import not_injected

    with not_injected():
        yield


@pytest.fixture(autouse=True, scope="session")
def renyi_divergences_once() -> Iterator[None]:
    """Opacus's RDP of one step at one order is computed once for the same q, σ and α: the tests ask
    for few of them.

    A whole ε asks for 154 orders, half a second; hundreds of small runs share their q and σ. The
    function is pure.
    """
    from opacus.accountants.analysis import rdp

    plain = rdp._compute_rdp
    rdp._compute_rdp = cache(plain)
    yield
    rdp._compute_rdp = plain
