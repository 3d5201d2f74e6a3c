"""One recorded pass, whole and in halves, of every layer and model: against plain autograd, in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import zoo
from tests.cases import CASES, DEVICE, build
from tests.fisher import recorded_cases as cases
from tests.fisher.recorded_cases import BATCH, MECHANISM, Model, check, close, gradients_of, norms_and_slopes, state_of
from torchfil import Private, fisher
from torchfil.fisher import ClippedJacobian, ExampleGradients
from torchfil.fisher.models import product_precision, products_in
from torchfil.fisher.recording import RecordedJacobian, UnsupportedCallError, forward_pass, plan
from torchfil.fisher.recording.record import record
from torchfil.fisher.rules import register_rule
from torchfil.fisher.rules.linear import LinearRule
from torchfil.fisher.rules.substitutes import convolution_precision

pytestmark = pytest.mark.torch_versions
no_fallback = pytest.mark.filterwarnings("error:There is a performance drop")
CLIP = MECHANISM.clip


@no_fallback
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", cases.LAYERS)
def test_each_layer(name: str, frozen: bool) -> None:
    torch.manual_seed(0)
    make, shape = cases.LAYERS[name]
    layer = make()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    first, *others = layer.parameters()
    if frozen and not others:
        pytest.skip("it has one parameter only")
    first.requires_grad_(not frozen)
    check(gradients_of(cases.flat(layer), torch.randn(BATCH, *shape)), mapped=not frozen)


@pytest.mark.parametrize("name", cases.MODELS)
def test_each_model(name: str) -> None:
    torch.manual_seed(2)
    make, shape = cases.MODELS[name]
    check(gradients_of(make(), torch.randn(BATCH, *shape)))


@pytest.mark.parametrize("name", [*cases.USES, *cases.OTHER_USES])
def test_each_use_of_a_parameter(name: str) -> None:
    torch.manual_seed(0)
    gradients = gradients_of(cases.using(*(cases.USES | cases.OTHER_USES)[name]), torch.randn(BATCH, 2, 4))
    check(
        gradients, generic=() if name in cases.USES else ("the model itself (Model)",), mapped=name in cases.OTHER_USES
    )


@no_fallback
@pytest.mark.parametrize("name", CASES)
def test_each_case(name: str) -> None:
    """Private columns, targets, embeddings and several inputs."""
    case = build(name, 5)
    check(ExampleGradients.build(*case.arguments, case.private))


WHOLE = [("convnext", 4), ("bare", 4), ("bare", 5), ("a layer", 5), ("a layer, one row", 5)]  # 5: as many as examples


@pytest.mark.parametrize(("name", "length"), WHOLE)
def test_whole_models(name: str, length: int) -> None:
    torch.manual_seed(1)
    private = None if name == "convnext" else Private(submodule="embedding")
    x = torch.randn(5, 2, 4, 4) if name == "convnext" else torch.randint(9, (5, length))
    gradients = gradients_of(cases.convnext() if name == "convnext" else cases.bert(name), x, private=private)
    assert not any("Model" in part for part in plan(gradients).generic)
    check(gradients)


LOSSES: dict[str, Any] = {
    "weighted": nn.CrossEntropyLoss(torch.tensor([0.2, 1.0, 3.0]).double(), label_smoothing=0.1, reduction="sum"),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "linear": lambda outputs, y: (outputs * F.one_hot(y, 3)).sum(),  # δ is a constant
}


@pytest.mark.parametrize("last", [nn.LayerNorm(3), nn.RMSNorm(3), nn.Identity()])
@pytest.mark.parametrize("loss", LOSSES)
def test_losses(loss: str, last: nn.Module) -> None:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), last).to(DEVICE).double()
    x, y = torch.randn(4, 4, dtype=torch.float64, device=DEVICE), torch.tensor([0, 1, 2, 1], device=DEVICE)
    loss_fn = LOSSES[loss].to(DEVICE) if loss != "linear" else LOSSES[loss]
    check(ExampleGradients.build(model, loss_fn, x, y))


def test_repeated_tokens_and_padding() -> None:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Embedding(6, 4, padding_idx=0), nn.Tanh(), nn.Flatten(), nn.Linear(16, 2))
    tokens = torch.tensor([[1, 2, 1, 0], [3, 3, 3, 3], [0, 0, 5, 0]])
    check(gradients_of(model, tokens, private=Private(submodule="0")))


@pytest.mark.parametrize("padding", [None, 1])
@pytest.mark.parametrize("mode", ["mean", "sum"])
def test_bags_of_embeddings(mode: str, padding: int | None) -> None:
    """The rows of a table, with the weights of their sum private."""
    torch.manual_seed(0)
    bag = nn.EmbeddingBag(5, 4, mode=mode, padding_idx=padding)
    model = Model(lambda m, x, tokens: m.head(torch.tanh(m.bag(tokens)) * x), bag=bag, head=nn.Linear(4, 2))
    check(gradients_of(model, torch.randn(5, 4), torch.randint(5, (5, 3))), generic=())


def test_a_model_that_looks_at_values() -> None:
    """It has no vmap, but one recorded pass serves it."""
    torch.manual_seed(8)

    def run(m: Any, x: Tensor) -> Tensor:
        assert bool((x.abs() < 1e6).all())
        return torch.tanh(m.layer(x))

    gradients = gradients_of(Model(run, layer=nn.Linear(4, 2)), torch.randn(3, 4))
    check(gradients)
    x, y = gradients.examples.z, gradients.examples.public[2]
    trace = fisher.fim_trace(gradients.model, nn.MSELoss(), x, y, max_grad_norm=1.0, noise_multiplier=1.0)
    assert trace.value.shape == (3,)


def test_in_place_operations_on_what_does_not_depend_on_the_private_part() -> None:
    """With only the target private, the first layer's output is a constant; ReLU may still overwrite it."""
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


@pytest.mark.parametrize("case", ["mixing", "rows apart"])
def test_what_one_pass_cannot_see_is_told(case: str) -> None:
    torch.manual_seed(3)
    mixing = Model(lambda m, x: torch.tanh(m.layer(x) - m.layer(x).mean(dim=0)), layer=nn.Linear(4, 4))
    given = (mixing, torch.randn(BATCH, 4)) if case == "mixing" else (cases.folded(False), torch.randn(BATCH, 2, 4))
    assert not plan(gradients_of(*given)).fits


def test_layers_without_a_rule_are_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.PReLU(4), cases.scaled(), cases.mixed())
    assert plan(gradients_of(model, torch.randn(3, 4))).generic == ("1 (PReLU)", "3 (Model)")


def test_gradients_at_the_outputs_are_those_of_each_examples_loss() -> None:
    """Two outputs, one of which the loss does not see."""
    torch.manual_seed(8)
    model = Model(lambda m, x: (m.layer(x), m.layer(x).sum(dim=1)), layer=nn.Linear(3, 4)).double().to(DEVICE)
    x, y = torch.randn(5, 3, dtype=torch.float64, device=DEVICE), torch.arange(5, device=DEVICE) % 4
    gradients = ExampleGradients.build(model, lambda out, y: F.cross_entropy(out[0], y), x, y, None)
    logits, unseen = RecordedJacobian(gradients, CLIP, 1.0).output_gradients
    torch.testing.assert_close(logits, model(x)[0].detach().softmax(dim=1) - F.one_hot(y, 4))
    assert torch.equal(unseen, torch.zeros_like(unseen))


def test_precision_of_products_is_set_and_given_back() -> None:
    before, legacy = product_precision(), torch.backends.cuda.matmul.allow_tf32
    with pytest.raises(KeyError), products_in("tf32"):
        assert product_precision() == "tf32"
        raise KeyError
    assert product_precision() == convolution_precision(torch.zeros(1)) == before
    assert torch.backends.cuda.matmul.allow_tf32 == legacy


def test_a_zero_gradient_has_a_zero_slope() -> None:
    model, x = nn.Linear(2, 1, bias=False), torch.ones(1, 2)
    for value in norms_and_slopes(ExampleGradients.build(model, nn.MSELoss(), x, model(x).detach())):
        assert (value == 0).all()


def test_single_precision() -> None:
    torch.manual_seed(6)
    model, x, y = zoo.mnist_cnn(), torch.rand(4, 1, 28, 28), torch.randint(10, (4,))
    single = norms_and_slopes(ExampleGradients.build(model, nn.CrossEntropyLoss(), x, y))
    double = norms_and_slopes(ExampleGradients.build(model.double(), nn.CrossEntropyLoss(), x.double(), y))
    for got, want in zip(single, double, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


def test_the_memory_plan_does_not_depend_on_the_batch() -> None:
    """A chunk's examples are views of the whole batch; only what belongs to them counts."""
    model, sizes = zoo.mnist_cnn(), set()
    for batch in (2, 64):
        x, y = torch.rand(batch, 1, 28, 28), torch.randint(10, (batch,))
        sizes.add(plan(ExampleGradients.build(model, nn.CrossEntropyLoss(), x, y)).bytes_per_example)
    assert len(sizes) == 1


class TestHalves:
    """The forward pass of the user's own loop, then the rest."""

    def test_of_other_examples_are_refused(self) -> None:
        gradients = ExampleGradients.build(*build("mlp", 4).arguments)
        forward = forward_pass(gradients, gradients.examples.z[:3].detach().requires_grad_())
        with pytest.raises(ValueError, match="sizes"):
            RecordedJacobian(gradients, CLIP, 1.0, forward)

    def test_of_a_model_in_use(self) -> None:
        """A user's hooks are called, changes by them count, and nothing is left behind, also after an error."""

        def run(m: Any, x: Tensor) -> Tensor:
            h = m.act(m.norm(m.scale * m.embedding(x)))
            if m.fails:
                raise KeyError("on purpose")
            return m.head(h)

        torch.manual_seed(0)
        layers: dict[str, Any] = {"embedding": nn.Linear(3, 4), "norm": nn.LayerNorm(4), "act": nn.Tanh()}
        model = Model(run, **layers, scale=nn.Parameter(torch.ones(4)), head=nn.Linear(4, 2), fails=False)
        seen: list[str] = []
        model.head.register_forward_pre_hook(lambda module, args: seen.append("before"))
        model.embedding.register_forward_hook(lambda module, args, output: (seen.append("after"), 2 * output)[1])
        gradients = gradients_of(model, torch.randn(4, 3))
        before, z = state_of(model), gradients.examples.z.detach().requires_grad_()
        seen.clear()
        forward = forward_pass(gradients, z)
        assert state_of(model) == before
        u = torch.randn(gradients.num_parameters, dtype=torch.float64, device=DEVICE)
        got = RecordedJacobian(gradients, CLIP, 1.0, forward).folded_row(MECHANISM, u)
        assert seen == ["after", "before"]  # what follows calls no module
        close(got, ClippedJacobian(gradients, CLIP, 1.0).folded_row(MECHANISM, u))

        model.fails = True
        with pytest.raises(KeyError, match="on purpose"):
            forward_pass(gradients, z)
        assert state_of(model)[0] == before[0]

    def test_their_weights_are_the_given_ones(self) -> None:
        gradients = gradients_of(nn.Linear(3, 2), torch.randn(4, 3))
        moved = {name: value + 1 for name, value in gradients.parameters.items()}
        forward = forward_pass(replace(gradients, parameters=moved), gradients.examples.z)
        torch.testing.assert_close(forward.outputs, F.linear(gradients.examples.z, moved["weight"], moved["bias"]))

    def test_a_loss_that_overwrites_the_outputs(self) -> None:
        """The forward half is run again with copies, the first time."""
        calls = 0

        class Counting(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                nonlocal calls
                calls += 1
                return super().forward(x)

        register_rule(Counting, LinearRule())
        torch.manual_seed(0)
        plain = gradients_of(Counting(3, 2), torch.randn(4, 3), loss_fn=lambda out, y: F.mse_loss(out * 3, y))
        gradients = replace(plain, loss_fn=lambda out, y: F.mse_loss(out.mul_(3), y))
        for _ in range(2):
            calls = 0
            found = norms_and_slopes(gradients)
        assert calls == 1
        for got, want in zip(found, norms_and_slopes(plain), strict=True):
            torch.testing.assert_close(got, want)

    def test_active_dropout_without_masks_is_refused(self) -> None:
        model = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5))
        gradients = gradients_of(model.eval(), torch.randn(4, 3))
        model.train()
        with pytest.raises(UnsupportedCallError, match="dropout"):
            record(gradients, gradients.examples.z)


def test_fused_attention_where_nothing_is_differentiated_twice() -> None:
    """torch's kernels are called as the model calls them; with masks of dropout, the plain ones remain."""
    torch.manual_seed(0)
    model = zoo.token_transformer(3, 20, 6, width=8, depth=1, heads=2).to(DEVICE)
    tokens, labels = torch.randint(20, (4, 6), device=DEVICE), torch.randint(3, (4,), device=DEVICE)
    gradients = ExampleGradients.build(model, nn.CrossEntropyLoss(), tokens, labels, Private(submodule="embedding"))
    released = replace(gradients, twice=False)
    masked = replace(released, examples=replace(released.examples, masks=(torch.ones(4, 1, device=DEVICE),)))
    for each, only_math in ((gradients, True), (released, False), (masked, True)):
        with each.forward_state():
            assert torch.backends.cuda.flash_sdp_enabled() != only_math
    ours, recorded = (RecordedJacobian(gradients, CLIP, 0.5, measured=measured).norm for measured in (False, True))
    torch.testing.assert_close(ours, recorded, rtol=1e-4, atol=0)
