"""Checksums of a data set: a report says on which data a model was trained, and a run resumes on the same data."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import Subset, TensorDataset

__all__ = ["data_fingerprint", "data_sha256"]

_BYTES_AT_ONCE = 2**26
_READ_WHOLE = 2**30  # bytes of a TensorDataset up to which a fingerprint is of all examples, a second's work
_EXAMPLES_OF_OTHERS = 64


class _Stream:
    """One tensor of every example: its dtype and shape wherever they change, and its bytes."""

    def __init__(self) -> None:
        self.layout = hashlib.sha256()
        self.content = hashlib.sha256()
        self._last = ""

    def add(self, row: int, layout: str, content: Any) -> None:
        if layout != self._last:
            self.layout.update(f"{row} {layout}\0".encode())
            self._last = layout
        self.content.update(content)


def data_sha256(dataset: Any) -> str:
    """SHA-256 over all examples in order: dtype, shape and bytes of every tensor, and the text of everything else.

    A ``TensorDataset`` is read tensor by tensor, any other data set example by example, with the same result. If
    examples change at random when read (augmentation), so does the checksum.
    """
    streams: dict[int, _Stream] = {}
    # a subclass may return something else, so only the class itself is read by its tensors
    if type(dataset) is TensorDataset:
        for place, values in enumerate(dataset.tensors):
            stream = streams.setdefault(place, _Stream())
            rows = max(1, _BYTES_AT_ONCE // max(1, values[:1].numel() * values.element_size()))
            for start in range(0, len(values), rows):
                stream.add(0, _layout(values.dtype, values.shape[1:]), _bytes(values[start : start + rows]))
    else:
        for row in range(len(dataset)):
            for place, leaf in enumerate(pytree.tree_leaves(dataset[row])):
                stream = streams.setdefault(place, _Stream())
                if isinstance(leaf, Tensor):
                    stream.add(row, _layout(leaf.dtype, leaf.shape), _bytes(leaf))
                elif isinstance(leaf, np.ndarray):
                    stream.add(row, f"numpy {leaf.dtype} {list(leaf.shape)}", leaf.tobytes())
                else:
                    text = str(leaf).encode()
                    stream.add(row, f"{type(leaf).__name__} {len(text)}", text)

    whole = hashlib.sha256(f"{len(dataset)}".encode())
    for place in sorted(streams):
        whole.update(streams[place].layout.digest() + streams[place].content.digest())
    return whole.hexdigest()


def data_fingerprint(dataset: Any) -> str | None:
    """A checksum to recognise a data set by; None if its examples change whenever they are read.

    A ``TensorDataset`` of up to 1 GiB is read whole, of others 64 examples: it recognises other data, but not one
    changed example in a million.
    """
    n = len(dataset)
    if type(dataset) is TensorDataset and sum(t.numel() * t.element_size() for t in dataset.tensors) <= _READ_WHOLE:
        return data_sha256(dataset)
    rows = sorted({round(k * (n - 1) / _EXAMPLES_OF_OTHERS) for k in range(_EXAMPLES_OF_OTHERS + 1)})
    some = Subset(dataset, rows)
    found = {f"{n} {data_sha256(some)}" for _ in range(2)}
    return found.pop() if len(found) == 1 else None


def _layout(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{dtype} {list(shape)}"


def _bytes(values: Tensor) -> Any:
    """The tensor's bytes in order, for hashing."""
    if values.numel() == 0:
        return b""
    return values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
