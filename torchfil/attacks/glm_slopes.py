r"""The slope of the loss at one example, from what a release reveals to an attacker who knows the label.

The attacker knows v = b x − noise for b = ℓ′(m, y), m = θᵀx (see :mod:`torchfil.attacks.glm_reconstruction`), so that
θᵀv ≈ b m: without noise m solves ℓ′(m, y)·m = θᵀv. If there are several solutions, the one with the smallest abs(b) is
used, because most examples are fitted well.

With an intercept, whose column is known to be 1, v's last entry is also b. The noise r in v must then satisfy two
equations, and has covariance ∝ S = H_i², with H_i the Hessian of the other examples. The most likely noise is

    r = S L K⁻¹ c,   L = [e, θ],   K = LᵀSL,   c = (v_last − b, θᵀv − b m),   −2 log likelihood ∝ cᵀK⁻¹c,

so m̂ is where the curve m ↦ (b, b m) comes closest to the two numbers (v_last, θᵀv) in the metric K⁻¹: a search over one
number. For all releases H_i is taken at w* instead of θ; it is only a weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchfil.glm.refits import GLMView

Terms = list[tuple[Tensor, Tensor]]

_BELIEVED = 15.0  # the largest margin that an attacker considers possible, if those of the others are smaller
_GRID = 161
_BISECTIONS = 45


@dataclass(frozen=True)
class NoiseMetric:
    """K = LᵀSL for L = [e, θ], S = H_i², H_i = H − a x xᵀ the Hessian without the example's own part.

    xᵀe = 1 and xᵀθ = m, so that all entries come from products of x, Hx, He and Hθ; no H_i is formed.
    """

    x: Tensor  # [m, p]
    pushed: Tensor  # Hx, [m, p]
    own: Tensor  # a = ω ℓ″ at w*, [m, 1]
    margin: Tensor  # [m, k]
    unit: Tensor  # xᵀHe, [m, 1]
    along: Tensor  # xᵀHθ, [m, k]
    twice_unit: Tensor  # H²e, [k, p]
    twice_along: Tensor  # H²θ, [k, p]
    corner: Tensor  # K's entries: eᵀSe, [m, 1]
    mixed: Tensor  # eᵀSθ, [m, k]
    far: Tensor  # θᵀSθ, [m, k]

    @classmethod
    def build(cls, view: GLMView, weights: Tensor, rows: Tensor, margin: Tensor) -> NoiseMetric:
        """At k releases [k, p], for some examples and their margins there, [m, k]."""
        x, y = view.X[rows], view.y[rows]
        own = (view.sample_weight[rows] * view.loss.second(x @ view.weights, y))[:, None]
        length = own.square() * x.square().sum(dim=1, keepdim=True)
        last, pushed = view.hessian[-1:], weights @ view.hessian  # He, Hθ
        unit, along = x @ last.mT, x @ pushed.mT
        return cls(
            x,
            x @ view.hessian,
            own,
            margin,
            unit,
            along,
            (last @ view.hessian).expand_as(pushed),
            pushed @ view.hessian,
            last.square().sum() - 2 * own * unit + length,
            (pushed @ last.mT).mT - own * (unit * margin + along) + length * margin,
            pushed.square().sum(dim=1) - 2 * own * margin * along + length * margin.square(),
        )

    def noise(self, first: Tensor, second: Tensor) -> tuple[Terms, Terms]:
        """The noise r = S L K⁻¹ c for c = (first, second), [m, k] each: its terms by example and by release."""
        determinant = self.corner * self.far - self.mixed.square()
        unit = (self.far * first - self.mixed * second) / determinant  # K⁻¹c
        along = (self.corner * second - self.mixed * first) / determinant
        inner = self.own * (unit + along * self.margin)  # a xᵀu for u = LK⁻¹c; S u = H²u − a(xᵀu)Hx − a(xᵀH_iu)x
        square = self.x.square().sum(dim=1, keepdim=True)
        outer = self.own * (unit * self.unit + along * self.along - inner * square)
        return [(-inner, self.pushed), (-outer, self.x)], [(unit, self.twice_unit), (along, self.twice_along)]


@dataclass(frozen=True)
class SlopeCurve:
    """m ↦ (b, b m), b = ℓ′(m, y), of every example, on a grid of margins that is finer around 0."""

    view: GLMView
    y: Tensor  # [m, 1]
    margins: Tensor  # [m, grid]
    slopes: Tensor  # b, [m, grid]

    @classmethod
    def build(cls, view: GLMView, rows: Tensor, reach: Tensor) -> SlopeCurve:
        """The curves of some examples, for margins up to ``reach``, [m, 1]."""
        end = math.asinh(_BELIEVED)
        unit = torch.linspace(-end, end, _GRID, dtype=reach.dtype, device=reach.device).sinh() / _BELIEVED
        curve = cls(view, view.y[rows, None], reach * unit, reach)
        return replace(curve, slopes=curve.slope(curve.margins))

    def slope(self, margin: Tensor) -> Tensor:
        """ℓ′, in the margin's shape."""
        return self._of(self.view.loss.first, margin)

    def crossing(self, along: Tensor) -> Tensor:
        """The margin with b m = along and the smallest abs(b), [m, k]; if there is none, the nearest."""
        # A walk over the grid finds the cell of the crossing, and the nearest point in case there is none.
        products = self.slopes * self.margins
        place = torch.zeros(along.shape, dtype=torch.long, device=along.device)
        smallest = torch.full_like(along, torch.inf)
        nearest, gap = place.clone(), smallest.clone()
        for cell in range(_GRID):
            distance = (products[:, cell, None] - along).abs()
            nearest, gap = torch.where(distance < gap, cell, nearest), torch.minimum(distance, gap)
            if cell + 1 == _GRID:
                break
            turns = (products[:, cell, None] <= along) != (products[:, cell + 1, None] <= along)
            cost = (self.slopes[:, cell, None] + self.slopes[:, cell + 1, None]).abs()
            better = turns & (cost < smallest)
            place, smallest = torch.where(better, cell, place), torch.where(better, cost, smallest)

        rising = products.gather(1, place) <= along
        crossing = self._bisect(place, place + 1, lambda margin: (self.slope(margin) * margin <= along) == rising)
        return torch.where(smallest < torch.inf, crossing, self.margins.gather(1, nearest))

    def nearest(self, first: Tensor, second: Tensor, metric: NoiseMetric) -> Tensor:
        """The margin whose point (b, b m) is closest to (first, second) in the metric K⁻¹, [m, k].

        With ρ = K₁₂/K₁₁, t = K₁₁/(K₂₂ − ρK₁₂) and c the difference, K₁₁cᵀK⁻¹c = c₁² + t(c₂ − ρc₁)².
        """
        rho = metric.mixed / metric.corner
        stretch = metric.corner / (metric.far - rho * metric.mixed)
        best = torch.full_like(first, torch.inf)
        place = torch.zeros(first.shape, dtype=torch.long, device=first.device)
        for cell in range(_GRID):
            b, m = self.slopes[:, cell, None], self.margins[:, cell, None]
            c = first - b
            distance = torch.addcmul(c.square(), stretch, (second - b * m - rho * c).square())
            place = torch.where(distance < best, cell, place)
            best = torch.minimum(distance, best)

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
