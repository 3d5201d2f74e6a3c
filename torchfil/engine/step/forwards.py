"""What goes through the model in the training loop: inputs, outputs, masks, and the gradient at the outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchfil.engine.loader import BatchTracker, make_current, plain
from torchfil.engine.replica import Replica
from torchfil.fisher.gradients import differentiable_twice
from torchfil.fisher.masks import RandomWatch, call_and_record_masks, recorded_masks
from torchfil.fisher.recording import RecordedForward
from torchfil.private import Examples
from torchfil.utils.trees import map_tensors

__all__ = ["ForwardPass", "HookedForward", "LoopForward", "Observer"]

_FORWARDS_BETWEEN_LOOKS = 128  # at whether a loss goes round the outputs, where the graph would not show it
_MOST_PENDING = 64  # forward passes that never go backward (logging in training mode) must not pile up


@dataclass
class ForwardPass:
    """One call of the model in training mode, with the batch that was current then.

    Attributes:
        ids: The examples' numbers; None: no batch was read.
        batch: The batch that the loop had read.
        args: The model's positional inputs.
        kwargs: Its keyword inputs.
        outputs: What the loop was given, detached; None for a step that is taken without the loop.
        masks: The random numbers that the model drew.
        recorded: The graph of this very call, where it was recorded.
        examples: What was private in it, where it was recorded.
        gradients: ∂loss/∂output by the output's place, once ``backward()`` has been there.
        divided_by: What the loop has divided its loss by, accumulating over so many batches.
    """

    ids: list[int] | None
    batch: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: Any
    masks: tuple[Tensor, ...] = ()
    recorded: RecordedForward | None = None
    examples: Examples | None = None
    gradients: dict[int, Tensor] = field(default_factory=dict)
    divided_by: int = 1

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
    """Keeps the forward passes of the loop and the gradients that come back to their outputs.

    Args:
        tracker: Knows the current batch.

    Attributes:
        pending: Forward passes that were not used yet.
        touched: Parameters that received a gradient by another way than the outputs, by name.
        accumulates: Whether several backward passes may go before a step.
    """

    def __init__(self, tracker: BatchTracker) -> None:
        self.tracker = tracker
        self.pending: list[ForwardPass] = []
        self.touched: set[str] = set()
        self.accumulates = True

    def forget_finished(self) -> None:
        """Drop the forward passes whose gradients have been used or thrown away."""
        self.pending = [forward for forward in self.pending if not forward.went_backward]
        self.touched.clear()

    def finished(self) -> list[ForwardPass]:
        """The forward passes that went backward and were not forgotten yet."""
        return [forward for forward in self.pending if forward.went_backward]

    def check_ready(self) -> None:
        """Raise unless the backward passes since the last step ended at the outputs, and are as many as may be."""
        if self.touched:
            raise RuntimeError(
                f"part of the loss does not go through the model's output: it reached {', '.join(sorted(self.touched))}"
                " directly (a penalty on the weights?). Opacus would drop that part of the gradient silently; use the "
                "optimizer's weight_decay, which needs no privacy, and optimizer.zero_grad() before the next pass. "
                "This step was not taken."
            )
        backward_passes = len(self.finished())
        if not backward_passes:
            raise RuntimeError(
                "optimizer.step() without a backward pass through the outputs of the model that make_private returned "
                "since the last step; call that model in training mode, and backward() on its loss"
            )
        if self.tracker.parts > 1:
            self._check_whole_draw()
        elif backward_passes > 1 and not self.accumulates:
            raise ValueError(
                f"{backward_passes} backward passes since the last step: Poisson sampling draws each batch by itself, "
                "so that an example could be in several of them, and the accountant's ε would be wrong. For batches "
                f"{backward_passes} times as large pass accumulation_steps={backward_passes} to make_private: batches "
                "are then the parts of one draw, and this loop is right. Or make the DataLoader with "
                f"{backward_passes} times its batch_size b, and step after each part that fits: with "
                "BatchMemoryManager(data_loader=loader, max_physical_batch_size=b, optimizer=optimizer) as loader: … "
                "loss.backward(); optimizer.step(); optimizer.zero_grad() (opacus.utils.batch_memory_manager)."
            )

    def _check_whole_draw(self) -> None:
        """Raise unless the examples since the last step are those of one draw."""
        ids = frozenset(number for forward in self.finished() for number in forward.ids or ())
        if ids not in self.tracker.draws:
            parts = self.tracker.parts
            raise ValueError(
                f"accumulation_steps={parts}, but the {len(self.finished())} backward passes since the last step are "
                f"not over the {parts} batches of one draw: call optimizer.step() after every {parts}-th batch of the "
                "loader, counted from the start of a pass over it, and use each batch once (no BatchMemoryManager). "
                "optimizer.zero_grad() forgets these passes. This step was not taken."
            )

    def watch(self, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any, **more: Any) -> None:
        """Note a forward pass, and from now on the gradients that arrive at its outputs."""
        detached = map_tensors(Tensor.detach, plain((args, kwargs, outputs)))
        forward = ForwardPass(self.tracker.ids, self.tracker.batch, *detached, **more)
        watched = [(k, leaf) for k, leaf in enumerate(pytree.tree_leaves(outputs)) if _requires_grad(leaf)]
        for k, leaf in watched:
            leaf.register_hook(_recorder(forward, k))
        if not watched:
            return

        # One recorded graph is held at a time: a loop that calls the model again before it steps would pile them up.
        for earlier in self.pending:
            earlier.recorded = None
        self.pending = [*self.pending[-_MOST_PENDING:], forward]


class LoopForward:
    """The forward pass of a training loop whose ``backward()`` ends at the model's outputs.

    The pass is recorded for the engine where that is possible (no second forward pass is needed then), and runs without
    a graph where not. Either way the loop gets leaves.

    Args:
        replica: The model.
        observer: Where the pass is noted.
        record: Gives the recorded pass over inputs and the current batch; None where it cannot be recorded now.
    """

    def __init__(
        self,
        replica: Replica,
        observer: Observer,
        record: Callable[[tuple[Any, ...], dict[str, Any], Any], tuple[Examples, RecordedForward] | None],
    ) -> None:
        self.replica = replica
        self.observer = observer
        self._record = record
        self._until_look = 0
        self._draws = False  # whether the model drew random numbers in its last pass

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the loop receives: the outputs as the start of a graph that ends here."""
        make_current((args, kwargs))  # a batch that the model itself will read

        # With a graph, a loss that uses more of the model than its outputs shows at the parameters.
        device = self.replica.device
        self._until_look = (self._until_look or _FORWARDS_BETWEEN_LOOKS) - 1
        look = self._until_look == _FORWARDS_BETWEEN_LOOKS - 1
        with_graph = look or device.type == "cpu"  # where it costs next to nothing

        def plainly() -> Any:
            with torch.set_grad_enabled(with_graph), differentiable_twice():
                return self.replica.live(*args, **kwargs)

        def recorded() -> Any:
            return None if look else self._record(args, kwargs, self.observer.tracker.batch)

        drops = self._draws or self.replica.drops_now()
        result, masks = call_and_record_masks(recorded, device, expected=drops)
        if result is not None:
            examples, forward = result
            outputs = forward.outputs
            forward.z.register_hook(lambda _: self.observer.touched.add("a layer inside the model"))
        else:
            examples = forward = None
            outputs, masks = call_and_record_masks(plainly, device, expected=drops)
        self._draws = bool(masks)
        leaves = map_tensors(_as_leaf, outputs)
        self.observer.watch(args, kwargs, leaves, masks=masks, recorded=forward, examples=examples)
        return map_tensors(lambda leaf: leaf.clone() if leaf.requires_grad else leaf, leaves)


class HookedForward:
    """Watches the forward passes of a module that keeps its own graph, as Opacus's hooks need it.

    Args:
        replica: The model.
        observer: Where passes are noted.
    """

    def __init__(self, replica: Replica, observer: Observer) -> None:
        self.replica = replica
        self.observer = observer
        self._open: list[Any] = []  # the recording of masks, while a forward pass runs
        self._masks: list[Tensor] = []
        self._watch: RandomWatch | None = None
        self._draws = True  # whether the model drew random numbers in its last pass; recording slows Python down
        module = replica.live
        self._handles = [
            module.register_forward_pre_hook(self._before_forward, prepend=True),
            module.register_forward_hook(self._after_forward, with_kwargs=True, always_call=True),
        ]

    def remove(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
        self.observer.pending.clear()

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        self._masks, self._watch = [], None
        if not (module.training and torch.is_grad_enabled()):
            return
        self._watch = RandomWatch(self.replica.device)
        if self._draws or self.replica.drops_now():
            self._open = [recorded_masks(), differentiable_twice()]
            self._masks, _ = (context.__enter__() for context in self._open)

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> Any:
        while self._open:  # also after an error inside the forward pass
            self._open.pop().__exit__(None, None, None)
        if self._watch is not None:
            self._draws = self._watch.moved()
        if outputs is None or not (module.training and torch.is_grad_enabled()):
            return None
        # An output may be made from another: the loss's derivative is by each alone.
        apart = map_tensors(lambda leaf: leaf.view_as(leaf) if leaf.requires_grad else leaf, outputs)
        self.observer.watch(args, kwargs, apart, masks=tuple(self._masks))
        return apart


def _recorder(forward: ForwardPass, k: int) -> Callable[[Tensor], None]:
    def record(gradient: Tensor) -> None:
        earlier = forward.gradients.get(k)  # of another backward pass through the same output
        forward.gradients[k] = gradient.detach() if earlier is None else earlier + gradient.detach()

    return record


def _requires_grad(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _as_leaf(leaf: Tensor) -> Tensor:
    floating = leaf.is_floating_point() or leaf.is_complex()
    return leaf.detach().requires_grad_() if floating else leaf
