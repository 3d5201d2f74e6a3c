"""Several gloo processes against one process with the same draws, and brute force: weights, ledger, ε, D (float64)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases import DEVICE
from tests.distributed.rank_faults import sketched
from tests.distributed.rank_pool import RankPool
from tests.distributed.rank_runs import CASES, as_one, assert_same, trained
from tests.engine.loops import Step, Trained, truth

RUNS: dict[str, dict[str, Any]] = {
    "digits": {"case": "digits", "passes": 2, "track": ("diagonal",)},
    "digits, train_step": {"case": "digits", "passes": 2, "step": "train_step", "refreshed": True},
    "texts": {"case": "texts", "batch_size": 5, "rand_on_empty": True, "passes": 1},
}
MORE: dict[str, dict[str, Any]] = {
    "texts in three passes": {"case": "texts", "batch_size": 5, "rand_on_empty": True},
    "texts, train_step": {"case": "texts", "batch_size": 5, "step": "train_step"},
    "hooks": {"case": "digits", "passes": 1, "grad_sample_mode": "hooks"},
    "sum": {"case": "digits", "passes": 1, "loss_reduction": "sum", "step": "train_step", "track": ("plis",)},
    "no amplification": {"case": "digits", "passes": 1, "amplification": "none"},
    "per layer": {"case": "digits", "passes": 1, "clipping": "per_layer", "max_grad_norm": [0.2, 0.3, 0.2, 0.1]},
}


def compare(ranks: RankPool, folder: Path, **run: Any) -> list[Any]:
    """The outcome of every rank, found to be that of one process."""
    parts = ranks.run(trained, folder=str(folder), **run)
    run.pop("replayed", None)
    alone = trained(folder=str(folder), replayed=as_one([part.draws for part in parts]), **run)
    for part in parts:
        part.timeline = parts[0].timeline  # rank 0 has the file
        assert_same(part, alone)
    assert float(alone.sums["trace"].sum()) > 0
    assert sum(len(part.draws[0]) for part in parts) > 0
    return parts


@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_are_one_process(two_ranks: RankPool, tmp_path: Path, name: str) -> None:
    compare(two_ranks, tmp_path, **RUNS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_two_ranks_are_one_process_in_other_runs(two_ranks: RankPool, tmp_path: Path, name: str) -> None:
    compare(two_ranks, tmp_path, **MORE[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits", "texts in three passes"])
def test_four_ranks_are_one_process(four_ranks: RankPool, tmp_path: Path, name: str) -> None:
    parts = compare(four_ranks, tmp_path, **(RUNS | MORE)[name])
    if name != "digits":  # a rank whose very first batch is empty
        assert any(not part.draws[0] for part in parts)


def scattered(ranks: int, n: int = 61, steps: int = 14) -> list[list[list[int]]]:
    """Draws whose examples fall to any rank at each step, most to rank 0, and to the last one none at first."""
    generator = torch.Generator().manual_seed(11)
    parts: list[list[list[int]]] = [[] for _ in range(ranks)]
    for step in range(steps):
        drawn = (torch.rand(n, generator=generator) < 0.3).nonzero().flatten()
        on = torch.randint(2 * ranks, (len(drawn),), generator=generator).clamp(max=ranks) % ranks
        if step < 3:
            on = torch.zeros_like(on)
        for rank, part in enumerate(parts):
            part.append(drawn[on == rank].tolist())
    return parts


@pytest.mark.parametrize("physical", [pytest.param(None, marks=pytest.mark.slow), 3])
def test_examples_may_go_from_rank_to_rank(two_ranks: RankPool, tmp_path: Path, physical: int | None) -> None:
    parts = scattered(2)
    run: dict[str, Any] = {"case": "digits", "passes": 2, "folder": str(tmp_path)}
    found = two_ranks.run(trained, replayed=parts, physical=physical, refreshed=True, **run)
    alone = trained(replayed=as_one(parts), refreshed=True, **run)
    for each in found:
        each.timeline = found[0].timeline
        assert_same(each, alone, but=("_changes", "_last"), same_errors=False)


@pytest.mark.slow
def test_parts_of_the_data_are_dealt_out_anew(two_ranks: RankPool, tmp_path: Path) -> None:
    run: dict[str, Any] = {"case": "digits", "passes": 3, "folder": str(tmp_path)}
    parts = two_ranks.run(trained, reshuffled=True, **run)
    of_first = [[{i for draw in part.draws[7 * k : 7 * k + 7] for i in draw} for k in range(3)] for part in parts]
    assert of_first[0][0] & of_first[1][1]
    alone = trained(replayed=as_one([part.draws for part in parts]), **run)
    for part in parts:
        part.timeline = parts[0].timeline
        assert_same(part, alone, but=("_changes", "_last"), same_errors=False)


def test_ledger_of_two_ranks_is_the_truth(two_ranks: RankPool, tmp_path: Path) -> None:
    module, dataset, _ = CASES["digits"]()
    options = {"track": ("diagonal", "fim"), "questions": {}}
    parts = two_ranks.run(trained, case="digits", folder=str(tmp_path), passes=1, **options)
    steps = []
    for place, drawn in enumerate(as_one([part.draws for part in parts])):
        weights = parts[0].before[place]
        assert all(torch.equal(weights[name], value) for name, value in parts[1].before[place].items())
        steps.append(Step(weights, [dataset.tensors[0][drawn]], [dataset.tensors[1][drawn]]))
    run = Trained(None, None, None, None, steps)  # type: ignore[arg-type]
    fim, participations = truth(run, dataset, q=1 / 7, module=module.to(DEVICE))
    assert torch.equal(parts[1].sums["participations"], participations)
    torch.testing.assert_close(parts[1].sums["fim"], fim, rtol=1e-6, atol=1e-9)


def test_a_sketch_is_made_with_one_test_matrix(two_ranks: RankPool) -> None:
    for fim, sketch, test_matrix in two_ranks.run(sketched):
        torch.testing.assert_close(sketch, fim @ test_matrix)


def test_ranks_seeded_alike_draw_independently(two_ranks: RankPool, tmp_path: Path) -> None:
    parts = two_ranks.run(trained, case="digits", folder=str(tmp_path), passes=1, questions={})
    order = torch.randperm(61, generator=torch.Generator().manual_seed(0)).tolist()  # as Opacus deals examples out
    places = [[sorted(order.index(i) // 2 for i in draw) for draw in part.draws] for part in parts]
    assert places[0] != places[1]
    again = two_ranks.run(trained, case="digits", folder=str(tmp_path), passes=1, questions={})
    assert [part.draws for part in again] == [part.draws for part in parts]  # and reproducibly
