"""Canaries: examples made for an audit, of which a secret half takes part in the run.

Each of m canaries is in with probability ½, independently. At every step those that are in join the sum of clipped
gradients with probability q each, before the noise is added; q, the divisor and the noise stay those of the run. Who is
in can then be guessed from what the run releases, and :mod:`torchfil.audit.bounds` says what that shows about ε.

Let y_t be the noisy sum of step t, s = σC the noise's standard deviation, and g̃_c the clipped gradient of canary c. The
auditor knows everybody else and their batches, as the attacker of differential privacy does, and subtracts their part:

    r_t = y_t − Σ_people g̃ = Σ_c in_c drawn_{c,t} g̃_c + N(0, s²I),
    score_c = Σ_t log(1 − q + q exp((⟨g̃_c, r_t⟩ − ‖g̃_c‖²/2) / s²)),

the log likelihood ratio of "in" against "out", with the other canaries as noise. It is computed for all canaries at
every step, drawn or not: a score of those drawn would reveal who is in.

The loop does not see canaries: they join when a batch is released. The engine clips their gradients with the code that
clips those of people.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from torchfil.fisher.mechanism import step_divergence
from torchfil.utils.errors import require
from torchfil.utils.noise import NoiseSource

_SMALL = 0.01  # of all weights: parameters below have no directions of their own


@dataclass(frozen=True)
class Canaries:
    """How a run is audited, for ``make_private(canaries=…)``; :meth:`FILPrivacyEngine.audit` reads the result.

    Canaries cost some accuracy, because half of them are learned, and time. Directions are almost free. Other canaries
    cost a gradient each at every step, so a few hundred are usual. None of them is in tables and reports of people.

    Attributes:
        count: m. So many canaries can show only so much: 1,000, all guessed right, ε ≥ 5.8 at δ = 1e-5.
        inputs: What a canary is. None: a direction, the gradient C·e_j for a coordinate j of its own, which is the
            worst case that ε speaks about. "mislabelled": an example of the data set with another class. A function
            from 0, …, m − 1 to an example, as the data set gives them: inputs by a rule of yours.

    Example:
        >>> Canaries(1000).kind
        'directions'
    """

    count: int = 1000
    inputs: str | Callable[[int], Any] | None = None

    def __post_init__(self) -> None:
        known = self.inputs in (None, "mislabelled") or callable(self.inputs)
        require(known, f"inputs={self.inputs!r} must be None, 'mislabelled' or a function from a number to an example")
        require(self.count >= 1, f"count={self.count} must be at least 1")

    @property
    def kind(self) -> str:
        """What reports call them."""
        if callable(self.inputs):
            return "inputs"
        return self.inputs or "directions"


class Gradients(Protocol):
    """The clipped gradients of all canaries at the current weights.

    Attributes:
        same: Whether their norms stay the same from step to step.
    """

    same: bool

    def join(self, noisy: Sequence[Tensor], joining: Tensor, limits: Sequence[float]) -> None:
        """Add the gradients of these canaries, bool [m], to the sums by parameter, clipped to C or to each C_l."""

    def products(
        self, released: Sequence[Tensor], people: Sequence[Tensor], limits: Sequence[float]
    ) -> tuple[Tensor, Tensor]:
        """⟨g̃_c, r⟩ and ‖g̃_c‖², float64 [m] each, for r the difference of these sums by parameter."""


class Directions:
    """Canary c's gradient is C·e_j, j a coordinate of its own; C_l·e_j if each parameter is clipped separately.

    The coordinates are those of parameters with at least 1 % of the weights, if these are enough.

    Args:
        count: m.
        sizes: How many coordinates each parameter has.
        device: Where the sums are.
    """

    same = True

    def __init__(self, count: int, sizes: Sequence[int], device: torch.device) -> None:
        total = sum(sizes)
        fewer = f"Canaries({count}) need a coordinate each, and the model trains {total} weights: use fewer"
        require(count <= total, fewer)

        # small parameters would cost as many operations as large ones
        large = [size if size >= _SMALL * total else 0 for size in sizes]
        own = np.asarray(large if sum(large) >= count else sizes)
        ends = own.cumsum()

        # the places are no secret, and the same if the run is resumed
        chosen = np.sort(np.random.default_rng(0).choice(ends[-1], count, replace=False))
        owner = np.searchsorted(ends, chosen, side="right")
        self._counts = np.bincount(owner, minlength=len(sizes)).tolist()
        local = torch.from_numpy(chosen - (ends - own)[owner]).to(device)
        self._places = {k: part for k, part in enumerate(local.split(self._counts)) if len(part)}
        self._norms: tuple[Any, Tensor] = ((), torch.zeros(0))  # C_l of each canary, for the last thresholds

    def join(self, noisy: Sequence[Tensor], joining: Tensor, limits: Sequence[float]) -> None:
        """Add C_l at the coordinates of these canaries."""
        parts = joining.to(noisy[0].dtype).split(self._counts)
        for k, places in self._places.items():
            noisy[k].view(-1).index_add_(0, places, parts[k], alpha=limits[k])

    def products(
        self, released: Sequence[Tensor], people: Sequence[Tensor], limits: Sequence[float]
    ) -> tuple[Tensor, Tensor]:
        """C_l r_j and C_l², [m] each."""
        at = self._places.items()
        with_noise, known = (torch.cat([sums[k].reshape(-1)[j] for k, j in at]) for sums in (released, people))
        if self._norms[0] != tuple(limits):
            own = np.repeat(limits, self._counts)
            self._norms = tuple(limits), torch.from_numpy(own).to(known.device, torch.float64)
        norms = self._norms[1]
        return norms * (with_noise - known), norms.square()


class CanaryScores:
    """The canaries of one run: who is in, and each one's score so far.

    Args:
        canaries: How many, of which kind.
        gradients: Their clipped gradients.
        source: Draws who is in, and who joins a step.
        sample_rate: q of a step.
        device: Where the sums are.

    Attributes:
        taken: Who is in, bool [m].
        scores: [m].
        divergences: D of the question whether the canary is in, a bound for every attacker, [m].
    """

    def __init__(
        self, canaries: Canaries, gradients: Gradients, source: NoiseSource, sample_rate: float, device: torch.device
    ) -> None:
        self.canaries, self._gradients, self._source, self._rate = canaries, gradients, source, sample_rate
        self._device = device
        self.taken = source.uniform(canaries.count) < 0.5
        self.scores = torch.zeros(canaries.count, dtype=torch.float64, device=device)
        self.divergences = torch.zeros_like(self.scores)
        self._absent = torch.full_like(self.scores[0], math.log1p(-sample_rate) if sample_rate < 1 else -math.inf)
        self._known: tuple[Any, Tensor, Tensor] = (
            (),
            self.scores,
            self.scores,
        )  # s and C_l; with these, log q − ‖g̃‖²/2s², and what D grows by

    def join(self, noisy: Sequence[Tensor], limits: Sequence[float]) -> None:
        """Let those that are in join a step's noisy sums, by parameter, with probability q each."""
        joining = self.taken & (self._source.uniform(len(self.taken)) < self._rate)
        self._gradients.join(noisy, joining.to(self._device, non_blocking=True), limits)

    def score(self, released: Sequence[Tensor], people: Sequence[Tensor], limits: Sequence[float], std: float) -> None:
        """Score all canaries by what a step released.

        Args:
            released: The noisy sums by parameter.
            people: The sums of people's clipped gradients by parameter.
            limits: C, or C_l of each parameter.
            std: The noise's standard deviation s.
        """
        inner, squared = self._gradients.products(released, people, limits)
        if not self._gradients.same or self._known[0] != (std, *limits):
            none = torch.zeros_like(squared)
            divergence = step_divergence(squared / std**2, none, none, self._rate)
            self._known = (std, *limits), math.log(self._rate) - squared / (2 * std**2), divergence
        _, offset, divergence = self._known
        self.scores += torch.logaddexp(torch.add(offset, inner, alpha=std**-2), self._absent)
        self.divergences += divergence

    def state_dict(self) -> dict[str, Tensor]:
        """Who is in, scores and divergences."""
        both = {"scores": self.scores, "divergences": self.divergences}
        return {"taken": self.taken.clone(), **{name: value.cpu().clone() for name, value in both.items()}}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """The inverse of :meth:`state_dict`."""
        self.taken = state["taken"].clone()
        self.scores, self.divergences = (state[name].to(self._device) for name in ("scores", "divergences"))
