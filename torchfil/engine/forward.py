"""The training loop's forward passes: the private model, and what is kept of each call until the step.

In mode "auto" the model's outputs are leaves in training, so that ``backward()`` ends there: the engine compares the
gradient that arrived with that of its loss and computes the rest itself. With Opacus's hooks the model keeps its own
graph, and its passes are only watched.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakSet

import torch
from opacus.grad_sample.gsm_base import AbstractGradSampleModule
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchfil.engine.loader import BatchTracker, make_current, plain
from torchfil.engine.losses import NO_TARGETS, LossInside, ModelCall
from torchfil.engine.measure import StartedGraph
from torchfil.engine.replica import Replica
from torchfil.fisher.gradients import differentiable_twice
from torchfil.fisher.masks import RandomWatch, call_and_record_masks, recorded_masks
from torchfil.fisher.models import without_checkpoints
from torchfil.fisher.precision import autocast_as, autocast_now
from torchfil.fisher.recording import RecordedForward
from torchfil.private import Examples
from torchfil.utils.trees import flattened, map_tensors, tensors_of

__all__ = [
    "ForwardPass",
    "HookedForward",
    "LoopForward",
    "Observer",
    "RecordedModule",
    "is_in_training",
    "without_compiler",
]

logger = logging.getLogger(__name__)

_in_training: WeakSet[nn.Module] = WeakSet()  # modules that are currently private
_FORWARDS_BETWEEN_LOOKS = 128  # passes between checks for a loss that bypasses the outputs, if no graph shows it
_MOST_PENDING = 64  # forward passes without a backward pass (logging in training mode) must not pile up


@dataclass
class ForwardPass:
    """One call of the model in training mode, with the batch at that time.

    Attributes:
        ids: The examples' numbers; None: no batch was read.
        batch: The batch that the loop had read.
        args: The model's positional inputs.
        kwargs: Its keyword inputs; without labels if the model computes its loss itself.
        outputs: The outputs that the loop received, detached, without a loss that is made from the rest; None for a
            step without the loop.
        targets: The labels of the call; NO_TARGETS: the batch's targets.
        masks: The random numbers that the model drew.
        recorded: The graph of this call, if it was recorded, or the CUDA graph that replaced it.
        examples: The private examples of this call, if it was recorded.
        autocast: The dtype of autocast under which the model ran; None: no autocast.
        output_grads: ∂loss/∂output by the output's place, once ``backward()`` has reached it.
        loss_grads: For the place of a loss among the outputs, ∂loss/∂output of the outputs that it was made from.
        places: The outputs' new places after such a loss is left out, by their old places; empty: unchanged.
        whole: Keyword inputs with labels, and outputs with that loss; None: as above.
        divided_by: The number by which the loop has divided its loss, because it accumulates over that many batches.
    """

    ids: list[int] | None
    batch: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: Any
    targets: Any = NO_TARGETS
    masks: tuple[Tensor, ...] = ()
    recorded: RecordedForward | StartedGraph | None = None
    examples: Examples | None = None
    autocast: torch.dtype | None = None
    output_grads: dict[int, Tensor] = field(default_factory=dict)
    loss_grads: Mapping[int, Mapping[int, Tensor]] = field(default_factory=dict)
    places: Mapping[int, int] = field(default_factory=dict)
    whole: tuple[dict[str, Any], Any] | None = None
    divided_by: int = 1

    @classmethod
    def of_call(cls, tracker: BatchTracker, call: ModelCall, outputs: Any, **more: Any) -> ForwardPass:
        """A call of the model that gave these outputs."""
        leaves, structure = flattened(outputs)
        rest = pytree.tree_unflatten(
            [None if k in call.loss_grads else leaf for k, leaf in enumerate(leaves)], structure
        )
        if call.loss_grads:  # some kinds of outputs leave out None, so that places change
            now = {id(leaf): k for k, leaf in enumerate(flattened(rest)[0])}
            more["places"] = {k: now[id(leaf)] for k, leaf in enumerate(leaves) if k not in call.loss_grads}
        whole = (call.labelled, outputs) if call.loss_grads else None
        parts = plain((call.args, call.kwargs, rest, call.targets, whole))
        args, kwargs, rest, targets, whole = map_tensors(Tensor.detach, parts)
        return cls(
            tracker.ids, tracker.batch, args, kwargs, rest, targets, loss_grads=call.loss_grads, whole=whole, **more
        )

    @property
    def num_rows(self) -> int:
        """How many examples went through the model, or would have gone."""
        sizes = [
            len(leaf)
            for leaf in tensors_of((self.args, self.kwargs) if self.outputs is None else self.outputs)
            if leaf.ndim
        ]
        return sizes[0] if sizes else len(self.ids or ())

    @property
    def has_backward(self) -> bool:
        """Whether a backward pass has reached the outputs."""
        return bool(self.output_grads)

    @property
    def ended_at_loss(self) -> bool:
        """Whether the only gradient is at the model's own loss, and this loss cannot be computed from other outputs."""
        if not self.output_grads or any(k in self.loss_grads for k in self.output_grads):
            return False
        leaves = flattened(self.outputs)[0]
        return all(leaves[k].ndim == 0 for k in self.output_grads)

    @property
    def uses_own_loss_alone(self) -> bool:
        """Whether the only gradient is at the model's own loss."""
        return bool(self.output_grads) and (self.ended_at_loss or all(k in self.loss_grads for k in self.output_grads))

    @property
    def output_gradients(self) -> Any:
        """∂loss/∂outputs in the outputs' structure; zero if backward did not reach it, None for anything but a tensor.

        A gradient γ at a loss that was made from other outputs counts at these outputs, as γ ∂loss/∂output.
        """
        total = {self.places.get(k, k): value for k, value in self.output_grads.items() if k not in self.loss_grads}
        for loss, parts in self.loss_grads.items():
            for k, part in parts.items() if loss in self.output_grads else ():
                place = self.places.get(k, k)
                total[place] = total.get(place, 0) + self.output_grads[loss] * part
        leaves, structure = flattened(self.outputs)
        filled = [
            total.get(k, torch.zeros_like(leaf) if isinstance(leaf, Tensor) else None) for k, leaf in enumerate(leaves)
        ]
        return pytree.tree_unflatten(filled, structure)

    def with_labels(self) -> ForwardPass:
        """The same call with its labels as inputs, and the model's loss as the output that counts."""
        if self.whole is None:
            return self
        kwargs, outputs = self.whole
        return replace(self, kwargs=kwargs, outputs=outputs, targets=None, loss_grads={}, places={}, whole=None)


class Observer:
    """Keeps the forward passes of the loop and the gradients that reach their outputs.

    Args:
        tracker: Knows the current batch.

    Attributes:
        pending: Forward passes that have not been used yet.
        touched: The names of parameters that received a gradient other than through the outputs.
        accumulates: Whether several backward passes may go before a step.
    """

    def __init__(self, tracker: BatchTracker) -> None:
        self.tracker = tracker
        self.pending: list[ForwardPass] = []
        self.touched: set[str] = set()
        self.accumulates = True

    def forget_finished(self) -> None:
        """Drop the forward passes whose gradients have been used or discarded."""
        self.pending = [forward for forward in self.pending if not forward.has_backward]
        self.touched.clear()

    def finished(self) -> list[ForwardPass]:
        """The forward passes that went backward and are still kept."""
        return [forward for forward in self.pending if forward.has_backward]

    def check_stepped(self, steps: int) -> None:
        """At the start of a pass over the loader: raise if the loop went backward before, but took no private step."""
        if steps == 0 and len(self.finished()) > 1:
            raise RuntimeError(
                "several backward passes, and no step of the optimizer that make_private returned: step that one, not "
                "the one that you passed; its zero_grad() drops these passes"
            )

    def check_ready(self) -> None:
        """Raise unless the backward passes since the last step ended at the outputs, and there are not too many."""
        finished, parts = self.finished(), self.tracker.parts
        if self.touched:
            names = ", ".join(sorted(self.touched))
            raise RuntimeError(
                f"part of the loss does not go through the model's output: it reached {names} directly (a penalty on "
                "the weights? use the optimizer's weight_decay). Opacus would drop that part silently."
                if finished
                else "the loss did not come from a training pass of the model that make_private returned: its gradient "
                f"reached {names} directly. Call model.train(), and call the returned model."
                " optimizer.zero_grad() drops this gradient. This step was not taken."
            )
        if not finished:
            raise RuntimeError(
                "optimizer.step() without a backward pass through the outputs of the model that make_private returned "
                "since the last step; call that model in training mode, and backward() on its loss"
            )

        # an example's gradient is clipped once, and it may be in one draw only
        batches = [tuple(forward.ids) for forward in finished if forward.ids]
        if len(set(batches)) < len(batches):
            raise ValueError(
                "the model was called several times on one batch since the last step, but each example's gradient must "
                "be clipped once, over all its calls. Pass one module to make_private that calls it and returns all "
                "outputs, with criterion=<function(outputs, targets)>. optimizer.zero_grad() drops these passes. This "
                "step was not taken."
            )
        if parts > 1 and frozenset(number for ids in batches for number in ids) not in self.tracker.draws:
            raise ValueError(
                f"accumulation_steps={parts}, but the {len(finished)} backward passes since the last step are not over "
                f"the {parts} batches of one draw: call optimizer.step() after every {parts}-th batch of the loader, "
                "counted from the start of a pass over it, and use each batch once (no BatchMemoryManager). "
                "optimizer.zero_grad() drops these passes. This step was not taken."
            )
        if parts == 1 and len(finished) > 1 and not self.accumulates:
            raise ValueError(
                f"{len(finished)} backward passes since the last step: Poisson sampling draws each batch "
                "independently, so an example could be in several of them, and the accountant's ε would be wrong. "
                f"Pass accumulation_steps={len(finished)} to make_private, and batches are parts of one draw; or use a "
                "larger batch_size with opacus.utils.batch_memory_manager.BatchMemoryManager."
            )

    def watch(self, call: ModelCall, outputs: Any, **more: Any) -> None:
        """Note a forward pass, and watch for gradients that arrive at its outputs."""
        forward = ForwardPass.of_call(self.tracker, call, outputs, **more)
        leaves = flattened(outputs)[0]
        watched = [(k, leaf) for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        for k, leaf in watched:
            leaf.register_hook(_recorder(forward, k))
        if not watched:
            return

        # Only one recorded graph is kept: a loop that calls the model again before a step would pile them up.
        for earlier in self.pending:
            earlier.recorded = None
        self.pending = [*self.pending[-_MOST_PENDING:], forward]


class LoopForward:
    """The forward pass of a training loop whose ``backward()`` ends at the model's outputs.

    If possible, the pass is recorded for the engine, which then needs no second forward pass; otherwise it runs without
    a graph. Either way the loop gets leaves.

    Args:
        replica: The model.
        observer: Notes the pass.
        record: Returns the forward half of the engine's pass over inputs and the current batch; None: not possible now.
    """

    def __init__(
        self,
        replica: Replica,
        observer: Observer,
        record: Callable[..., tuple[Examples, RecordedForward | StartedGraph] | None],
    ) -> None:
        self.replica = replica
        self.observer = observer
        self._record = record
        self._inside = LossInside(replica)
        self._gives_loss = False  # whether the model returned a loss in its last pass
        self._until_look = 0
        self._draws = False  # whether the model drew random numbers in its last pass

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the loop receives: the outputs as the start of a graph that ends here."""
        self.replica.gather()
        make_current((args, kwargs))  # a batch that the model itself reads
        args, kwargs = self.replica.examples_first((args, kwargs))

        # With a graph, a loss that uses more of the model than its outputs shows up at the parameters.
        device = self.replica.device
        self._until_look = (self._until_look or _FORWARDS_BETWEEN_LOOKS) - 1
        look = self._until_look == _FORWARDS_BETWEEN_LOOKS - 1
        if look:
            self._inside.made_from.clear()  # a model may add a term to its loss during training
        with_graph = look or self._gives_loss or device.type == "cpu"  # where it costs next to nothing

        def plainly() -> Any:
            autocast = autocast_as(autocast_now(device), device)  # casts of weights must not outlive an update
            with torch.set_grad_enabled(with_graph), autocast, differentiable_twice():
                return self.replica.live(*args, **kwargs)

        def recorded() -> Any:
            return None if look or self._gives_loss else self._record(args, kwargs, self.observer.tracker.batch)

        drops = self._draws or self.replica.drops_now()
        result, masks = call_and_record_masks(recorded, device, expected=drops)
        if result is not None:
            examples, forward = result
            outputs = forward.outputs
            if isinstance(forward, RecordedForward):
                forward.z.register_hook(lambda _: self.observer.touched.add("a layer inside the model"))
        else:
            examples = forward = None
            outputs, masks = call_and_record_masks(plainly, device, expected=drops)
        self._draws = bool(masks)
        gave_loss, self._gives_loss = self._gives_loss, any(leaf.ndim == 0 for leaf in tensors_of(outputs))
        if self._gives_loss and not (gave_loss or with_graph):
            return self(args, kwargs)  # once more, with the graph between the loss and the other outputs
        call = self._inside.call(args, kwargs, outputs, masks)
        leaves = map_tensors(_as_leaf, outputs)
        autocast = autocast_now(device)
        self.observer.watch(call, leaves, masks=masks, recorded=forward, examples=examples, autocast=autocast)
        return map_tensors(lambda leaf: leaf.clone() if leaf.requires_grad else leaf, leaves)


class HookedForward:
    """Watches the forward passes of a module that keeps its own graph, as Opacus's hooks need it.

    Args:
        replica: The model.
        observer: Notes the passes.
    """

    def __init__(self, replica: Replica, observer: Observer) -> None:
        self.replica = replica
        self.observer = observer
        self._inside = LossInside(replica)
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
        if all(forward.has_backward for forward in self.observer.pending):
            _forget_failed_passes(module)
        self._watch = RandomWatch(self.replica.device)
        self._open = [without_checkpoints()]  # Opacus's hooks would see a layer twice
        if self._draws or self.replica.drops_now():
            self._open += [differentiable_twice(), recorded_masks()]
        *_, masks = (context.__enter__() for context in self._open)
        self._masks = [] if masks is None else masks

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> Any:
        while self._open:  # also after an error inside the forward pass
            self._open.pop().__exit__(None, None, None)
        if self._watch is not None:
            self._draws = self._watch.moved()
        if outputs is None or not (module.training and torch.is_grad_enabled()):
            return None
        # An output may be made from another; the loss is differentiated with respect to each alone.
        args, kwargs = self.replica.examples_first((args, kwargs))
        call = self._inside.call(args, kwargs, outputs, tuple(self._masks))
        apart = map_tensors(lambda leaf: leaf.view_as(leaf) if leaf.requires_grad else leaf, outputs)
        autocast = autocast_now(self.replica.device)
        self.observer.watch(call, apart, masks=tuple(self._masks), autocast=autocast)
        return apart


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
                f"the part {name!r} of the model was compiled separately (torch.compile); do not compile it"
            )
        compiled |= part._compiled_call_impl is not None
        part._compiled_call_impl = None
    if compiled:
        logger.info("the private model is the original of the compiled one; the engine records its passes itself")
    return original


def _forget_failed_passes(module: nn.Module) -> None:
    """Make Opacus's hooks forget passes that ended half-way in an error.

    The hooks count forward passes that still await their backward pass. If one never comes, they would no longer
    deliver a parameter's gradients.
    """
    counted = [p for p in module.parameters() if getattr(p, "_forward_counter", 0)]
    for p in counted:
        p._forward_counter = 0  # type: ignore[attr-defined]
        if hasattr(p, "_current_grad_sample"):
            del p._current_grad_sample
    for part in module.modules() if counted else ():
        activations = part.__dict__.get("activations")
        if isinstance(activations, list):
            activations.clear()


def _recorder(forward: ForwardPass, k: int) -> Callable[[Tensor], None]:
    def record(gradient: Tensor) -> None:
        earlier = forward.output_grads.get(k)  # from another backward pass through the same output
        forward.output_grads[k] = gradient.detach() if earlier is None else earlier + gradient.detach()

    return record


def _as_leaf(leaf: Tensor) -> Tensor:
    floating = leaf.is_floating_point() or leaf.is_complex()
    return leaf.detach().requires_grad_() if floating else leaf
