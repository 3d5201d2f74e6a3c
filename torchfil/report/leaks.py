"""Questions beside the data's own prior: "guessed correctly in 71 % of cases instead of 39 %".

A run keeps D_a = KL(P ‖ P_a) from an example's true answer t to every other, P_a the law of all
that is released. Let the answers be as likely before as they are common among the examples, π.
Whoever names the commonest is right in max π of the cases; whoever sees the release, and names a on
A_a, in

    Σ_a π_a P_a(A_a) ≤ Σ_a π_a P_r(A_a) + Σ_a π_a TV(P_a, P_r) ≤ max π + Σ_{a≠r} π_a TV(P_a, P_r)

for any answer r, since the A_a share all releases among them. TV(P_t, P_a) follows from D_a, and TV
is a distance: TV(P_a, P_r) ≤ TV(P_t, P_a) + TV(P_t, P_r). The smaller bound of r = t and r = the
commonest answer is taken; with two answers that is :func:`torchfil.guessing.largest_success`, and
between two normal laws the best attacker's own success.

It binds **every attacker to whom the answers are as likely before as they are common**, on average
over an answer that is drawn so and over the release. Somebody who knows more of the person
beforehand starts from more than max π. And the mean over answers hides those with a rare one:
:meth:`torchfil.run.saved_run.QuestionRecord.success`, between two equally likely answers, does not,
and says who is not protected.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy.special import ndtr

from torchfil.glm.guesses import best_accuracy
from torchfil.guessing import largest_total_variation
from torchfil.run import baselines
from torchfil.run.saved_run import QuestionRecord


@dataclass(frozen=True)
class PriorGuess:
    """How often an answer is named rightly by somebody who knows how common each is.

    Attributes:
        blind: Without the model: the share of the commonest answer.
        most: With all that was released, at most, of the most exposed example.
        mean: The same, on average over the examples.
    """

    blind: float
    most: float
    mean: float


def prior_guess(question: QuestionRecord, rows: np.ndarray) -> PriorGuess | None:
    """The question at the data's own prior.

    None where the run does not tell the true answers, or some D.

    Args:
        question: Of a saved run.
        rows: Which examples were measured, [n] booleans.

    Example:
        >>> divergence = np.array([[0.0, 0.02], [0.02, 0.0], [0.0, 0.0002], [0.0, 0.0]])
        >>> asked = QuestionRecord("sex", ["f", "m"], True, divergence, divergence)
        >>> found = prior_guess(asked, np.array([True, True, True, False]))
        >>> f"{found.blind:.3f} {found.most:.3f} {found.mean:.3f}"  # 2/3, up to 1/3·√(D/2) more
        '0.667 0.700 0.690'
    """
    prior = baselines.answer_shares(question, rows)
    if prior is None:
        return None
    success = largest_success_at(question, prior)[rows]
    if np.isnan(success).any():
        return None
    return PriorGuess(float(prior.max()), float(success.max()), float(success.mean()))


def largest_success_at(question: QuestionRecord, prior: np.ndarray) -> np.ndarray:
    """How often any attacker with this prior names the right answer at most, at the upper ends of
    D, [n].

    Args:
        question: A complete one: the true answer is among its own.
        prior: π, [m].
    """
    high = np.asarray(question.divergence_high, dtype=np.float64)
    truth = np.asarray(question.divergence).argmin(axis=1)
    if question.law == "normal" and len(prior) == 2:
        distances = np.sqrt(2 * high.max(axis=1))[:, None, None] * (1 - np.eye(2))
        return best_accuracy(distances, np.broadcast_to(prior, high.shape)).value

    # from the true answer to every other, [n, m]
    known = ~np.isnan(high)
    variation = np.full(high.shape, np.nan)
    if question.law == "normal":
        variation = 2 * ndtr(np.sqrt(high / 2)) - 1
    else:
        variation[known] = largest_total_variation(torch.from_numpy(high[known])).numpy()
    np.put_along_axis(variation, truth[:, None], 0.0, axis=1)

    # around the true answer, or around the commonest
    commonest = int(prior.argmax())
    beside = np.minimum(variation + variation[:, commonest, None], 1.0)
    beside[:, commonest] = 0.0
    return np.minimum(prior.max() + np.minimum(variation @ prior, beside @ prior), 1.0)
