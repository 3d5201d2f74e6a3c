"""A loop that trains other weights than the private ones, or none, is refused or warned about."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.cases import DEVICE
from tests.engine.loops import data, loader, make, network, step
from torchfil import FILPrivacyEngine


class Adapted(nn.Module):
    """A frozen layer with a correction of rank 2, zero at first, as in LoRA; ``on`` as in peft's
    disable_adapter.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, 2, bias=False, dtype=torch.float64, device=DEVICE)
        self.up = nn.Linear(2, layer.out_features, bias=False, dtype=torch.float64, device=DEVICE)
        nn.init.zeros_(self.up.weight)
        self.on = True

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x)) if self.on else self.layer(x)


def adapted() -> nn.Sequential:
    """An adapter and a head that is trained as a whole."""
    module = network()
    module[0] = Adapted(module[0])  # type: ignore[arg-type]
    return module


def shortened(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][:2]


def exchanged(model: Any, optimizer: Any) -> None:
    group = optimizer.param_groups[0]
    group["params"] = [nn.Parameter(p.detach().clone()) for p in group["params"]]


def extended(model: Any, optimizer: Any) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})


def unfrozen(model: Any, optimizer: Any) -> None:
    model._module[0].layer.requires_grad_(True)


def frozen(model: Any, optimizer: Any) -> None:
    """As peft's disable_adapter_layers does it."""
    model._module.requires_grad_(False)


def assigned(model: Any, optimizer: Any) -> None:
    own = model._module
    own.load_state_dict(
        {name: value.clone() for name, value in own.state_dict().items()}, assign=True
    )


def wrapped(model: Any, optimizer: Any) -> None:
    """As get_peft_model does it in place."""
    model._module[2] = Adapted(model._module[2])


def merged(model: Any, optimizer: Any) -> None:
    """As merge_and_unload does it."""
    model._module[0] = model._module[0].layer


@pytest.mark.parametrize(
    "change", [shortened, exchanged, extended, unfrozen, frozen, assigned, wrapped, merged]
)
@pytest.mark.parametrize("begun", [False, True])
def test_a_change_of_the_trained_weights_after_make_private_is_refused(
    change: Callable[[Any, Any], None], begun: bool
) -> None:
    module = adapted()
    trainable = [p for p in module.parameters() if p.requires_grad]
    engine = FILPrivacyEngine()
    given = module, torch.optim.SGD(trainable, lr=0.1), loader(data(40))
    model, optimizer, private = engine.make_private(*given, noise_multiplier=1.0)
    batches = iter(private)
    for batch in islice(batches, int(begun)):
        step(model, optimizer, batch)
    change(model, optimizer)
    before = [p.detach().clone() for p in trainable]
    with pytest.raises(RuntimeError, match="since make_private|replaced after make_private"):
        step(model, optimizer, next(batches))
    assert all(torch.equal(now, then) for now, then in zip(trainable, before, strict=True))
    assert len(engine.accountant) == int(begun)


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("poisson", [True, False])
def test_another_optimizer_than_the_private_one_is_noticed(
    poisson: bool, steps_before: int
) -> None:
    """It would train nothing, as no gradient reaches the weights: in the first epoch, or a later
    phase of training.
    """
    _, module, model, optimizer, private = make(poisson_sampling=poisson)
    batches = iter(private)
    for batch in islice(batches, steps_before):
        step(model, optimizer, batch)
    other = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises((RuntimeError, ValueError), match="optimizer that make_private returned"):
        for _ in range(3):
            for batch in private:
                step(model, other, batch)
