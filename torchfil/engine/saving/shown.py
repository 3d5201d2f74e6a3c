r"""The examples that a report shows, with what drives their privacy loss: pictures, and texts by token.

For token t, whose embedding has w private coordinates:

    FIL   η_t = sqrt(Σ_{j∈t} I_jj / w), for the whole run;
    PLIS  ‖∂PL/∂z_t‖, at the current weights (:mod:`torchfil.attribution.plis`).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchfil.accounting.leakage import Leakage
from torchfil.attribution.plis import token_norms
from torchfil.engine.assembly import DatasetPasses, PrivateTraining
from torchfil.report.saved_run import Pictures, Texts
from torchfil.utils.errors import require

_LARGEST = 128  # pixels of a thumbnail's longer side
_SMALLEST_IMAGE = 4
_MOST_TEXTS = 20
_TOKENS = "input_ids"


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


def exposed_words(training: PrivateTraining, leakage: Leakage, texts: Any, fil: np.ndarray) -> Texts | None:
    """FIL and PLIS by token of the 20 most exposed examples, with the tokens; None if nothing leaked.

    Args:
        training: The run.
        leakage: Its results; the diagonal was tracked.
        texts: Every example's tokens as strings, in the order of the data set, one for each position of its private
            tensor; or a decoder of token ids: a tokenizer with ``decode``, or a function that maps a list with one id
            to its string. The ids are then read from the data set.
        fil: η̄, [n].

    Raises:
        ValueError: The diagonal was not tracked, or texts and coordinates do not fit.
    """
    tracked = bool({"diagonal", "fim"} & leakage.ledger.sums.keys())
    require(tracked, "texts= shows leakage by word, which needs make_private(track=('diagonal',))")
    decode: Any = getattr(texts, "decode", texts if callable(texts) else None)
    rows = np.argsort(-fil, kind="stable")[:_MOST_TEXTS]
    rows = rows[fil[rows] > 0]  # an example that leaked nothing is not among the most exposed

    # one token for each position of the private embedding
    tokens: Any = texts
    if decode is None:
        fits = len(texts) == len(fil)
        require(fits, f"texts has {len(texts)} entries for {len(fil)} examples; give one for each, in order")
    elif len(rows):
        tokens = token_ids(training.passes, rows.tolist())
    if not len(rows):
        return None
    positions = _positions(training, leakage, max(map(len, tokens)))

    ids = leakage.ids.all()
    diagonal = leakage.get_attribute_fil([ids[row] for row in rows]).value.double().square().cpu()
    by_token = diagonal.unflatten(1, (positions, -1)).mean(dim=2).sqrt()  # [m, positions]
    plis = _plis(training, rows.tolist(), positions)
    if decode is None:
        words = [[str(word) for word in tokens[row]] for row in rows]
        own = torch.arange(positions) < torch.tensor([len(each) for each in words])[:, None]
    else:
        # padding has neither: its coordinates belong to nobody
        own = by_token > 0 if plis is None else ~plis.isnan()
        words = [
            [str(decode([token])) for token in part[mask[: len(part)]].tolist()]
            for part, mask in zip(tokens, own, strict=True)
        ]
    return Texts(rows.astype(np.int64), words, _compact(by_token, own), None if plis is None else _compact(plis, own))


def token_ids(passes: DatasetPasses, rows: list[int]) -> Tensor:
    """The token ids that the model receives for these texts, [rows, T].

    Raises:
        ValueError: A stream, or it is not known which of the inputs they are.
    """
    remedy = "give texts= as strings, one list an example"
    require(passes.dataset is not None, f"the examples of a stream cannot be read again: {remedy}")
    leaves = {key: value for key, value in passes.inputs(rows).items() if isinstance(value, Tensor) and value.ndim == 2}
    inputs = {key: value for key, value in leaves.items() if value.dtype in (torch.int64, torch.int32)}
    known = _TOKENS in inputs or len(inputs) == 1
    require(known, f"{len(inputs)} inputs of the model hold integers by position ({list(inputs)}); {remedy}")
    return inputs.get(_TOKENS, next(iter(inputs.values()))).cpu()


def _positions(training: PrivateTraining, leakage: Leakage, longest: int) -> int:
    """The number of positions for every text."""
    private, coordinates = training.run.options.private, leakage.num_coordinates
    positions = (private.max_length if private is not None else None) or longest
    fits = longest <= positions and coordinates % max(1, positions) == 0
    where = f"{coordinates} private coordinates in {positions} positions"
    remedy = "give one word for each position of the private embedding, special tokens included"
    require(fits, f"texts of up to {longest} words do not fit {where}; {remedy}")
    return positions


def _plis(training: PrivateTraining, rows: list[int], positions: int) -> Tensor | None:
    """‖PLIS‖ by token, [rows, positions], NaN at padding; None if it cannot be computed."""
    if training.run.loss is None or training.passes.dataset is None:
        return None
    maps = training.passes.plis(rows, training.optimizer, private=True)
    fitting = [each for each in maps.values() if each.ndim == 3 and each.shape[1] <= positions]
    if len(fitting) != 1:
        return None
    norms = token_norms(fitting[0]).double().cpu()
    return torch.nn.functional.pad(norms, (0, positions - norms.shape[1]), value=float("nan"))


def _compact(values: Tensor, own: Tensor) -> np.ndarray:
    """Each row's own entries first, then NaN, float32 [rows, positions]."""
    result = torch.full_like(values, float("nan"))
    for target, row, mask in zip(result, values, own, strict=True):
        target[: int(mask.sum())] = row[mask]
    return result.float().numpy()
