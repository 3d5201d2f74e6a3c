"""Data sets that draw another tensor each time an example is read: sums by coordinate are refused for them.

The Fisher information of a step is about the tensor that the model saw. With random flips or crops this is a drawn
view, and coordinate j is another pixel in every step, so sums by coordinate would mix pixels. The trace has no
coordinates and is kept, as a sum over the views.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from torchfil.accounting.quantities import tracked
from torchfil.engine.loader import split_batch
from torchfil.private import Private, as_call
from torchfil.utils.noise import preserve_rng
from torchfil.utils.trees import tensors_of

__all__ = ["check_reads_alike"]

_EXAMPLES_TO_READ = 16  # a flip with probability 1/2 goes unnoticed once in 65,536 runs


def check_reads_alike(
    loader: DataLoader[Any], track: Collection[str], private: Private | None, batch_to_inputs: Callable[..., Any] | None
) -> None:
    """If sums by coordinate are tracked, read some examples twice, and refuse data that differs.

    It reads 16 examples, so a rare random transform can go unnoticed.

    Args:
        loader: Draws from a data set with numbered examples.
        track: What is tracked.
        private: What is private.
        batch_to_inputs: Maps a batch to (inputs, targets).

    Raises:
        ValueError: The private part of an example differs between two reads.
    """
    dataset: Any = loader.dataset
    by_coordinate = [quantity.name for quantity in tracked(track) if quantity.by_coordinate]
    rows = range(0, len(dataset), max(1, len(dataset) // _EXAMPLES_TO_READ))[:_EXAMPLES_TO_READ]
    if not by_coordinate or not rows:
        return

    with preserve_rng():
        first, second = (
            _private_tensors(split_batch(loader.collate_fn([dataset[row] for row in rows]), batch_to_inputs), private)
            for _ in range(2)
        )

    if len(first) != len(second) or not all(map(_equal, first, second)):
        names = ", ".join(map(repr, by_coordinate))
        raise ValueError(
            f"track=({names},) sums by coordinate, but this data set gives other values each time an example is read "
            "(a random transform?): coordinate j would be another pixel at every step. Either track only the trace, "
            "which is then about the views that were drawn; or move the random transform from the data set into the "
            "model's forward(), whose random numbers are accounted for, so that coordinates are the example's own. If "
            "the part that differs is not private, name what is: private=Private(inputs=…)."
        )


def _private_tensors(batch: tuple[Any, Any], private: Private | None) -> list[Tensor]:
    """The tensors whose coordinates are summed: the named ones, else the floating-point ones, else all.

    A private submodule's output depends on every input.
    """
    (args, kwargs), targets = as_call(batch[0]), batch[1]
    named: dict[int | str, Any] = dict(enumerate(args))
    named.update(kwargs)
    private = private or Private()
    given = () if private.inputs is None else private.inputs
    keys = [given] if isinstance(given, int | str | Integral) else given

    inputs = tensors_of(named)
    chosen = tensors_of([named[key] for key in keys if key in named])
    if not chosen and not private.submodules:
        chosen = [leaf for leaf in inputs if leaf.is_floating_point()]
    return (chosen or inputs) + (tensors_of(targets) if private.target else [])


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
