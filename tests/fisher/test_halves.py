"""A recorded pass in halves: the forward pass of the user's own loop, then the rest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.cases import DEVICE, build, relative_error
from tests.fisher.recorded_cases import BATCH, LAYERS, Flat, norm_gradient
from torchfil.fisher import PoissonAmplification
from torchfil.fisher.gradients import ExampleGradients
from torchfil.fisher.mechanism import Mechanism
from torchfil.fisher.operator import ClippedJacobian
from torchfil.fisher.recording import RecordedJacobian, UnsupportedCallError, forward_pass
from torchfil.fisher.recording.record import record
from torchfil.fisher.rules import register_rule
from torchfil.fisher.rules.linear import LinearRule

pytestmark = pytest.mark.torch_versions


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
    with pytest.raises(ValueError, match=r"got sizes \[3, 4\]"):
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
