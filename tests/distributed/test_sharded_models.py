"""Models whose weights are sharded over gloo processes (FSDP2), against one process with the same draws (float64)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.rank_pool import RankPool
from tests.distributed.rank_runs import as_one, assert_same, trained
from tests.distributed.rank_sharded import bytes_here, evaluated, nobodys_steps, one_rank_refuses, penalty, refused
from tests.distributed.test_data_parallel import scattered

pytestmark = pytest.mark.torch_versions

RUNS: dict[str, dict[str, Any]] = {
    "adapters": {"case": "adapters of one layer", "batch_size": 5, "rand_on_empty": True, "passes": 1},
    "digits, all trained": {"case": "digits", "passes": 2, "track": ("diagonal",)},
    "digits, train_step": {"case": "digits", "passes": 1, "step": "train_step", "refreshed": True},
}
MORE: dict[str, dict[str, Any]] = {
    "digits, per layer": {
        "case": "digits",
        "passes": 1,
        "clipping": "per_layer",
        "max_grad_norm": [0.2, 0.3, 0.2, 0.1],
    },
    "adapters of four layers": {"case": "adapters", "batch_size": 5, "rand_on_empty": True, "passes": 1},
    "adapters, train_step": {"case": "adapters", "batch_size": 5, "step": "train_step"},
    "texts, all trained": {"case": "texts", "batch_size": 5, "rand_on_empty": True},
    "digits, sum": {"case": "digits", "passes": 1, "loss_reduction": "sum", "step": "train_step"},
}


def compare(ranks: RankPool, folder: Path, **run: Any) -> None:
    parts = ranks.run(trained, folder=str(folder), sharded=True, **run)
    alone = trained(folder=str(folder), replayed=as_one([part.draws for part in parts]), **run)
    for part in parts:
        part.timeline = parts[0].timeline
        assert_same(part, alone)
    assert float(alone.sums["trace"].sum()) > 0


@pytest.mark.parametrize("name", RUNS)
def test_a_sharded_model_trains_as_in_one_process(two_ranks: RankPool, tmp_path: Path, name: str) -> None:
    compare(two_ranks, tmp_path, **RUNS[name])


@pytest.mark.slow
def test_batches_in_unlike_numbers_of_pieces(two_ranks: RankPool, tmp_path: Path) -> None:
    parts = scattered(2)
    run: dict[str, Any] = {"case": "digits", "passes": 2, "folder": str(tmp_path)}
    found = two_ranks.run(trained, replayed=parts, physical=3, sharded=True, **run)
    alone = trained(replayed=as_one(parts), **run)
    for each in found:
        each.timeline = found[0].timeline
        assert_same(each, alone, but=("_changes", "_last"), same_errors=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_a_sharded_model_trains_as_in_one_process_in_other_runs(two_ranks: RankPool, tmp_path: Path, name: str) -> None:
    compare(two_ranks, tmp_path, **MORE[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adapters of four layers", "digits, all trained"])
def test_four_ranks_share_a_model(four_ranks: RankPool, tmp_path: Path, name: str) -> None:
    compare(four_ranks, tmp_path, **(RUNS | MORE)[name])


def test_noise_is_drawn_once_for_every_weight(two_ranks: RankPool) -> None:
    """Of the right size, the same on all ranks, and unlike between the shards of ranks that are seeded alike."""
    here, there = two_ranks.run(nobodys_steps, 0.7, 3.0)
    for ours, theirs in zip(here, there, strict=True):
        assert torch.equal(ours, theirs)
        assert abs(float(ours.std()) / 2.1 - 1) < 4 / (2 * ours.numel()) ** 0.5
        first, second = ours[:32].flatten(), ours[32:].flatten()  # the shards
        assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 4 / first.numel() ** 0.5
    assert not torch.equal(here[0], here[1])


def test_a_rank_keeps_its_part_of_weights_and_optimizer(two_ranks: RankPool) -> None:
    for everything, weights, momenta, copied, kind in two_ranks.run(bytes_here):
        assert weights <= 0.51 * everything
        assert momenta <= 0.51 * 4 * (8 * 2 + 2 * 24 + 8 * 2 + 2 * 8)  # four layers of two adapters
        assert copied < 0.05 * everything
        assert kind == "_EncoderLayer"


def test_evaluation_sees_the_last_step(two_ranks: RankPool) -> None:
    for given, expected in two_ranks.run(evaluated)[0]:
        torch.testing.assert_close(given, expected)


@pytest.mark.parametrize("step", ["loop", "train_step"])
def test_a_step_that_one_rank_refuses_is_taken_by_none(two_ranks: RankPool, step: str) -> None:
    (there, weights, participations), (here, others, _) = two_ranks.run(one_rank_refuses, step)
    assert [text.split(":")[0] for text in there] == ["2 StepNotTakenError"]
    assert len(here) == 1
    assert "NaN" in here[0]
    assert int(participations.sum()) == 6 * 5
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))


def test_a_penalty_on_sharded_weights_is_found(two_ranks: RankPool) -> None:
    assert all("does not go through the model's output" in text for text in two_ranks.run(penalty))


def test_ways_to_shard_that_are_refused(two_ranks: RankPool) -> None:
    reasons = (
        "Use FSDP2",
        "torch.autocast",
        "0.weight is trained but not sharded",
        "each rank draws its own",
        "needs grad_sample_mode='auto'",
        "'auto' or 'ghost', which support sharded weights",
        "num_probes=",
        "batch normalisation mixes",
        "check it before",
    )
    for errors in two_ranks.run(refused):
        for error, reason in zip(errors, reasons, strict=True):
            assert reason in error
