"""Norms from one recorded pass against plain autograd, example by example, in float64: layers, losses, precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import zoo
from tests.cases import CASES, DEVICE, build
from tests.fisher.recorded_cases import BATCH, LAYERS, Flat, Mixed, Scaled, brute_force, check, norm_gradient
from torchfil.fisher.gradients import ExampleGradients
from torchfil.fisher.mechanism import Mechanism
from torchfil.fisher.models import product_precision, products_in
from torchfil.fisher.recording import RecordedJacobian, plan
from torchfil.fisher.rules.substitutes import convolution_precision
from torchfil.private import Private

pytestmark = pytest.mark.torch_versions


@pytest.mark.parametrize("name", LAYERS)
def test_each_layer_alone(name: str) -> None:
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    layer = make()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    check(Flat(layer), torch.randn(BATCH, *shape))


def test_layers_without_a_rule_are_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.PReLU(4), Scaled(), Mixed()).to(DEVICE)
    gradients = ExampleGradients.build(
        model, nn.MSELoss(), torch.randn(3, 4, device=DEVICE), torch.zeros(3, 3).to(DEVICE)
    )
    assert plan(gradients).generic == ("1 (PReLU)", "3 (Mixed)")


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


@pytest.mark.parametrize("layer", [nn.LayerNorm(4), nn.RMSNorm(4), nn.Linear(4, 4), nn.GroupNorm(2, 4)])
def test_a_loss_that_is_linear_in_the_outputs(layer: nn.Module) -> None:
    """δ is a constant then."""
    torch.manual_seed(3)
    x = torch.randn(BATCH, 4, 3) if isinstance(layer, nn.GroupNorm) else torch.randn(BATCH, 4)
    check(layer, x, loss_fn=lambda outputs, y: (outputs * y).sum())


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
