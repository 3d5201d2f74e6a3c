"""Streams: ids from the batch, rows that grow, no subsampling credited.

Against brute force in float64.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from opacus.accountants import RDPAccountant
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tests.engine.brute_force import C, Run, Truth, make, take, train
from tests.engine.loops import SIGMA, data, exact_epsilon, network
from tests.engine.test_state import same
from torchfil import FILPrivacyEngine
from torchfil.report import load

DELTA = 1e-5
N = 23


class Shards(IterableDataset):
    """Examples in shards, of which each worker reads its own; no length, no random access."""

    def __init__(
        self, order: Sequence[int] | None = None, *, kind: str = "tuple", shard: int = 4
    ) -> None:
        self.tensors = data(N).tensors
        self.order, self.kind, self.shard = (
            list(range(N)) if order is None else list(order),
            kind,
            shard,
        )

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        for place, row in enumerate(self.order):
            if worker is None or place // self.shard % worker.num_workers == worker.id:
                x, y = self.tensors[0][row], self.tensors[1][row]
                yield (x, y, row) if self.kind == "tuple" else {"x": x, "labels": y, "key": row}


STREAM = {"id_of": 2, "poisson_sampling": False, "noise_multiplier": SIGMA}


def made(stream: Any = None, workers: int = 0, **options: Any) -> Run:
    """A run that is ready to train, in batches of five."""
    options = {"batch_size": 5, "loading": {"num_workers": workers}, **STREAM, **options}
    return make(network(), Shards() if stream is None else stream, **options)


def trained(stream: Any = None, steps: int = 5, **options: Any) -> Run:
    return train(made(stream, **options), steps=steps)


def rows_of(run: Run) -> list[int]:
    """The number in the data set of each of the ledger's rows."""
    return list(run.engine.leakage_columns()[0])


def epsilon(squared: Tensor) -> Tensor:
    """Of Σ (‖g̃‖/σC)² over an example's steps: its divergence of order α is α/2 times it."""
    orders = torch.tensor(RDPAccountant.DEFAULT_ALPHAS, dtype=torch.float64)
    penalty = ((orders - 1) / orders).log() - (math.log(DELTA) + orders.log()) / (orders - 1)
    return (squared[:, None] * orders / 2 + penalty).min(dim=1).values.clamp(min=0)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_ledger_is_the_truth_without_amplification(workers: int) -> None:
    order = torch.randperm(N, generator=torch.Generator().manual_seed(1)).tolist()
    run = trained(Shards(order), steps=10, workers=workers, track=("fim",))
    ledger, rows = run.engine.ledger, rows_of(run)
    assert sorted(rows) == list(range(N))
    assert workers or rows == order
    truth = Truth(run)
    assert ledger.num_examples == N
    assert torch.equal(ledger.sums["participations"].cpu().double(), truth.participations[rows])
    torch.testing.assert_close(ledger.sums["fim"].cpu(), truth.fim[rows], rtol=1e-9, atol=1e-12)
    with pytest.raises(KeyError, match="99"):
        run.engine.get_fil([99])


def test_epsilon_is_that_of_the_most_frequent_example() -> None:
    """Person 0 comes three times, all others once: ε of three Gaussian releases, however many steps
    there were.
    """
    run = trained(Shards([*range(10), 0, *range(10, 15), 0, *range(15, N)]))
    assert run.engine.accountant.history == [(SIGMA, 1.0, 3)]
    by_hand = epsilon(torch.tensor([3 / SIGMA**2], dtype=torch.float64))
    assert run.engine.get_epsilon(DELTA) == pytest.approx(float(by_hand), rel=1e-9)
    assert run.engine.get_epsilon(DELTA) >= exact_epsilon(3**0.5 / SIGMA, DELTA) - 1e-3


def test_individual_epsilon_counts_an_examples_own_steps() -> None:
    run = trained(steps=10)
    squares = Truth(run).squared_norm / (SIGMA * C) ** 2
    own = run.engine.get_individual_epsilon(delta=DELTA).value.cpu()
    assert (own >= epsilon(squares)[rows_of(run)] - 1e-9).all()
    # norms are rounded up by at most 5 %
    assert (own <= epsilon(squares * 1.05**2)[rows_of(run)] + 1e-6).all()
    assert own.max() <= run.engine.get_epsilon(DELTA) + 1e-9


@pytest.mark.parametrize("way", ["auto", "train_step"])
def test_ids_come_from_any_part_of_the_batch(way: str) -> None:
    expected = trained()
    id_of: Any = (lambda batch: batch["key"]) if way == "auto" else "key"
    engine = made(Shards(kind="dict"), id_of=id_of, criterion=nn.CrossEntropyLoss()).engine
    for batch in engine._training.loader:
        assert ("key" in batch) == (way == "auto")
        engine.train_step(batch["x"], batch["labels"])
    assert engine.leakage_columns()[0] == rows_of(expected)
    torch.testing.assert_close(engine.ledger.sums["trace"], expected.engine.ledger.sums["trace"])


def test_an_example_twice_in_one_batch_is_refused() -> None:
    """Those of its batch that are new have a row from then on, but took no part."""
    run = made(Shards([0, 1, 2, 3, 4, 5, 6, 5, 7, 8]))
    batches = iter(run.private)
    take(run, next(batches))
    before = copy.deepcopy(run.engine.state_dict()["run"]["ledger"]["sums"])
    with pytest.raises(RuntimeError, match="twice"):
        take(run, next(batches))
    after = run.engine.ledger.sums
    assert all(torch.equal(after[name][:5], value) for name, value in before.items())
    assert not any(value[5:].any() for value in after.values())
    assert len(rows_of(run)) == 9
    take(run, next(iter(run.private)))
    assert run.engine.ledger.sums["participations"].tolist() == [2] * 5 + [0] * 4


REFUSED: dict[str, dict[str, Any]] = {
    "poisson_sampling=False": {"poisson_sampling": True},
    "id": {"id_of": None},
    "read again": {"norm_refresh": 3},
    "not known": {"clip_weights": [1.0] * N},
    "passes": {"rel_error": 0.1, "estimator": "weight-probes"},
    "poisson_sampling=True": {"amplification": "poisson"},
    "batch_size": {"batch_size": None},
}


@pytest.mark.parametrize("noun", REFUSED)
def test_what_a_stream_cannot_have_is_refused(noun: str) -> None:
    with pytest.raises(ValueError, match=noun):
        made(**REFUSED[noun])


def test_a_grown_ledger_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """After the first part of the stream, bit for bit as the unbroken run."""
    order = torch.randperm(N, generator=torch.Generator().manual_seed(2)).tolist()
    whole, resumed = trained(Shards(order[:7]), 2), made()
    saved = {"path": tmp_path / "run.pt"}
    whole.engine.save_checkpoint(**saved, module=whole.model, optimizer=whole.optimizer)
    resumed.engine.load_checkpoint(**saved, module=resumed.model, optimizer=resumed.optimizer)
    assert len(resumed.engine.leakage_columns()[0]) == 7
    for run in (whole, resumed):
        run.private.dataset.order = [*order[7:], *order]
        train(run, steps=len(run.passes) + 9)
    assert same(resumed.engine.state_dict(), whole.engine.state_dict())
    assert all(map(torch.equal, resumed.model.parameters(), whole.model.parameters()))


def test_a_stream_is_saved_but_neither_read_again_nor_a_numbered_run(tmp_path: Path) -> None:
    run = trained(steps=10, track=("diagonal",))
    saved = load(run.engine.save_run(tmp_path / "run.parquet", delta=DELTA))
    assert saved.ids.tolist() == rows_of(run)
    for read in (run.engine.refresh_norms, lambda: run.engine.plis([1])):
        with pytest.raises(RuntimeError, match="read again"):
            read()
    numbered = make(network(), data(N)).engine
    for one, other in ((numbered, run.engine), (run.engine, numbered)):
        with pytest.raises(ValueError, match="data_set="):
            one.load_state_dict(other.state_dict())


def test_noise_for_a_target_epsilon_and_noise_that_falls() -> None:
    """An epoch is one participation of every example; a later, smaller noise counts for all."""
    module, engine = network(), FILPrivacyEngine()
    target = {
        "target_epsilon": 8.0,
        "target_delta": DELTA,
        "epochs": 2,
        "id_of": 2,
        "poisson_sampling": False,
    }
    parts = module, torch.optim.SGD(module.parameters(), lr=0.3), DataLoader(Shards(), 5)
    *_, private = engine.make_private_with_epsilon(
        *parts, criterion=nn.CrossEntropyLoss(), **target
    )
    for x, y in (batch for _ in range(2) for batch in private):
        engine.train_step(x, y)
    assert 7.9 <= engine.get_epsilon(DELTA) <= 8.0
    run = made()
    for place, batch in enumerate(run.private):
        run.optimizer.noise_multiplier = SIGMA if place % 2 else 2 * SIGMA
        take(run, batch)
    assert run.engine.accountant.history == [(SIGMA, 1.0, 1)]
