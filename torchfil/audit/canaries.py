"""Canaries: examples made for an audit, of which a secret half takes part in the run.

Each of m canaries is in with probability ½, independently. At every step those that are in join the
sum of clipped gradients with probability q each, before the noise is added; q, the divisor and the
noise stay those of the run. Who is in can then be guessed from what the run releases, and
:mod:`torchfil.audit.bounds` says what that shows about ε.

Let y_t be the noisy sum of step t, s = σC the noise's standard deviation, and g̃_c the clipped
gradient of canary c. The auditor knows everybody else and their batches, as the attacker of
differential privacy does, and subtracts their part:

    r_t = y_t − Σ_people g̃ = Σ_c in_c drawn_{c,t} g̃_c + N(0, s²I),
    score_c = Σ_t log(1 − q + q exp((⟨g̃_c, r_t − m_c⟩ − ‖g̃_c‖²/2) / s²)),
    m_c = (q/2) Σ_{c′≠c} g̃_c′,

the log likelihood ratio of "in" against "out", if the other canaries add their mean. It is computed
for all canaries at every step, drawn or not: a score of those drawn would reveal who is in.

The loop does not see canaries: they join when a batch is released. The engine clips their gradients
with the code that clips those of people.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from torchfil.fisher.mechanism import step_divergence
from torchfil.utils.noise import NoiseSource


@dataclass(frozen=True)
class Canaries:
    """How a run is audited, for ``make_private(canaries=…)``; :meth:`FILPrivacyEngine.audit` reads
    the result.

    Canaries cost some accuracy, because half of them are learned, and time. Directions are almost
    free. Other canaries cost a gradient each at every step, so a few hundred are usual. None of
    them is in tables and reports of people.

    Attributes:
        count: m. So many canaries can show only so much: 1,000, all guessed right, ε ≥ 5.2 at δ =
            1e-5 by ε and δ alone, and 10 by the run's trade-off curve. 1,000 to 10,000 directions
            are usual.
        inputs: What a canary is. None: a direction, the gradient C·e_j for a coordinate j of its
            own, which is the worst case that ε speaks about. A function from 0, …, m − 1 to an
            example, as the run's data set gives them: inputs by a rule of yours. A data set of at
            least m other examples, which are given another class that occurs in it ("mislabelled").
            Nobody of the run may be in it: whoever takes part twice is not covered by ε.

    Example:
        >>> Canaries(1000).kind
        'directions'
    """

    count: int = 1000
    inputs: Any = None

    def __post_init__(self) -> None:
        if not (isinstance(self.count, int) and self.count >= 1):
            raise ValueError(f"count={self.count!r} must be a whole number, at least 1")
        if (
            self.inputs is not None
            and not callable(self.inputs)
            and not hasattr(self.inputs, "__getitem__")
        ):
            raise ValueError(
                f"inputs={self.inputs!r} must be None, a function from a number to an example, or "
                "a data set"
            )
        if self.kind == "mislabelled" and not len(self.inputs) >= self.count:
            raise ValueError(
                f"Canaries({self.count}) need as many examples, and inputs= has fewer; use fewer "
                "canaries"
            )

    @property
    def kind(self) -> str:
        """What reports call them."""
        if self.inputs is None:
            return "directions"
        return "inputs" if callable(self.inputs) else "mislabelled"


class Gradients(Protocol):
    """The clipped gradients of all canaries at the current weights.

    Attributes:
        same: Whether their norms stay the same from step to step.
    """

    same: bool

    def join(self, noisy: Tensor, joining: Tensor, limits: Sequence[float]) -> None:
        """Add the gradients of these canaries, bool [m] on the CPU, to a noisy sum, [p], clipped to
        these C_l.
        """

    def products(self, left: Tensor, limits: Sequence[float]) -> tuple[Tensor, Tensor]:
        """⟨g̃_c, r − m_c⟩ and ‖g̃_c‖², float64 [m] each, for r of shape [p]."""


class Directions:
    """Canary c's gradient is C·e_j, j a coordinate of its own.

    C_l·e_j if each parameter is clipped separately.

    Args:
        count: m.
        sizes: How many coordinates each parameter has.
        device: Where the sums are.
    """

    same = True

    def __init__(self, count: int, sizes: Sequence[int], device: torch.device) -> None:
        total = sum(sizes)
        if not count <= total:
            raise ValueError(
                f"Canaries({count}) need a coordinate each, and the model trains {total} weights: "
                "use fewer"
            )
        # no secret; the same if resumed
        chosen = np.random.default_rng(0).choice(total, count, replace=False)
        self._parameter = np.searchsorted(np.cumsum(sizes), chosen, side="right")
        self._places = torch.from_numpy(chosen).to(device)

    def join(self, noisy: Tensor, joining: Tensor, limits: Sequence[float]) -> None:
        """Add C_l at the coordinates of these canaries."""
        added = (joining * self._norms(limits)).to(noisy.dtype)
        noisy.index_add_(0, self._places, added.to(noisy.device, non_blocking=True))

    def products(self, left: Tensor, limits: Sequence[float]) -> tuple[Tensor, Tensor]:
        """C_l r_j and C_l², [m] each; no other canary has this coordinate, so m_c adds nothing."""
        norms = self._norms(limits).to(left.device, non_blocking=True)
        return norms * left.take(self._places), norms.square()

    def _norms(self, limits: Sequence[float]) -> Tensor:
        """C_l of each canary, float64 [m] on the CPU."""
        return torch.from_numpy(np.asarray(limits)[self._parameter])


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
        self,
        canaries: Canaries,
        gradients: Gradients,
        source: NoiseSource,
        sample_rate: float,
        device: torch.device,
    ) -> None:
        self.canaries, self._gradients, self._source, self._rate = (
            canaries,
            gradients,
            source,
            sample_rate,
        )
        self.taken = source.uniform(canaries.count) < 0.5
        self.scores = torch.zeros(canaries.count, dtype=torch.float64, device=device)
        self.divergences = torch.zeros_like(self.scores, device="cpu" if gradients.same else device)
        self._absent = torch.full_like(
            self.scores[0], math.log1p(-sample_rate) if sample_rate < 1 else -math.inf
        )
        # s, C_l; log q − ‖g̃‖²/2s², ΔD
        self._known: tuple[object, Tensor, Tensor] = ((), self.scores, self.scores)
        self._people = self._noisy = self.scores  # of the current step, [p]

    def begin(self, sums: Sequence[Tensor]) -> list[Tensor]:
        """Room for the noisy sums of a step, in the shapes of people's sums by parameter."""
        self._people = torch.cat([each.reshape(-1) for each in sums])
        self._noisy = torch.empty_like(self._people)
        parts = self._noisy.split([each.numel() for each in sums])
        return [part.view(each.shape) for part, each in zip(parts, sums, strict=True)]

    def join(self, limits: Sequence[float]) -> None:
        """Let those that are in join a step's noisy sums with probability q each.

        Clipped to C, or to C_l each.
        """
        joining = self.taken & (self._source.uniform(len(self.taken)) < self._rate)
        self._gradients.join(self._noisy, joining, limits)

    def score(self, limits: Sequence[float], std: float) -> None:
        """Score all canaries by the step's noisy sums, whose noise has standard deviation s."""
        inner, squared = self._gradients.products(
            torch.sub(self._noisy, self._people, out=self._people), limits
        )
        if not self._gradients.same or self._known[0] != (std, *limits):
            none = torch.zeros_like(squared)
            divergence = step_divergence(squared / std**2, none, none, self._rate).to(
                self.divergences.device
            )
            self._known = (std, *limits), math.log(self._rate) - squared / (2 * std**2), divergence
        _, offset, divergence = self._known
        self.scores += torch.logaddexp(torch.add(offset, inner, alpha=std**-2), self._absent)
        self.divergences += divergence
        self._people = self._noisy = self.scores

    def state_dict(self) -> dict[str, Tensor]:
        """Who is in, scores and divergences."""
        return {
            name: getattr(self, name).to("cpu", copy=True)
            for name in ("taken", "scores", "divergences")
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """The inverse of :meth:`state_dict`."""
        for name in ("taken", "scores", "divergences"):
            setattr(self, name, state[name].to(getattr(self, name), copy=True))
