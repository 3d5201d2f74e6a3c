"""Processes of one group (gloo, if no other is named) that wait for tasks, as importing torch takes
long.
"""

from __future__ import annotations

import datetime
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import pickle
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from opacus.accountants.analysis import rdp

from tests.repeatable import inject

TIMEOUT = 240
PRELOADED = [
    f"tests.distributed.test_{part}"
    for part in ("killed_runs", "rank_checkpoints", "rank_faults", "ranks")
]


class RankPool:
    """So many processes; a task runs in all of them at once, and what each returns comes back as a
    list.
    """

    def __init__(
        self, size: int, folder: Path, preloaded: Sequence[str] = PRELOADED, backend: str = "gloo"
    ) -> None:
        self.size = size
        context = _context(preloaded)
        self._processes, self._ends = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve, args=(rank, size, folder / "store", theirs, backend), daemon=True
            )
            process.start()
            self._processes.append(process)
            self._ends.append(ours)

    def run(self, task: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """What the task returns, rank by rank.

        An exception of a rank is raised here with its traceback.
        """
        for end in self._ends:
            end.send_bytes(pickle.dumps((task, args, options)))
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + TIMEOUT
        while len(answers) < self.size and not any(is_error for is_error, _ in answers.values()):
            if time.monotonic() > deadline:
                self.close()
                raise TimeoutError(
                    f"ranks {set(range(self.size)) - answers.keys()} give no answer to "
                    f"{task.__name__}"
                )
            waiting = [end for rank, end in enumerate(self._ends) if rank not in answers]
            for end in multiprocessing.connection.wait(waiting, timeout=1):
                rank = self._ends.index(end)
                try:
                    answers[rank] = pickle.loads(end.recv_bytes())
                except EOFError:
                    self.close()
                    code = self._processes[rank].exitcode
                    raise AssertionError(
                        f"rank {rank} died in {task.__name__}: exit code {code}"
                    ) from None
        for rank, (is_error, value) in answers.items():
            if is_error:  # the others may wait for this one
                self.close()
                raise AssertionError(f"rank {rank}:\n{value}")
        return [answers[rank][1] for rank in range(self.size)]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _context(preloaded: Sequence[str]) -> Any:
    """Where there is no GPU, processes are forked from one that has imported everything, and has
    done nothing else.
    """
    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # the server reads it
    os.environ["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    context.set_forkserver_preload(list(preloaded))
    return context


def printed_by_two(code: str, folder: Path, *, torchrun: bool = True) -> str:
    """What code prints that runs on two processes, which torchrun starts or the code itself."""
    script = folder / "train.py"
    script.write_text(code)
    start = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if torchrun else []
    )
    root = str(Path(__file__).parents[2])
    variables = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": root,
    }
    command = [sys.executable, *start, str(script)]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env=variables, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def serve(rank: int, size: int, store: Path, end: Connection, backend: str) -> None:
    """One of the processes."""
    faulthandler.enable()  # if one dies, its stack is printed
    torch.set_num_threads(1)
    rdp._compute_rdp = cache(rdp._compute_rdp)  # as in conftest.py
    inject()
    timeout = datetime.timedelta(seconds=TIMEOUT)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout
    )
    while True:
        try:
            task, args, options = pickle.loads(end.recv_bytes())
        except EOFError:
            return
        try:
            answer = False, task(*args, **options)
        except Exception:
            answer = True, traceback.format_exc()
        end.send_bytes(pickle.dumps(answer))
