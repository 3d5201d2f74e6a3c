"""Attribute inversion on generalised linear models (Hannun et al. 2021, § 6.4): which level does an attribute have?

There are four attackers. In the order of what they know: :func:`prior_inversion`, :class:`BlackBoxInversion`,
:class:`WhiteBoxInversion`; and :func:`ideal_inversion`, which needs no model and knows the population instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from torchfil.attacks.base import AttackResult, mean_of_trials, release_noise
from torchfil.glm.guesses import NominalAttribute, ask
from torchfil.glm.refits import GLMView, minimiser_changes, numbers_at_once
from torchfil.utils.errors import require
from torchfil.utils.text import with_progress
from torchfil.viz.common import as_array

if TYPE_CHECKING:
    from torchfil.glm import GeneralizedLinearModel

_CHUNK_NUMBERS = 2**23
_ARRAYS = 8  # of that size, at the most expensive moment


class _Inversion:
    """An attack on every example in each of many releases; a subclass says which level fits a release best."""

    name: str
    threat_model: str

    def __init__(
        self, model: GeneralizedLinearModel, X: Any, y: Any, attribute: NominalAttribute, *, progress: bool = False
    ) -> None:
        self.view = GLMView.build(model, X, y)
        self.attribute, self.progress = attribute, progress
        self.truth = torch.as_tensor(attribute.levels(X), device=self.view.X.device)
        self._prepare()

    def run(
        self, sigma: float, trials: int = 100, *, seed: int | None = None, generator: torch.Generator | None = None
    ) -> AttackResult:
        """Attack every example in each of ``trials`` releases w* + N(0, σ²I).

        Args:
            sigma: σ.
            trials: The number of releases.
            seed: The seed of the noise.
            generator: Instead of a seed.

        Returns:
            Measure "accuracy"; ``guesses`` holds the guessed level of every example in every trial, [n, trials].
        """
        noise = sigma * release_noise(sigma, trials, self.view.weights, seed, generator)
        numbers = numbers_at_once(noise.device, _CHUNK_NUMBERS, _ARRAYS)
        parts = noise.split(max(1, numbers // (len(self.truth) * len(self.attribute.codes))))
        guesses = [self._best(part) for part in with_progress(parts, self.progress, "releases")]
        return _accuracies(self.name, self.threat_model, torch.cat(guesses, dim=1), self.truth)

    def _prepare(self) -> None:
        """What is computed once for all releases."""
        raise NotImplementedError

    def _best(self, noise: Tensor) -> Tensor:
        """The level that fits each release best, [n, part], for noise [part, p]."""
        raise NotImplementedError


class WhiteBoxInversion(_Inversion):
    """The closest refit: argmin over levels v of ‖w′ − w*(x_i with level v)‖, w′ = w* + N(0, σ²I).

    Threat model: the attacker knows the released weights, how they were trained, and the whole training set except the
    attribute of the example under attack.

    The refits are made once, at construction (see :mod:`torchfil.glm.refits`); every release then costs one product.

    Args:
        model: A fitted model of one margin.
        X: The training inputs, [n, d].
        y: The training targets, [n].
        attribute: What to infer.
        progress: Whether to show progress bars.
    """

    name = "white-box attribute inversion"
    threat_model = "knows the released weights, the training and all training data but the attribute under attack"

    def _prepare(self) -> None:
        alternatives = ask(self.attribute, self.view).alternatives
        self.changes = minimiser_changes(self.view, alternatives, progress=self.progress)
        self._squares = self.changes.square().sum(dim=2)  # of changes [n, k, p]

    def _best(self, noise: Tensor) -> Tensor:
        """The smallest ‖w′ − w* − Δ_v‖² = ‖Δ_v‖² − 2σ⟨ξ, Δ_v⟩ + const, for the noise σξ."""
        return (self._squares[:, :, None] - 2 * self.changes @ noise.mT).argmin(dim=1)


class BlackBoxInversion(_Inversion):
    """Fredrikson et al. 2014: argmax over levels v of log p(v) + log π(prediction for x_i with level v, y_i).

    π is a Gaussian in the residual with the released model's own variance on the training set, Σω(y − ŷ)²/(n − p), for
    least squares; for logistic regression, the share of label y among the training examples with that prediction.

    Threat model: the attacker knows everything about the example except the attribute (including its target), how
    common each level is, and how well the model does; the model answers queries.

    Args:
        model: A fitted :class:`LinearRegression` or :class:`LogisticRegression`.
        X: The training inputs, [n, d].
        y: The training targets, [n].
        attribute: What to infer.
        progress: Whether to show progress bars.
    """

    name = "black-box attribute inversion"
    threat_model = "knows the rest of the example, its target, the attribute's distribution, predictions and statistics"

    def _prepare(self) -> None:
        loss = self.view.loss.name
        known = loss in ("squared", "logistic")
        require(known, f"the {loss} loss has no performance statistic; use LinearRegression or LogisticRegression")
        counts = torch.bincount(self.truth, self.view.sample_weight, minlength=len(self.attribute.codes))
        self._log_prior = (counts / counts.sum()).log()

    def _best(self, noise: Tensor) -> Tensor:
        """The margin without the attribute, plus each level's part, scored: one product for all levels."""
        codes = torch.as_tensor(np.asarray(self.attribute.codes, dtype=float)).to(self.view.X)
        weights = (self.view.weights + noise).mT  # [p, part]
        own, margins = weights[list(self.attribute.columns)], self.view.X @ weights
        rest = margins - codes[self.truth] @ own
        score = self._gaussian(margins) if self.view.loss.name == "squared" else self._confusion(margins)
        scores = [prior + score(rest + code @ own) for prior, code in zip(self._log_prior, codes, strict=True)]
        return torch.stack(scores, dim=1).argmax(dim=1)

    def _gaussian(self, margins: Tensor) -> Any:
        y, weight = self.view.y[:, None], self.view.sample_weight[:, None]
        n, p = self.view.X.shape
        variance = (weight * (margins - y).square()).sum(dim=0) / max(n - p, 1)
        return lambda tried: -0.5 * (tried - y).square() / variance

    def _confusion(self, margins: Tensor) -> Any:
        predicted, label = margins > 0, self.view.y[:, None] > 0.5
        smallest = torch.finfo(margins.dtype).tiny

        def log_share(prediction: bool) -> Tensor:
            """log of the share of each example's own label among those of that prediction, [n, part]."""
            among = predicted == prediction
            share = (among & label).sum(dim=0) / among.sum(dim=0).clamp(min=1)
            return torch.where(label, share, 1 - share).to(margins.dtype).clamp(min=smallest).log()

        negative, positive = log_share(False), log_share(True)
        return lambda tried: torch.where(tried > 0, positive, negative)


def prior_inversion(X: Any, attribute: NominalAttribute, *, sample_weight: Any = None) -> AttackResult:
    """The most common level for everybody.

    Threat model: the attacker knows how common each level is, and nothing else.

    Args:
        X: The training inputs, [n, d].
        attribute: What to infer.
        sample_weight: The examples' weights, [n]; None: all equal.
    """
    truth = attribute.levels(X)
    guess = np.bincount(truth, None if sample_weight is None else as_array(sample_weight)).argmax()
    guesses = torch.full((len(truth), 1), int(guess))
    return _accuracies("prior", "knows how common each level is", guesses, torch.as_tensor(truth))


def ideal_inversion(X: Any, y: Any, attribute: NominalAttribute, *, l2: float = 1e-4) -> AttackResult:
    """A softmax regression of the attribute on everything else, fitted on the same examples.

    Threat model: the attacker knows everything about the example except the attribute (including its target), and knows
    the population perfectly (here: the training set itself). No model is released: this attacker succeeds through what
    the other columns reveal, not through what the model leaks.

    Args:
        X: The training inputs, [n, d].
        y: The training targets, [n].
        attribute: What to infer.
        l2: The penalty of the softmax regression.
    """
    from torchfil.glm import SoftmaxRegression

    truth = attribute.levels(X)
    others = np.delete(as_array(X).astype(float), list(attribute.columns), axis=1)
    inputs = np.column_stack([others, as_array(y).astype(float)])
    guesses = SoftmaxRegression(l2=l2, fit_intercept=True).fit(inputs, truth).predict(inputs)
    threat_model = "knows the rest of the example, its target and the population; sees no model"
    return _accuracies("ideal", threat_model, torch.as_tensor(guesses)[:, None], torch.as_tensor(truth))


def accuracy_by_part(result: AttackResult, score: Any, parts: int = 10) -> np.ndarray:
    """The accuracy in parts of equal size, ordered by score (deciles of η), [parts]; NaN if empty.

    Args:
        result: The result of an attack whose measure is "accuracy".
        score: [m], smallest first.
        parts: The number of parts.
    """
    order, count = np.argsort(as_array(score), kind="stable"), len(result.achieved)
    require(len(order) == count, f"score has {len(order)} entries for {count} attacked examples")
    return np.array([result.achieved[part].mean() if len(part) else np.nan for part in np.array_split(order, parts)])


def _accuracies(name: str, threat_model: str, guesses: Tensor, truth: Tensor) -> AttackResult:
    correct = (guesses == truth[:, None]).double()  # [n, trials]
    return mean_of_trials(name, threat_model, range(len(truth)), correct, "accuracy", guesses=guesses.to(torch.int16))
