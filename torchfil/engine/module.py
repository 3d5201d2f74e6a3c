"""The loop's model in grad_sample_mode="auto": its outputs are leaves in training, so that ``backward()`` ends there.

At ``optimizer.step()`` the engine compares the gradient that arrived with that of its loss and computes the rest
itself: no hooks form per-example gradients, and ``p.grad_sample`` stays empty.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from opacus.grad_sample.gsm_base import AbstractGradSampleModule
from torch import Tensor, nn

from torchfil.engine.step.forwards import LoopForward
from torchfil.utils.trees import tensors_of

__all__ = ["RecordedModule", "is_in_training", "without_compiler"]

logger = logging.getLogger(__name__)

_in_training: WeakSet[nn.Module] = WeakSet()  # modules that are currently private


def is_in_training(module: nn.Module) -> bool:
    """Whether a :class:`RecordedModule` is currently training this module."""
    return module in _in_training


def without_compiler(module: nn.Module) -> nn.Module:
    """The original of a module that ``torch.compile`` has wrapped; compilation in place is undone.

    Raises:
        ValueError: Only a part of it is compiled.
    """
    original = getattr(module, "_orig_mod", module)
    compiled = original is not module
    for name, part in original.named_modules():
        if hasattr(part, "_orig_mod"):
            raise ValueError(
                f"the part {name!r} of the model was compiled separately (torch.compile), and the engine cannot look "
                "inside. Do not compile it."
            )
        compiled |= part._compiled_call_impl is not None
        part._compiled_call_impl = None
    if compiled:
        logger.info(
            "the model was compiled (torch.compile); the private model is the original, whose passes the engine "
            "records itself"
        )
    return original


class RecordedModule(AbstractGradSampleModule):
    """A module whose outputs are leaves in training.

    Args:
        m: The module.
        loop_forward: Runs its forward passes in training; None: it is a plain wrapper. A deep copy is a plain wrapper,
            so that an average of the weights (``AveragedModel``, timm's ``ModelEmaV2``) can be kept next to the
            private model: it is made from released weights, and leaks nothing more.
        **settings: As in Opacus's wrappers.
    """

    def __init__(self, m: nn.Module, *, loop_forward: LoopForward | None, **settings: Any) -> None:
        super().__init__(m, **settings)
        self._loop_forward = loop_forward
        self._handles: list[Any] = []
        if loop_forward is None:
            return
        self._observer = loop_forward.observer
        self._run = torch.compiler.disable(loop_forward.__call__)  # a compiled call must not trace the engine's passes
        _in_training.add(m)
        self._handles = [
            p.register_post_accumulate_grad_hook(self._note(name))
            for part in {m, loop_forward.replica.live}  # two if the module is sharded
            for name, p in part.named_parameters()
            if p.requires_grad
        ]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's outputs; in training, cut off from the graph.

        Raises:
            ValueError: An input of a training pass requires a gradient, which would never arrive.
        """
        if self._loop_forward is None or not (self._module.training and torch.is_grad_enabled()):
            return self._module(*args, **kwargs)
        if any(leaf.requires_grad for leaf in tensors_of((args, kwargs))):
            raise ValueError(
                "an input of the model requires a gradient, but with grad_sample_mode='auto' none arrives there: the "
                "loop's backward pass ends at the model's outputs. Detach the input, or use grad_sample_mode='hooks'."
            )
        return self._run(args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> RecordedModule:
        """A plain wrapper of a copy of the module: its passes do not belong to the run."""
        module = copy.deepcopy(self._module, memo)
        return RecordedModule(
            module, loop_forward=None, batch_first=self.batch_first, loss_reduction=self.loss_reduction
        ).train(self.training)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As for any module, but refused while it belongs to a run, which cannot be pickled.

        Raises:
            TypeError: It still trains.
        """
        if self._loop_forward is not None:
            raise TypeError(
                "the private model belongs to a run, which cannot be pickled. To keep the weights: "
                "torch.save(model._module.state_dict(), path); to keep the run, too: engine.save_checkpoint"
            )
        return super().__reduce_ex__(protocol)

    def zero_grad(self, set_to_none: bool = False) -> None:
        """As in Opacus."""
        super().zero_grad(set_to_none)
        if self._loop_forward is not None:
            self._observer.forget_finished()

    def forbid_grad_accumulation(self) -> None:
        """As in Opacus."""
        self._observer.accumulates = False

    def allow_grad_accumulation(self) -> None:
        """As in Opacus."""
        self._observer.accumulates = True

    def remove_hooks(self) -> None:
        """Become a plain wrapper."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._loop_forward = None
        _in_training.discard(self._module)

    def _close(self) -> None:
        super()._close()
        self.remove_hooks()

    def _note(self, name: str) -> Callable[[Tensor], None]:
        return lambda _: self._observer.touched.add(name)
