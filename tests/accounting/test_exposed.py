"""Who is measured with more probes: the most exposed so far, and those who suddenly leak."""

from __future__ import annotations

import torch

from torchfil.accounting.pace import exposed_rows


def test_half_are_the_largest_and_half_the_sudden() -> None:
    source = torch.Generator().manual_seed(0)
    squares = torch.rand(64, generator=source, dtype=torch.float64) + 0.1
    trace = 3 * squares
    present = torch.full((64,), 0.01, dtype=torch.float64)
    trace[[5, 9]], squares[[5, 9]] = 50.0, 20.0
    trace[[20, 30]], present[[20, 30]] = 1e-6, 1.0
    assert set(exposed_rows(trace, squares, present, 4).tolist()) == {5, 9, 20, 30}
    assert exposed_rows(trace, squares, present, 5).unique().numel() == 5


def test_every_row_occurs_once_whatever_the_sums() -> None:
    zeros = torch.zeros(10, dtype=torch.float64)
    for count in (1, 2, 7, 10, 30):
        rows = exposed_rows(zeros, zeros, zeros, count)
        assert rows.unique().numel() == len(rows) == min(count, 10)
