"""Several gloo processes against one process with the same draws: weights, ledger, ε, D, tables, in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from rank_runs import as_one, assert_same, trained

RUNS: dict[str, dict[str, Any]] = {
    "digits": {"case": "digits", "passes": 2, "track": ("diagonal",)},
    "digits, train_step": {"case": "digits", "passes": 2, "step": "train_step"},
    "texts": {"case": "texts", "batch_size": 5, "rand_on_empty": True},
}


def compare(ranks: RankPool, folder: Path, **run: Any) -> list[Any]:
    parts = ranks.run(trained, folder=str(folder), **run)
    alone = trained(folder=str(folder), replayed=as_one([part.draws for part in parts]), **run)
    for part in parts[1:]:  # every rank answers alike
        part.timeline = parts[0].timeline
    for part in parts:
        assert_same(part, alone)
    assert float(alone.sums["trace"].sum()) > 0
    return parts


@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_are_one_process(two_ranks: RankPool, tmp_path: Path, name: str) -> None:
    parts = compare(two_ranks, tmp_path, **RUNS[name])
    assert not torch.isnan(torch.tensor(parts[0].columns["fil"])).any()
