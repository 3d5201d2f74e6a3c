"""A loop that trains other weights than the private ones, or none, is refused or warned about."""

from __future__ import annotations

import copy
import warnings
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
    """A frozen layer with a correction of rank 2, zero at first, as in LoRA; ``on`` as in peft's disable_adapter."""

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
    own.load_state_dict({name: value.clone() for name, value in own.state_dict().items()}, assign=True)


def wrapped(model: Any, optimizer: Any) -> None:
    """As get_peft_model does it in place."""
    model._module[2] = Adapted(model._module[2])


def merged(model: Any, optimizer: Any) -> None:
    """As merge_and_unload does it."""
    model._module[0] = model._module[0].layer


@pytest.mark.parametrize("change", [shortened, exchanged, extended, unfrozen, frozen, assigned, wrapped, merged])
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


def test_train_step_refuses_as_well() -> None:
    engine, _, model, optimizer, private = make(criterion=nn.CrossEntropyLoss())
    shortened(model, optimizer)
    with pytest.raises(RuntimeError, match="2.weight"):
        engine.train_step(*next(iter(private)))
    assert len(engine.accountant) == 0


def test_what_is_frozen_later_is_neither_trained_nor_accounted_for() -> None:
    """Both sides know it: the optimizer leaves frozen weights out, and so do gradients and sums."""
    _, module, model, optimizer, private = make()
    batches = iter(private)
    step(model, optimizer, next(batches))
    module[0].requires_grad_(False)
    before = [p.detach().clone() for p in module.parameters()]
    step(model, optimizer, next(batches))
    moved = [not torch.equal(now, then) for now, then in zip(module.parameters(), before, strict=True)]
    assert moved == [False, False, True, True]


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("poisson", [True, False])
def test_another_optimizer_than_the_private_one_is_noticed(poisson: bool, steps_before: int) -> None:
    """It would train nothing, as no gradient reaches the weights: in the first epoch, or a later phase of training."""
    _, module, model, optimizer, private = make(poisson_sampling=poisson)
    batches = iter(private)
    for batch in islice(batches, steps_before):
        step(model, optimizer, batch)
    other = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises((RuntimeError, ValueError), match="optimizer that make_private returned"):
        for _ in range(3):
            for batch in private:
                step(model, other, batch)


def test_a_copy_of_the_model_is_refused_at_once() -> None:
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="optimizer"):
        FILPrivacyEngine().make_private(copy.deepcopy(module), optimizer, loader(data(40)), noise_multiplier=1.0)


def warned(module: nn.Module, learning_rate: float = 0.3, **options: Any) -> list[str]:
    """What is said about weights in ten epochs, of a loop or with ``train_step``."""
    trainable = [p for p in module.parameters() if p.requires_grad]
    engine, optimizer = FILPrivacyEngine(), torch.optim.SGD(trainable, lr=learning_rate)
    given: dict[str, Any] = {"noise_multiplier": 1.0, **options}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, private_optimizer, private = engine.make_private(module, optimizer, loader(data(40)), **given)
        for _ in range(10):
            for inputs, targets in private:
                inputs = inputs.to(next(module.parameters()))
                step(model, private_optimizer, (inputs, targets))
    return [str(each.message) for each in caught if str(each.message).startswith("Weights")]


@pytest.mark.parametrize("mode", ["auto", "hooks"])
def test_weights_that_do_not_move_are_named_once(mode: str) -> None:
    (told,) = warned(network(), 0.0, grad_sample_mode=mode)
    assert "did not move" in told
    assert "0.weight, 0.bias, 2.weight, 2.bias" in told
    assert not warned(network(), grad_sample_mode=mode)
    assert not warned(adapted(), grad_sample_mode=mode)  # the first factor has no gradient at first


def test_others_that_do_not_move_later_are_named_as_well() -> None:
    """Each set once, however often it is looked at."""
    module = network()
    groups = [{"params": module[0].parameters(), "lr": 0.0}, {"params": module[2].parameters(), "lr": 0.1}]
    given = module, torch.optim.SGD(groups), loader(data(40))
    model, optimizer, private = FILPrivacyEngine().make_private(*given, noise_multiplier=1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number, batch in enumerate(batch for _ in range(14) for batch in private):
            if number == 30:
                optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = 0.1, 0.0
            step(model, optimizer, batch)
    told = [str(each.message) for each in caught if "Weights did not move" in str(each.message)]
    assert [text[text.rindex("(") :] for text in told] == ["(0.weight, 0.bias)", "(2.weight, 2.bias)"]


def test_updates_that_round_to_nothing_are_named() -> None:
    """bfloat16 has 8 bits: a weight near 1 that is to change by a millionth stays as it is."""
    module = network().to(torch.bfloat16)
    with torch.no_grad():
        for weight in module.parameters():
            weight.fill_(1.0)
    (told,) = warned(module, 1e-6)
    assert "precision" in told


def test_an_adapter_that_is_off_gets_only_noise_and_is_named() -> None:
    module = adapted()
    module[0].on = False
    (told,) = warned(module)
    assert "only noise" in told
    assert "0.down.weight, 0.up.weight" in told
    assert "2.weight" not in told


def test_parts_of_a_step_are_not_steps() -> None:
    given: dict[str, Any] = {"poisson_sampling": False, "dataset": loader(data(40), 2)}
    engine, _, model, optimizer, private = make(**given)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number, batch in enumerate(private):  # one step of 20 parts
            optimizer.signal_skip_step(do_skip=number < 19)
            step(model, optimizer, batch)
    assert engine.ledger.steps == 1
    assert not [each for each in caught if "Weights" in str(each.message)]


@pytest.mark.parametrize("at", [3, 20])
def test_an_adapter_that_is_switched_off_during_the_run_is_named_later(at: int) -> None:
    """After it was trained: the first look saw gradients, or had ended."""
    module = adapted()
    trainable = [p for p in module.parameters() if p.requires_grad]
    given = module, torch.optim.SGD(trainable, lr=0.1), loader(data(40))
    model, optimizer, private = FILPrivacyEngine().make_private(*given, noise_multiplier=1.0)
    with pytest.warns(UserWarning, match="only noise.*up.weight"):
        for number, batch in enumerate(batch for _ in range(14) for batch in private):
            module[0].on = number < at
            step(model, optimizer, batch)


def test_empty_batches_count_as_steps() -> None:
    torch.manual_seed(0)
    module, engine = network(), FILPrivacyEngine(noise_seed=2)
    given = module, torch.optim.SGD(module.parameters(), lr=0.0), loader(data(40))
    few: dict[str, Any] = {"sample_rate": 0.02, "expected_batch_size": 1.0, "criterion": nn.CrossEntropyLoss()}
    _, _, private = engine.make_private(*given, noise_multiplier=1.0, **few)
    sizes = []
    with pytest.warns(UserWarning, match="did not move"):
        for batch in private:
            engine.train_step(*batch)
            sizes.append(len(batch[0]))
    first = next(number for number, size in enumerate(sizes) if size)
    assert sizes[first + 8] == 0  # where weights would have been compared
