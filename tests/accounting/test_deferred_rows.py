"""Rows that travel to a step's device and come back later hold what rows that stay hold, whoever reads when."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from torchfil.accounting.contributions import Contribution
from torchfil.accounting.ledger import Ledger
from torchfil.accounting.packed import Packing
from torchfil.accounting.path import path_additions
from torchfil.accounting.quantities import Sum
from torchfil.accounting.rows import RowTable
from torchfil.engine.epsilon import NormHistory

N, D, STEPS = 40, 3, 15
LAYOUT = {"value": Sum(), "count": Sum(dtype=torch.int32), "wide": Sum((D,)), "levels": Sum((4,), torch.uint8)}


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Says whether rows travel, as to a GPU; on a CPU they arrive when they are waited for and not before."""
    return lambda travels: monkeypatch.setattr(RowTable, "_is_far_from", lambda self, device: travels)


def contribution(
    source: torch.Generator, n: int, track: tuple[str, ...] = (), *, measured: bool = True
) -> Contribution:
    rows = (torch.rand(n, generator=source) < 0.4).nonzero().flatten()
    rows = rows[torch.randperm(len(rows), generator=source)]
    trace = 0.5 + torch.rand(len(rows), generator=source, dtype=torch.float64)
    noise = torch.full_like(trace, 0.01)
    added = {"trace": trace, "variance": noise, "certain": trace / 2, **path_additions("trace", trace, noise, 1.0)}
    if "plis" in track:
        added["plis"] = torch.rand(len(rows), D, generator=source, dtype=torch.float64)
    return Contribution(rows, trace, measured, added if measured else {}, D + 1 if "plis" not in track else None)


def assert_equal(ours: Any, theirs: Any) -> None:
    """Bit for bit, also where both are NaN."""
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name].contiguous().view(torch.uint8), value.contiguous().view(torch.uint8)), name


@pytest.mark.parametrize("where", ["cpu", "folder"])
@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("chosen", [None, [31, 4, 17]])
@pytest.mark.parametrize("track", [(), ("plis",)])
def test_ledgers_are_equal(
    far: Callable[[bool], None],
    tmp_path: Path,
    where: str,
    lazy: bool,
    chosen: list[int] | None,
    track: tuple[str, ...],
) -> None:
    def booked(travels: bool) -> tuple[Ledger, list[Tensor]]:
        far(travels)
        source = torch.Generator().manual_seed(0)
        some = {"plis": torch.tensor(chosen)} if chosen and track else None
        place: Any = tmp_path if where == "folder" else "cpu"
        ledger, seen = Ledger(N, D, track=track, device=place, lazy=lazy, chosen=some), []
        for step in range(STEPS):
            batches = [contribution(source, N, track, measured=step % 5 != 3)]
            if step % 4 == 2:  # a logical batch in two parts
                whole = batches[0]
                ends = (slice(0, len(whole.rows) // 2), slice(len(whole.rows) // 2, None))
                batches = [
                    Contribution(
                        whole.rows[end],
                        whole.squared_norm[end],
                        whole.measured,
                        {name: value[end] for name, value in whole.additions.items()},
                        whole.num_coordinates,
                    )
                    for end in ends
                ]
            ledger.add(*batches)
            if step % 6 == 1:  # a read in between
                seen.append(ledger.sums["trace"].clone())
            if step == 8:  # a run that is resumed
                ledger = Ledger.from_state_dict(ledger.state_dict(), place, lazy=lazy)
        return ledger, seen

    (ours, seen), (theirs, expected) = booked(True), booked(False)
    assert all(torch.equal(one, other) for one, other in zip(seen, expected, strict=True))
    assert_equal(ours.state_dict()["sums"], theirs.state_dict()["sums"])
    assert_equal(dict(ours.sums), dict(theirs.sums))


@pytest.mark.parametrize("own_steps", [False, True])
@pytest.mark.parametrize("lazy", [False, True])
def test_norm_histories_are_equal(far: Callable[[bool], None], lazy: bool, own_steps: bool) -> None:
    def booked(travels: bool) -> NormHistory:
        far(travels)
        source = torch.Generator().manual_seed(0)
        history = NormHistory(N, lazy=lazy, own_steps=own_steps)
        for step in range(STEPS):
            if step == 6:
                history.grow(N + 7)
            batch = contribution(source, N if step < 6 else N + 7)
            history.step(batch.rows, batch.squared_norm.float() / 2, 1.0 if step < 9 else 0.8, 0.1)
            if step % 4 == 1:
                history.set_ratios(torch.arange(0, N, 3), torch.linspace(0.1, 1, len(range(0, N, 3))))
            if step == 10:
                resumed = NormHistory(N + 7, lazy=lazy, own_steps=own_steps)
                resumed.load_state_dict(history.state_dict())
                history = resumed
        return history

    ours, theirs = booked(True), booked(False)
    assert torch.equal(ours.counts_of(torch.arange(N + 7)), theirs.counts_of(torch.arange(N + 7)))
    for name, value in theirs.state_dict().items():
        found = ours.state_dict()[name]
        assert torch.equal(found, value) if isinstance(value, Tensor) else found == value, name


def pending(lazy: bool = False) -> tuple[RowTable, RowTable]:
    """A table with a booking under way, and what it must read: rows 2 and 5 with 1, row 5 then with 2."""
    table, expected = (RowTable(LAYOUT, 8, lazy=lazy, only_added=["wide"]) for _ in range(2))
    for examples in (torch.tensor([5, 2]), torch.tensor([5])):
        with table.rows_of(examples, torch.device("cpu")) as rows:
            for name in LAYOUT:
                rows.add(name, torch.ones(len(examples), *LAYOUT[name].shape))
    for name in LAYOUT:
        values = torch.zeros(8, *LAYOUT[name].shape)
        values[2], values[5] = 1, 2
        expected[name] = values
    return table, expected


def forked(table: RowTable) -> dict[str, Tensor]:
    """As a child process sees it, which must not wait for anything."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        sent = pickle.dumps((table._arrive is None, dict(table)))
        os.write(writing, sent)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        is_settled, values = pickle.load(pipe)
    os.waitpid(child, 0)
    assert is_settled
    return dict(values)


READERS: dict[str, Callable[[RowTable], Any]] = {
    "items": dict,
    "own": lambda table: own_rows(table, table.give(torch.arange(8))),
    "kept": lambda table: {name: table.kept(name) for name in table},
    "at": lambda table: {name: table.at(name, torch.arange(8)) for name in table},
    "copied": lambda table: dict(copy.deepcopy(table)),
    "pickled": lambda table: dict(pickle.loads(pickle.dumps(table))),
    "forked": forked,
    "extended": lambda table: extended(table),
    "rows": lambda table: dict(rows_now(table)),
}


def own_rows(table: RowTable, places: Tensor) -> dict[str, Tensor]:
    return {name: table.own(name)[places] for name in table}


def extended(table: RowTable) -> dict[str, Tensor]:
    table.extend(20)
    return {name: table[name][:8] for name in table}


def rows_now(table: RowTable) -> dict[str, Tensor]:
    with table.rows_of(torch.arange(8)) as rows:
        return {**{name: rows[name].clone() for name in rows}, "wide": table["wide"]}


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("reader", READERS)
def test_every_reader_sees_what_was_booked(far: Callable[[bool], None], reader: str, lazy: bool) -> None:
    far(True)
    table, expected = pending(lazy)
    assert table._arrive is not None
    far(False)
    found = READERS[reader](table)
    for name in LAYOUT:
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("travels", [False, True])
@pytest.mark.parametrize("lazy", [False, True])
def test_what_was_booked_before_is_not_lost_by_writers(far: Callable[[bool], None], lazy: bool, travels: bool) -> None:
    far(travels)
    table, expected = pending(lazy)
    for each in (table, expected):
        each["count"] = torch.arange(8)
        each.keep_only(torch.arange(8) != 2)
    assert_equal(dict(table), dict(expected))
    table, expected = pending(lazy)
    state = {name: values + 1 for name, values in expected.items()}
    table.load(state, torch.ones(8, dtype=torch.bool))
    assert_equal(dict(table), state)


@pytest.mark.parametrize("travels", [False, True])
@pytest.mark.parametrize("lazy", [False, True])
def test_an_exception_leaves_the_table_as_it_was(far: Callable[[bool], None], lazy: bool, travels: bool) -> None:
    far(travels)
    table, expected = pending(lazy)
    with pytest.raises(RuntimeError), table.rows_of(torch.tensor([7, 5]), torch.device("cpu")) as rows:
        rows.add("value", torch.ones(2))
        rows.add("wide", torch.ones(2, D))
        rows.add("wide", torch.ones(2, D + 1))
    assert_equal(dict(table), dict(expected))
    with table.rows_of(torch.tensor([7]), torch.device("cpu")) as rows:
        rows.add("value", torch.ones(1))
    assert table["value"].tolist() == [0, 0, 1, 0, 0, 2, 0, 1]


@pytest.mark.parametrize("lazy", [False, True])
def test_a_batch_of_nobody(far: Callable[[bool], None], lazy: bool) -> None:
    far(True)
    table, expected = pending(lazy)
    with table.rows_of(torch.zeros(0, dtype=torch.long), torch.device("cpu")) as rows:
        rows.add("value", torch.zeros(0))
        rows.add("wide", torch.zeros(0, D))
    assert_equal(dict(table), dict(expected))


@pytest.mark.parametrize(
    ("layout", "tables"),
    [
        (LAYOUT, 1),
        ({name: LAYOUT[name] for name in ("value", "count", "wide")}, 2),
        ({"a": Sum(dtype=torch.int32), "b": Sum((3,), torch.uint8), "c": Sum((2, 2), torch.float32)}, 2),
    ],
)
def test_packed_numbers_take_their_bytes_and_do_not_overlap(layout: dict[str, Sum], tables: int) -> None:
    packing = Packing(layout)
    assert len(packing.words) == tables
    assert sum(word.itemsize * count for word, count in packing.words) == packing.row_bytes
    made = packing.tables(torch.zeros(5 * packing.row_bytes, dtype=torch.uint8))
    for number, name in enumerate(layout, start=1):
        packing.view(name, made).fill_(number)
    for number, (name, each) in enumerate(layout.items(), start=1):
        values = packing.view(name, made)
        assert values.shape == (5, *each.shape)
        assert values.dtype == each.dtype
        assert bool((values == number).all()), name
