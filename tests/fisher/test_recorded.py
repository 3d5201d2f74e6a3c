"""One recorded pass, whole and in halves, of every layer and model: against plain autograd, in
float64.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.cases import DEVICE, build
from tests.fisher import recorded_cases as cases
from tests.fisher.recorded_cases import (
    BATCH,
    MECHANISM,
    Model,
    check,
    close,
    gradients_of,
    norms_and_slopes,
    state_of,
)
from torchfil import Private
from torchfil.fisher import ClippedJacobian, ExampleGradients
from torchfil.fisher.recording import RecordedJacobian, UnsupportedCallError, forward_pass, plan
from torchfil.fisher.recording.record import record

pytestmark = pytest.mark.torch_versions
no_fallback = pytest.mark.filterwarnings("error:There is a performance drop")
CLIP = MECHANISM.clip


@no_fallback
@pytest.mark.parametrize(
    ("name", "frozen"), [*((n, False) for n in cases.LAYERS), *((n, True) for n in cases.FROZEN)]
)
def test_each_layer(name: str, frozen: bool) -> None:
    torch.manual_seed(0)
    make, shape = cases.LAYERS[name]
    layer = make()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    next(layer.parameters()).requires_grad_(not frozen)
    check(gradients_of(cases.flat(layer), torch.randn(BATCH, *shape)), mapped=not frozen)


@pytest.mark.parametrize("name", cases.MODELS)
def test_each_model(name: str) -> None:
    torch.manual_seed(2)
    make, shape = cases.MODELS[name]
    check(gradients_of(make(), torch.randn(BATCH, *shape)))


@pytest.mark.parametrize("name", [*cases.USES, *cases.OTHER_USES])
def test_each_use_of_a_parameter(name: str) -> None:
    torch.manual_seed(0)
    gradients = gradients_of(
        cases.using(*(cases.USES | cases.OTHER_USES)[name]), torch.randn(BATCH, 2, 4)
    )
    check(
        gradients,
        generic=() if name in cases.USES else ("the model itself (Model)",),
        mapped=name in cases.OTHER_USES,
    )


@no_fallback
@pytest.mark.parametrize("name", ["transformer", "two_inputs", "private_target"])
def test_each_case(name: str) -> None:
    """Private columns, targets, embeddings and several inputs."""
    case = build(name, 5)
    check(ExampleGradients.build(*case.arguments, case.private))


@pytest.mark.parametrize("layer", [True, False])
def test_positions_as_many_as_examples(layer: bool) -> None:
    torch.manual_seed(1)
    gradients = gradients_of(
        cases.bert(layer), torch.randint(9, (5, 5)), private=Private(submodule="embedding")
    )
    assert not any("Model" in part for part in plan(gradients).generic)
    check(gradients)


LOSSES: dict[str, Any] = {
    "weighted": nn.CrossEntropyLoss(
        torch.tensor([0.2, 1.0, 3.0]).double(), label_smoothing=0.1, reduction="sum"
    ),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "linear": lambda outputs, y: (outputs * F.one_hot(y, 3)).sum(),  # δ is a constant
}


@pytest.mark.parametrize("last", [nn.LayerNorm(3), nn.Identity()])
@pytest.mark.parametrize("loss", LOSSES)
def test_losses(loss: str, last: nn.Module) -> None:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), last).to(DEVICE).double()
    x, y = torch.randn(4, 4).to(DEVICE).double(), torch.tensor([0, 1, 2, 1], device=DEVICE)
    loss_fn = LOSSES[loss].to(DEVICE) if loss != "linear" else LOSSES[loss]
    check(ExampleGradients.build(model, loss_fn, x, y))


def test_repeated_tokens_and_padding() -> None:
    torch.manual_seed(4)
    model = nn.Sequential(
        nn.Embedding(6, 4, padding_idx=0), nn.Tanh(), nn.Flatten(), nn.Linear(16, 2)
    )
    tokens = torch.tensor([[1, 2, 1, 0], [3, 3, 3, 3], [0, 0, 5, 0]])
    gradients = gradients_of(model, tokens, private=Private(submodule="0"))
    check(gradients)
    other = gradients_of(model, tokens.roll(1, dims=1).clamp(max=3), private=Private(submodule="0"))
    recorded, mapped = (
        RecordedJacobian(gradients, MECHANISM, measured=False),
        ClippedJacobian(gradients, CLIP, 1.0),
    )
    close(recorded.products_with(other), mapped.products_with(other))


@pytest.mark.parametrize("padding", [None, 1])
@pytest.mark.parametrize("mode", ["mean", "sum"])
def test_bags_of_embeddings(mode: str, padding: int | None) -> None:
    """The rows of a table, with the weights of their sum private."""
    torch.manual_seed(0)
    bag = nn.EmbeddingBag(5, 4, mode=mode, padding_idx=padding)
    model = Model(
        lambda m, x, tokens: m.head(torch.tanh(m.bag(tokens)) * x), bag=bag, head=nn.Linear(4, 2)
    )
    check(gradients_of(model, torch.randn(5, 4), torch.randint(5, (5, 3))), generic=())


@pytest.mark.parametrize("batch", [0, 1, 3])
def test_a_model_that_looks_at_values(batch: int) -> None:
    """It cannot be mapped: one recorded pass serves it, and mapped products go one example after
    the other.
    """
    torch.manual_seed(8)

    def run(m: Any, x: Tensor, mask: Tensor, looks: bool = True) -> Tensor:
        hidden = m.first(x).tanh()
        return m.second(hidden if looks and mask.all() else hidden * mask)

    model, x = Model(run, first=nn.Linear(3, 4), second=nn.Linear(4, 2)), torch.randn(batch, 3)
    mask = (torch.arange(4).expand(batch, 4) < torch.arange(2, 2 + batch)[:, None]).double()
    ours = gradients_of(model, x, mask, private=Private(inputs=0))
    if batch:
        check(ours)
    plain = replace(
        ours, model=Model(partial(run, looks=False), first=model.first, second=model.second)
    )
    u, v = (
        torch.randn(s, dtype=torch.float64, device=DEVICE)
        for s in ((plain.num_parameters,), (batch, 3))
    )
    close(ours.vjp(u), plain.vjp(u), 1e-12)
    close(ours.jvp(v), plain.jvp(v), 1e-12)
    close(ours.jacobian_columns(slice(0, 3)), plain.jacobian_columns(slice(0, 3)), 1e-12)


def test_in_place_operations_on_what_does_not_depend_on_the_private_part() -> None:
    """With only the target private, the first layer's output is a constant.

    ReLU may still overwrite it.
    """
    torch.manual_seed(9)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 2))
    check(gradients_of(model, torch.randn(3, 4), private=Private(inputs=(), target=True)))


def test_layers_that_torch_differentiates_only_once() -> None:
    """A hard sigmoid is a clipped line, whose derivatives torch knows."""
    torch.manual_seed(0)
    line = Model(lambda m, x: torch.clamp(x / 6 + 0.5, 0, 1))
    model = nn.Sequential(nn.Linear(4, 3), nn.Hardsigmoid(), nn.Linear(3, 2), nn.Tanh())
    gradients = gradients_of(model, torch.randn(BATCH, 4))
    check(gradients)
    known = replace(gradients, model=nn.Sequential(model[0], line, model[2], nn.Tanh()))
    for got, want in zip(norms_and_slopes(gradients), norms_and_slopes(known), strict=True):
        close(got, want)


def test_what_one_pass_does_not_serve_is_told() -> None:
    """Rows of all examples that do not lie together, and layers without a rule."""
    torch.manual_seed(3)
    assert not plan(gradients_of(cases.folded(False), torch.randn(BATCH, 2, 4))).fits
    model = nn.Sequential(nn.Linear(4, 4), nn.PReLU(4), cases.scaled(), cases.mixed())
    assert plan(gradients_of(model, torch.randn(3, 4))).generic == ("1 (PReLU)", "3 (Model)")


def test_gradients_at_the_outputs_are_those_of_each_examples_loss() -> None:
    """Two outputs, one of which the loss does not see."""
    torch.manual_seed(8)
    model = (
        Model(lambda m, x: (m.layer(x), m.layer(x).sum(dim=1)), layer=nn.Linear(3, 4))
        .double()
        .to(DEVICE)
    )
    x, y = torch.randn(5, 3, dtype=torch.float64, device=DEVICE), torch.arange(5, device=DEVICE) % 4
    gradients = ExampleGradients.build(model, lambda out, y: F.cross_entropy(out[0], y), x, y, None)
    logits, unseen = RecordedJacobian(gradients, MECHANISM).output_gradients
    torch.testing.assert_close(logits, model(x)[0].detach().softmax(dim=1) - F.one_hot(y, 4))
    assert torch.equal(unseen, torch.zeros_like(unseen))


class TestHalves:
    """The forward pass of the user's own loop, then the rest."""

    def test_of_other_examples_are_refused(self) -> None:
        gradients = ExampleGradients.build(*build("mlp", 4).arguments)
        forward = forward_pass(gradients, gradients.examples.z[:3].detach().requires_grad_())
        with pytest.raises(ValueError, match="sizes"):
            RecordedJacobian(gradients, MECHANISM, forward)

    def test_of_a_model_in_use(self) -> None:
        """A user's hooks are called, changes by them count, and nothing is left behind, also after
        an error.
        """

        def run(m: Any, x: Tensor) -> Tensor:
            if m.fails:
                raise KeyError("on purpose")
            return m.head(torch.tanh(m.scale * m.body(x)))

        layers: dict[str, Any] = {"body": nn.Linear(3, 4), "head": nn.Linear(4, 2)}
        model = Model(run, **layers, scale=nn.Parameter(torch.ones(4)), fails=False)
        model.body.register_forward_hook(lambda module, args, output: 2 * output)
        gradients = gradients_of(model, torch.randn(4, 3))
        check(gradients)
        model.fails, before = True, state_of(model)
        with pytest.raises(KeyError, match="on purpose"):
            forward_pass(gradients, gradients.examples.z.detach().requires_grad_())
        assert state_of(model) == before

    def test_a_loss_that_overwrites_the_outputs(self) -> None:
        """The forward half is run again with copies, the first time."""
        torch.manual_seed(0)
        plain = gradients_of(
            nn.Linear(3, 2), torch.randn(4, 3), loss_fn=lambda out, y: F.mse_loss(out * 3, y)
        )
        gradients = replace(plain, loss_fn=lambda out, y: F.mse_loss(out.mul_(3), y))
        for _ in range(2):
            for got, want in zip(norms_and_slopes(gradients), norms_and_slopes(plain), strict=True):
                torch.testing.assert_close(got, want)

    def test_active_dropout_without_masks_is_refused(self) -> None:
        model = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5))
        gradients = gradients_of(model.eval(), torch.randn(4, 3))
        model.train()
        with pytest.raises(UnsupportedCallError, match="dropout"):
            record(gradients, gradients.examples.z)
