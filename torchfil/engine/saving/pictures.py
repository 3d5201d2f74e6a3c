"""Pictures of the most and the least exposed examples, with what drives their privacy loss."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchfil.engine.assembly import DatasetPasses, PrivateTraining
from torchfil.report.saved_run import Pictures

__all__ = ["as_image", "pixels_of_coordinates", "thumbnails"]

_LARGEST = 128  # pixels of a thumbnail's longer side
_SMALLEST_IMAGE = 4


def thumbnails(training: PrivateTraining, columns: dict[str, np.ndarray], count: int) -> Pictures | None:
    """The ``count`` most and least exposed examples, the most exposed first; None if the inputs are not images.

    Examples that were never drawn are left out, because nothing is known about them. The maps are the PLIS summed over
    channels; None if the loss is unknown (a resumed run before its first step) or the image is not private.

    Args:
        training: The run.
        columns: With η̄ ("fil") and "participations", [n] each.
        count: k.
    """
    fil, drawn = columns["fil"], np.flatnonzero(columns["participations"] > 0)
    order = drawn[np.argsort(-fil[drawn], kind="stable")]
    rows = order if len(order) <= 2 * count else np.concatenate([order[:count], order[len(order) - count :]])
    if not len(rows):
        return None
    inputs = training.passes.inputs(rows.tolist())
    key = next((key for key, value in inputs.items() if _is_image(value)), None)
    if key is None:
        return None

    images, maps = inputs[key], None
    if training.run.loss is not None:
        plis = training.passes.plis(rows.tolist(), training.optimizer, private=True).get(key)
        if plis is not None and plis.shape == images.shape:
            plis = plis.detach().cpu().double().nan_to_num(0.0)
            maps = _shrunk(plis.reshape(len(rows), -1, *images.shape[-2:]).sum(dim=1)).float().numpy()
    return Pictures(rows.astype(np.int64), torch.stack([as_image(image) for image in images]).numpy(), maps)


def as_image(image: Tensor) -> Tensor:
    """One image [H, W], [1, H, W] or [3, H, W] as uint8 [H, W] or [H, W, 3], at most 128 pixels wide or high.

    Values within [0, 1] are kept; others are rescaled from their smallest and largest value.
    """
    pixels = image.detach().cpu().double().reshape(-1, *image.shape[-2:])
    low, high = float(pixels.min()), float(pixels.max())
    if low < 0 or high > 1:
        pixels = (pixels - low) / max(high - low, 1e-12)
    small = _shrunk(pixels).mul(255).round().to(torch.uint8)
    return small[0] if len(small) == 1 else small.permute(1, 2, 0).contiguous()


def pixels_of_coordinates(passes: DatasetPasses, num_coordinates: int) -> np.ndarray | None:
    """Row and column of every private coordinate in the image, int64 [d, 2]; None if the inputs are not images."""
    if passes.dataset is None or passes.run.ids.num_examples == 0:
        return None
    examples = passes.examples([0])
    if examples.num_coordinates != num_coordinates or examples.values.isnan().any():
        return None
    maps = list(examples.maps(torch.arange(num_coordinates, dtype=torch.float64)[None]).values())
    if len(maps) != 1 or not _is_image(maps[0]):
        return None
    flat = maps[0].reshape(-1).cpu().numpy()  # the coordinate at each place, NaN if there is none
    at = np.flatnonzero(~np.isnan(flat))
    height, width = maps[0].shape[-2:]
    at = at[np.argsort(flat[at])] % (height * width)
    return np.stack([at // width, at % width], axis=1).astype(np.int64)


def _is_image(value: Any) -> bool:
    """Whether these are images, [rows, H, W], [rows, 1, H, W] or [rows, 3, H, W]."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.ndim not in (3, 4):
        return False
    channels = value.shape[1] if value.ndim == 4 else 1
    return channels in (1, 3) and min(value.shape[-2:]) >= _SMALLEST_IMAGE


def _shrunk(images: Tensor) -> Tensor:
    """Means over squares, so that the longer side has at most 128 pixels, [k, H, W]."""
    factor = math.ceil(max(images.shape[-2:]) / _LARGEST)
    return torch.nn.functional.avg_pool2d(images, min(factor, *images.shape[-2:])) if factor > 1 else images
