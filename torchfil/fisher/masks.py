"""Random numbers that a forward pass draws (dropout's masks, above all): recorded once, given again to later passes.

A training loop's forward pass draws masks; what is accounted for must be the gradient under those very masks. The
passes that follow (recorded, mapped over examples, one example alone, captured in a CUDA graph) draw in other shapes
and with other kernels. So the numbers themselves are kept, below autograd and below vmap, where every random operation
of torch is seen with its plain tensors.

The attacker is taken to know the masks, which can only overstate the leakage (the Fisher information is convex).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchfil.utils.errors import UnsupportedModuleError
from torchfil.utils.trees import map_tensors, tensors_of

__all__ = ["RandomWatch", "call_and_record_masks", "recorded_masks", "replayed_masks"]

Result = TypeVar("Result")
_MASK_SECOND = (torch.ops.aten.native_dropout.default,)  # gives (values, mask)


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.masks: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            drawn = result[1] if func in _MASK_SECOND else result
            if not isinstance(drawn, Tensor) or not _gives_all_it_draws(func):
                raise _cannot_be_repeated(func)
            self.masks.append(drawn.detach().clone())  # it may be changed in place afterwards
        return result


class _Replayer(TorchDispatchMode):
    def __init__(self, masks: Sequence[Tensor]) -> None:
        super().__init__()
        self.left = list(masks)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if not self.left:
            raise _other_draws("more random numbers than")
        mask = self.left.pop(0)

        # Dropout on a GPU is one operation where gradients are wanted, and several where they are not.
        if func in _MASK_SECOND:
            values, probability = args[0], float(args[1])
            keep = _in_shape(mask, values.shape)
            return values * keep.to(values.dtype) / (1 - probability), keep.to(torch.bool)

        if func._schema.is_mutable:
            return args[0].copy_(_in_shape(mask, args[0].shape))
        like = _drawn_nowhere(func, args, kwargs)
        return _in_shape(mask, like.shape).to(like.dtype, copy=True)


@contextlib.contextmanager
def recorded_masks() -> Iterator[list[Tensor]]:
    """Inside, all that torch draws at random is noted, in order.

    Example:
        >>> x = torch.ones(2, 3)
        >>> with recorded_masks() as masks:
        ...     y = torch.nn.functional.dropout(x, 0.5)
        >>> torch.equal(y, 2 * masks[0])
        True
    """
    with _Recorder() as recorder:
        yield recorder.masks


@contextlib.contextmanager
def replayed_masks(masks: Sequence[Tensor]) -> Iterator[None]:
    """Inside, torch's random operations give these numbers, in order, whatever shape a mapped pass has them in.

    Without masks nothing changes.

    Raises:
        UnsupportedModuleError: The pass draws more or fewer numbers than were recorded.
    """
    if not masks:
        yield
        return
    with _Replayer(masks) as replayer:
        yield
    if replayer.left:
        raise _other_draws("fewer random numbers than")


def call_and_record_masks(
    function: Callable[[], Result], device: torch.device, *, expected: bool
) -> tuple[Result, tuple[Tensor, ...]]:
    """``function()`` and the masks it draws.

    Recording slows Python down, so that where none are ``expected`` the function is only watched: if it has drawn
    something nonetheless, it is called once more from the same random state.
    """
    if not expected:
        watch = RandomWatch(device)
        result = function()
        if not watch.moved():
            return result, ()
        watch.rewind()
    with recorded_masks() as masks:
        result = function()
    return result, tuple(masks)


class RandomWatch:
    """Tells whether torch has drawn random numbers on the CPU or on ``device`` since this was made."""

    def __init__(self, device: torch.device) -> None:
        self._cpu = torch.default_generator.get_state()
        self._cuda = torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else None
        self._offset = self._cuda.get_offset() if self._cuda is not None else 0

    def moved(self) -> bool:
        """Whether something was drawn."""
        on_gpu = self._cuda is not None and self._cuda.get_offset() != self._offset
        return on_gpu or not torch.equal(torch.default_generator.get_state(), self._cpu)

    def rewind(self) -> None:
        """Go back to the state of then."""
        torch.default_generator.set_state(self._cpu)
        if self._cuda is not None:
            self._cuda.set_offset(self._offset)


def _gives_all_it_draws(func: Any) -> bool:
    """Whether all that it draws is what it gives, or fills its first argument with; RReLU's slopes go elsewhere."""
    _first, *others = func._schema.arguments
    return not any(other.alias_info is not None and other.alias_info.is_write for other in others)


def _drawn_nowhere(func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """What ``func`` would give, in shape and dtype alone: no generator moves."""
    args, kwargs = map_tensors(lambda leaf: torch.empty_like(leaf, device="meta"), (args, kwargs))
    given = {name: None if name in ("generator", "pin_memory") else value for name, value in kwargs.items()}
    if not tensors_of((args, kwargs)):
        given["device"] = "meta"
    like: Tensor = func(*args, **given)
    return like


def _in_shape(mask: Tensor, shape: torch.Size) -> Tensor:
    """The mask as a mapped or a plain pass wants it: the examples' own in another shape, or a shared one repeated."""
    if mask.numel() == shape.numel():
        return mask.reshape(shape)
    if mask.numel() and shape.numel() == shape[0] * mask.numel():
        return mask.expand(shape[0], *mask.shape).reshape(shape)
    raise _other_draws(f"random numbers of shape {tuple(shape)} where the loop drew {tuple(mask.shape)}, not as")


def _other_draws(what: str) -> UnsupportedModuleError:
    return UnsupportedModuleError(
        f"the model draws {what} in the training loop's forward pass, so that its dropout cannot be repeated example "
        "by example: does it draw across examples, or by chance? Use dropout of 0 there, or put that part in eval mode."
    )


def _cannot_be_repeated(func: Any) -> UnsupportedModuleError:
    return UnsupportedModuleError(
        f"the model calls {func}, whose random numbers cannot be seen from outside, so that its gradient cannot be "
        "repeated for the accounting. Use dropout of 0 there, or put that part in eval mode."
    )
