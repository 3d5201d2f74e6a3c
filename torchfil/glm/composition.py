"""Several releases about the same examples: what they reveal together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from torchfil.glm.measures import Kind, Release, fisher_information_loss, mse_bound_from_fil
from torchfil.glm.model import Attributes, GeneralizedLinearModel

__all__ = ["Composition"]


class Composition:
    """Models fitted on the same examples and released with independent noise: I = Σ_k J_kᵀJ_k/σ_k².

    The models may differ (losses, λ, weights), and one model may be released several times. The total η² lies between
    the largest and the sum of the single ones; it is computed exactly.

    Args:
        releases: Pairs of a fitted model and the σ (or Laplace scale) of its release.

    Example:
        >>> import numpy as np
        >>> from torchfil.glm import LinearRegression
        >>> X, y = np.eye(2), np.array([1.0, 2.0])
        >>> model = LinearRegression().fit(X, y)
        >>> once, thrice = model.fil(X, y, sigma=0.5), Composition([(model, 0.5)] * 3).fil(X, y)
        >>> bool(np.allclose(thrice, 3**0.5 * once))
        True
    """

    def __init__(self, releases: Sequence[tuple[GeneralizedLinearModel, float]]) -> None:
        if not releases:
            raise ValueError("a composition needs at least one release")
        information: dict[int, float] = {}
        models: dict[int, GeneralizedLinearModel] = {}
        for model, scale in releases:
            model._check_fitted()
            if not scale > 0:
                raise ValueError(f"sigma={scale} must be positive: without noise the Fisher information is infinite")
            models[id(model)] = model
            information[id(model)] = information.get(id(model), 0.0) + scale**-2
        widths = {model.n_features_in_ for model in models.values()}
        if len(widths) > 1:
            raise ValueError(
                f"the models were fitted on inputs of {sorted(widths)} columns; a composition needs the same columns"
            )
        self.releases = [(models[key], total**-0.5) for key, total in information.items()]

    def fil(
        self,
        X: Any,
        y: Any,
        attributes: Attributes | None = None,
        groups: Sequence[Hashable] | None = None,
        private_target: bool = True,
        kind: Kind = "spectral",
        *,
        one_hot: bool = False,
    ) -> Any:
        """As :meth:`GeneralizedLinearModel.fil`, for all releases together; each model keeps its own weights.

        Args:
            X: The training inputs, [n, d].
            y: The training targets, [n], the same for all.
            attributes: {name: columns}.
            groups: One label per example.
            private_target: Whether y is private; all models must then see the same coordinates of it.
            kind: "spectral" or "trace".
            one_hot: Whether the attributes are one-hot, so that they move only within the simplex.
        """
        parts = [
            Release(model.sensitivity(X, y, private_target=private_target), scale) for model, scale in self.releases
        ]
        coordinates = {part.sensitivity.num_coordinates for part in parts}
        if len(coordinates) > 1:
            raise ValueError(
                "a softmax model sees its target as a point of the simplex, the others as a number: compose them with "
                "private_target=False"
            )
        first = self.releases[0][0]
        columns = (
            None if attributes is None else {name: first.column_numbers(part) for name, part in attributes.items()}
        )
        return fisher_information_loss(parts, columns, groups, kind, one_hot)

    def mse_bound(self, X: Any, y: Any, **options: Any) -> Any:
        """1/η̄² for all releases together, for an unbiased attacker; as :meth:`GeneralizedLinearModel.mse_bound`."""
        return mse_bound_from_fil(self.fil(X, y, kind="trace", **options))
