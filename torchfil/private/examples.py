"""A batch with its private coordinates laid out as one vector z per example, and put back."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchfil.private.batches import Inputs, Key, as_call, check_finite, named_inputs, num_examples, with_value_at
from torchfil.private.choice import Private, flat_index, nothing_private, private_inputs
from torchfil.private.padding import OwnPositions, names_of_inputs, own_positions, own_positions_of_input
from torchfil.private.submodules import Output, outputs_of_one_example
from torchfil.utils.trees import kind_of, map_tensors, tensors_of

__all__ = ["Examples"]

ReadOutputs = Callable[[Sequence[str], Any], tuple[Output, ...]]


@dataclass(frozen=True)
class _Slot:
    """One private tensor.

    Attributes:
        key: Its name in :meth:`Examples.maps`.
        place: The path of an input in (args, kwargs), the name of a submodule, or None for the target.
        shape: The shape of one example as it is laid out in z.
        index: The chosen flat coordinates, [size]; None: all.
        length: How many positions the tensor has in this batch, if ``shape`` has a declared maximum of them.
        own: Which positions are the example's own; None: all.
    """

    key: Key
    place: tuple[Any, ...] | str | None
    shape: torch.Size
    index: Tensor | None
    length: int | None = None
    own: OwnPositions | None = None

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
        inputs, target = (public[0], public[1]), public[2]
        offsets: dict[str, tuple[Tensor, ...]] = {}
        start = 0
        for slot in self._slots:
            part = z[..., start : start + slot.size]
            start += slot.size
            own = slot.own_mask(public, batched=z.ndim > 1)
            if slot.place is None:
                target = slot.fill(target, part, own)
            elif isinstance(slot.place, str):
                offset = slot.fill(part.new_zeros(*part.shape[:-1], *slot.true_shape), part, own)
                offsets[slot.place] = (*offsets.get(slot.place, ()), offset)
            else:
                inputs = with_value_at(inputs, slot.place, slot.fill(_at(public, slot.place), part, own))
        return (*inputs, target, offsets)

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

    slots: list[tuple[_Slot, torch.dtype]] = []
    for key in chosen:
        path, value = named[key]
        own = own_positions_of_input(private.lengths_of(key), named, names, value.shape[1:])
        limit = private.max_length if not outputs and value.ndim > 1 else None
        slots.append((_slot(private, (key,), path, value.shape[1:], own, limit, device), value.dtype))
    if private.target:
        _check_target(targets)
        slots.append((_Slot("target", None, targets.shape[1:], None), targets.dtype))
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


def _at(public: Any, place: tuple[Any, ...] | None) -> Tensor:
    """The private tensor itself: an input, or the target."""
    value: Any = public[2] if place is None else public
    for key in place or ():
        value = value[key]
    tensor: Tensor = value
    return tensor


def _in_words(slot: _Slot) -> str:
    size = f"{'×'.join(map(str, slot.shape)) or 'a number'}"
    size += f" ({slot.size} of its coordinates)" if slot.index is not None else ""
    what = "the target" if slot.place is None else f"input {slot.key!r}"
    what = f"the output of {slot.key!r}" if isinstance(slot.place, str) else what
    return f"{what}, {size}" + (f", without {slot.own}" if slot.own is not None else "")
