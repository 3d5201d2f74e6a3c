"""A run of several ranks with a page, a file and a log: all ranks read together, rank 0 shows and
writes.
"""

from __future__ import annotations

import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.rank_pool import RankPool
from tests.distributed.rank_runs import DELTA, make, take_step, whole
from torchfil import LeakageLogger
from torchfil.run.file import load


def watched(folder: str | None) -> tuple[list[Tensor], Any, Any]:
    """The weights after two passes; with a folder, watched, what the page and the file say."""
    made, page, steps = make("digits"), None, None
    with ExitStack() as stack:
        if folder is not None:
            path = Path(folder) / f"rank{dist.get_rank()}.parquet"
            watch = stack.enter_context(
                made.engine.watch(delta=DELTA, every=7, path=path, share=0.99)
            )
            stack.enter_context(LeakageLogger(lambda *_: None, delta=DELTA).attach(made.engine))
        for _ in range(2):
            for x, y in made.loader:
                take_step(made, x, y)
        if folder is not None and watch.url:
            page = urllib.request.urlopen(watch.url, timeout=60).read().decode()
            steps = load(path).about["mechanism"]["steps"]
    return [whole(p) for p in made.module.parameters()], page, steps


def test_rank_0_shows_and_writes_the_run_of_all(two_ranks: RankPool, tmp_path: Path) -> None:
    plain, shown = two_ranks.run(watched, None), two_ranks.run(watched, str(tmp_path))
    for (before, *_), (after, *_) in zip(plain, shown, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    (_, page, steps), (_, *nothing) = shown
    assert steps == 14
    assert "of this run" in page
    assert nothing == [None, None]
