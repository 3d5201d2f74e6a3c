"""The ledger: steps booked together or one by one, by one process or in parts; coordinates."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.loops import data, train
from torchfil.accounting import ledger as ledgers
from torchfil.accounting.ids import ExampleIds
from torchfil.accounting.leakage import Leakage
from torchfil.accounting.ledger import Contribution, Ledger
from torchfil.accounting.norms import NormHistory
from torchfil.accounting.quantities import QuestionSpec, available_quantities
from torchfil.accounting.rows import RowTable
from torchfil.accounting.sums import Column, Sum
from torchfil.engine.distributed.ranks import whole_ledger

N, D, STEPS = 40, 3, 45
ROWS = torch.tensor([7, 5])
ASKED = {"age": QuestionSpec(("old", "young"))}
ALL = tuple(name for name in available_quantities() if name != "trace")
SHAPES = {"diagonal": (D,), "fim": (D, D), "plis": (D,)}


def batch(
    source: torch.Generator, step: int, track: tuple[str, ...] = ALL, *, n: int = N
) -> Contribution:
    """A Poisson draw of a third of all examples, some in every few steps.

    Measured, skipped at random or paused.
    """
    rows = (torch.rand(n, generator=source) < 0.35).nonzero().flatten()
    rows = rows[torch.randperm(len(rows), generator=source)]
    size = len(rows)

    def drawn(*shape: int) -> Tensor:
        return torch.rand(size, *shape, generator=source, dtype=torch.float64)

    trace, noise = 0.5 + drawn(), 0.01 * drawn()
    if step == 9:  # a step without noise
        trace = torch.full_like(trace, math.inf)
    column = {"value": trace, "variance": noise, "noise": noise, "freedom": 1 + drawn()}
    if step % 4:  # else the limit of the error is unknown
        column |= {"certain": trace / 2, "limit": noise}
    columns: dict[str, Column] = {"trace": column, "question age": {"value": drawn(2)}}
    for name, shape in SHAPES.items():
        if name in track:
            columns[name] = {"value": drawn(*shape)}
    if "diagonal" in track:
        columns["diagonal"]["variance"] = drawn(D)
    measured = step % 11 != 5
    if step % 7 == 3 or not measured:
        columns = {}
    own: Any = None if track else torch.randint(1, 9, (size,), generator=source)
    rate = 1.0 if step % 3 == 0 else 0.5
    return Contribution(rows, trace.float(), measured, columns, rate, own)


def part_of(whole: Contribution, rows: Any) -> Contribution:
    """A part of a logical batch."""
    own = whole.num_coordinates
    return replace(
        whole,
        rows=whole.rows[rows],
        squared_norm=whole.squared_norm[rows],
        columns={
            name: {part: value[rows] for part, value in column.items()}
            for name, column in whole.columns.items()
        },
        num_coordinates=own[rows] if isinstance(own, Tensor) else own,
    )


def assert_equal(ours: Any, theirs: Any) -> None:
    """Bit for bit, also where both are NaN."""
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(
            ours[name].contiguous().view(torch.uint8), value.contiguous().view(torch.uint8)
        ), name


@pytest.mark.parametrize("track", [(), ALL])
def test_ledgers_are_equal(track: tuple[str, ...]) -> None:
    def booked(*, together: bool) -> tuple[Ledger, list[Tensor]]:
        source = torch.Generator().manual_seed(0)
        ledger, seen = Ledger(N, D, track=track, questions=ASKED), []
        for step in range(STEPS):
            whole = batch(source, step, track)
            middle = len(whole.rows) // 2 if step % 4 == 2 else 0
            ledger.add(part_of(whole, slice(0, middle)), part_of(whole, slice(middle, None)))
            if not together:
                ledger.flush()
            if step % 13 == 12:  # a read in between
                seen.append(ledger.sums["trace"].clone())
            if step == 20:  # a run that is resumed
                ledger = Ledger.from_state_dict(ledger.state_dict())
        return ledger, seen

    (ours, seen), (theirs, expected) = booked(together=True), booked(together=False)
    assert all(torch.equal(one, other) for one, other in zip(seen, expected, strict=True))
    assert int(theirs.sums["participations"].max()) > 10
    assert_equal(ours.state_dict()["sums"], theirs.state_dict()["sums"])
    assert_equal(dict(ours.sums), dict(theirs.sums))


def by_hand(name: str, column: Column, place: int, rate: float) -> dict[str, Tensor | float]:
    """What one example adds to its sums, where X is finite."""
    x = column["value"][place]
    v = column["variance"][place] if "variance" in column else 0
    variance = x**2 * (1 - rate) / rate**2 + v / rate
    added: dict[str, Tensor | float] = {name: x / rate}
    if name not in ("fim", "plis"):
        added["variance" if name == "trace" else f"{name}_variance"] = variance
    if name == "trace":
        known = rate == 1 and "limit" in column
        added["variance_spread"] = variance**2 / (1 if rate < 1 else column["freedom"][place])
        added["certain"] = column["certain"][place] if known else 0.0
        added["variance_limit"] = column["limit"][place] if known else math.inf
    if name in ("trace", "question age"):
        noise = column["noise"][place] if name == "trace" else 0.0
        added[f"{name}_square"] = (x**2 - noise).clamp(min=0) / rate
        added[f"{name}_measured"] = 1.0
    return added


def test_sums_are_those_of_a_loop() -> None:
    """Against a plain Python loop, without rounds and tables."""
    source, ledger = torch.Generator().manual_seed(1), Ledger(N, D, track=ALL, questions=ASKED)
    sums = {
        name: torch.zeros(N, *each.shape, dtype=torch.float64)
        for name, each in ledger.sums.layout.items()
    }
    for step in range(STEPS):
        if step == 9:
            continue
        each = batch(source, step)
        ledger.add(each)
        for place, row in enumerate(each.rows.tolist()):
            sums["participations"][row] += 1
            sums["missed"][row] += not each.measured
            sums["squared_norm"][row] += each.squared_norm[place]
            sums["num_coordinates"][row] = D
            for name, column in each.columns.items():
                for total, number in by_hand(name, column, place, each.rate).items():
                    sums[total][row] += number
            if each.measured and not each.columns:
                sums["variance_limit"][row] = math.inf
    for name, value in sums.items():
        if not name.endswith(("_last", "_changes")):  # see test_path
            rounding = 1e-12 if ledger.sums[name].dtype == torch.float64 else 1e-5
            torch.testing.assert_close(
                ledger.sums[name].double(), value, rtol=rounding, atol=0, msg=name
            )


@pytest.mark.parametrize("own_steps", [False, True])
def test_norm_histories_are_equal(own_steps: bool) -> None:
    def booked(*, together: bool) -> NormHistory:
        source = torch.Generator().manual_seed(0)
        history = NormHistory(N, own_steps=own_steps)
        for step in range(STEPS):
            if step == 6:
                history.grow(N + 7)
            each = batch(source, step, n=N if step < 6 else N + 7)
            history.step(each.rows, each.squared_norm / 2, 1.0 if step < 29 else 0.8, 0.1)
            if step % 4 == 1:
                history.set_ratios(
                    torch.arange(0, N, 3), torch.linspace(0.1, 1, len(range(0, N, 3)))
                )
            if not together:
                history.enter()
            if step == 10:
                resumed = NormHistory(N + 7, own_steps=own_steps)
                resumed.load_state_dict(history.state_dict())
                history = resumed
        return history

    ours, theirs = booked(together=True), booked(together=False)
    assert torch.equal(ours.counts_of(torch.arange(N + 7)), theirs.counts_of(torch.arange(N + 7)))
    for name, value in theirs.state_dict().items():
        found = ours.state_dict()[name]
        assert torch.equal(found, value) if isinstance(value, Tensor) else found == value, name


def joined(value: Tensor) -> Tensor:
    """Brings together what one rank has, last norms first: the order in which ranks tell does not
    matter.
    """
    return value.flip(0)


@pytest.mark.parametrize("every", [1, 4, 100])
def test_entered_later_is_the_same(every: int) -> None:
    generator = torch.Generator().manual_seed(0)
    plain, shared = NormHistory(30), NormHistory(30, exchange=joined, every=every)
    for step in range(17):
        rows = (torch.rand(30, generator=generator) < 0.3).nonzero().flatten()
        ratio = torch.rand(len(rows), generator=generator)
        noise = 1.0 if step < 9 else 0.8  # the noise changes on the way
        for history in (plain, shared):
            history.step(rows, ratio, noise, 0.3)
            if step in (3, 16):
                history.set_ratios(torch.arange(30), torch.linspace(0.1, 1, 30) / (step + 1))
    assert shared.steps == 17
    assert not shared.is_complete
    shared.enter()
    assert shared.is_complete
    entered = shared.state_dict()
    for name, value in plain.state_dict().items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(entered[name])), name


@pytest.mark.parametrize(
    ("track", "expected"), [((), 0), ("diagonal", 12 * 5), ("plis", 8 * 5), ("fim", 8 * 25)]
)
def test_bytes_per_example_are_stated_and_met(track: str, expected: int) -> None:
    kept = tuple(track) if isinstance(track, tuple) else (track,)
    assert Ledger.bytes_needed(1, 5, kept) + NormHistory.bytes_needed(1) == 136 + expected
    engine = train(data(60), steps=1, track=track, estimator="exact").engine
    assert engine.ledger.sums.num_bytes + engine._training.run.history.num_bytes == 60 * (
        136 + expected
    )


def test_levels_of_noise_are_rounded_down() -> None:
    """A norm of r times the limit under noise σ counts as a σ/r of the grid that is no larger, and
    the next is.
    """
    history, ratio = NormHistory(N), torch.tensor([0.3, 0.7, 1.0])
    history.step(torch.arange(3), ratio, 0.9, 0.1)
    levels, grid = history.levels_of(ratio), torch.tensor(history.multipliers())
    assert (grid[levels] <= 0.9 / ratio * (1 + 1e-4)).all()
    assert (grid[levels + 1] > 0.9 / ratio * (1 - 1e-4)).all()


def test_the_queue_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledgers, "BYTES_QUEUED", 8 * 1000 * 5)
    ledger, queued = Ledger(N, 100, track=("plis",)), []
    for _ in range(20):
        ledger.add(
            Contribution(
                torch.arange(10),
                torch.ones(10),
                columns={"plis": {"value": torch.zeros(10, 100).double()}},
            )
        )
        queued.append(len(ledger._queue))
    assert 4 <= max(queued) <= 5


def test_what_is_refused_or_interrupted_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(N, D, track=("plis",))
    good, bad = (
        Contribution(ROWS, torch.ones(2), columns={"plis": {"value": torch.ones(2, d)}})
        for d in (D, D + 1)
    )
    ledger.add(good)
    with pytest.raises(ValueError, match="plis"):
        ledger.add(good, bad)
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "_column", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            ledger.flush()
        assert not ledger._sums["participations"].any()
    nobody = torch.zeros(0, dtype=torch.long), torch.zeros(0)
    ledger.add(Contribution(*nobody))
    assert ledger.sums["participations"].nonzero().flatten().tolist() == [5, 7]
    assert ledger.sums["plis"].sum() == 2 * D
    history = NormHistory(N)
    history.step(*nobody, 1.0, 0.1)
    assert history.counts_of(torch.arange(N)).sum(dim=1).tolist() == [1] * N
    table = RowTable({"value": Sum(), "count": Sum((2,), torch.int32)}, 8)
    with pytest.raises(RuntimeError), table.rows_of(ROWS) as rows:
        rows["value"].add_(1.0)
        raise RuntimeError
    assert not table["value"].any()


class Together:
    """All parts at hand: a value of the first stands for those of the same name."""

    def __init__(self, parts: list[Ledger]) -> None:
        self.parts = parts

    def each(self, value: Tensor) -> Tensor:
        name = next(
            name for name, held in self.parts[0].sums.items() if held.data_ptr() == value.data_ptr()
        )
        return torch.stack([part.sums[name] for part in self.parts])

    def sum(self, value: Tensor) -> Tensor:
        return self.each(value).sum(dim=0)

    def maximum(self, value: Tensor) -> Tensor:
        return self.each(value).amax(dim=0)


@pytest.mark.parametrize("moving", [False, True])
def test_a_ledger_in_parts_is_that_of_one_process(moving: bool) -> None:
    """Examples that move from part to part keep their sums and have no narrower intervals."""
    source, size = torch.Generator().manual_seed(1), 3
    alone, parts = Ledger(N, D), [Ledger(N, D) for _ in range(size)]
    for _ in range(STEPS):
        rows = (torch.rand(N, generator=source) < 0.5).nonzero().flatten()
        trace = 1 + torch.rand(len(rows), generator=source, dtype=torch.float64)
        noise = torch.full_like(trace, 0.01)
        columns = {"trace": {"value": trace, "variance": noise, "noise": noise}}
        owner = torch.randint(size, (len(rows),), generator=source) if moving else rows % size
        for ledger, mask in [
            (alone, owner >= 0),
            *((part, owner == k) for k, part in enumerate(parts)),
        ]:
            ledger.add(part_of(Contribution(rows, trace, True, columns), mask))
    whole = whole_ledger(parts[0], Together(parts))
    assert whole.sums.keys() == alone.sums.keys()
    for name, value in alone.sums.items():
        if not (moving and name in ("trace_changes", "trace_last")):
            tolerance = 1e-6 if moving and value.dtype == torch.float32 else 1e-12  # of errors
            torch.testing.assert_close(whole.sums[name], value, rtol=tolerance, atol=0, msg=name)
    ours, theirs = (
        Leakage(ledger, ExampleIds(N)).get_trace().run_error for ledger in (whole, alone)
    )
    assert bool(ours.isfinite().all())
    # as many changes, of values in another order
    assert float(ours.mean()) > 0.9 * float(theirs.mean())


def ledger_of(*counts: Any) -> Ledger:
    """Four examples, of which the first two take part, with these numbers of coordinates one after
    the other.
    """
    ledger = Ledger(4, 6)
    for count in counts:
        ledger.add(Contribution(torch.tensor([0, 1]), torch.ones(2), num_coordinates=count))
    return Ledger.from_state_dict(ledger.state_dict())


def test_every_example_has_as_many_coordinates_as_it_was_seen_with_at_most() -> None:
    ledger = ledger_of(torch.tensor([2, 4]), torch.tensor([3, 1]))
    assert ledger.sums["num_coordinates"].tolist() == [3, 4, 0, 0]
    assert ledger.own_coordinates.tolist() == [3, 4, 1, 1]
    assert (ledger.num_coordinates, ledger.same_coordinates) == (4, False)
    assert (ledger_of(None).num_coordinates, ledger_of(None).same_coordinates) == (6, True)
    Ledger(4, 6).check_coordinates(8)
    with pytest.raises(ValueError, match="diagonal"):
        Ledger(4, 6, track=("diagonal",)).check_coordinates(8)
    texts = [Leakage(ledger_of(torch.tensor(counts)), ExampleIds(4)) for counts in ([2, 4], [2, 5])]
    assert Leakage.average(texts).get_num_coordinates().tolist() == [2, 5, 1, 1]
    with pytest.raises(ValueError, match="private coordinates"):
        Leakage.average([Leakage(ledger_of(count), ExampleIds(4)) for count in (5, 6)])
