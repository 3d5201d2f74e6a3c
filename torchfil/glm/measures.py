"""Fisher information loss of one or several releases about the same examples, at every granularity."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from torchfil.glm.fil import Sensitivity, largest_eigenvalues
from torchfil.glm.losses import tangent_basis

__all__ = [
    "Kind",
    "Release",
    "fisher_information_loss",
    "information_by_coordinate",
    "mse_bound_from_fil",
    "squared_loss_at",
]

Kind = Literal["spectral", "trace"]


@dataclass(frozen=True)
class Release:
    """A minimiser with noise: Gaussian with standard deviation σ, or Laplace with scale b; its FIM is JᵀJ/scale²."""

    sensitivity: Sensitivity
    scale: float

    def __post_init__(self) -> None:
        if not self.scale > 0:
            raise ValueError(f"sigma={self.scale} must be positive: without noise the Fisher information is infinite")


def fisher_information_loss(
    releases: Sequence[Release],
    attributes: Mapping[str, Sequence[int]] | None = None,
    groups: Sequence[Hashable] | None = None,
    kind: Kind = "spectral",
    one_hot: bool = False,
) -> Any:
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
        return {name: _root(_of_attribute(releases, columns, kind, one_hot)) for name, columns in attributes.items()}
    if groups is not None:
        return {label: float(_root(square)) for label, square in _of_groups(releases, groups, kind).items()}
    return _root(_of_examples(releases, kind))


def mse_bound_from_fil(eta: Any) -> Any:
    """1/η² of a ``kind="trace"`` loss, in the same shape; infinite if nothing leaks.

    No unbiased attacker has a smaller mean squared error per coordinate, over the noise: tr(I⁻¹)/d ≥ d/tr(I).

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
    """I_jj of every private coordinate, targets last, in chunks of examples: their rows, and [rows, d + t].

    1/sqrt(I_jj) is the least error of an unbiased attacker who knows all other coordinates; ``kind="trace"`` is the
    root of the mean of I_jj over the chosen coordinates.

    Args:
        releases: Releases of models fitted on the same examples.
    """
    for rows in _chunks(releases):
        parts = [release.sensitivity.diagonal(rows) / release.scale**2 for release in releases]
        yield rows, torch.stack(parts).sum(dim=0).clamp(min=0).cpu().numpy()


def squared_loss_at(
    sensitivity: Sensitivity, rows: int | Tensor, columns: Sequence[int] | None, kind: Kind, one_hot: bool
) -> Tensor:
    """η² at σ = 1 of one example (a number), or of some examples together, a scalar that can be differentiated."""
    if isinstance(rows, int):
        return _reduced(sensitivity.gram(slice(rows, rows + 1), columns), columns is not None and one_hot, kind)[0]
    gram = sensitivity.group_gram(rows.to(sensitivity.X.device))
    if kind == "spectral":
        return largest_eigenvalues((gram + gram.mT)[None] / 2)[0]
    return gram.trace() / (sensitivity.num_coordinates * len(rows))


def _of_examples(releases: Sequence[Release], kind: Kind) -> Tensor:
    if kind == "trace":
        squares = [r.sensitivity.squared_trace() / (r.sensitivity.num_coordinates * r.scale**2) for r in releases]
        return torch.stack(squares).sum(dim=0)
    if len(releases) == 1:
        return releases[0].sensitivity.squared_norm() / releases[0].scale ** 2
    return torch.cat([largest_eigenvalues(_summed_gram(releases, rows)) for rows in _chunks(releases)])


def _of_attribute(releases: Sequence[Release], columns: Sequence[int], kind: Kind, one_hot: bool) -> Tensor:
    parts = []
    for rows in _chunks(releases, columns):
        parts.append(_reduced(_summed_gram(releases, rows, columns), one_hot, kind))
    return torch.cat(parts)


def _reduced(gram: Tensor, one_hot: bool, kind: Kind) -> Tensor:
    """‖·‖₂ or tr/size of matrices [rows, size, size]; with ``one_hot``, in the simplex's directions."""
    if one_hot:
        basis = tangent_basis(gram.shape[1]).to(gram)
        gram = basis.mT @ gram @ basis
    return largest_eigenvalues(gram) if kind == "spectral" else torch.einsum("nii->n", gram) / gram.shape[1]


def _of_groups(releases: Sequence[Release], groups: Sequence[Hashable], kind: Kind) -> dict[Hashable, Tensor]:
    first = releases[0].sensitivity
    labels = list(groups)
    if len(labels) != len(first.X):
        raise ValueError(f"groups must give one label per example: {len(labels)} for {len(first.X)}")
    members: dict[Hashable, list[int]] = {}
    for row, label in enumerate(labels):
        members.setdefault(label, []).append(row)
    result = {}
    for label, numbers in members.items():
        rows = torch.tensor(numbers, device=first.X.device)
        blocks = [
            [a.sensitivity.group_gram(rows, b.sensitivity) / (a.scale * b.scale) for b in releases] for a in releases
        ]
        stacked = torch.cat([torch.cat(row, dim=1) for row in blocks])
        if kind == "spectral":
            result[label] = largest_eigenvalues((stacked + stacked.mT)[None] / 2)[0]
        else:
            result[label] = stacked.trace() / (first.num_coordinates * len(numbers))
    return result


def _summed_gram(releases: Sequence[Release], rows: slice, columns: Sequence[int] | None = None) -> Tensor:
    return torch.stack([r.sensitivity.gram(rows, columns) / r.scale**2 for r in releases]).sum(dim=0)


def _chunks(releases: Sequence[Release], columns: Sequence[int] | None = None) -> list[slice]:
    return max((list(r.sensitivity.gram_chunks(columns)) for r in releases), key=len)


def _root(square: Tensor) -> np.ndarray:
    return square.clamp(min=0).sqrt().cpu().numpy()
