"""Means over tokens: the loss of an example alone, and how a mean over a whole batch changes it.

A mean over all targets of a batch that count, Σ_i Σ_t ℓ_it / Σ_j n_j, weights example i by n_i / Σ_j n_j. The weight
depends on how many targets *others* have, so no part of this loss belongs to one example. Here ℓ_i = Σ_t ℓ_it / n_i is
the mean over the example's own targets, as in a batch of one, and every example has the same weight.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torchfil.fisher.precision import wide

__all__ = ["WEIGHTED_BY_TOKENS", "TokenMean", "uneven"]

WEIGHTED_BY_TOKENS = (
    "the loss is a mean over all targets of a batch that count (not -100), which weights an example by how many "
    "targets others have. Training and accounting use each example's mean over its own targets, every example with "
    "the same weight; if the numbers of targets differ, so does the value of the batch's loss. Use sums "
    "(reduction='sum', loss_reduction='sum') if long examples should weigh more."
)


@dataclass(frozen=True)
class TokenMean:
    """Cross-entropy of an example, its mean over the targets that count: Σ_t CE(o_t, y_t) / max(1, n).

    An example without any target that counts has loss 0 (torch gives NaN).

    Attributes:
        criterion: ``nn.CrossEntropyLoss`` or ``nn.NLLLoss`` without class weights; with reduction "sum" it stays a sum.
        classes_last: Whether the outputs are [batch, …, classes], as in language models, rather than torch's
            [batch, classes, …].
        shifted: Whether output t is compared with target t + 1, as in causal language models.

    Example:
        >>> loss = TokenMean(nn.CrossEntropyLoss(), classes_last=True, shifted=True)
        >>> labels = torch.tensor([[0, 1, -100]])
        >>> bool(loss(torch.zeros(1, 3, 2), labels) == torch.tensor(2.0).log()), loss.counted(labels)
        (True, tensor([1]))
    """

    criterion: nn.CrossEntropyLoss | nn.NLLLoss
    classes_last: bool = False
    shifted: bool = False
    _summed: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        summed = copy.copy(self.criterion)
        summed.reduction = "sum"
        object.__setattr__(self, "_summed", summed)

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """ℓ of a batch of one."""
        if targets.is_floating_point():  # class probabilities all count
            result: Tensor = self.criterion(outputs, targets)
            return result
        if self.shifted:
            outputs = wide(outputs[:, :-1])  # in float32, as language models do, whatever their dtype
        compared = self._compared(targets)
        if self.classes_last:  # token by token: softmax over a dimension that is not the last is slow on GPUs
            outputs, compared = outputs.flatten(0, -2), compared.flatten()
        total: Tensor = self._summed(outputs, compared)
        return total if self.criterion.reduction == "sum" else total / self.counted(targets).sum().clamp(min=1)

    def counted(self, targets: Tensor) -> Tensor:
        """n, how many targets of each example count, [batch]."""
        compared = self._compared(targets)
        return (compared != self.criterion.ignore_index).reshape(len(compared), -1).sum(dim=1)

    def weights(self, targets: Any) -> Tensor | None:
        """B n_i / Σ_j n_j, the weight of each example in a mean over the batch's targets, [batch]; None: 1."""
        if self.criterion.reduction == "sum" or not isinstance(targets, Tensor) or targets.is_floating_point():
            return None
        counted = self.counted(targets)
        return counted * len(targets) / counted.sum().clamp(min=1)

    def _compared(self, targets: Tensor) -> Tensor:
        return targets[:, 1:] if self.shifted else targets


def uneven(weights: Tensor) -> Tensor:
    """Whether some weights, [batch], differ, as a tensor, so that nobody has to wait for a GPU."""
    return (weights != weights[:1]).any() if len(weights) else torch.zeros((), dtype=torch.bool)
