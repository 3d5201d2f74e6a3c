"""What goes through the model in the training loop: inputs, outputs, and the gradient at the outputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchfil.engine.loader import BatchTracker, plain
from torchfil.utils.trees import map_tensors

__all__ = ["ForwardPass", "Observer"]

_MOST_PENDING = 64  # forward passes that never go backward (logging in training mode) must not pile up


@dataclass
class ForwardPass:
    """One call of the model in training mode, with the batch that was current then."""

    ids: list[int] | None
    batch: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: Any
    gradients: dict[int, Tensor] = field(default_factory=dict)

    @property
    def went_backward(self) -> bool:
        """Whether a backward pass has reached the outputs."""
        return bool(self.gradients)

    @property
    def output_gradients(self) -> Any:
        """∂loss/∂outputs in the outputs' structure; zero where backward did not reach, None where no tensor stands."""
        leaves, structure = pytree.tree_flatten(self.outputs)
        filled = [
            self.gradients.get(k, torch.zeros_like(leaf) if isinstance(leaf, Tensor) else None)
            for k, leaf in enumerate(leaves)
        ]
        return pytree.tree_unflatten(filled, structure)


class Observer:
    """Watches a module's forward passes in training mode and the gradients that come back to its outputs.

    Args:
        module: The user's module (what Opacus wraps).
        tracker: Knows the current batch.
    """

    def __init__(self, module: nn.Module, tracker: BatchTracker) -> None:
        self.tracker = tracker
        self.pending: list[ForwardPass] = []
        self._handle = module.register_forward_hook(self._after_forward, with_kwargs=True)

    def remove(self) -> None:
        """Stop watching."""
        self._handle.remove()
        self.pending.clear()

    def forget_finished(self) -> None:
        """Drop the forward passes whose gradients have been used or thrown away."""
        self.pending = [forward for forward in self.pending if not forward.went_backward]

    def finished(self) -> list[ForwardPass]:
        """The forward passes that went backward and were not forgotten yet."""
        return [forward for forward in self.pending if forward.went_backward]

    def hand_out(self, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> Any:
        """The outputs of a forward pass without a graph, as the start of one that ends here; the pass is watched."""
        started = map_tensors(_as_leaf, outputs)
        self._watch(args, kwargs, started)
        return map_tensors(lambda leaf: leaf.clone() if leaf.requires_grad else leaf, started)

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> Any:
        if not (module.training and torch.is_grad_enabled()):
            return None
        apart = map_tensors(lambda leaf: leaf.view_as(leaf) if leaf.requires_grad else leaf, outputs)
        self._watch(args, kwargs, apart)  # an output may be made from another: the loss's derivative is by each alone
        return apart

    def _watch(self, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        detached = map_tensors(Tensor.detach, plain((args, kwargs, outputs)))
        forward = ForwardPass(self.tracker.ids, self.tracker.batch, *detached)
        watched = [(k, leaf) for k, leaf in enumerate(pytree.tree_leaves(outputs)) if _requires_grad(leaf)]
        for k, leaf in watched:
            leaf.register_hook(_recorder(forward, k))
        if watched:
            self.pending = [*self.pending[-_MOST_PENDING:], forward]


def _recorder(forward: ForwardPass, k: int) -> Any:
    def record(gradient: Tensor) -> None:
        earlier = forward.gradients.get(k)  # of another backward pass through the same output
        forward.gradients[k] = gradient.detach() if earlier is None else earlier + gradient.detach()

    return record


def _requires_grad(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _as_leaf(leaf: Tensor) -> Tensor:
    floating = leaf.is_floating_point() or leaf.is_complex()
    return leaf.detach().requires_grad_() if floating else leaf
