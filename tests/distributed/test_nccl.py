"""NCCL, as on a machine with GPUs: one rank of it (NCCL wants a GPU for each) against a process without ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases import DEVICE
from tests.distributed.rank_pool import RankPool
from tests.distributed.rank_runs import as_one, assert_same, trained

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available() or DEVICE == "cpu", reason="needs TORCHFIL_TEST_DEVICE=cuda"),
]


@pytest.mark.parametrize(
    "run",
    [
        {"case": "digits", "passes": 2, "step": "train_step"},
        {"case": "texts", "batch_size": 5, "rand_on_empty": True},
        {"case": "adapters", "batch_size": 5, "rand_on_empty": True, "sharded": True},
        {"case": "digits", "passes": 2, "sharded": True},
    ],
    ids=["data parallel, train_step", "data parallel", "FSDP2, adapters", "FSDP2"],
)
def test_one_rank_of_nccl_is_one_process(tmp_path: Path, run: dict[str, Any]) -> None:
    with RankPool(1, tmp_path, backend="nccl") as pool:
        (part,) = pool.run(trained, folder=str(tmp_path), **run)
    alone = trained(folder=str(tmp_path), replayed=as_one([part.draws]), **run)
    assert_same(part, alone)
    assert float(alone.sums["trace"].sum()) > 0
