"""The GPU kernels against torch in double precision.

Without a GPU under the interpreter, where Triton is at hand.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton", reason="needs Triton, which comes with torch's CUDA wheels")

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1", allow_module_level=True)

from torchfil.fisher.rules import kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, device=DEVICE)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(
    ("batch", "channels", "positions", "groups"), [(3, 8, 25, 4), (2, 6, 5000, 2), (2, 4, 1, 2)]
)
def test_group_norm(batch: int, channels: int, positions: int, groups: int, weighted: bool) -> None:
    x, gamma = (
        drawn(batch, channels, positions).requires_grad_(),
        drawn(batch, channels, positions).requires_grad_(),
    )
    w, weight = drawn(batch, channels, positions), drawn(channels) if weighted else None
    (first,) = torch.autograd.grad(F.group_norm(x, groups, weight), x, gamma, create_graph=True)
    second = torch.autograd.grad(first, (gamma, x), w)
    _, mean, scale = torch.native_group_norm(
        x.detach(), None, None, batch, channels, positions, groups, 1e-5
    )
    given = x.detach(), mean, scale, weight, groups
    torch.testing.assert_close(kernels.group_pulled(gamma.detach(), *given), first.detach())
    for found, expected in zip(
        kernels.group_pulled_twice(gamma.detach(), w, *given), second, strict=True
    ):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("channels", "positions", "groups"), [(8, 25, 4), (6, 3000, 2), (4, 1, 2)])
def test_normalised_sums(channels: int, positions: int, groups: int) -> None:
    delta, x = (
        drawn(3, channels, positions).requires_grad_(),
        drawn(3, channels, positions).requires_grad_(),
    )
    sums = (delta * F.group_norm(x, groups)).sum(dim=2), delta.sum(dim=2)
    cotangents = drawn(3, channels), drawn(3, channels)
    expected = torch.autograd.grad(sums, (delta, x), cotangents)
    _, mean, scale = torch.native_group_norm(
        x.detach(), None, None, 3, channels, positions, groups, 1e-5
    )
    given = delta.detach(), x.detach(), mean, scale
    found = kernels.normalised_sums(*given)
    for a, b in zip(found, sums, strict=True):
        torch.testing.assert_close(a, b.detach())
    for a, b in zip(kernels.normalised_sums_back(*given, found, cotangents), expected, strict=True):
        torch.testing.assert_close(a, b)


def test_gelu() -> None:
    w, gamma, x = (drawn(7, 333).requires_grad_() for _ in range(3))
    (first,) = torch.autograd.grad(F.gelu(x), x, gamma, create_graph=True)
    expected = torch.autograd.grad(first, (gamma, x), w)
    found = kernels.gelu_pulled_twice(w.detach(), gamma.detach(), x.detach())
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "walk",  # size, stride, dilation and padding, each down and across
    [
        (3, 3, 1, 1, 1, 1, 1, 1),
        (3, 2, 2, 1, 1, 2, 0, 1),
        (1, 1, 2, 2, 1, 1, 0, 0),
        (8, 8, 2, 2, 1, 1, 3, 3),
    ],
)
def test_patches(walk: tuple[int, ...]) -> None:
    size, stride, dilation, padding = (walk[k : k + 2] for k in (0, 2, 4, 6))
    a = drawn(2, 3, 15, 14)
    expected = F.unfold(a, size, dilation, padding, stride)
    torch.testing.assert_close(kernels.unfold_patches(a, size, stride, dilation, padding), expected)
    columns = torch.randn_like(expected)
    folded = F.fold(columns, (15, 14), size, dilation, padding, stride)
    torch.testing.assert_close(
        kernels.fold_patches(columns, a.shape[2:], size, stride, dilation, padding), folded
    )
