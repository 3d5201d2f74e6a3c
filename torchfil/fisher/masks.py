"""Random numbers that a forward pass draws (mostly dropout's masks): recorded once and replayed in
later passes.

A training loop's forward pass draws masks, and the accounting needs the gradient under exactly
these masks. Later passes (recorded, mapped over examples, one example alone, captured in a CUDA
graph) draw in other shapes and with other kernels. Therefore the numbers themselves are kept. They
are recorded below autograd and vmap, where every random operation of torch appears with its plain
tensors.

The attacker is assumed to know the masks, which can only overstate the leakage (the Fisher
information is convex).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from torchfil.utils.errors import UnsupportedModuleError
from torchfil.utils.given import Args, Kwargs
from torchfil.utils.trees import map_tensors, tensors_of

Result = TypeVar("Result")
Given = Callable[[Tensor, torch.Size], Tensor]  # the numbers of that shape that a mask gives
_MOST_KINDS = 256
_TIMES_ALIKE = 2  # batches of a kind that must draw alike before masks are drawn without the model
_visible_draws = partial(sdpa_kernel, SDPBackend.MATH)  # attention's; fused kernels would hide them
_MASK_SECOND = (torch.ops.aten.native_dropout.default,)  # gives (values, mask)


@dataclass(frozen=True)
class _Draw:
    """How a mask was drawn: with one probability for all numbers, by dropout itself or into a
    tensor.
    """

    probability: float
    dtype: torch.dtype
    by_dropout: bool

    @classmethod
    def of(cls, func: object, args: Args, kwargs: Kwargs) -> _Draw | None:
        """How an operation draws; None if it draws in another way."""
        if func in _MASK_SECOND:
            return cls(float(args[1]), args[0].dtype, by_dropout=True)
        if func is torch.ops.aten.bernoulli_.float and kwargs.get("generator") is None:
            return cls(
                float(args[1] if len(args) > 1 else kwargs.get("p", 0.5)),
                args[0].dtype,
                by_dropout=False,
            )
        return None

    def again(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Another mask of that shape."""
        empty = torch.empty(shape, dtype=self.dtype, device=device)
        if self.by_dropout:
            return torch.native_dropout(empty, self.probability, True)[1]
        return empty.bernoulli_(self.probability)


class DrawnMasks(tuple[Tensor, ...]):
    """The masks of a forward pass, in order.

    Attributes:
        draws: How each was drawn.
    """

    draws: tuple[_Draw | None, ...] = ()

    @classmethod
    def of(cls, masks: Iterable[Tensor], draws: Iterable[_Draw | None]) -> DrawnMasks:
        """These masks, which were drawn in these ways."""
        drawn = cls(masks)
        drawn.draws = tuple(draws)
        return drawn


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.masks: list[Tensor] = []
        self.draws: list[_Draw | None] = []

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if _draws(func, args):
            drawn = result[1] if func in _MASK_SECOND else result
            if not isinstance(drawn, Tensor) or not _gives_all_it_draws(func):
                raise UnsupportedModuleError(
                    f"the random numbers of {func} cannot be seen from outside, so its gradient "
                    "cannot be repeated: use dropout 0 there, or put that part in eval mode"
                )
            self.masks.append(drawn.detach().clone())  # it may be changed in place afterwards
            self.draws.append(_Draw.of(func, args, kwargs or {}))
        return result


class _Replayer(TorchDispatchMode):
    """Inside, draws are replaced by masks: ``given(mask, shape)`` are the numbers that replace a
    draw of that shape.
    """

    def __init__(self, masks: Sequence[Tensor], given: Given) -> None:
        super().__init__()
        self.left = list(masks)
        self.given = given

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _draws(func, args):
            return func(*args, **kwargs)
        if not self.left:
            raise _other_draws("more random numbers than")
        mask = self.left.pop(0)

        # Dropout on a GPU is one operation if gradients are needed, and several if not.
        if func in _MASK_SECOND:
            values, probability = args[0], float(args[1])
            keep = self.given(mask, values.shape).to(torch.bool)
            scale = 1 / (1 - probability) if probability < 1 else 0.0
            # values · keep · scale
            return torch.ops.aten.native_dropout_backward(values, keep, scale), keep

        if func._schema.is_mutable:
            return args[0].copy_(self.given(mask, args[0].shape))
        like = _drawn_nowhere(func, args, kwargs)
        return self.given(mask, like.shape).to(like.dtype, copy=True)


@contextlib.contextmanager
def recorded_masks() -> Iterator[list[Tensor]]:
    """Inside, all random numbers that torch draws are recorded, in order.

    Example:
        >>> x = torch.ones(2, 3)
        >>> with recorded_masks() as masks:
        ...     y = torch.nn.functional.dropout(x, 0.5)
        >>> torch.equal(y, 2 * masks[0])
        True
    """
    with _visible_draws(), _Recorder() as recorder:
        yield recorder.masks


@dataclass(frozen=True)
class _Layout:
    """Where the examples lie in a mask: along ``dim``, with shape[dim] rows each.

    None: all share one mask.
    """

    shape: torch.Size
    dim: int | None

    def by_example(self, mask: Tensor, batch: int, groups: Tensor | None = None) -> Tensor:
        """A batch's mask as [batch, …], where … is the shape that a single example, or group of
        rows, draws.
        """
        if self.dim is None:
            return mask.expand(batch if groups is None else len(groups), *mask.shape)
        by_row = mask.unflatten(self.dim, (batch, self.shape[self.dim])).movedim(self.dim, 0)
        if groups is None:
            return by_row
        return by_row[groups].movedim(1, 1 + self.dim).flatten(1 + self.dim, 2 + self.dim)

    def of_batch(self, batch: int) -> torch.Size:
        """The shape of a mask for this many examples."""
        shape = list(self.shape)
        if self.dim is not None:
            shape[self.dim] *= batch
        return torch.Size(shape)


class MaskLayouts:
    """Arranges the masks of a batch by example: [batch, …], where … is the shape that a single
    example draws.

    The first dimension of a mask need not be the examples: attention draws [batch · heads, …], a
    recurrent model [time, batch, …], and some masks are shared by all. A pass over the first
    example alone shows which it is, once for every kind of batch. If two batches of a kind have
    drawn alike, masks for a third can be drawn without the model (:meth:`again`).
    """

    def __init__(self) -> None:
        # and how often
        self._seen: dict[Hashable, tuple[tuple[_Layout, ...], tuple[_Draw | None, ...], int]] = {}

    def again(self, kind: Hashable, batch: int, device: torch.device) -> DrawnMasks | None:
        """Masks as a forward pass over this many examples would draw them.

        None if that is not known.
        """
        layouts, draws, times = self._seen.get(kind, ((), (), 0))
        if times < _TIMES_ALIKE or len(draws) != len(layouts) or None in draws:
            return None
        pairs = zip(layouts, draws, strict=True)
        drawn = (
            draw.again(layout.of_batch(batch), device) for layout, draw in pairs if draw is not None
        )
        return DrawnMasks.of(drawn, draws)

    def by_example(
        self,
        masks: Sequence[Tensor],
        batch: int,
        kind: Hashable,
        run_first: Callable[[], Any],
        groups: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """The masks by example.

        Args:
            masks: From :func:`recorded_masks`.
            batch: The number of examples.
            kind: Batches of one kind have the same layouts, except for their size.
            run_first: Runs the model on the first example alone.
            groups: If several rows are one example, which these are, [examples, K]; ``batch``
                counts rows then.

        Raises:
            UnsupportedModuleError: Alone, an example draws something else.
        """
        if batch == 1 and groups is None:
            return tuple(mask[None] for mask in masks)
        layouts, before, times = self._seen.get(kind, ((), (), 0))
        if [layout.of_batch(batch) for layout in layouts] != [mask.shape for mask in masks]:
            learned: list[_Layout] = []

            def first_example(mask: Tensor, shape: torch.Size) -> Tensor:
                layout = _Layout(shape, _dim_of_examples(mask.shape, shape, batch))
                if mask.shape != layout.of_batch(batch):
                    raise _other_shape(shape, mask.shape)
                learned.append(layout)
                return layout.by_example(mask, batch)[0]

            with replayed_masks(masks, first_example):
                run_first()
            layouts, times = tuple(learned), 0
            if len(self._seen) >= _MOST_KINDS:
                self._seen.clear()
        draws = getattr(masks, "draws", ())
        self._seen[kind] = layouts, draws, times + 1 if draws == before else 1
        return tuple(
            layout.by_example(mask, batch, groups)
            for layout, mask in zip(layouts, masks, strict=True)
        )


@contextlib.contextmanager
def replayed_masks(masks: Sequence[Tensor], given: Given | None = None) -> Iterator[None]:
    """Inside, torch's random operations return these numbers, in order, in whatever shape a mapped
    pass needs.

    Without masks nothing changes. ``given`` finds the part of a mask that replaces a draw of some
    shape, if the masks are not by example.

    Raises:
        UnsupportedModuleError: The pass draws more or fewer numbers than were recorded.
    """
    if not masks:
        yield
        return
    with _visible_draws(), _Replayer(masks, given or _in_shape) as replayer:
        yield
    if replayer.left:
        raise _other_draws("fewer random numbers than")


def call_and_record_masks(
    function: Callable[[], Result], device: torch.device, *, expected: bool
) -> tuple[Result, tuple[Tensor, ...]]:
    """``function()`` and the masks it draws.

    Recording slows Python down. If no masks are ``expected``, the function is only watched; if it
    draws something anyway, it is called once more from the same random state.
    """
    if not expected:
        watch = RandomWatch(device)
        result = function()
        if not watch.moved():
            return result, ()
        watch.rewind()
    with _visible_draws(), _Recorder() as recorder:
        result = function()
    return result, DrawnMasks.of(recorder.masks, recorder.draws)


class RandomWatch:
    """Whether torch has drawn random numbers on the CPU or on ``device`` since this object was
    made.
    """

    def __init__(self, device: torch.device) -> None:
        self._cpu = torch.default_generator.get_state()
        self._cuda = (
            torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else None
        )
        self._offset = self._cuda.get_offset() if self._cuda is not None else 0

    def moved(self) -> bool:
        """Whether something was drawn."""
        on_gpu = self._cuda is not None and self._cuda.get_offset() != self._offset
        return on_gpu or not torch.equal(torch.default_generator.get_state(), self._cpu)

    def rewind(self) -> None:
        """Go back to the random state at that time."""
        torch.default_generator.set_state(self._cpu)
        if self._cuda is not None:
            self._cuda.set_offset(self._offset)


def _gives_all_it_draws(func: OpOverload) -> bool:
    """Whether its result, or its filled first argument, is all that it draws.

    RReLU stores its slopes elsewhere.
    """
    _first, *others = func._schema.arguments
    return not any(other.alias_info is not None and other.alias_info.is_write for other in others)


def _drawn_nowhere(func: OpOverload, args: Args, kwargs: Kwargs) -> Tensor:
    """The shape and dtype of what ``func`` would return, without drawing anything."""
    args, kwargs = map_tensors(lambda leaf: torch.empty_like(leaf, device="meta"), (args, kwargs))
    given = {
        name: None if name in ("generator", "pin_memory") else value
        for name, value in kwargs.items()
    }
    if not tensors_of((args, kwargs)):
        given["device"] = "meta"
    return func(*args, **given)


def _dim_of_examples(of_batch: torch.Size, of_one: torch.Size, batch: int) -> int | None:
    """The dimension along which a batch's shape is one example's shape times the batch size.

    None: there is none.
    """
    for dim, rows in enumerate(of_one):
        if of_batch == (*of_one[:dim], batch * rows, *of_one[dim + 1 :]):
            return dim
    return None


def _in_shape(mask: Tensor, shape: torch.Size) -> Tensor:
    """The mask, by example, in the shape that a pass needs: mapped over examples, or over all of
    them.
    """
    if shape == mask.shape:
        return mask
    if shape == mask.shape[1:]:  # shared, or of a single example
        return mask[0]
    dim = _dim_of_examples(shape, mask.shape[1:], len(mask))
    if dim is not None:
        return mask.movedim(0, dim).reshape(shape)
    if mask.numel() == shape.numel() and mask.ndim != len(shape):
        return mask.reshape(shape)
    raise _other_shape(shape, mask.shape)


def _other_draws(what: str) -> UnsupportedModuleError:
    return UnsupportedModuleError(
        f"the model draws {what} in the training loop's forward pass, so its dropout cannot be "
        "repeated example by example: does it draw across examples, or only sometimes? Use "
        "dropout 0 there, or put that part in eval mode."
    )


def _other_shape(shape: torch.Size, drawn: torch.Size) -> UnsupportedModuleError:
    return _other_draws(
        f"random numbers of shape {tuple(shape)} where the loop drew {tuple(drawn)}, not as"
    )


def _draws(func: OpOverload, args: Args) -> bool:
    """Whether an operation draws random numbers.

    Into a tensor without values, on the meta device, it draws none.
    """
    empty = bool(args) and isinstance(args[0], Tensor) and args[0].is_meta
    return torch.Tag.nondeterministic_seeded in func.tags and not empty
