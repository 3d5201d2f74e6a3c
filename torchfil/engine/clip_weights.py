"""A clip threshold for each example: its clipped gradient is multiplied by ω ∈ (0, 1].

With g̃ = ωφ(‖g‖) g, an example's norm is at most ωC; noise and ε stay those of C, and the example leaks less. ω is held
fixed in every bound: if the weights were chosen from the data, the bounds do not count what the weights reveal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from torchfil.accounting.ids import ExampleIds
from torchfil.clipping import check_clip_weights
from torchfil.engine.options import ClipWeights

__all__ = ["check_same_weights", "weights_by_row", "weights_in_words"]


def weights_by_row(given: ClipWeights | None, ids: ExampleIds) -> Tensor | None:
    """ω of every example in the order of the data set, float64 [n]; None: nobody has one.

    Args:
        given: [n] in that order, or by id; ids that are left out have weight 1.
        ids: The examples' ids.

    Raises:
        ValueError: There is not one weight for each example, or one lies outside (0, 1].
        KeyError: A weight for an id that no example has.

    Example:
        >>> weights_by_row({"b": 0.5}, ExampleIds(3, ["a", "b", "c"]))
        tensor([1.0000, 0.5000, 1.0000], dtype=torch.float64)
    """
    if given is None:
        return None
    n = ids.num_examples
    if isinstance(given, Mapping):
        try:
            _, rows = ids.rows(given.keys())
        except KeyError as error:
            raise KeyError(f"clip_weights: {error.args[0]}") from error
        weights = torch.ones(n, dtype=torch.float64)
        weights[rows] = _numbers(list(given.values()))
    else:
        weights = _numbers(given)
        if weights.shape != (n,):
            raise ValueError(
                f"clip_weights has shape {list(weights.shape)} for {n} examples; give one weight for each in the order "
                "of the data set, or a dict {id: weight} of those that are not 1"
            )
    check_clip_weights(weights, ids.all())
    return weights


def _numbers(given: object) -> Tensor:
    """A copy of the weights on the CPU, in float64."""
    try:
        return torch.as_tensor(given, dtype=torch.float64, device="cpu").detach().clone()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"clip_weights is a {type(given).__name__} that does not hold numbers ({error}); give a tensor or an array "
            "[n], or a dict {id: weight}"
        ) from error


def check_same_weights(saved: Tensor | None, own: Tensor | None, ids: ExampleIds) -> None:
    """Raise unless a saved run has the same weights as this one.

    Raises:
        ValueError: They differ; the message names the first such example.

    Example:
        >>> check_same_weights(None, torch.ones(2), ExampleIds(2))
    """
    if saved is None and own is None:
        return
    n = ids.num_examples
    before, now = (torch.ones(n, dtype=torch.float64) if part is None else part.cpu() for part in (saved, own))
    if before.shape != now.shape:
        raise ValueError(f"the saved run has clip_weights for {len(before)} examples, this run for {n}")
    apart = (before != now).nonzero().flatten().tolist()
    if apart:
        row = apart[0]
        raise ValueError(
            f"the saved run has other clip_weights for {len(apart)} of {n} examples: {ids.all()[row]!r} had "
            f"{float(before[row])} and has {float(now[row])} now. Their sums would mix two mechanisms; pass the "
            "clip_weights that the run started with, or start a new run with the new ones."
        )


def weights_in_words(weights: Tensor | None) -> str:
    """A text that distinguishes runs with different weights; empty if everybody has 1.

    Example:
        >>> weights_in_words(torch.tensor([1.0, 0.5], dtype=torch.float64))
        'clip_weights below 1 for 1 of 2 examples (SHA-256 7ded32179961d3df)'
    """
    if weights is None or bool((weights == 1).all()):
        return ""
    content = weights.cpu().contiguous().numpy().tobytes()
    below = int((weights < 1).sum())
    digest = hashlib.sha256(content).hexdigest()[:16]
    return f"clip_weights below 1 for {below} of {len(weights)} examples (SHA-256 {digest})"
