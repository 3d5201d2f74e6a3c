"""Parameters outside of layers: every way of using them against plain autograd, example by example, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.cases import DEVICE, relative_error
from tests.fisher.recorded_cases import BATCH, check
from torchfil.fisher import reference
from torchfil.fisher.gradients import ExampleGradients
from torchfil.fisher.mechanism import Mechanism
from torchfil.fisher.operator import ClippedJacobian
from torchfil.fisher.recording import RecordedJacobian, plan
from torchfil.private import Private

pytestmark = pytest.mark.torch_versions


class Uses(nn.Module):
    """A layer, a use of two parameters of the model's own, and another layer; on tokens, [batch, 2, 4]."""

    def __init__(self, use: Callable[[nn.Module, Tensor], Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.use = use
        self.theta = nn.Parameter(torch.randn(shapes[0]))
        self.other = nn.Parameter(torch.randn(shapes[1] if len(shapes) > 1 else (4,)))
        self.register_buffer("table", torch.randn(2, 4))
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(torch.tanh(self.use(self, torch.tanh(self.body(x)) + self.other)).mean(dim=1))
        return result


class _Hidden(torch.autograd.Function):
    """A product that torch-function modes do not see."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return a * b

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return (gradients[0] * b).sum_to_size(a.shape), (gradients[0] * a).sum_to_size(b.shape)


def _in_place(m: Any, h: Tensor) -> Tensor:
    h *= m.theta
    h += m.other
    return h


SERVED: dict[str, tuple[Callable[[Any, Tensor], Tensor], tuple[tuple[int, ...], ...]]] = {
    "scale": (lambda m, h: m.theta * h, ((4,),)),
    "one number": (lambda m, h: h * m.theta.exp() + m.theta, ((),)),
    "divided by": (lambda m, h: h / (2 + m.theta.square()), ((4,),)),
    "from one": (lambda m, h: (1 - m.theta.sigmoid()) * h + m.theta.sigmoid() * h.sin(), ((4,),)),
    "position": (lambda m, h: h + m.theta[: h.shape[1]], ((5, 4),)),
    "position with a batch dimension": (lambda m, h: h - m.theta[:, 1:3], ((1, 5, 4),)),
    "as many positions as examples": (lambda m, h: torch.cat([h, h[:, :1]], 1) * m.theta, ((BATCH, 4),)),
    "view": (lambda m, h: (h.mT * m.theta.view(1, -1, 1)).mT, ((4,),)),
    "broadcast inside": (lambda m, h: h * m.theta, ((2, 1),)),
    "class token": (lambda m, h: torch.cat([m.theta.expand(len(h), -1, -1), h], dim=1), ((1, 1, 4),)),
    "class token from a vector": (lambda m, h: torch.cat([m.theta.expand(len(h), 1, 4), h], dim=1), ((4,),)),
    "class token repeated": (lambda m, h: torch.cat([m.theta.repeat(len(h), 1, 1), h], dim=1), ((1, 1, 4),)),
    "expanded and added": (lambda m, h: h + m.theta[None].expand(len(h), -1, -1), ((2, 4),)),
    "expanded as": (lambda m, h: h + m.theta.expand_as(h), ((2, 4),)),
    "mask token": (lambda m, h: torch.where(h > 0, m.theta, h), ((4,),)),
    "two together": (lambda m, h: torch.addcmul(h, m.theta, m.other), ((4,), (4,))),
    "a function of two": (lambda m, h: h * (m.theta[:, None] * m.other), ((2,), (4,))),
    "with a table": (lambda m, h: h + m.theta * m.table, ((2, 4),)),
    "in place": (_in_place, ((4,),)),
    "twice": (lambda m, h: m.theta * torch.tanh(m.theta * h), ((4,),)),
    "not at all": (lambda m, h: h, ((4,),)),
}
FUNCTIONS: dict[str, tuple[Callable[[Any, Tensor], Tensor], tuple[tuple[int, ...], ...]]] = {
    "product": (lambda m, h: h @ m.theta, ((4, 4),)),
    "product of a transposed": (lambda m, h: torch.matmul(h, m.theta.T), ((4, 4),)),
    "sum of both kinds": (lambda m, h: m.theta[0] * h + h @ m.theta, ((4, 4),)),
    "linear": (lambda m, h: F.linear(h, m.theta, m.other), ((4, 4), (4,))),
    "linear, with a slice": (lambda m, h: F.linear(h, m.theta[1:5]), ((6, 4),)),
    "tokens of all examples": (
        lambda m, h: torch.addmm(m.other, h.reshape(-1, 4), m.theta).reshape(h.shape),
        ((4, 4), (4,)),
    ),
    "tokens of all examples, one row": (lambda m, h: (h.reshape(-1, 4) * m.theta).reshape(h.shape), ((4,),)),
    "time first": (
        lambda m, h: (F.linear(h.transpose(0, 1), m.theta) + m.theta[:2, None]).transpose(0, 1),
        ((4, 4),),
    ),
    "layer norm": (lambda m, h: F.layer_norm(h, (4,), m.theta, m.other), ((4,), (4,))),
    "layer norm with a function": (lambda m, h: F.layer_norm(h, (4,), 1 + m.theta), ((4,),)),
    "rms norm": (lambda m, h: F.rms_norm(h, (4,), m.theta), ((4,),)),
    "group norm": (lambda m, h: F.group_norm(h, 1, m.theta, m.other[:2]), ((2,),)),
    "convolution": (lambda m, h: F.conv1d(h, m.theta, padding=1), ((2, 2, 3),)),
    "standardised convolution": (
        lambda m, h: F.conv1d(h, (m.theta - m.theta.mean(dim=(1, 2), keepdim=True)) / m.theta.std(), padding="same"),
        ((2, 2, 3),),
    ),
    "rows of a table": (lambda m, h: h * m.theta[(h.detach() > 0).sum(dim=-1)], ((5, 4),)),
    "embedding": (lambda m, h: h * F.embedding((h.detach() > 0).sum(dim=-1), m.theta, 1), ((5, 4),)),
    "added to scores": (
        lambda m, h: F.scaled_dot_product_attention(h[:, None], h[:, None], h[:, None], m.theta)[:, 0],
        ((2, 2),),
    ),
    "windows": (
        lambda m, h: F.scaled_dot_product_attention(*[h.reshape(-1, 1, 4, 1)] * 3, m.theta.exp()).reshape(h.shape),
        ((1, 4, 4),),
    ),
    "queries": (lambda m, h: m.body(m.theta.expand(len(h), -1, -1)) * h, ((2, 4),)),
    "product with queries": (lambda m, h: (m.theta.expand(len(h), -1, -1) @ h.mT) @ h, ((2, 4),)),
    "mixed positions": (lambda m, h: m.theta @ h, ((2, 2),)),
    "behind a layer's back": (lambda m, h: F.linear(h, m.body.weight, m.theta) + m.theta, ((4,),)),
    "power": (lambda m, h: (2 + torch.tanh(h)) ** m.theta, ((4,),)),
}
OTHERS: dict[str, tuple[Callable[[Any, Tensor], Tensor], tuple[tuple[int, ...], ...]]] = {
    "sum": (lambda m, h: torch.einsum("bti,ij->btj", h, m.theta), ((4, 4),)),
    "activation as a function": (lambda m, h: F.prelu(h, m.theta), ((1,),)),
    "hidden": (lambda m, h: _Hidden.apply(h, m.theta), ((4,),)),
}


@pytest.mark.parametrize("name", [*SERVED, *FUNCTIONS])
def test_each_use(name: str) -> None:
    torch.manual_seed(0)
    use, shapes = (SERVED | FUNCTIONS)[name]
    model = Uses(use, *shapes)
    check(model, torch.randn(BATCH, 2, 4))
    gradients = _gradients(model)
    assert plan(gradients).generic == ()


@pytest.mark.parametrize("name", OTHERS)
def test_uses_that_are_not_understood_go_the_generic_way(name: str) -> None:
    torch.manual_seed(0)
    use, shapes = OTHERS[name]
    model = Uses(use, *shapes)
    check(model, torch.randn(BATCH, 2, 4))
    assert plan(_gradients(model)).generic == ("the model itself (Uses)",)


def _gradients(model: nn.Module) -> ExampleGradients:
    x = torch.randn(BATCH, 2, 4, dtype=torch.float64, device=DEVICE)
    return ExampleGradients.build(model, nn.MSELoss(), x, torch.randn(BATCH, 2).to(x), None)


class ConvNext(nn.Module):
    """Two blocks with a layer scale."""

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
            self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 6), nn.Linear(6, width)
            self.scale = nn.Parameter(torch.linspace(0.1, 1, width))

        def forward(self, x: Tensor) -> Tensor:
            h = self.down(F.gelu(self.up(self.norm(self.depthwise(x).permute(0, 2, 3, 1)))))
            return x + (self.scale * h).permute(0, 3, 1, 2)

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(2, 4, 2, stride=2), nn.Linear(4, 3)
        self.blocks = nn.Sequential(self.Block(4), self.Block(4))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.blocks(self.stem(x)).mean(dim=(2, 3)))
        return result


class Bert(nn.Module):
    """Integer tokens, with positions from a table of the model's own, or from a layer without examples."""

    def __init__(self, positions: str) -> None:
        super().__init__()
        self.positions = positions
        self.embedding = nn.Embedding(9, 4)
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        if positions == "bare":
            self.position = nn.Parameter(torch.randn(7, 4))
        else:
            self.position = nn.Embedding(7, 4)  # type: ignore[assignment]
        layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        places = torch.arange(tokens.shape[1], device=tokens.device)
        if self.positions == "bare":
            h = h + self.position[: tokens.shape[1]]
        else:
            h = h + self.position(places if self.positions == "a layer" else places[None])  # type: ignore[operator]
        h = torch.cat([self.token.expand(len(h), -1, -1), h], dim=1)
        result: Tensor = self.head(self.encoder(h)[:, 0])
        return result


@pytest.mark.parametrize("length", [4, 5])  # 5: as many as examples
@pytest.mark.parametrize("name", ["convnext", "bare", "a layer", "a layer, one row"])
def test_whole_models_against_brute_force(name: str, length: int) -> None:
    torch.manual_seed(1)
    model = (ConvNext() if name == "convnext" else Bert(name)).double().to(DEVICE)
    private = None if name == "convnext" else Private(submodule="embedding")
    images, tokens = torch.randn(5, 2, 4, 4, dtype=torch.float64), torch.randint(9, (5, length))
    x, y = (images if name == "convnext" else tokens).to(DEVICE), torch.randint(3, (5,), device=DEVICE)
    gradients = ExampleGradients.build(model, nn.CrossEntropyLoss(), x, y, private)
    found = plan(gradients)
    assert found.fits, found.reason
    assert not any("Bert" in part or "Block" in part for part in found.generic)

    mechanism = Mechanism.build(0.7, 1.0)
    arguments: dict[str, Any] = {"max_grad_norm": 0.7, "private": private}
    jacobian = reference.exact_jacobian(model, nn.CrossEntropyLoss(), x, y, **arguments)
    clipped = reference.clipped_gradients(model, nn.CrossEntropyLoss(), x, y, **arguments)
    got = RecordedJacobian(gradients, mechanism.clip, 0.7)
    u = torch.randn(gradients.num_parameters, dtype=torch.float64, device=DEVICE)
    unit = clipped / clipped.norm(dim=1, keepdim=True)
    turned = u + (1 - unit @ u)[:, None] * unit  # its part along the gradient is 1
    assert relative_error(got.folded_row(mechanism, u), torch.einsum("bpd,bp->bd", jacobian, turned) / 0.7) < 1e-8
    assert relative_error(got.clipped_norm, clipped.norm(dim=1)) < 1e-8
    along = torch.einsum("bpd,bp->bd", jacobian, clipped / clipped.norm(dim=1, keepdim=True))
    assert relative_error(got.clipped_norm_gradient(), along) < 1e-8
    summed = torch.cat([part.flatten() for part in got.clipped_sum().values()])
    assert relative_error(summed, clipped.sum(dim=0)) < 1e-8
    probes = torch.randn(3, gradients.num_parameters, dtype=torch.float64, device=DEVICE)
    together = torch.stack(list(got.perpendicular_rows(probes, 3)))
    mapped = torch.stack(list(ClippedJacobian(gradients, mechanism.clip, 0.7).perpendicular_rows(probes)))
    assert relative_error(together, mapped) < 1e-8


def test_a_layer_called_with_and_without_the_examples() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.layer(x)) + self.layer(torch.eye(4)[:1].to(x)).sin()

    check(Both(), torch.randn(BATCH, 4))


@pytest.mark.parametrize("padding", [None, 1])
@pytest.mark.parametrize("mode", ["mean", "sum"])
def test_bags_of_embeddings(mode: str, padding: int | None) -> None:
    """The rows of a table, with the weights of their sum private."""

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag, self.head = nn.EmbeddingBag(5, 4, mode=mode, padding_idx=padding), nn.Linear(4, 2)

        def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
            result: Tensor = self.head(torch.tanh(self.bag(tokens)) * x)
            return result

    torch.manual_seed(0)
    model = Bag().double().to(DEVICE)
    x, tokens = torch.randn(5, 4, dtype=torch.float64, device=DEVICE), torch.randint(5, (5, 3), device=DEVICE)
    with torch.no_grad():
        values = model(x, tokens)
    gradients = ExampleGradients.build(model, nn.MSELoss(), (x, tokens), torch.randn(5, 2).to(x), None)
    found = plan(gradients)
    assert found.fits, found.reason
    assert found.generic == ()
    got = RecordedJacobian(gradients, Mechanism.build(1.0, 1.0).clip, 1.0)
    g = gradients.gradients()
    assert relative_error(got.norm, g.norm(dim=1)) < 1e-10
    assert relative_error(got.norm_gradient() * 2 * got.norm[:, None], 2 * gradients.vjp(g)) < 1e-8
    assert torch.equal(values, model(x, tokens))
