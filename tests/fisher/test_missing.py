"""Functions that are put in the place of torch's, so that they may be differentiated twice."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torchfil.fisher.models import with_second_derivatives
from torchfil.fisher.rules.patches import patches

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv1d(2, 3, 4, 4), (2, 2, 13)),
        (nn.Conv2d(3, 5, 4, 4), (2, 3, 12, 9)),
        (nn.Conv2d(3, 5, (2, 3), (2, 3), bias=False), (2, 3, 6, 6)),
        (nn.Conv3d(1, 2, 2, 2), (2, 1, 4, 5, 4)),
        (nn.Conv2d(3, 5, 4, 4, padding=1), (2, 3, 12, 9)),
        (nn.Conv2d(2, 4, 2, 2, groups=2), (2, 2, 6, 6)),
    ],
)
def test_a_convolution_of_patches_is_torchs_with_both_derivatives(layer: nn.Module, shape: tuple[int, ...]) -> None:
    layer.double()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weights = list(layer.parameters())

    def outcome() -> list[torch.Tensor]:
        y = layer(x)
        first = torch.autograd.grad(y.tanh().sum(), [x, *weights], create_graph=True)
        second = torch.autograd.grad(sum(part.square().sum() for part in first), [x, *weights])
        return [y, *first, *second]

    expected = outcome()
    with with_second_derivatives(layer):
        found = outcome()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_a_vision_transformers_first_layer_is_differentiated_twice_in_seconds() -> None:
    """Torch's own takes minutes: a convolution with an image as kernel."""
    layer = nn.Conv2d(3, 768, 16, 16)
    x = torch.randn(1, 3, 224, 224, requires_grad=True)
    with with_second_derivatives(layer):
        (gradient,) = torch.autograd.grad(layer(x).square().sum(), layer.weight, create_graph=True)
    names = {node.name() for node in _nodes(gradient)}
    assert not any("Convolution" in name for name in names)


@pytest.mark.parametrize("size", [(12, 8), (13, 8), (22, 12)])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=CUDA)])
def test_patches_that_tile_an_image_are_torchs(size: tuple[int, int], device: str) -> None:
    """And large ones on a GPU: kernels that are written out tap by tap take minutes to compile."""
    module = nn.Conv2d(3, 5, 4, 4) if size[1] == 8 else nn.Conv2d(3, 5, 11, 11)
    a = torch.randn(2, 3, *size, dtype=torch.float64, device=device, requires_grad=True)
    found, expected = patches(module, a), nn.functional.unfold(a, module.kernel_size, stride=module.stride)
    torch.testing.assert_close(found, expected)
    weight = torch.randn_like(expected)
    (own,), (true,) = (torch.autograd.grad(each, a, weight) for each in (found, expected))
    torch.testing.assert_close(own, true)


def _nodes(tensor: torch.Tensor) -> set[torch.autograd.graph.Node]:
    waiting, seen = [tensor.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return seen
