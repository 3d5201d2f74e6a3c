"""What is saved from a run, independent of the engine that made it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchfil.accounting.leakage import Leakage
from torchfil.accounting.timeline import Timeline
from torchfil.engine.loader import split_batch
from torchfil.engine.options import RunOptions
from torchfil.planning.calibration import NoiseChoice
from torchfil.private import Examples, as_call
from torchfil.utils.noise import NoiseKind

__all__ = ["RunView"]


@dataclass(frozen=True, eq=False)
class RunView:
    """A run so far, for reading, at one δ; reading it leaves the run as it was.

    Attributes:
        leakage: The ledger, with the examples' ids.
        timeline: η̄ over training time.
        module: The user's module.
        dataset: The user's data set, whose examples are numbered from 0; None: a stream.
        collate_fn: Makes a batch from a list of its examples.
        options: How the run is accounted for.
        noise_multiplier: σ.
        max_grad_norm: C.
        expected_batch_size: What the noisy sum of a step is divided by; None: it is not divided.
        num_probes: The probes of a step.
        loss: The loss's name; None before it is known.
        generator: Source of the probes.
        accountant: The name of the DP accountant.
        releases: The accountant's history: (σ, q, how many steps).
        delta: δ.
        individual_epsilon: ε at δ of every example, [n].
        epsilon: ε at δ for everybody.
        rdp_mse_bound: Maps the range of a coordinate and ``reading=`` to the bound of Theorem 1.
        plis: Maps row numbers to their PLIS by private tensor, [rows, …]; None before the loss is known.
        examples: Maps row numbers to the examples with their private coordinates; None: a stream.
        clip_weights: ω of every example, [n]; None: none were given.
        noise_choice: How pilots chose σ; None: it was given.
        noise: Where noise and draws came from.
    """

    leakage: Leakage
    timeline: Timeline
    module: nn.Module
    dataset: Any
    collate_fn: Callable[[list[Any]], Any]
    options: RunOptions
    noise_multiplier: float
    max_grad_norm: float
    expected_batch_size: float | None
    num_probes: int
    loss: str | None
    generator: torch.Generator
    accountant: str
    releases: Sequence[tuple[float, float, int]]
    delta: float
    individual_epsilon: Tensor
    epsilon: float
    rdp_mse_bound: Callable[..., float]
    plis: Callable[[Sequence[int]], Mapping[Hashable, Tensor]] | None
    examples: Callable[[Sequence[int]], Examples] | None = None
    clip_weights: Tensor | None = None
    noise_choice: NoiseChoice | None = None
    noise: NoiseKind = "OS-seeded"

    def inputs(self, rows: Sequence[int]) -> dict[Hashable, Any]:
        """The model's inputs for these examples, by position and by name, [rows, …] each."""
        batch = self.collate_fn([self.dataset[row] for row in rows])
        args, kwargs = as_call(split_batch(batch, self.options.batch_to_inputs)[0])
        named: dict[Hashable, Any] = dict(enumerate(args))
        named.update(kwargs)
        return named
