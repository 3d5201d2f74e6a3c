"""The best attacker on a question: the likelihood ratio of recorded runs with the true answer and
with another.

By Neyman and Pearson, no attacker tells the two apart better than one who ranks runs by log
P(run)/P′(run), where P is the distribution of everything released with the true answer, and P′ with
the other one. So its true-positive rates test the bounds that D = KL(P ‖ P′) gives for every
attacker, and show how tight these bounds are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from torchfil.attacks.base import Seed, make_generator
from torchfil.attacks.transcripts import Transcripts, at_every_step, record_dpsgd
from torchfil.fisher.gradients import ExampleGradients, LossFunction
from torchfil.fisher.mechanism import step_divergence
from torchfil.guessing import largest_true_positive_rate, normal_limit_true_positive_rate
from torchfil.private import Examples, Inputs, Private
from torchfil.questions import Question
from torchfil.utils.given import Targets
from torchfil.utils.tables import as_table
from torchfil.utils.text import with_progress
from torchfil.utils.trees import map_tensors, tensors_of

FALSE_POSITIVE_RATES = (0.001, 0.01, 0.1)
# inputs and targets of the whole data with another answer of one example; None: absent
Other = tuple[Any, Any] | None


@dataclass(frozen=True)
class Ratios:
    """What recorded runs reveal about an example's answer, [runs] each.

    Attributes:
        log_ratio: log P(run)/P′(run), by which the best attacker ranks runs.
        divergence: Σ_t KL_t over the steps that drew the example (over q), which a ledger books for
            the run.
    """

    log_ratio: Tensor
    divergence: Tensor


@dataclass(frozen=True, eq=False)
class GuessAttack:
    """The best attacker's rates and what D allows, by example.

    Confidential: it depends on private data.

    Attributes:
        question: The answer that was attacked.
        rows: The attacked examples, [m].
        runs: The number of runs with the true answer, and with the other.
        divergence: D, the mean of the true runs' sums, [m].
        divergence_error: Its standard error, [m].
        false_positive_rates: α, [k].
        achieved: The best attacker's true-positive rates at α, [m, k].
        achieved_low: The lower ends of their intervals, [m, k].
        bound: The largest rate of any attacker, at the upper end of D's interval, [m, k].
        normal_limit: Φ(Φ⁻¹(α) + sqrt(2D)), an estimate for many small steps, [m, k].
        confidence: The confidence of the intervals.
    """

    question: str
    rows: Sequence[int]
    runs: int
    divergence: np.ndarray
    divergence_error: np.ndarray
    false_positive_rates: np.ndarray
    achieved: np.ndarray
    achieved_low: np.ndarray
    bound: np.ndarray
    normal_limit: np.ndarray
    confidence: float

    @property
    def testable(self) -> np.ndarray:
        """Whether there are enough runs to see a false-positive rate of α at all, [k]: at least
        1/α.
        """
        return self.runs * self.false_positive_rates >= 1

    @property
    def verdicts(self) -> list[list[str]]:
        """By example and rate: "held", "broken" (beyond chance) or "not testable"."""
        seen = np.where(self.achieved_low > self.bound, "broken", "held")
        return np.where(self.testable, seen, "not testable").tolist()

    def table(self) -> object:
        """By example: D and, at each α, the best attacker's rate, the bound, the normal limit and
        the verdict.
        """
        columns = {"divergence": self.divergence, "divergence_error": self.divergence_error}
        parts = {"achieved": self.achieved, "bound": self.bound, "normal limit": self.normal_limit}
        parts["verdict"] = np.asarray(self.verdicts)
        for k, alpha in enumerate(self.false_positive_rates):
            columns |= {f"{name} at {alpha:g}": part[:, k] for name, part in parts.items()}
        return as_table(self.rows, columns)


def best_guess(
    model: nn.Module,
    loss_fn: LossFunction,
    inputs: Inputs,
    targets: Targets,
    question: Question,
    rows: Sequence[int],
    *,
    answer: int = 0,
    runs: int = 2000,
    false_positive_rates: Sequence[float] = FALSE_POSITIVE_RATES,
    secret_batches: bool = True,
    private: Private | None = None,
    confidence: float = 0.95,
    seed: Seed = None,
    progress: bool = False,
    **settings: Any,
) -> GuessAttack:
    """Train a tiny network many times with the true answer and with another, and let the best
    attacker tell them apart.

    The runs with the true answer serve all examples. The attacker sees every noisy gradient, and
    knows all other examples, which of them was in which batch, and everything about the example
    except the answer; with ``secret_batches`` it does not know when the example itself was drawn.

    Args:
        model: Left unchanged.
        loss_fn: ``loss_fn(outputs, targets)``.
        inputs: [n, …].
        targets: [n, …].
        question: What the attacker wants to know.
        rows: Which examples to attack.
        answer: The number of the question's other answer.
        runs: The number of runs with each answer.
        false_positive_rates: α.
        secret_batches: Whether the attacker does not know when the example was drawn.
        private: As in :func:`record_dpsgd`; integer inputs need ``Private(submodule=…)``.
        confidence: The confidence of the intervals.
        seed: The seed of noise and batches, or a generator.
        progress: Whether to show a bar.
        **settings: ``steps``, ``lr``, ``max_grad_norm``, ``noise_multiplier``, ``sample_rate``,
            ``clip`` of :func:`record_dpsgd`.
    """
    source = make_generator(seed, tensors_of((inputs, targets))[0].device)
    alternative = question.alternatives(inputs, targets)[answer]
    alpha = torch.tensor(false_positive_rates, dtype=torch.float64)
    found: list[list[Tensor]] = []
    common = {"runs": runs, "seed": source, "private": private, **settings}
    true = record_dpsgd(model, loss_fn, inputs, targets, **common)
    for row in with_progress(rows, progress, "examples", len(rows)):
        other: Other = (
            None if alternative is None else _swapped(row, (inputs, targets), alternative)
        )
        data, absent = ((inputs, targets), (row,)) if other is None else (other, ())
        false = record_dpsgd(model, loss_fn, *data, absent=absent, **common)

        # both sets of runs are judged by the same two distributions
        here = transcript_ratios(
            true, row, (inputs, targets), other, private, secret_batches=secret_batches
        )
        there = transcript_ratios(
            false, row, (inputs, targets), other, private, secret_batches=secret_batches
        )
        found.append(_judged(here, there, alpha, confidence))

    columns = (
        torch.stack([part.double().cpu() for part in column]).numpy()
        for column in zip(*found, strict=True)
    )
    mean, error, rates, low, bound, limit = map(np.asarray, columns)
    name = question.answers[answer]
    return GuessAttack(
        name, list(rows), runs, mean, error, alpha.numpy(), rates, low, bound, limit, confidence
    )


def _judged(here: Ratios, there: Ratios, alpha: Tensor, confidence: float) -> list[Tensor]:
    """D and its error; for each α, the best attacker's rate, its lower end, the bound and the
    normal limit.
    """
    runs = len(here.divergence)
    mean = here.divergence.mean()
    error = here.divergence.std() / math.sqrt(runs) if runs > 1 else torch.zeros_like(mean)
    upper = float(mean + stats.norm.ppf(0.5 + confidence / 2) * error)
    rates = true_positive_rates(here.log_ratio, there.log_ratio, alpha)
    bound, limit = (
        largest_true_positive_rate(upper, alpha),
        normal_limit_true_positive_rate(float(mean), alpha),
    )
    return [mean, error, rates, _lower_ends(rates, alpha, runs, confidence), bound, limit]


def transcript_ratios(
    transcripts: Transcripts,
    row: int,
    true: tuple[Any, Any],
    other: Other,
    private: Private | None = None,
    *,
    secret_batches: bool = True,
) -> Ratios:
    """log P/P′ of recorded runs, whichever answer they were made with, and the sums that a ledger
    books for them.

    With o = (noisy sum − others' part)/s, u = g̃/s and v = g̃′/s a step's ratio is that of
    (1−q)φ(o) + qφ(o − u) and (1−q)φ(o) + qφ(o − v); with known batches it is that of φ(o − u) and
    φ(o − v) if the example was drawn.

    Args:
        transcripts: The runs.
        row: The example.
        true: Inputs and targets of the data with the true answer.
        other: The same with the other answer; None: the example is absent.
        private: As in the recording of the runs.
        secret_batches: Whether the attacker does not know when the example was drawn.
    """
    made, q, scale = transcripts.gradients, transcripts.sample_rate, transcripts.mechanism.noise_std

    def clipped(examples: Examples, weights: Tensor) -> Tensor:
        """g̃/s of the example at weights [runs, steps, p]."""
        z, public = examples.z[row], map_tensors(lambda leaf: leaf[row], examples.public)
        each = at_every_step(
            lambda w, z: transcripts.clipped(w, z, public), weights, z.expand(len(weights), -1)
        )
        return each / scale

    answers = [
        None
        if data is None
        else ExampleGradients.build(made.model, made.loss_fn, *data, private).examples
        for data in (true, other)
    ]
    ratios, sums = [], []
    for part in transcripts.pieces(4):
        weights, drawn = transcripts.weights[part], transcripts.batches[part, :, row]
        # without the others
        o = transcripts.noise[part] / scale + clipped(made.examples, weights) * drawn[..., None]
        u, v = (torch.zeros_like(o) if one is None else clipped(one, weights) for one in answers)
        uu, vv, uv = ((a * b).sum(dim=-1) for a, b in ((u, u), (v, v), (u, v)))
        exponents = (o * u).sum(dim=-1) - uu / 2, (o * v).sum(dim=-1) - vv / 2

        if secret_batches and q < 1:
            log_a, log_b = (
                torch.logaddexp(torch.full_like(e, math.log1p(-q)), e + math.log(q))
                for e in exponents
            )
            step, each = log_a - log_b, step_divergence(uu, vv, uv, q) / q
        else:
            step, each = (exponents[0] - exponents[1]) * drawn, step_divergence(uu, vv, uv, None)
        ratios.append(step.sum(dim=1))
        sums.append((each * drawn).sum(dim=1))
    return Ratios(torch.cat(ratios), torch.cat(sums))


def true_positive_rates(true: Tensor, false: Tensor, false_positive_rates: Tensor) -> Tensor:
    """The best attacker's true-positive rates at α, [k], from log ratios of runs with either
    answer, [runs] each.

    The threshold is the smallest one with at most a share α of the false runs above it; ties count
    as missed.
    """
    ranked = false.sort(descending=True).values
    allowed = (false_positive_rates * len(ranked)).floor().long().clamp(max=len(ranked) - 1)
    thresholds = ranked[allowed.to(ranked.device)]
    return (true[None, :] > thresholds[:, None]).double().mean(dim=1).cpu()


def _lower_ends(rates: Tensor, alpha: Tensor, runs: int, confidence: float) -> Tensor:
    """Lower ends of the true-positive rate at a false-positive rate of exactly α.

    Both the rate and the threshold are random: the threshold's false-positive rate may exceed α by
    its standard error, and a likelihood ratio's rate t follows it with a slope of at most t/α,
    because it is concave.
    """
    z = float(stats.norm.ppf(0.5 + confidence / 2))
    own = (rates * (1 - rates) / runs).sqrt()
    through_threshold = rates / alpha * (alpha * (1 - alpha) / runs).sqrt()
    return (rates - z * (own.square() + through_threshold.square()).sqrt()).clamp(min=0)


def _swapped(
    row: int, data: tuple[object, object], other: tuple[object, object]
) -> tuple[object, object]:
    """The data with one row replaced by that of the other data."""
    rows_of = iter(tensors_of(tuple(other)))

    def swap(leaf: Tensor) -> Tensor:
        result = leaf.clone()
        result[row] = next(rows_of)[row]
        return result

    return map_tensors(swap, data)
