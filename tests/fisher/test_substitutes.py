"""What a recorded pass computes in its own way: the same values, first and second derivatives as torch's."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional as F

from tests.cases import DEVICE
from torchfil.fisher.rules import substitutes
from torchfil.fisher.rules.substitutes import FastFunctions, gram, register_substitute, with_substitutes

pytestmark = pytest.mark.torch_versions


def second_derivatives(module: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
    """The output, its product with a fixed direction back to x, and that one's back to x."""
    x = x.clone().requires_grad_()
    output = module(x)
    generator = torch.Generator().manual_seed(1)
    v = torch.randn(output.shape, dtype=x.dtype, generator=generator).to(DEVICE)
    (first,) = torch.autograd.grad((output.sin() * v).sum(), x, create_graph=True)
    w = torch.randn(x.shape, dtype=x.dtype, generator=generator).to(DEVICE)
    (second,) = torch.autograd.grad((first * w).sum(), x)
    return [output.detach(), first.detach(), second]


CASES = {
    "pool, overlapping": (nn.AvgPool2d(2, stride=1), (2, 3, 5, 6)),
    "pool, uneven": (nn.AvgPool2d((3, 2), (2, 3)), (2, 3, 8, 7)),
    "pool, no overlap, a rest": (nn.AvgPool2d(2), (2, 3, 5, 6)),
    "pool, gaps": (nn.AvgPool1d(2, stride=3), (2, 3, 10)),
    "pool, three axes": (nn.AvgPool3d(2, stride=1), (2, 1, 3, 4, 5)),
    "pool, padded (torch's own)": (nn.AvgPool2d(3, stride=2, padding=1), (2, 3, 7, 7)),
    "pool, ceiling (torch's own)": (nn.AvgPool2d(2, ceil_mode=True), (2, 3, 5, 5)),
    "pool, divisor (torch's own)": (nn.AvgPool2d(2, divisor_override=3), (2, 3, 6, 6)),
    "pool, large (torch's own)": (nn.AvgPool2d(5), (2, 3, 10, 10)),
    "pool, one image (torch's own)": (nn.AvgPool2d(2), (3, 6, 6)),
    "groups": (nn.GroupNorm(2, 4), (3, 4, 3, 2)),
    "groups, no positions": (nn.GroupNorm(2, 6), (3, 6)),
    "groups, no weights": (nn.GroupNorm(3, 3, affine=False, eps=0.1), (2, 3, 4)),
    "groups, long rows": (nn.GroupNorm(2, 4), (2, 4, 50, 60)),
    "tanh": (nn.Tanh(), (4, 5)),
    "layer": (nn.LayerNorm(5), (2, 3, 5)),
    "layer, two axes, no bias": (nn.LayerNorm((3, 4), bias=False), (2, 3, 4)),
    "convolution": (nn.Conv2d(4, 6, 3, stride=2, padding=1, dilation=2, groups=2), (2, 4, 9, 8)),
    "convolution, circular": (nn.Conv1d(2, 3, 3, padding=1, padding_mode="circular"), (2, 2, 6)),
    "convolution, few channels": (nn.Conv2d(3, 4, (3, 2), stride=2, padding=(2, 1), dilation=(1, 2)), (2, 3, 8, 7)),
    "convolution, many channels": (nn.Conv2d(8, 3, 3, padding=(2, 1)), (2, 8, 5, 4)),
    "convolution, kernel of whole strides": (nn.Conv2d(9, 2, (4, 2), stride=2, padding=(1, 0)), (2, 9, 7, 6)),
    "convolution, strides that differ": (nn.Conv2d(8, 2, (4, 3), stride=(4, 1), padding=(3, 2)), (2, 8, 11, 5)),
    "convolution, a rest": (nn.Conv2d(8, 2, 2, stride=2), (2, 8, 7, 5)),
    "convolution, same": (nn.Conv2d(2, 3, 2, padding="same"), (2, 2, 5, 5)),
}


@pytest.mark.parametrize("name", CASES)
def test_same_values_and_derivatives_as_torch(name: str) -> None:
    torch.manual_seed(0)
    module, shape = CASES[name]
    module = module.double().to(DEVICE)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(shape, dtype=torch.float64).to(DEVICE)
    want = second_derivatives(module, x)
    with with_substitutes(module, device=torch.device(DEVICE).type):
        got = second_derivatives(module, x)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    assert "forward" not in vars(module)
    assert "_conv_forward" not in vars(module)


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu, a module": nn.GELU(),
    "gelu, approximate": nn.GELU("tanh"),
    "silu": F.silu,
    "silu, a module": nn.SiLU(),
    "silu, in place (torch's own)": lambda x: F.silu(x + 0, inplace=True),
    "product": lambda x: x @ x.cos().mT,
    "product of four": lambda x: torch.matmul(x[None], x.cos().mT[None]),
    "product, bmm": lambda x: torch.bmm(x.mT, x.cos()),
    "product with constants": lambda x: torch.eye(3).to(x).expand(2, 3, 3).matmul(x),
    "product, one for many (torch's own)": lambda x: x @ x[:1].cos().mT,
    "product with a vector (torch's own)": lambda x: x @ x[0, 0],
}


@pytest.mark.skipif(DEVICE != "cpu", reason="on CPUs only")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_have_the_same_values_and_derivatives_as_torchs(name: str) -> None:
    function, ours = FUNCTIONS[name], "own" not in name
    x = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def computed(x: torch.Tensor) -> torch.Tensor:
        with FastFunctions("cpu"):
            result = function(x)
        assert type(result.grad_fn).__name__.startswith("_") == ours
        return result

    want, got = second_derivatives(function, x), second_derivatives(computed, x)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    if ours:
        assert gradgradcheck(computed, x.requires_grad_())


def test_products_of_rows_with_each_other() -> None:
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(gram(x), x @ x.mT)
    assert gradcheck(gram, x)
    assert gradgradcheck(gram, x)


@pytest.mark.parametrize("name", ["pool, overlapping", "groups", "layer"])
def test_derivatives_are_those_of_finite_differences(name: str) -> None:
    torch.manual_seed(0)
    module, shape = CASES[name]
    module = module.double().cpu()
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    with with_substitutes(module):
        assert gradcheck(module, x)
        assert gradgradcheck(module, x)


def test_substitutes_are_not_replaced_silently() -> None:
    with pytest.raises(ValueError, match="Tanh already has a substitute; pass overwrite=True to replace it"):
        register_substitute(nn.Tanh, lambda module: torch.tanh)

    class Doubled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    register_substitute(Doubled, lambda module: lambda x: x)
    register_substitute(Doubled, lambda module: lambda x: 3 * x, overwrite=True)
    module = Doubled()
    with with_substitutes(module):
        assert float(module(torch.ones(()))) == 3
    assert float(module(torch.ones(()))) == 2


def test_a_forward_of_the_modules_own_is_left_alone() -> None:
    """Other libraries set such ones, too."""
    module = nn.Tanh()
    module.forward = own = torch.sigmoid  # type: ignore[method-assign]
    with with_substitutes(module):
        assert module.forward is own
    assert module.forward is own


class Written(nn.Module):
    """GELU's approximation in many operations."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As Hugging Face has it."""
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
        return 0.5 * x * (1 + torch.tanh(inner))


def test_classes_of_packages_that_may_be_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(substitutes, "_SUBSTITUTES", substitutes.Registry("substitute"))
    register_substitute(f"{__name__}.Written", lambda module: partial(F.gelu, approximate="tanh"))
    module, x = Written(), torch.randn(4, 5, dtype=torch.float64).to(DEVICE)
    want = second_derivatives(module, x)
    with with_substitutes(module):
        assert "forward" in vars(module)
        got = second_derivatives(module, x)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
