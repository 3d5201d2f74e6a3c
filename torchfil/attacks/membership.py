"""Membership inference: was this example in the training set? True positives at a given share of
false alarms.

Shadow runs train the same network on random halves of a pool of examples. For one of them, the
target, the attacker ranks the examples by a score; high means member.

    loss threshold       −ℓ(x)                                         (Yeom et al. 2018)
    likelihood ratio     log N(φ; μ_in, σ_in²) − log N(φ; μ_out, σ_out²)   (Carlini et al. 2022)

φ = log p/(1 − p), where p is the target model's probability of the true class; μ and σ come from
the shadow runs with the example (in) and without it (out).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from torchfil.attacks.base import AttackResult, Seed, make_generator, mean_of_trials
from torchfil.attribution.exposure import auroc
from torchfil.utils.text import with_progress

Training = Callable[[Tensor, int], nn.Module]


@dataclass(frozen=True)
class ShadowRuns:
    """The true class's log-odds φ in every run, [runs, n], and which examples were members, [runs,
    n] booleans.
    """

    log_odds: Tensor
    members: Tensor

    def __post_init__(self) -> None:
        diverged = (~self.log_odds.isfinite()).any(dim=1).nonzero().flatten().tolist()
        if diverged:
            raise ValueError(
                f"the log-odds of runs {diverged[:5]} are not finite: leave out runs that diverged"
            )


@dataclass(frozen=True, eq=False)
class MembershipResult:
    """How well members are distinguished from others.

    Attributes:
        name: The attack's name.
        scores: High for likely members, [targets, n].
        members: The truth, [targets, n] booleans.
        auc: The mean over target runs.
        auc_error: Its standard error over target runs; NaN for a single one. Runs that serve as
            each other's shadows are not independent: for a likelihood ratio that finds nothing, the
            spread was 1.3 to 1.5 times this.
    """

    name: str
    scores: np.ndarray
    members: np.ndarray
    auc: float
    auc_error: float

    def curve(self) -> tuple[np.ndarray, np.ndarray]:
        """False and true positive rates of every threshold, ascending, with all targets pooled."""
        return _curve(self.scores.ravel(), self.members.ravel())

    def tpr_at(self, fpr: float) -> float:
        """The largest true positive rate of a threshold with at most this share of false alarms,
        targets pooled.
        """
        false, true = self.curve()
        return float(true[false <= fpr].max())

    def by_example(self, ids: Sequence[Hashable] | None = None) -> AttackResult:
        """How often each example is classified correctly, at the best threshold for other examples.

        The best threshold of every second example judges the rest, and vice versa: a threshold
        chosen on the scores that it judges would find members among random numbers. Use it next to
        FIL and individual ε. Its mean is the attack's accuracy: 0.5 for guessing if half are
        members.
        """
        right = np.zeros(self.scores.shape)  # [targets, n]
        for judged, others in (
            (slice(0, None, 2), slice(1, None, 2)),
            (slice(1, None, 2), slice(0, None, 2)),
        ):
            threshold = _best_threshold(self.scores[:, others], self.members[:, others])
            right[:, judged] = (self.scores[:, judged] >= threshold) == self.members[:, judged]
        names = range(len(right[0])) if ids is None else ids
        return mean_of_trials(
            self.name, _KNOWS[self.name], names, torch.as_tensor(right.T), "accuracy"
        )


_KNOWS = {
    "loss threshold": "sees the model's loss on the example",
    "likelihood ratio": "sees the model's output for the example; trained models of the same kind "
    "with and without it",
}


def shadow_runs(
    train: Training,
    inputs: Tensor,
    targets: Tensor,
    *,
    runs: int,
    share: float = 0.5,
    seed: Seed = None,
    progress: bool = False,
) -> ShadowRuns:
    """Train on a random share of the examples, many times, and note every example's log-odds.

    Args:
        train: (rows [m], number of the run) ↦ a trained classifier with logits as outputs.
        inputs: The pool, [n, …].
        targets: Classes, [n].
        runs: The number of runs.
        share: The share of the pool that each run trains on.
        seed: The seed of the splits, or a generator.
        progress: Whether to show a bar.
    """
    n = len(inputs)
    size = round(share * n)
    if not 0 < size < n:
        raise ValueError(
            f"share={share} of {n} examples leaves {size} members; there must be both kinds"
        )
    source = make_generator(seed, targets.device)
    members = torch.zeros(runs, n, dtype=torch.bool, device=targets.device)
    odds = []
    for run in with_progress(range(runs), progress, "shadow runs", runs):
        rows = torch.randperm(n, generator=source, device=targets.device)[:size]
        members[run, rows] = True
        model = train(rows, run)
        with torch.no_grad():
            odds.append(_log_odds(model(inputs), targets))
    return ShadowRuns(torch.stack(odds), members)


def membership_inference(
    runs: ShadowRuns, *, targets: int | None = None
) -> dict[str, MembershipResult]:
    """Both attacks on each of the first ``targets`` runs (None: all), with all other runs as
    shadows.
    """
    truth = runs.members[:targets].bool().cpu().numpy()
    scores = {
        "loss threshold": loss_threshold(runs.log_odds[:targets]),
        "likelihood ratio": torch.stack(
            [gaussian_likelihood_ratio(runs, i) for i in range(len(truth))]
        ),
    }
    return {
        name: _judged(name, values.double().cpu().numpy(), truth) for name, values in scores.items()
    }


def loss_threshold(log_odds: Tensor) -> Tensor:
    """−ℓ = −log(1 + e^{−φ}): the cross-entropy, negated, in the shape of φ."""
    return nn.functional.logsigmoid(log_odds)


def gaussian_likelihood_ratio(runs: ShadowRuns, target: int) -> Tensor:
    """The log-likelihood ratio of each example in run ``target``, [n]; all other runs are shadows.

    Each example needs two shadows with it and two without. The variance of each example is shrunk
    to the mean over examples with the weight of four runs, because few shadows estimate a variance
    badly.
    """
    others = torch.arange(len(runs.members), device=runs.members.device) != target
    phi, inside, here = runs.log_odds[others], runs.members[others].bool(), runs.log_odds[target]
    return _log_density(here, phi, inside) - _log_density(here, phi, ~inside)


def _log_density(value: Tensor, phi: Tensor, chosen: Tensor) -> Tensor:
    """That of a normal law fitted to the chosen runs, at a value of each example, [n], up to a
    constant.
    """
    count = chosen.sum(dim=0)
    if not int(count.min()) >= 2:
        raise ValueError(
            f"example {int(count.argmin())} has {int(count.min())} shadow runs on one side; the "
            "likelihood ratio needs two with it and two without: add runs"
        )
    mean = (phi * chosen).sum(dim=0) / count
    squares = ((phi - mean).square() * chosen).sum(dim=0)
    pooled = squares.sum() / (count - 1).sum()
    variance = (squares + 4 * pooled) / (count - 1 + 4) + torch.finfo(phi.dtype).eps
    return -0.5 * ((value - mean).square() / variance + variance.log())


def _log_odds(logits: Tensor, targets: Tensor) -> Tensor:
    """φ = log p/(1 − p) of the true class, [n], without cancellation."""
    own = logits.gather(1, targets.unsqueeze(1)).squeeze(1)
    return own - logits.scatter(1, targets.unsqueeze(1), -torch.inf).logsumexp(dim=1)


def _judged(name: str, scores: np.ndarray, members: np.ndarray) -> MembershipResult:
    areas = np.array([auroc(s, m).value for s, m in zip(scores, members, strict=True)])
    error = float(areas.std(ddof=1) / len(areas) ** 0.5) if len(areas) > 1 else float("nan")
    return MembershipResult(name, scores, members, float(areas.mean()), error)


def _curve(scores: np.ndarray, members: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """False and true positive rates for the threshold +∞ and then each distinct score,
    descending.
    """
    order = np.argsort(-scores, kind="stable")
    truth, ranked = members[order], scores[order]
    last = np.append(ranked[1:] != ranked[:-1], True)  # equal scores fall together
    true = np.cumsum(truth)[last] / max(1, truth.sum())
    false = np.cumsum(~truth)[last] / max(1, (~truth).sum())
    return np.concatenate([[0.0], false]), np.concatenate([[0.0], true])


def _best_threshold(scores: np.ndarray, members: np.ndarray) -> float:
    """The threshold at which the true positive rate exceeds the false one most; +∞ (nobody) without
    scores.
    """
    if not scores.size:
        return float("inf")
    false, true = _curve(scores.ravel(), members.ravel())
    cuts = np.concatenate([[np.inf], np.unique(scores)[::-1]])  # the thresholds of the curve
    return float(cuts[np.argmax(true - false)])
