"""Which coordinates of an example are private: what a user may choose, and the defaults.

A batch of texts is padded to its longest. Padded positions belong to no example, so their
coordinates are not private: they add nothing to tr I and do not count in d. The attention mask
alone does not ensure that: it hides a padded position from the others, but that position's own
output may still enter a loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from torchfil.private.batches import Input, Key, as_given, is_mask, named_inputs
from torchfil.private.submodules import SubmoduleOutput
from torchfil.utils.trees import map_tensors

Coordinates = Tensor | Sequence[int] | slice | int
Lengths = Key | Callable[[Any], Tensor]

_TOKENS = "input_ids"  # what Hugging Face calls a text
_INVERTED = "key_padding_mask"  # what torch calls a mask that is true at padding


@dataclass(frozen=True)
class Private:
    """Which coordinates of an example are private.

    Attributes:
        inputs: Positions (tuple inputs) or names (dict inputs) of the private inputs; "visit.dose"
            names an input inside a dict. None: every floating-point input whose name is not that of
            a mask, or no input at all if ``submodule`` is given.
        coordinates: The private coordinates of the private inputs (or of the submodules' outputs):
            a boolean mask that broadcasts to the shape of one example, or column numbers or a slice
            along the last dimension. A dict {input: coordinates} sets them for each input. None:
            all of them.
        target: Whether the target is also private; it must be floating-point (a regression's
            target, or class probabilities).
        submodule: The name, as in ``model.named_modules()``, of the submodule whose output is
            private, or several names. For integer inputs, name the embedding. The coordinates are
            then offsets from its output at the current weights, and the attacker is assumed to know
            the integers. If a submodule is called several times in a forward pass, its output is
            private at each call ("table[0]", "table[1]", …).
        lengths: Which positions are the example's own, if batches are padded: the name of an input
            with a mask [batch, T] (not 0 at own positions) or lengths [batch], or a function from
            the inputs to either. A dict {input or submodule: …} sets it for each. Coordinates of
            padding count neither in d nor in tr I. None: use an input called ``attention_mask``;
            without one, tokens that are not the embedding's ``padding_idx`` (or the configuration's
            ``pad_token_id``); without a padding token, all positions.
        max_length: The largest number of positions of a private text. Sums by coordinate
            (``track="diagonal"``, …) need it if each batch is padded to its longest text: every
            batch is laid out for this many positions.
        same: Groups of inputs and targets that are one tensor, ``[(0, "target")]`` for an
            autoencoder; ``[]``: there are none. Such a tensor is one secret: its coordinates count
            once, and derivatives pass through all its places. None: those that share memory, or
            whose floating-point numbers are equal in the first batch, whatever their shapes. Any
            other function of an input as a target cannot be recognised: it counts as known to the
            attacker, or with ``target=True`` as independent of the input.
        shared: With ``owner_of``, what all rows of a person have in common: names of private
            inputs, "target" or submodules, or a dict {input: coordinates}. It is one secret of the
            person and counts once in d; the Jacobians of its rows add up before they are squared.

    Example:
        >>> Private(coordinates=[0, 2], target=True).submodules
        ()
    """

    inputs: Key | Sequence[Key] | None = None
    coordinates: Coordinates | Mapping[Key, Coordinates] | None = None
    target: bool = False
    submodule: str | Sequence[str] | None = None
    lengths: Lengths | Mapping[Key, Lengths] | None = None
    max_length: int | None = None
    same: Sequence[Sequence[Key]] | None = None
    shared: Key | Sequence[Key] | Mapping[Key, Coordinates | None] | None = None

    def __post_init__(self) -> None:
        if len(set(self.submodules)) < len(self.submodules):
            raise ValueError(
                f"submodule={self.submodule} names one submodule twice; its coordinates would "
                "count twice"
            )

    @property
    def submodules(self) -> tuple[str, ...]:
        """The names of the submodules whose outputs are private."""
        if self.submodule is None:
            return ()
        return (self.submodule,) if isinstance(self.submodule, str) else tuple(self.submodule)

    @property
    def shared_coordinates(self) -> Mapping[Key, Coordinates | None]:
        """What a person's rows share: by name, the coordinates, None for all."""
        if self.shared is None or isinstance(self.shared, Mapping):
            return self.shared or {}
        return dict.fromkeys([self.shared] if isinstance(self.shared, str | int) else self.shared)


NOTHING = Private(inputs=())  # for gradients alone: any inputs work, and z has no coordinates


def superpixel(segments: Tensor, label: int) -> Tensor:
    """The mask of one superpixel: ``segments == label``, where ``segments`` holds integer labels
    [..., H, W].

    Example:
        >>> superpixel(torch.tensor([[0, 1], [1, 2]]), 1)
        tensor([[False,  True],
                [ True, False]])
    """
    mask = segments == label
    if not mask.any():
        raise ValueError(
            f"label {label} does not occur in segments; it holds {segments.unique().tolist()}"
        )
    return mask


def floating_inputs(named: Mapping[Key, Input]) -> list[Key]:
    """The inputs that are private by default: floating-point ones except masks."""
    tensors = [(key, given) for key, given in named.items() if isinstance(given.value, Tensor)]
    return [
        key for key, given in tensors if given.value.is_floating_point() and not is_mask(given.name)
    ]


def private_inputs(named: Mapping[Key, Input], targets: object, private: Private) -> list[Key]:
    """The private ones among all inputs, checked, as are private targets."""
    if private.target:
        remedy = (
            "Use class probabilities (a one-hot tensor) as targets, or leave the target public."
        )
        _check_floating(targets, "the private target", remedy)
    inputs: Any = private.inputs
    if inputs is None:
        return [] if private.submodules else floating_inputs(named)
    wanted: list[Any] = [inputs] if isinstance(inputs, str | Integral) else list(inputs)
    if len(set(wanted)) != len(wanted):
        raise ValueError(f"private inputs {wanted} name one input twice, which would count twice")
    for key in wanted:
        if key not in named:
            raise ValueError(f"private input {key!r} is not among the inputs {list(named)}")
        _check_floating(
            named[key].value,
            f"private input {key!r}",
            "For tokens name the embedding: submodule='…'.",
        )
    return wanted


def _check_floating(value: object, what: str, remedy: str) -> None:
    """Raise unless a private input or target is a floating-point tensor."""
    if not (isinstance(value, Tensor) and value.is_floating_point()):
        kind = f"dtype {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(
            f"{what} has {kind}; Fisher information needs floating-point values. {remedy}"
        )


def for_names(chosen: object, keys: Sequence[Key]) -> Any:
    """A choice for the private tensor with one of these names, the most specific one first: one for
    all, or by name.
    """
    if not isinstance(chosen, Mapping):
        return chosen
    return next((chosen[key] for key in keys if key in chosen), None)


def flat_index(
    chosen: Coordinates | None, key: Key, shape: torch.Size, device: torch.device
) -> Tensor | None:
    """The chosen coordinates of a tensor with this name and shape, as indices of the flattened
    tensor; None: all.
    """
    if chosen is None:
        return None

    # Masks and columns both become a mask of one example, so z has the same order for either.
    mask = torch.zeros(shape, dtype=torch.bool)
    given: Any = chosen if isinstance(chosen, slice) else torch.as_tensor(chosen).cpu()
    try:
        if isinstance(given, Tensor) and given.dtype == torch.bool:
            mask = given.expand(shape)
        else:
            mask[..., given] = True
    except (IndexError, RuntimeError) as error:
        raise ValueError(
            f"coordinates={chosen} do not fit one example of input {key!r}, which has shape "
            f"{tuple(shape)}: {error}"
        ) from error
    index = mask.reshape(-1).nonzero().flatten()
    if not index.numel() > 0:
        raise ValueError(f"coordinates of input {key!r} choose nothing")
    return index.to(device)


@dataclass(frozen=True)
class OwnPositions:
    """Which positions of a private tensor are an example's own, from the batch's inputs.

    Attributes:
        source: The input that shows it: a mask [batch, T], lengths [batch], or tokens if
            ``padding`` is given; or a function from the inputs (in the form of a batch) to one of
            these.
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
            return (
                "positions beyond the lengths that a function returns"
                if self.padding is None
                else "padding tokens"
            )
        name = repr(self.source) if isinstance(self.source, str) else f"input {self.source}"
        return (
            f"positions masked by {name}"
            if self.padding is None
            else f"positions where {name} is {self.padding}"
        )

    def mask(
        self, args: tuple[object, ...], kwargs: Mapping[str, object], length: int, *, batched: bool
    ) -> Tensor:
        """True at own positions: [batch, T], or [T] for a single example.

        More dimensions if tokens have more.

        Args:
            args: Positional inputs.
            kwargs: Keyword inputs.
            length: T, the number of positions of the private tensor in this batch.
            batched: True for the inputs of a batch, False for those of one example without a batch
                dimension.
        """
        inputs = (
            (args, dict(kwargs))
            if batched
            else map_tensors(lambda leaf: leaf[None], (args, dict(kwargs)))
        )
        given = (
            self.source(as_given(*inputs))
            if callable(self.source)
            else named_inputs(*inputs)[self.source].value
        )
        if self.padding is not None:
            own = given != self.padding
        elif given.ndim == 1 or given.shape[1:] == (1,) != (length,):
            own = torch.arange(length, device=given.device) < given.reshape(-1, 1)
        else:
            own = (
                ~_is_kept(given)
                if self.inverted and not given.is_floating_point()
                else _is_kept(given)
            )
        if own.ndim >= 2 and own.shape[1] + self.appended == length:
            own = torch.cat([own, own.new_zeros(len(own), self.appended, *own.shape[2:])], dim=1)
        if own.ndim < 2 or own.shape[1] != length:
            raise ValueError(
                f"lengths={self.source!r} yields a mask of shape {tuple(own.shape)} for {length} "
                "positions; give [batch, positions], true at the example's own, or lengths "
                "[batch]"
            )
        return own if batched else own[0]


def _is_kept(mask: Tensor) -> Tensor:
    """Where a mask [batch, T, …] keeps positions: where it is not 0, or is 0 if it is added to
    scores (≤ 0 everywhere).

    Example:
        >>> _is_kept(torch.tensor([[1.0, 0.0], [0.0, -1e4], [0.0, 0.0]]))
        tensor([[ True, False],
                [ True, False],
                [ True,  True]])
    """
    if not mask.is_floating_point():
        return mask != 0
    return torch.where(
        (mask > 0).flatten(1).any(dim=1).reshape(-1, *(1,) * (mask.ndim - 1)), mask > 0, mask == 0
    )


def own_positions(
    lengths: Lengths | None, named: Mapping[Key, Input], of: SubmoduleOutput
) -> OwnPositions | None:
    """Which positions of a private tensor are the example's own; None: all.

    ``lengths`` decides; without it, an input called ``attention_mask`` (or ``key_padding_mask``,
    which is inverted) whose shape fits; without one, the tokens that differ from ``padding``.

    Args:
        lengths: The user's choice.
        named: The inputs.
        of: The private tensor, positions first. Its ``mask_name`` counts unless its tokens' name
            has ``input_ids``.
    """
    tokens, appended = of.tokens, of.appended
    if callable(lengths):
        return OwnPositions(lengths, appended=appended)
    if lengths is not None:
        if lengths not in named:
            raise ValueError(f"lengths={lengths!r} is not among the inputs {list(named)}")
        return OwnPositions(
            lengths, inverted=named[lengths].name.endswith(_INVERTED), appended=appended
        )
    if not of.shape:
        return None
    shape = torch.Size((of.shape[0] - appended, *of.shape[1:]))
    text = "" if tokens is None or callable(tokens) else named[tokens].name
    masks = {text.replace(_TOKENS, "attention_mask") if _TOKENS in text else of.mask_name}
    masks |= {f"{text}_{_INVERTED}"} | (set() if text == "tgt" else {_INVERTED, f"src_{_INVERTED}"})
    for key, (_, value, name) in named.items():
        fits = (
            isinstance(value, Tensor)
            and value.ndim >= 2
            and value.shape[1:] == shape[: value.ndim - 1]
        )
        if fits and name in masks:
            return OwnPositions(key, inverted=name.endswith(_INVERTED), appended=appended)
    return (
        None
        if tokens is None or of.padding is None
        else OwnPositions(tokens, of.padding, appended=appended)
    )
