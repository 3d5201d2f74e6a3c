"""SIGKILL of any rank at any moment, in a save too: what is resumed equals a run that nobody killed, bit for bit."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed import rank_pool
from tests.distributed.rank_runs import Made, make, take_step

CHECKPOINT, LOG = "checkpoint.pt", "log.txt"
STEPS_PER_PASS = 6


def train(rank: int, size: int, attempt: int, folder: Path, steps: int) -> None:
    """One of the processes: begin, or go on from the checkpoint; after each pass comes one, then a line about all."""
    torch.set_num_threads(1)
    if size > 1:
        store, timeout = f"file://{folder}/store{attempt}", datetime.timedelta(seconds=60)
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timeout)
    with contextlib.suppress(RuntimeError) if size > 1 else contextlib.nullcontext():  # the other rank was killed
        made = make("digits", questions={}, estimator="weight-probes", num_probes=2, batch_size=12)
        assert len(made.loader) == STEPS_PER_PASS
        if (folder / CHECKPOINT).exists():
            made.engine.load_checkpoint(path=folder / CHECKPOINT, module=made.model, optimizer=made.optimizer)
        while (done := taken(made)) < steps:
            for x, y in made.loader:
                take_step(made, x, y) if done % (2 * STEPS_PER_PASS) else made.engine.train_step(x, y)
            made.engine.save_checkpoint(path=folder / CHECKPOINT, module=made.model, optimizer=made.optimizer)
            whole = digest(made)
            if rank == 0:
                with open(folder / LOG, "a") as log:
                    log.write(f"{taken(made)} {whole}\n")
        os._exit(0)
    os._exit(3)


def taken(made: Made) -> int:
    return sum(count for *_, count in made.engine.accountant.history)


def digest(made: Made) -> str:
    """Of all that a run says: ledger, norm history, timeline, ε, weights, the optimizer's state; every bit counts."""
    state = made.engine.state_dict()
    parts = [state["run"]["ledger"]["sums"], state["run"]["history"], state["run"]["timeline"], state["accountant"]]
    return hashed([*parts, made.module.state_dict(), made.optimizer.state_dict()["state"]])


def hashed(value: Any) -> str:
    return hashlib.sha256(repr(plain(value)).encode()).hexdigest()


def plain(value: Any) -> Any:
    """Tensors as their bytes."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, (list, tuple)) else value


@contextlib.contextmanager
def started(work: Any, size: int, *args: Any) -> Iterator[list[Any]]:
    """So many processes, which are killed at the end."""
    context = rank_pool._context(rank_pool.PRELOADED)
    processes = [context.Process(target=work, args=(rank, size, *args), daemon=True) for rank in range(size)]
    for process in processes:
        process.start()
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def run(size: int, folder: Path, steps: int, kills: int, seed: int = 5) -> list[str]:
    """Train so many steps, killing a random rank at a random moment as often, every other time in a save; the log."""
    chance, in_save = random.Random(seed), 0
    folder.mkdir()
    for attempt in range(kills + 1):
        with started(train, size, attempt, folder, steps) as processes:
            if attempt < kills:
                in_save += await_moment(folder, processes, chance, in_save=attempt % 2 == 0)
            else:
                processes[0].join(120)
                assert processes[0].exitcode == 0
    print(f"{size} ranks: {kills} kills, {in_save} in a save")
    return (folder / LOG).read_text().splitlines()


def await_moment(folder: Path, processes: list[Any], chance: random.Random, *, in_save: bool) -> bool:
    """Kill a rank at a random moment after 0 to 2 further passes, or when a checkpoint is written; if it was."""
    before, deadline = passes_in(folder), time.monotonic() + 60
    further = chance.randrange(3)
    while passes_in(folder) < before + further and time.monotonic() < deadline:
        assert all(process.is_alive() for process in processes), "it ended by itself"
        time.sleep(0.001)
    victim = chance.randrange(len(processes))
    if in_save:
        while not temporaries(folder) and time.monotonic() < deadline:
            time.sleep(0.0002)
        time.sleep(chance.choice([0, 0.001, 0.003]))
        victim = 0 if chance.random() < 0.7 else victim
    else:
        time.sleep(chance.uniform(0, 0.1))
    processes[victim].kill()
    processes[victim].join()
    hit = bool(temporaries(folder)) and victim == 0
    for process in processes:  # they end by themselves, as their connection has
        process.join(2)
    return hit


def passes_in(folder: Path) -> int:
    return (folder / LOG).read_bytes().count(b"\n") if (folder / LOG).exists() else 0


def temporaries(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.endswith("tmp")]


def check(folder: Path, size: int, steps: int, kills: int, seed: int) -> None:
    whole, killed = run(size, folder / "whole", steps, 0), run(size, folder / "killed", steps, kills, seed)
    assert [int(line.split()[0]) for line in whole] == list(range(STEPS_PER_PASS, steps + 1, STEPS_PER_PASS))
    assert set(killed) <= set(whole)
    assert killed[-1] == whole[-1]
    assert temporaries(folder / "killed") == []


@pytest.mark.slow
@pytest.mark.parametrize(("size", "kills"), [(1, 2), (2, 3)])
def test_few_kills(tmp_path: Path, size: int, kills: int) -> None:
    check(tmp_path, size, 30 * kills, kills, seed=5)


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 2])
def test_twenty_kills(tmp_path: Path, size: int) -> None:
    """Its quick sister has two; the numbers of docs/guide/scale.md come from here (pytest -s)."""
    check(tmp_path, size, 300, 20, seed=0)
