"""Rows in memory and in files; their precision and their size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from torchfil.accounting.ledger import Contribution, Ledger
from torchfil.accounting.quantities import Sum, path_additions
from torchfil.accounting.rows import RowTable

N, STEPS = 50, 12


def booked(ledger: Ledger, *, seed: int = 0, steps: int = STEPS) -> Ledger:
    """A run in which the first 20 examples are drawn at random and the others never."""
    source = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        rows = (torch.rand(20, generator=source) < 0.6).nonzero().flatten()
        trace = 0.5 + torch.rand(len(rows), generator=source, dtype=torch.float64)
        noise = torch.full_like(trace, 0.01)
        added = {"trace": trace, "variance": noise, "certain": trace / 2, **path_additions("trace", trace, noise, 1.0)}
        ledger.add(Contribution(rows, trace, True, added))
        ledger.steps += 1
    return ledger


def test_a_run_goes_on_from_its_state() -> None:
    unbroken = booked(Ledger(N, 3))
    resumed = Ledger.from_state_dict(unbroken.state_dict())
    for ledger in (resumed, unbroken):
        booked(ledger, seed=1, steps=3)
    for name, value in unbroken.sums.items():
        assert torch.equal(resumed.sums[name], value), name


def test_rows_in_files_are_the_same_and_leave_nothing(tmp_path: Path) -> None:
    mapped, plain = booked(Ledger(N, 3, device=tmp_path)), booked(Ledger(N, 3))
    assert list(tmp_path.iterdir()) == []
    for name, value in plain.sums.items():
        assert torch.equal(mapped.sums[name], value), name


def test_values_keep_1e_6_in_long_runs_and_errors_1e_4() -> None:
    """One example, 100,000 participations of very different size; sums in float64 and in float32."""
    source = torch.Generator().manual_seed(0)
    steps, rows = 100_000, torch.zeros(1, dtype=torch.long)
    table = RowTable({"value": Sum(), "error": Sum(dtype=torch.float32)}, 1)
    added = torch.randn(steps, generator=source, dtype=torch.float64).mul(2).exp()
    for value in added.split(1):
        table["value"].index_add_(0, rows, value)
        table["error"].index_add_(0, rows, value.float())
    assert float(table["value"]) == pytest.approx(float(added.sum()), rel=1e-9)
    assert float(table["error"]) == pytest.approx(float(added.sum()), rel=1e-4)


@pytest.mark.parametrize(
    ("track", "expected"),
    [((), 68), (("diagonal",), 68 + 12 * 7), (("plis",), 68 + 8 * 7), (("sketch",), 68 + 8 * 7 * 4), (("fim",), 460)],
)
def test_bytes_of_an_example_are_stated_and_met(track: tuple[str, ...], expected: int) -> None:
    ledger = Ledger(N, 7, track=track)
    assert Ledger.bytes_needed(1, 7, track, 4) == expected
    assert ledger.sums.num_bytes == N * expected
    assert f"{expected:,} bytes per example" in repr(ledger)
