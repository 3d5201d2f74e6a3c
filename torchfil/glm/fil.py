r"""Fisher information of an output-perturbed generalised linear model, in closed form and without its Jacobian.

The released parameters are w* + N(0, σ²I). With A = H⁻¹, b_i = ∂ℓ/∂m, a_i = ∂²ℓ/∂m², c_i = −∂²ℓ/∂m∂y at w*, and E the
map of the d private inputs into the p coordinates of w (an intercept is public), the minimiser's Jacobian about
example i is

    J_i = −ω_i A [ a_i x_i wᵀ + b_i E ,  −c_i x_i ]  ∈ R^{p×(d+1)}         (without the last column where y is public)

and, with q_i = A x_i, v = A E w, M = A E Eᵀ A, γ_i = a_i²‖w‖² + c_i²,

    J_i J_iᵀ / ω_i² = b_i² M + a_i b_i (q_i vᵀ + v q_iᵀ) + γ_i q_i q_iᵀ.

In the eigenbasis of M that is diagonal plus rank two: its largest eigenvalue is found by counting eigenvalues above a
trial value (Sylvester's law of inertia), O(p) per trial. Nothing of size n×p×p is ever formed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchfil.glm.losses import MarginLoss

__all__ = ["Sensitivity"]

_BISECTIONS = 60
_CHUNK_NUMBERS = 2**21  # numbers of a chunk's [rows, p] arrays


@dataclass(frozen=True)
class Sensitivity:
    """How the minimiser of a fitted model depends on each example; the FIM about example i is JᵢᵀJᵢ/σ².

    Attributes:
        X: The inputs with the intercept's column of ones, where there is one, last, [n, p].
        weights: w*, [p].
        inverse: A = H⁻¹, [p, p].
        first: b, [n].
        second: a, [n].
        cross: c, [n]; 0 where the target is public.
        sample_weight: ω, [n].
        num_inputs: d; p is d, or d + 1 with an intercept.
    """

    X: Tensor
    weights: Tensor
    inverse: Tensor
    first: Tensor
    second: Tensor
    cross: Tensor
    sample_weight: Tensor
    num_inputs: int

    @classmethod
    def build(
        cls,
        loss: MarginLoss,
        X: Tensor,
        y: Tensor,
        sample_weight: Tensor,
        weights: Tensor,
        hessian: Tensor,
        *,
        num_inputs: int,
        private_target: bool,
    ) -> Sensitivity:
        """From data, minimiser and Hessian."""
        margin = X @ weights
        cross = loss.target_sensitivity(margin, y)
        return cls(
            X,
            weights,
            torch.linalg.inv(hessian),
            loss.first(margin, y),
            loss.second(margin, y),
            cross if private_target else torch.zeros_like(cross),
            sample_weight,
            num_inputs,
        )

    def jacobian(self, example: int) -> Tensor:
        """J_i, [p, d + 1], for checks; the last column is zero where the target is public."""
        x, w = self.X[example], self.weights[: self.num_inputs]
        inputs = self.second[example] * torch.outer(x, w)
        inputs[: self.num_inputs] += self.first[example] * torch.eye(self.num_inputs, dtype=x.dtype, device=x.device)
        full = torch.cat([inputs, -(self.cross[example] * x)[:, None]], dim=1)
        return -self.sample_weight[example] * self.inverse @ full

    def squared_trace(self) -> Tensor:
        """tr(J_iᵀJ_i) of every example, [n]."""
        q, v, m, gamma = self._pieces()
        b, ab = self.first, self.first * self.second
        trace = b.square() * m.trace() + 2 * ab * (q @ v) + gamma * q.square().sum(dim=1)
        return self.sample_weight.square() * trace

    def squared_norm(self) -> Tensor:
        """‖J_i‖₂² of every example, [n], to about 1e-15 relative to its upper bound."""
        q, v, m, gamma = self._pieces()
        eigenvalues, basis = torch.linalg.eigh(m)
        eigenvalues = eigenvalues.clamp(min=0)
        rotated_v = basis.mT @ v
        result = torch.empty_like(gamma)
        rows_at_once = max(1, _CHUNK_NUMBERS // q.shape[1])
        for start in range(0, len(gamma), rows_at_once):
            rows = slice(start, start + rows_at_once)
            result[rows] = _largest_eigenvalue(
                self.first[rows].square(),
                eigenvalues,
                q[rows] @ basis,
                rotated_v,
                (self.first * self.second)[rows],
                gamma[rows],
            )
        return self.sample_weight.square() * result

    def attribute_gram(self, columns: Sequence[int], *, tangent: bool = False) -> Tensor:
        """J_SᵀJ_S for the inputs S of every example, [n, |S|, |S|]; with ``tangent`` restricted to Σ = 0.

        An |S|-level one-hot attribute moves only within the simplex: its tangent space has dimension |S| − 1.
        """
        index = torch.as_tensor(list(columns), device=self.X.device)
        q = self.X @ self.inverse
        aq = (q @ self.inverse)[:, index]
        w = self.weights[index]
        square = (self.inverse @ self.inverse)[index][:, index]
        a, b = self.second, self.first
        outer = aq[:, :, None] * w[None, None, :]
        gram = (
            (a.square() * q.square().sum(dim=1))[:, None, None] * torch.outer(w, w)
            + (a * b)[:, None, None] * (outer + outer.mT)
            + b.square()[:, None, None] * square
        )
        gram = self.sample_weight.square()[:, None, None] * gram
        if not tangent:
            return gram
        basis = _tangent_basis(len(index)).to(gram)
        return basis.mT @ gram @ basis

    def group_gram(self, rows: Tensor) -> Tensor:
        """Σ_{i∈G} J_i J_iᵀ of a group of examples, [p, p]; its norm is ‖J_G‖₂², its trace the summed traces."""
        X, weight = self.X[rows], self.sample_weight[rows].square()
        a, b, c = self.second[rows], self.first[rows], self.cross[rows]
        w = torch.zeros_like(self.weights)
        w[: self.num_inputs] = self.weights[: self.num_inputs]
        gamma = a.square() * w.square().sum() + c.square()
        cross = torch.outer(X.mT @ (weight * a * b), w)
        inner = X.mT @ ((weight * gamma)[:, None] * X) + cross + cross.mT
        inner[: self.num_inputs, : self.num_inputs] += (weight * b.square()).sum() * torch.eye(
            self.num_inputs, dtype=X.dtype, device=X.device
        )
        return self.inverse @ inner @ self.inverse

    def _pieces(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, [n, p]; v, [p]; M, [p, p]; γ, [n]."""
        w = torch.zeros_like(self.weights)
        w[: self.num_inputs] = self.weights[: self.num_inputs]
        left = self.inverse[:, : self.num_inputs]
        gamma = self.second.square() * w.square().sum() + self.cross.square()
        return self.X @ self.inverse, self.inverse @ w, left @ left.mT, gamma


def _largest_eigenvalue(scale: Tensor, eigenvalues: Tensor, q: Tensor, v: Tensor, ab: Tensor, gamma: Tensor) -> Tensor:
    """λ_max of scale_i·diag(eigenvalues) + ab_i (q_i vᵀ + v q_iᵀ) + γ_i q_i q_iᵀ, [rows]; q of shape [rows, p].

    With D the diagonal and G(λ) = [q v]ᵀ(D − λ)⁻¹[q v], the number of eigenvalues above λ is

        #{D_j > λ} + n₊([[−g_qq, −1 − ab·g_qv], [−1 − ab·g_qv, γ − ab²·g_vv]]) − 1,

    n₊ the number of positive eigenvalues; the largest λ at which it is at least 1 is bisected.
    """
    q_norm = torch.linalg.vector_norm(q, dim=1)
    high = scale * eigenvalues[-1] + gamma * q_norm.square() + 2 * ab.abs() * q_norm * v.norm()
    low = torch.zeros_like(high)
    diagonal = scale[:, None] * eigenvalues  # [rows, p]
    q_square, q_v, v_square = q.square(), q * v, v.square()
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        inverse = 1.0 / (diagonal - middle[:, None])
        corner = -(q_square * inverse).sum(dim=1)
        off = -1 - ab * (q_v * inverse).sum(dim=1)
        other = gamma - ab.square() * (inverse @ v_square)
        determinant = corner * other - off.square()
        positive = torch.where(determinant > 0, torch.where(corner + other > 0, 2, 0), 1)
        above = (diagonal > middle[:, None]).sum(dim=1) + positive - 1
        found = above >= 1
        low, high = torch.where(found, middle, low), torch.where(found, high, middle)
    return 0.5 * (low + high)


def _tangent_basis(size: int) -> Tensor:
    """An orthonormal basis of {t ∈ R^size : Σ t = 0}, [size, size − 1]."""
    if size < 2:
        raise ValueError(f"a one-hot attribute needs at least 2 columns, got {size}")
    ones = torch.ones(size, 1, dtype=torch.float64)
    return torch.linalg.qr(torch.cat([ones, torch.eye(size, dtype=torch.float64)[:, 1:]], dim=1)).Q[:, 1:]
