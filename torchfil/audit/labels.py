"""An audit of labels that leaves the training as it is: "Observational auditing of label privacy",
Kalemaj et al. 2025.

Example i was trained with the label y_i. A reference p̂(· | x_i), made without the labels of these
examples, draws a second label y'_i. If p̂ is the law p of labels given everything else that the
training used, then y_i and y'_i are exchangeable: which of the two was trained with is a fair coin.
An auditor who sees the unordered pair {a, b} and the released model p_θ guesses the coin from

    log [p_θ(a | x_i) p̂(b | x_i)] / [p_θ(b | x_i) p̂(a | x_i)],

for the most extreme scores, and abstains on equal labels and on the rest. If the training is (ε,
δ)-private for **one replaced label**, the number of right guesses is bounded as in the game of
Steinke et al. 2023. So ε here is about a replaced label. It is about other neighbours than the ε of
people who are added or removed, and is never compared with that.

If log p/p̂ lies within ±τ for every label and example, the odds of a coin lie within e^{±2τ}. The ε
that the game shows is then too large by at most 2τ, which ``reference_error=τ`` takes off. If the
reference is wrong by more, a model that **generalises** better than the reference looks as if it
had memorised labels. Placebos guess without the released model. If one of them does better than τ
allows, at 95 %, the reference is wrong. They notice wrong confidence (p̂ itself ranks the pairs),
wrong frequencies of a class, and a reference that did see the labels. They do not notice a
reference that is calibrated but knows less about the labels than the model does, for example
because it lacks an input. Only a model like the released one, trained on other people, shows that
(``placebo=``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from torchfil.audit.bounds import epsilon_dp, p_value_dp

__all__ = ["LabelAudit", "audit_labels"]


@dataclass(frozen=True)
class LabelAudit:
    """What an auditor can tell about trained labels: about **a replaced label**, not about added or
    removed people.

    Labels, second labels and the training are random. Confidential: it depends on the training
    labels.

    Attributes:
        epsilon: A lower bound of ε for one replaced label, less 2τ; None: cannot tell, because a
            placebo shows that the reference is off by more than τ.
        placebo: A lower bound of the ε that the placebos seem to show, less 2τ; 0 unless the
            reference is wrong.
        num_pairs: How many examples drew a second label that differs from the first.
        delta: δ of the audited promise.
        confidence: The share of audits, at least, whose ``epsilon`` is not above the true ε.
        reference_error: τ, as the user assumed it.
        claimed_label_epsilon: The promise for one replaced label at this δ, if there is one.
        exceeds_label_claim: Whether the audit contradicts that promise, at a confidence of 99.9 %.
    """

    epsilon: float | None
    placebo: float
    num_pairs: int
    delta: float
    confidence: float
    reference_error: float
    claimed_label_epsilon: float | None
    exceeds_label_claim: bool

    def __str__(self) -> str:
        if self.epsilon is None:
            return (
                "Cannot tell: the reference is wrong. Placebos find trained labels, too (ε ≥ "
                f"{_low(self.placebo)})."
            )
        claim = (
            ""
            if self.claimed_label_epsilon is None
            else f"claimed ε {self.claimed_label_epsilon:.2f}, "
        )
        assumed = f"{self.num_pairs:,} pairs, if reference_error={self.reference_error:g} holds"
        audited = (
            f"ε ≥ {_low(self.epsilon)} at δ = {self.delta:g} ({100 * self.confidence:g} %, "
            f"{assumed})"
        )
        return (
            f"One replaced label: {claim}audited {audited}. Do not compare it with an ε for "
            "added or removed people."
        )


def _low(value: float) -> str:
    """Two decimals of a lower bound, which is not rounded up."""
    return f"{math.floor(100 * value) / 100:.2f}"


def audit_labels(
    outputs: torch.Tensor,
    labels: torch.Tensor,
    reference: torch.Tensor,
    *,
    delta: float = 0.0,
    confidence: float = 0.95,
    reference_error: float = 0.0,
    placebo: torch.Tensor | None = None,
    claimed_label_epsilon: float | None = None,
    generator: torch.Generator | None = None,
) -> LabelAudit:
    """A lower bound of ε for one replaced label, from a released model and a reference for the
    labels.

    Args:
        outputs: The released model's logits or log probabilities for the audited examples, [n,
            classes], as a tensor or array; of several released models their mean.
        labels: The labels that were trained with, [n]; independent of each other, given the inputs.
        reference: p̂(· | x_i), the probabilities by a model that never saw these labels, [n,
            classes].
        delta: δ of the audited promise.
        confidence: The share of audits, at least, whose result is not above the true ε.
        reference_error: τ ≥ 0, an assumption: log p/p̂ lies within ±τ for every label and example.
        placebo: Logits or log probabilities, [n, classes], of a model like the released one,
            trained on other people.
        claimed_label_epsilon: A promise for **one replaced label** at this δ, to compare with.
        generator: For the second labels (on the CPU); None: torch's own.

    Raises:
        ValueError: Shapes do not fit together, a row of ``reference`` does not sum to 1, or a label
            that was trained with is not among the classes or impossible by the reference.

    Example:
        >>> labels = torch.arange(2).repeat(500)
        >>> outputs = 9.0 * torch.nn.functional.one_hot(
        ...     labels, 2
        ... )  # a model that knows its labels by heart
        >>> audit = audit_labels(outputs, labels, torch.full((1000, 2), 0.5))
        >>> audit.placebo, audit.epsilon > 3
        (0.0, True)
    """
    y, ref, *models = (
        torch.as_tensor(v).cpu() for v in (labels, reference, outputs, placebo) if v is not None
    )
    _check_scores(y, ref, models)
    if not reference_error >= 0:
        raise ValueError(f"reference_error={reference_error} must be at least 0")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence} must lie strictly between 0 and 1")

    pairs = (
        (second := torch.multinomial(ref.double(), 1, generator=generator)[:, 0]) != y
    ).nonzero()[:, 0]

    def ratio(log_values: torch.Tensor) -> torch.Tensor:
        """log v(trained)/v(drawn), [pairs]; who rules out both labels has no guess."""
        return (log_values[pairs, y[pairs].long()] - log_values[pairs, second[pairs]]).nan_to_num(
            nan=0.0
        )

    def shown(tests: list[tuple[int, int, int]], delta: float, risk: float) -> float:
        """The largest ε that one of the tests rejects, less 2τ; corrected for their number."""
        level, least = risk / max(len(tests), 1), 2 * reference_error
        ends = (
            epsilon_dp(*test, delta, level)
            for test in tests
            if p_value_dp(*test, least, delta) <= level
        )
        return max(0.0, max(ends, default=0.0) - least)

    # placebos, in both directions: the reference, a model trained on other people, and how often
    # each class occurs
    own, score, *others = map(
        ratio, (ref.double().log(), *(each - ref.double().log() for each in models))
    )
    placebos = [
        test for each in (own, *others) for sign in (1, -1) for test in _right_guesses(sign * each)
    ]
    # by class
    trained, drawn = (
        torch.bincount(each[pairs], minlength=len(ref.T)).tolist() for each in (y, second)
    )
    placebos += [
        (count, a + b, len(pairs)) for a, b in zip(trained, drawn, strict=True) for count in (a, b)
    ]
    wrong = shown(placebos, 0.0, 0.05)

    found, claimed = _right_guesses(score), claimed_label_epsilon
    epsilon = None if wrong else shown(found, delta, 1 - confidence)
    exceeds = not wrong and claimed is not None and shown(found, delta, 0.001) > claimed
    return LabelAudit(
        epsilon, wrong, len(pairs), delta, confidence, reference_error, claimed, exceeds
    )


def _check_scores(y: torch.Tensor, ref: torch.Tensor, models: list[torch.Tensor]) -> None:
    """Shapes fit, and every row of the reference is a distribution that allows its label."""
    shapes = [each.shape for each in (y, ref, *models)]
    if ref.ndim != 2 or shapes != [ref.shape[:1]] + (len(shapes) - 1) * [ref.shape]:
        raise ValueError(
            f"labels, reference, outputs: {[[*shape] for shape in shapes]} must be [n], [n, k], "
            "[n, k]"
        )
    allowed = ((y[:, None] == torch.arange(len(ref.T))) & (ref > 0)).any(1)
    odd = (~(allowed & ((ref.sum(1) - 1).abs() < 1e-3))).nonzero()
    if len(odd):
        raise ValueError(
            f"rows {odd[:3, 0].tolist()} of reference must sum to 1, above 0 for the label "
            "trained with"
        )


def _right_guesses(scores: torch.Tensor) -> list[tuple[int, int, int]]:
    """(right guesses, guesses, pairs) by the sign of the most extreme scores: all, a half, … 1/64
    of the pairs.
    """
    right, n = (
        (scores > 0)[scores.abs().argsort(descending=True, stable=True)].cumsum(0),
        len(scores),
    )
    return [(int(right[guesses - 1]), guesses, n) for guesses in {n >> j for j in range(7)} - {0}]
