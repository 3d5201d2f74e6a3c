"""What is private about an example: its inputs, some of their coordinates, its target, an embedding.

A batch is handed over as a model takes it: one tensor, a tuple of positional inputs, or a dict of keyword
inputs, each tensor with the examples along its first dimension. :class:`Private` says which coordinates
an attacker wants; :class:`Examples` lays them out as one vector z of length d per example and puts them
back, so that everything downstream is a function of z.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchfil.utils.deferred import read_later
from torchfil.utils.trees import kind_of, map_tensors, tensors_of

__all__ = [
    "Coordinates",
    "Examples",
    "Inputs",
    "Private",
    "as_call",
    "check_finite",
    "check_finite_later",
    "num_examples",
    "superpixel",
]

Inputs = Tensor | Sequence[Any] | Mapping[str, Any]
Coordinates = Tensor | Sequence[int] | slice | int
Key = int | str


@dataclass(frozen=True)
class Private:
    """Which coordinates of an example are private.

    Attributes:
        inputs: Positions (tuple inputs) or names (dict inputs) of the private inputs. None: every
            floating-point input, or no input at all where ``submodule`` is given.
        coordinates: The private coordinates of the private inputs (or of the submodule's output): a boolean
            mask that broadcasts to the shape of one example, or column numbers or a slice along the last
            dimension. A dict {input: coordinates} says it for each input. None: all of them.
        target: Whether the target is private too; it must be floating-point (a regression's target, or
            class probabilities).
        submodule: The name, as in ``model.named_modules()``, of the submodule whose output is private.
            For integer inputs, name the embedding. The coordinates are then offsets from its output at
            the present weights, and the integers themselves count as known to the attacker.

    Example:
        >>> Private(coordinates=[0, 2])
        Private(inputs=None, coordinates=[0, 2], target=False, submodule=None)
    """

    inputs: Key | Sequence[Key] | None = None
    coordinates: Coordinates | Mapping[Key, Coordinates] | None = None
    target: bool = False
    submodule: str | None = None


def superpixel(segments: Tensor, label: int) -> Tensor:
    """The mask of one superpixel: ``segments == label``, for a map of integer labels [..., H, W].

    Example:
        >>> superpixel(torch.tensor([[0, 1], [1, 2]]), 1)
        tensor([[False,  True],
                [ True, False]])
    """
    mask = segments == label
    if not bool(mask.any()):
        raise ValueError(f"label {label} does not occur in segments; it holds {segments.unique().tolist()}")
    return mask


@dataclass(frozen=True)
class _Slot:
    """One private tensor: where it sits, its shape for one example, and the chosen flat coordinates."""

    place: str  # "input", "target" or "submodule"
    key: Key | None
    shape: torch.Size
    index: Tensor | None  # [size], None: all

    @property
    def size(self) -> int:
        return self.shape.numel() if self.index is None else self.index.numel()

    def select(self, batched: Tensor) -> Tensor:
        flat = batched.reshape(batched.shape[0], self.shape.numel())
        return flat if self.index is None else flat[:, self.index]

    def fill(self, base: Tensor, part: Tensor) -> Tensor:
        """A tensor with its private coordinates replaced by ``part``: one example's, or a batch's."""
        part = part.to(base.dtype)
        batch = part.shape[:-1]
        if self.index is None:
            return part.reshape((*batch, *self.shape))
        flat = base.reshape((*batch, self.shape.numel()))
        return flat.index_copy(-1, self.index, part).reshape((*batch, *self.shape))


@dataclass(frozen=True)
class Examples:
    """A batch of examples with their private coordinates laid out as z, of shape [batch, d].

    Build one with :meth:`build`. ``public`` holds what a per-example function needs besides z; both are
    batched pytrees and can be mapped over by ``torch.func.vmap`` with :attr:`in_dims`. ``masks`` are the random
    numbers that the model's forward pass draws for them, [batch, …] each (:class:`torchfil.fisher.masks.MaskLayouts`).
    ``alternatives`` are the same examples, each with one thing changed, in the same layout and with the same masks.
    """

    z: Tensor
    public: tuple[tuple[Any, ...], dict[str, Any], Any]  # positional inputs, keyword inputs, targets
    submodule: str | None
    _slots: tuple[_Slot, ...]
    masks: tuple[Tensor, ...] = ()
    alternatives: tuple[Examples, ...] = ()

    @classmethod
    def build(
        cls,
        inputs: Inputs,
        targets: Any,
        private: Private | None = None,
        *,
        submodule_shape: Callable[[str, Any], tuple[torch.Size, torch.dtype]] | None = None,
    ) -> Examples:
        """Check a batch and lay out its private coordinates.

        Args:
            inputs: A tensor, a tuple of positional inputs, or a dict of keyword inputs.
            targets: A tensor (or a pytree of tensors) with one entry per example, or None.
            private: What is private; None: every floating-point input.
            submodule_shape: (name, one example's public part) ↦ the shape and dtype of the output of that
                submodule; needed only where ``private.submodule`` is given.

        Raises:
            ValueError: Batch sizes differ; NaN or infinity in a row; nothing floating-point is private.
            TypeError: A private input or target is not a floating-point tensor.
        """
        args, kwargs = as_call(inputs)
        return cls.from_call(args, kwargs, targets, private, submodule_shape=submodule_shape)

    @classmethod
    def from_call(
        cls,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        targets: Any,
        private: Private | None = None,
        *,
        submodule_shape: Callable[[str, Any], tuple[torch.Size, torch.dtype]] | None = None,
        check_values: bool = True,
    ) -> Examples:
        """As :meth:`build`, for a model that is called with both positional and keyword inputs.

        ``check_values=False`` leaves the search for NaN to :func:`check_finite_later`.
        """
        private = private if private is not None else Private()
        kwargs = dict(kwargs)
        batch = num_examples(args, kwargs, targets)
        if check_values:
            check_finite(args, kwargs, targets)
        public = (args, kwargs, targets)
        device = tensors_of((args, kwargs))[0].device

        named: dict[Key, Any] = dict(enumerate(args))
        named.update(kwargs)
        chosen = _private_inputs(named, private)
        if isinstance(private.coordinates, Mapping):
            unknown = [key for key in private.coordinates if key not in (*chosen, private.submodule)]
            if unknown:
                raise ValueError(f"coordinates are given for {unknown}, but what is private is {[*chosen]}")

        # z is the parts side by side: inputs, then the target, then the submodule's output.
        slots: list[_Slot] = []
        parts: list[Tensor] = []
        for key in chosen:
            shape = named[key].shape[1:]
            slot = _Slot("input", key, shape, _flat_index(private, key, shape, device))
            slots.append(slot)
            parts.append(slot.select(named[key]))

        if private.target:
            if not (isinstance(targets, Tensor) and targets.is_floating_point()):
                what = f"dtype {targets.dtype}" if isinstance(targets, Tensor) else type(targets).__name__
                raise TypeError(
                    f"Private(target=True) needs a floating-point target, got {what}: Fisher information "
                    "speaks of continuous values. Use class probabilities (a one-hot tensor) as targets, or "
                    "leave the target public."
                )
            slots.append(_Slot("target", None, targets.shape[1:], None))
            parts.append(targets.reshape(batch, targets.shape[1:].numel()))

        if private.submodule is not None:
            if submodule_shape is None:
                raise ValueError("Private(submodule=…) needs a model to read the submodule's output from")
            shape, dtype = submodule_shape(private.submodule, public)
            slot = _Slot("submodule", None, shape, _flat_index(private, private.submodule, shape, device))
            slots.append(slot)
            parts.append(torch.zeros(batch, slot.size, dtype=dtype, device=device))  # offsets from that output

        if not slots:
            raise ValueError(_nothing_private(named))
        z = torch.cat([part.detach() for part in parts], dim=1)
        return cls(z, map_tensors(Tensor.detach, public), private.submodule, tuple(slots))

    def __len__(self) -> int:
        return self.z.shape[0]

    @property
    def num_coordinates(self) -> int:
        """d, the number of private coordinates of one example."""
        return self.z.shape[1]

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of ``public``, in its order, then the masks, then those of the alternatives, z first."""
        others = [tensor for other in self.alternatives for tensor in (other.z, *other.tensors)]
        return (*tensors_of(self.public), *self.masks, *others)

    @cached_property
    def form(self) -> Hashable:
        """Shapes (the batch's size aside) and dtypes of the tensors of ``public``, and all else that is in it."""
        return kind_of(self.public)

    @property
    def in_dims(self) -> Any:
        """The ``in_dims`` of ``public`` for vmap: tensors along their first dimension, all else shared."""
        return pytree.tree_map(lambda leaf: 0 if isinstance(leaf, Tensor) else None, self.public)

    def __getitem__(self, rows: slice | Tensor) -> Examples:
        """The examples of those rows, a slice or numbers [k]."""
        return self.map(lambda leaf: leaf[rows])

    def map(self, function: Callable[[Tensor], Tensor]) -> Examples:
        """``function`` of every tensor: z, inputs and targets, masks, and those of the alternatives."""
        return replace(
            self,
            z=function(self.z),
            public=map_tensors(function, self.public),
            masks=tuple(map(function, self.masks)),
            alternatives=tuple(other.map(function) for other in self.alternatives),
        )

    def chunks(self, size: int) -> Iterator[tuple[slice, Examples]]:
        """Pairs (rows, examples of those rows) of at most ``size`` examples each."""
        for start in range(0, len(self), size):
            rows = slice(start, min(start + size, len(self)))
            yield rows, self[rows]

    def restore(self, z: Tensor, public: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any, Tensor | None]:
        """Positional and keyword inputs, target and submodule offset from z: one example's, or those of a batch.

        Args:
            z: [d], or [batch, d].
            public: What :attr:`public` holds, of that example or batch.
        """
        args, kwargs, target = list(public[0]), dict(public[1]), public[2]
        offset: Tensor | None = None
        start = 0
        for slot in self._slots:
            part = z[..., start : start + slot.size]
            start += slot.size
            if slot.place == "target":
                target = slot.fill(target, part)
            elif slot.place == "submodule":
                offset = slot.fill(part.new_zeros(*part.shape[:-1], *slot.shape), part)
            elif isinstance(slot.key, int):
                args[slot.key] = slot.fill(args[slot.key], part)
            elif slot.key is not None:
                kwargs[slot.key] = slot.fill(kwargs[slot.key], part)
        return tuple(args), kwargs, target, offset

    def maps(self, values: Tensor) -> dict[Hashable, Tensor]:
        """Values per coordinate, [batch, d], in the shapes of the private tensors; NaN where not private.

        The keys are the positions or names of the inputs, "target", and the submodule's name.
        """
        result: dict[Hashable, Tensor] = {}
        start = 0
        for slot in self._slots:
            part = values[:, start : start + slot.size]
            start += slot.size
            full = values.new_full((values.shape[0], slot.shape.numel()), float("nan"))
            index = slice(None) if slot.index is None else slot.index
            full[:, index] = part
            key = {"target": "target", "submodule": self.submodule}.get(slot.place, slot.key)
            result[key] = full.reshape(values.shape[0], *slot.shape)
        return result


def submodule_output(model: nn.Module, name: str, forward: Callable[[], Any]) -> Tensor:
    """The output of the named submodule during ``forward()``; it must be called once and give a tensor."""
    modules = dict(model.named_modules())
    if name not in modules or name == "":
        raise ValueError(
            f"submodule={name!r} is not a submodule of {type(model).__name__}; it has "
            f"{', '.join(key for key in modules if key)}"
        )
    seen: list[Any] = []
    handle = modules[name].register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    try:
        with torch.no_grad():
            forward()
    finally:
        handle.remove()
    if len(seen) != 1:
        raise called_often(name, len(seen))
    if not (isinstance(seen[0], Tensor) and seen[0].is_floating_point()):
        raise TypeError(f"the output of submodule {name!r} is not a floating-point tensor: {type(seen[0]).__name__}")
    return seen[0]


def called_often(name: str, times: int) -> ValueError:
    """The error for a submodule that is not called once."""
    return ValueError(
        f"submodule {name!r} is called {times} times in one forward pass; its output can be private "
        "only where it is called exactly once"
    )


def as_call(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments with which a model takes these inputs."""
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, Sequence) and not isinstance(inputs, str):
        return tuple(inputs), {}
    raise TypeError(
        "inputs must be a tensor, a tuple of positional inputs or a dict of keyword inputs, "
        f"got {type(inputs).__name__}"
    )


def num_examples(args: Any, kwargs: Any, targets: Any) -> int:
    """The size of a batch, on which all its tensors must agree."""
    leaves = tensors_of((args, kwargs))
    if not leaves:
        raise ValueError("inputs hold no tensor")
    every = leaves + tensors_of(targets)
    if any(leaf.ndim == 0 for leaf in every):
        raise ValueError("a tensor without dimensions was given; the first dimension must run over examples")
    sizes = {leaf.shape[0] for leaf in every}
    if len(sizes) > 1:
        raise ValueError(
            "inputs and targets disagree on the number of examples: their shapes are "
            f"{[tuple(leaf.shape) for leaf in every]}; the first dimension must run over examples"
        )
    return sizes.pop()


def check_finite_later(args: Any, kwargs: Any, targets: Any) -> Callable[[], None]:
    """Begin to look for NaN and infinity; the function that is returned raises where there are some.

    On a GPU the look is taken while other work goes on.
    """
    floating = [leaf for leaf in tensors_of((args, kwargs, targets)) if leaf.is_floating_point()]
    if not floating or any(leaf.device.type != "cuda" for leaf in floating):
        check_finite(args, kwargs, targets)
        return lambda: None
    sums = [leaf.sum(dtype=torch.float64) for leaf in floating]
    totals = read_later(torch.stack(sums) if len(sums) > 1 else sums[0])

    def confirm() -> None:
        if not all(map(math.isfinite, totals().flatten().tolist())):
            check_finite(args, kwargs, targets)

    return confirm


def check_finite(args: Any, kwargs: Any, targets: Any) -> None:
    """Raise where an input or a target is NaN or infinite, naming the rows."""
    given = [(f"inputs[{i}]" if len(args) > 1 else "inputs", part) for i, part in enumerate(args)]
    given += [(f"inputs[{key!r}]", part) for key, part in kwargs.items()]
    for name, leaf in [(name, leaf) for name, part in (*given, ("targets", targets)) for leaf in tensors_of(part)]:
        if leaf.is_floating_point():
            wrong = ~torch.isfinite(leaf.reshape(leaf.shape[0], -1)).all(dim=1) if leaf.numel() else leaf[:0]
            if bool(wrong.any()):
                rows = wrong.nonzero().flatten().tolist()
                shown = ", ".join(map(str, rows[:10])) + (", …" if len(rows) > 10 else "")
                raise ValueError(
                    f"{name} has NaN or infinite values in {len(rows)} of {leaf.shape[0]} rows: {shown}. "
                    "Drop or impute these examples; their Fisher information is undefined."
                )


def _private_inputs(named: dict[Key, Any], private: Private) -> list[Key]:
    floating = [key for key, leaf in named.items() if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if private.inputs is None:
        return [] if private.submodule is not None else floating
    given = [private.inputs] if isinstance(private.inputs, int | str | Integral) else private.inputs
    wanted: list[Key] = [int(key) if isinstance(key, Integral) else key for key in given]
    if len(set(wanted)) < len(wanted):
        raise ValueError(f"private inputs {wanted} name one input twice, whose coordinates would count twice")
    for key in wanted:
        if key not in named:
            raise ValueError(f"private input {key!r} is not among the inputs {list(named)}")
        if key not in floating:
            leaf = named[key]
            what = f"dtype {leaf.dtype}" if isinstance(leaf, Tensor) else type(leaf).__name__
            raise TypeError(
                f"private input {key!r} has {what}; Fisher information needs floating-point values. For integer "
                "tokens name the embedding: Private(submodule='…')"
            )
    return wanted


def _nothing_private(named: dict[Key, Any]) -> str:
    kinds = {key: str(leaf.dtype) for key, leaf in named.items() if isinstance(leaf, Tensor)}
    return (
        f"nothing private to measure: no input is floating-point (inputs: {kinds}). Integer inputs have no "
        "derivative; name the submodule whose output is private, e.g. private=Private(submodule='embedding')."
    )


def _flat_index(private: Private, key: Key, shape: torch.Size, device: torch.device) -> Tensor | None:
    chosen = private.coordinates
    if isinstance(chosen, Mapping):
        chosen = chosen.get(key)
    if chosen is None:
        return None

    # Masks and columns both become a mask of one example, so that z has one order whatever was given.
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
            raise ValueError(f"input {key!r} is one number per example; it has no columns to choose from")
        columns = chosen.tolist() if hasattr(chosen, "tolist") else chosen
        columns = [columns] if isinstance(columns, int) else columns
        if not isinstance(columns, slice):
            strange = [column for column in columns if int(column) != column or isinstance(column, bool)]
            if strange:
                raise TypeError(f"columns {strange} of input {key!r} are no column numbers; a mask is a boolean tensor")
            wrong = [column for column in columns if not -shape[-1] <= column < shape[-1]]
            if wrong:
                raise ValueError(f"columns {wrong} are out of range for input {key!r} with {shape[-1]} columns")
        mask[..., columns] = True

    index = mask.reshape(-1).nonzero().flatten()
    if index.numel() == 0:
        raise ValueError(f"coordinates of input {key!r} choose nothing")
    return index.to(device)
