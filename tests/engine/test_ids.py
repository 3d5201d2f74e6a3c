"""The examples' ids, from the data set to the table."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.engine.loops import data, loader, make, step


def train_on(made: Any) -> Any:
    """A pass in which every second batch is skipped, and copied; how often each example was in a batch, by value."""
    engine, _, model, optimizer, private = made
    inputs = private.plain_dataset.tensors[0]
    counts = torch.zeros(len(inputs), dtype=torch.long)
    for k, batch in enumerate(private):
        x, y = type(batch)(part.clone() for part in batch) if k % 4 else batch
        if k % 2 == 0:
            step(model, optimizer, (x, y))
            for row in x.cpu():
                counts[int((inputs == row).all(dim=1).nonzero())] += 1
    return engine.ledger.sums["participations"].cpu(), counts


def test_ids_follow_their_examples() -> None:
    """Also past batches that are skipped, and through copies that other code makes of a batch."""
    assert torch.equal(*train_on(make(data(60))))


@pytest.mark.slow
def test_workers_that_are_spawned() -> None:
    pinned = torch.cuda.is_available()
    plain = loader(data(60), 8, num_workers=1, multiprocessing_context="spawn", pin_memory=pinned)
    assert torch.equal(*train_on(make(plain)))


def test_batches_touched_by_another_thread_do_not_become_current() -> None:
    """Workers' batches are pinned ahead of time in a thread of its own."""
    engine, _, model, optimizer, private = make(data(60))
    batches = iter(private)
    now, later = next(batches), next(batches)
    x, y = now
    thread = threading.Thread(target=lambda: list(later))
    thread.start()
    thread.join()
    step(model, optimizer, (x, y))
    seen = engine.ledger.sums["participations"].nonzero().flatten().tolist()
    assert seen == sorted(now._ids) != sorted(later._ids)


class Bag:
    def __init__(self, samples: Any) -> None:
        self.x, self.y = (torch.stack(part) for part in zip(*samples, strict=True))


def _frozen(samples: Any) -> Any:
    return frozenset(range(len(samples)))


def test_custom_batches_need_the_main_process() -> None:
    options: dict[str, Any] = {"poisson_sampling": False, "batch_to_inputs": lambda bag: (bag.x, bag.y)}
    engine, _, model, optimizer, private = make(DataLoader(data(40), batch_size=8, collate_fn=Bag), **options)
    for bag in private:
        step(model, optimizer, (bag.x, bag.y))
    assert engine.ledger.sums["participations"].tolist() == [1] * 40
    *_, private = make(DataLoader(data(40), batch_size=8, collate_fn=_frozen, num_workers=1), **options)
    with pytest.raises(TypeError, match="worker"):
        next(iter(private))
