"""What all pictures share: arrays from tensors, a figure without pyplot, colours."""

from __future__ import annotations

import io
import re
import textwrap
from functools import cache
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from torchfil.utils.errors import installed_by

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Values = Tensor | ArrayLike  # one array, as a sequence, of numpy or of torch on any device
NEUTRAL = "#4D4D4D"


@cache
def _figure_class() -> type[Figure]:
    """A figure outside pyplot's list that notebooks show even if pyplot was never imported."""
    with installed_by("report", "pictures need matplotlib"):
        from matplotlib.figure import Figure

    class NotebookFigure(Figure):
        def _repr_png_(self) -> bytes:
            buffer = io.BytesIO()
            self.savefig(buffer, format="png")
            return buffer.getvalue()

    return NotebookFigure


def new_figure(width: float, height: float, layout: Literal["constrained", "compressed"]) -> Figure:
    """An empty figure of width × height inches, outside pyplot's list."""
    return _figure_class()(figsize=(width, height), layout=layout)


def as_array(values: object) -> np.ndarray:
    """Values as a numpy array of the same dtype (half precision: float64), detached, on the CPU."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        return np.asarray((values.double() if values.is_floating_point() else values).numpy())
    if isinstance(values, list | tuple) and any(isinstance(value, Tensor) for value in values):
        return np.stack([as_array(value) for value in values])
    return np.asarray(values)


def as_finite(values: object, name: str) -> np.ndarray:
    """Values as float64; NaN and infinity are refused."""
    array = as_array(values).astype(np.float64)
    bad = np.argwhere(~np.isfinite(array)).tolist()
    if bad:
        raise ValueError(
            f"{name} is not finite at {bad[:3]} ({len(bad)} of {array.size} values); drop such "
            "values"
        )
    return array


def as_vector(
    values: object, name: str, length: int | None = None, *, infinite: bool = False
) -> np.ndarray:
    """Values as float64 of shape [length], at least one.

    NaN is refused, and so is infinity unless ``infinite``.
    """
    array = as_array(values).astype(np.float64)
    if not (array.ndim == 1 and array.size > 0):
        raise ValueError(
            f"{name} must be one number per entry, [n] with n ≥ 1, got shape {list(array.shape)}"
        )
    if length not in (None, len(array)):
        raise ValueError(f"{name} has {len(array)} entries for {length}; it must have one each")
    as_finite(np.where(np.isinf(array), 0.0, array) if infinite else array, name)
    return array


def plain_number(value: float) -> str:
    """Three significant digits, infinity as ∞, and a true minus sign."""
    return f"{value:.3g}".replace("inf", "∞").replace("-", "−")


class _NameWrapper(textwrap.TextWrapper):
    wordsep_re = re.compile(r"(\s+)|(?<=[_\-./:])")


def wrapped(text: str, width: int) -> str:
    """Text in lines of at most ``width`` characters, broken after spaces and ``_ - . / :`` if there
    are any.

    Example:
        >>> wrapped("patient_000123_scan_2.png", 15).splitlines()
        ['patient_000123_', 'scan_2.png']
    """
    return _NameWrapper(width).fill(text)
