"""Tasks that train in one go, or stop and go on from a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.rank_runs import Draws, Made, make, replaying, take_step, whole
from tests.repeatable import recorded_noise
from torchfil.engine.distributed import checkpoints

DRAWS: list[list[list[int]]] = [
    [[0, 2, 4], [6], [], [8, 10, 12], [2, 14], [4, 6, 8], [0], [2, 4], [12, 14, 16], [0, 6], [2], [], [8], [10, 4]],
    [[1, 3], [5, 7, 9], [11], [], [3], [1, 9], [5], [7, 11, 13], [15], [], [3, 5], [1], [9, 11], [13, 1, 3]],
]  # of 14 steps, by two ranks that have parts of their own


@dataclass
class Ended:
    weights: list[Tensor]
    sums: dict[str, Tensor]
    individual: Tensor
    epsilon: float
    timeline_steps: list[int]


def own(draws: Sequence[Draws] | Draws | None, first: int = 0) -> Draws:
    """The draws of this process, from a step on."""
    return draws if draws is not None else DRAWS[dist.get_rank()][first:]  # type: ignore[return-value]


def train(made: Made, draws: Draws, passes: int) -> Ended:
    with replaying(draws):
        for _ in range(passes):
            for x, y in made.loader:
                take_step(made, x, y)
    engine = made.engine
    engine.gather()
    assert engine.ledger is not None
    return Ended(
        [whole(p) for p in made.optimizer.params],
        engine.ledger.sums,
        engine.get_individual_epsilon(delta=1e-5).value,
        float(engine.get_epsilon(1e-5)),
        list(engine.state_dict()["run"]["timeline"]["steps"]),
    )


def made_with(estimator: str | None, **options: Any) -> Made:
    """Probes, which must go on as well, where nothing else is said and there are several ranks."""
    several = dist.is_initialized()
    chosen = estimator or ("weight-probes" if several else "exact")
    return make("digits", questions={}, estimator=chosen, num_probes=2, **options)


def unbroken(
    passes: int = 2,
    path: str | None = None,
    draws: Draws | None = None,
    estimator: str | None = None,
    **options: Any,
) -> Ended:
    """Both passes, or the first and then a checkpoint."""
    made = made_with(estimator, **options)
    ended = train(made, own(draws), passes)
    if path is not None:
        made.engine.save_checkpoint(path=path, module=made.model, optimizer=made.optimizer)
    if dist.is_initialized():
        dist.barrier()  # the file is there
    return ended


def noise_of_a_run(path: str, *, resume: bool) -> tuple[list[Tensor], list[list[int]]]:
    """A pass as users make it, from the start or from a checkpoint, which it writes otherwise: its noise and draws."""
    with recorded_noise() as drawn:
        torch.manual_seed(0)
        made = make("digits", questions={}, estimator="weight-probes", num_probes=1, noise_generator=None)
        if resume:
            made.engine.load_checkpoint(path=path, module=made.model, optimizer=made.optimizer)
        batches = []
        for x, y in made.loader:
            batches.append([round(float(value)) for value in 1e6 * x.sum(dim=1)])
            take_step(made, x, y)
        if not resume:
            made.engine.save_checkpoint(path=path, module=made.model, optimizer=made.optimizer)
    dist.barrier()
    return drawn, batches


def saved_meanwhile(path: str, draws: Draws | None = None) -> Ended:
    """The first pass, and a checkpoint that is written while the second goes on."""
    made = made_with("exact")
    with slow_disk():
        train(made, own(draws), 1)
        saving = made.engine.save_checkpoint(path=path, module=made.model, optimizer=made.optimizer, asynchronous=True)
        assert saving is not None
        assert not saving.done()
        ended = train(made, own(draws, 7) if draws is None else draws[7:], 1)
    saving.result()
    return ended


@contextmanager
def slow_disk() -> Iterator[None]:
    """Nothing is written before a second has passed."""
    plain = checkpoints.write_file

    def later(*args: Any) -> None:
        time.sleep(1)
        plain(*args)

    with mock.patch.object(checkpoints, "write_file", later):
        yield


def resumed(
    path: str, draws: Draws | None = None, estimator: str | None = None, scattered: bool = False, **options: Any
) -> Ended:
    """The second pass, from a checkpoint, after a wrong start; ``scattered``: the ranks change places."""
    made = made_with(estimator, **options)
    with torch.no_grad():
        for p in made.module.parameters():
            p.add_(1.0)
    made.engine.load_checkpoint(path=path, module=made.model, optimizer=made.optimizer)
    return train(made, elsewhere()[7:] if scattered else own(draws, 7), 1)


def elsewhere() -> Draws:
    """The draws of two ranks, on others or on four."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 2:
        return DRAWS[1 - rank]
    return [draw[rank // 2 :: 2] for draw in DRAWS[1 - rank % 2]]
