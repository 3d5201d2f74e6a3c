"""States and checkpoints that cannot be loaded change nothing; schedules go on."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from opacus.schedulers import ExponentialGradClip, ExponentialNoise
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch.utils.data import DataLoader, TensorDataset

from tests.engine.ways import LOSS, examples, mlp, start, step
from torchfil import FILPrivacyEngine
from torchfil.engine.distributed.checkpoints import write_file


def test_schedules_go_on_from_where_a_checkpoint_was_taken() -> None:
    def begin() -> Any:
        engine, model, optimizer, loader = start(mlp(), examples(), seed=1)
        return (
            engine,
            model,
            optimizer,
            loader,
            ExponentialNoise(optimizer, gamma=0.8),
            ExponentialGradClip(optimizer, gamma=0.9),
        )

    engine, model, optimizer, loader, noise, clip = begin()
    for x, y in loader:
        step(engine, model, optimizer, x, y, "hooks")
        noise.step()
        clip.step()
    file = io.BytesIO()
    engine.save_checkpoint(
        path=file, module=model, optimizer=optimizer, noise_scheduler=noise, grad_clip_scheduler=clip
    )
    file.seek(0)
    other, model, resumed, _, noise, clip = begin()
    other.load_checkpoint(path=file, module=model, optimizer=resumed, noise_scheduler=noise, grad_clip_scheduler=clip)
    assert resumed.noise_multiplier == pytest.approx(0.8**4)
    assert (resumed.noise_multiplier, resumed.max_grad_norm) == (optimizer.noise_multiplier, optimizer.max_grad_norm)


def test_a_checkpoint_that_does_not_fit_the_optimizer_changes_nothing() -> None:
    engine, model, optimizer, loader = start(mlp(), examples())
    for x, y in loader:
        step(engine, model, optimizer, x, y, "hooks")
    file = io.BytesIO()
    engine.save_checkpoint(path=file, module=model, optimizer=optimizer)
    other = FILPrivacyEngine()
    module = mlp()
    groups = [{"params": [value]} for value in module.parameters()]
    model, optimizer, loader = other.make_private(
        module,
        torch.optim.SGD(groups, lr=0.1, momentum=0.5),
        DataLoader(TensorDataset(*examples()), batch_size=6),
        poisson_sampling=False,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        criterion=LOSS,
    )
    x, y = next(iter(loader))
    step(other, model, optimizer, x, y, "hooks")
    weights, fil = [value.clone() for value in module.parameters()], other.get_fil().value
    moments = {key: value["momentum_buffer"].clone() for key, value in optimizer.original_optimizer.state.items()}
    file.seek(0)
    with pytest.raises(ValueError, match="different number of parameter groups"):
        other.load_checkpoint(path=file, module=model, optimizer=optimizer)
    file.seek(0)
    damaged = torch.load(file, weights_only=True)
    (random,) = damaged["random_state"]
    random["cpu"] = random["cpu"][:3]
    file = io.BytesIO()
    write_file(file, damaged)
    file.seek(0)
    with pytest.raises(RuntimeError, match="RNG state"):
        other.load_checkpoint(path=file, module=model)
    assert all(torch.equal(a, b) for a, b in zip(weights, module.parameters(), strict=True))
    assert torch.equal(other.get_fil().value, fil)
    state = optimizer.original_optimizer.state
    assert all(torch.equal(state[key]["momentum_buffer"], value) for key, value in moments.items())


@pytest.mark.parametrize("damage", ["pace", "accountant", "generator"])
def test_a_damaged_state_changes_nothing(damage: str) -> None:
    engine, model, optimizer, loader = start(mlp(), examples())
    states = []
    for x, y in [*loader, *loader]:  # ε counts passes
        step(engine, model, optimizer, x, y, "hooks")
        states.append(engine.state_dict())
    state = copy.deepcopy(states[0])
    if damage == "pace":
        del state["run"]["pace"]["rate"]
    elif damage == "accountant":
        del state["accountant"]["history"]
    else:
        state["run"]["generator"] = state["run"]["generator"][:3]
    fil, epsilon = engine.get_fil().value, engine.get_epsilon(1e-4)
    with pytest.raises((ValueError, RuntimeError)):
        engine.load_state_dict(state)
    assert torch.equal(engine.get_fil().value, fil)
    assert engine.get_epsilon(1e-4) == epsilon
    engine.load_state_dict(states[0])
    assert engine.get_epsilon(1e-4) < epsilon


def test_a_loaded_state_stays_what_it_was() -> None:
    engines = []
    for _ in range(2):
        engine, model, optimizer, loader = start(mlp(), examples())
        batches = iter(loader)
        step(engine, model, optimizer, *next(batches), "hooks")
        engines.append((engine, model, optimizer, batches))
    state = engines[0][0].state_dict()
    for engine, *_ in engines:
        engine.load_state_dict(state)
    epsilon = engines[1][0].get_epsilon(1e-4)
    engine, model, optimizer, batches = engines[0]
    step(engine, model, optimizer, *next(batches), "hooks")
    assert engines[1][0].get_epsilon(1e-4) == epsilon
    engine.load_state_dict(state)
    assert engine.get_epsilon(1e-4) == epsilon


def test_no_state_is_loaded_within_a_logical_batch() -> None:
    engine, model, optimizer, loader = start(mlp(), examples(), batch=12)
    state = engine.state_dict()
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=6, optimizer=optimizer) as physical:
        for k, (x, y) in enumerate(physical):
            if k == 1:
                with pytest.raises(RuntimeError, match=r"only between logical batches.*discard_partial_batch"):
                    engine.load_state_dict(state)
            step(engine, model, optimizer, x, y, "hooks")
    assert engine.leakage()["participations"].tolist() == [1] * 24
