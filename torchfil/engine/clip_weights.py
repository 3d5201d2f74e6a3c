"""A clip threshold for each example: its clipped gradient is multiplied by ω ∈ (0, 1].

With g̃ = ωφ(‖g‖) g, an example's norm is at most ωC; noise and ε stay those of C, and the example leaks less. ω is held
fixed in every bound: if the weights were chosen from the data, the bounds do not count what the weights reveal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from torchfil.accounting.ids import ExampleIds
from torchfil.accounting.sparing import weights_for_the_rest
from torchfil.clipping import check_clip_weights
from torchfil.engine.options import ClipWeights

__all__ = ["RunWeights", "check_same_weights", "weights_by_row", "weights_in_words"]


class RunWeights:
    """ω of every example over a run: as given, lowered for those that come close to the MSE bound to keep.

    Args:
        given: ω at the beginning, float64 [n]; None: 1 for everybody.
        min_mse_bound: The bound to keep; None: weights stay as given.
        num_examples: n.
        device: The device on which steps are computed.

    Attributes:
        first: ω as given.
        present: ω now; None: nobody has one.
    """

    def __init__(
        self, given: Tensor | None, min_mse_bound: float | None, num_examples: int, device: torch.device
    ) -> None:
        self._min_mse_bound, self._num_examples, self._device = min_mse_bound, num_examples, device
        self.first = None if given is None else given.to(device)
        self.restore(None)

    def restore(self, present: Tensor | None) -> None:
        """Continue with these weights; None: with those before anybody leaked anything."""
        self.present = self.first
        if present is not None:
            self.present = present.to(self._device).clone()
        elif self._min_mse_bound is not None:  # a separate copy for everybody
            ones = torch.ones(self._num_examples, dtype=torch.float64, device=self._device)
            self.present = ones if self.first is None else self.first.clone()

    def of(self, ids: Sequence[int]) -> Tensor | None:
        """ω of the examples with these numbers, float64 [ids]; None: nobody has one."""
        if self.present is None:
            return None
        return self.present[torch.tensor(ids, dtype=torch.long).to(self._device, non_blocking=True)]

    def spare(self, rows: Tensor, sums: Mapping[str, Tensor]) -> None:
        """Lower the weights of these examples, with these sums, if they come close to the bound to keep."""
        if self._min_mse_bound is None or self.present is None:
            return
        spent = self._min_mse_bound * sums["trace"] / sums["num_coordinates"].clamp(min=1)
        rows = rows.to(self._device, non_blocking=True)
        weights = weights_for_the_rest(spent).to(self._device)
        if self.first is not None:
            weights = weights * self.first[rows]
        self.present.index_copy_(0, rows, weights)  # in place, because a copy of all is as long as the data set


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
