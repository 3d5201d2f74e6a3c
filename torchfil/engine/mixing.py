"""Was a row of the model's input made from several rows of the batch?

Accounting and differential privacy require that an example enters its own row of the model's input
and no other. Mixup, CutMix, a shuffled batch and statistics of the batch violate this, and leave
traces in the numbers: a row is a blend, a patchwork or a copy of *other* rows, or the batch's mean
is exactly 0. An augmentation of each row on its own (noise, flips, crops) leaves no such trace.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MOST_ROWS = 32  # rows of the input that are compared with all rows of the batch
_FEWEST_NUMBERS = 8  # numbers in a row that say something even if they are categories
_EXACT = 1e-5  # relative, in float32
_SHARE = 1e-2  # of another row, from which on it counts


def how_rows_mix(given: Tensor, rows: Tensor) -> str | None:
    """How the rows of an input, [batch, …], were made from several rows of the loader's batch.

    None: they were not.

    It says nothing about batches of one, about rows of fewer than eight numbers that repeat
    (categories), or about blends of rows of one or two numbers.

    Example:
        >>> rows = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
        >>> how_rows_mix(rows + 0.1, rows), how_rows_mix(0.6 * rows + 0.4 * rows.flip(0), rows)
        (None, 'blends of two rows (mixup?)')
    """
    batch, numbers = len(rows), rows[0].numel() if len(rows) else 0
    if batch < 2 or not numbers or torch.equal(given, rows):
        return None
    # equal or dependent by chance
    if numbers < _FEWEST_NUMBERS and 2 * rows.unique().numel() < rows.numel():
        return None
    x, t = (leaf.detach().reshape(batch, numbers).double() for leaf in (given, rows))
    if not (x + t).isfinite().all():  # reported with the rows' numbers
        return None
    changed = (x != t).any(dim=1).nonzero().flatten()[:_MOST_ROWS]
    if len(changed) > 1 and _are_copies(x[changed], t, changed):
        return (
            "rows in another order than the loader gave them, so they would be recorded for "
            "other examples"
        )
    if given.is_floating_point():
        if _are_blends(x[changed], t, changed):
            return "blends of two rows (mixup?)"
        if _are_centred(x) and not _are_centred(t):
            return "centred by statistics of the batch"
    if _are_patchworks(x[changed[:8]], t, changed[:8]):
        return "patchworks of two rows (CutMix?)"
    return None


def _are_copies(x: Tensor, t: Tensor, own: Tensor) -> bool:
    """Whether every row of x, [k, numbers], equals a row of t, [batch, numbers], but not its own
    row ``own``, [k].
    """
    alike = torch.cdist(x, t) == 0
    alike[torch.arange(len(own), device=own.device), own] = False
    return bool(alike.any(dim=1).all())


def _are_blends(x: Tensor, t: Tensor, own: Tensor) -> bool:
    """Whether at least half of x's rows are a·(own row) + b·(another), b ≠ 0: least squares with
    all other rows.

    Mixup may leave some rows almost unchanged. Constant rows (a change of brightness is a blend
    with one), and rows that are all blends of a few others, say nothing.
    """
    mine, count, first = t[own], len(own), t[:8]
    if t.shape[1] < 3 or int(torch.linalg.matrix_rank(first)) < min(len(first), t.shape[1], 4):
        return False
    tt, mm = t.square().sum(dim=1)[None], mine.square().sum(dim=1)[:, None]  # [1, batch], [k, 1]
    mt, xt, xm = mine @ t.T, x @ t.T, (x * mine).sum(dim=1)[:, None]
    determinant = mm * tt - mt.square()
    usable = (determinant > 1e-6 * mm * tt) & (t != t[:, :1]).any(dim=1)
    usable[torch.arange(count, device=own.device), own] = False
    determinant = torch.where(usable, determinant, 1.0)
    a, b = (tt * xm - mt * xt) / determinant, (mm * xt - mt * xm) / determinant

    # The closed form loses digits, so the best candidate of each row is checked directly.
    left = x.square().sum(dim=1)[:, None] - a * xm - b * xt
    best = torch.where(usable, left, torch.inf).argmin(dim=1)
    rows = torch.arange(count, device=own.device)
    rest = x - a[rows, best][:, None] * mine - b[rows, best][:, None] * t[best]
    small = rest.norm(dim=1) <= _EXACT * x.norm(dim=1)
    return bool(
        (small & usable[rows, best] & (b[rows, best].abs() > _SHARE)).double().mean() >= 0.5
    )


def _are_patchworks(x: Tensor, t: Tensor, own: Tensor) -> bool:
    """Whether each row of x combines numbers from its own row with several numbers from another
    row.
    """
    for row, k in zip(x, own.tolist(), strict=True):
        other = row != t[k]
        alike = (t[:, other] == row[other]).all(dim=1)
        alike[k] = False
        if (
            int(other.sum()) < _FEWEST_NUMBERS
            or not bool(alike.any())
            or not bool((row[other] != row[other][0]).any())
        ):
            return False
    return len(x) > 0


def _are_centred(x: Tensor) -> bool:
    """Whether every column, or all numbers together, have mean 0 up to rounding, though they are
    not all 0.
    """
    size = x.square().mean(dim=0).sqrt()
    columns = size > 0
    by_column = (x.mean(dim=0).abs() <= _EXACT * size)[columns]
    together = x.mean().abs() <= 1e-7 * x.square().mean().sqrt()
    return bool(columns.any()) and (bool(by_column.all()) or bool(together))
