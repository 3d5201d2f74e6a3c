"""Several processes against one with the same draws, and brute force: weights, ledger, ε, D
(float64).

Data parallel, and with models whose weights are sharded over the ranks (FSDP2).
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.cases import DEVICE
from tests.distributed.rank_pool import RankPool, printed_by_two
from tests.distributed.rank_runs import (
    CASES,
    as_one,
    assert_same,
    divided,
    ranks_of,
    replaying,
    shard,
    trained,
    whole,
)
from tests.engine.brute_force import Pass, Run, Truth, random_state
from tests.engine.loops import SIGMA, C
from tests.engine.loops import make as make_private
from tests.engine.ways import weights_of

pytestmark = pytest.mark.torch_versions
GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "scale.md"
SLOW = pytest.mark.slow
TEXTS = {"case": "texts", "batch_size": 5, "rand_on_empty": True}
ADAPTERS = {"case": "adapters", "batch_size": 5, "rand_on_empty": True, "sharded": True}
DIGITS = {"case": "digits", "passes": 1}
PER_LAYER = {"clipping": "per_layer", "max_grad_norm": [0.2, 0.3, 0.2, 0.1]}
SUM = {"loss_reduction": "sum", "step": "train_step"}
RUNS: dict[str, Any] = {
    "train_step": {**DIGITS, "step": "train_step", "refreshed": True},
    "texts": {**TEXTS, "passes": 1},
    "sharded": {**DIGITS, "track": ("diagonal",), "sharded": True, "saved": True},
    "adapters": {**ADAPTERS, "passes": 1},
}
MORE: dict[str, Any] = {
    "digits": {"case": "digits", "passes": 2, "track": ("diagonal",), "saved": True},
    "texts in three passes": TEXTS,
    "hooks": {**DIGITS, "grad_sample_mode": "hooks"},
    "sum": {**DIGITS, **SUM, "track": ("plis",)},
    "no amplification": {**DIGITS, "amplification": "none"},
    "per layer": {**DIGITS, **PER_LAYER},
    "sharded, train_step": {**DIGITS, "step": "train_step", "refreshed": True, "sharded": True},
    "sharded, per layer": {**DIGITS, **PER_LAYER, "sharded": True},
    "sharded texts": {**TEXTS, "sharded": True},
}


def compare(ranks: RankPool, folder: Path, **run: Any) -> list[Any]:
    """The outcome of every rank, found to be that of one process, but for predictions."""
    run["folder"] = str(folder) if run.pop("saved", False) else None
    parts = ranks.run(trained, **run)
    for name in ("sharded", "reshuffled", "physical"):
        run.pop(name, None)
    draws = run.get("replayed") or [part.draws for part in parts]
    alone = trained(**{**run, "replayed": as_one(draws)})
    expected = divided(alone, [part.held for part in parts])
    for part in parts:
        assert_same(part, expected)
    assert float(alone.sums["trace"].sum()) > 0
    return parts


@pytest.mark.parametrize("name", [*RUNS, *(pytest.param(name, marks=SLOW) for name in MORE)])
def test_two_ranks_are_one_process(two_ranks: RankPool, tmp_path: Path, name: str) -> None:
    compare(two_ranks, tmp_path, **(RUNS | MORE)[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits", "texts in three passes", "adapters", "sharded"])
def test_four_ranks_are_one_process(four_ranks: RankPool, tmp_path: Path, name: str) -> None:
    parts = compare(four_ranks, tmp_path, **(RUNS | MORE)[name])
    if "texts" in name:  # a rank whose very first batch is empty
        assert any(not part.draws[0] for part in parts)


def scattered() -> list[list[list[int]]]:
    """Draws of two ranks whose examples are dealt out anew in the second pass, most to rank 0, and
    of the other none at first.
    """
    generator = torch.Generator().manual_seed(11)
    parts: list[list[list[int]]] = [[], []]
    for step in range(14):
        if step % 7 == 0:
            on_other = torch.rand(61, generator=generator) < 0.3
        drawn = torch.rand(61, generator=generator) < 0.3
        parts[0].append((drawn & ~on_other).nonzero().flatten().tolist())
        parts[1].append((drawn & on_other & (step > 2)).nonzero().flatten().tolist())
    return parts


@pytest.mark.parametrize(
    "options",
    [
        {"replayed": scattered(), "physical": 8, "refreshed": True},
        pytest.param({"replayed": scattered(), "physical": 3, "sharded": True}, marks=SLOW),
        pytest.param({"reshuffled": True, "passes": 3}, marks=SLOW),
    ],
    ids=["pieces", "unlike pieces of a sharded model", "dealt out anew"],
)
def test_examples_may_go_from_rank_to_rank(
    two_ranks: RankPool, tmp_path: Path, options: dict[str, Any]
) -> None:
    parts = compare(two_ranks, tmp_path, **{"case": "digits", "passes": 2, **options})
    if "reshuffled" in options:
        first, second = (
            {i for draw in parts[k].draws[7 * k : 7 * k + 7] for i in draw} for k in (0, 1)
        )
        assert first & second


def test_ledger_of_two_ranks_is_the_truth_and_their_draws_are_independent(
    two_ranks: RankPool,
) -> None:
    module, dataset, _ = CASES["digits"]()
    run = {**DIGITS, "track": ("diagonal", "fim"), "questions": {}}
    parts = two_ranks.run(trained, **run)
    passes = []
    for place, drawn in enumerate(as_one([part.draws for part in parts])):
        weights = parts[0].before[place]
        assert all(
            torch.equal(weights[name], value) for name, value in parts[1].before[place].items()
        )
        passes.append(
            [
                Pass(
                    random_state(),
                    weights,
                    *(part[drawn].to(DEVICE) for part in dataset.tensors),
                    drawn,
                )
            ]
        )
    ledger = SimpleNamespace(
        num_examples=len(dataset), num_coordinates=dataset.tensors[0][0].numel()
    )
    about: Any = SimpleNamespace(ledger=ledger, sample_rate=1 / 7)
    options = {"noise_multiplier": SIGMA, "max_grad_norm": C, "amplification": None}
    released = [torch.zeros_like(weights_of(module.to(DEVICE)))] * len(passes)
    truth = Truth(
        Run(about, module, module, None, None, about, options, passes=passes, released=released),
        rank_of=ranks_of([part.held for part in parts], len(dataset)),
    )
    assert torch.equal(parts[1].sums["participations"].double(), truth.participations)
    torch.testing.assert_close(parts[1].sums["fim"], truth.fim, rtol=1e-6, atol=1e-9)

    # as Opacus deals examples out
    order = torch.randperm(61, generator=torch.Generator().manual_seed(0)).tolist()
    places = [[sorted(order.index(i) // 2 for i in draw) for draw in part.draws] for part in parts]
    assert places[0] != places[1]
    again = two_ranks.run(trained, **run)
    assert [part.draws for part in again] == [part.draws for part in parts]  # and reproducibly


def nobodys_steps(noise_multiplier: float, max_grad_norm: float) -> list[Tensor]:
    """The gradients that two steps release of empty batches, in ranks that are seeded alike: noise
    alone.
    """
    torch.manual_seed(1)
    module = shard(nn.Sequential(nn.Linear(64, 64, bias=False)))
    dataset = torch.utils.data.TensorDataset(torch.randn(40, 64), torch.randn(40, 64))
    options: dict[str, Any] = {"noise_multiplier": noise_multiplier, "max_grad_norm": max_grad_norm}
    engine, *_, loader = make_private(dataset, module, 10, criterion=nn.MSELoss(), **options)
    gradients = []
    with replaying([[], []]):
        for x, y in loader:
            engine.train_step(x, y)
            gradients.append(10 * whole(next(module.parameters()).grad))
    return gradients


def test_noise_is_drawn_once_for_every_weight(two_ranks: RankPool) -> None:
    """Of the right size, the same on all ranks, and unlike between the shards of ranks that are
    seeded alike.
    """
    here, there = two_ranks.run(nobodys_steps, 0.7, 3.0)
    for ours, theirs in zip(here, there, strict=True):
        assert torch.equal(ours, theirs)
        assert abs(float(ours.std()) / 2.1 - 1) < 4 / (2 * ours.numel()) ** 0.5
        first, second = ours[:32].flatten(), ours[32:].flatten()  # the shards
        assert (
            abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1]))
            < 4 / first.numel() ** 0.5
        )
    assert not torch.equal(here[0], here[1])


@pytest.mark.slow
def test_the_guides_script_runs_under_torchrun(tmp_path: Path) -> None:
    code, *_ = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)
    assert printed_by_two(code, tmp_path).count("individual_epsilon") == 1  # of rank 0 alone
