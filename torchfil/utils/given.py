"""What the user's loop, loader and model give: their kinds are the user's own."""

from __future__ import annotations

from typing import Any, Protocol

Tree = Any  # a tensor, or tuples, lists, dicts, dataclasses of tensors and of other values
Batch = Any  # what a data loader gives: one or several tensors, in a tree, with the examples first
Targets = Any  # the labels of a batch, as the loss takes them
Outputs = Any  # what a model returns: a tensor, or several in a tree, such as Hugging Face's
Args = tuple[Any, ...]  # the positional inputs of a call, as the module or operation wants them
Kwargs = dict[str, Any]  # its keyword inputs


class Rows(Protocol):
    """A data set with numbered rows."""

    def __len__(self) -> int:
        """How many."""

    def __getitem__(self, row: Any, /) -> Any:
        """One of them, as the collate function takes it."""
