"""Which coordinates of an example are private: what a user may choose, and the defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor

from torchfil.private.batches import Input, Key, is_mask
from torchfil.private.padding import Lengths

__all__ = ["Coordinates", "Private", "flat_index", "floating_inputs", "nothing_private", "private_inputs", "superpixel"]

Coordinates = Tensor | Sequence[int] | slice | int


@dataclass(frozen=True)
class Private:
    """Which coordinates of an example are private.

    Attributes:
        inputs: Positions (tuple inputs) or names (dict inputs) of the private inputs; "visit.dose" names an input
            inside a dict. None: every floating-point input whose name is not that of a mask, or no input at all if
            ``submodule`` is given.
        coordinates: The private coordinates of the private inputs (or of the submodules' outputs): a boolean
            mask that broadcasts to the shape of one example, or column numbers or a slice along the last
            dimension. A dict {input: coordinates} sets them for each input. None: all of them.
        target: Whether the target is also private; it must be floating-point (a regression's target, or
            class probabilities).
        submodule: The name, as in ``model.named_modules()``, of the submodule whose output is private, or several
            names. For integer inputs, name the embedding. The coordinates are then offsets from its output at
            the current weights, and the attacker is assumed to know the integers. If a submodule is called several
            times in a forward pass, its output is private at each call ("table[0]", "table[1]", …).
        lengths: Which positions are the example's own, if batches are padded: the name of an input with a mask
            [batch, T] (not 0 at own positions) or lengths [batch], or a function from the inputs to either. A dict
            {input or submodule: …} sets it for each. Coordinates of padding count neither in d nor in tr I. None: use
            an input called ``attention_mask``; without one, tokens that are not the embedding's ``padding_idx`` (or
            the configuration's ``pad_token_id``); without a padding token, all positions.
        max_length: The largest number of positions of a private text. Sums by coordinate (``track="diagonal"``, …) need
            it if each batch is padded to its longest text: every batch is laid out for this many positions.
        same: Groups of inputs and targets that are one tensor, ``[(0, "target")]`` for an autoencoder; ``[]``: there
            are none. Such a tensor is one secret: its coordinates count once, and derivatives pass through all its
            places. None: those that share memory, or whose floating-point numbers are equal in the first batch,
            whatever their shapes. Any other function of an input as a target cannot be recognised: it counts as known
            to the attacker, or with ``target=True`` as independent of the input.

    Example:
        >>> Private(coordinates=[0, 2], target=True)
        Private(inputs=None, coordinates=[0, 2], target=True, submodule=None, lengths=None, max_length=None, same=None)
    """

    inputs: Key | Sequence[Key] | None = None
    coordinates: Coordinates | Mapping[Key, Coordinates] | None = None
    target: bool = False
    submodule: str | Sequence[str] | None = None
    lengths: Lengths | Mapping[Key, Lengths] | None = None
    max_length: int | None = None
    same: Sequence[Sequence[Key]] | None = None

    def __post_init__(self) -> None:
        if len(set(self.submodules)) < len(self.submodules):
            raise ValueError(f"submodule={self.submodule} names one submodule twice; its coordinates would count twice")
        if self.max_length is not None and self.max_length < 1:
            raise ValueError(
                f"max_length={self.max_length} must be at least 1: it is the largest number of positions of a private "
                "text"
            )

    @property
    def submodules(self) -> tuple[str, ...]:
        """The names of the submodules whose outputs are private."""
        if self.submodule is None:
            return ()
        return (self.submodule,) if isinstance(self.submodule, str) else tuple(self.submodule)

    def lengths_of(self, *keys: Key) -> Lengths | None:
        """``lengths`` for the private tensor with one of these names."""
        if not isinstance(self.lengths, Mapping):
            return self.lengths
        return next((self.lengths[key] for key in keys if key in self.lengths), None)


def superpixel(segments: Tensor, label: int) -> Tensor:
    """The mask of one superpixel: ``segments == label``, where ``segments`` holds integer labels [..., H, W].

    Example:
        >>> superpixel(torch.tensor([[0, 1], [1, 2]]), 1)
        tensor([[False,  True],
                [ True, False]])
    """
    mask = segments == label
    if not bool(mask.any()):
        raise ValueError(f"label {label} does not occur in segments; it holds {segments.unique().tolist()}")
    return mask


def floating_inputs(named: Mapping[Key, Input], names: Mapping[Key, str]) -> list[Key]:
    """The inputs that are private by default: floating-point ones except masks."""
    return [
        key
        for key, given in named.items()
        if isinstance(given.value, Tensor) and given.value.is_floating_point() and not is_mask(names.get(key, str(key)))
    ]


def private_inputs(named: Mapping[Key, Input], names: Mapping[Key, str], private: Private) -> list[Key]:
    """The private inputs, checked.

    Args:
        named: All inputs.
        names: What the model calls its positional inputs.
        private: The user's choice.
    """
    if private.inputs is None:
        return [] if private.submodules else floating_inputs(named, names)
    given = [private.inputs] if isinstance(private.inputs, int | str | Integral) else private.inputs
    wanted: list[Key] = [int(key) if isinstance(key, Integral) else key for key in given]
    if len(set(wanted)) < len(wanted):
        raise ValueError(f"private inputs {wanted} name one input twice; its coordinates would count twice")
    for key in wanted:
        if key not in named:
            raise ValueError(f"private input {key!r} is not among the inputs {list(named)}")
        leaf = named[key].value
        if not (isinstance(leaf, Tensor) and leaf.is_floating_point()):
            what = f"dtype {leaf.dtype}" if isinstance(leaf, Tensor) else type(leaf).__name__
            raise TypeError(
                f"private input {key!r} has {what}; Fisher information needs floating-point values. For integer "
                "tokens name the embedding: Private(submodule='…')"
            )
    return wanted


def nothing_private(named: Mapping[Key, Input], embeddings: Sequence[str] = ()) -> str:
    """The error's text if nothing is private; it names the embeddings whose outputs could be."""
    kinds = {key: str(given.value.dtype) for key, given in named.items() if isinstance(given.value, Tensor)}
    floats = any("float" in kind for kind in kinds.values())
    masks = " except masks, which are not private by default" if floats else ""
    example = embeddings[0] if embeddings else "embedding"
    known = f" The model's embeddings are {', '.join(map(repr, embeddings))}." if embeddings else ""
    return (
        f"nothing private to measure: no input is floating-point{masks} (inputs: {kinds}). Integer inputs have no "
        f"derivative; name the submodule whose output is private, e.g. private=Private(submodule={example!r}).{known}"
    )


def flat_index(private: Private, keys: Sequence[Key], shape: torch.Size, device: torch.device) -> Tensor | None:
    """The private coordinates of a tensor of this shape, as indices of the flattened tensor; None: all.

    Args:
        private: The user's choice.
        keys: The tensor's names, the most specific one first.
        shape: The shape of one example.
        device: The device of the indices.
    """
    chosen, key = private.coordinates, keys[0]
    if isinstance(chosen, Mapping):
        chosen = next((chosen[name] for name in keys if name in chosen), None)
    if chosen is None:
        return None

    # Masks and columns both become a mask of one example, so z has the same order for either.
    mask = torch.zeros(shape, dtype=torch.bool)
    if isinstance(chosen, Tensor) and chosen.dtype == torch.bool:
        try:
            mask = chosen.detach().cpu().expand(shape)
        except RuntimeError as error:
            raise ValueError(
                f"the mask of shape {tuple(chosen.shape)} does not broadcast to one example of input {key!r}, "
                f"which has shape {tuple(shape)}"
            ) from error
    else:
        if not shape:
            raise ValueError(f"input {key!r} has one number per example and no columns to choose from")
        columns = chosen.tolist() if hasattr(chosen, "tolist") else chosen
        columns = [columns] if isinstance(columns, int) else columns
        if not isinstance(columns, slice):
            strange = [column for column in columns if int(column) != column or isinstance(column, bool)]
            if strange:
                raise TypeError(
                    f"columns {strange} of input {key!r} are not column numbers; a mask is a boolean tensor"
                )
            wrong = [column for column in columns if not -shape[-1] <= column < shape[-1]]
            if wrong:
                raise ValueError(f"columns {wrong} are out of range for input {key!r} with {shape[-1]} columns")
        mask[..., columns] = True

    index = mask.reshape(-1).nonzero().flatten()
    if index.numel() == 0:
        raise ValueError(f"coordinates of input {key!r} choose nothing")
    return index.to(device)
