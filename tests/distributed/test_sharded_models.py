"""Models whose weights are sharded over gloo processes (FSDP2), against one process with the same draws (float64)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rank_pool import RankPool
from rank_runs import as_one, assert_same, trained

RUNS: dict[str, dict[str, Any]] = {
    "adapters": {"case": "adapters", "batch_size": 5, "rand_on_empty": True, "passes": 2},
    "digits, all trained": {"case": "digits", "passes": 2, "track": ("diagonal",)},
    "digits, train_step": {"case": "digits", "passes": 1, "step": "train_step", "refreshed": True},
    "digits, per layer": {"case": "digits", "passes": 1, "clipping": "per_layer", "max_grad_norm": [0.2, 0.3, 0.2, 0.1]},
    "digits, in pieces": {"case": "digits", "passes": 1, "physical": 3},
}
MORE: dict[str, dict[str, Any]] = {
    "adapters, train_step": {"case": "adapters", "batch_size": 5, "step": "train_step"},
    "texts, all trained": {"case": "texts", "batch_size": 5, "rand_on_empty": True},
    "digits, sum": {"case": "digits", "passes": 1, "loss_reduction": "sum", "step": "train_step"},
}


def compare(ranks: RankPool, folder: Path, **run: Any) -> None:
    parts = ranks.run(trained, folder=str(folder), sharded=True, **run)
    run.pop("physical", None)
    alone = trained(folder=str(folder), replayed=as_one([part.draws for part in parts]), **run)
    for part in parts:
        part.timeline = parts[0].timeline
        assert_same(part, alone)
    assert float(alone.sums["trace"].sum()) > 0


@pytest.mark.parametrize("name", RUNS)
def test_a_sharded_model_trains_as_in_one_process(two_ranks: RankPool, tmp_path: Path, name: str) -> None:
    compare(two_ranks, tmp_path, **RUNS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_a_sharded_model_trains_as_in_one_process_in_other_runs(
    two_ranks: RankPool, tmp_path: Path, name: str
) -> None:
    compare(two_ranks, tmp_path, **MORE[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adapters", "digits, all trained"])
def test_four_ranks_share_a_model(four_ranks: RankPool, tmp_path: Path, name: str) -> None:
    compare(four_ranks, tmp_path, **RUNS[name])
