r"""Fisher information of an output-perturbed generalised linear model, in closed form and without
its Jacobian.

The released parameters are U* + noise, where U* ∈ R^{p×K} is the minimiser and K the number of
margins Uᵀx of an example (1, or one less than the number of classes of a softmax). With r_i = ∂ℓ/∂m
∈ R^K, M_i = ∂²ℓ/∂m² ∈ R^{K×K}, C_i = ∂²ℓ/∂m∂y ∈ R^{K×t} at U*, the Hessian's inverse A ∈ R^{pK×pK},
and E the map of the d private inputs into the p coordinates of x (an intercept is public), moving
example i by z = (z_x, z_y) moves its gradient x_i r_iᵀ and the minimiser by

    G_i z = E z_x r_iᵀ + x_i (M_i UᵀE z_x + C_i z_y)ᵀ ∈ R^{p×K},
    J_i = −ω_i A G_i ∈ R^{pK×(d+t)}.

**One margin.** With a = M, b = r, c = C, q_i = A x_i, v = A E w, S = A E Eᵀ A, γ_i = a_i²‖w‖² +
c_i²,

    J_i J_iᵀ / ω_i² = b_i² S + a_i b_i (q_i vᵀ + v q_iᵀ) + γ_i q_i q_iᵀ

is diagonal plus rank two in the eigenbasis of S. Its largest eigenvalue is found by counting
eigenvalues above a trial value (Sylvester's law of inertia), in O(p) per trial. Nothing of size
n×p×p is ever formed.

**Several margins, or several releases.** The matrix J_iᵀJ_i ∈ R^{(d+t)×(d+t)} is formed for a few
examples at a time.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from torchfil.fisher.batch import lanczos
from torchfil.glm.solver import Loss, tangent_basis

Kind = Literal["spectral", "trace"]
_BISECTIONS = 60
_CHUNK_NUMBERS = 2**21  # numbers of a chunk's [rows, p] arrays
_GRAM_NUMBERS = 2**23  # numbers of a chunk's [rows, d + t, d + t] matrices
_DENSE_OPERATIONS = 2e9  # up to which all eigenvalues are computed, batch · size³


@dataclass(frozen=True)
class Sensitivity:
    """How the minimiser of a fitted model depends on each example.

    The FIM about example i is JᵢᵀJᵢ/σ².

    Attributes:
        X: The inputs; if there is an intercept, its column of ones comes last, [n, p].
        weights: U*, [p, K].
        inverse: A = H⁻¹, [pK, pK]; parameter (a, k) is row aK + k.
        residual: r = ∂ℓ/∂m, [n, K].
        curvature: M = ∂²ℓ/∂m², [n, K, K].
        coupling: C = ∂²ℓ/∂m∂y, [n, K, t]; t = 0 if the target is public.
        sample_weight: ω, [n].
        num_inputs: d; p is d, or d + 1 with an intercept.
    """

    X: Tensor
    weights: Tensor
    inverse: Tensor
    residual: Tensor
    curvature: Tensor
    coupling: Tensor
    sample_weight: Tensor
    num_inputs: int

    @classmethod
    def build(
        cls,
        loss: Loss,
        X: Tensor,
        y: Tensor,
        sample_weight: Tensor,
        weights: Tensor,
        hessian: Tensor,
        num_inputs: int,
        private_target: bool,
    ) -> Sensitivity:
        """From data, minimiser and Hessian."""
        margin = X @ weights
        residual, curvature, coupling = (
            each(margin, y) for each in (loss.residual, loss.curvature, loss.coupling)
        )
        coupling = coupling if private_target else coupling[:, :, :0]
        return cls(
            X,
            weights,
            torch.linalg.inv(hessian),
            residual,
            curvature,
            coupling,
            sample_weight,
            num_inputs,
        )

    @property
    def num_coordinates(self) -> int:
        """How many private coordinates an example has, d + t."""
        return self.num_inputs + self.coupling.shape[2]

    def jacobian(self, example: int) -> Tensor:
        """J_i, [pK, d + t], the inputs first; for checks."""
        x, r = self.X[example], self.residual[example]
        slopes = torch.cat(
            [self.curvature[example] @ self._input_weights.mT, self.coupling[example]], dim=1
        )
        moved = x[:, None, None] * slopes  # [p, K, d + t]
        inputs = range(self.num_inputs)
        moved[inputs, :, inputs] += r
        return -self.sample_weight[example] * self.inverse @ moved.flatten(0, 1)

    def squared_trace(self) -> Tensor:
        """tr(J_iᵀJ_i) of every example, [n]."""
        inverse = self.inverse.view(-1, *self.weights.shape)[:, : self.num_inputs]  # [pK, d, K]
        squares = torch.einsum("cak,cal->kl", inverse, inverse)
        mixed = torch.einsum("cak,am->ckm", inverse, self._input_weights)
        overlap = self._input_weights.mT @ self._input_weights
        result = torch.empty_like(self.sample_weight)
        for rows in self._chunks(self.inverse.shape[0] * self.weights.shape[1], _CHUNK_NUMBERS):
            pushed, r, m, c = (
                self._pushed(rows),
                self.residual[rows],
                self.curvature[rows],
                self.coupling[rows],
            )
            slopes = m @ overlap @ m + c @ c.mT
            result[rows] = (
                torch.einsum("nk,kl,nl->n", r, squares, r)
                + 2
                * torch.einsum("nlkm,nk,nlm->n", torch.einsum("nlc,ckm->nlkm", pushed, mixed), r, m)
                + ((pushed @ pushed.mT) * slopes).sum(dim=(1, 2))
            )
        return self.sample_weight.square() * result

    def diagonal(self, rows: slice) -> Tensor:
        """diag(J_iᵀJ_i) of the examples ``rows``, [rows, d + t]: each private coordinate alone,
        targets last.
        """
        pushed, r, m, c = (
            self._pushed(rows),
            self.residual[rows],
            self.curvature[rows],
            self.coupling[rows],
        )
        inverse = self.inverse.view(-1, *self.weights.shape)[:, : self.num_inputs]  # [pK, d, K]
        overlap = pushed @ pushed.mT  # [rows, K, K]
        slopes = torch.cat([m @ self._input_weights.mT, c], dim=2)  # [rows, K, d + t]
        diagonal = torch.einsum("nka,nkl,nla->na", slopes, overlap, slopes)

        # an input also changes the gradient directly, E z_x rᵀ; a target does not
        mixed = torch.einsum("nlc,cak,nk->nla", pushed, inverse, r)
        squares = self._squares.diagonal(dim1=2, dim2=3)  # [K, K, d]
        diagonal[:, : self.num_inputs] += torch.einsum("nk,nl,kla->na", r, r, squares) + 2 * (
            mixed * slopes[:, :, : self.num_inputs]
        ).sum(dim=1)
        return self.sample_weight[rows].square()[:, None] * diagonal

    def squared_norm(self) -> Tensor:
        """‖J_i‖₂² of every example, [n].

        For one margin to about 1e-15 relative to its upper bound.
        """
        if self.weights.shape[1] > 1:
            return torch.cat([largest_eigenvalues(self.gram(rows)) for rows in self.gram_chunks()])
        a, b = self.curvature[:, 0, 0], self.residual[:, 0]
        w = torch.zeros_like(self.weights[:, 0])
        w[: self.num_inputs] = self._input_weights[:, 0]
        left = self.inverse[:, : self.num_inputs]
        gamma = a.square() * w.square().sum() + self.coupling[:, 0].square().sum(dim=1)
        eigenvalues, basis = torch.linalg.eigh(left @ left.mT)
        eigenvalues = eigenvalues.clamp(min=0)
        rotation, v = self.inverse @ basis, basis.mT @ (self.inverse @ w)
        result = torch.empty_like(gamma)
        for rows in self._chunks(len(w), _CHUNK_NUMBERS):
            q = self.X[rows] @ rotation
            result[rows] = _largest_eigenvalue(
                b[rows].square(), eigenvalues, q, v, (a * b)[rows], gamma[rows]
            )
        return self.sample_weight.square() * result

    def gram(self, rows: slice, columns: Sequence[int] | None = None) -> Tensor:
        """J_iᵀJ_i of the examples ``rows``, [rows, d + t, d + t].

        With ``columns``, only about those inputs.
        """
        index = torch.arange(self.num_inputs) if columns is None else torch.as_tensor(list(columns))
        index = index.to(self.X.device)
        pushed, r, m = self._pushed(rows), self.residual[rows], self.curvature[rows]
        selected = self.inverse.view(-1, *self.weights.shape)[:, index]  # [pK, |S|, K]
        squares = self._squares[:, :, index][:, :, :, index]
        own = torch.einsum("nk,nl,klab->nab", r, r, squares)
        mixed = torch.einsum("nlc,cak,nk->nal", pushed, selected, r)
        slopes = m @ self._input_weights[index].mT  # [rows, K, |S|]
        if columns is None:
            coupling = self.coupling[rows]
            targets = coupling.shape[2]
            own = torch.nn.functional.pad(own, (0, targets, 0, targets))
            mixed = torch.nn.functional.pad(mixed, (0, 0, 0, targets))
            slopes = torch.cat([slopes, coupling], dim=2)
        cross = mixed @ slopes
        gram = own + cross + cross.mT + slopes.mT @ (pushed @ pushed.mT) @ slopes
        return self.sample_weight[rows].square()[:, None, None] * gram

    def gram_chunks(self, columns: Sequence[int] | None = None) -> Iterator[slice]:
        """All examples in chunks that :meth:`gram` can hold."""
        size = self.num_coordinates if columns is None else len(columns)
        return self._chunks(
            max(size**2, self.inverse.shape[0] * self.weights.shape[1]), _GRAM_NUMBERS
        )

    def group_gram(self, rows: Tensor, other: Sensitivity | None = None) -> Tensor:
        """Σ_{i∈G} J_i J′_iᵀ of a group of examples, [pK, p′K′], J′ that of another release of the
        same examples.

        With itself (None), its norm is ‖J_G‖₂² and its trace the sum of the traces.
        """
        second = self if other is None else other
        inner = self.X.new_zeros(*self.weights.shape, *second.weights.shape)  # [p, K, p′, K′]
        for part in rows.split(max(1, _CHUNK_NUMBERS // self.X.shape[1])):
            self._add_inner(inner, part, second)
        return self.inverse @ inner.flatten(2).flatten(0, 1) @ second.inverse

    def _add_inner(self, inner: Tensor, rows: Tensor, second: Sensitivity) -> None:
        """Add Σ ω_i ω′_i G_i G′_iᵀ over the examples ``rows``, [p, K, p′, K′]."""
        weight = (self.sample_weight * second.sample_weight)[rows]
        x1, r1, m1, c1 = (
            self.X[rows],
            self.residual[rows],
            self.curvature[rows],
            self.coupling[rows],
        )
        x2, r2, m2, c2 = (
            second.X[rows],
            second.residual[rows],
            second.curvature[rows],
            second.coupling[rows],
        )
        u1, u2, inputs = self._input_weights, second._input_weights, range(self.num_inputs)
        inner[inputs, :, inputs, :] += torch.einsum("n,nk,nl->kl", weight, r1, r2)
        slopes = weight[:, None, None] * (m1 @ (u1.mT @ u2) @ m2 + c1 @ c2.mT)  # [rows, K, K′]
        for k in range(slopes.shape[1]):
            moved = torch.einsum("nb,nlm->blm", x2, (weight * r1[:, k])[:, None, None] * m2)
            inner[: self.num_inputs, k] += torch.einsum("am,blm->abl", u2, moved)
            for j in range(slopes.shape[2]):
                inner[:, k, :, j] += x1.mT @ (slopes[:, k, j, None] * x2)
        for j in range(slopes.shape[2]):
            moved = torch.einsum("na,nkm->akm", x1, (weight * r2[:, j])[:, None, None] * m1)
            inner[:, :, : self.num_inputs, j] += torch.einsum("bm,akm->akb", u1, moved)

    @cached_property
    def _input_weights(self) -> Tensor:
        """UᵀE's transpose, [d, K]."""
        return self.weights[: self.num_inputs]

    @cached_property
    def _squares(self) -> Tensor:
        """The blocks EᵀA²E, [K, K, d, d]."""
        inverse = self.inverse.view(-1, *self.weights.shape)[:, : self.num_inputs]
        return torch.einsum("cak,cbl->klab", inverse, inverse)

    def _pushed(self, rows: slice) -> Tensor:
        """A (x_i ⊗ e_l), [rows, K, pK]."""
        return torch.einsum("nb,blc->nlc", self.X[rows], self.inverse.view(*self.weights.shape, -1))

    def _chunks(self, numbers_per_row: int, numbers: int) -> Iterator[slice]:
        at_once = max(1, numbers // numbers_per_row)
        return (slice(start, start + at_once) for start in range(0, len(self.X), at_once))


def largest_eigenvalues(matrices: Tensor) -> Tensor:
    """λ_max of symmetric positive semidefinite matrices [batch, m, m].

    Large ones by Lanczos to 1e-10 relative.

    Example:
        >>> largest_eigenvalues(torch.diag(torch.arange(4.0))[None])
        tensor([3.])
    """
    batch, size, _ = matrices.shape
    if batch * size**3 <= _DENSE_OPERATIONS:
        return torch.linalg.eigvalsh(matrices)[:, -1].clamp(min=0)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(batch, size, generator=generator, dtype=matrices.dtype).to(matrices.device)

    def product(v: Tensor) -> Tensor:
        return (matrices @ v[:, :, None])[:, :, 0]

    steps, before = 16, torch.full_like(start[:, 0], -torch.inf)
    while True:
        value = lanczos(product, start, steps)
        if steps >= size or bool((value - before <= 1e-10 * value).all()):
            return value
        steps, before = 2 * steps, value


def _largest_eigenvalue(
    scale: Tensor, eigenvalues: Tensor, q: Tensor, v: Tensor, ab: Tensor, gamma: Tensor
) -> Tensor:
    """λ_max of scale_i·diag(eigenvalues) + ab_i (q_i vᵀ + v q_iᵀ) + γ_i q_i q_iᵀ, [rows].

    Q of shape [rows, p].

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
        below = above >= 1  # some eigenvalue lies above the middle
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return 0.5 * (low + high)


# ------------------------------------------------- of one or several releases, at every granularity


@dataclass(frozen=True)
class Release:
    """A minimiser with noise: Gaussian with standard deviation σ, or Laplace with scale b.

    Its FIM is JᵀJ/scale².
    """

    sensitivity: Sensitivity
    scale: float

    def __post_init__(self) -> None:
        if not self.scale > 0:
            raise ValueError(
                f"sigma={self.scale} must be positive: without noise the information is infinite"
            )


def fisher_information_loss(
    releases: Sequence[Release],
    attributes: Mapping[str, Sequence[int]] | None = None,
    groups: Sequence[Hashable] | None = None,
    kind: Kind = "spectral",
    one_hot: bool = False,
) -> object:
    """η of I = Σ_k J_kᵀJ_k/σ_k²: sqrt(‖I‖₂), or sqrt(tr(I)/d) with ``kind="trace"``.

    Args:
        releases: Releases of models fitted on the same examples.
        attributes: {name: column numbers}.
        groups: One label per example.
        kind: Which norm.
        one_hot: Whether attributes move only within the simplex (Σ = 0).

    Returns:
        An array [n]; with ``attributes`` a dict {name: [n]}; with ``groups`` a dict {group: η}.
    """
    if kind not in ("spectral", "trace"):
        raise ValueError(f"kind={kind!r} must be 'spectral' or 'trace'")
    if attributes is not None and groups is not None:
        raise ValueError("ask for attributes or groups, one at a time")
    if attributes is not None:
        return {
            name: _root(_of_examples(releases, kind, columns, one_hot))
            for name, columns in attributes.items()
        }
    if groups is not None:
        return {
            label: float(_root(square))
            for label, square in _of_groups(releases, groups, kind).items()
        }
    return _root(_of_examples(releases, kind))


def mse_bound_from_fil(eta: object) -> object:
    """1/η² of a ``kind="trace"`` loss, in the same shape; infinite if nothing leaks.

    No unbiased attacker has a smaller mean squared error per coordinate, over the noise: tr(I⁻¹)/d
    ≥ d/tr(I).

    Example:
        >>> float(mse_bound_from_fil(np.array([0.5]))[0])
        4.0
    """
    if isinstance(eta, Mapping):
        return {name: mse_bound_from_fil(value) for name, value in eta.items()}
    with np.errstate(divide="ignore"):
        bound = 1 / np.square(np.asarray(eta, dtype=float))
    return float(bound) if bound.ndim == 0 else bound


def information_by_coordinate(releases: Sequence[Release]) -> Iterator[tuple[slice, np.ndarray]]:
    """I_jj of every private coordinate, targets last, in chunks of examples: their rows, and [rows,
    d + t].

    1/sqrt(I_jj) is the least error of an unbiased attacker who knows all other coordinates;
    ``kind="trace"`` is the root of the mean of I_jj over the chosen coordinates.

    Args:
        releases: Releases of models fitted on the same examples.
    """
    for rows in _chunks(releases):
        parts = [release.sensitivity.diagonal(rows) / release.scale**2 for release in releases]
        yield rows, torch.stack(parts).sum(dim=0).clamp(min=0).cpu().numpy()


def _of_examples(
    releases: Sequence[Release],
    kind: Kind,
    columns: Sequence[int] | None = None,
    one_hot: bool = False,
) -> Tensor:
    """η² of every example, or of its attribute in these columns, [n]."""
    if columns is None and kind == "trace":
        squares = [
            r.sensitivity.squared_trace() / (r.sensitivity.num_coordinates * r.scale**2)
            for r in releases
        ]
        return torch.stack(squares).sum(dim=0)
    if columns is None and len(releases) == 1:
        return releases[0].sensitivity.squared_norm() / releases[0].scale ** 2
    grams = (_summed_gram(releases, rows, columns) for rows in _chunks(releases, columns))
    return torch.cat([_reduced(gram, one_hot, kind) for gram in grams])


def _reduced(gram: Tensor, one_hot: bool, kind: Kind) -> Tensor:
    """‖·‖₂ or tr/size of matrices [rows, size, size].

    With ``one_hot``, in the simplex's directions.
    """
    if one_hot:
        basis = tangent_basis(gram.shape[1]).to(gram)
        gram = basis.mT @ gram @ basis
    return (
        largest_eigenvalues(gram)
        if kind == "spectral"
        else torch.einsum("nii->n", gram) / gram.shape[1]
    )


def _of_groups(
    releases: Sequence[Release], groups: Sequence[Hashable], kind: Kind
) -> dict[Hashable, Tensor]:
    X = releases[0].sensitivity.X
    if len(groups) != len(X):
        raise ValueError(f"groups must give one label per example: {len(groups)} for {len(X)}")
    members: dict[Hashable, list[int]] = {}
    for row, label in enumerate(groups):
        members.setdefault(label, []).append(row)
    return {
        label: _of_group(releases, torch.tensor(rows, device=X.device), kind)
        for label, rows in members.items()
    }


def _of_group(releases: Sequence[Release], rows: Tensor, kind: Kind) -> Tensor:
    """η² of the examples ``rows`` together, a scalar."""
    blocks = [
        [a.sensitivity.group_gram(rows, b.sensitivity) / (a.scale * b.scale) for b in releases]
        for a in releases
    ]
    stacked = torch.cat([torch.cat(row, dim=1) for row in blocks])
    if kind == "spectral":
        return largest_eigenvalues((stacked + stacked.mT)[None] / 2)[0]
    return stacked.trace() / (releases[0].sensitivity.num_coordinates * len(rows))


def _summed_gram(
    releases: Sequence[Release], rows: slice, columns: Sequence[int] | None = None
) -> Tensor:
    return torch.stack([r.sensitivity.gram(rows, columns) / r.scale**2 for r in releases]).sum(
        dim=0
    )


def _chunks(releases: Sequence[Release], columns: Sequence[int] | None = None) -> list[slice]:
    return max((list(r.sensitivity.gram_chunks(columns)) for r in releases), key=len)


def _root(square: Tensor) -> np.ndarray:
    return square.clamp(min=0).sqrt().cpu().numpy()
