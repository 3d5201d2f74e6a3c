"""How closely attributes can be guessed, as numbers about many examples, beside a blind guess."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from torchfil.run.baselines import blind_errors, is_exposed, share_of_blind_guess
from torchfil.run.saved_run import SavedRun
from torchfil.run.statistics import levels_of, published_count

__all__ = ["AttributeSummary", "pixels_of", "summarise_attributes"]

SMALLEST_IMAGE = 4  # pixels of its shorter side


@dataclass(frozen=True)
class AttributeSummary:
    """By how much an unbiased guess of an attribute is off at least, by level of exposure, and beside a blind guess.

    Attributes:
        name: The attribute.
        unit: Of ``error`` and ``blind``.
        error: ± in its own unit (root mean square). Empty in public where the blind guess is made from the data: error
            over share would tell the data's deviation.
        lower_end: Whether all of it is made from the lower ends of the errors' 95 % intervals, otherwise from the
            errors.
        share: The same of errors over a blind guess's, of each example at most 1; empty where that is not known.
        exposed: How many examples can be guessed more closely than blindly; None where that is not known.
        blind: What a blind guess errs by; None where it is not known, and in public where it is made from the data.
        levels: Of a categorical attribute, the share of each level; always empty in public.
        pixel: Its row and column in the image; None where it is no pixel.
    """

    name: str
    unit: str
    error: dict[str, float]
    lower_end: bool
    share: dict[str, float] = field(default_factory=dict)
    exposed: int | str | None = None
    blind: float | None = None
    levels: dict[str, float] = field(default_factory=dict)
    pixel: tuple[int, int] | None = None


def summarise_attributes(run: SavedRun, measured: np.ndarray, smallest: int) -> list[AttributeSummary]:
    """One summary an attribute, in their order; none where they were not tracked.

    Args:
        run: A saved run.
        measured: Which examples it says something about, [n] booleans.
        smallest: The least number of examples that a number rests on; 1: not redacted.
    """
    if run.attributes is None:
        return []

    # where the blind guess is made from the data, an error beside its share would tell the data's deviation
    blind, pixels, yardsticks = blind_errors(run), pixels_of(run), run.yardsticks
    public = smallest > 1
    summaries = []
    for j, (name, unit) in enumerate(zip(run.attributes.names, run.attributes.units, strict=True)):
        errors = np.asarray(run.attributes.shown[measured, j], dtype=np.float64)
        errors = errors[~np.isnan(errors)]  # of examples whose attributes were not tracked
        levels = levels_of(errors, smallest)
        from_data = yardsticks is not None and math.isfinite(yardsticks.attributes.std[j])
        share, exposed = dict[str, float](), None
        if not math.isnan(blind[j]):
            share = levels_of(share_of_blind_guess(errors, blind[j]), smallest)
            few = len(errors) < smallest
            exposed = None if few else published_count(int(is_exposed(errors, blind[j]).sum()), smallest)

        summaries.append(
            AttributeSummary(
                name,
                unit,
                error={} if public and from_data else levels,
                lower_end=run.attributes.error_low is not None,
                share=share,
                exposed=exposed,
                blind=None if math.isnan(blind[j]) or (public and from_data) else float(blind[j]),
                levels={} if public or yardsticks is None else yardsticks.levels.get(name, {}),
                pixel=None if pixels is None else (int(pixels[j, 0]), int(pixels[j, 1])),
            )
        )
    return summaries


def pixels_of(run: SavedRun) -> np.ndarray | None:
    """Row and column of every attribute in the image, [k, 2]; None where attributes are no pixels.

    Files from before they were kept tell it where every value of an image is an attribute.
    """
    if run.attributes is None or run.attributes.pixels is not None:
        return None if run.attributes is None else run.attributes.pixels
    shape, count = run.about.get("dataset", {}).get("input_shape"), len(run.attributes.names)
    if not isinstance(shape, list) or len(shape) not in (2, 3) or not all(isinstance(side, int) for side in shape):
        return None
    is_image = (len(shape) == 2 or shape[0] in (1, 3)) and min(shape[-2:]) >= SMALLEST_IMAGE
    if not is_image or math.prod(shape) != count:
        return None
    flat = np.arange(count) % (shape[-2] * shape[-1])
    return np.stack([flat // shape[-1], flat % shape[-1]], axis=1)
