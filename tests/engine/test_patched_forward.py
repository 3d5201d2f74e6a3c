"""A forward that was set on a module, and calls the one before, trains as the same model written as
a class.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.cases import DEVICE
from tests.engine.loops import assert_same_run, data, loader, network, train
from torchfil import FILPrivacyEngine
from torchfil.utils.errors import UnsupportedModuleError

FACTOR = 0.5


class Halved(nn.Linear):
    """The same as a class."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * FACTOR


class Called:
    """A function as an object, as accelerate's."""

    def __init__(self, before: Callable[..., Tensor]) -> None:
        self.before = before

    def __call__(self, x: Tensor) -> Tensor:
        return self.before(x) * FACTOR


def closure(model: Any) -> Any:
    before = model[0].forward
    return lambda x: before(x) * FACTOR


def method(model: Any) -> Any:
    before = model[0].forward
    return types.MethodType(lambda self, x: before(x) * FACTOR, model[0])


def wrapped(model: Any) -> Any:
    before = model[0].forward

    @wraps(before)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return before(*args, **kwargs) * FACTOR

    return forward


def by_globals(model: Any) -> Any:
    names = {"before": model[0].forward, "factor": FACTOR}
    exec(
        "def scaled(x):\n    return before(x) * factor\ndef forward(x):\n    return scaled(x)",
        names,
    )
    return names["forward"]


PATCHES = {
    "closure": closure,
    "method": method,
    "functools.wraps": wrapped,
    "functools.partial": lambda model: partial(
        lambda before, x: before(x) * FACTOR, model[0].forward
    ),
    "default": lambda model: lambda x, before=model[0].forward: before(x) * FACTOR,
    "object": lambda model: Called(model[0].forward),
    "globals": by_globals,
    "the whole model": lambda model: lambda x: F.linear(x, model[0].weight, model[0].bias) * FACTOR,
}


def patched(patch: Callable[[Any], Any]) -> nn.Sequential:
    model = network()
    model[0].forward = patch(model)
    return model


def written() -> nn.Sequential:
    model = network()
    first = Halved(5, 6).double().to(DEVICE)
    first.load_state_dict(model[0].state_dict())
    return nn.Sequential(first, *model[1:])


def trained(module: nn.Module) -> tuple[FILPrivacyEngine, nn.Module]:
    run = train(
        data(40), steps=6, module=module, noise_generator=torch.Generator(DEVICE).manual_seed(7)
    )
    return run.engine, module


@pytest.mark.parametrize("patch", PATCHES.values(), ids=PATCHES)
@pytest.mark.product
def test_the_run_is_that_of_the_model_written_as_a_class(patch: Callable[[Any], Any]) -> None:
    assert_same_run(trained(patched(patch)), trained(written()), 1e-9)


def holds_a_parameter(model: Any) -> Any:
    weight, bias = model[0].weight, model[0].bias
    return lambda x: F.linear(x, weight, bias) * FACTOR


def holds_it_deep(model: Any) -> Any:
    held = {"layers": [model[0].forward]}
    return lambda x: held["layers"][0](x) * FACTOR


@pytest.mark.parametrize("patch", [holds_a_parameter, holds_it_deep])
def test_what_the_copy_cannot_follow_is_refused_before_training(
    patch: Callable[[Any], Any],
) -> None:
    module, engine = patched(patch), FILPrivacyEngine()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.3)
    with pytest.raises(
        UnsupportedModuleError,
        match=r"reaches 0.weight, 0.bias other than.*types.MethodType\(lambda",
    ):
        engine.make_private(module, optimizer, loader(data(40)), noise_multiplier=1.0)
    remedy = types.MethodType(lambda self, x: type(self).forward(self, x) * FACTOR, module[0])
    module[0].forward = remedy  # type: ignore[method-assign]
    assert_same_run(trained(module), trained(written()), 1e-9)


def test_an_input_unlike_the_loops_is_refused_at_the_first_step() -> None:
    """The loop adds a dimension, so make_private cannot run the model on the batch."""
    module = nn.Sequential(nn.Conv1d(5, 6, 1), nn.Flatten(), nn.Linear(6, 3)).double()
    before = [module[0].forward]
    module[0].forward = lambda x: (
        before[0](x.squeeze(-1).unsqueeze(-1)) if x.ndim == 3 else x.no_such
    )  # type: ignore
    engine, optimizer = FILPrivacyEngine(), torch.optim.SGD(module.parameters(), lr=0.3)
    model, private_optimizer, private = engine.make_private(
        module, optimizer, loader(data(40)), noise_multiplier=1.0, poisson_sampling=False
    )
    weights = [value.clone() for value in module.parameters()]
    x, y = next(iter(private))
    with pytest.raises(
        UnsupportedModuleError, match="reaches 0.weight, 0.bias other than through its own modules"
    ):
        F.cross_entropy(model(x.unsqueeze(-1)), y).backward()
        private_optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), weights, strict=True))
    assert engine.accountant.history == []
