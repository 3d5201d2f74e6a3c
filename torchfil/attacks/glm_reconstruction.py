r"""Reconstruction of one training example of a generalised linear model (Balle et al. 2022; Guo et al. 2022, § 7.2).

At the minimum the gradients of all examples and the penalty sum to zero, so that whoever knows the others knows the
last one's: with G the objective's gradient at the released weights θ = w* + N(0, σ²I) and b_i = ℓ′(θᵀx_i, y_i),

    v_i = −(Σ_{j≠i} ω_j b_j x_j + nλθ)/ω_i = b_i x_i − G/ω_i ≈ b_i x_i,

and the guess is v_i / b̂_i. G = Hξ + … is the noise, and 0 without it. How b̂ is found:

* With an intercept, whose column is known to be 1, b̂ is v_i's last entry. A known label tells the values that
  ℓ′(·, y_i) takes at margins up to 15 (for logistic regression its sign), and b̂ is moved among them.
* Without one, the label must be known: θᵀv_i = b m for the margin m, so that m solves ℓ′(m, y_i)·m = θᵀv_i, and
  b̂ = ℓ′(m, y_i). Of several solutions the one of smallest abs(b̂) is taken: most examples are fitted well.

The error x̂_i − x_i = ((b_i − b̂_i) x_i − G/ω_i)/b̂_i needs no guess of its own: all examples and trials are three
products of matrices, on the model's device. A guess divides by b̂, which noise can bring near 0, so its mean squared
error need not be finite. An attacker who knows the range of the inputs moves each guess into it; that is the attack to
measure, and a biased one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from torchfil.attacks.base import AttackResult, make_generator, with_progress
from torchfil.attacks.glm_view import GLMView

if TYPE_CHECKING:
    from torchfil.glm import GeneralizedLinearModel

__all__ = ["GLMReconstruction", "Label"]

Label = Literal["known", "unknown"]

_CHUNK_NUMBERS = 2**23
_MARGINS = 60.0  # solutions are looked for among margins up to this size
_GRID = 241
_BELIEVED = 15.0  # the largest margin that an attacker who knows the label deems possible
_BISECTIONS = 45
_BLOCK_NUMBERS = 2**18  # numbers of a block of guesses: they fit into a cache


class GLMReconstruction:
    """The closed-form attack on every training example in turn.

    Threat model: the attacker knows the released weights, the training procedure, all other training examples, and,
    with ``label="known"``, the target of the example under attack.

    Args:
        model: A fitted model of one margin.
        X: The training inputs, [n, d].
        y: The training targets, [n].
        label: "known" or "unknown"; "unknown" needs ``fit_intercept=True``.
        value_range: The smallest and the largest value of an input, known to the attacker; None: guesses stay as they
            are.
        progress: Whether to show a progress bar.
    """

    def __init__(
        self,
        model: GeneralizedLinearModel,
        X: Any,
        y: Any,
        *,
        label: Label = "unknown",
        value_range: tuple[float, float] | None = None,
        progress: bool = False,
    ) -> None:
        self.view = GLMView.build(model, X, y)
        self.label = label
        self.value_range = value_range
        self.progress = progress
        self._intercept = len(self.view.weights) > self.view.num_inputs
        if label not in ("known", "unknown"):
            raise ValueError(f"label={label!r} must be 'known' or 'unknown'")
        if label == "unknown" and not self._intercept:
            raise ValueError(
                "without an intercept the gradient of an example does not tell its length: fit the model with "
                "fit_intercept=True, or attack with label='known'"
            )
        if value_range is not None and not value_range[0] < value_range[1]:
            raise ValueError(f"value_range={value_range} must be (smallest, largest)")
        if not bool((self.view.sample_weight > 0).all()):
            raise ValueError("an example of weight 0 has no influence on the model and cannot be reconstructed")

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
            trials: How many releases.
            rows: Which examples, [m]; None: all.
            seed: Of the noise.
            generator: Instead of a seed.

        Returns:
            Measure "mse", per input coordinate, with the squared bias, less its own sampling error; ``guesses`` holds
            the mean guess over the trials, [m, d].
        """
        if not sigma >= 0 or trials < 1:
            raise ValueError(f"sigma={sigma} must be ≥ 0 and trials={trials} at least 1")
        view, d = self.view, self.view.num_inputs
        chosen = torch.arange(len(view.X), device=view.X.device)
        if rows is not None:
            chosen = chosen[torch.as_tensor(rows, device=view.X.device)]
        inputs = view.X[chosen, :d]
        source = make_generator(generator, seed, view.X.device)
        total, squares = torch.zeros_like(inputs[:, 0]), torch.zeros_like(inputs[:, 0])
        mean_error = torch.zeros_like(inputs)
        measure = self._errors if self.value_range is None else self._errors_in_range
        sizes = [len(part) for part in torch.arange(trials).split(max(1, _CHUNK_NUMBERS // len(view.X)))]
        for size in with_progress(sizes, self.progress, "reconstruction"):
            noise = torch.randn(size, view.X.shape[1], generator=source, dtype=view.X.dtype, device=source.device)
            solved = self._solve(view.weights + sigma * noise.to(view.X.device), chosen)
            mse, error = measure(inputs, solved)
            total += mse.sum(dim=1)
            squares += mse.square().sum(dim=1)
            mean_error += error / trials
        achieved = total / trials
        variance = (squares / trials - achieved.square()).clamp(min=0) / max(trials - 1, 1)
        bias = mean_error.square().mean(dim=1)
        unbiased = ((trials * bias - achieved) / max(trials - 1, 1)).clamp(min=0)
        return AttackResult(
            f"GLM reconstruction, label {self.label}",
            self.threat_model,
            chosen.tolist(),
            achieved,  # type: ignore[arg-type]
            measure="mse",
            trials=trials,
            standard_error=variance.sqrt() if trials > 1 else None,  # type: ignore[arg-type]
            squared_bias=unbiased if trials > 1 else None,  # type: ignore[arg-type]
            guesses=inputs + mean_error,  # type: ignore[arg-type]
        )

    def _errors(self, inputs: Tensor, solved: _Solved) -> tuple[Tensor, Tensor]:
        """Each guess's mean squared error, [m, k], and the errors summed over the k releases, [m, d]."""
        own, shared = solved.own, solved.shared
        gradient = solved.gradient[:, : inputs.shape[1]]
        mse = (
            own.square() * inputs.square().sum(dim=1, keepdim=True)
            - 2 * own * shared * (inputs @ gradient.mT)
            + shared.square() * gradient.square().sum(dim=1)
        ) / inputs.shape[1]
        return mse, own.sum(dim=1, keepdim=True) * inputs - shared @ gradient

    def _errors_in_range(self, inputs: Tensor, solved: _Solved) -> tuple[Tensor, Tensor]:
        """The same for guesses moved into the range, block by block, in single precision."""
        d = inputs.shape[1]
        mse, total = torch.empty_like(solved.own), torch.zeros_like(inputs)
        gradient, truth = solved.gradient[:, :d].float(), inputs.float()[:, None]  # [k, d], [m, 1, d]
        factor, shared = 1 + solved.own.float()[:, :, None], solved.shared.float()[:, :, None]
        numbers = _BLOCK_NUMBERS if inputs.device.type == "cpu" else 2**8 * _BLOCK_NUMBERS
        size = max(1, math.isqrt(numbers // d))
        for rows in _slices(len(inputs), size):
            for trials in _slices(len(gradient), size):
                guess = torch.addcmul(
                    factor[rows, trials] * truth[rows], shared[rows, trials], gradient[trials], value=-1
                )
                error = guess.clamp_(*(self.value_range or (None, None))).sub_(truth[rows])
                total[rows] += error.sum(dim=1)
                mse[rows, trials] = torch.linalg.vector_norm(error, dim=2).square().div(d).to(mse.dtype)
        return mse, total

    def reconstruct(self, release: Any, rows: Any) -> tuple[Tensor, Tensor]:
        """What one release gives away about some examples.

        Args:
            release: The noisy weights as :meth:`GeneralizedLinearModel.release` gives them, [p].
            rows: Which examples, [m].

        Returns:
            The guessed inputs, [m, d], and targets ŷ = ℓ′(θᵀx̂, 0) − b̂, [m], right for losses whose ℓ′ is a function
            of the margin less the target (squared, logistic, Poisson); the true ones where the label is known.
        """
        view, d = self.view, self.view.num_inputs
        weights = torch.as_tensor(release).to(view.weights)[None]
        chosen = torch.as_tensor(rows, device=view.X.device)
        solved = self._solve(weights, chosen)
        guess = (1 + solved.own) * view.X[chosen, :d] - solved.shared * solved.gradient[:, :d]
        if self.value_range is not None:
            guess = guess.clamp(*self.value_range)
        if self.label == "known":
            return guess, view.y[chosen]
        margin = guess @ weights[0, :d] + weights[0, d:].sum()
        return guess, view.loss.first(margin, torch.zeros_like(margin)) - solved.found[:, 0]

    def _solve(self, weights: Tensor, rows: Tensor) -> _Solved:
        """The slopes b and b̂ of some examples at k released weights [k, p]."""
        view = self.view
        margin = view.X @ weights.mT  # [n, k]
        residual = view.first(margin)
        gradient = (view.sample_weight[:, None] * residual).mT @ view.X + view.ridge * weights  # G, [k, p]
        weight, margin, residual = view.sample_weight[rows, None], margin[rows], residual[rows]
        hint = residual - gradient[:, -1] / weight if self._intercept else None  # v's last entry
        if hint is None:
            wanted = residual * margin - (weights * gradient).sum(dim=1) / weight  # θᵀv
            return _Solved(residual, self._from_label(wanted, view.y[rows]), gradient, weight)
        if self.label == "known":
            end, y = torch.full_like(view.y[rows], _BELIEVED), view.y[rows]
            hint = hint.clamp(view.loss.first(-end, y)[:, None], view.loss.first(end, y)[:, None])
        return _Solved(residual, hint, gradient, weight)

    def _from_label(self, wanted: Tensor, y: Tensor) -> Tensor:
        """b̂ = ℓ′(m, y) of the best m with ℓ′(m, y)·m = wanted, [m, k]; where there is none, of the nearest m."""

        def first(margin: Tensor) -> Tensor:
            return self.view.loss.first(margin.flatten(), y[:, None].expand_as(margin).flatten()).view_as(margin)

        end = math.asinh(_MARGINS)  # the grid is finer around 0
        grid = torch.linspace(-end, end, _GRID, dtype=wanted.dtype, device=wanted.device).sinh()
        slopes = first(grid.expand(len(y), -1))  # b on the grid, [m, grid]
        products = slopes * grid
        place = torch.zeros(wanted.shape, dtype=torch.long, device=wanted.device)
        smallest = torch.full_like(wanted, torch.inf)
        nearest, gap = place.clone(), smallest.clone()
        for cell in range(_GRID):
            distance = (products[:, cell, None] - wanted).abs()
            nearest, gap = torch.where(distance < gap, cell, nearest), torch.minimum(distance, gap)
            if cell + 1 == _GRID:
                break
            turns = (products[:, cell, None] <= wanted) != (products[:, cell + 1, None] <= wanted)
            cost = (slopes[:, cell, None] + slopes[:, cell + 1, None]).abs()
            better = turns & (cost < smallest)
            place, smallest = torch.where(better, cell, place), torch.where(better, cost, smallest)
        low, high = grid[place], grid[place + 1]
        rising = products.gather(1, place) <= wanted
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            left = (first(middle) * middle <= wanted) == rising
            low, high = torch.where(left, middle, low), torch.where(left, high, middle)
        return torch.where(smallest < torch.inf, first((low + high) / 2), slopes.gather(1, nearest))


def _slices(length: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, length, size)]


@dataclass(frozen=True)
class _Solved:
    residual: Tensor  # b, [m, k]
    found: Tensor  # b̂, [m, k]
    gradient: Tensor  # G, [k, p]
    weight: Tensor  # ω, [m, 1]

    @property
    def own(self) -> Tensor:
        """(b − b̂)/b̂: x̂ − x = own·x − shared·G."""
        return (self.residual - self.found) / self.found

    @property
    def shared(self) -> Tensor:
        """1/(ω b̂)."""
        return 1 / (self.weight * self.found)
