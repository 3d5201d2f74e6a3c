"""The examples' ids, from the data set to the table."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from tests.cases import DEVICE
from tests.engine.loops import data, loader, train
from tests.engine.made import make, step
from torchfil.report import load


def test_a_skipped_batch_does_not_shift_the_ids() -> None:
    dataset = data(60)
    engine, _, model, optimizer, private = make(dataset)
    used: list[int] = []
    for k, batch in enumerate(private):
        x, y = batch
        if k % 2:
            continue
        step(model, optimizer, (x, y))
        used += [int((dataset.tensors[0] == row).all(dim=1).nonzero()) for row in x]
    counts = torch.bincount(torch.tensor(used), minlength=60)
    assert torch.equal(engine.ledger.sums["participations"].cpu(), counts)


def test_batches_touched_by_another_thread_do_not_become_current() -> None:
    """Workers' batches are pinned ahead of time in a thread of its own."""
    dataset = data(60)
    engine, _, model, optimizer, private = make(dataset)
    batches = iter(private)
    now, later = next(batches), next(batches)
    x, y = now
    thread = threading.Thread(target=lambda: list(later))
    thread.start()
    thread.join()
    step(model, optimizer, (x, y))
    seen = engine.ledger.sums["participations"].nonzero().flatten().tolist()
    assert seen == sorted(now._ids)
    assert seen != sorted(later._ids)


@pytest.mark.slow
def test_workers_that_are_spawned() -> None:
    dataset = data(60)
    engine, _, model, optimizer, private = make(
        loader(dataset, 8, num_workers=1, multiprocessing_context="spawn", pin_memory=torch.cuda.is_available())
    )
    used: list[int] = []
    for batch in private:
        x, y = batch
        used += [int((dataset.tensors[0] == row.cpu()).all(dim=1).nonzero()) for row in x]
        step(model, optimizer, (x, y))
    counts = torch.bincount(torch.tensor(used), minlength=60)
    assert torch.equal(engine.ledger.sums["participations"].cpu(), counts)


class Growing(Dataset[Any]):
    def __init__(self, n: int) -> None:
        self.x, self.y = data(n).tensors
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        return self.x[i], self.y[i]


def test_a_data_set_whose_length_changed_is_refused() -> None:
    dataset = Growing(40)
    _, _, model, optimizer, private = make(dataset)
    step(model, optimizer, next(iter(private)))
    dataset.n = 30
    with pytest.raises(ValueError, match=r"had 40 examples when make_private was called and has 30 now"):
        next(iter(private))


class TestIds:
    def test_out_of_range(self) -> None:
        run = train(data(40), steps=2)
        for ids in ([40], [-1], [1.5], ["a"]):
            with pytest.raises(KeyError, match=r"unknown example ids .*; ids are 0 to 39"):
                run.engine.get_fil(ids)

    def test_duplicates_are_answered_as_often_as_asked_in_the_order_asked(self) -> None:
        run = train(data(40), steps=4)
        everything = run.engine.get_fil().value
        assert torch.equal(run.engine.get_fil([3, 1, 3]).value, everything[[3, 1, 3]])
        assert torch.equal(run.engine.get_fil(torch.tensor([5])).value, everything[[5]])
        assert list(run.engine.leakage([3, 1, 3]).index) == [3, 1, 3]
        assert run.engine.get_fil([]).value.shape == (0,)

    def test_own_keys(self) -> None:
        keys = [f"patient-{i}" for i in range(40)]
        by_column = train(data(40), steps=4, id_of=keys).engine
        by_function = train(data(40), steps=4, id_of=lambda i: f"patient-{i}").engine
        plain = train(data(40), steps=4).engine
        assert torch.equal(by_column.get_fil(["patient-7"]).value, plain.get_fil([7]).value)
        assert torch.equal(by_function.get_fil(["patient-7"]).value, plain.get_fil([7]).value)
        assert list(by_column.leakage().index) == keys
        with pytest.raises(KeyError, match=r"unknown example ids \[7\]; ids are the keys of id_of"):
            by_column.get_fil([7])

    def test_keys_must_be_one_each_and_distinct(self) -> None:
        with pytest.raises(ValueError, match="id_of gives 39 keys for 40 examples"):
            make(id_of=list(range(39)))
        with pytest.raises(ValueError, match="id_of gives 'x' to more than one example"):
            make(id_of=["x"] * 40)
        for sevens in (torch.full((40,), 7), [torch.tensor(7)] * 40, np.full(40, 7)):
            with pytest.raises(ValueError, match="id_of gives 7 to more than one example"):
                make(id_of=sevens)

    @pytest.mark.parametrize("numbers", [torch.arange(100, 140), np.arange(100, 140)])
    def test_numbers_of_tensors_and_arrays_are_plain_ones(self, numbers: Any, tmp_path: Path) -> None:
        engine = train(data(40), steps=2, id_of=numbers).engine
        assert engine.leakage().index.tolist() == list(range(100, 140))
        assert torch.equal(engine.get_fil([107]).value, engine.get_fil(numbers[7:8]).value)
        assert load(engine.save_run(tmp_path / "run.parquet", delta=1e-4)).ids.dtype == np.int64

    def test_groups_of_a_series(self) -> None:
        engine = train(data(40), steps=2).engine
        sides = {i: "left" if i % 2 else "right" for i in range(40)}
        series = pandas.Series(sides)
        assert engine.group_leakage(series)["count"].tolist() == [20, 20]


def test_batches_from_elsewhere_are_refused() -> None:
    _, _, model, optimizer, _ = make()
    x, y = (t.to(DEVICE) for t in data(8).tensors)
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match="did not come from the loader that make_private returned"):
        optimizer.step()


def test_a_changed_batch_is_refused() -> None:
    _, _, model, optimizer, private = make()
    x, y = (t.to(DEVICE) for t in next(iter(private)))
    F.cross_entropy(model(x[1:]), y[1:]).backward()
    with pytest.raises((RuntimeError, ValueError), match="Call the model once per batch|disagree on the number"):
        optimizer.step()


def test_custom_batches_need_the_main_process() -> None:
    class Bag:
        def __init__(self, samples: Any) -> None:
            self.x = torch.stack([s[0] for s in samples])
            self.y = torch.stack([s[1] for s in samples])

    dataset = data(40)
    options: dict[str, Any] = {"poisson_sampling": False, "batch_to_inputs": lambda bag: (bag.x, bag.y)}
    engine, _, model, optimizer, private = make(DataLoader(dataset, batch_size=8, collate_fn=Bag), **options)
    for bag in private:
        step(model, optimizer, (bag.x, bag.y))
    assert engine.ledger.sums["participations"].tolist() == [1] * 40
    *_, private = make(DataLoader(dataset, batch_size=8, collate_fn=_bag, num_workers=1), **options)
    with pytest.raises(TypeError, match="cannot carry example ids out of a worker"):
        next(iter(private))


def _bag(samples: Any) -> Any:
    return frozenset(range(len(samples)))


def test_a_batch_that_other_code_has_copied_keeps_its_ids() -> None:
    engine, _, model, optimizer, private = make(data(40))
    seen = torch.zeros(40, dtype=torch.long)
    for batch in private:
        copied = type(batch)(part.clone() for part in batch)
        seen[batch._ids] += 1
        step(model, optimizer, copied)
    assert engine.leakage_columns()[1]["participations"] == seen.tolist()


def test_the_loader_passes_the_data_set_through() -> None:
    dataset = Growing(40)
    *_, private = make(dataset)
    assert len(private.dataset) == 40
    assert private.dataset.n == 40
    assert torch.equal(private.dataset[3][0], dataset.x[3])
