"""The ledger: steps booked together or one by one, by one process or in parts; coordinates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.accounting.by_hand import Step, assert_by_hand
from tests.engine.loops import data, train
from torchfil.accounting import ledger as ledgers
from torchfil.accounting.ids import ExampleIds
from torchfil.accounting.leakage import Leakage
from torchfil.accounting.ledger import Contribution, Ledger
from torchfil.accounting.norms import NormHistory
from torchfil.accounting.quantities import QuestionSpec, available_quantities
from torchfil.accounting.rows import RowTable
from torchfil.accounting.sums import OWN_SUMS, Column, Sum
from torchfil.engine.distributed.ranks import move_rows, whole_ledger

N, D, STEPS = 40, 3, 45
ROWS = torch.tensor([7, 5])
ASKED = {
    "age": QuestionSpec(("old", "young")),
    "in": QuestionSpec(("absent",), membership=True),
}
ALL = tuple(name for name in available_quantities() if name != "trace")
Q = torch.linspace(0.1, 0.6, N, dtype=torch.float64)


def batch(
    source: torch.Generator,
    step: int,
    track: tuple[str, ...] = ALL,
    *,
    n: int = N,
    rate: float = 1.0,
) -> Contribution:
    """A Poisson draw of a third of all examples, some in every few steps, measured at that rate."""
    rows = (torch.rand(n, generator=source) < 0.35).nonzero().flatten()
    rows = rows[torch.randperm(len(rows), generator=source)]
    size = len(rows)

    def drawn(*shape: int) -> Tensor:
        return torch.rand(size, *shape, generator=source, dtype=torch.float64)

    infinite = math.inf if step == 9 else 0.0  # a step without noise
    trace, noise = 0.5 + drawn() + infinite, 0.01 * drawn()
    columns: dict[str, Column] = {"question in": {"value": drawn(1) + infinite}}
    if float(torch.rand((), generator=source)) < rate or infinite:  # which is always measured
        columns["trace"] = {
            "value": trace,
            "variance": noise,
            "noise": noise,
            "freedom": 1 + drawn(),
        }
        columns["question age"] = {"value": drawn(2) + infinite}
        matrix = (drawn(D, D) - 0.3) * (step != 9)  # a probe's diagonal may be negative
        matrix[:, 0, 0] += trace - matrix.diagonal(dim1=1, dim2=2).sum(dim=1)
        more = {"diagonal": matrix.diagonal(dim1=1, dim2=2), "fim": matrix, "plis": drawn(D)}
        columns |= {name: {"value": more[name]} for name in track}
        if "diagonal" in track:
            columns["diagonal"]["variance"] = drawn(D)
    own: Any = None if track else torch.randint(1, 9, (size,), generator=source)
    return Contribution(rows, trace.float(), columns, rate, own)


def steps(track: tuple[str, ...] = ALL, *, n: int = N, rate: float = 0.5) -> Iterator[Step]:
    """Of one or two batches, of nobody, paused, under noise that changes, or under none."""
    source = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        whole, paused = batch(source, step, track, n=n, rate=rate), step % 11 == 5
        if paused:
            whole = replace(whole, columns={})
        middle = 0 if step == 7 else len(whole.rows) // 2 if step % 4 == 2 else len(whole.rows)
        parts = [part_of(whole, slice(0, middle))]
        if step % 4 == 2:
            parts.append(part_of(whole, slice(middle, None)))
        yield Step(parts, 0.0 if step == 9 else 1 + step / 50, 1 + step % 3, paused)


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
        ledger, seen = Ledger(N, D, track=track, questions=ASKED, draw_rate=0.35), []
        for number, step in enumerate(steps(track)):
            step.book(ledger)
            if not together:
                ledger.flush()
            if number % 13 == 12:  # a read in between
                seen.append(ledger.sums["trace"].clone())
            if number == 20:  # a run that is resumed
                ledger = Ledger.from_state_dict(ledger.state_dict())
        return ledger, seen

    (ours, seen), (theirs, expected) = booked(together=True), booked(together=False)
    assert all(torch.equal(one, other) for one, other in zip(seen, expected, strict=True))
    assert int(theirs.sums["participations"].max()) > 10
    assert (ours.steps, ours.missed_steps) == (STEPS, 4)
    for name, trend in theirs.trends().items():
        assert torch.equal(ours.trends()[name], trend)
    assert_equal(ours.state_dict()["sums"], theirs.state_dict()["sums"])
    assert_equal(dict(ours.sums), dict(theirs.sums))


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize(
    ("draw_rate", "rate"), [(0.35, 1.0), (0.35, 0.5), (Q, 0.5), (None, 1.0), (None, 0.5)], ids=str
)
def test_sums_are_those_of_a_loop(
    draw_rate: Tensor | float | None, rate: float, read: bool
) -> None:
    """Against plain Python loops, whenever they are read."""
    ledger, log = (
        Ledger(N, D, track=ALL, questions=ASKED, draw_rate=draw_rate),
        list(steps(rate=rate)),
    )
    for number, step in enumerate(log):
        step.book(ledger)
        if read and number % 4 == 1:
            so_far = ledger.traces()  # which counts nobody who was never drawn
            drawn = ledger.sums["participations"] > 0
            trace = ledger.sums["trace"].where(drawn, 0.0)
            torch.testing.assert_close(so_far, trace, rtol=1e-12, atol=0)
    assert_by_hand(ledger, log)
    finite = ledger.sums["trace"].isfinite()
    together = ledger.sums["diagonal"].sum(dim=1)[finite]
    torch.testing.assert_close(together, ledger.sums["trace"][finite])
    assert 0 < int(finite.sum()) < N


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
    assert Ledger.bytes_needed(1, 5, kept) + NormHistory.bytes_needed(1) == 164 + expected
    engine = train(data(60), steps=1, track=track, estimator="exact").engine
    assert engine.ledger.sums.num_bytes + engine._training.run.history.num_bytes == 60 * (
        164 + expected
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


class Thread:
    """A rank that is a thread of this process."""

    def __init__(self, rank: int, told: list[Any], barrier: Barrier) -> None:
        self.rank, self.told, self.barrier = rank, told, barrier

    def objects(self, value: Any) -> list[Any]:
        self.told[self.rank] = value
        self.barrier.wait()
        told = list(self.told)
        self.barrier.wait()
        return told

    def each(self, value: Tensor) -> list[Tensor]:
        return self.objects(value.clone())

    def sum(self, value: Tensor) -> Tensor:
        return torch.stack(self.each(value)).sum(dim=0)

    def maximum(self, value: Tensor) -> Tensor:
        return torch.stack(self.each(value)).amax(dim=0)


def by_ranks(what: Callable[[Ledger, Any], Any], parts: list[Ledger]) -> list[Any]:
    """What every rank gets of its part."""
    told, barrier = [None] * len(parts), Barrier(len(parts))
    with ThreadPoolExecutor(len(parts)) as pool:
        ranks = [Thread(rank, told, barrier) for rank in range(len(parts))]
        return list(pool.map(what, parts, ranks))


def move(held: list[Tensor], part: Ledger, rank: Any) -> None:
    move_rows(part, rank, held[rank.rank], partial(Ledger, N))


@pytest.mark.filterwarnings("ignore:.*took part in paused steps")
@pytest.mark.parametrize("moving", [False, True])
@pytest.mark.parametrize("draw_rate", [None, 0.35])
def test_ledgers_of_ranks(draw_rate: float | None, moving: bool) -> None:
    """Each predicts for those it can draw; no interval is narrower."""
    size, source = 3, torch.Generator().manual_seed(2)
    scattered = moving and draw_rate is None  # anew at every step
    n, rank_of, log = 400 if scattered else N, torch.arange(N) % size, []
    alone, *parts = (Ledger(n, D, questions=ASKED, draw_rate=draw_rate) for _ in range(1 + size))
    for number, step in enumerate(steps((), n=n, rate=0.5 if draw_rate else 1.0)):
        if scattered or (moving and number % 8 == 0):
            rank_of = torch.randint(size, (n,), generator=source)
        if draw_rate is not None and number % 8 == 0:
            by_ranks(partial(move, [rank_of == rank for rank in range(size)]), parts)
        for rank, part in enumerate(parts):
            own = [part_of(each, rank_of[each.rows] == rank) for each in step.contributions]
            step._replace(contributions=own).book(part)
        step.book(alone)
        log.append(step._replace(rank_of=rank_of))
    whole = by_ranks(whole_ledger, parts)[0]
    assert (whole.steps, whole.missed_steps) == (STEPS, 4)
    if not scattered:
        assert_by_hand(whole, log)
        return
    for name in ("trace", "variance", "question age", "question in", *OWN_SUMS):
        torch.testing.assert_close(whole.sums[name], alone.sums[name], rtol=1e-6, atol=0)
    bounds = [Leakage(ledger, ExampleIds(n)).get_mse_bound() for ledger in (whole, alone)]
    ours, theirs = (float(bound.interval()[0].mean()) for bound in bounds)
    assert 0 < ours < 1.05 * theirs


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
