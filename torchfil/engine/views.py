"""Augmentation multiplicity (De et al. 2022): K views of every example, whose mean gradient is clipped once.

The loss of an example is the mean over its views,

    ℓ_i(w) = (1/K) Σ_k ℓ(f_w(v_k(x_i)), y_i),

which is a function of the example like any other. So its gradient is clipped once, released and accounted for exactly:
through the views if a function makes them from x, or as a function of all K views if the data set draws them.

The views' random numbers are recorded with the model's masks, and the attacker is assumed to know them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from torchfil.fisher.models import check_unweighted_mean
from torchfil.utils.trees import map_tensors

__all__ = ["ManyViews", "MeanOverViews", "Views", "with_views"]

Views = int | Callable[[Tensor], Tensor]


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
        if not callable(views) and views < 1:
            raise ValueError(f"views={views} must be at least 1, or a function that maps x to its views")
        self.model, self.views = model, views

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The outputs, [batch, K, …] each in training; other inputs than ``x`` are the same for all views."""
        if not self.training:
            return self.model(x, *args, **kwargs)
        views = self.views(x) if callable(self.views) else x
        expected = (len(x),) if callable(self.views) else (len(x), self.views)
        if views.ndim < 2 or views.shape[: len(expected)] != expected:
            raise ValueError(
                f"views of shape {tuple(views.shape)} for inputs of shape {tuple(x.shape)}; they must be "
                f"[batch, {'K' if callable(self.views) else self.views}, …], batch first"
            )

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
        counts: list[int] = []

        def flat(leaf: Tensor) -> Tensor:
            counts.append(leaf.shape[1])
            return leaf.flatten(0, 1)

        outputs = map_tensors(flat, outputs)
        repeated = map_tensors(lambda leaf: leaf.repeat_interleave(counts[0], dim=0), targets)
        loss = self.criterion(outputs, repeated)
        return loss if self.loss_reduction == "mean" else loss / counts[0]

    def __repr__(self) -> str:
        return f"the mean over views of {self.criterion!r}"


def with_views(
    module: nn.Module, criterion: Callable[[Any, Any], Tensor] | None, views: Views | None, loss_reduction: str
) -> tuple[nn.Module, Callable[[Any, Any], Tensor] | None]:
    """Model and criterion for these views; unchanged for None."""
    if views is None:
        return module, criterion
    if criterion is None:
        raise ValueError(
            "views= needs the loss of single views, which is averaged over them: pass criterion= to make_private, for "
            "example nn.CrossEntropyLoss()"
        )
    return ManyViews(module, views), MeanOverViews(criterion, loss_reduction)
