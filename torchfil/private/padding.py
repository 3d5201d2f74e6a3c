"""Which positions of an example are its own, and which are padding.

A batch of texts is padded to its longest. Padded positions belong to no example, so their coordinates are not private:
they add nothing to tr I and do not count in d. The attention mask alone does not ensure that: it hides a padded
position from the others, but that position's own output may still enter a loss.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from torchfil.private.batches import Input, Key, as_given, named_inputs
from torchfil.utils.trees import map_tensors

__all__ = ["Lengths", "OwnPositions", "names_of_inputs", "own_positions", "own_positions_of_input"]

Lengths = Key | Callable[[Any], Tensor]

_TOKENS = "input_ids"  # what Hugging Face calls a text
_INVERTED = "key_padding_mask"  # what torch calls a mask that is true at padding


@dataclass(frozen=True)
class OwnPositions:
    """Which positions of a private tensor are an example's own, from the batch's inputs.

    Attributes:
        source: The input that shows it: a mask [batch, T], lengths [batch], or tokens if ``padding`` is given; or a
            function from the inputs (in the form of a batch) to one of these.
        padding: Tokens equal to it are padding.
        inverted: Whether the mask is true at padding, as torch's ``key_padding_mask`` is.
        appended: How many positions of padding the model itself adds behind those of ``source``.
    """

    source: Lengths
    padding: int | None = None
    inverted: bool = False
    appended: int = 0

    def __str__(self) -> str:
        if callable(self.source):
            return "positions beyond the lengths that a function returns" if self.padding is None else "padding tokens"
        if self.padding is not None:
            return f"positions where {_quoted(self.source)} is {self.padding}"
        return f"positions masked by {_quoted(self.source)}"

    def mask(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], length: int, *, batched: bool) -> Tensor:
        """True at own positions: [batch, T], or [T] for a single example; more dimensions if tokens have more.

        Args:
            args: Positional inputs.
            kwargs: Keyword inputs.
            length: T, the number of positions of the private tensor in this batch.
            batched: True for the inputs of a batch, False for those of one example without a batch dimension.
        """
        inputs = (args, dict(kwargs)) if batched else map_tensors(lambda leaf: leaf[None], (args, dict(kwargs)))
        given = self.source(as_given(*inputs)) if callable(self.source) else named_inputs(*inputs)[self.source].value
        if self.padding is not None:
            own = given != self.padding
        elif given.ndim == 1 or given.shape[1:] == (1,) != (length,):
            own = torch.arange(length, device=given.device) < given.reshape(-1, 1)
        else:
            own = ~_is_kept(given) if self.inverted and not given.is_floating_point() else _is_kept(given)
        if own.ndim >= 2 and own.shape[1] + self.appended == length:
            own = torch.cat([own, own.new_zeros(len(own), self.appended, *own.shape[2:])], dim=1)
        if own.ndim < 2 or own.shape[1] != length:
            raise ValueError(
                f"lengths={self.source!r} yields a mask of shape {tuple(own.shape)} for private values at {length} "
                "positions; give [batch, positions], true or 1 at the example's own positions, or lengths [batch]"
            )
        return own if batched else own[0]


def _is_kept(mask: Tensor) -> Tensor:
    """Where a mask [batch, T, …] keeps positions: where it is not 0, or is 0 if it is added to scores (≤ 0 everywhere).

    Example:
        >>> _is_kept(torch.tensor([[1.0, 0.0], [0.0, -1e4], [0.0, 0.0]]))
        tensor([[ True, False],
                [ True, False],
                [ True,  True]])
    """
    if not mask.is_floating_point():
        return mask != 0
    some = (mask > 0).flatten(1).any(dim=1).reshape(-1, *(1,) * (mask.ndim - 1))
    return torch.where(some, mask > 0, mask == 0)


def own_positions(
    lengths: Lengths | None,
    named: Mapping[Key, Input],
    names: Mapping[Key, str],
    shape: torch.Size,
    tokens: Lengths | None = None,
    padding: int | None = None,
    mask_name: str = "attention_mask",
    appended: int = 0,
) -> OwnPositions | None:
    """Which positions of a private tensor are the example's own; None: all.

    ``lengths`` decides; without it, an input called ``attention_mask`` (or ``key_padding_mask``, which is inverted)
    whose shape fits; without one, the tokens that differ from ``padding``.

    Args:
        lengths: The user's choice.
        named: The inputs.
        names: What the model calls its positional inputs.
        shape: The shape of the private tensor of one example, positions first.
        tokens: The input that an embedding was called with, or a function from the inputs to its tokens.
        padding: Its padding token.
        mask_name: What a mask of its positions is called; the tokens' name decides if it contains ``input_ids``.
        appended: How many positions of padding the model itself adds behind the tokens.
    """
    if lengths is not None:
        if not callable(lengths) and lengths not in named:
            raise ValueError(f"lengths={lengths!r} is not among the inputs {list(named)}")
        inverted = not callable(lengths) and _is_inverted(_name(lengths, names))
        return OwnPositions(lengths, inverted=inverted, appended=appended)
    if not shape:
        return None
    shape = torch.Size((shape[0] - appended, *shape[1:]))
    text = "" if callable(tokens) else _name(tokens, names)
    masks = {text.replace(_TOKENS, "attention_mask") if _TOKENS in text else mask_name}
    masks |= {f"{text}_{_INVERTED}"} | (set() if text == "tgt" else {_INVERTED, f"src_{_INVERTED}"})
    for key, given in named.items():
        name, value = _name(key, names), given.value
        fits = isinstance(value, Tensor) and value.ndim >= 2 and value.shape[1:] == shape[: value.ndim - 1]
        if fits and name in masks:
            return OwnPositions(key, inverted=_is_inverted(name), appended=appended)
    if tokens is None or padding is None:
        return None
    return OwnPositions(tokens, padding, appended=appended)


def own_positions_of_input(
    lengths: Lengths | None, named: Mapping[Key, Input], names: Mapping[Key, str], shape: torch.Size
) -> OwnPositions | None:
    """The same for a private input. A mask next to ``input_ids`` belongs to them, and none belongs to images."""
    of_another = len(shape) > 2 or any(_TOKENS in _name(key, names) for key in named)
    return None if lengths is None and of_another else own_positions(lengths, named, names, shape)


def names_of_inputs(model: nn.Module | None, count: int) -> dict[Key, str]:
    """What the model's ``forward`` calls its first positional inputs.

    Example:
        >>> names_of_inputs(nn.Linear(1, 1), 1)
        {0: 'input'}
    """
    return dict(enumerate(_parameter_names(type(model).forward)[:count])) if model is not None and count else {}


@lru_cache(maxsize=64)
def _parameter_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    try:
        parameters = list(inspect.signature(forward).parameters.values())[1:]
    except (TypeError, ValueError):  # not written in Python
        return ()
    return tuple(each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD)


def _name(key: Key | None, names: Mapping[Key, str]) -> str:
    return "" if key is None else names.get(key, str(key))


def _is_inverted(name: str) -> bool:
    return name.endswith(_INVERTED)


def _quoted(key: Any) -> str:
    return repr(key) if isinstance(key, str) else f"input {key}"
