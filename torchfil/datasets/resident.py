"""Data that stays on one device, where batches are made."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset

__all__ = ["ResidentDataset"]


class ResidentDataset(Dataset[tuple[int]]):
    """Tensors that stay on one device, [n, …] each; a whole batch is indexed at once.

    A sample is its number; pass :meth:`collate` to the loader. A loader that fetches and stacks thousands of images
    one by one takes longer than the step itself.

    Example:
        >>> data = ResidentDataset(torch.arange(4.0) ** 2, torch.arange(4))
        >>> data.collate([data[3], data[1]])
        (tensor([9., 1.]), tensor([3, 1]))
    """

    def __init__(self, *tensors: Tensor) -> None:
        sizes = {len(tensor) for tensor in tensors}
        if len(sizes) != 1 or len({tensor.device for tensor in tensors}) != 1:
            raise ValueError(
                f"tensors of lengths {[len(tensor) for tensor in tensors]} on {[str(t.device) for t in tensors]} must "
                "have one length and one device: row i of each belongs to example i"
            )
        self.tensors = tensors

    @property
    def device(self) -> torch.device:
        """The tensors' device."""
        return self.tensors[0].device

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, number: int) -> tuple[int]:
        return (number,)

    def __getitems__(self, numbers: list[int]) -> list[tuple[int]]:
        """The samples of these numbers."""
        return [(number,) for number in numbers]

    def collate(self, samples: list[tuple[int]]) -> tuple[Tensor, ...]:
        """The rows of these samples; an empty batch if there are none."""
        rows = torch.tensor([number for (number,) in samples], dtype=torch.long, device=self.device)
        return tuple(tensor[rows] for tensor in self.tensors)
