"""Norms from one recorded pass against plain autograd, example by example, in float64."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from cases import CASES, CLIPS, DEVICE, build, relative_error
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from torchfil import PLIS, fisher, zoo
from torchfil.fisher import PoissonAmplification
from torchfil.fisher.batch import PrivateBatch
from torchfil.fisher.draws import Draws, draw_bits, signs_of
from torchfil.fisher.gradients import ExampleGradients, differentiable_twice
from torchfil.fisher.mechanism import Mechanism
from torchfil.fisher.operator import ClippedJacobian
from torchfil.fisher.precision import product_precision, products_in
from torchfil.fisher.recording import (
    RecordedJacobian,
    UnsupportedCallError,
    forward_pass,
    norm_gradient,
    plan,
    record,
    trial,
)
from torchfil.fisher.rules import register_rule, rule_for
from torchfil.fisher.rules.generic import GenericRule
from torchfil.fisher.rules.linear import LinearRule
from torchfil.fisher.rules.products import convolution_precision
from torchfil.private import Private

BATCH = 3
pytestmark = pytest.mark.torch_versions


def brute_force(model: nn.Module, loss_fn: Any, x: Tensor, y: Any) -> tuple[Tensor, Tensor]:
    """‖g‖² and its gradient with respect to x, one example at a time."""
    squares, slopes = [], []
    weights = [p for p in model.parameters() if p.requires_grad]
    for i in range(len(x)):
        one = x[i : i + 1].detach().clone().requires_grad_()
        loss = loss_fn(model(one * 1), y[i : i + 1])  # times one: a leaf must not be changed in place
        gradients = torch.autograd.grad(loss, weights, create_graph=True, allow_unused=True)
        square = sum((g.square().sum() for g in gradients if g is not None), start=torch.zeros(()))
        (slope,) = torch.autograd.grad(square, one, allow_unused=True)
        squares.append(square.detach())
        slopes.append(torch.zeros_like(one[0]) if slope is None else slope[0])
    return torch.stack(squares), torch.stack(slopes)


def check(model: nn.Module, x: Tensor, *, supported: bool = True, loss_fn: Any = None) -> None:
    model = model.to(DEVICE).double()
    x = x.to(DEVICE).double()
    with torch.no_grad():
        y = torch.randn_like(model(x.clone()))
    loss_fn = loss_fn or nn.MSELoss()

    before = {k: v.clone() for k, v in model.state_dict().items()}
    gradients = ExampleGradients.build(model, loss_fn, x, y, None)
    found = plan(gradients)
    assert found.fits == supported, found.reason
    if not supported:
        return

    got = norm_gradient(gradients)
    with differentiable_twice():
        square, slope = brute_force(model, loss_fn, x, y)
    assert torch.allclose(got.square, square, rtol=1e-10)
    assert torch.allclose(got.gradient.reshape(slope.shape), slope, rtol=1e-8, atol=1e-10 * float(slope.abs().max()))

    mechanism = Mechanism.build(1.0, 0.7, "gelu", PoissonAmplification(0.1))
    recorded, mapped = (kind(gradients, mechanism.clip, 1.0) for kind in (RecordedJacobian, ClippedJacobian))
    probes = torch.randn(3, gradients.num_parameters, dtype=torch.float64, device=DEVICE)
    pairs = [(recorded.folded_row(mechanism, u), mapped.folded_row(mechanism, u)) for u in probes[:2]]
    for at_once in (1, 2):
        pairs += zip(recorded.perpendicular_rows(probes, at_once), mapped.perpendicular_rows(probes), strict=True)
    assert len(pairs) == 8
    for got_row, want in pairs:
        assert torch.allclose(got_row, want, rtol=1e-8, atol=1e-10 * float(want.abs().max()))

    mask = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64, device=DEVICE)
    summed = torch.cat([part.flatten() for part in recorded.clipped_sum(mask).values()])
    assert torch.allclose(summed, mask @ mapped.clipped_gradient, rtol=1e-9, atol=1e-12)
    assert torch.allclose(recorded.clipped_norm_gradient, mapped.clipped_norm_gradient, rtol=1e-8, atol=1e-12)

    assert found.bytes_per_example > 0
    assert not any(module._forward_hooks for module in model.modules())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(isinstance(p, nn.Parameter) and p.grad is None for p in model.parameters())


class Flat(nn.Module):
    """A layer under a nonlinearity, so that its input and output gradient both depend on x."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(torch.sin(x))).flatten(1)


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(5, 4), (5,)),
    "linear without bias": (lambda: nn.Linear(5, 4, bias=False), (5,)),
    "linear on few tokens": (lambda: nn.Linear(20, 15), (2, 20)),
    "linear on many tokens": (lambda: nn.Linear(3, 2), (9, 3)),
    "linear on a grid": (lambda: nn.Linear(3, 2), (2, 4, 3)),
    "conv1d": (lambda: nn.Conv1d(2, 3, 3, stride=2, padding=1), (2, 7)),
    "conv2d": (lambda: nn.Conv2d(2, 3, 3), (2, 5, 6)),
    "conv2d by Gram matrices": (lambda: nn.Conv2d(6, 8, 2), (6, 3, 2)),
    "conv2d stride, padding": (lambda: nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 2)), (2, 5, 6)),
    "conv2d many channels": (lambda: nn.Conv2d(8, 3, (3, 2), padding=(2, 1)), (8, 4, 5)),
    "conv2d kernel of whole strides": (lambda: nn.Conv2d(9, 2, (4, 2), stride=2, padding=(1, 0)), (9, 7, 6)),
    "conv2d dilation": (lambda: nn.Conv2d(2, 3, 2, dilation=(2, 3), padding=1), (2, 6, 6)),
    "conv2d groups": (lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1), (4, 4, 4)),
    "conv2d groups, stride": (lambda: nn.Conv2d(4, 6, (3, 2), groups=2, stride=(2, 3), padding=1), (4, 6, 5)),
    "conv2d depthwise": (lambda: nn.Conv2d(3, 6, 3, groups=3, bias=False), (3, 5, 5)),
    "conv2d same": (lambda: nn.Conv2d(2, 3, (3, 4), padding="same"), (2, 5, 5)),
    "conv2d circular": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (2, 5, 5)),
    "conv2d reflect": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (2, 5, 5)),
    "conv3d": (lambda: nn.Conv3d(2, 2, 2, stride=(1, 2, 1)), (2, 3, 4, 3)),
    "transposed conv": (lambda: nn.ConvTranspose2d(2, 3, 2), (2, 3, 3)),
    "layernorm": (lambda: nn.LayerNorm(5), (5,)),
    "layernorm on tokens": (lambda: nn.LayerNorm((4, 3)), (2, 4, 3)),
    "rmsnorm": (lambda: nn.RMSNorm(5), (3, 5)),
    "groupnorm": (lambda: nn.GroupNorm(2, 4), (4, 3, 3)),
    "instancenorm": (lambda: nn.InstanceNorm2d(3, affine=True), (3, 4, 4)),
    "own parameters beside a child": (lambda: Scaled(), (4,)),
    "own parameters in a product": (lambda: Mixed(), (3,)),
    "prelu": (lambda: nn.PReLU(4), (4,)),
}


class Scaled(nn.Module):
    """A plain parameter beside a child with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0, 0.5]))
        self.inner = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * torch.tanh(self.inner(x))


@pytest.mark.parametrize("name", LAYERS)
def test_each_layer_alone(name: str) -> None:
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    layer = make()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    check(Flat(layer), torch.randn(BATCH, *shape))


class Mixed(nn.Module):
    """A plain parameter that meets the examples in a sum of products."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,ij->bj", x, self.mix)


def test_layers_without_a_rule_are_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.PReLU(4), Scaled(), Mixed()).to(DEVICE)
    gradients = ExampleGradients.build(
        model, nn.MSELoss(), torch.randn(3, 4, device=DEVICE), torch.zeros(3, 3).to(DEVICE)
    )
    assert plan(gradients).generic == ("1 (PReLU)", "3 (Mixed)")


@pytest.mark.skipif(DEVICE != "cpu", reason="on GPUs probes are worked at together in compiled passes only")
@pytest.mark.parametrize("name", [*LAYERS, *CASES])
def test_probes_are_worked_at_together(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """No layer forces them apart."""
    if name in CASES:
        case = build(name, BATCH)
        gradients = ExampleGradients.build(*case.arguments, case.private)
    else:
        make, shape = LAYERS[name]
        model, x = Flat(make()).double(), torch.randn(BATCH, *shape, dtype=torch.float64)
        gradients = ExampleGradients.build(model, nn.MSELoss(), x, torch.zeros_like(model(x)).detach())
    jacobian = RecordedJacobian(gradients, Mechanism.build(1.0, 0.7, "gelu").clip, 1.0)
    probes = torch.randn(4, gradients.num_parameters, dtype=torch.float64)
    with caplog.at_level("INFO"), warnings.catch_warnings():
        warnings.simplefilter("error")
        together = torch.stack(list(jacobian.perpendicular_rows(probes, 4)))
    assert [record.message for record in caplog.records] == []
    one_by_one = torch.stack(list(jacobian.perpendicular_rows(probes)))
    assert torch.allclose(together, one_by_one, rtol=1e-9, atol=1e-11 * float(one_by_one.abs().max()))


def test_probes_that_cannot_be_worked_at_together(caplog: pytest.LogCaptureFixture) -> None:
    """A model that cannot be mapped meets one probe after the other, which is said once."""
    case = build("mlp", BATCH)
    gradients = ExampleGradients.build(*case.arguments, case.private)

    class Stubborn(RecordedJacobian):
        def perpendicular_rmatvec(self, u: Tensor) -> Tensor:
            if torch._C._functorch.is_batchedtensor(u):
                raise RuntimeError("not so")
            return super().perpendicular_rmatvec(u)

    clip = Mechanism.build(1.0, 0.7, "gelu").clip
    probes = torch.randn(3, gradients.num_parameters, dtype=torch.float64, device=DEVICE)
    with caplog.at_level("INFO"):
        for _ in range(2):
            found = list(Stubborn(gradients, clip, 1.0).perpendicular_rows(probes, 2))
    assert [record.message for record in caplog.records] == ["probes are worked at one by one: not so"]
    for row, want in zip(found, RecordedJacobian(gradients, clip, 1.0).perpendicular_rows(probes), strict=True):
        assert torch.equal(row, want)


@pytest.mark.skipif(DEVICE != "cpu", reason="on GPUs probes are worked at together in compiled passes only")
@pytest.mark.parametrize(
    ("name", "passes", "at_once"),
    [("transformer", 100, 5), ("transformer", 2, 2), ("transformer", 0.5, 1), ("mnist_cnn", 100, 1)],
)
def test_memory_and_layers_decide_how_many_probes_are_worked_at_together(
    name: str, passes: float, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trace is the same."""
    case, found = build(name, 4), []
    gradients = ExampleGradients.build(*case.arguments, case.private)
    true, known = RecordedJacobian.perpendicular_rows, plan(gradients)

    def rows(self: RecordedJacobian, probes: Any, at_once: int = 1) -> Any:
        found.append(at_once)
        return true(self, probes, at_once)

    monkeypatch.setattr(RecordedJacobian, "perpendicular_rows", rows)
    memory = int(passes * 4 * known.bytes_per_example)
    batch, draw = PrivateBatch(gradients, Mechanism.build(1.0, 1.0)), lambda: torch.Generator().manual_seed(3)
    estimate = batch.estimate("trace", "weight-probes", 5, draw(), memory)
    assert set(found) == {at_once}
    monkeypatch.undo()
    jacobian, signs = RecordedJacobian(gradients, batch.mechanism.clip, 1.0), []
    for seed in Draws.seeds_from(5, draw()):
        signs.append(signs_of(draw_bits(seed, torch.empty(gradients.num_parameters, dtype=torch.int8)), torch.float64))
    squares = torch.stack([jacobian.perpendicular_rmatvec(u).square().sum(dim=1) for u in signs])
    want = squares.mean(dim=0) + jacobian.clipped_norm_gradient.square().sum(dim=1)
    assert relative_error(estimate.value, want) < 1e-10


@pytest.mark.parametrize("name", LAYERS)
def test_each_layer_with_a_frozen_parameter(name: str) -> None:
    torch.manual_seed(1)
    make, shape = LAYERS[name]
    layer = make()
    parameters = list(layer.parameters())
    if len(parameters) < 2:
        pytest.skip("it has one parameter only")
    parameters[0].requires_grad_(False)
    check(Flat(layer), torch.randn(BATCH, *shape))


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


@pytest.mark.parametrize("layer", [nn.LayerNorm(4), nn.RMSNorm(4), nn.Linear(4, 4), nn.GroupNorm(2, 4)])
def test_a_loss_that_is_linear_in_the_outputs(layer: nn.Module) -> None:
    """δ is a constant then."""
    torch.manual_seed(3)
    x = torch.randn(BATCH, 4, 3) if isinstance(layer, nn.GroupNorm) else torch.randn(BATCH, 4)
    check(layer, x, loss_fn=lambda outputs, y: (outputs * y).sum())


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


@pytest.mark.parametrize("name", CASES)
def test_cases_against_vmap(name: str) -> None:
    """Private columns, targets, embeddings and several inputs: ∇‖g‖² = 2Jᵀg."""
    case = build(name, 5)
    gradients = ExampleGradients.build(*case.arguments, case.private)
    assert plan(gradients).fits
    got = norm_gradient(gradients)
    g = gradients.gradients()
    assert torch.allclose(got.square, g.square().sum(dim=1), rtol=1e-10)
    want = 2 * gradients.vjp(g)
    assert torch.allclose(got.gradient, want, rtol=1e-8, atol=1e-10 * float(want.abs().max()))


def test_repeated_tokens_and_padding() -> None:
    torch.manual_seed(4)
    model = zoo_like_embedding().to(DEVICE).double()
    tokens = torch.tensor([[1, 2, 1, 0], [3, 3, 3, 3], [0, 0, 5, 0]], device=DEVICE)
    y = torch.randn(3, 2, dtype=torch.float64, device=DEVICE)
    gradients = ExampleGradients.build(model, nn.MSELoss(), tokens, y, Private(submodule="0"))
    assert plan(gradients).fits
    got = norm_gradient(gradients)
    g = gradients.gradients()
    assert torch.allclose(got.square, g.square().sum(dim=1), rtol=1e-10)
    assert torch.allclose(got.gradient, 2 * gradients.vjp(g), rtol=1e-8, atol=1e-12)


def zoo_like_embedding() -> nn.Module:
    return nn.Sequential(nn.Embedding(6, 4, padding_idx=0), nn.Tanh(), nn.Flatten(), nn.Linear(16, 2))


@pytest.mark.parametrize(
    "loss_fn",
    [
        nn.CrossEntropyLoss(
            weight=torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64), label_smoothing=0.1, reduction="sum"
        ),
        nn.CrossEntropyLoss(reduction="sum"),
    ],
    ids=["weighted", "sum"],
)
def test_losses(loss_fn: nn.Module) -> None:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(DEVICE).double()
    x = torch.randn(4, 4, dtype=torch.float64, device=DEVICE)
    y = torch.tensor([0, 1, 2, 1], device=DEVICE)
    loss_fn = loss_fn.to(DEVICE)
    got = norm_gradient(ExampleGradients.build(model, loss_fn, x, y, None))
    square, slope = brute_force(model, loss_fn, x, y)
    assert torch.allclose(got.square, square, rtol=1e-10)
    assert torch.allclose(got.gradient, slope, rtol=1e-8, atol=1e-12)


def test_gradients_at_the_outputs_are_those_of_each_examples_loss() -> None:
    """Two outputs, one of which the loss does not see."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.layer(x), self.layer(x).sum(dim=1)

    torch.manual_seed(8)
    model = Two().double().to(DEVICE)
    x, y = torch.randn(5, 3, dtype=torch.float64, device=DEVICE), torch.arange(5, device=DEVICE) % 4
    gradients = ExampleGradients.build(model, lambda out, y: F.cross_entropy(out[0], y), x, y, None)
    logits, unseen = RecordedJacobian(gradients, Mechanism.build(1.0, 1.0).clip, 1.0).output_gradients
    softmax = model(x)[0].detach().softmax(dim=1)
    torch.testing.assert_close(logits, softmax - F.one_hot(y, 4))
    assert unseen.shape == (5,)
    assert (unseen == 0).all()


def test_precision_of_products_is_set_and_given_back() -> None:
    before, legacy = product_precision(), torch.backends.cuda.matmul.allow_tf32
    with pytest.raises(KeyError), products_in("tf32"):
        assert product_precision() == "tf32"
        raise KeyError
    assert product_precision() == before
    assert torch.backends.cuda.matmul.allow_tf32 == legacy
    assert convolution_precision(torch.zeros(1)) == before


def test_a_zero_gradient_has_a_zero_slope() -> None:
    model = nn.Linear(2, 1, bias=False).to(DEVICE).double()
    x = torch.tensor([[1.0, 1.0]], dtype=torch.float64, device=DEVICE)
    got = norm_gradient(ExampleGradients.build(model, nn.MSELoss(), x, model(x).detach(), None))
    assert (got.square == 0).all()
    assert (got.gradient == 0).all()


def test_single_precision() -> None:
    torch.manual_seed(6)
    model, x, y = zoo.mnist_cnn(), torch.rand(4, 1, 28, 28), torch.randint(10, (4,))
    single = norm_gradient(ExampleGradients.build(model, nn.CrossEntropyLoss(), x, y, None))
    double = norm_gradient(ExampleGradients.build(model.double(), nn.CrossEntropyLoss(), x.double(), y, None))
    assert torch.allclose(single.square.double(), double.square, rtol=1e-4)
    assert torch.allclose(single.gradient.double(), double.gradient, atol=1e-4 * float(double.gradient.abs().max()))


def test_the_memory_plan_does_not_depend_on_the_batch() -> None:
    """A chunk's examples are views of the whole batch; only what belongs to them counts."""
    model = zoo.mnist_cnn()
    sizes = []
    for batch in (2, 64):
        x, y = torch.rand(batch, 1, 28, 28), torch.randint(10, (batch,))
        sizes.append(plan(ExampleGradients.build(model, nn.CrossEntropyLoss(), x, y, None)).bytes_per_example)
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("amplification", [None, PoissonAmplification(0.05)])
@pytest.mark.parametrize("clip", CLIPS)
def test_one_folded_probe_has_the_whole_matrix_as_its_mean(clip: str, amplification: Any) -> None:
    """Over all 2^p sign vectors, the mean of r rᵀ is the amplified Fisher information, clipping included."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1, bias=False)).to(DEVICE).double()
    x, y = torch.randn(4, 2).to(DEVICE).double(), torch.randn(4, 1).to(DEVICE).double()
    mechanism = Mechanism.build(1.5, 0.8, clip, amplification)
    gradients = ExampleGradients.build(model, nn.MSELoss(), x, y, None)
    jacobian = RecordedJacobian(gradients, mechanism.clip, mechanism.max_grad_norm)
    p = gradients.num_parameters
    mean = torch.zeros(4, 2, 2, dtype=torch.float64, device=DEVICE)
    for bits in range(2**p):
        u = torch.tensor([1.0 if bits >> k & 1 else -1.0 for k in range(p)], dtype=torch.float64, device=DEVICE)
        r = jacobian.folded_row(mechanism, u)
        mean += r[:, :, None] * r[:, None, :] / 2**p
    want = fisher.exact_fim(
        model,
        nn.MSELoss(),
        x,
        y,
        max_grad_norm=1.5,
        noise_multiplier=0.8,
        clip=clip,
        amplification=amplification,
    )
    assert torch.allclose(mean, want, rtol=1e-8, atol=1e-12)


def test_one_folded_probe_reports_a_conservative_error() -> None:
    case = build("mlp", 5)
    options: dict[str, Any] = {"max_grad_norm": case.C, "noise_multiplier": 1.0}
    amplified = {**options, "amplification": PoissonAmplification(0.1)}
    truth = fisher.fim_trace(*case.arguments, **amplified, estimator="exact").value
    draws = [
        fisher.fim_trace(*case.arguments, **amplified, num_probes=1, generator=torch.Generator().manual_seed(s))
        for s in range(200)
    ]
    values = torch.stack([draw.value for draw in draws])
    errors = torch.stack([draw.standard_error for draw in draws])
    assert ((values.mean(dim=0) - truth).abs() < 4.5 * values.std(dim=0) / 200**0.5).all()
    assert (errors.square().mean(dim=0) >= values.var(dim=0)).all()


def test_the_part_along_the_gradient_is_not_left_to_chance() -> None:
    """Var ‖r‖² = 2‖AAᵀ‖² + 4aᵀAAᵀa at most: what lies along the gradient alone does not vary."""
    case = build("mlp", 5)
    mechanism = Mechanism.build(case.C, 1.0)
    gradients = ExampleGradients.build(*case.arguments)
    jacobian = RecordedJacobian(gradients, mechanism.clip, mechanism.max_grad_norm)
    a, rest = jacobian.clipped_norm_gradient / case.C, jacobian.perpendicular_gram() / case.C**2
    source = torch.Generator(device=DEVICE).manual_seed(0)
    signs = torch.randint(0, 2, (4000, gradients.num_parameters), generator=source, device=DEVICE) * 2.0 - 1
    values = torch.stack([jacobian.folded_row(mechanism, u.to(a)).square().sum(dim=1) for u in signs])
    largest = 2 * rest.square().sum(dim=(1, 2)) + 4 * torch.einsum("bd,bde,be->b", a, rest, a)
    assert (values.var(dim=0) <= 1.15 * largest).all()
    whole = rest + a[:, :, None] * a[:, None, :]
    assert (largest < 2 * whole.square().sum(dim=(1, 2))).all()


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


class Unmappable(nn.Module):
    """A parameter of its own in a forward pass that looks at values: neither rule nor vmap serves it."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.einsum("bi,ij->bj", x, self.mix)) if bool(x.sum() < 1e9) else x


def test_a_trial_leaves_nothing_behind() -> None:
    """Tanh and softmax keep their own results for their way back, which torch's hooks can turn into a cycle."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Softmax(-1), nn.LayerNorm(5), nn.Linear(5, 2))
    gradients = ExampleGradients.build(model, nn.CrossEntropyLoss(), torch.randn(3, 4), torch.tensor([0, 1, 0]), None)

    def doubles() -> int:
        gc.collect()
        return sum(isinstance(value, Tensor) and value.dtype == torch.float64 for value in gc.get_objects())

    assert plan(gradients).fits
    before = doubles()
    for _ in range(3):
        assert plan(gradients).fits
    assert doubles() == before


def test_a_failing_trial_is_a_reason_and_no_crash() -> None:
    x, y = torch.randn(3, 4).to(DEVICE), torch.randn(3, 4).to(DEVICE)
    found = plan(ExampleGradients.build(Unmappable().to(DEVICE), nn.MSELoss(), x, y, None))
    assert found.reason is not None
    assert "Unmappable" in found.reason


def test_rules_that_are_none_are_refused() -> None:
    with pytest.raises(TypeError, match="'Linear' is not a class of modules"):
        register_rule("Linear", GenericRule())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"is not a layer rule; pass an instance of .*, for example BilinearRule\(\)"):
        register_rule(nn.Bilinear, GenericRule)  # type: ignore[arg-type]


def test_rules_are_not_replaced_silently() -> None:
    with pytest.raises(ValueError, match="Linear has a rule already, LinearRule; pass overwrite=True to replace it"):
        register_rule(nn.Linear, GenericRule())
    assert isinstance(rule_for(nn.Linear(1, 1)), LinearRule)

    class Fresh(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    assert isinstance(rule_for(Fresh(1, 1)), GenericRule)
    register_rule(Fresh, LinearRule())
    register_rule(Fresh, rule := LinearRule(), overwrite=True)
    assert rule_for(Fresh(1, 1)) is rule


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


class _Doubled(nn.Linear):
    """A linear layer for rules that are wrong."""


class _WrongNormSlope(LinearRule):
    def squared_norm(self, call: Any) -> Tensor:
        """Right, with a wrong derivative."""
        right = super().squared_norm(call)
        return right + (right - right.detach())


class _WrongInner(LinearRule):
    def inner(self, call: Any, direction: Any) -> Any:
        """Right, with wrong derivatives."""
        value, derivatives = super().inner(call, direction)
        return value, [(leaf, 2 * part) for leaf, part in derivatives]


class _WrongSum(LinearRule):
    def weighted_sum(self, call: Any, weight: Tensor) -> dict[str, Tensor]:
        """Half of it."""
        return {name: value / 2 for name, value in super().weighted_sum(call, weight).items()}


@pytest.mark.parametrize(
    ("rule", "what"),
    [
        (LinearRule(), None),
        (_WrongNormSlope(), "other derivatives of gradients' norms"),
        (_WrongInner(), "other derivatives of gradients' products with a probe"),
        (_WrongSum(), "other sums of gradients"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_trial_finds_rules_that_are_wrong(rule: LinearRule, what: str | None, dtype: torch.dtype) -> None:
    register_rule(_Doubled, rule, overwrite=True)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), _Doubled(4, 4), nn.Tanh(), nn.Linear(4, 2)).to(DEVICE, dtype)
    x, y = torch.randn(BATCH, 3, device=DEVICE, dtype=dtype), torch.randn(BATCH, 2, device=DEVICE, dtype=dtype)
    reason = plan(ExampleGradients.build(model, nn.MSELoss(), x, y, None)).reason
    if what is None:
        assert reason is None
    else:
        assert reason is not None
        assert what in reason


def test_the_trial_takes_rounding_for_what_it_is() -> None:
    """Gradients of 1e-6 times what cancels in them: in float32 the pass differs from plain passes by rounding alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 200), nn.GELU(), nn.Linear(200, 10)).to(DEVICE)
    x = torch.randn(BATCH, 300, device=DEVICE)
    with torch.no_grad():
        y = model(x) * (1 + 1e-7)
    gradients = ExampleGradients.build(model, nn.MSELoss(), x, y, None)
    probe = trial._probe(gradients)
    plain = trial._Plain.of(gradients, probe, range(BATCH))
    if trial._difference(gradients, trial._recorded(gradients, probe), plain) is None:
        pytest.skip("the pass and plain passes round alike here")
    assert plan(gradients).fits


class _Sorted(nn.Module):
    """Sorts the batch, works on it and puts it back, as packed sequences are; examples do not mix."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        """As said."""
        order = x[:, 0].detach().argsort()
        result: Tensor = self.layers(x[order])[order.argsort()]
        return result


class _Unseen(torch.autograd.Function):
    """A product that nothing sees from outside."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return gradients[0] @ b.mT, a.mT @ gradients[0]


class _Behind(nn.Module):
    """Uses a weight behind its module's back; the head may start from 0."""

    def __init__(self, *, zero: bool = False) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 3), nn.Linear(3, 2)
        if zero:
            nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        """As said."""
        result: Tensor = self.head(torch.tanh(_Unseen.apply(torch.tanh(self.body(x)), self.body.weight)))
        return result


class _Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Subtracts the batch's mean."""
        hidden = torch.tanh(self.body(x))
        result: Tensor = self.head(hidden - hidden.mean(dim=0))
        return result


@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [3, 2, 1, 0]])
def test_the_trial_finds_a_model_that_sorts(rows: list[int]) -> None:
    torch.manual_seed(0)
    x = torch.tensor([[1.0, 0, 0], [2, 0, 0], [3, 0, 0], [4, 0, 0]], device=DEVICE)[rows]
    y = torch.randint(2, (4,), device=DEVICE)
    assert plan(ExampleGradients.build(_Sorted().to(DEVICE), nn.CrossEntropyLoss(), x, y, None)).reason is not None


@pytest.mark.parametrize("case", ["without gradient", "equal", "zero head"])
def test_nothing_hides_from_the_trial(case: str) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(6, 3, device=DEVICE), torch.tensor([0, 1, 0, 1, 1, 0], device=DEVICE)
    model: nn.Module = _Behind(zero=case == "zero head") if case != "equal" else _Mixing()
    if case == "equal":
        x[1] = x[0]
        y[1] = y[0]
    elif case == "without gradient":
        y[:2] = -100
    gradients = ExampleGradients.build(model.to(DEVICE), nn.CrossEntropyLoss(), x, y, None)
    assert plan(gradients).reason is not None


def test_a_head_of_zeros_alone_is_no_reason() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(DEVICE)
    nn.init.zeros_(model[2].weight)  # type: ignore[arg-type]
    x, y = torch.randn(6, 3, device=DEVICE), torch.randint(2, (6,), device=DEVICE)
    assert plan(ExampleGradients.build(model, nn.CrossEntropyLoss(), x, y, None)).reason is None


class _InHalves(nn.Module):
    """Works on large batches in two halves, so that no call has a row for every example."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        """As said."""
        parts = x.tensor_split(2) if len(x) > 3 else (x,)
        return torch.cat([self.inner(part) for part in parts])


def test_a_batch_that_is_not_as_the_trials_is_mapped() -> None:
    torch.manual_seed(0)
    model = _InHalves().double().to(DEVICE)
    x, y = torch.randn(8, 3, device=DEVICE, dtype=torch.float64), torch.randint(2, (8,), device=DEVICE)
    assert plan(ExampleGradients.build(model, nn.CrossEntropyLoss(), x, y, None)).reason is None
    options: dict[str, Any] = {"max_grad_norm": 1.0, "noise_multiplier": 1.0}
    exact = fisher.fim_trace(model, nn.CrossEntropyLoss(), x, y, estimator="exact", **options).value
    source = torch.Generator().manual_seed(0)
    found = fisher.fim_trace(model, nn.CrossEntropyLoss(), x, y, num_probes=100, generator=source, **options)
    assert bool(((found.value - exact).abs() < 5 * found.standard_error).all())
    whole, parts = PLIS(model, nn.CrossEntropyLoss()), PLIS(model.inner, nn.CrossEntropyLoss())
    assert relative_error(whole.attribute(x, y), parts.attribute(x, y)) < 1e-12


class _Answer:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class _Answers(nn.Module):
    """Outputs that are no tree of tensors, or hold a number for the whole batch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.inner = kind, nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Any:
        """As said."""
        logits = self.inner(x)
        return _Answer(logits) if self.kind == "object" else {"logits": logits, "mean": logits.mean()}


@pytest.mark.parametrize("kind", ["object", "number beside"])
def test_outputs_of_other_kinds_are_mapped(kind: str) -> None:
    def loss(outputs: Any, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.logits if kind == "object" else outputs["logits"], targets)

    torch.manual_seed(0)
    model = _Answers(kind).double().to(DEVICE)
    x, y = torch.randn(4, 3, device=DEVICE, dtype=torch.float64), torch.randint(2, (4,), device=DEVICE)
    options: dict[str, Any] = {"max_grad_norm": 1.0, "noise_multiplier": 1.0}
    exact = fisher.fim_trace(model, loss, x, y, estimator="exact", **options).value
    found = fisher.fim_trace(model, loss, x, y, num_probes=100, generator=torch.Generator().manual_seed(0), **options)
    assert bool(((found.value - exact).abs() < 5 * found.standard_error).all())


HALVES = ["linear on few tokens", "conv2d", "layernorm", "groupnorm", "own parameters beside a child", "prelu"]


@pytest.mark.parametrize("name", HALVES)
def test_a_jacobian_from_halves(name: str) -> None:
    """The forward half knows neither loss nor targets."""
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    model, x = Flat(make()).double().to(DEVICE), torch.randn(BATCH, *shape, dtype=torch.float64, device=DEVICE)
    y = torch.randn_like(model(x)).detach()
    gradients = ExampleGradients.build(model, nn.MSELoss(), x, y)
    early = ExampleGradients.build(model, lambda outputs, targets: outputs.sum(), x, None)
    forward = forward_pass(early, early.examples.z.detach().requires_grad_())
    torch.testing.assert_close(forward.outputs, model(x))

    mechanism = Mechanism.build(1.0, 0.7, "gelu", PoissonAmplification(0.1))
    halves = RecordedJacobian(gradients, mechanism.clip, 1.0, forward)
    whole = RecordedJacobian(gradients, mechanism.clip, 1.0)
    u = torch.randn(gradients.num_parameters, dtype=torch.float64, device=DEVICE)
    assert torch.equal(halves.losses, whole.losses)
    assert relative_error(halves.folded_row(mechanism, u), whole.folded_row(mechanism, u)) < 1e-13
    for name_of_sum, value in halves.clipped_sum().items():
        torch.testing.assert_close(value, whole.clipped_sum()[name_of_sum])
    recording = record(gradients, gradients.examples.z.detach().requires_grad_())
    assert torch.equal(recording.losses, whole.losses)


def test_halves_with_a_private_target() -> None:
    case = build("private_target", 4)
    gradients = ExampleGradients.build(*case.arguments, case.private)
    mechanism = Mechanism.build(1.0, 1.0)
    forward = forward_pass(gradients, gradients.examples.z.detach().requires_grad_())
    u = torch.randn(gradients.num_parameters, dtype=torch.float64, device=DEVICE)
    rows = [RecordedJacobian(gradients, mechanism.clip, 1.0, half).folded_row(mechanism, u) for half in (forward, None)]
    assert relative_error(rows[0], rows[1]) < 1e-13


def test_halves_of_other_examples_are_refused() -> None:
    case = build("mlp", 4)
    gradients = ExampleGradients.build(*case.arguments)
    forward = forward_pass(gradients, gradients.examples.z[:3].detach().requires_grad_())
    with pytest.raises(ValueError, match=r"over \(3, 5\) examples and coordinates, not over \(4, 5\); run"):
        RecordedJacobian(gradients, Mechanism.build(1.0, 1.0).clip, 1.0, forward)


class _Live(nn.Module):
    """A model with all that a pass may leave something on."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.scale = nn.Linear(3, 4), nn.Parameter(torch.ones(4))
        self.norm, self.act, self.head = nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        """As said."""
        h = self.act(self.norm(self.scale * self.embedding(x)))
        if self.fails:
            raise KeyError("on purpose")
        result: Tensor = self.head(h)
        return result


def test_the_forward_half_of_a_model_in_use() -> None:
    """A user's hooks are called, changes by them count, and nothing is left behind, also after an error."""
    torch.manual_seed(0)
    model = _Live().double().to(DEVICE)
    seen: list[str] = []
    model.head.register_forward_pre_hook(lambda module, args: seen.append("before"))
    model.embedding.register_forward_hook(lambda module, args, output: (seen.append("after"), 2 * output)[1])
    x = torch.randn(4, 3, dtype=torch.float64, device=DEVICE)
    gradients = ExampleGradients.build(model, nn.CrossEntropyLoss(), x, torch.tensor([0, 1, 1, 0], device=DEVICE))

    def state() -> Any:
        hooks = [dict(module._forward_hooks) for module in model.modules()]
        attributes = [sorted(vars(module)) for module in model.modules()]
        return hooks, attributes, {name: id(value) for name, value in model.named_parameters()}

    before = state()
    z = gradients.examples.z.detach().requires_grad_()
    forward = forward_pass(gradients, z)
    assert seen == ["after", "before"]
    assert state() == before
    mechanism = Mechanism.build(1.0, 1.0)
    u = torch.randn(gradients.num_parameters, dtype=torch.float64, device=DEVICE)
    got = RecordedJacobian(gradients, mechanism.clip, 1.0, forward).folded_row(mechanism, u)
    assert seen == ["after", "before"]  # what follows calls no module
    assert relative_error(got, ClippedJacobian(gradients, mechanism.clip, 1.0).folded_row(mechanism, u)) < 1e-10

    model.fails = True
    with pytest.raises(KeyError, match="on purpose"):
        forward_pass(gradients, z)
    assert state() == before
    assert all(value.grad is None and value.requires_grad for value in model.parameters())


def test_the_weights_of_a_forward_half_are_the_given_ones() -> None:
    model = nn.Linear(3, 2).double().to(DEVICE)
    x = torch.randn(4, 3, dtype=torch.float64, device=DEVICE)
    gradients = ExampleGradients.build(model, nn.MSELoss(), x, torch.zeros(4, 2).to(x))
    moved = {name: value + 1 for name, value in gradients.parameters.items()}
    forward = forward_pass(replace(gradients, parameters=moved), gradients.examples.z)
    torch.testing.assert_close(forward.outputs, F.linear(x, moved["weight"], moved["bias"]))


def test_a_loss_that_overwrites_the_outputs() -> None:
    """The forward half is run again with copies, the first time."""
    calls = 0

    class Counting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return super().forward(x)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(outputs.mul_(3), targets)

    register_rule(Counting, LinearRule())
    torch.manual_seed(0)
    model = Counting(3, 2).double().to(DEVICE)
    x = torch.randn(4, 3, dtype=torch.float64, device=DEVICE)
    gradients = ExampleGradients.build(model, loss, x, torch.zeros(4, 2).to(x))
    for _ in range(2):
        calls = 0
        found = norm_gradient(gradients)
    assert calls == 1
    plain = replace(gradients, loss_fn=lambda outputs, targets: F.mse_loss(outputs * 3, targets))
    torch.testing.assert_close(found.square, norm_gradient(plain).square)
    torch.testing.assert_close(found.gradient, norm_gradient(plain).gradient)


def test_active_dropout_without_masks_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)).to(DEVICE)
    gradients = ExampleGradients.build(model.eval(), nn.MSELoss(), torch.randn(4, 3).to(DEVICE), torch.zeros(4, 2))
    model.train()
    with pytest.raises(UnsupportedCallError, match="1: active dropout draws one mask for a batch"):
        record(gradients, gradients.examples.z)


def test_layers_that_torch_differentiates_only_once() -> None:
    """A hard sigmoid is a clipped line, whose derivatives torch knows."""

    class Line(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.clamp(x / 6 + 0.5, 0, 1)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Hardsigmoid(), nn.Linear(3, 2), nn.Tanh()).double().to(DEVICE)
    known = nn.Sequential(model[0], Line(), model[2], nn.Tanh())
    x, y = torch.randn(BATCH, 4).to(DEVICE).double(), torch.randn(BATCH, 2).to(DEVICE).double()
    gradients = ExampleGradients.build(model, nn.MSELoss(), x, y, None)
    assert plan(gradients).fits
    square, slope = brute_force(known, nn.MSELoss(), x, y)
    got = norm_gradient(gradients)
    assert torch.allclose(got.square, square, rtol=1e-10)
    assert torch.allclose(got.gradient, slope, rtol=1e-8, atol=1e-12)
