"""What people write around a training loop: accumulation, averaged weights, compiled models, optimizers, samplers."""

from __future__ import annotations

import copy
import logging
import warnings
from typing import Any

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from tests.cases import DEVICE
from tests.engine.loops import C, data, loader, network
from tests.engine.ways import LOSS, start, step, trained, weights_of
from torchfil import FILPrivacyEngine


def make(module: nn.Module | None = None, batches: Any = None, **options: Any) -> Any:
    """The module, and what :func:`start` gives, with Poisson sampling and noise that can be repeated."""
    torch.manual_seed(1)
    module = module if module is not None else network()
    noise = torch.Generator(DEVICE).manual_seed(2)
    given = {"poisson_sampling": True, "seed": 3, "noise_generator": noise, "lr": 0.3, "criterion": None, **options}
    return module, *start(module, batches or loader(data(40)), "auto", **given)


def backward(model: Any, batch: Any, divisor: int = 1) -> Tensor:
    loss = LOSS(model(batch[0].to(DEVICE)), batch[1].to(DEVICE)) / divisor
    loss.backward()
    return loss


class TestAccumulation:
    """test_equivalence.py has the ledger and what is released."""

    @pytest.mark.parametrize("criterion", [None, LOSS])
    def test_a_divided_loss_is_the_loss(self, criterion: Any) -> None:
        """loss / k over k batches: the mean gradient, each example clipped to C, with the ledger of undivided ones."""
        found = []
        for divisor in (1, 2):
            module, engine, model, optimizer, batches = make(poisson_sampling=False, criterion=criterion)
            for number, batch in enumerate(batches, start=1):
                backward(model, batch, divisor)
                if number % 2 == 0 or number == len(batches):  # 5 batches: the last round is a short one
                    optimizer.step()
                    optimizer.zero_grad()
            found.append((weights_of(module), engine.ledger.sums["trace"], engine.accountant.history))
        assert torch.equal(found[0][0], found[1][0])
        assert torch.equal(found[0][1], found[1][1])
        assert found[0][2] == found[1][2]

    def test_a_step_in_the_middle_of_a_draw_is_refused(self) -> None:
        module, engine, model, optimizer, batches = make(batches=loader(data(48), 8), accumulation_steps=2)
        before, reader = weights_of(module), iter(batches)
        backward(model, next(reader))
        with pytest.raises(ValueError, match="2 batches"):
            optimizer.step()
        backward(model, next(reader))
        assert torch.equal(weights_of(module), before)
        optimizer.step()  # now it is whole
        assert engine.ledger.steps == 1

    @pytest.mark.parametrize(
        ("divisor", "options", "match"),
        [(2, {}, "accumulation_steps=2.*BatchMemoryManager"), (3, {"poisson_sampling": False}, "0.333333 times")],
    )
    def test_other_accumulation_is_refused_with_a_remedy(self, divisor: int, options: Any, match: str) -> None:
        _, engine, model, optimizer, batches = make(criterion=LOSS, **options)
        for _, batch in zip(range(2), batches, strict=False):
            backward(model, batch, divisor)
        with pytest.raises(ValueError, match=match):
            optimizer.step()
        _, engine, model, optimizer, batches = make(batches=loader(data(40), 16))
        with BatchMemoryManager(data_loader=batches, max_physical_batch_size=8, optimizer=optimizer) as parts:
            for x, y in parts:
                step(engine, model, optimizer, x, y)
        assert engine.ledger.steps == len(batches)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"accumulation_steps": 0}, "at least 1"),
            ({"accumulation_steps": 9}, "data set"),
            ({"accumulation_steps": 2, "grad_sample_mode": "hooks"}, "grad_sample_mode"),
            ({"accumulation_steps": 2, "poisson_sampling": False}, "any number"),
        ],
    )
    def test_accumulation_that_cannot_be(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            make(**options)

    def test_train_step_takes_whole_draws(self) -> None:
        _, engine, _, _, batches = make(accumulation_steps=2, criterion=LOSS)
        with pytest.raises(RuntimeError, match="accumulation_steps"):
            engine.train_step(*next(iter(batches)))

    def test_the_noise_for_an_epsilon_is_that_of_whole_draws(self) -> None:
        found = []
        for steps, size in ((3, 4), (1, 12)):
            module = network()
            target = {"target_epsilon": 4.0, "target_delta": 1e-3, "epochs": 2, "epsilon_tolerance": 1.0}
            parts = (module, torch.optim.SGD(module.parameters(), lr=0.1), loader(data(48), size))
            _, optimizer, _ = FILPrivacyEngine().make_private_with_epsilon(
                *parts, **target, max_grad_norm=C, accumulation_steps=steps
            )
            found.append(optimizer.noise_multiplier)
        assert found[0] == found[1]


def test_torch_averages_beside_the_private_model() -> None:
    """A deep copy is a plain model: nothing of the run is copied, passes over it are none of the run's."""
    module, engine, model, optimizer, batches = make()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    expected: Tensor | None = None
    for _, batch in zip(range(3), batches, strict=False):
        backward(model, batch)
        average(batch[0].to(DEVICE))
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        expected = weights_of(module) if expected is None else 0.5 * expected + 0.5 * weights_of(module)
    assert torch.allclose(weights_of(average.module), expected)
    assert engine.ledger.steps == 3
    assert [*average.module.state_dict()] == [*model.state_dict()]
    assert average.module._module is not module
    plain = copy.deepcopy(model)
    backward(plain, [part[:4] for part in data(40).tensors])
    assert all(p.grad is not None for p in plain.parameters())
    assert plain.training == model.training


@pytest.mark.parametrize("way", ["wrapped", "in place", "the private model"])
def test_compiled_models(way: str, caplog: pytest.LogCaptureFixture) -> None:
    """The original is trained, and the engine's own passes are not traced: the same weights, and the same FIL."""
    found = []
    for compiled in (False, True):
        module = network()
        given: Any = torch.compile(module) if compiled and way == "wrapped" else module
        if compiled and way == "in place":
            module.compile()
        with caplog.at_level(logging.INFO, logger="torchfil"):
            _, engine, model, optimizer, batches = make(given)
        called = torch.compile(model, backend="eager") if compiled and way == "the private model" else model
        trained(engine, called, optimizer, batches, steps=3)
        found.append((weights_of(module), engine.get_fil().value.nan_to_num()))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert ("the private model is the original" in caplog.text) == (way != "the private model")


def test_compiled_parts_and_lbfgs_are_refused() -> None:
    module: Any = network()
    with pytest.raises(ValueError, match="LBFGS"):
        make(module, optimizer=torch.optim.LBFGS(module.parameters()))
    module[0] = torch.compile(module[0])
    with pytest.raises(ValueError, match="compiled"):
        make(module)


def test_a_closure_is_called_once() -> None:
    found = []
    for closed in (False, True):
        module, engine, model, optimizer, batches = make()
        for _, batch in zip(range(3), batches, strict=False):
            optimizer.zero_grad()
            if closed:
                optimizer.step(lambda batch=batch, model=model: backward(model, batch))
            else:
                backward(model, batch)
                optimizer.step()
        found.append(weights_of(module))
        assert engine.ledger.steps == 3
    assert torch.equal(*found)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_grad_scaler_is_refused_unless_it_is_off(enabled: bool) -> None:
    module, engine, model, optimizer, batches = make(criterion=LOSS)
    scaler, before = torch.amp.GradScaler(DEVICE, enabled=enabled), weights_of(module)
    x, y = next(iter(batches))
    scaler.scale(LOSS(model(x.to(DEVICE)), y.to(DEVICE))).backward()
    if not enabled:
        scaler.step(optimizer)
        scaler.update()
        assert engine.ledger.steps == 1
        return
    with pytest.raises(RuntimeError, match="bfloat16"):
        scaler.step(optimizer)
    assert torch.equal(weights_of(module), before)
    with pytest.raises(ValueError, match="GradScaler"):
        optimizer.step()


def test_samplers() -> None:
    """Poisson sampling would train on what a subset holds out; a sampler that it replaces is told, usual ones not."""
    dataset = data(40)
    with pytest.raises(ValueError, match="Subset"):
        make(batches=DataLoader(dataset, batch_size=8, sampler=SubsetRandomSampler(range(20))))
    with pytest.warns(UserWarning, match="not used"):
        make(batches=DataLoader(dataset, batch_size=8, sampler=range(39, -1, -1)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        usual = [{"batch_size": 8}, {"batch_size": 8, "shuffle": True}]
        usual += [{"batch_sampler": BatchSampler(RandomSampler(dataset), 8, False)}]
        assert [len(make(batches=DataLoader(dataset, **each))[-1]) for each in usual] == [5, 5, 5]


def test_sampling_weights_without_poisson_sampling() -> None:
    """Each participation counts; nothing is taken off for chance."""
    sampler = WeightedRandomSampler([1.0] * 39 + [50.0], 8, replacement=False)
    with pytest.warns(UserWarning, match="participation") as told:
        parts = make(batches=DataLoader(data(40), batch_size=8, sampler=sampler), poisson_sampling=False)[1:]
    assert len(told) == 1
    for _ in range(5):
        trained(*parts)
    assert parts[0].ledger.sums["participations"][39] >= 4
