"""The loop's model and optimizer where one recorded pass gives both the sum of clipped gradients and the accounting.

In training the model runs without a graph and hands out its outputs as leaves, so that the loop's ``backward()`` ends
there. At ``optimizer.step()`` the engine compares the gradient that arrived with that of its loss, and computes the
rest in its own pass: no gradient of an example is ever formed by hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from opacus.grad_sample.gsm_base import AbstractGradSampleModule
from torch import Tensor, nn

from torchfil.engine.optimizer import FILOptimizer
from torchfil.utils.trees import tensors_of

__all__ = ["OnePassModule", "OnePassOptimizer"]


class OnePassModule(AbstractGradSampleModule):
    """A module whose outputs are leaves in training.

    Args:
        m: The module.
        **settings: As in Opacus's wrappers.

    Attributes:
        hand_out: Given args, kwargs and outputs of a forward pass in training, gives what the loop receives.
        on_forget: Is told when gradients are thrown away.
        touched: Parameters that received a gradient by another road than the outputs, by name.
        accumulates: Whether several backward passes may go before a step.
    """

    def __init__(self, m: nn.Module, **settings: Any) -> None:
        super().__init__(m, **settings)
        self.hand_out: Callable[[tuple[Any, ...], dict[str, Any], Any], Any] | None = None
        self.on_forget: Callable[[], None] | None = None
        self.touched: set[str] = set()
        self.accumulates = True
        self._handles = [
            p.register_post_accumulate_grad_hook(self._note(name))
            for name, p in m.named_parameters()
            if p.requires_grad
        ]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's outputs; in training cut from the graph.

        Raises:
            ValueError: An input of a training pass requires a gradient, which would not arrive there.
        """
        if self.hand_out is None or not (self._module.training and torch.is_grad_enabled()):
            return self._module(*args, **kwargs)
        if any(leaf.requires_grad for leaf in tensors_of((args, kwargs))):
            raise ValueError(
                "an input of the model requires a gradient, which grad_sample_mode='one-pass' does not bring there: "
                "the loop's backward pass ends at the model's outputs. Detach the input, or use "
                "grad_sample_mode='hooks'."
            )
        with torch.no_grad():
            outputs = self._module(*args, **kwargs)
        return self.hand_out(args, kwargs, outputs)

    def refuse_unless_ready(self, backward_passes: int) -> None:
        """Raise unless the backward passes since the last step ended at the outputs, and are as many as may be."""
        if self.touched:
            raise RuntimeError(
                f"the loss reaches {', '.join(sorted(self.touched))} by another road than the model's output (a "
                "penalty on the weights?). Opacus would drop that part of the gradient silently; use the optimizer's "
                "weight_decay, which needs no privacy, and optimizer.zero_grad() before the next pass. This step was "
                "not taken."
            )
        if not backward_passes:
            raise RuntimeError(
                "optimizer.step() without a backward pass through the outputs of the model that make_private returned "
                "since the last step; call that model in training mode, and backward() on its loss"
            )
        if backward_passes > 1 and not self.accumulates:
            raise ValueError(
                f"{backward_passes} backward passes since the last step: Poisson sampling draws each batch by itself, "
                "so that gradients must not be accumulated over several. Use BatchMemoryManager for large batches."
            )

    def zero_grad(self, set_to_none: bool = False) -> None:
        """As in Opacus."""
        super().zero_grad(set_to_none)
        self.forget()

    def forget(self) -> None:
        """Drop what backward passes have left since the last step."""
        self.touched.clear()
        if self.on_forget is not None:
            self.on_forget()

    def forbid_grad_accumulation(self) -> None:
        """As in Opacus."""
        self.accumulates = False

    def allow_grad_accumulation(self) -> None:
        """As in Opacus."""
        self.accumulates = True

    def remove_hooks(self) -> None:
        """Become a plain wrapper."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.hand_out = None

    def _close(self) -> None:
        super()._close()
        self.remove_hooks()

    def _note(self, name: str) -> Callable[[Tensor], None]:
        return lambda _: self.touched.add(name)


class OnePassOptimizer(FILOptimizer):
    """A :class:`FILOptimizer` that is given sums of clipped gradients instead of per-example gradients.

    Attributes:
        summed: Gives the sum for each of ``params`` over the examples since the last step, and how many backward passes
            they came from.
    """

    summed: Callable[[OnePassOptimizer], tuple[Sequence[Tensor], int]]
    _iterations = 1

    @property
    def grad_samples(self) -> list[Tensor]:
        """None are formed: each parameter has an empty one."""
        return [p.new_zeros(0) for p in self.params]

    @property
    def accumulated_iterations(self) -> int:
        """As in Opacus: backward passes since the last step."""
        return 1 if self._whole_batch else self._iterations

    def clip_and_accumulate(self) -> None:
        """Add the sums to ``p.summed_grad``; a refusal changes nothing."""
        self.drop_released_sums()
        sums, self._iterations = self.summed(self)
        for p, summed in zip(self.params, sums, strict=True):
            p.summed_grad = summed if p.summed_grad is None else p.summed_grad + summed
