"""Who is most exposed: examples ranked by a score such as their subject-level PLIS, and how well it
finds outliers.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from torchfil.utils.tables import as_table
from torchfil.viz.common import as_array, as_vector


@dataclass(frozen=True)
class AUROC:
    """The chance that a random outlier scores above a random other example, ties counting half.

    Attributes:
        value: In [0, 1]; 0.5 is chance.
        standard_error: DeLong's.
        low: The lower end of the 95 % interval, on the logit scale; for a perfect separation, 3
            over the size of the smaller class below it.
        high: The upper end.
    """

    value: float
    standard_error: float
    low: float
    high: float


def auroc(scores: object, is_outlier: object) -> AUROC:
    """How well scores separate known outliers from the rest.

    Args:
        scores: [n]; higher: more exposed.
        is_outlier: [n] booleans, some true and some false.

    Example:
        >>> auroc([0.1, 0.2, 0.8, 0.9], [False, False, True, True]).value
        1.0
    """
    values, outlier = as_vector(scores, "scores", infinite=True), as_array(is_outlier).astype(bool)
    if values.shape != outlier.shape:
        raise ValueError(f"scores {values.shape} and is_outlier {outlier.shape} must both be [n]")
    if not (outlier.any() and not outlier.all()):
        raise ValueError(
            f"is_outlier must contain both kinds: {outlier.sum()} of {len(outlier)} are outliers"
        )

    # DeLong: the area is a mean over outliers and one over the rest, and their spreads give its
    # error.
    inside, outside = values[~outlier], values[outlier]
    everything = stats.rankdata(values)
    # for each outlier, the share below it
    above = (everything[outlier] - stats.rankdata(outside)) / len(inside)
    below = 1 - (everything[~outlier] - stats.rankdata(inside)) / len(outside)
    value = float(above.mean())
    parts = [part.var(ddof=1) / len(part) if len(part) > 1 else np.nan for part in (above, below)]
    error = float(np.sqrt(sum(parts)))

    if 0 < value < 1 and np.isfinite(error):
        centre, width = np.log(value / (1 - value)), 1.96 * error / (value * (1 - value))
        low, high = (float(1 / (1 + np.exp(-edge))) for edge in (centre - width, centre + width))
    else:
        rare = min(1.0, 3 / min(len(inside), len(outside)))
        low, high = max(0.0, value - rare), min(1.0, value + rare)
    return AUROC(value, error, low, high)


def rank_by_exposure(
    scores: object, ids: Sequence[Hashable] | None = None, *, name: str = "plis"
) -> Any:
    """A table by id, the most exposed first: the score, its rank from 1 (ties share the best) and
    its quantile.

    Args:
        scores: [n]; higher: more exposed.
        ids: n names; None: 0 … n − 1.
        name: The score's column.

    Returns:
        A pandas DataFrame if pandas is installed, else a dict of arrays.
    """
    values = as_vector(scores, "scores", infinite=True)
    names = list(range(len(values))) if ids is None else list(ids)
    if len(names) != len(values):
        raise ValueError(f"ids has {len(names)} names for {len(values)} scores")
    order = np.argsort(-values, kind="stable")
    rank = stats.rankdata(-values, method="min").astype(int)
    quantile = stats.rankdata(values, method="max") / len(values)
    columns = {name: values[order], "rank": rank[order], "quantile": quantile[order]}
    return as_table([names[i] for i in order], columns)
