"""Recorded passes of models that share, tie, overwrite or hide, against plain autograd in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from tests.cases import DEVICE, relative_error
from tests.fisher.recorded_cases import BATCH, brute_force, check, norm_gradient
from torchfil import fisher
from torchfil.fisher.gradients import ExampleGradients
from torchfil.fisher.mechanism import Mechanism
from torchfil.fisher.operator import ClippedJacobian
from torchfil.fisher.recording import RecordedJacobian, plan
from torchfil.private import Private

pytestmark = pytest.mark.torch_versions


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(torch.tanh(self.layer(x)))))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h.tanh_()
        return self.second(h).tanh_()


class RootParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1)
        return torch.tanh(self.layer(x)).mean(dim=1)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.never = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh()


class Folded(nn.Module):
    """Rows of all examples as one batch: those of an example together, or not."""

    def __init__(self, *, together: bool = True) -> None:
        super().__init__()
        self.together = together
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.together else x.transpose(0, 1)
        h = torch.tanh(self.layer(x.reshape(-1, 4))).reshape(x.shape)
        return h if self.together else h.transpose(0, 1)


class TimeFirst(nn.Module):
    """Positions first, as many as examples in a trial, with a table of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.head = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)
        self.table = nn.Parameter(torch.randn(3, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = x.transpose(0, 1) + self.table
        return self.head(self.norm(torch.tanh(self.layer(h))).mean(dim=0))


class Inherited(nn.Module):
    """Subclasses that keep the forward pass of their layer."""

    class Norm(nn.LayerNorm):
        def reset_parameters(self) -> None:
            super().reset_parameters()

    class Dense(nn.Linear):
        def extra_repr(self) -> str:
            return "mine"

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = self.Dense(4, 4), self.Norm(4), self.Dense(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(torch.tanh(self.first(x))))


class Attends(nn.Module):
    """Attention with both masks, on x and, across, on a part of it."""

    def __init__(
        self,
        *,
        batch_first: bool,
        across: bool = False,
        need_weights: bool = False,
        kdim: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.across, self.need_weights, self.kdim = across, need_weights, kdim
        self.attention = nn.MultiheadAttention(4, 2, batch_first=batch_first, kdim=kdim, **options)
        self.head = nn.Linear(4, 2)
        nn.init.normal_(self.attention.in_proj_bias)

    def forward(self, x: Tensor) -> Tensor:
        keys = x.sin() if self.across else x
        padding = (torch.arange(x.shape[1]) == 2).expand(len(x), -1).to(x.device)
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        inputs = (x, keys[..., : self.kdim], keys) if self.across else (x, x, x)
        if not self.attention.batch_first:
            turned = x.transpose(0, 1)
            inputs = (turned, turned, turned)
        masks: dict[str, Any] = {"key_padding_mask": padding, "attn_mask": causal}
        h = self.attention(*inputs, need_weights=self.need_weights, **masks)[0]
        h = h if self.attention.batch_first else h.transpose(0, 1)
        return self.head(torch.tanh(h)).mean(dim=1)


class BehindTheBack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.layer(x)), self.layer.weight)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "a layer used twice": (Twice, (4,)),
    "tied weights": (Tied, (4,)),
    "in-place operations": (InPlace, (4,)),
    "in-place ReLU": (lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 2)), (4,)),
    "a parameter of the model itself": (RootParameter, (2, 4)),
    "a layer that is never called": (Unused, (4,)),
    "rows of all examples as one batch": (Folded, (2, 4)),
    "positions first": (TimeFirst, (3, 4)),
    "a weight used behind its layer's back": (BehindTheBack, (4,)),
    "subclasses": (Inherited, (4,)),
    "weight normalisation": (lambda: nn.Sequential(weight_norm(nn.Linear(4, 3)), nn.Tanh(), nn.Linear(3, 2)), (4,)),
    "weight normalisation by hooks": (
        lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 3)), nn.Tanh(), nn.Linear(3, 2)),
        (4,),
    ),
    "spectral normalisation": (
        lambda: nn.Sequential(spectral_norm(nn.Conv1d(2, 3, 2)), nn.Tanh(), nn.Flatten(), nn.Linear(9, 2)).eval(),
        (2, 4),
    ),
    "pruned": (
        lambda: nn.Sequential(prune.l1_unstructured(nn.Linear(4, 3), "weight", 2), nn.Tanh(), nn.Linear(3, 2)),
        (4,),
    ),
    "attention": (partial(Attends, batch_first=True), (3, 4)),
    "attention, positions first": (partial(Attends, batch_first=False), (3, 4)),
    "attention across": (partial(Attends, batch_first=True, across=True), (3, 4)),
    "attention, keys of their own width": (partial(Attends, batch_first=True, across=True, kdim=3), (3, 4)),
    "attention, its weights asked for": (partial(Attends, batch_first=True, need_weights=True), (3, 4)),
    "attention with rows added": (partial(Attends, batch_first=True, add_bias_kv=True), (5, 4)),
    "frozen first layer": (
        lambda: nn.Sequential(nn.Linear(4, 6).requires_grad_(False), nn.Tanh(), nn.Linear(6, 2)),
        (4,),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_unusual_models(name: str) -> None:
    torch.manual_seed(2)
    make, shape = MODELS[name]
    check(make(), torch.randn(BATCH, *shape))


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return torch.tanh(h - h.mean(dim=0))


@pytest.mark.parametrize("model", [Mixing, partial(Folded, together=False)])
def test_what_one_pass_cannot_see_is_told(model: Callable[[], nn.Module]) -> None:
    torch.manual_seed(3)
    shape = (BATCH, 2, 4) if isinstance(model, partial) else (BATCH, 4)
    check(model(), torch.randn(shape), supported=False)


class LooksAtValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        assert bool((x.abs() < 1e6).all())
        return torch.tanh(self.layer(x))


def test_models_that_cannot_be_mapped_can_still_be_recorded() -> None:
    """A forward pass that looks at values has no vmap, but one recorded pass serves it."""
    torch.manual_seed(8)
    model, x, y = LooksAtValues().double(), torch.randn(3, 4).double(), torch.randn(3, 2).double()
    gradients = ExampleGradients.build(model, nn.MSELoss(), x, y, None)
    assert plan(gradients).fits
    square, slope = brute_force(model, nn.MSELoss(), x, y)
    got = norm_gradient(gradients)
    assert torch.allclose(got.square, square, rtol=1e-10)
    assert torch.allclose(got.gradient, slope, rtol=1e-8, atol=1e-12)
    assert fisher.fim_trace(model, nn.MSELoss(), x, y, max_grad_norm=1.0, noise_multiplier=1.0).value.shape == (3,)


def test_in_place_operations_on_what_does_not_depend_on_the_private_part() -> None:
    """With only the target private, the first layer's output is a constant; ReLU may still overwrite it."""
    torch.manual_seed(9)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 2)).to(DEVICE).double()
    x, y = torch.randn(3, 4).to(DEVICE).double(), torch.randn(3, 2).to(DEVICE).double()
    gradients = ExampleGradients.build(model, nn.MSELoss(), x, y, Private(inputs=(), target=True))
    assert plan(gradients).fits
    got = norm_gradient(gradients)
    g = gradients.gradients()
    assert torch.allclose(got.square, g.square().sum(dim=1), rtol=1e-10)
    assert torch.allclose(got.gradient, 2 * gradients.vjp(g), rtol=1e-8, atol=1e-12)


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Queries, keys and values are one tensor."""
        result: Tensor = self.head(self.attention(x, x, x, need_weights=False)[0].mean(dim=1))
        return result


class _Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pair, self.head = nn.Bilinear(3, 3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        """A layer of two inputs is given one."""
        h = torch.tanh(x)
        result: Tensor = self.head(torch.tanh(self.pair(h, h)))
        return result


@pytest.mark.parametrize(("model", "shape"), [(_Attention, (3, 4)), (_Twice, (3,))])
@pytest.mark.parametrize("at_once", [1, 8])
def test_a_tensor_that_one_layer_is_given_twice(model: type[nn.Module], shape: tuple[int, ...], at_once: int) -> None:
    torch.manual_seed(0)
    module = model().double().to(DEVICE)
    x = torch.randn(4, *shape, dtype=torch.float64, device=DEVICE)
    y = torch.tensor([0, 1, 0, 1], device=DEVICE)
    gradients = ExampleGradients.build(module, nn.CrossEntropyLoss(), x, y)
    mechanism = Mechanism.build(1.0, 1.0)
    probes = torch.randn(8, gradients.num_parameters, dtype=torch.float64, device=DEVICE)
    fast = RecordedJacobian(gradients, mechanism.clip, 1.0)
    slow = ClippedJacobian(gradients, mechanism.clip, 1.0)
    for got, want in zip(fast.perpendicular_rows(probes, at_once), slow.perpendicular_rows(probes), strict=True):
        assert relative_error(got, want) < 1e-10
