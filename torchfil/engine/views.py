"""Augmentation multiplicity (De et al. 2022): K views of every example, whose mean gradient is clipped once.

The loss of an example is the mean over its views,

    ℓ_i(w) = (1/K) Σ_k ℓ(f_w(v_k(x_i)), y_i),

which is a function of the example like any other. So its gradient is clipped once, released and accounted for exactly:
through the views if a function makes them from x, or as a function of all K views if the data set draws them. The
views' random numbers are recorded with the model's masks, and the attacker is assumed to know them.

Data sets that draw another tensor each time an example is read: the Fisher information of a step is about the tensor
that the model saw. With random flips or crops this is a drawn view, and coordinate j is another pixel in every step, so
sums by coordinate would mix pixels and are refused. The trace has no coordinates and is kept, as a sum over the views.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from torchfil.accounting.quantities import tracked
from torchfil.engine.loader import split_batch
from torchfil.fisher.models import check_unweighted_mean
from torchfil.private import Private, as_call
from torchfil.utils.noise import preserve_rng
from torchfil.utils.trees import map_tensors, tensors_of

Views = int | Callable[[Tensor], Tensor]
_EXAMPLES_TO_READ = 16  # a flip with probability 1/2 goes unnoticed once in 65,536 runs


class ManyViews(nn.Module):
    """A model that sees K views of every example in training, and the examples themselves in evaluation.

    Args:
        model: Takes views like examples, [batch · K, …].
        views: A function that maps x [batch, …] to its views, [batch, K, …], with torch functions (its random numbers
            must have the batch first); or K: the batches hold K views each, [batch, K, …], which are then all private.

    Example:
        >>> import torch
        >>> model = ManyViews(nn.Linear(3, 2), lambda x: torch.stack([x, x.flip(-1)], dim=1))
        >>> model(torch.ones(5, 3)).shape, model.eval()(torch.ones(5, 3)).shape
        (torch.Size([5, 2, 2]), torch.Size([5, 2]))
    """

    def __init__(self, model: nn.Module, views: Views) -> None:
        super().__init__()
        self.model, self.views = model, views

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The outputs, [batch, K, …] each in training; other inputs than ``x`` are the same for all views."""
        if not self.training:
            return self.model(x, *args, **kwargs)
        views = self.views(x) if callable(self.views) else x
        expected = (len(x),) if callable(self.views) else (len(x), self.views)
        if views.ndim < 2 or views.shape[: len(expected)] != expected:
            shapes = f"views of shape {tuple(views.shape)} for inputs of shape {tuple(x.shape)}"
            raise ValueError(f"{shapes}, views={self.views}: they must be [batch, K, …], with K of at least 1")
        batch, count = views.shape[:2]
        args, kwargs = map_tensors(lambda leaf: leaf.repeat_interleave(count, dim=0), (args, kwargs))
        outputs = self.model(views.flatten(0, 1), *args, **kwargs)
        return map_tensors(lambda leaf: leaf.unflatten(0, (batch, count)), outputs)


class MeanOverViews:
    """A criterion for outputs by view, [batch, K, …]: the mean of the loss over an example's views.

    Args:
        criterion: The loss of single views, a mean or a sum over them.
        loss_reduction: "mean" or "sum": how it reduces over the batch.

    Example:
        >>> import torch
        >>> MeanOverViews(nn.MSELoss(reduction="sum"), "sum")(torch.ones(2, 4, 1), torch.zeros(2, 1)).item()
        2.0
    """

    def __init__(self, criterion: Callable[[Any, Any], Tensor], loss_reduction: str) -> None:
        check_unweighted_mean(criterion)
        self.criterion, self.loss_reduction = criterion, loss_reduction

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        """The batch's loss; targets, [batch, …], are the same for all views."""
        count = tensors_of(outputs)[0].shape[1]
        views = map_tensors(lambda leaf: leaf.flatten(0, 1), outputs)
        loss = self.criterion(views, map_tensors(lambda leaf: leaf.repeat_interleave(count, dim=0), targets))
        return loss if self.loss_reduction == "mean" else loss / count

    def __repr__(self) -> str:
        return f"the mean over views of {self.criterion!r}"


def with_views(
    module: nn.Module, criterion: Callable[[Any, Any], Tensor] | None, views: Views | None, loss_reduction: str
) -> tuple[nn.Module, Callable[[Any, Any], Tensor] | None]:
    """Model and criterion for these views; unchanged for None."""
    if views is None:
        return module, criterion
    if criterion is None:
        raise ValueError("views= needs criterion=, the loss of single views, such as nn.CrossEntropyLoss()")
    return ManyViews(module, views), MeanOverViews(criterion, loss_reduction)


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

    def same(one: Tensor, two: Tensor) -> bool:
        return one.shape == two.shape and torch.allclose(one, two, rtol=0, atol=0, equal_nan=True)

    if len(first) != len(second) or not all(map(same, first, second)):
        raise ValueError(
            f"track={tuple(by_coordinate)} sums by coordinate, but this data set gives other values each time an "
            "example is read (a random transform?): coordinate j would be another pixel at every step. Track only the "
            "trace; or move the transform into the model's forward(), whose random numbers are accounted for. If the "
            "part that differs is not private, name what is: private=Private(inputs=…)."
        )


def _private_tensors(batch: tuple[Any, Any], private: Private | None) -> list[Tensor]:
    """The tensors whose coordinates are summed: the named ones, else the floating-point ones, else all.

    A private submodule's output depends on every input.
    """
    (args, kwargs), targets = as_call(batch[0]), batch[1]
    named: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    private = private or Private()
    given = () if private.inputs is None else private.inputs
    keys = [given] if isinstance(given, int | str | Integral) else given

    inputs = tensors_of(named)
    chosen = tensors_of([named[key] for key in keys if key in named])
    if not chosen and not private.submodules:
        chosen = [leaf for leaf in inputs if leaf.is_floating_point()]
    return (chosen or inputs) + (tensors_of(targets) if private.target else [])
