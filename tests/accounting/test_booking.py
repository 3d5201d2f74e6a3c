"""Steps booked together give what steps booked one by one give, whoever reads when."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from torchfil.accounting import ledger as ledgers
from torchfil.accounting.ids import ExampleIds
from torchfil.accounting.leakage import Leakage
from torchfil.accounting.ledger import Contribution, Ledger, Timeline
from torchfil.accounting.norms import NormHistory
from torchfil.accounting.quantities import Asked, Divergence, Sum, available_quantities, path_additions
from torchfil.accounting.rows import RowTable, in_rounds

N, D, STEPS = 40, 3, 45
ASKED = {"age": Asked(("old", "young"))}
ALL = tuple(name for name in available_quantities() if name != "trace")
SHAPES = {"diagonal": (D,), "diagonal_variance": (D,), "fim": (D, D), "sketch": (D, 2), "plis": (D,)}


def batch(source: torch.Generator, step: int, track: tuple[str, ...] = ALL, *, n: int = N) -> Contribution:
    """A Poisson draw of a third of all examples, some in every few steps; measured, skipped at random or paused."""
    rows = (torch.rand(n, generator=source) < 0.35).nonzero().flatten()
    rows = rows[torch.randperm(len(rows), generator=source)]
    size = len(rows)

    def drawn(*shape: int) -> Tensor:
        return torch.rand(size, *shape, generator=source, dtype=torch.float64)

    trace, noise = 0.5 + drawn(), 0.01 * drawn()
    added = {"trace": trace, "variance": noise, "variance_spread": noise**2}
    added |= path_additions("trace", trace, noise, 0.5) | Divergence("age", ASKED["age"]).added(
        drawn(2), 0.5, skipping=True
    )
    if step % 4:  # else the limit of the error is unknown
        added |= {"certain": trace / 2, "variance_limit": noise}
    if step == 9:  # a step without noise
        added["trace"] = torch.full_like(trace, math.inf)
        added |= path_additions("trace", added["trace"], noise, 0.5)
    for name, shape in SHAPES.items():
        if name.partition("_")[0] in track:
            added[name] = drawn(*shape)
    if step % 7 == 3:
        added = {}
    own: Any = None if track else torch.randint(1, 9, (size,), generator=source)
    return Contribution(rows, trace.float(), step % 11 != 5, added if step % 11 != 5 else {}, own)


def halves(whole: Contribution) -> list[Contribution]:
    """The same logical batch in two parts."""
    parts = slice(0, len(whole.rows) // 2), slice(len(whole.rows) // 2, None)
    own = whole.num_coordinates
    return [
        Contribution(
            whole.rows[part],
            whole.squared_norm[part],
            whole.measured,
            {name: value[part] for name, value in whole.additions.items()},
            own[part] if isinstance(own, Tensor) else own,
        )
        for part in parts
    ]


def assert_equal(ours: Any, theirs: Any) -> None:
    """Bit for bit, also where both are NaN."""
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name].contiguous().view(torch.uint8), value.contiguous().view(torch.uint8)), name


@pytest.mark.parametrize("where", ["cpu", "folder"])
@pytest.mark.parametrize("chosen", [None, [31, 4, 17]])
@pytest.mark.parametrize("track", [(), ALL])
def test_ledgers_are_equal(tmp_path: Path, where: str, chosen: list[int] | None, track: tuple[str, ...]) -> None:
    def booked(*, together: bool) -> tuple[Ledger, list[Tensor]]:
        source = torch.Generator().manual_seed(0)
        some = {"plis": torch.tensor(chosen)} if chosen and track else None
        place: Any = tmp_path if where == "folder" else "cpu"
        kept = {"device": place, "chosen": some, "questions": ASKED}
        ledger, seen = Ledger(N, D, track=track, sketch_rank=2, **kept), []
        for step in range(STEPS):
            whole = batch(source, step, track)
            ledger.add(*(halves(whole) if step % 4 == 2 else [whole]))
            if not together:
                ledger.flush()
            if step % 13 == 12:  # a read in between
                seen.append(ledger.sums["trace"].clone())
            if step == 20:  # a run that is resumed
                ledger = Ledger.from_state_dict(ledger.state_dict(), place)
        return ledger, seen

    (ours, seen), (theirs, expected) = booked(together=True), booked(together=False)
    assert all(torch.equal(one, other) for one, other in zip(seen, expected, strict=True))
    assert int(theirs.sums["participations"].max()) > 10
    assert_equal(ours.state_dict()["sums"], theirs.state_dict()["sums"])
    assert_equal(dict(ours.sums), dict(theirs.sums))


def test_sums_are_those_of_a_loop() -> None:
    """Against a plain Python loop, without rounds and tables."""
    source, ledger = torch.Generator().manual_seed(1), Ledger(N, D, track=ALL, sketch_rank=2, questions=ASKED)
    sums = {name: torch.zeros(N, *each.shape, dtype=torch.float64) for name, each in ledger.sums.layout.items()}
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
            for name, value in each.additions.items():
                sums[name][row] += value[place]
            if each.measured and "variance_limit" not in each.additions:
                sums["variance_limit"][row] = math.inf
    for name, value in sums.items():
        if not name.endswith(("_last", "_changes")):  # see test_path
            rounding = 1e-12 if ledger.sums[name].dtype == torch.float64 else 1e-5
            torch.testing.assert_close(ledger.sums[name].double(), value, rtol=rounding, atol=0, msg=name)


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
                history.set_ratios(torch.arange(0, N, 3), torch.linspace(0.1, 1, len(range(0, N, 3))))
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


def test_looks_see_the_sums_of_their_step() -> None:
    source = torch.Generator().manual_seed(2)
    ledger, plain = (Ledger(N, D, questions=ASKED) for _ in range(2))
    later, now = Timeline(2), Timeline(2)
    for step in range(1, STEPS):
        each = batch(source, step, ())
        for one in (ledger, plain):
            one.add(each)
        ledger.look_later(lambda *sums, step=step: later.note(step, *sums))
        now.note(step, plain.sums["trace"], plain.own_coordinates)
        if step == 17:  # examples that arrive later are no part of earlier points
            for one in (ledger, plain):
                one.grow(N + 30)
    ledger.flush()
    assert later.points.keys() == now.points.keys()
    torch.testing.assert_close(later.points, now.points, rtol=1e-14, atol=0)


READERS: dict[str, Callable[[Ledger], Any]] = {
    "sums": lambda ledger: ledger.sums["participations"],
    "rows": lambda ledger: ledger.sums.at("participations", torch.arange(N)),
    "state": lambda ledger: ledger.state_dict()["sums"]["participations"],
    "copy": lambda ledger: copy.deepcopy(ledger).sums["participations"],
    "leakage": lambda ledger: torch.from_numpy(Leakage(ledger, ExampleIds(N)).arrays()["participations"]),
    "coordinates": lambda ledger: ledger.own_coordinates - 1,
}


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_sees_what_was_added(reader: str) -> None:
    ledger, rows = Ledger(N, 1), torch.tensor([5, 2])
    ledger.add(Contribution(rows, torch.ones(2), num_coordinates=2))
    assert READERS[reader](ledger)[[2, 5, 6]].tolist() == [1, 1, 0]


def test_the_queue_is_bounded_in_steps_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def queued(size: int) -> list[int]:
        ledger, found = Ledger(N, 100, track=("plis",)), []
        for _ in range(100):
            added = {"plis": torch.zeros(size, 100, dtype=torch.float64)}
            ledger.add(Contribution(torch.arange(size), torch.ones(size), True, added))
            found.append(len(ledger._queue))
        return found

    assert max(queued(2)) == ledgers.STEPS_QUEUED - 1
    monkeypatch.setattr(ledgers, "BYTES_QUEUED", 10 * 8 * 100 * 20)
    assert max(queued(20)) < 10
    monkeypatch.setattr(ledgers, "BYTES_QUEUED", 1)
    assert max(queued(2)) == 0


def test_what_does_not_fit_is_refused_at_once_and_leaves_the_rest() -> None:
    ledger, rows = Ledger(N, D, track=("plis",)), torch.tensor([7, 5])
    ledger.add(Contribution(rows, torch.ones(2), True, {"plis": torch.ones(2, D)}))
    good, bad = (Contribution(rows, torch.ones(2), True, {"plis": torch.ones(2, d)}) for d in (D, D + 1))
    with pytest.raises(ValueError, match="'plis' has shape"):
        ledger.add(good, bad)
    assert ledger.sums["participations"].sum() == 2
    assert ledger.sums["plis"].sum() == 2 * D


def test_an_exception_while_booking_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example an interrupt: the steps stay queued."""
    ledger, rows = Ledger(N, D), torch.tensor([7, 5])
    ledger.add(Contribution(rows, torch.ones(2)))
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "_column", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            ledger.flush()
        assert not ledger._sums["participations"].any()
    assert ledger.sums["participations"].nonzero().flatten().tolist() == [5, 7]


def test_rows_are_as_before_after_an_exception() -> None:
    table = RowTable({"value": Sum(), "count": Sum((2,), torch.int32)}, 8)
    with pytest.raises(RuntimeError), table.rows_of(torch.tensor([7, 5])) as rows:
        rows["value"].add_(1.0)
        raise RuntimeError
    assert not table["value"].any()


def test_a_batch_of_nobody() -> None:
    ledger, history = Ledger(N, D), NormHistory(N)
    ledger.add(Contribution(torch.zeros(0, dtype=torch.long), torch.zeros(0)))
    history.step(torch.zeros(0, dtype=torch.long), torch.zeros(0), 1.0, 0.1)
    assert not ledger.sums["participations"].any()
    assert history.counts_of(torch.arange(N)).sum(dim=1).tolist() == [1] * N


def test_rounds_hold_each_example_once_and_in_order() -> None:
    examples = torch.randint(9, (200,), generator=torch.Generator().manual_seed(3))
    distinct, order, rounds = in_rounds(examples)
    assert sorted(order.tolist()) == list(range(200))
    for size, here in rounds:
        assert examples[order[here]].tolist() == distinct[:size].tolist()
    for example in distinct.tolist():
        times = [place for place in order.tolist() if examples[place] == example]
        assert times == sorted(times)
