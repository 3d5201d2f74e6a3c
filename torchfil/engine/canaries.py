"""Canaries that are examples: their gradients, from the passes that make those of people."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchfil.audit.canaries import Canaries, CanaryScores, Directions, Gradients
from torchfil.engine.loader import split_batch
from torchfil.engine.losses import NO_TARGETS
from torchfil.engine.optimizer import FILOptimizer
from torchfil.engine.options import BatchToInputs
from torchfil.engine.step import Step
from torchfil.fisher.batch import PrivateBatch
from torchfil.fisher.gradients import ExampleGradients
from torchfil.fisher.operator import Jacobian
from torchfil.utils.noise import preserve_rng

Collate = Callable[[list[Any]], object]
_WORKING_VECTORS = 4  # vectors of length p per canary, if its gradient is formed


class CanaryInputs:
    """Canary c's gradient is that of an example at the current weights, clipped as those of people.

    Args:
        step: Runs the model.
        inputs: The canaries' inputs, as for :meth:`FILPrivacyEngine.train_step`.
        targets: Their targets.
        sizes: How many weights each parameter has, by name, in the optimizer's order.
        rate: q.
    """

    same = False

    def __init__(
        self, step: Step, inputs: object, targets: object, sizes: Mapping[str, int], rate: float
    ) -> None:
        self._step, self._batch, self._sizes, self._rate = (
            step,
            (inputs, targets),
            dict(sizes),
            rate,
        )
        self._sum = torch.zeros(())  # Σ_c g̃_c of the current step, [p]
        self._gradients: list[ExampleGradients] = []

    def join(self, noisy: Tensor, joining: Tensor, limits: Sequence[float]) -> None:
        """Add Σ g̃_c over these canaries to the sum, [p]; nothing before the loss is known."""
        self._gradients, self._sum = self._step.gradients_of(*self._batch), torch.zeros_like(noisy)
        for rows, jacobian in self._jacobians(limits):
            for total, mask in ((noisy, joining[rows].to(jacobian.norm)), (self._sum, None)):
                sums = jacobian.clipped_sum(mask)
                total += torch.cat([sums[name].flatten() for name in self._sizes])

    def products(self, left: Tensor, limits: Sequence[float]) -> tuple[Tensor, Tensor]:
        """⟨g̃_c, r − m_c⟩ and ‖g̃_c‖², [m] each, under the masks with which they joined; 0 before
        the loss is known.
        """
        half = self._rate / 2  # the chance that a canary joins
        parts = torch.sub(left, self._sum, alpha=half).split(list(self._sizes.values()))
        direction = dict(zip(self._sizes, parts, strict=True))
        found = [
            (each.inner_products(direction), each.clipped_norm)
            for _, each in self._jacobians(limits)
        ]
        if not found:
            return left.new_zeros((), dtype=torch.float64), left.new_zeros((), dtype=torch.float64)
        inner, norms = (torch.cat(each).double() for each in zip(*found, strict=True))
        return inner + half * norms.square(), norms.square()

    def _jacobians(self, limits: Sequence[float]) -> Iterator[tuple[slice, Jacobian]]:
        options, plans = self._step.options, self._step.passes.plans
        limit = limits[0] if options.shares is None else math.hypot(*limits)
        for gradients in self._gradients:
            batch = PrivateBatch(gradients, options.mechanism(1.0, limit), plans.of(gradients))
            yield from batch.chunks(options.max_memory, _WORKING_VECTORS, measured=False)


def canary_scores(
    canaries: Canaries, step: Step, optimizer: FILOptimizer, dataset: object, collate_fn: Collate
) -> CanaryScores:
    """The canaries of a run.

    Args:
        canaries: How many, of which kind.
        step: Runs the model.
        optimizer: The private optimizer, whose source draws who is in.
        dataset: The user's data set.
        collate_fn: Makes a batch from its items.
    """
    rate, device = step.options.sample_rate, step.replica.device
    if rate is None or not optimizer.noise_multiplier > 0:
        raise ValueError(
            "canaries= needs Poisson sampling with noise: without it ε has no step to audit"
        )
    sizes = {
        name: p.numel() for name, p in zip(optimizer.parameter_names, optimizer.params, strict=True)
    }
    gradients: Gradients = Directions(canaries.count, list(sizes.values()), device)
    if canaries.inputs is not None:
        if step.options.accounting.by_owner:
            raise ValueError(
                "canaries that are examples have one row each, and owner_of= gives a person "
                f"several: use directions, Canaries({canaries.count})"
            )
        if canaries.inputs is dataset:
            raise ValueError(
                "inputs= is the run's own data set, whose people would take part twice; give "
                "other examples"
            )
        gradients = CanaryInputs(
            step, *_batch_of(canaries, collate_fn, step.options.batch_to_inputs), sizes, rate
        )
    return CanaryScores(canaries, gradients, optimizer.noise, rate, device)


def _batch_of(
    canaries: Canaries, collate_fn: Collate, split: BatchToInputs | None
) -> tuple[object, object]:
    """Inputs and targets of all canaries; the same if a run is resumed."""
    make = canaries.inputs if callable(canaries.inputs) else canaries.inputs.__getitem__
    with preserve_rng(seed=0):
        batch = collate_fn([make(number) for number in range(canaries.count)])
    if canaries.kind != "mislabelled" and split is None and isinstance(batch, Mapping):
        return batch, NO_TARGETS  # the model may need its labels
    inputs, targets = split_batch(batch, split)
    if canaries.kind != "mislabelled":
        return inputs, targets

    # another of the classes that occur
    source = np.random.default_rng(0)
    one_each = isinstance(targets, Tensor) and targets.numel() == canaries.count
    classes, place = (targets if one_each else torch.zeros(1)).unique(return_inverse=True)
    if not 2 <= len(classes) < canaries.count:
        raise ValueError(
            "mislabelled canaries need one class label for each example, of at least two classes; "
            "pass a function that makes the examples"
        )
    others = (
        torch.from_numpy(source.integers(1, len(classes), canaries.count))
        .to(place.device)
        .view_as(place)
    )
    return inputs, classes[(place + others) % len(classes)]
