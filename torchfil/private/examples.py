"""A batch with its private coordinates laid out as one vector z per example, and put back."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchfil.private.batches import (
    Input,
    Inputs,
    Key,
    Path,
    as_call,
    check_finite,
    named_inputs,
    num_examples,
    with_value_at,
)
from torchfil.private.choice import Private, flat_index, nothing_private, private_inputs
from torchfil.private.padding import OwnPositions, names_of_inputs, own_positions, own_positions_of_input
from torchfil.private.submodules import Output, outputs_of_one_example
from torchfil.utils.trees import kind_of, map_tensors, tensors_of

__all__ = ["Examples"]

_TELLING = 64  # numbers of two kinds (yes or no) that are not equal by chance
ReadOutputs = Callable[[Sequence[str], Any], tuple[Output, ...]]


@dataclass(frozen=True)
class _Slot:
    """One private tensor.

    Attributes:
        key: Its name in :meth:`Examples.maps`.
        place: The path of an input or target in (args, kwargs, targets), or the name of a submodule.
        shape: The shape of one example as it is laid out in z.
        index: The chosen flat coordinates, [size]; None: all.
        length: How many positions the tensor has in this batch, if ``shape`` has a declared maximum of them.
        own: Which positions are the example's own; None: all.
        copies: The names and paths of other inputs and targets that hold the same numbers and change with it.
    """

    key: Key
    place: Path | str
    shape: torch.Size
    index: Tensor | None
    length: int | None = None
    own: OwnPositions | None = None
    copies: tuple[tuple[Key, Path], ...] = ()

    @property
    def size(self) -> int:
        return self.shape.numel() if self.index is None else self.index.numel()

    @property
    def true_shape(self) -> torch.Size:
        """The shape of one example in this batch."""
        return self.shape if self.length is None else torch.Size((self.length, *self.shape[1:]))

    def select(self, batched: Tensor) -> Tensor:
        """The private coordinates, [batch, size]."""
        flat = self._laid_out(batched, 1).reshape(batched.shape[0], self.shape.numel())
        return flat if self.index is None else flat[:, self.index]

    def fill(self, base: Tensor, part: Tensor, own: Tensor | None) -> Tensor:
        """A tensor with its private coordinates replaced by ``part``, for one example or a batch.

        Args:
            base: A tensor of the true shape.
            part: [size], or [batch, size].
            own: The result of :meth:`own_mask`; other positions stay as they are.
        """
        part = part.to(base.dtype)
        batch = part.shape[:-1]
        if self.index is not None:
            flat = self._laid_out(base, len(batch)).reshape((*batch, self.shape.numel()))
            part = flat.index_copy(-1, self.index, part)
        values = part.reshape((*batch, *self.shape))
        if self.length is not None:
            values = values.narrow(len(batch), 0, self.length)
        return values if own is None else torch.where(_expanded(own, values.ndim), values, base)

    def own_mask(self, public: Any, *, batched: bool) -> Tensor | None:
        """True at the example's own positions, [batch, T, …] or [T, …]; None: all are."""
        if self.own is None:
            return None
        return self.own.mask(public[0], public[1], self.true_shape[0], batched=batched)

    def is_own(self, public: Any) -> Tensor | None:
        """Whether a coordinate is an example's own, [batch, size] or [1, size]; None: all are."""
        own = self.own_mask(public, batched=True)
        if own is None and self.length is None:
            return None
        if own is None:
            own = torch.ones(1, self.true_shape[0], dtype=torch.bool, device=tensors_of(public)[0].device)
        return self.select(_expanded(own, len(self.shape) + 1).expand(len(own), *self.true_shape))

    def _laid_out(self, value: Tensor, dim: int) -> Tensor:
        """The value with as many positions as z has along this dimension; added positions are 0."""
        if self.length is None:
            return value
        missing = self.shape[0] - self.length
        return torch.cat([value, value.new_zeros((*value.shape[:dim], missing, *value.shape[dim + 1 :]))], dim=dim)


def _expanded(mask: Tensor, ndim: int) -> Tensor:
    """The mask with dimensions of size 1 added at the end."""
    return mask.reshape(mask.shape + (1,) * (ndim - mask.ndim))


@dataclass(frozen=True)
class Examples:
    """A batch of examples with their private coordinates laid out as z, of shape [batch, d].

    Build one with :meth:`build`. ``public`` holds what a per-example function needs besides z; both are
    batched pytrees, and ``torch.func.vmap`` maps over them with :attr:`in_dims`. ``masks`` are the random
    numbers that the model's forward pass draws for them, [batch, …] each (:class:`torchfil.fisher.masks.MaskLayouts`).
    ``alternatives`` are the same examples, each with one thing changed, in the same layout and with the same masks.
    ``clip_weights`` are the factors ω of their clipped gradients, [batch]; None: 1.
    """

    z: Tensor
    public: tuple[tuple[Any, ...], dict[str, Any], Any]  # positional inputs, keyword inputs, targets
    _slots: tuple[_Slot, ...]
    masks: tuple[Tensor, ...] = ()
    alternatives: tuple[Examples, ...] = ()
    clip_weights: Tensor | None = None

    @classmethod
    def build(
        cls,
        inputs: Inputs,
        targets: Any,
        private: Private | None = None,
        *,
        model: nn.Module | None = None,
    ) -> Examples:
        """Check a batch and lay out its private coordinates.

        Args:
            inputs: A tensor, a tuple of positional inputs, or a dict of keyword inputs.
            targets: A tensor (or a pytree of tensors) with one entry per example, or None.
            private: What is private; None: every floating-point input.
            model: Needed if ``private.submodule`` is given: a pass over one example reads the submodule's output.

        Raises:
            ValueError: Batch sizes differ, a row holds NaN or infinity, or nothing floating-point is private.
            TypeError: A private input or target is not a floating-point tensor.
        """
        args, kwargs = as_call(inputs)
        return cls.from_call(args, kwargs, targets, private, model=model)

    @classmethod
    def from_call(
        cls,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        targets: Any,
        private: Private | None = None,
        *,
        model: nn.Module | None = None,
        read_outputs: ReadOutputs | None = None,
        check_values: bool = True,
    ) -> Examples:
        """As :meth:`build`, for a model that is called with both positional and keyword inputs.

        ``read_outputs`` returns the submodules' outputs for one example, if they are known without a forward pass.
        ``check_values=False`` leaves the search for NaN to :func:`check_finite_later`.
        """
        private = private if private is not None else Private()
        public = (args, dict(kwargs), targets)
        batch = num_examples(*public)
        if check_values:
            check_finite(*public)
        device = tensors_of((args, public[1]))[0].device
        slots = _slots(private, public, model, read_outputs, device)

        # z concatenates the parts: inputs, then the target, then the offsets of submodules' outputs.
        parts: list[Tensor] = []
        for slot, dtype in slots:
            if isinstance(slot.place, str):
                parts.append(torch.zeros(batch, slot.size, dtype=dtype, device=device))
            else:
                parts.append(slot.select(_at(public, slot.place)))
        z = torch.cat([part.detach() for part in parts], dim=1)
        return cls(z, map_tensors(Tensor.detach, public), tuple(slot for slot, _ in slots))

    def with_values(self, public: tuple[tuple[Any, ...], dict[str, Any], Any]) -> Examples:
        """Examples in the same layout with these inputs and targets, which may differ only in their values.

        Raises:
            ValueError: A tensor that is one with another was changed without it.
        """
        parts = list(self.z.split([slot.size for slot in self._slots], dim=1))
        for i, slot in enumerate(self._slots):
            if not isinstance(slot.place, str):
                parts[i] = slot.select(value := _at(public, slot.place))
            for key, path in slot.copies:
                if not (torch.equal(_at(public, path), _at(self.public, path)) or _equal(_at(public, path), value)):
                    raise ValueError(f"{key!r} was changed, but it is the same tensor as {slot.key!r}: change that one")
        return replace(self, z=torch.cat(parts, dim=1), public=public)

    def __len__(self) -> int:
        return self.z.shape[0]

    @property
    def num_coordinates(self) -> int:
        """d, the number of private coordinates of one example, including coordinates of padding."""
        return self.z.shape[1]

    @cached_property
    def is_own(self) -> Tensor | None:
        """True if a coordinate is the example's own, False if it is padding, bool [batch, d]; None: all are its own."""
        parts = [slot.is_own(self.public) for slot in self._slots]
        if all(part is None for part in parts):
            return None
        every = torch.ones(1, 1, dtype=torch.bool, device=self.z.device)
        sized = zip(parts, self._slots, strict=True)
        return torch.cat([(every if own is None else own).expand(len(self), slot.size) for own, slot in sized], dim=1)

    @property
    def values(self) -> Tensor:
        """z, with NaN where it holds no value of the example: at padding and at offsets of submodules' outputs."""
        parts = []
        for slot, part in zip(self._slots, self.z.split([slot.size for slot in self._slots], dim=1), strict=True):
            parts.append(torch.full_like(part, float("nan")) if isinstance(slot.place, str) else part)
        values = torch.cat(parts, dim=1)
        return values if self.is_own is None else values.masked_fill(~self.is_own, float("nan"))

    @property
    def own_coordinates(self) -> Tensor | int:
        """How many coordinates are an example's own: [batch], or one number for all."""
        return self.num_coordinates if self.is_own is None else self.is_own.sum(dim=1)

    @property
    def untold(self) -> dict[Key, torch.Size]:
        """By name, the shapes of the private tensors for which nothing shows which positions are padding."""
        return {slot.key: slot.true_shape for slot in self._slots if slot.own is None}

    @property
    def same(self) -> tuple[tuple[Key, ...], ...]:
        """The names of inputs and targets that are one private tensor, for each such tensor."""
        return tuple((slot.key, *(key for key, _ in slot.copies)) for slot in self._slots if slot.copies)

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of ``public`` in its order, then masks and weights, then each alternative's, its z first."""
        others = [tensor for other in self.alternatives for tensor in (other.z, *other.tensors)]
        weights = () if self.clip_weights is None else (self.clip_weights,)
        return (*tensors_of(self.public), *self.masks, *weights, *others)

    @cached_property
    def form(self) -> Hashable:
        """Shapes (without the batch's size) and dtypes of the tensors of ``public``, and everything else in it."""
        return kind_of(self.public)

    @property
    def in_dims(self) -> Any:
        """The ``in_dims`` of ``public`` for vmap: tensors along their first dimension, everything else shared."""
        return pytree.tree_map(lambda leaf: 0 if isinstance(leaf, Tensor) else None, self.public)

    def __getitem__(self, rows: slice | Tensor) -> Examples:
        """The examples of these rows: a slice, or row numbers [k]."""
        return self.map(lambda leaf: leaf[rows.to(leaf.device) if isinstance(rows, Tensor) else rows])

    def map(self, function: Callable[[Tensor], Tensor]) -> Examples:
        """``function`` of every tensor: z, inputs and targets, masks, weights, and the same of the alternatives."""
        return replace(
            self,
            z=function(self.z),
            public=map_tensors(function, self.public),
            masks=tuple(map(function, self.masks)),
            alternatives=tuple(other.map(function) for other in self.alternatives),
            clip_weights=None if self.clip_weights is None else function(self.clip_weights),
        )

    def chunks(self, size: int) -> Iterator[tuple[slice, Examples]]:
        """Pairs (rows, examples of those rows) of at most ``size`` examples each."""
        for start in range(0, len(self), size):
            rows = slice(start, min(start + size, len(self)))
            yield rows, self[rows]

    def restore(
        self, z: Tensor, public: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any], Any, dict[str, tuple[Tensor, ...]]]:
        """Positional and keyword inputs, target and the submodules' offsets from z, for one example or a batch.

        Offsets come by submodule, one for each of its calls. The values of z at padding are not used.

        Args:
            z: [d], or [batch, d].
            public: As :attr:`public`, for this example or batch.
        """
        filled = public
        offsets: dict[str, tuple[Tensor, ...]] = {}
        start = 0
        for slot in self._slots:
            part = z[..., start : start + slot.size]
            start += slot.size
            own = slot.own_mask(public, batched=z.ndim > 1)
            if isinstance(slot.place, str):
                offset = slot.fill(part.new_zeros(*part.shape[:-1], *slot.true_shape), part, own)
                offsets[slot.place] = (*offsets.get(slot.place, ()), offset)
                continue
            value = slot.fill(_at(public, slot.place), part, own)
            filled = with_value_at(filled, slot.place, value)
            for _, path in slot.copies:
                there = _at(public, path)
                filled = with_value_at(filled, path, value.reshape(there.shape).to(there.dtype))
        return (*filled, offsets)

    def maps(self, values: Tensor) -> dict[Hashable, Tensor]:
        """Values per coordinate, [batch, d], in the shapes of the private tensors; NaN where public or padding.

        The keys are the positions or names of the inputs, "target", and the submodules' names (with the number of the
        call, "table[0]", if a submodule is called several times).
        """
        result: dict[Hashable, Tensor] = {}
        start = 0
        for slot in self._slots:
            part = values[:, start : start + slot.size]
            start += slot.size
            full = values.new_full((values.shape[0], slot.shape.numel()), float("nan"))
            index = slice(None) if slot.index is None else slot.index
            full[:, index] = part
            full = full.reshape(values.shape[0], *slot.shape)

            # Positions beyond those of the batch, and padding, belong to no example.
            present = full[:, : slot.true_shape[0]] if slot.shape else full
            own = slot.own_mask(self.public, batched=True)
            if own is not None:
                present.masked_fill_(~_expanded(own, present.ndim), float("nan"))
            if slot.length is not None:
                full[:, slot.length :] = float("nan")
            result[slot.key] = full
        return result

    def __str__(self) -> str:
        """What is private, in words."""
        return ", ".join(_in_words(slot) for slot in self._slots)


def _slots(
    private: Private, public: Any, model: nn.Module | None, read_outputs: ReadOutputs | None, device: torch.device
) -> list[tuple[_Slot, torch.dtype]]:
    """The private tensors of a batch in the order of z, with their dtypes."""
    args, kwargs, targets = public
    named, names = named_inputs(args, kwargs), names_of_inputs(model, len(args))
    chosen = private_inputs(named, names, private)
    outputs = _outputs(private, public, model, read_outputs)
    known = {*chosen, *private.submodules, *(output.key for output in outputs)}
    for what, told in (("coordinates", private.coordinates), ("lengths", private.lengths)):
        unknown = [key for key in told if key not in known] if isinstance(told, Mapping) else []
        if unknown:
            raise ValueError(f"{what} are given for {unknown}, but only {sorted(known, key=str)} are private")

    if private.target:
        _check_target(targets)

    # A tensor that enters in several places is one private tensor: its places change together.
    places = _targets(targets) | named
    groups = same_tensors([*chosen, "target"] if private.target else chosen, places, private.same)
    slots: list[tuple[_Slot, torch.dtype]] = []
    for key, *others in groups:
        path, value = places[key]
        copies = tuple((other, places[other].path) for other in others)
        if isinstance(private.coordinates, Mapping) and len({key, *others} & set(private.coordinates)) > 1:
            raise ValueError(f"{key!r} and {others} are one tensor: give its coordinates under one of these names")
        if key not in named:
            slots.append((_Slot("target", path, value.shape[1:], None, copies=copies), value.dtype))
            continue
        own = own_positions_of_input(private.lengths_of(key, *others), named, names, value.shape[1:])
        limit = private.max_length if not outputs and value.ndim > 1 else None
        slot = _slot(private, (key, *others), path, value.shape[1:], own, limit, device)
        slots.append((replace(slot, copies=copies), value.dtype))
    for output in outputs:
        keys = (output.key, output.submodule)
        tokens = (output.tokens, output.padding, output.mask_name, output.appended)
        limit = private.max_length if output.positions else None
        own = None
        if output.positions:
            own = own_positions(private.lengths_of(*keys), named, names, output.shape, *tokens)
        slots.append((_slot(private, keys, output.submodule, output.shape, own, limit, device), output.dtype))

    if not slots:
        modules = () if model is None else model.named_modules()
        embeddings = [name for name, module in modules if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
        raise ValueError(nothing_private(named, embeddings))
    return slots


def _slot(
    private: Private,
    keys: Sequence[Key],
    place: Any,
    shape: torch.Size,
    own: OwnPositions | None,
    limit: int | None,
    device: torch.device,
) -> _Slot:
    """One private tensor of this true shape, laid out for ``limit`` positions if that is given."""
    if limit is None:
        return _Slot(keys[0], place, shape, flat_index(private, keys, shape, device), own=own)
    if shape[0] > limit:
        raise ValueError(
            f"{keys[0]!r} has {shape[0]} positions in this batch, more than max_length={limit}; "
            "raise it in Private(max_length=…), or cut texts to that length"
        )
    laid_out = torch.Size((limit, *shape[1:]))
    return _Slot(keys[0], place, laid_out, flat_index(private, keys, laid_out, device), shape[0], own)


def _outputs(
    private: Private, public: Any, model: nn.Module | None, read_outputs: ReadOutputs | None
) -> tuple[Output, ...]:
    """The private submodules' outputs for one example."""
    if not private.submodules:
        return ()
    if read_outputs is not None:
        return read_outputs(private.submodules, public)
    if model is None:
        raise ValueError("Private(submodule=…) needs a model to read the submodule's output from")
    return outputs_of_one_example(model, private.submodules, public)


def _check_target(targets: Any) -> None:
    if not (isinstance(targets, Tensor) and targets.is_floating_point()):
        what = f"dtype {targets.dtype}" if isinstance(targets, Tensor) else type(targets).__name__
        raise TypeError(
            f"Private(target=True) needs a floating-point target, got {what}: Fisher information needs continuous "
            "values. Use class probabilities (a one-hot tensor) as targets, or leave the target public."
        )


def _targets(targets: Any) -> dict[Key, Input]:
    """All targets by name, "target" or "target.…", with their paths in (args, kwargs, targets)."""
    named = named_inputs((), {"target": targets})
    return {key: Input((2, *path[2:]), value) for key, (path, value) in named.items()}


def same_tensors(
    private: Sequence[Key], places: Mapping[Key, Input], given: Sequence[Sequence[Key]] | None
) -> list[tuple[Key, ...]]:
    """For each private tensor its names: its own, then those of other places that hold the same tensor.

    Args:
        private: The names of what is private.
        places: All inputs and targets.
        given: Which places hold one tensor; None: those with the same memory, or with equal numbers in every row that
            cannot be equal by chance.

    Raises:
        ValueError: The given places hold other numbers, or a target equals an input perhaps by chance.
    """
    unknown = [key for group in given or () for key in group if key not in places]
    if unknown:
        raise ValueError(f"Private(same=…) names {unknown}, and the inputs and targets are {list(places)}")
    groups: list[tuple[Key, ...]] = []
    for key in private:
        if any(key in group for group in groups):
            continue
        others = [other for group in given or () if key in group for other in group if other != key]
        if given is None:
            others = [other for other in places if _are_one(key, other, places)]
        for other in others:
            if not _equal(places[key].value, places[other].value):
                raise ValueError(
                    f"{key!r} and {other!r} hold different numbers in this batch, but count as one tensor, because "
                    "Private(same=…) says so or because they were equal in an earlier batch. If they are not one "
                    "tensor, pass private=Private(same=[])."
                )
        groups.append((key, *others))
    return groups


def _equal(one: Any, other: Any) -> bool:
    """Whether two tensors, [batch, …], hold the same floating-point numbers in every row, in the less precise dtype."""
    if not all(isinstance(value, Tensor) and value.is_floating_point() for value in (one, other)):
        return False
    first, second = sorted((one.detach(), other.detach()), key=lambda value: value.dtype.itemsize)
    return len(one) == len(other) and torch.equal(first.flatten(), second.flatten().to(first))


def _are_one(key: Key, other: Key, places: Mapping[Key, Input]) -> bool:
    """Whether both hold one tensor; raises if a target equals an input in so few numbers that it may be chance."""
    one, two = places[key].value, places[other].value
    if key == other or not _equal(one, two) or not one.numel():
        return False
    kinds = len(one.unique())
    if one.data_ptr() == two.data_ptr() or kinds > 2 or (kinds == 2 and one.numel() >= _TELLING):
        return True
    if places[other].path[0] != 2:  # two attributes
        return False
    raise ValueError(
        f"{key!r} and {other!r} hold the same numbers in this batch, too few to show if both are one tensor, as in "
        f"an autoencoder: pass private=Private(same=[({key!r}, {other!r})]) if they are, Private(same=[]) if not"
    )


def _at(public: Any, path: Path) -> Tensor:
    """The input or target at this path."""
    value: Any = public
    for key in path:
        value = value[key]
    tensor: Tensor = value
    return tensor


def _in_words(slot: _Slot) -> str:
    size = f"{'×'.join(map(str, slot.shape)) or 'a number'}"
    size += f" ({slot.size} of its coordinates)" if slot.index is not None else ""
    what = "the target" if slot.place == (2,) else f"input {slot.key!r}"
    what = f"the output of {slot.key!r}" if isinstance(slot.place, str) else what
    what += "".join(f" (also {key!r})" for key, _ in slot.copies)
    return f"{what}, {size}" + (f", without {slot.own}" if slot.own is not None else "")
