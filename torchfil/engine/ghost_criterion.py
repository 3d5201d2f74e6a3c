"""The criterion that ``grad_sample_mode="ghost"`` returns, called like Opacus's.

Opacus's criterion returns an object whose ``backward()`` goes through the model twice. Here the loop's backward pass
ends at the model's outputs, so an ordinary tensor is enough: ``loss.backward()``, ``loss.item()``, ``loss / 2`` are
torch's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

__all__ = ["GhostCriterion"]


class GhostCriterion:
    """The mean (or sum) over a batch of ℓ_i, each example's own loss.

    ℓ_i comes from the criterion with ``reduction="none"``, as in Opacus: the mean (or sum) over the remaining
    dimensions of example i. So class weights do not mix examples, and a mean over tokens is over those of a sequence
    that ``ignore_index`` keeps.

    Args:
        criterion: A torch loss, or a function(outputs, targets) that gives one number or one per example; None:
            cross-entropy.
        loss_reduction: "mean" or "sum", over the batch.

    Raises:
        ValueError: The criterion's own reduction differs.

    Example:
        >>> import torch
        >>> loss = GhostCriterion(nn.MSELoss(), "mean")(torch.ones(2, 3), torch.zeros(2, 3))
        >>> loss.item()
        1.0
    """

    def __init__(self, criterion: Callable[..., Tensor] | None, loss_reduction: str) -> None:
        given = nn.CrossEntropyLoss(reduction=loss_reduction) if criterion is None else criterion
        own = getattr(given, "reduction", loss_reduction)
        if own != loss_reduction:
            raise ValueError(
                f"the criterion's reduction is {own!r} and loss_reduction={loss_reduction!r}; ghost clipping needs the "
                f"same for both: pass loss_reduction={own!r}, or a criterion with reduction={loss_reduction!r}"
            )
        self.criterion, self.reduction = given, loss_reduction
        self._by_example = given
        if isinstance(given, nn.Module) and hasattr(given, "reduction"):
            self._by_example = copy.copy(given)
            self._by_example.__dict__["reduction"] = "none"
        self._flattens = False  # whether the loop concatenates the tokens of all sequences

    def __call__(self, *args: Any, shape: Sequence[int] | None = None, **kwargs: Any) -> Tensor:
        """The batch's loss.

        Args:
            *args: Outputs and targets.
            shape: As in Opacus, the shape [batch, length, …] of outputs before their first two dimensions were
                flattened, for losses by token.
            **kwargs: Passed to the criterion.
        """
        if shape is not None:
            self._flattens = True
        elif self._flattens and len(args) == 2 and args[0].ndim > 2:  # the engine's, with outputs as the model has them
            shape = args[0].shape
            args = tuple(part.flatten(0, 1) for part in args)
        losses = self._by_example(*args, **kwargs)
        if losses.ndim == 0:
            return losses
        if shape is not None and len(losses) == shape[0] * shape[1]:
            losses = self._by_sequence(losses, args, kwargs, shape)
        return losses.mean() if self.reduction == "mean" else losses.sum()

    def _by_sequence(self, losses: Tensor, args: Any, kwargs: Any, shape: Sequence[int]) -> Tensor:
        """ℓ of each sequence, [batch], from those of its tokens; a mean is over the targets that are not ignored."""
        by_token = losses.reshape(shape[0], shape[1])
        if self.reduction == "sum":
            return by_token.sum(dim=1)
        ignored = getattr(self.criterion, "ignore_index", None)
        targets = kwargs.get("target", args[1] if len(args) > 1 else None)
        if ignored is None or targets is None:
            return by_token.mean(dim=1)
        counted = (targets.reshape(shape[0], shape[1]) != ignored).sum(dim=1).clamp(min=1)
        return by_token.sum(dim=1) / counted

    def __repr__(self) -> str:
        return repr(self.criterion)
