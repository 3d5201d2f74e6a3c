r"""The most exposed texts by token: how much of each token's embedding leaks, and how it drives the privacy loss.

For token t, whose embedding has w private coordinates:

    FIL   η_t = sqrt(Σ_{j∈t} I_jj / w), for the whole run;
    PLIS  ‖∂PL/∂z_t‖, at the current weights (:mod:`torchfil.attribution.plis`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from torchfil.accounting.leakage import Leakage
from torchfil.attribution.plis import token_norms
from torchfil.engine.assembly import DatasetPasses, PrivateTraining
from torchfil.report.saved_run import Texts

__all__ = ["Decodes", "TokenTexts", "exposed_words"]

_MOST_TEXTS = 20
_TOKENS = "input_ids"


class Decodes(Protocol):
    """Makes strings from token ids, like Hugging Face's tokenizers."""

    def decode(self, token_ids: Any) -> str:
        """The string of a list of ids."""


TokenTexts = Sequence[Sequence[str]] | Callable[[list[int]], str] | Decodes


def exposed_words(training: PrivateTraining, leakage: Leakage, texts: TokenTexts, fil: np.ndarray) -> Texts | None:
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
    if not {"diagonal", "fim"} & leakage.ledger.sums.keys():
        raise ValueError("texts= shows leakage by word, which needs make_private(track=('diagonal',))")
    decode: Any = getattr(texts, "decode", texts if callable(texts) else None)
    rows = np.argsort(-fil, kind="stable")[:_MOST_TEXTS]
    rows = rows[fil[rows] > 0]  # an example that leaked nothing is not among the most exposed

    # one token for each position of the private embedding
    tokens: Any
    if decode is None:
        tokens = texts
        if len(tokens) != len(fil):
            raise ValueError(f"texts has {len(tokens)} entries for {len(fil)} examples; give one for each, in order")
        positions = _positions(training, leakage, max(map(len, tokens), default=0))
    else:
        tokens = token_ids(training.passes, rows.tolist()) if len(rows) else torch.zeros(0, 0)
        positions = _positions(training, leakage, tokens.shape[1])
    if not len(rows):
        return None

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
    if passes.dataset is None:
        raise ValueError("the examples of a stream cannot be read again: give texts= as strings, one list an example")
    integers = (torch.int64, torch.int32)
    inputs = {
        key: value
        for key, value in passes.inputs(rows).items()
        if isinstance(value, Tensor) and value.ndim == 2 and value.dtype in integers
    }
    if _TOKENS not in inputs and len(inputs) != 1:
        raise ValueError(
            f"{len(inputs)} inputs of the model hold integers by position ({', '.join(map(repr, inputs)) or 'none'}), "
            "so that the tokens to decode are not known; give texts= as strings, one list an example"
        )
    return inputs.get(_TOKENS, next(iter(inputs.values()))).cpu()


def _positions(training: PrivateTraining, leakage: Leakage, longest: int) -> int:
    """The number of positions for every text."""
    private, coordinates = training.run.options.private, leakage.num_coordinates
    positions = (private.max_length if private is not None else None) or longest
    if longest > positions or coordinates % max(1, positions):
        raise ValueError(
            f"texts of up to {longest} words do not fit {coordinates} private coordinates in {positions} positions; "
            "give one word for each position of the private embedding, special tokens included"
        )
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
