"""Tensors with a row for each example, of which more come during a run."""

from __future__ import annotations

from torch import Tensor

__all__ = ["grow_rows"]

_MORE = 1.5  # how much longer a tensor is made in memory than it has to be, so that few rows are moved often


def grow_rows(tensor: Tensor, num_rows: int, fill: float = 0) -> None:
    """Lengthen a contiguous tensor in place to ``num_rows`` rows; the new ones hold ``fill``.

    Guarantees:
        * Growing row by row to n costs O(n) in all: memory is taken for half as many rows again.
        * Rows are never dropped: fewer than there are changes nothing.

    Example:
        >>> import torch
        >>> sums = torch.tensor([[1.0, 2.0]])
        >>> grow_rows(sums, 2, fill=7)
        >>> sums
        tensor([[1., 2.],
                [7., 7.]])
    """
    before = len(tensor)
    if num_rows <= before:
        return
    each = tensor.shape[1:]
    needed = num_rows * each.numel() * tensor.element_size()
    if needed > tensor.untyped_storage().nbytes():
        tensor.resize_(int(_MORE * num_rows), *each)  # what is there stays, and so does the memory when it is cut again
    tensor.resize_(num_rows, *each)
    tensor[before:] = fill
