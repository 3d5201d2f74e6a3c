"""A batch with its private coordinates laid out as one vector z per example, and put back."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import accumulate
from operator import getitem
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchfil.private.batches import (
    ROWS,
    Input,
    Inputs,
    Key,
    Path,
    Public,
    as_rows,
    check_finite,
    named_inputs,
)
from torchfil.private.choice import (
    NOTHING,
    OwnPositions,
    Private,
    flat_index,
    for_names,
    own_positions,
    private_inputs,
)
from torchfil.private.submodules import Offsets, SubmoduleOutput, outputs_of_one_example
from torchfil.utils.given import Args, Kwargs, Tree
from torchfil.utils.trees import form_of, map_tensors, tensors_of

_ENOUGH = 64  # numbers of two kinds (yes or no) that are not equal by chance


@dataclass(frozen=True, eq=False)
class _Slot:
    """One private tensor.

    Attributes:
        key: Its name in :meth:`Examples.maps`.
        place: The path of an input or target in (args, kwargs, targets), or the name of a
            submodule.
        shape: The shape of one example as it is laid out in z.
        dtype: Its dtype.
        index: The chosen flat coordinates, [size]; None: all.
        length: How many positions the tensor has in this batch, if ``shape`` has a declared maximum
            of them.
        own: Which positions are the example's own; None: all.
        copies: The names and paths of other inputs and targets that hold the same numbers and
            change with it.
    """

    key: Key
    place: Path | str
    shape: torch.Size
    dtype: torch.dtype
    index: Tensor | None = None
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

    @property
    def padded(self) -> bool:
        """Whether some of its coordinates may be padding."""
        return self.own is not None or self.length is not None

    def select(self, batched: Tensor, public: Public = None) -> Tensor:
        """The private coordinates, [batch, size]."""
        flat = self._laid_out(batched, 1).reshape(batched.shape[0], self.shape.numel())
        return flat if self.index is None else flat[:, self.index]

    def restored(self, base: Tensor | None, part: Tensor, public: Public) -> Tensor:
        """A tensor of the true shape (None: zeros) with its private coordinates replaced by [size]
        or [batch, size].
        """
        base = part.new_zeros(*part.shape[:-1], *self.true_shape) if base is None else base
        return self.fill(base, part, self.own_mask(public, batched=part.ndim > 1))

    def fill(self, base: Tensor, part: Tensor, own: Tensor | None) -> Tensor:
        """The same, if only the positions ``own`` (from :meth:`own_mask`) are replaced.

        Others stay as they are.
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

    def own_mask(self, public: Public, *, batched: bool) -> Tensor | None:
        """True at the example's own positions, [batch, T, …] or [T, …]; None: all are."""
        return (
            None
            if self.own is None
            else self.own.mask(public[0], public[1], self.true_shape[0], batched=batched)
        )

    def is_own(self, public: Public, batch: int) -> Tensor:
        """Whether a coordinate is an example's own, [batch, size]."""
        own = self.own_mask(public, batched=True)
        if own is None:
            own = torch.ones(
                batch, *self.true_shape[:1], dtype=torch.bool, device=tensors_of(public)[0].device
            )
        return self.select(_expanded(own, len(self.shape) + 1).expand(batch, *self.true_shape))

    def map(self, values: Tensor) -> Tensor:
        """Values by coordinate, [batch, size], in the tensor's shape, [batch, …].

        NaN where it is public.
        """
        full = values.new_full((len(values), self.shape.numel()), float("nan"))
        full[:, slice(None) if self.index is None else self.index] = values
        return full.reshape(len(values), *self.shape)

    def _laid_out(self, value: Tensor, dim: int) -> Tensor:
        """The value with as many positions as z has along this dimension; added positions are 0."""
        if self.length is None:
            return value
        missing = self.shape[0] - self.length
        return torch.cat(
            [value, value.new_zeros((*value.shape[:dim], missing, *value.shape[dim + 1 :]))],
            dim=dim,
        )

    def __str__(self) -> str:
        what = "the target" if self.place == (2,) else f"input {self.key!r}"
        what = f"the output of {self.key!r}" if isinstance(self.place, str) else what
        what += "".join(f" (also {key!r})" for key, _ in self.copies)
        size = "×".join(map(str, self.shape)) or "a number"
        size += f" ({self.size} of its coordinates)" if self.index is not None else ""
        return f"{what}, {size}" + (f", without {self.own}" if self.own is not None else "")


@dataclass(frozen=True, eq=False)
class _RowsSlot:
    """A private tensor of every row of an owner, [batch, K, …]; padded rows belong to nobody.

    Attributes:
        row: The tensor in one row.
        laid_out: How many rows z has room for.
        in_order: Whether rows lie in z in the order of the batch, rather than each at the place of
            its number.
        shared: Whether all rows have the same values, which are one secret and lie once in z.
    """

    row: _Slot
    laid_out: int
    in_order: bool
    shared: bool = False

    key = property(lambda self: self.row.key)
    place = property(lambda self: self.row.place)
    dtype = property(lambda self: self.row.dtype)
    copies = property(lambda self: self.row.copies)
    own = property(lambda self: self.row.own)
    padded = property(lambda self: not self.shared)

    @property
    def rows(self) -> range:
        """The rows in which z has it; one if they share it."""
        return range(1 if self.shared else self.laid_out)

    @property
    def columns(self) -> Sequence[int]:
        """Which numbers of the flattened tensor of a row are private here."""
        return range(self.row.size) if self.row.index is None else self.row.index.tolist()

    @property
    def size(self) -> int:
        return self.row.size * len(self.rows)

    def select(self, batched: Tensor, public: Public) -> Tensor:
        """The private coordinates, [batch, size].

        Raises:
            ValueError: Rows of one owner differ in what they should share.
        """
        by_row = self.row.select(batched.flatten(0, 1)).unflatten(0, batched.shape[:2])
        if self.shared:
            same = (by_row == by_row[:, :1]) | (public[1][ROWS] < 0)[..., None]
            if not same.all():
                raise ValueError(
                    f"rows of one person have different values of {self.key!r}, which "
                    "Private(shared=…) says is shared; correct the data, or leave it out of "
                    "shared="
                )
        return self._in_z(by_row, public)

    def _in_z(self, by_row: Tensor, public: Public) -> Tensor:
        """What belongs to the coordinates of each row, [batch, K, size of a row], as it lies in z,
        [batch, size].
        """
        if self.shared:
            return by_row[:, 0]
        if self.in_order:
            return by_row.flatten(1)
        # the last place is for padding
        room = by_row.new_zeros(len(by_row), self.laid_out + 1, self.row.size)
        numbers = public[1][ROWS]
        places = torch.where(numbers < 0, self.laid_out, numbers)[..., None].expand_as(by_row)
        return room.scatter(1, places, by_row)[:, :-1].flatten(1)

    def restored(self, base: Tensor | None, part: Tensor, public: Public) -> Tensor:
        """The rows with their private coordinates replaced, [K, …] or [batch, K, …].

        See :meth:`_Slot.restored`.
        """
        batched, numbers = part.ndim > 1, public[1][ROWS]
        if self.shared:
            by_row = part.unsqueeze(-2).expand(*numbers.shape, self.row.size)
        else:
            by_row = part.unflatten(-1, (self.laid_out, self.row.size))
            if not self.in_order:
                by_row = by_row.take_along_dim(numbers.clamp(min=0)[..., None], dim=-2)
        base = by_row.new_zeros(*numbers.shape, *self.row.true_shape) if base is None else base
        return self.row.fill(base, by_row, self._own(public, batched=batched))

    def is_own(self, public: Public, batch: int) -> Tensor:
        """Whether a coordinate is an owner's own, [batch, size]."""
        numbers = public[1][ROWS]
        own = self.row.is_own(as_rows(*public), numbers.numel()).unflatten(0, numbers.shape)
        return self._in_z(own & (numbers >= 0)[..., None], public)

    def map(self, values: Tensor) -> Tensor:
        """Values by coordinate, [batch, size], as [batch, K, …], or [batch, …] if they are
        shared.
        """
        if self.shared:
            return self.row.map(values)
        by_row = values.unflatten(1, (-1, self.row.size))
        return self.row.map(by_row.flatten(0, 1)).unflatten(0, by_row.shape[:2])

    def _own(self, public: Public, *, batched: bool) -> Tensor | None:
        """True at the rows' own positions, [batch, K, T, …] or [K, T, …].

        Padded rows keep what they have.
        """
        if self.row.own is None:
            return None
        if not batched:
            public = map_tensors(lambda leaf: leaf[None], public)
        own = self.row.own_mask(as_rows(*public), batched=True)
        assert own is not None
        return own.unflatten(0, public[1][ROWS].shape) if batched else own

    def __str__(self) -> str:
        return (
            f"{self.row}, {'the same in all rows' if self.shared else 'in every row'} of its owner"
        )


def _expanded(mask: Tensor, ndim: int) -> Tensor:
    """The mask with dimensions of size 1 added at the end."""
    return mask.reshape(mask.shape + (1,) * (ndim - mask.ndim))


@dataclass(frozen=True, eq=False)
class Layout:
    """Where z holds each private tensor: inputs, then the target, then offsets of submodules'
    outputs.

    It is the same for all batches of one form, ``form_of(public, shapes=True)``.
    """

    slots: tuple[_Slot | _RowsSlot, ...] = ()

    @classmethod
    def of(
        cls,
        public: Public,
        private: Private,
        model: nn.Module | None = None,
        max_rows: int | None = None,
    ) -> Layout:
        """The layout of a batch.

        Args:
            public: Positional inputs, keyword inputs and targets; with the input ``ROWS``, all are
                [batch, K, …].
            private: What is private.
            model: Needed if ``private.submodule`` is given: a pass over one example reads the
                submodule's output.
            max_rows: With ``ROWS``, how many rows z has room for; None: as many as the batch has.
        """
        args, kwargs, targets = public
        if ROWS in kwargs:
            of_row = cls.of(as_rows(*public), private, model)
            return cls(_of_owners(of_row.slots, kwargs[ROWS], max_rows, private))
        named = named_inputs(args, kwargs, model)
        chosen = private_inputs(named, targets, private)
        outputs: tuple[SubmoduleOutput, ...] = ()
        if private.submodules:
            if model is None:
                raise ValueError(
                    "Private(submodule=…) needs a model to read the submodule's output from"
                )
            outputs = outputs_of_one_example(model, private.submodules, public)
        known = {*chosen, *private.submodules, *(output.key for output in outputs)}
        for what, given in (("coordinates", private.coordinates), ("lengths", private.lengths)):
            unknown = (
                [key for key in given if key not in known] if isinstance(given, Mapping) else []
            )
            if unknown:
                raise ValueError(
                    f"{what} are given for {unknown}, but only {sorted(known, key=str)} are private"
                )

        slots = [
            *_slots_of_tensors(chosen, named, targets, private, limited=not outputs),
            *(
                _slot_of_output(output, named, private, tensors_of(public)[0].device)
                for output in outputs
            ),
        ]
        if not slots and private is not NOTHING:
            raise _nothing_private(named, model)
        return cls(tuple(slots))

    @cached_property
    def spans(self) -> list[tuple[_Slot | _RowsSlot, slice]]:
        """Each private tensor with its place in z."""
        ends = accumulate(slot.size for slot in self.slots)
        return [
            (slot, slice(end - slot.size, end)) for slot, end in zip(self.slots, ends, strict=True)
        ]

    @cached_property
    def padded(self) -> bool:
        """Whether some coordinates may be padding."""
        return any(slot.padded for slot in self.slots)

    @property
    def inputs_without_mask(self) -> dict[Key, torch.Size]:
        """By name, the shapes of the private tensors for which nothing shows which positions are
        padding.
        """
        of_rows = [slot.row if isinstance(slot, _RowsSlot) else slot for slot in self.slots]
        return {slot.key: slot.true_shape for slot in of_rows if slot.own is None}

    @property
    def same(self) -> tuple[tuple[Key, ...], ...]:
        """The names of inputs and targets that are one private tensor, for each such tensor."""
        return tuple(
            (slot.key, *(key for key, _ in slot.copies)) for slot in self.slots if slot.copies
        )

    def examples(self, public: Public) -> Examples:
        """The examples of a batch that has this layout.

        Raises:
            ValueError: Two places of one tensor hold different numbers.
        """
        batch = tensors_of(public)[0]
        parts = [] if self.slots else [batch.new_zeros(len(batch), 0)]
        for slot in self.slots:
            if isinstance(slot.place, str):
                parts.append(
                    torch.zeros(len(batch), slot.size, dtype=slot.dtype, device=batch.device)
                )
                continue
            value = reduce(getitem, slot.place, public)
            parts.append(slot.select(value.detach(), public))
            for key, path in slot.copies:
                if not _equal(value, reduce(getitem, path, public)):
                    raise ValueError(
                        f"{slot.key!r} and {key!r} hold different numbers in this batch, but "
                        "count as one tensor; if they are not one, pass private=Private(same=[])"
                    )
        return Examples(torch.cat(parts, dim=1), map_tensors(Tensor.detach, public), self)

    def __str__(self) -> str:
        """What is private, in words."""
        return ", ".join(map(str, self.slots))


@dataclass(frozen=True, eq=False)
class Examples:
    """A batch of examples with their private coordinates laid out as z, of shape [batch, d].

    Build one with :meth:`build`. ``public`` holds what a per-example function needs besides z; both
    are batched pytrees, and ``torch.func.vmap`` maps over them with :attr:`in_dims`. ``masks`` are
    the random numbers that the model's forward pass draws for them, [batch, …] each
    (:class:`torchfil.fisher.masks.MaskLayouts`). ``alternatives`` are the same examples, each with
    one thing changed, in the same layout and with the same masks. ``clip_weights`` are the factors
    ω of their clipped gradients, [batch]; None: 1.
    """

    z: Tensor
    public: Public
    layout: Layout = Layout()
    masks: tuple[Tensor, ...] = ()
    alternatives: tuple[Examples, ...] = ()
    clip_weights: Tensor | None = None

    @classmethod
    def build(
        cls,
        inputs: Inputs,
        targets: object,
        private: Private | None = None,
        *,
        model: nn.Module | None = None,
    ) -> Examples:
        """Check a batch and lay out its private coordinates.

        Args:
            inputs: A tensor, a tuple of positional inputs, or a dict of keyword inputs.
            targets: A tensor (or a pytree of tensors) with one entry per example, or None.
            private: What is private; None: every floating-point input.
            model: Needed if ``private.submodule`` is given: a pass over one example reads the
                submodule's output.

        Raises:
            ValueError: Batch sizes differ, a row holds NaN or infinity, or nothing floating-point
                is private.
            TypeError: A private input or target is not a floating-point tensor.
        """
        public = (*as_call(inputs), targets)
        num_examples(*public)
        check_finite(*public)
        return Layout.of(public, private if private is not None else Private(), model).examples(
            public
        )

    def with_values(self, public: Public) -> Examples:
        """Examples in the same layout with these inputs and targets, which may differ only in their
        values.

        Raises:
            ValueError: A tensor that is one with another was changed without it.
        """
        z = self.z.clone()
        for slot, span in self.layout.spans:
            if isinstance(slot.place, str):
                continue
            value = reduce(getitem, slot.place, public)
            z[:, span] = slot.select(value, public)
            for key, path in slot.copies:
                copy = reduce(getitem, path, public)
                if not (
                    torch.equal(copy, reduce(getitem, path, self.public)) or _equal(copy, value)
                ):
                    raise ValueError(
                        f"{key!r} was changed, but it is the same tensor as {slot.key!r}: change "
                        "that one"
                    )
        return replace(self, z=z, public=public)

    def __len__(self) -> int:
        return self.z.shape[0]

    @property
    def num_coordinates(self) -> int:
        """d, the number of private coordinates of one example, including coordinates of padding."""
        return self.z.shape[1]

    @cached_property
    def is_own(self) -> Tensor | None:
        """True if a coordinate is the example's own, False if it is padding, bool [batch, d].

        None: all are its own.
        """
        if not self.layout.padded:
            return None
        return torch.cat([slot.is_own(self.public, len(self)) for slot in self.layout.slots], dim=1)

    @property
    def own_coordinates(self) -> Tensor | int:
        """How many coordinates are an example's own: [batch], or one number for all."""
        return self.z.shape[1] if self.is_own is None else self.is_own.sum(dim=1)

    @property
    def shared_coordinates(self) -> int:
        """How many coordinates the rows of an owner share."""
        return sum(
            slot.size for slot in self.layout.slots if isinstance(slot, _RowsSlot) and slot.shared
        )

    @property
    def coordinates_by_row(self) -> Tensor:
        """How many coordinates each row of an owner has of its own, [batch, K]."""
        rows = self.public[1][ROWS]
        slots = [slot for slot in self.layout.slots if isinstance(slot, _RowsSlot)]
        own = [
            slot.row.is_own(as_rows(*self.public), rows.numel()).sum(dim=1)
            for slot in slots
            if not slot.shared
        ]
        return torch.stack([torch.zeros_like(rows).flatten(), *own]).sum(dim=0).reshape(rows.shape)

    def of_rows(self, numbers: Tensor) -> Tensor:
        """Whether a coordinate of an owner is the own one of its row with that number, [batch],
        bool [batch, d].
        """
        slots: Sequence[Any] = self.layout.slots
        rows = [
            torch.arange(slot.size) // slot.row.size - slot.shared * (1 + slot.size)
            for slot in slots
        ]
        own = (torch.cat(rows) == numbers[:, None]).to(self.z.device)
        return own if self.is_own is None else own & self.is_own

    @property
    def values(self) -> Tensor:
        """z, with NaN where it holds no value of the example: at padding and at offsets of
        submodules' outputs.
        """
        values = self.z.clone()
        for slot, span in self.layout.spans:
            if isinstance(slot.place, str):
                values[:, span] = float("nan")
        return values if self.is_own is None else values.masked_fill(~self.is_own, float("nan"))

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of ``public`` in its order, then masks and weights, then each alternative's,
        its z first.
        """
        others = [tensor for other in self.alternatives for tensor in (other.z, *other.tensors)]
        weights = () if self.clip_weights is None else (self.clip_weights,)
        return (*tensors_of(self.public), *self.masks, *weights, *others)

    @property
    def num_rows(self) -> int:
        """K, how many rows each example has, including padding."""
        return self.public[1][ROWS].shape[1] if ROWS in self.public[1] else 1

    @cached_property
    def kind(self) -> Hashable:
        """The form; of owners that of a row, and whether they have more than one: passes differ in
        nothing else.
        """
        if ROWS not in self.public[1]:
            return self.form
        return form_of(as_rows(*self.public), shapes=True), self.num_rows > 1

    @cached_property
    def form(self) -> Hashable:
        """Shapes (without the batch's size) and dtypes of the tensors of ``public``, and everything
        else in it.
        """
        return form_of(self.public, shapes=True)

    @property
    def in_dims(self) -> Any:
        """The ``in_dims`` of ``public`` for vmap: tensors along their first dimension, everything
        else shared.
        """
        return pytree.tree_map(lambda leaf: 0 if isinstance(leaf, Tensor) else None, self.public)

    def __getitem__(self, rows: slice | Tensor) -> Examples:
        """The examples of these rows: a slice, or row numbers [k]."""
        return self.map(
            lambda leaf: leaf[rows.to(leaf.device) if isinstance(rows, Tensor) else rows]
        )

    def map(self, function: Callable[[Tensor], Tensor]) -> Examples:
        """``function`` of every tensor: z, inputs and targets, masks, weights, and the same of the
        alternatives.
        """
        return replace(
            self,
            z=function(self.z),
            public=map_tensors(function, self.public),
            masks=tuple(map(function, self.masks)),
            alternatives=tuple([other.map(function) for other in self.alternatives]),
            clip_weights=None if self.clip_weights is None else function(self.clip_weights),
        )

    def chunks(self, size: int) -> Iterator[tuple[slice, Examples]]:
        """Pairs (rows, examples of those rows) of at most ``size`` examples each."""
        for start in range(0, len(self), size):
            rows = slice(start, min(start + size, len(self)))
            yield rows, self if size >= len(self) else self[rows]

    @property
    def by_place(self) -> Examples:
        """The same owners; their rows are found in z by ``ROWS``, so that some of them can be
        taken.
        """
        args, kwargs, targets = self.public
        rows, slots = (
            kwargs[ROWS],
            [slot for slot in self.layout.slots if isinstance(slot, _RowsSlot)],
        )
        if any(slot.in_order for slot in slots):
            rows = torch.arange(rows.shape[1], device=rows.device).where(rows >= 0, -1)
        layout = Layout(tuple(replace(slot, in_order=False) for slot in slots))
        alternatives = tuple(other.by_place for other in self.alternatives)
        public = (args, {**kwargs, ROWS: rows}, targets)
        return replace(self, public=public, layout=layout, alternatives=alternatives)

    def in_rows(self, size: int) -> Iterator[Examples]:
        """The owners of :attr:`by_place` with some of their rows, at most ``size`` at a time.

        Z stays as it is.
        """
        for start in range(0, self.num_rows, size):
            part = slice(start, start + size)
            yield replace(self, public=map_tensors(lambda leaf: leaf[:, part], self.public))  # noqa: B023

    def restore(self, z: Tensor, public: Public) -> tuple[Args, Kwargs, Any, Offsets]:
        """Positional and keyword inputs, target and the submodules' offsets from z, for one example
        or a batch.

        Offsets come by submodule, one for each of its calls. The values of z at padding are not
        used. If an example has several rows, the target is (targets by row, ``ROWS``).

        Args:
            z: [d], or [batch, d].
            public: As :attr:`public`, for this example or batch.
        """
        filled = public
        offsets: dict[str, tuple[Tensor, ...]] = {}
        for slot, span in self.layout.spans:
            part = z[..., span]
            if isinstance(slot.place, str):
                offset = slot.restored(None, part, public)
                offsets[slot.place] = (*offsets.get(slot.place, ()), offset)
                continue
            value = slot.restored(reduce(getitem, slot.place, filled), part, public)
            filled = _with_value_at(filled, slot.place, value)
            for _, path in slot.copies:
                there = reduce(getitem, path, public)
                filled = _with_value_at(filled, path, value.reshape(there.shape).to(there.dtype))
        args, kwargs, targets = filled
        return args, kwargs, (targets, public[1][ROWS]) if ROWS in kwargs else targets, offsets

    def maps(self, values: Tensor) -> dict[Hashable, Tensor]:
        """Values per coordinate, [batch, d], in the shapes of the private tensors.

        NaN where public or padding.

        The keys are the positions or names of the inputs, "target", and the submodules' names (with
        the number of the call, "table[0]", if a submodule is called several times).
        """
        result: dict[Hashable, Tensor] = {}
        if self.is_own is not None:
            values = values.masked_fill(~self.is_own, float("nan"))
        for slot, span in self.layout.spans:
            result[slot.key if slot.key not in result else f"{slot.key} (shared)"] = slot.map(
                values[:, span]
            )
        return result


def as_call(inputs: Inputs) -> tuple[Args, Kwargs]:
    """The positional and keyword arguments of a model's call with these inputs."""
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return tuple(inputs), {}


def num_examples(args: object, kwargs: object, targets: object) -> int:
    """The number of examples in a batch, checked to be the same in all its tensors."""
    leaves = tensors_of((args, kwargs))
    if not leaves:
        raise ValueError("inputs hold no tensor")
    leaves += tensors_of(targets)
    sizes = {leaf.shape[:1] for leaf in leaves}
    if not (len(sizes) <= 1 and () not in sizes):
        raise ValueError(
            "inputs and targets disagree on the number of examples: "
            f"{[tuple(leaf.shape) for leaf in leaves]}; the first dimension must run over "
            "examples (batch_first=False: the second); pad graphs to one size"
        )
    return sizes.pop()[0]


def _slots_of_tensors(
    chosen: Sequence[Key],
    named: Mapping[Key, Input],
    targets: object,
    private: Private,
    *,
    limited: bool,
) -> Iterator[_Slot]:
    """The private inputs, and the target if it is private.

    A tensor that enters in several places is one private tensor: its places change together.
    ``limited`` says that ``max_length`` is about them.
    """
    of_targets = named_inputs((), {"target": targets})
    places = {key: Input((2, *path[2:]), value) for key, (path, value, _) in of_targets.items()}
    places.update(named)
    for keys in same_tensors(
        [*chosen, "target"] if private.target else chosen, places, private.same
    ):
        path, value, _ = places[keys[0]]
        copies = tuple((key, places[key].path) for key in keys[1:])
        if keys[0] not in named:
            yield _Slot("target", path, value.shape[1:], value.dtype, copies=copies)
            continue
        if (
            isinstance(private.coordinates, Mapping)
            and len(set(keys) & set(private.coordinates)) > 1
        ):
            raise ValueError(
                f"{keys} are one tensor: give its coordinates under one of these names"
            )

        # A mask next to ``input_ids`` belongs to them, and none belongs to images.
        lengths = for_names(private.lengths, keys)
        of_another = value.ndim > 3 or any("input_ids" in given.name for given in named.values())
        like = SubmoduleOutput(str(keys[0]), str(keys[0]), value.shape[1:], value.dtype)
        own = None if lengths is None and of_another else own_positions(lengths, named, like)
        limit = private.max_length if limited and value.ndim > 1 else None
        yield _slot(private, keys, path, value[0:0], limit, own=own, copies=copies)


def _slot_of_output(
    output: SubmoduleOutput, named: Mapping[Key, Input], private: Private, device: torch.device
) -> _Slot:
    """The private output of a submodule."""
    keys = (output.key, output.submodule)
    own = (
        own_positions(for_names(private.lengths, keys), named, output) if output.positions else None
    )
    empty = torch.empty(0, *output.shape, dtype=output.dtype, device=device)
    limit = private.max_length if output.positions else None
    return _slot(private, keys, output.submodule, empty, limit, own=own)


def _slot(
    private: Private,
    keys: Sequence[Key],
    place: Path | str,
    like: Tensor,
    limit: int | None,
    **more: Any,
) -> _Slot:
    """A private tensor like ``like``, [0, …], laid out for ``limit`` positions if that is given."""
    shape = like.shape[1:]
    if limit is not None:
        if not shape[0] <= limit:
            raise ValueError(
                f"{keys[0]!r} has {shape[0]} positions in this batch, more than "
                f"max_length={limit}; raise Private(max_length=…), or cut texts to that length"
            )
        more["length"], shape = shape[0], torch.Size((limit, *shape[1:]))
    index = flat_index(for_names(private.coordinates, keys), keys[0], shape, like.device)
    return _Slot(keys[0], place, shape, like.dtype, index, **more)


def _of_owners(
    slots: Sequence[Any], rows: Tensor, max_rows: int | None, private: Private
) -> tuple[_RowsSlot, ...]:
    """The private tensors of owners with rows [batch, K], from those of one row.

    What rows share lies once in z.
    """
    shared, found = private.shared_coordinates, list[_RowsSlot]()
    unknown = [key for key in shared if key not in {slot.key for slot in slots}]
    if unknown:
        raise ValueError(
            f"Private(shared=…) names {unknown}, and private are {[slot.key for slot in slots]}"
        )
    for slot in slots:
        everything = (
            torch.arange(slot.shape.numel(), device=rows.device)
            if slot.index is None
            else slot.index
        )
        common = everything[:0]
        if slot.key in shared:
            chosen = flat_index(shared[slot.key], slot.key, slot.shape, rows.device)
            common = everything if chosen is None else everything[torch.isin(everything, chosen)]
        apart = everything[~torch.isin(everything, common)]
        if (len(apart) and len(common)) and isinstance(slot.place, str):
            raise ValueError(
                f"shared={{{slot.key!r}: …}} must name the whole output of a submodule, without "
                "coordinates"
            )
        for index, is_shared in ((apart, False), (common, True)):
            if len(index):
                part = slot if len(index) == len(everything) else replace(slot, index=index)
                found.append(
                    _RowsSlot(part, max_rows or rows.shape[1], max_rows is None, is_shared)
                )
    return tuple(found)


def _nothing_private(named: Mapping[Key, Input], model: nn.Module | None) -> ValueError:
    """The error if nothing is private; it names the embeddings whose outputs could be."""
    kinds = {
        key: str(given.value.dtype)
        for key, given in named.items()
        if isinstance(given.value, Tensor)
    }
    masks = " except masks, which are not private by default" if "float" in str(kinds) else ""
    modules = () if model is None else model.named_modules()
    embeddings = [
        name for name, module in modules if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    ]
    return ValueError(
        f"nothing private to measure: no input is floating-point{masks} (inputs: {kinds}). Name a "
        "submodule whose output is private, as in Private(submodule='embedding'); the model's "
        f"embeddings are {embeddings}"
    )


def _with_value_at(tree: Tree, path: Path, value: object) -> Tree:
    """A copy of nested tuples, lists and dicts with another value at this path.

    Example:
        >>> _with_value_at(((1, {"a": 2}), {}), (0, 1, "a"), 5)
        ((1, {'a': 5}), {})
    """
    parts: Any = dict(tree) if isinstance(tree, dict) else list(tree)
    parts[path[0]] = _with_value_at(parts[path[0]], path[1:], value) if len(path) > 1 else value
    return tuple(parts) if isinstance(tree, tuple) else parts


def same_tensors(
    private: Sequence[Key], places: Mapping[Key, Input], given: Sequence[Sequence[Key]] | None
) -> list[tuple[Key, ...]]:
    """For each private tensor its names: its own, then those of other places that hold the same
    tensor.

    Args:
        private: The names of what is private.
        places: All inputs and targets.
        given: Which places hold one tensor; None: those with the same memory, or with equal numbers
            in every row that cannot be equal by chance.

    Raises:
        ValueError: A given name is unknown, or a target equals an input perhaps by chance.
    """
    unknown = [key for group in given or () for key in group if key not in places]
    if unknown:
        raise ValueError(
            f"Private(same=…) names {unknown}, and the inputs and targets are {list(places)}"
        )
    groups: list[tuple[Key, ...]] = []
    for key in private:
        if any(key in group for group in groups):
            continue
        others = [other for group in given or () if key in group for other in group if other != key]
        if given is None:
            others = [other for other in places if _are_one(key, other, places)]
        groups.append((key, *others))
    return groups


def _equal(one: Any, other: Any) -> bool:
    """Whether two tensors, [batch, …], hold the same floating-point numbers in every row, in the
    less precise dtype.
    """
    if not all(isinstance(value, Tensor) and value.is_floating_point() for value in (one, other)):
        return False
    first, second = sorted((one.detach(), other.detach()), key=lambda value: value.dtype.itemsize)
    return len(one) == len(other) and torch.equal(first.flatten(), second.flatten().to(first))


def _are_one(key: Key, other: Key, places: Mapping[Key, Input]) -> bool:
    """Whether both hold one tensor.

    Raises if a target equals an input in so few numbers that it may be chance.
    """
    one, two = places[key].value, places[other].value
    if key == other or not _equal(one, two) or not one.numel():
        return False
    kinds = len(one.unique())
    if one.data_ptr() == two.data_ptr() or kinds > 2 or (kinds == 2 and one.numel() >= _ENOUGH):
        return True
    if places[other].path[0] != 2:  # two attributes
        return False
    raise ValueError(
        f"{key!r} and {other!r} hold the same numbers in this batch, too few to show if both are "
        f"one tensor: pass private=Private(same=[({key!r}, {other!r})]) if they are, "
        "Private(same=[]) if not"
    )
