"""A rank that hangs, ends or is killed: the others name it, and a whole checkpoint remains."""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.distributed import rank_pool
from tests.distributed.rank_pool import RankPool
from tests.distributed.rank_runs import assert_same, make, take_step
from tests.distributed.test_rank_checkpoints import trained
from torchfil.utils import files


@contextlib.contextmanager
def started(work: Any, size: int, *args: Any) -> Iterator[list[Any]]:
    """So many processes, which are killed at the end."""
    context = rank_pool._context(rank_pool.PRELOADED)
    processes = [context.Process(target=work, args=(rank, size, *args)) for rank in range(size)]
    for process in processes:
        process.start()
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def join_group(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    options: dict[str, Any] = {"rank": rank, "world_size": size}
    options["timeout"] = datetime.timedelta(seconds=4)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", **options)


def stop_in_step_3(rank: int, size: int, folder: Path, absent: int, asleep: bool) -> None:
    """One of processes of which one falls asleep, or ends, in its third step."""
    join_group(rank, size, folder)
    made = make("digits", questions={}, batch_size=12)
    for place, (x, y) in enumerate(made.loader):
        if (place, rank) == (2, absent):
            time.sleep(60 * asleep)
            os._exit(0)
        before = [p.clone() for p in made.module.parameters()]
        try:
            take_step(made, x, y)
        except RuntimeError as error:
            assert all(map(torch.equal, before, made.module.parameters()))
            assert sum(count for *_, count in made.engine.accountant.history) == place
            (folder / f"error{rank}").write_text(str(error))
            os._exit(0)


@pytest.mark.parametrize("asleep", [pytest.param(True, marks=pytest.mark.slow), False])
def test_the_others_name_a_rank_that_hangs_or_has_ended(tmp_path: Path, asleep: bool) -> None:
    with started(stop_in_step_3, 3, tmp_path, 1, asleep) as processes:
        for rank in (0, 2):
            processes[rank].join(60)
            text = (tmp_path / f"error{rank}").read_text()
            assert text.startswith("rank 1 did not reach the end of step 3")


def killed_in_its_second_save(rank: int, size: int, folder: Path, path: str) -> None:
    join_group(rank, size, folder)
    trained(path)

    def killed(file: Any) -> None:
        file.truncate(1000)
        os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(files, "append_checksum", killed):
        trained(path)


def test_a_run_that_is_killed_in_a_save_goes_on_from_the_last_checkpoint(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    path = f"{tmp_path}/run.pt"
    with started(killed_in_its_second_save, 2, tmp_path, path) as processes:
        processes[0].join(60)
        assert processes[0].exitcode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 3  # the store, the checkpoint and what was cut off
    expected = two_ranks.run(trained)
    for found, unbroken in zip(two_ranks.run(trained, path, resume=True), expected, strict=True):
        assert_same(found, unbroken, 0.0)
