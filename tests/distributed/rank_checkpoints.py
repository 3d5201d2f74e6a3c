"""Tasks that train in one go, or stop and go on from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from rank_runs import Draws, Made, make, replaying, take_step
from torch import Tensor

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
        [p.detach().clone() for p in made.module.parameters()],
        engine.ledger.sums,
        engine.get_individual_epsilon(delta=1e-5).value,
        float(engine.get_epsilon(1e-5)),
        list(engine.state_dict()["run"]["timeline"]["steps"]),
    )


def made_with(estimator: str | None) -> Made:
    """Probes, which must go on as well, where nothing else is said and there are several ranks."""
    several = dist.is_initialized()
    chosen = estimator or ("weight-probes" if several else "exact")
    return make("digits", questions={}, estimator=chosen, num_probes=2)


def unbroken(
    passes: int = 2, path: str | None = None, draws: Draws | None = None, estimator: str | None = None
) -> Ended:
    """Both passes, or the first and then a checkpoint."""
    made = made_with(estimator)
    ended = train(made, own(draws), passes)
    if path is not None:
        made.engine.save_checkpoint(path=path, module=made.model, optimizer=made.optimizer)
    if dist.is_initialized():
        dist.barrier()  # the file is there
    return ended


def resumed(path: str, draws: Draws | None = None, estimator: str | None = None, scattered: bool = False) -> Ended:
    """The second pass, from a checkpoint, after a wrong start; ``scattered``: the ranks change places."""
    made = made_with(estimator)
    with torch.no_grad():
        for p in made.module.parameters():
            p.add_(1.0)
    made.engine.load_checkpoint(path=path, module=made.model, optimizer=made.optimizer)
    here = DRAWS[1 - dist.get_rank()][7:] if scattered else own(draws, 7)
    return train(made, here, 1)
