"""Norms and PLIS of examples of the data set at the current weights, outside any step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchfil.attribution.plis import susceptibility
from torchfil.engine.loader import split_batch
from torchfil.engine.losses import IdentifiedLoss
from torchfil.engine.optimizer import FILOptimizer
from torchfil.engine.replica import Replica
from torchfil.engine.run import Run
from torchfil.fisher.batch import PrivateBatch
from torchfil.fisher.gradients import ExampleGradients
from torchfil.fisher.mechanism import Mechanism
from torchfil.private import Examples, as_call
from torchfil.utils.trees import map_tensors

__all__ = ["DatasetLooks"]

_BATCH = 256


class DatasetLooks:
    """Reads examples from the data set itself and differentiates at the current weights.

    Args:
        run: The run that they belong to.
        replica: The model.
        dataset: The user's data set; None: a stream, which cannot be read again.
        collate_fn: Makes a batch from its items.
    """

    def __init__(self, run: Run, replica: Replica, dataset: Any, collate_fn: Callable[[list[Any]], Any]) -> None:
        self.run = run
        self.replica = replica
        self.dataset = dataset
        self.collate_fn = collate_fn

    def refresh_norms(self, optimizer: FILOptimizer) -> None:
        """Compute every example's clipped gradient norm, for individual ε; several ranks share the work."""
        options, limit, ranks = self.run.options, float(optimizer.max_grad_norm), self.run.ranks
        first, apart = (0, 1) if ranks is None else (ranks.rank, ranks.size)
        for rows, gradients in self._batches(range(first, self.run.ids.num_examples, apart)):
            chunks = PrivateBatch(gradients, options.mechanism(1.0, limit)).chunks(options.max_memory, 4)
            ratio = torch.cat([jacobian.clipped_norm for _, jacobian in chunks]) / limit
            self.run.history.set_ratios(torch.tensor(rows), ratio)

    def plis(self, rows: Sequence[int], optimizer: FILOptimizer, *, private: bool) -> dict[Hashable, Tensor]:
        """The PLIS of these examples, by private tensor, [rows, …]; NaN at padding."""
        options, limit = self.run.options, float(optimizer.max_grad_norm)
        parts: dict[Hashable, list[Tensor]] = {}
        for _, gradients in self._batches(rows):
            if private and options.shares is not None:
                slopes = self._slopes_by_layer(gradients, options.mechanism(float(optimizer.noise_multiplier), limit))
            else:
                slopes = susceptibility(
                    gradients,
                    noise_std=float(optimizer.noise_multiplier) * limit if private else None,
                    max_grad_norm=limit if private else None,
                    clip=options.clip,
                    max_memory=options.max_memory,
                ).gradient
            for key, part in gradients.examples.maps(slopes).items():
                parts.setdefault(key, []).append(part)
        return {key: _joined(pieces) for key, pieces in parts.items()}

    def examples(self, rows: Sequence[int]) -> Examples:
        """These examples with their private coordinates; values are not checked."""
        return self._laid_out(self.collate_fn([self.dataset[row] for row in rows]), check_values=False)

    def _slopes_by_layer(self, gradients: ExampleGradients, mechanism: Mechanism) -> Tensor:
        """∂(‖g̃‖/s)²/∂z = 2‖g̃‖a/s², [batch, d], if each parameter's gradient is clipped separately."""
        chunks = PrivateBatch(gradients, mechanism).chunks(self.run.options.max_memory, 8)
        parts = [2 * jacobian.clipped_norm[:, None] * jacobian.clipped_norm_gradient() for _, jacobian in chunks]
        return torch.cat(parts) / mechanism.noise_std**2

    def _batches(self, rows: Sequence[int]) -> Iterator[tuple[Sequence[int], ExampleGradients]]:
        loss = self.run.loss
        if self.dataset is None:
            raise RuntimeError(
                "the examples of a stream cannot be read again, so their gradients are not available outside steps; "
                "this needs a data set with numbered examples"
            )
        if loss is None:
            raise RuntimeError("the loss is not known before the first step; pass criterion= to make_private")
        for start in range(0, len(rows), _BATCH):
            part = rows[start : start + _BATCH]
            gradients = self._gradients(self.collate_fn([self.dataset[row] for row in part]), loss)
            weights = self.run.weights_of(part)
            yield part, replace(gradients, examples=replace(gradients.examples, clip_weights=weights))

    def _gradients(self, batch: Any, loss: IdentifiedLoss) -> ExampleGradients:
        return self.replica.gradients(self._laid_out(batch), loss)

    def _laid_out(self, batch: Any, *, check_values: bool = True) -> Examples:
        options = self.run.options
        inputs, targets = map_tensors(
            lambda leaf: leaf.to(self.replica.device), split_batch(batch, options.batch_to_inputs)
        )
        args, kwargs = self.replica.examples_first(as_call(inputs))
        return self.replica.lay_out(args, kwargs, targets, options.private, check_values=check_values)


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    """The rows of all pieces, [rows, …], with NaN beyond the positions of shorter texts."""
    length = max(piece.shape[1] if piece.ndim > 1 else 0 for piece in pieces)
    missing = [length - piece.shape[1] if piece.ndim > 1 else 0 for piece in pieces]
    filled = [
        torch.cat([piece, piece.new_full((len(piece), more, *piece.shape[2:]), float("nan"))], dim=1) if more else piece
        for piece, more in zip(pieces, missing, strict=True)
    ]
    return torch.cat(filled)
