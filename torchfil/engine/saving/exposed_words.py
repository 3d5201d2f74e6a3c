r"""The most exposed texts by token: how much of each token's embedding leaks, and how it drives the privacy loss.

For token t, whose embedding has w private coordinates:

    FIL   η_t = sqrt(Σ_{j∈t} I_jj / w), for the whole run;
    PLIS  ‖∂PL/∂z_t‖, at the current weights (:mod:`torchfil.attribution.plis`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from torchfil.attribution.plis import token_norms
from torchfil.engine.augmentation import generators_kept
from torchfil.engine.saving.run_view import RunView
from torchfil.report.saved_run import Texts

__all__ = ["Decodes", "TokenTexts", "exposed_words"]

_TOKENS = "input_ids"


class Decodes(Protocol):
    """Makes strings from token ids, like Hugging Face's tokenizers."""

    def decode(self, token_ids: Any) -> str:
        """The string of a list of ids."""


TokenTexts = Sequence[Sequence[str]] | Callable[[list[int]], str] | Decodes


def exposed_words(run: RunView, texts: TokenTexts, fil: np.ndarray, count: int) -> Texts | None:
    """FIL and PLIS by token of the ``count`` most exposed examples, with the tokens; None if nothing leaked.

    Args:
        run: The run; the diagonal was tracked.
        texts: Every example's tokens as strings, in the order of the data set, one for each position of its private
            tensor; or a decoder of token ids: a tokenizer with ``decode``, or a function that maps a list with one id
            to its string. The ids are then read from the data set.
        fil: η̄, [n].
        count: The number of examples.

    Raises:
        ValueError: The diagonal was not tracked, or texts and coordinates do not fit.
    """
    leakage, decode = run.leakage, _decoder(texts)
    strings: Any = texts if decode is None else None
    if not {"diagonal", "fim"} & leakage.ledger.sums.keys():
        raise ValueError("texts= shows leakage by word, which needs make_private(track=('diagonal',))")
    if strings is not None and len(strings) != len(fil):
        raise ValueError(f"texts has {len(strings)} entries for {len(fil)} examples; give one for each, in order")

    # an example that leaked nothing is not among the most exposed
    rows = np.argsort(-fil, kind="stable")[:count]
    rows = rows[fil[rows] > 0]
    if decode is not None:
        with generators_kept():
            tokens = _token_ids(run, rows.tolist()) if len(rows) else torch.zeros(0, 0)
    positions = _positions(run, tokens.shape[1] if decode is not None else max(map(len, strings), default=0))
    if not len(rows):
        return None

    ids = leakage.ids.all()
    diagonal = leakage.get_attribute_fil([ids[row] for row in rows]).value.double().square().cpu()
    by_token = diagonal.unflatten(1, (positions, -1)).mean(dim=2).sqrt()  # [m, positions]
    with generators_kept():
        plis = _plis(run, rows.tolist(), positions)
    if decode is None:
        words = [[str(word) for word in strings[row]] for row in rows]
        own = torch.arange(positions) < torch.tensor([len(each) for each in words])[:, None]
    else:
        # padding has neither: its coordinates belong to nobody
        own = by_token > 0 if plis is None else ~plis.isnan()
        words = [
            [str(decode([token])) for token in part[mask[: len(part)]].tolist()]
            for part, mask in zip(tokens, own, strict=True)
        ]
    return Texts(rows.astype(np.int64), words, _compact(by_token, own), None if plis is None else _compact(plis, own))


def _decoder(texts: TokenTexts) -> Callable[[list[int]], str] | None:
    """A function from a list with one id to its string; None if the tokens are given as strings."""
    if hasattr(texts, "decode"):
        return texts.decode
    return texts if callable(texts) else None


def _positions(run: RunView, longest: int) -> int:
    """The number of positions for every text."""
    private = run.options.private
    positions = (private.max_length if private is not None else None) or longest
    coordinates = run.leakage.num_coordinates
    if longest > positions or coordinates % max(1, positions):
        raise ValueError(
            f"texts of up to {longest} words do not fit {coordinates} private coordinates in {positions} positions; "
            "give one word for each position of the private embedding, special tokens included"
        )
    return positions


def _token_ids(run: RunView, rows: list[int]) -> Tensor:
    """The token ids that the model receives for these texts, [rows, T]."""
    if run.dataset is None:
        raise ValueError("the examples of a stream cannot be read again: give texts= as strings, one list an example")
    inputs = {key: value for key, value in run.inputs(rows).items() if _are_tokens(value)}
    if _TOKENS in inputs:
        return inputs[_TOKENS].cpu()
    if len(inputs) != 1:
        raise ValueError(
            f"{len(inputs)} inputs of the model hold integers by position ({', '.join(map(repr, inputs)) or 'none'}), "
            "so that the tokens to decode are not known; give texts= as strings, one list an example"
        )
    return next(iter(inputs.values())).cpu()


def _are_tokens(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 2 and value.dtype in (torch.int64, torch.int32)


def _plis(run: RunView, rows: list[int], positions: int) -> Tensor | None:
    """‖PLIS‖ by token, [rows, positions], NaN at padding; None if it cannot be computed."""
    if run.plis is None or run.dataset is None:
        return None
    maps: Mapping[Any, Tensor] = run.plis(rows)
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
