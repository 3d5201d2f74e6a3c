"""What is called after every so many private steps."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torchfil import FILPrivacyEngine


def private(batch_size=4):
    data = TensorDataset(torch.randn(16, 3), torch.randn(16, 1))
    model = nn.Linear(3, 1)
    engine = FILPrivacyEngine(noise_seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "criterion": nn.MSELoss()}
    return engine, *engine.make_private(model, optimizer, DataLoader(data, batch_size=batch_size), **options)


@pytest.mark.parametrize("way", ["loop", "train_step", "physical batches"])
def test_it_is_called_after_whole_steps_whose_numbers_are_booked(way):
    from opacus.utils.batch_memory_manager import BatchMemoryManager

    engine, model, optimizer, loader = private()
    seen = []
    stop = engine.call_every(2, lambda steps: seen.append((steps, engine.ledger.steps)))
    for _ in range(2):
        if way == "physical batches":
            with BatchMemoryManager(data_loader=loader, max_physical_batch_size=2, optimizer=optimizer) as parts:
                for x, y in parts:
                    optimizer.zero_grad()
                    nn.functional.mse_loss(model(x), y).backward()
                    optimizer.step()
            continue
        for x, y in loader:
            if way == "train_step":
                engine.train_step(x, y)
                continue
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    assert seen == [(2, 2), (4, 4), (6, 6), (8, 8)]
    stop()
    for x, y in loader:
        engine.train_step(x, y)
    assert len(seen) == 4


def test_a_number_of_steps_below_one_is_refused():
    with pytest.raises(ValueError, match="steps=0"):
        private()[0].call_every(0, print)


def test_an_error_of_the_user_ends_the_loop_after_the_step():
    engine, _, _, loader = private()

    def stop_early(steps):
        raise PatienceError

    class PatienceError(Exception):
        pass

    engine.call_every(3, stop_early)
    with pytest.raises(PatienceError):
        for x, y in loader:
            engine.train_step(x, y)
    assert engine.ledger.steps == 3
