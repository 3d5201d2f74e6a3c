"""The mean over repeated runs: what they must share; as one saved run, with their number and the ε of all of them."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from torchfil.engine.assembly import PrivateTraining
from torchfil.engine.clip_weights import weights_in_words
from torchfil.private import Private
from torchfil.report.saved_run import SavedRun

__all__ = ["as_merged", "epsilon_of_all", "mechanism_in_words"]


def as_merged(run: SavedRun, runs: int, epsilon: float) -> SavedRun:
    """A run whose numbers are means over ``runs`` repetitions, without what belongs to a single one.

    The numbers are about one release, on average. An example's own ε, the course of training and the seed are left out;
    so is reconstruction robustness if batches are known, because it depends on one run's participations.

    Args:
        run: Saved from the average; everything else is that of the first run.
        runs: The number of runs.
        epsilon: ε of all of them together.
    """
    about = {**run.about, "probe_seed": None, "merged": {"runs": runs, "epsilon_of_all": epsilon}}
    known_batches = about["mechanism"].get("sample_rate") is None
    return replace(
        run,
        about=about,
        columns={name: values for name, values in run.columns.items() if name != "epsilon"},
        history={},
        bounds={name: bound for name, bound in run.bounds.items() if name != "rero" or not known_batches},
    )


def epsilon_of_all(accountant: Any, runs: int, delta: float) -> float:
    """ε at δ if ``runs`` trainings like the accountant's are released together (composition)."""
    together = copy.deepcopy(accountant)
    together.history = list(accountant.history) * runs
    return float(together.get_epsilon(delta))


def mechanism_in_words(training: PrivateTraining, releases: Sequence[tuple[float, float, int]]) -> str:
    """In words, what must be the same in repetitions of a run."""
    options, optimizer = training.run.options, training.optimizer
    steps: Counter[tuple[float, float]] = Counter()
    for sigma, q, count in releases:
        steps[float(sigma), float(q)] += count
    noise = ", ".join(f"{count} steps of σ = {sigma}, q = {q}" for (sigma, q), count in sorted(steps.items()))

    weights = weights_in_words(training.run.clip_weights)
    limits = optimizer.max_grad_norms or float(optimizer.max_grad_norm)
    clipping = f"C = {limits}, clip {options.clip.name!r}" + (f", {weights}" if weights else "")

    # An amplification may be any object, so its factors are compared, not its name.
    mechanism = options.mechanism(float(optimizer.noise_multiplier) or 1.0, float(optimizer.max_grad_norm))
    factors = torch.cat(mechanism.weights(mechanism.noise_std * torch.tensor([0.1, 1.0, 10.0])))
    amplification = ", ".join(f"{value:.6g}" for value in factors * mechanism.noise_std**2)

    private = options.private or Private()
    lengths = None if private.lengths is None else "told"  # functions differ only by their address
    private = replace(private, coordinates=_listed(private.coordinates), lengths=lengths)
    return f"{noise}, {clipping}, amplification by {amplification}, {private}"


def _listed(coordinates: Any) -> Any:
    """Tensors and arrays as lists, whose text is complete."""
    if isinstance(coordinates, Mapping):
        return {key: _listed(value) for key, value in coordinates.items()}
    listed = coordinates.tolist() if hasattr(coordinates, "tolist") else coordinates
    return list(listed) if isinstance(listed, tuple | range) else listed
