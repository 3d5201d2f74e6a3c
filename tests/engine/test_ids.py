"""The examples' ids, from the data set to the table."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from torch.utils.data import DataLoader

from tests.engine.loops import data, loader, train
from tests.engine.made import make, step
from torchfil.report import load


def train_on(made: Any, *, skip: int = 0, copied: bool = False) -> Any:
    """A pass in which every second batch may be skipped; how often each example was in a batch by its values."""
    engine, _, model, optimizer, private = made
    inputs = private.plain_dataset.tensors[0]
    counts = torch.zeros(len(inputs), dtype=torch.long)
    for k, batch in enumerate(private):
        x, y = type(batch)(part.clone() for part in batch) if copied else batch
        if k % 2 < 2 - skip:
            step(model, optimizer, (x, y))
            for row in x.cpu():
                counts[int((inputs == row).all(dim=1).nonzero())] += 1
    return engine.ledger.sums["participations"].cpu(), counts


@pytest.mark.parametrize("options", [{}, {"skip": 1}, {"copied": True}])
def test_ids_follow_their_examples(options: dict[str, Any]) -> None:
    """Also past batches that are skipped, and through copies that other code makes of a batch."""
    assert torch.equal(*train_on(make(data(60)), **options))


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


def test_ids_are_answered_as_asked() -> None:
    engine = train(data(40), steps=4).engine
    for ids in ([40], [-1], [1.5], ["a"]):
        with pytest.raises(KeyError, match="0 to 39"):
            engine.get_fil(ids)
    everything = engine.get_fil().value
    assert torch.equal(engine.get_fil([3, 1, 3]).value, everything[[3, 1, 3]])
    assert torch.equal(engine.get_fil(torch.tensor([5])).value, everything[[5]])
    assert list(engine.leakage([3, 1, 3]).index) == [3, 1, 3]
    assert engine.get_fil([]).value.shape == (0,)
    sides = pandas.Series({i: "left" if i % 2 else "right" for i in range(40)})
    assert engine.group_leakage(sides)["count"].tolist() == [20, 20]

    keys = [f"patient-{i}" for i in range(40)]
    for id_of in (keys, lambda i: f"patient-{i}"):
        named = train(data(40), steps=4, id_of=id_of).engine
        assert torch.equal(named.get_fil(["patient-7"]).value, everything[[7]])
        assert list(named.leakage().index) == keys
        with pytest.raises(KeyError, match="keys of id_of"):
            named.get_fil([7])


@pytest.mark.parametrize("numbers", [torch.arange(100, 140), np.arange(100, 140)])
def test_numbers_of_tensors_and_arrays_are_plain_ones(numbers: Any, tmp_path: Path) -> None:
    engine = train(data(40), steps=2, id_of=numbers).engine
    assert engine.leakage().index.tolist() == list(range(100, 140))
    assert torch.equal(engine.get_fil([107]).value, engine.get_fil(numbers[7:8]).value)
    assert load(engine.save_run(tmp_path / "run.parquet", delta=1e-4)).ids.dtype == np.int64


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
    assert len(private.dataset) == 40  # which passes the data set through
    assert torch.equal(private.dataset[3][0], private.dataset.tensors[0][3])
    *_, private = make(DataLoader(data(40), batch_size=8, collate_fn=_frozen, num_workers=1), **options)
    with pytest.raises(TypeError, match="worker"):
        next(iter(private))
