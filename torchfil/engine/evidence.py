"""What the live model did with the examples of a pass: the guard compares the pass with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchfil.engine.losses import IdentifiedLoss
from torchfil.engine.rows import OverRows, OwnedRows
from torchfil.utils.given import Outputs, Targets
from torchfil.utils.trees import map_tensors, tensors_of


@dataclass(frozen=True)
class Evidence:
    """By example, in the order of the pass; of owners by their rows, with 0 at padding.

    Attributes:
        loss: Of one example.
        outputs: Of the live model, [batch, …] or [batch, K, …].
        targets: Those of the loss.
        output_gradients: ∂ℓ_i/∂output_i of the training loop, for every tensor of the outputs;
            none: it has not called backward.
        weightings: What the loop's loss may weight them by, [batch], [batch, K] or one number each;
            first 1.0.
        autocast: The dtype under which the model ran; None: no autocast.
    """

    loss: IdentifiedLoss | OverRows
    outputs: Outputs
    targets: Targets
    output_gradients: Sequence[Tensor] = ()
    weightings: Sequence[Tensor | float] = (1.0,)
    autocast: torch.dtype | None = None

    def of_owners(self, part: OwnedRows, loss: OverRows) -> Evidence:
        """The same by owner; ``self`` is about all rows of the batch."""
        own = part.numbers >= 0
        weight = own / part.counts[:, None] if loss.row_reduction == "mean" else own

        def of_rows(gradient: Tensor) -> Tensor:
            share = weight.to(gradient, non_blocking=True)
            return share.reshape(*share.shape, *(1,) * (gradient.ndim - 2)) * gradient

        outputs, targets = part.grouped((self.outputs, self.targets))
        return Evidence(
            loss,
            outputs,
            (targets, part.numbers.to(tensors_of(outputs)[0].device, non_blocking=True)),
            tuple(map(of_rows, part.grouped(list(self.output_gradients)))),
            map_tensors(lambda leaf: part.grouped(leaf), list(self.weightings)),
            self.autocast,
        )
