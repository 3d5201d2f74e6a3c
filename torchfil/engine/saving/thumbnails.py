"""Pictures of the most and the least exposed examples, with what drives their privacy loss."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchfil.engine.saving.run_view import RunView
from torchfil.report.saved_run import Pictures

__all__ = ["as_image", "thumbnails"]

_LARGEST = 128  # pixels of a thumbnail's longer side
_SMALLEST_IMAGE = 4


def thumbnails(run: RunView, fil: np.ndarray, participations: np.ndarray, count: int) -> Pictures | None:
    """The ``count`` most and least exposed examples, the most exposed first; None if the inputs are not images.

    Examples that were never drawn are left out, because nothing is known about them. The maps are None if the loss is
    unknown (a resumed run before its first step) or the image is not private.

    Args:
        run: The run.
        fil: η̄, [n].
        participations: [n].
        count: k.
    """
    drawn = np.flatnonzero(participations > 0)
    order = drawn[np.argsort(-fil[drawn], kind="stable")]
    rows = order if len(order) <= 2 * count else np.concatenate([order[:count], order[len(order) - count :]])
    if not len(rows):
        return None

    inputs = run.inputs(rows.tolist())
    key = next((key for key, value in inputs.items() if _is_image(value)), None)
    if key is None:
        return None
    images = torch.stack([as_image(image) for image in inputs[key]])
    return Pictures(rows.astype(np.int64), images.numpy(), _maps(run, rows, key, inputs[key].shape))


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


def _maps(run: RunView, rows: np.ndarray, key: Hashable, shape: torch.Size) -> np.ndarray | None:
    """PLIS summed over channels, [rows, H, W]; the run's generator is left as it was."""
    if run.plis is None:
        return None
    state = run.generator.get_state()
    try:
        plis_by_input = run.plis(rows.tolist())
    finally:
        run.generator.set_state(state)
    if key not in plis_by_input or plis_by_input[key].shape != shape:
        return None
    plis = plis_by_input[key].detach().cpu().double().nan_to_num(0.0)
    summed = plis.reshape(len(rows), -1, *shape[-2:]).sum(dim=1)
    return _shrunk(summed).float().numpy()


def _is_image(value: Any) -> bool:
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.ndim not in (3, 4):
        return False
    channels = value.shape[1] if value.ndim == 4 else 1
    return channels in (1, 3) and min(value.shape[-2:]) >= _SMALLEST_IMAGE


def _shrunk(images: Tensor) -> Tensor:
    """Means over squares, so that the longer side has at most 128 pixels, [k, H, W]."""
    factor = math.ceil(max(images.shape[-2:]) / _LARGEST)
    return torch.nn.functional.avg_pool2d(images, min(factor, *images.shape[-2:])) if factor > 1 else images
