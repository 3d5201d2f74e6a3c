"""A Lightning module as a model whose outputs are what its ``training_step`` passes to the loss function.

For modules without their own ``forward``, or whose ``training_step`` calls several parts one after the other. The model
is everything up to the call of a loss of ``torch.nn.functional``, and its inputs are the whole batch. The
``training_step`` itself then runs as written, except for the loss's first argument, which is that model's output.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchfil.engine.loader import plain, split_batch
from torchfil.private import Private
from torchfil.utils.trees import tensors_of

__all__ = ["StepRedirected", "private_but_targets"]

_LOSSES = {
    F.cross_entropy,
    F.nll_loss,
    F.binary_cross_entropy_with_logits,
    F.binary_cross_entropy,
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.kl_div,
    F.poisson_nll_loss,
    F.soft_margin_loss,
    F.multilabel_soft_margin_loss,
    F.multi_margin_loss,
}
_STEPS_BETWEEN_LOOKS = 128  # between checks whether part of the loss does not go through the outputs
_REMEDY = (
    "Define forward(), which computes the model's outputs, and call it in training_step, once: loss(self(x), y); or "
    "name the only submodule that training_step calls: FILCallback(module=…)."
)


class StepRedirected:
    """Sends a module's ``training_step`` through the engine.

    Args:
        module: The LightningModule.
        own: Names of attributes that belong to Lightning and not to the model.

    Attributes:
        twin: The module for the engine: another object with the same parts, whose ``forward`` takes a batch's items
            and returns the loss's first argument.
    """

    def __init__(self, module: nn.Module, own: frozenset[str]) -> None:
        self.module = module
        self._own = own | {"training_step"}
        kind: Any = type(f"{type(module).__name__}UpToItsLoss", (_UpToItsLoss, type(module)), {})
        self.twin: nn.Module = kind.__new__(kind)
        vars(self.twin).update({name: None if name in own else value for name, value in vars(module).items()})
        self._until_look = 0

    def to(self, private: Any) -> None:
        """From now on, ``training_step`` goes through the private module made from :attr:`twin`."""
        plain_step: Callable[..., Any] = self.module.training_step  # type: ignore[assignment]

        @functools.wraps(plain_step)
        def training_step(batch: Any, *more: Any, **named: Any) -> Any:
            if not (self.module.training and torch.is_grad_enabled()):  # a validation_step that calls it
                return plain_step(batch, *more, **named)
            vars(self.twin).update({name: value for name, value in vars(self.module).items() if name not in self._own})
            vars(self.twin)["_in_list"] = isinstance(batch, tuple | list)
            outputs = private(**batch) if isinstance(batch, Mapping) else private(*_items(batch))

            # The step itself runs without a graph up to its loss; now and then with one, to find parts of the loss
            # that depend on the parameters but not through the outputs.
            self._until_look = (self._until_look or _STEPS_BETWEEN_LOOKS) - 1
            look = self._until_look == _STEPS_BETWEEN_LOOKS - 1
            with torch.set_grad_enabled(look), _Substitute(outputs) as loss:
                result = plain_step(batch, *more, **named)
            if loss.calls != 1:
                raise ValueError(
                    f"training_step calls a loss of torch.nn.functional {loss.calls} times; exactly one call must mark "
                    f"where the model ends. {_REMEDY}"
                )
            return result

        vars(self.module)["training_step"] = training_step

    def undo(self) -> None:
        """Restore the module's own ``training_step``."""
        vars(self.module).pop("training_step", None)


def private_but_targets(batch: Any, batch_to_inputs: Callable[[Any], tuple[Any, Any]] | None) -> Private | None:
    """What is private by default if a model takes a whole batch: every floating-point item except the targets.

    None if the targets are not floating-point numbers: then the engine's default is the same.

    Example:
        >>> private_but_targets([torch.zeros(2, 3), torch.zeros(2)], None).inputs
        [0]
    """
    batch = plain(batch)
    inputs, target = split_batch(batch, batch_to_inputs)
    if not isinstance(target, Tensor) or not target.is_floating_point():
        return None
    items = dict(batch.items() if isinstance(batch, Mapping) else enumerate(_items(batch)))
    floating = [k for k, v in items.items() if isinstance(v, Tensor) and v.is_floating_point()]
    also_inputs = {id(leaf) for leaf in tensors_of(inputs)}  # an autoencoder's target
    return Private(inputs=[k for k in floating if items[k] is not target or id(target) in also_inputs])


class _UpToItsLoss:
    """Mixed into a LightningModule's class: ``forward`` is ``training_step`` up to its loss, and logs nothing."""

    training_step: Callable[..., Any]
    _in_list = True  # whether a batch is a list of its items

    def forward(self, *items: Any, **by_name: Any) -> Tensor:
        """The loss's first argument, [batch, …]."""
        batch = by_name or (list(items) if self._in_list else items[0])
        try:
            with _StopAtLoss():
                self.training_step(batch, 0) if _takes_index(self.training_step) else self.training_step(batch)
        except _LossReached as reached:
            return reached.output
        raise ValueError(
            f"training_step calls no loss of torch.nn.functional, so the end of the model cannot be found. {_REMEDY}"
        )

    def log(self, *_: Any, **__: Any) -> None:
        """Do nothing: the step itself logs."""

    log_dict = print = toggle_optimizer = untoggle_optimizer = log

    def optimizers(self, *_: Any, **__: Any) -> Any:
        """An object that does nothing: the step itself has the optimizer."""
        return _Inert()


class _Inert:
    def __getattr__(self, _name: str) -> Callable[..., None]:
        return lambda *_, **__: None


class _LossReached(BaseException):
    """A BaseException, because a training_step may catch every Exception."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = output


class _StopAtLoss(TorchFunctionMode):
    """Raises :class:`_LossReached` with a loss function's first argument when the loss is called."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _LOSSES:
            raise _LossReached(args[0] if args else kwargs["input"])
        return func(*args, **(kwargs or {}))


class _Substitute(TorchFunctionMode):
    """Calls a loss function with another first argument, and builds a graph from there until ``backward()``."""

    def __init__(self, outputs: Tensor) -> None:
        super().__init__()
        self.outputs = outputs
        self.calls = 0
        self._went_backward = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        self._went_backward = self._went_backward or func is Tensor.backward  # a manual step follows
        if func not in _LOSSES or self._went_backward:
            return func(*args, **kwargs)
        self.calls += 1
        torch.set_grad_enabled(True)  # the mode returns to what it was at the end of the step
        kwargs.pop("input", None)
        return func(self.outputs, *args[1:], **kwargs)


def _items(batch: Any) -> tuple[Any, ...]:
    return tuple(batch) if isinstance(batch, tuple | list) else (batch,)


def _takes_index(step: Callable[..., Any]) -> bool:
    code = getattr(step, "__func__", step).__code__
    return code.co_argcount > 2 or bool(code.co_flags & 4)
