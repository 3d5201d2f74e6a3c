"""Levels of noise in few entries: exact where they fit, never with less loss where they do not."""

from __future__ import annotations

import math

import pytest
import torch

from torchfil.accounting.norms import ENTRIES, LEVELS, RATIO, NormHistory, added, as_table, squeezed
from torchfil.engine.reading import individual_epsilon


def dense(history_steps: list[tuple[int, int]]) -> torch.Tensor:
    table = torch.zeros(1, LEVELS, dtype=torch.int32)
    for level, count in history_steps:
        table[0, level] += count
    return table


def kept(history_steps: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    levels, counts = torch.zeros(1, ENTRIES, dtype=torch.uint8), torch.zeros(1, ENTRIES, dtype=torch.int32)
    for level, count in history_steps:
        levels, counts = added(levels, counts, torch.tensor([level]), torch.tensor([count]))
    return levels, counts


def test_as_many_levels_as_entries_are_kept_exactly() -> None:
    steps = [(90 - 7 * (k % ENTRIES), k) for k in range(60)]
    assert torch.equal(as_table(*kept(steps)), dense(steps))


def test_more_levels_lose_no_step_and_no_loss() -> None:
    source = torch.Generator().manual_seed(0)
    steps = [(int(torch.randint(LEVELS, (), generator=source)), 1 + k % 5) for k in range(300)]
    found, exact = as_table(*kept(steps)), dense(steps)
    assert int((found > 0).sum()) <= ENTRIES
    assert found.sum() == exact.sum()
    assert bool((found.cumsum(dim=1) >= exact.cumsum(dim=1)).all()), "no step counts at a level with more noise"
    weights = RATIO ** (-2.0 * torch.arange(LEVELS))
    assert float((found * weights).sum()) < 1.2 * float((exact * weights).sum()), "ε grows by half as much, or less"


def test_a_table_of_all_levels_is_squeezed() -> None:
    source = torch.Generator().manual_seed(1)
    table = torch.randint(0, 9, (5, LEVELS), generator=source, dtype=torch.int32)
    levels, counts = squeezed(torch.arange(LEVELS, dtype=torch.uint8).expand(5, -1), table, ENTRIES)
    assert levels.shape == counts.shape == (5, ENTRIES)
    found = as_table(levels, counts)
    assert bool((found.cumsum(dim=1) >= table.cumsum(dim=1)).all())
    assert torch.equal(found.sum(dim=1), table.sum(dim=1))


def steps_of(history: NormHistory, *, change_noise: bool) -> None:
    source = torch.Generator().manual_seed(2)
    for step in range(40):
        rows = (torch.rand(8, generator=source) < 0.4).nonzero().flatten()
        ratio = torch.rand(len(rows), generator=source)
        history.step(rows, ratio, 1.0 if step < 25 or not change_noise else 0.9, 0.1)


@pytest.mark.parametrize("change_noise", [False, True])
def test_a_history_goes_on_from_its_state(change_noise: bool) -> None:
    source, target, rows = NormHistory(30), NormHistory(30), torch.arange(30)
    steps_of(source, change_noise=change_noise)
    assert source.counts_of(rows).sum(dim=1).tolist() == [40] * 30
    target.load_state_dict(source.state_dict())
    for history in (source, target):
        steps_of(history, change_noise=change_noise)
        assert history.steps == 80
    assert target.counts_of(rows).sum(dim=1).tolist() == [80] * 30
    assert torch.equal(target.counts_of(rows), source.counts_of(rows))


def test_a_state_of_another_shape_is_refused() -> None:
    history = NormHistory(30)
    steps_of(history, change_noise=False)
    state = history.state_dict()
    state["counts"] = state["counts"][:20]
    with pytest.raises(RuntimeError, match=r"shape '\[30, 12\]' is invalid"):
        NormHistory(30).load_state_dict(state)


@pytest.mark.parametrize("factor", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_epsilon_of_a_wandering_norm_is_bounded_closely(factor: float) -> None:
    """Norms over such a factor in 2,000 steps: against the same steps on the grid without entries."""
    source = torch.Generator().manual_seed(3)
    history, exact = NormHistory(1), NormHistory(1)
    table = torch.zeros(LEVELS, dtype=torch.long)
    for _ in range(2000):
        ratio = torch.rand(1, generator=source).mul(-math.log(factor)).exp()
        history.step(torch.zeros(1, dtype=torch.long), ratio, 1.0, 0.01)
        table[history.levels_of(ratio)] += 1
    exact.anchor, exact.noise_multiplier, exact.sample_rate, exact.steps = 1.0, 1.0, 0.01, 2000
    exact.counts_of = lambda rows: table[None].int()  # type: ignore[method-assign]
    found, truth = (
        individual_epsilon(each, torch.zeros(1, dtype=torch.long), 1e-6).item() for each in (history, exact)
    )
    assert truth <= found < 1.06 * truth
    assert math.isfinite(found)


def test_bytes_of_an_example_are_stated_and_met() -> None:
    assert NormHistory.bytes_needed(1) == 68
    assert NormHistory(40).num_bytes == 40 * 68
