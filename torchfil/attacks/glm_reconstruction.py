r"""Reconstruction of one training example of a generalised linear model (Balle et al. 2022; Guo et al. 2022, § 7.2).

At the minimum, the gradients of all examples and the penalty sum to zero, so an attacker who knows the others knows the
last one's gradient: with G the objective's gradient at the released weights θ = w* + σξ, ξ ~ N(0, I), b_i = ℓ′(m_i,
y_i) and the margin m_i = θᵀx_i,

    v_i = −(Σ_{j≠i} ω_j b_j x_j + nλθ)/ω_i = b_i x_i − G/ω_i ≈ b_i x_i.

G = σHξ + … is the noise; without noise it is 0. The guess is v_i / b̂_i, and how b̂ is found depends on what is known:

* **An intercept**, whose column is known to be 1: b̂ is v_i's last entry. (The form of both papers.)
* **The label:** m solves ℓ′(m, y_i)·m = θᵀv_i, and b̂ = ℓ′(m, y_i).
* **Both:** the maximum of the likelihood, (v_i − r)/b̂, with r the most likely noise; see below.

The errors x̂ − x are sums of a few vectors that belong to an example or to a release, so all examples and releases
together take a few matrix products, on the model's device. A guess divides by b̂, which noise can bring close to 0, so
its mean squared error is dominated by the worst releases, or not even finite. An attacker who knows the range of the
inputs moves each guess into it. This is the attack to measure, and it is biased.

**The Fisher bound that applies to it** (Guo et al. 2022, Theorem 2). The mean guess μ(x) = E[x̂(θ)], θ = w*(x) + σξ,
depends on the example only through w*. Gaussian integration by parts gives its Jacobian from the guesses themselves,
without a derivative of the attack and without a refit:

    J_μ = ∂μ/∂x = E[(x̂ − x) ξᵀ] J / σ,    J = ∂w*/∂x,

and :func:`torchfil.bounds.mse_biased` gives the bound, (tr(J_μ I⁻¹ J_μᵀ) + ‖μ − x‖²)/d with I = JᵀJ/σ². For an unbiased
attacker J_μ is the identity. An attacker who always gives the same answer has J_μ = 0, and only bias.

**The slope b̂, if the label is known.** The attacker knows v = b x − noise for b = ℓ′(m, y), m = θᵀx, so that θᵀv is
about b m: without noise m solves ℓ′(m, y)·m = θᵀv. If there are several solutions, the one with the smallest abs(b) is
used, because most examples are fitted well. With an intercept, whose column is known to be 1, v's last entry is also b.
The noise r in v must then satisfy two equations, and has covariance ∝ S = H_i², with H_i the Hessian of the other
examples. The most likely noise is

    r = S L K⁻¹ c,   L = [e, θ],   K = LᵀSL,   c = (v_last − b, θᵀv − b m),   −2 log likelihood ∝ cᵀK⁻¹c,

so m̂ is where the curve m ↦ (b, b m) comes closest to the two numbers (v_last, θᵀv) in the metric K⁻¹: a search over one
number. For all releases H_i is taken at w* instead of θ; it is only a weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from torchfil import bounds
from torchfil.attacks.base import AttackResult, release_noise
from torchfil.glm.fil import Sensitivity
from torchfil.glm.refits import GLMView, numbers_at_once
from torchfil.utils.errors import require
from torchfil.utils.text import with_progress
from torchfil.viz.common import as_array

if TYPE_CHECKING:
    from torchfil.glm import GeneralizedLinearModel

LabelIs = Literal["known", "unknown"]
Terms = list[tuple[Tensor, Tensor]]

_GRID = 161
_CHUNK_NUMBERS = 2**16  # examples times releases at a time, in some 5 arrays of this size and the grid's
_CHUNK_ARRAYS = 5 * _GRID
_BLOCK_NUMBERS = 2**18  # numbers of a block of guesses, which fits into a cache
_BLOCK_ARRAYS = 64  # so that blocks on a GPU take little memory besides the chunk
_BIAS_NUMBERS, _BIAS_ARRAYS = 2**23, 16  # the same for the moments of guesses
_BELIEVED = 15.0  # the largest margin that an attacker considers possible, if those of the others are smaller
_BISECTIONS = 45


class GLMReconstruction:
    """The attack on every training example in turn, in closed form except for a search over one number.

    Threat model: the attacker knows the released weights, the training procedure, all other training examples, and,
    with ``label="known"``, the target of the example under attack.

    With an intercept and a known label, the guess has the largest likelihood and, at small noise, the least error of an
    unbiased guess, tr(I⁻¹)/d. :func:`torchfil.attacks.biased_bound` bounds the error of guesses in a range.

    Args:
        model: A fitted model of one margin.
        X: The training inputs, [n, d].
        y: The training targets, [n].
        label: "known" or "unknown"; "unknown" needs ``fit_intercept=True``.
        value_range: The smallest and the largest value of an input, known to the attacker; None: guesses are not
            limited.
        progress: Whether to show a progress bar.
    """

    def __init__(
        self,
        model: GeneralizedLinearModel,
        X: Any,
        y: Any,
        *,
        label: LabelIs = "unknown",
        value_range: tuple[float, float] | None = None,
        progress: bool = False,
    ) -> None:
        self.view = GLMView.build(model, X, y)
        self.label, self.value_range, self.progress = label, value_range, progress
        self._intercept = len(self.view.weights) > self.view.num_inputs
        require(label in ("known", "unknown"), f"label={label!r} must be 'known' or 'unknown'")
        enough = label == "known" or self._intercept
        require(enough, "a model without an intercept does not reveal an example's length: attack with label='known'")
        ordered = value_range is None or value_range[0] < value_range[1]
        require(ordered, f"value_range={value_range} must be (smallest, largest)")
        weighty = bool((self.view.sample_weight > 0).all())
        require(weighty, "an example of weight 0 has no influence on the model and cannot be reconstructed")

    @property
    def threat_model(self) -> str:
        """What the attacker knows."""
        target = ", this example's target" if self.label == "known" else ""
        values = ", the range of the inputs" if self.value_range is not None else ""
        return f"knows the released weights, the training procedure, all other training examples{target}{values}"

    def run(
        self,
        sigma: float,
        trials: int = 1000,
        *,
        rows: Any = None,
        seed: int | None = None,
        generator: torch.Generator | None = None,
    ) -> AttackResult:
        """Attack examples in each of ``trials`` releases w* + N(0, σ²I).

        Args:
            sigma: σ.
            trials: The number of releases.
            rows: Which examples, [m]; None: all.
            seed: The seed of the noise.
            generator: Instead of a seed.

        Returns:
            Measure "mse", per input coordinate, with the squared bias (minus its own sampling error); ``guesses`` holds
            the mean guess over the trials, [m, d].
        """
        view, d = self.view, self.view.num_inputs
        chosen = torch.arange(len(view.X), device=view.X.device)
        if rows is not None:
            chosen = chosen[torch.as_tensor(rows, device=view.X.device)]
        inputs = view.X[chosen, :d]

        # Sums over releases, in parts that fit into memory: guesses of all releases at once would be [m, trials, d].
        noise = release_noise(sigma, trials, view.weights, seed, generator)
        total, squares = inputs.new_zeros(2, len(inputs))
        mean_error = torch.zeros_like(inputs)
        measure = self._errors if self.value_range is None else self._errors_in_range
        size = max(1, numbers_at_once(inputs.device, _CHUNK_NUMBERS, _CHUNK_ARRAYS) // len(view.X))
        for part in with_progress(noise.split(size), self.progress, "reconstruction"):
            mse, error = measure(inputs, self._solve(view.weights + sigma * part, chosen))
            total += mse.sum(dim=1)
            squares += mse.square().sum(dim=1)
            mean_error += error / trials

        # The squared mean error contains 1/trials of the variance besides the bias, which is subtracted.
        achieved = total / trials
        variance = (squares / trials - achieved.square()).clamp(min=0) / max(trials - 1, 1)
        bias = mean_error.square().mean(dim=1)
        unbiased = ((trials * bias - achieved) / max(trials - 1, 1)).clamp(min=0)

        name, blind = f"GLM reconstruction, label {self.label}", (inputs - view.X[:, :d].mean(dim=0)).square()
        more: dict[str, Any] = {"guesses": inputs + mean_error, "sigma": sigma, "blind": blind.mean(dim=1)}
        if trials > 1:
            more |= {"standard_error": variance.sqrt(), "squared_bias": unbiased}
        return AttackResult(name, self.threat_model, chosen.tolist(), as_array(achieved), "mse", trials, **more)

    def _errors(self, inputs: Tensor, solved: _Solved) -> tuple[Tensor, Tensor]:
        """Each guess's mean squared error, [m, k], and the errors summed over the k releases, [m, d]."""
        d = inputs.shape[1]
        own = [(factor, vectors[:, :d]) for factor, vectors in solved.by_example]
        shared = [(factor, vectors[:, :d]) for factor, vectors in solved.by_release]
        square, total = torch.zeros_like(solved.slope), torch.zeros_like(inputs)
        for factor, vectors in own:
            total += factor.sum(dim=1, keepdim=True) * vectors
            for other, others in own:
                square += factor * other * (vectors * others).sum(dim=1, keepdim=True)
            for other, others in shared:
                square += 2 * factor * other * (vectors @ others.mT)
        for factor, vectors in shared:
            total += factor @ vectors
            for other, others in shared:
                square += factor * other * (vectors * others).sum(dim=1)
        return square.clamp(min=0) / d, total

    def _errors_in_range(self, inputs: Tensor, solved: _Solved) -> tuple[Tensor, Tensor]:
        """The same for guesses moved into the range, block by block, in single precision."""
        d = inputs.shape[1]
        mse, total = torch.empty_like(solved.slope), torch.zeros_like(inputs)
        truth = inputs.float()[:, None]  # [m, 1, d]
        own = [(factor.float()[:, :, None], vectors[:, None, :d].float()) for factor, vectors in solved.by_example]
        shared = [(factor.float()[:, :, None], vectors[:, :d].float()) for factor, vectors in solved.by_release]
        size = max(1, math.isqrt(numbers_at_once(inputs.device, _BLOCK_NUMBERS, _BLOCK_ARRAYS) // d))
        for rows in _slices(len(inputs), size):
            for trials in _slices(mse.shape[1], size):
                guess = truth[rows]
                for factor, vectors in own:
                    guess = torch.addcmul(guess, factor[rows, trials], vectors[rows])
                for factor, vectors in shared:
                    guess.addcmul_(factor[rows, trials], vectors[trials])
                error = guess.clamp_(*(self.value_range or (None, None))).sub_(truth[rows])
                total[rows] += error.sum(dim=1)
                mse[rows, trials] = torch.linalg.vector_norm(error, dim=2).square().div(d).to(mse.dtype)
        return mse, total

    def reconstruct(self, release: Any, rows: Any) -> tuple[Tensor, Tensor]:
        """What one release reveals about some examples.

        Args:
            release: The noisy weights from :meth:`GeneralizedLinearModel.release`, [p].
            rows: Which examples, [m].

        Returns:
            The guessed inputs, [m, d], and targets ŷ = ℓ′(θᵀx̂, 0) − b̂, [m], right for losses whose ℓ′ is a function
            of the margin minus the target (squared, logistic, Poisson); the true ones if the label is known.
        """
        view, d = self.view, self.view.num_inputs
        weights = torch.as_tensor(release).to(view.weights)[None]
        chosen = torch.as_tensor(rows, device=view.X.device)
        solved = self._solve(weights, chosen)
        guess = self._guesses(solved, chosen)[:, 0]
        if self.label == "known":
            return guess, view.y[chosen]
        margin = guess @ weights[0, :d] + weights[0, d:].sum()
        return guess, view.loss.first(margin, torch.zeros_like(margin)) - solved.slope[:, 0]

    def guesses(self, releases: Tensor, rows: Tensor) -> Tensor:
        """What k releases [k, p] reveal about some examples [m]: the guessed inputs, [m, k, d]."""
        return self._guesses(self._solve(releases, rows), rows)

    def _guesses(self, solved: _Solved, rows: Tensor) -> Tensor:
        d = self.view.num_inputs
        guess = self.view.X[rows, None, :d].repeat(1, solved.slope.shape[1], 1)
        for factor, vectors in solved.by_example:
            guess.addcmul_(factor[:, :, None], vectors[:, None, :d])
        for factor, vectors in solved.by_release:
            guess.addcmul_(factor[:, :, None], vectors[:, :d])
        return guess if self.value_range is None else guess.clamp_(*self.value_range)

    def _solve(self, weights: Tensor, rows: Tensor) -> _Solved:
        """What k released weights [k, p] reveal about some examples."""
        view = self.view
        margins = view.X @ weights.mT  # [n, k]
        slopes = view.first(margins)
        gradient = (view.sample_weight[:, None] * slopes).mT @ view.X + view.ridge.mT * weights  # G, [k, p]
        x, weight, margin, slope = view.X[rows], view.sample_weight[rows, None], margins[rows], slopes[rows]
        last = slope - gradient[:, -1] / weight  # v's last entry, the slope if there is an intercept, [m, k]
        if self.label == "unknown":
            return _Solved.build(x, slope, last, gradient, weight)

        along = slope * margin - (weights * gradient).sum(dim=1) / weight  # θᵀv
        curve = SlopeCurve(view, rows, believed_margins(margins, rows))
        if not self._intercept:
            return _Solved.build(x, slope, curve.slope(curve.crossing(along)), gradient, weight)
        metric = NoiseMetric(view, weights, rows, margin)
        likeliest = curve.nearest(last, along, metric)  # margins
        guessed = curve.slope(likeliest)
        plain = _Solved.build(x, slope, guessed, gradient, weight)
        return plain.less(metric.noise(last - guessed, along - guessed * likeliest))


@dataclass(frozen=True)
class _Solved:
    """Guesses as errors, x̂ − x = Σ factor·vector, with vectors of examples [m, p] and of releases [k, p]."""

    slope: Tensor  # b̂, [m, k]
    by_example: Terms  # factors [m, k], vectors [m, p]
    by_release: Terms  # factors [m, k], vectors [k, p]

    @classmethod
    def build(cls, x: Tensor, slope: Tensor, guessed: Tensor, gradient: Tensor, weight: Tensor) -> _Solved:
        """x̂ = v/b̂: x̂ − x = (b − b̂)/b̂ x − G/(ω b̂)."""
        return cls(guessed, [((slope - guessed) / guessed, x)], [(-1 / (weight * guessed), gradient)])

    def less(self, noise: tuple[Terms, Terms]) -> _Solved:
        """The same for (v − r)/b̂."""
        by_example, by_release = ([(-factor / self.slope, vectors) for factor, vectors in part] for part in noise)
        return _Solved(self.slope, [*self.by_example, *by_example], [*self.by_release, *by_release])


def _slices(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


@dataclass(frozen=True, eq=False)
class BiasedBound:
    """The bound by example, [m] each. Confidential: it depends on private data.

    Attributes:
        bound: The least mean squared error per coordinate of an attacker with this bias. Its own sampling error is
            subtracted, so that it is unbiased and can fall below 0 if few releases were drawn.
        response: tr(J_μ)/d: how much the mean guess follows the example; 1 for an unbiased attacker.
    """

    bound: np.ndarray
    response: np.ndarray


def biased_bound(
    attack: GLMReconstruction,
    sigma: float,
    rows: Any,
    trials: int = 4000,
    *,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> BiasedBound:
    """The bound on the mean squared error of this attack, including its bias, for some examples.

    J_μ and μ are estimated on two halves of the releases. The bound is quadratic in them; subtracting the value at half
    their difference from the value at their mean leaves the product of two independent estimates, which has no bias.

    Args:
        attack: Preferably one with a ``value_range``: without it, the mean of the guesses need not exist.
        sigma: σ of the release.
        rows: Which examples, [m]; takes 16·m·d·p bytes.
        trials: The number of releases, at least 2.
        seed: The seed of the noise.
        generator: Instead of a seed.
    """
    require(sigma > 0 and trials >= 2, f"sigma={sigma} must be positive and trials={trials} at least 2")
    view, d = attack.view, attack.view.num_inputs
    chosen = torch.as_tensor(rows, device=view.X.device)

    # The moments of each half of the releases: E[(x̂ − x) ξᵀ] and E[x̂ − x].
    halves = release_noise(sigma, 2 * (trials // 2), view.weights, seed, generator).chunk(2)
    numbers = numbers_at_once(view.X.device, _BIAS_NUMBERS, _BIAS_ARRAYS)
    size = max(1, numbers // (len(view.X) + len(chosen) * d))
    covariances = view.X.new_zeros(2, len(chosen), d, len(view.weights))
    biases = view.X.new_zeros(2, len(chosen), d)
    parts = [(number, part) for number, half in enumerate(halves) for part in half.split(size)]
    for number, noise in with_progress(parts, attack.progress, "releases"):
        error = attack.guesses(view.weights + sigma * noise, chosen) - view.X[chosen, None, :d]  # [m, part, d]
        covariances[number] += error.mT @ noise / len(halves[number])
        biases[number] += error.sum(dim=1) / len(halves[number])

    sensitivity = Sensitivity.build(*view.data, view.weights[:, None], view.fit_hessian, d, private_target=False)

    # The value at the halves' mean, minus that at half their difference, has no sampling bias.
    unbiased, responses = [], []
    for place, row in enumerate(chosen.tolist()):
        jacobian = sensitivity.jacobian(row) / sigma
        fim = (jacobian.mT @ jacobian)[None]
        first, second = covariances[:, place] @ jacobian  # J_μ, [d, d] each
        bias = biases[:, place]
        mean = bounds.mse_biased(fim, (first + second) / 2, bias.mean(dim=0))
        unbiased.append(float(mean - bounds.mse_biased(fim, (first - second) / 2, (bias[0] - bias[1]) / 2)))
        responses.append(float((first + second).trace()) / (2 * d))
    return BiasedBound(np.array(unbiased), np.array(responses))


# ------------------------------------------------------------------ the slope, if the label is known


class NoiseMetric:
    """K = LᵀSL for L = [e, θ], S = H_i², H_i = H − a x xᵀ the Hessian without the example's own part.

    xᵀe = 1 and xᵀθ = m, so that all entries come from products of x, Hx, He and Hθ; no H_i is formed. It is that of k
    releases [k, p], for some examples and their margins there, [m, k].
    """

    def __init__(self, view: GLMView, weights: Tensor, rows: Tensor, margin: Tensor) -> None:
        self.margin = margin
        self.x = x = view.X[rows]  # [m, p]
        self.own = own = (view.sample_weight[rows] * view.loss.second(x @ view.weights, view.y[rows]))[:, None]  # a
        last, pushed = view.fit_hessian[-1:], weights @ view.fit_hessian  # He, Hθ
        self.pushed = x @ view.fit_hessian  # Hx, [m, p]
        self.unit = unit = x @ last.mT  # xᵀHe, [m, 1]
        self.along = along = x @ pushed.mT  # xᵀHθ, [m, k]
        self.twice_unit = (last @ view.fit_hessian).expand_as(pushed)  # H²e, [k, p]
        self.twice_along = pushed @ view.fit_hessian  # H²θ, [k, p]

        # K's entries: eᵀSe, [m, 1], eᵀSθ and θᵀSθ, [m, k]
        length = own.square() * x.square().sum(dim=1, keepdim=True)
        self.corner = last.square().sum() - 2 * own * unit + length
        self.mixed = (pushed @ last.mT).mT - own * (unit * margin + along) + length * margin
        self.far = pushed.square().sum(dim=1) - 2 * own * margin * along + length * margin.square()

    def noise(self, first: Tensor, second: Tensor) -> tuple[Terms, Terms]:
        """The noise r = S L K⁻¹ c for c = (first, second), [m, k] each: its terms by example and by release."""
        determinant = self.corner * self.far - self.mixed.square()
        unit = (self.far * first - self.mixed * second) / determinant  # K⁻¹c
        along = (self.corner * second - self.mixed * first) / determinant
        inner = self.own * (unit + along * self.margin)  # a xᵀu for u = LK⁻¹c; S u = H²u − a(xᵀu)Hx − a(xᵀH_iu)x
        square = self.x.square().sum(dim=1, keepdim=True)
        outer = self.own * (unit * self.unit + along * self.along - inner * square)
        return [(-inner, self.pushed), (-outer, self.x)], [(unit, self.twice_unit), (along, self.twice_along)]


class SlopeCurve:
    """m ↦ (b, b m), b = ℓ′(m, y), of some examples, on a grid of margins up to ``reach`` [m, 1], finer around 0."""

    def __init__(self, view: GLMView, rows: Tensor, reach: Tensor) -> None:
        end = math.asinh(_BELIEVED)
        unit = torch.linspace(-end, end, _GRID, dtype=reach.dtype, device=reach.device).sinh() / _BELIEVED
        self.view = view
        self.y = view.y[rows, None]  # [m, 1]
        self.margins = reach * unit  # [m, grid]
        self.slopes = self.slope(self.margins)  # b, [m, grid]

    def slope(self, margin: Tensor) -> Tensor:
        """ℓ′, in the margin's shape."""
        return self._of(self.view.loss.first, margin)

    def crossing(self, along: Tensor) -> Tensor:
        """The margin with b m = along and the smallest abs(b), [m, k]; if there is none, the nearest."""
        products = self.slopes * self.margins
        before = products[:, None] <= along[:, :, None]  # [m, k, grid]
        cost = (self.slopes[:, None, :-1] + self.slopes[:, None, 1:]).abs()
        cost = cost.where(before[:, :, :-1] != before[:, :, 1:], torch.inf)  # of a cell with a crossing
        smallest, place = cost.min(dim=2)
        rising = products.gather(1, place) <= along
        crossing = self._bisect(place, place + 1, lambda margin: (self.slope(margin) * margin <= along) == rising)
        nearest = (products[:, None] - along[:, :, None]).abs().argmin(dim=2)  # in case there is none
        return torch.where(smallest < torch.inf, crossing, self.margins.gather(1, nearest))

    def nearest(self, first: Tensor, second: Tensor, metric: NoiseMetric) -> Tensor:
        """The margin whose point (b, b m) is closest to (first, second) in the metric K⁻¹, [m, k].

        With ρ = K₁₂/K₁₁, t = K₁₁/(K₂₂ − ρK₁₂) and c the difference, K₁₁cᵀK⁻¹c = c₁² + t(c₂ − ρc₁)².
        """
        rho = metric.mixed / metric.corner
        stretch = metric.corner / (metric.far - rho * metric.mixed)
        left = first[:, :, None] - self.slopes[:, None]  # [m, k, grid]
        tilted = second[:, :, None] - (self.slopes * self.margins)[:, None] - rho[:, :, None] * left
        place = torch.addcmul(left.square(), stretch[:, :, None], tilted.square()).argmin(dim=2)

        def falling(margin: Tensor) -> Tensor:
            b, a = self.slope(margin), self._of(self.view.loss.second, margin)
            c = first - b
            tilted = second - b * margin - rho * c
            return c * a + stretch * tilted * (a * margin + b - rho * a) > 0

        return self._bisect((place - 1).clamp(min=0), (place + 1).clamp(max=_GRID - 1), falling)

    def _bisect(self, low: Tensor, high: Tensor, below: Callable[[Tensor], Tensor]) -> Tensor:
        """The margin between two points of the grid up to which ``below`` holds."""
        left, right = self.margins.gather(1, low), self.margins.gather(1, high)
        for _ in range(_BISECTIONS):
            middle = (left + right) / 2
            yes = below(middle)
            left, right = torch.where(yes, middle, left), torch.where(yes, right, middle)
        return (left + right) / 2

    def _of(self, function: Callable[[Tensor, Tensor], Tensor], margin: Tensor) -> Tensor:
        return function(margin.flatten(), self.y.expand_as(margin).flatten()).view_as(margin)


def believed_margins(margins: Tensor, rows: Tensor) -> Tensor:
    """The largest margin to search, [m, 1], from those of the other examples at all releases, [n, k].

    It is 15, or twice the largest margin of the others if that is more.
    """
    by_example = margins.abs().amax(dim=1)
    largest = by_example.topk(min(2, len(by_example)))
    others = torch.where(rows == largest.indices[0], largest.values[-1], largest.values[0])
    return torch.where(others > _BELIEVED, 2 * others, _BELIEVED)[:, None]
