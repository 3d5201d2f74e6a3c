"""The training loop's forward passes: the private model, and what is kept of each call until the
step.

In mode "auto" the model's outputs are leaves in training, so that ``backward()`` ends there: the
engine compares the gradient that arrived with that of its loss and computes the rest itself. With
Opacus's hooks the model keeps its own graph, and its passes are only watched.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any
from weakref import WeakSet

import torch
from opacus.grad_sample.gsm_base import AbstractGradSampleModule
from torch import Tensor, nn

from torchfil.engine.loader import BatchTracker, is_target_name, make_current, plain
from torchfil.engine.losses import NO_TARGETS
from torchfil.engine.replica import Replica, buffers_kept
from torchfil.fisher import models
from torchfil.fisher.gradients import differentiable_twice
from torchfil.fisher.masks import RandomWatch, call_and_record_masks, recorded_masks, replayed_masks
from torchfil.fisher.recording import RecordedForward
from torchfil.private import Examples, decoder_tokens
from torchfil.utils.given import Args, Kwargs, Outputs, Targets
from torchfil.utils.trees import form_of, map_tensors, tensors_of

logger = logging.getLogger(__name__)

in_training: WeakSet[nn.Module] = WeakSet()  # modules that a RecordedModule is currently training
# passes between checks for a loss that bypasses the outputs, if no graph shows it
_FORWARDS_BETWEEN_LOOKS = 128
_HOW_TO_DROP = "optimizer.zero_grad() drops these passes. This step was not taken."
_SAME = 1e-4  # how much rounding may change the outputs without labels, relative to their size


@dataclass(frozen=True)
class StartedGraph:
    """The forward half of a captured pass, which a training loop has run.

    Attributes:
        captured: The pass.
        replays: How many replays of graphs that share its memory there had been at that time.
        outputs: The model's outputs.
    """

    captured: object
    replays: int
    outputs: Outputs


@dataclass(eq=False)
class ForwardPass:
    """One call of the model in training mode, with the batch at that time.

    Attributes:
        ids: The examples' numbers; None: no batch was read.
        batch: The batch that the loop had read.
        args: The model's positional inputs.
        kwargs: Its keyword inputs; without labels if the model computes its loss itself.
        outputs: The outputs that the loop received, detached, without a loss that is made from the
            rest; None for a step without the loop.
        targets: The labels of the call; NO_TARGETS: the batch's targets.
        masks: The random numbers that the model drew.
        recorded: The graph of this call, if it was recorded, or the CUDA graph that replaced it.
        examples: The private examples of this call, if it was recorded.
        autocast: The dtype of autocast under which the model ran; None: no autocast.
        output_grads: ∂loss/∂output by the output's place among the tensors that the loop received,
            once ``backward()`` has reached it.
        loss_grads: For the place of a loss that is made from the rest, ∂loss/∂output by these
            outputs' places.
        whole: Keyword inputs with labels, and outputs with that loss; None: as above.
        number: Its place among the passes of the loop.
    """

    ids: list[int] | None
    batch: object
    args: Args
    kwargs: Kwargs
    outputs: Outputs
    targets: Targets = NO_TARGETS
    masks: tuple[Tensor, ...] = ()
    recorded: RecordedForward | StartedGraph | None = None
    examples: Examples | None = None
    autocast: torch.dtype | None = None
    output_grads: dict[int, Tensor] = field(default_factory=dict)
    loss_grads: Mapping[int, Mapping[int, Tensor]] = field(default_factory=dict)
    whole: tuple[Kwargs, Any] | None = None
    number: int = 0

    @property
    def num_rows(self) -> int:
        """How many examples went through the model, or would have gone."""
        for leaf in tensors_of((self.args, self.kwargs) if self.outputs is None else self.outputs):
            if leaf.ndim:
                return len(leaf)
        return len(self.ids or ())

    def take_recorded(self) -> RecordedForward | StartedGraph | None:
        """The graph of this call, which is then held by the caller alone."""
        recorded, self.recorded = self.recorded, None
        return recorded

    def add_gradient(self, k: int, gradient: Tensor) -> None:
        """Add ∂loss/∂output k of a backward pass."""
        earlier = self.output_grads.get(k)  # from another backward pass through the same output
        self.output_grads[k] = gradient.detach() if earlier is None else earlier + gradient.detach()

    @property
    def ended_at_loss(self) -> bool:
        """Whether the only gradient is at the model's own loss, and this loss cannot be computed
        from other outputs.
        """
        leaves = tensors_of(self.outputs) if self.output_grads and not self.loss_grads else []
        return bool(leaves) and all(leaves[k].ndim == 0 for k in self.output_grads)

    @property
    def output_gradients(self) -> list[Tensor]:
        """∂loss/∂output for every tensor of the outputs; zero if backward did not reach it.

        A gradient γ at a loss that was made from other outputs counts at these outputs, as γ
        ∂loss/∂output.
        """
        total: dict[int, Any] = {
            k: value for k, value in self.output_grads.items() if k not in self.loss_grads
        }
        for loss in self.loss_grads.keys() & self.output_grads.keys():
            for k, part in self.loss_grads[loss].items():
                total[k] = total.get(k, 0) + self.output_grads[loss] * part
        leaves = tensors_of(self.outputs)
        places = [k for k in range(len(leaves) + len(self.loss_grads)) if k not in self.loss_grads]
        return [
            total[k] if k in total else torch.zeros_like(leaf)
            for k, leaf in zip(places, leaves, strict=True)
        ]

    def with_labels(self) -> ForwardPass:
        """The same call with its labels as inputs, and the model's loss as the output that
        counts.
        """
        if self.whole is None:
            return self
        kwargs, outputs = self.whole
        return replace(
            self, kwargs=kwargs, outputs=outputs, targets=None, loss_grads={}, whole=None
        )


class Observer:
    """Keeps the forward passes of the loop and the gradients that reach their outputs.

    Args:
        tracker: Knows the current batch.

    Attributes:
        waiting: Forward passes whose backward pass can still come: the graph that the loop holds
            keeps them alive.
        touched: The names of parameters that received a gradient other than through the outputs.
        accumulates: Whether several backward passes may go before a step.
    """

    def __init__(self, tracker: BatchTracker) -> None:
        self.tracker = tracker
        self.waiting: WeakSet[ForwardPass] = WeakSet()
        self._finished: list[ForwardPass] = []
        self._numbers = itertools.count()
        self.touched: set[str] = set()
        self.accumulates = True
        self._steps = 0  # private steps when the last pass over the loader began

    def noting(self, name: str) -> Callable[[Tensor], None]:
        """A hook that notes a gradient at this parameter.

        It holds only the set. torch keeps a parameter's hooks where the garbage collector cannot
        look, so a hook that holds the parameter, or a run that does, would never be freed.
        """
        touched = self.touched
        return lambda _: touched.add(name)

    def forget_finished(self) -> None:
        """Drop the forward passes whose gradients have been used or discarded."""
        self._finished.clear()
        self.touched.clear()

    def finished(self) -> list[ForwardPass]:
        """The forward passes that went backward since the last step, in the order of the calls."""
        return sorted(self._finished, key=attrgetter("number"))

    def check_stepped(self, steps: int) -> None:
        """At the start of a pass over the loader: raise if the loop went backward in the last, but
        took no step.
        """
        if steps == self._steps and len(self.finished()) > 1:
            raise RuntimeError(
                "several backward passes, and no step of the optimizer that make_private "
                "returned: step that one; its zero_grad() drops these passes"
            )
        self._steps = steps

    def check_not_accumulated(self, finished: Sequence[ForwardPass]) -> None:
        """Raise if several passes went backward since the last step, and Poisson sampling has drawn
        each on its own.
        """
        if len(finished) > 1 and self.tracker.parts == 1 and not self.accumulates:
            raise ValueError(
                f"{len(finished)} backward passes since the last step of the optimizer that "
                "make_private returned: Poisson sampling draws each batch on its own, so an "
                "example could be in several. Step that optimizer, pass accumulation_steps=, or "
                "use Opacus's BatchMemoryManager."
            )

    def check_ready(
        self, finished: Sequence[ForwardPass], training: bool, *, by_opacus: bool
    ) -> None:
        """Raise unless the backward passes since the last step ended at the outputs, and there are
        not too many.

        ``training`` says whether the model is in training mode. With Opacus's hooks the gradients
        may go anywhere, and Opacus counts the passes.
        """
        parts = self.tracker.parts
        if self.touched and not training:
            raise RuntimeError(
                f"The model is in eval mode; call model.train() before the loop. {_HOW_TO_DROP}"
            )
        if self.touched:
            names = ", ".join(sorted(self.touched))
            direct = (
                "part of the loss does not go through the model's output: it reached "
                f"{names} directly"
            )
            remedy = "For a penalty use weight_decay; otherwise call the returned model."
            raise RuntimeError(f"{direct}. {remedy} {_HOW_TO_DROP}")
        if not finished:
            raise RuntimeError(
                "optimizer.step() without a backward pass through the model that make_private "
                "returned; call that model in training mode, and backward() on its loss"
            )
        if by_opacus:
            return

        # an example's gradient is clipped once, and it may be in one draw only
        batches = [tuple(forward.ids) for forward in finished if forward.ids]
        several = (
            "the model was called several times on one batch since the last step, and clips once"
        )
        remedy = (
            "Pass one module to make_private that calls it and returns all outputs, with "
            "criterion=."
        )
        if len(set(batches)) != len(batches):
            raise ValueError(f"{several}. {remedy} {_HOW_TO_DROP}")
        together = (
            {self.tracker.example_of(row) for ids in batches for row in ids} if parts > 1 else None
        )
        if together is not None and frozenset(together) not in self.tracker.draws:
            counted = (
                f"{len(finished)} backward passes are not over the {parts} batches of one draw"
            )
            remedy = (
                f"use each batch once, and call optimizer.step() after every {parts}-th of "
                "a pass over the loader"
            )
            raise ValueError(f"{counted} (accumulation_steps={parts}): {remedy}. {_HOW_TO_DROP}")
        self.check_not_accumulated(finished)

    def watch(self, forward: ForwardPass, outputs: object) -> None:
        """Note a forward pass, and watch for gradients that arrive at its outputs, as the loop
        receives them.
        """
        watched = [(k, leaf) for k, leaf in enumerate(tensors_of(outputs)) if leaf.requires_grad]
        for k, leaf in watched:
            leaf.register_hook(partial(self._add_gradient, forward, k))
        if not watched:
            return

        # Only one recorded graph is kept: a loop that calls the model again before a step would
        # pile them up.
        for earlier in (*self.waiting, *self._finished):
            earlier.recorded = None
        forward.number = next(self._numbers)
        self.waiting.add(forward)

    def _add_gradient(self, forward: ForwardPass, k: int, gradient: Tensor) -> None:
        if forward in self.waiting:
            self.waiting.discard(forward)
            self._finished.append(forward)
        forward.add_gradient(k, gradient)


class LossInside:
    """Separates labels and loss in calls of a model that computes its loss itself.

    Analyses each kind of call once.

    A loss with a term that does not go through the outputs is used as it is, on each example alone.

    Args:
        replica: The model.

    Attributes:
        made_from: By kind of call, for the place of each loss the places of the outputs that it is
            made from; empty if labels and losses cannot be separated. Cleared, it is analysed
            again.
    """

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.made_from: dict[Hashable, dict[int, list[int]]] = {}

    def losses_in(self, outputs: object) -> list[int]:
        """The places of losses among the outputs: single numbers with a graph, alone or with other
        outputs.
        """
        return [
            k for k, leaf in enumerate(tensors_of(outputs)) if leaf.requires_grad and leaf.ndim == 0
        ]

    def run_live(self, args: Args, kwargs: Kwargs) -> tuple[Any, tuple[Tensor, ...]]:
        """The model's outputs, with their graph, and the masks that it drew.

        Buffers and random state are kept.
        """

        def run() -> Any:
            kept, checkpoints = buffers_kept(self.replica.live), models.without_checkpoints()
            with torch.enable_grad(), differentiable_twice(), kept, checkpoints:
                return self.replica.live(*args, **kwargs)

        with self.replica.random_state_kept():
            return call_and_record_masks(run, self.replica.device, expected=True)

    def forward_pass(
        self,
        tracker: BatchTracker,
        args: Args,
        kwargs: Kwargs,
        outputs: Outputs,
        masks: tuple[Tensor, ...],
    ) -> ForwardPass:
        """The call on the current batch that gave these outputs (with their graph), with labels and
        loss separated.

        Inputs are plain trees.
        """
        losses, loss_grads = self.losses_in(outputs), {}
        without, targets = self.without_labels(kwargs) if losses else (kwargs, NO_TARGETS)
        if targets is not NO_TARGETS:
            kind = (form_of((args, kwargs)), form_of(outputs))
            if kind not in self.made_from:
                copied, weights = self._outputs_of_copy(args, kwargs)
                sources = {k: _sources(copied, weights, k) for k in losses}
                separable = all(sources.values()) and self._gives_the_same(
                    args, without, outputs, masks
                )
                self.made_from[kind] = sources if separable else {}
            leaves = tensors_of(outputs)
            loss_grads = {
                k: dict(
                    zip(places, _gradients([leaves[k]], [leaves[j] for j in places]), strict=True)
                )
                for k, places in self.made_from[kind].items()
            }
        args, kwargs, outputs = map_tensors(Tensor.detach, (args, kwargs, plain(outputs)))
        autocast = models.autocast_now(self.replica.device)
        forward = ForwardPass(
            tracker.ids, tracker.batch, args, kwargs, outputs, masks=masks, autocast=autocast
        )
        if loss_grads:  # otherwise labels stay among the inputs
            own = {id(leaf) for k, leaf in enumerate(tensors_of(outputs)) if k in loss_grads}
            forward.outputs = map_tensors(lambda leaf: None if id(leaf) in own else leaf, outputs)
            forward.kwargs, forward.targets = map_tensors(Tensor.detach, (without, targets))
            forward.loss_grads, forward.whole = loss_grads, (kwargs, outputs)
        return forward

    def without_labels(self, kwargs: Kwargs) -> tuple[Kwargs, Any]:
        """Keyword inputs without labels, and the labels: a tensor or a dict of several.

        NO_TARGETS: there are none.
        """
        labels = {
            key: value
            for key, value in kwargs.items()
            if is_target_name(key) and isinstance(value, Tensor)
        }
        if not labels:
            return kwargs, NO_TARGETS
        rest = {key: value for key, value in kwargs.items() if key not in labels}

        # A decoder reads the labels, shifted one place to the right.
        if "labels" in labels and rest.get("decoder_input_ids") is None:
            tokens = decoder_tokens(self.replica.live, labels["labels"])
            rest |= {} if tokens is None else {"decoder_input_ids": tokens}
        return rest, next(iter(labels.values())) if len(labels) == 1 else labels

    def _outputs_of_copy(self, args: Args, kwargs: Kwargs) -> tuple[list[Tensor], list[Tensor]]:
        """The copy's outputs, with a graph whose backward pass calls nobody's hooks, and its
        trainable weights.
        """
        self.replica.follow()
        trainable, constant = models.trainable_and_constant(self.replica.live)
        weights = {name: value.clone().requires_grad_() for name, value in trainable.items()}
        weights |= {name: value.clone() for name, value in constant.items()}
        alone = self.replica.random_state_kept()
        with torch.enable_grad(), differentiable_twice(), models.without_checkpoints(), alone:
            outputs = models.call_with(self.replica.template, weights, args, kwargs)
        return tensors_of(outputs), [weights[name] for name in trainable]

    def _gives_the_same(
        self,
        args: Args,
        without: Kwargs,
        outputs: Outputs,
        masks: tuple[Tensor, ...],
    ) -> bool:
        """Whether the other outputs are the same without labels."""
        live: nn.Module = self.replica.live
        try:
            with torch.no_grad(), differentiable_twice(), buffers_kept(live), replayed_masks(masks):
                others = tensors_of(live(*args, **without))
        except torch.OutOfMemoryError:
            raise
        except Exception:  # it needs its labels
            return False
        return _alike(others, [leaf.detach() for leaf in tensors_of(outputs) if leaf.ndim])


def _sources(leaves: list[Tensor], weights: list[Tensor], place: int) -> list[int]:
    """The places of the outputs that a loss is made from: one of them, or all that it depends on;
    [] if there is more.

    It is made from them if it depends on the weights through them alone: ∂loss/∂w = Σ ∂loss/∂output
    · ∂output/∂w. A penalty on the weights, or an auxiliary loss of something that is not returned,
    has another path to them.
    """
    others = [k for k, leaf in enumerate(leaves) if leaf.requires_grad and leaf.ndim]
    at_others = dict(
        zip(others, _gradients([leaves[place]], [leaves[k] for k in others]), strict=True)
    )
    reached = [k for k in others if bool(at_others[k].any())]
    at_weights = _gradients([leaves[place]], weights)
    tolerance = 3e-2 if leaves[place].dtype in models.REDUCED else _SAME
    for places in [*([k] for k in reached), reached]:
        through = _gradients([leaves[k] for k in places], weights, [at_others[k] for k in places])
        if _alike(through, at_weights, tolerance):
            return places
    return []


def _gradients(
    of: list[Tensor], inputs: list[Tensor], weights: list[Tensor] | None = None
) -> tuple[Tensor, ...]:
    """∂⟨of, weights⟩/∂input for each input; zeros if it does not depend on it."""
    if not (of and inputs):
        return tuple(map(torch.zeros_like, inputs))
    with torch.enable_grad():
        return torch.autograd.grad(
            of, inputs, weights, retain_graph=True, allow_unused=True, materialize_grads=True
        )


def _alike(some: Sequence[Tensor], others: Sequence[Tensor], tolerance: float = _SAME) -> bool:
    """Whether they have the same number and shapes, and differ by at most the tolerance times the
    largest number.
    """
    if [a.shape for a in some] != [b.shape for b in others]:
        return False
    sizes = [float(b.abs().max()) if b.numel() else 0.0 for b in others]
    allowed = [tolerance * (size + 1e-2 * max(sizes)) for size in sizes]
    pairs = zip(some, others, allowed, strict=True)
    return all(torch.allclose(a, b, tolerance, within, equal_nan=True) for a, b, within in pairs)


class LoopForward:
    """The forward pass of a training loop whose ``backward()`` ends at the model's outputs.

    If possible, the pass is recorded for the engine, which then needs no second forward pass;
    otherwise it runs without a graph. Either way the loop gets leaves.

    Args:
        replica: The model.
        observer: Notes the pass.
        record: Returns the examples, the forward half of the engine's pass over inputs and the
            current batch, and its outputs in the order of the batch's rows; None: not possible now.
    """

    def __init__(self, replica: Replica, observer: Observer, record: Callable[..., Any]) -> None:
        self.replica, self.observer, self._record = replica, observer, record
        self._inside = LossInside(replica)
        self._gives_loss = False  # whether the model returned a loss in its last pass
        self._until_look = 0
        self._draws = False  # whether the model drew random numbers in its last pass

    @torch.enable_grad()
    def __call__(self, args: Args, kwargs: Kwargs) -> Any:
        """What the loop receives: the outputs as the start of a graph that ends here."""
        self.replica.gather()
        self.replica.follow()
        self.observer.check_not_accumulated(self.observer.finished())
        make_current((args, kwargs))  # a batch that the model itself reads
        args, kwargs = self.replica.examples_first((args, kwargs))
        inputs: tuple[Any, Any] = plain((args, kwargs))

        # With a graph, a loss that uses more of the model than its outputs shows up at the
        # parameters.
        device = self.replica.device
        self._until_look = (self._until_look or _FORWARDS_BETWEEN_LOOKS) - 1
        look = self._until_look == _FORWARDS_BETWEEN_LOOKS - 1
        if look:
            self._inside.made_from.clear()  # a model may add a term to its loss during training
        # where it costs next to nothing
        with_graph = look or self._gives_loss or device.type == "cpu"

        def plainly() -> Any:
            # casts of weights must not outlive an update
            autocast = models.autocast_as(models.autocast_now(device), device)
            # from the loss to the other outputs
            differentiated = with_graph and any(map(is_target_name, kwargs))
            checkpoints = (
                models.without_checkpoints() if differentiated else contextlib.nullcontext()
            )
            with torch.set_grad_enabled(with_graph), autocast, differentiable_twice(), checkpoints:
                return self.replica.live(*args, **kwargs)

        def recorded() -> Any:
            return (
                None
                if look or self._gives_loss
                else self._record(*inputs, self.observer.tracker.batch)
            )

        drops = self._draws or self.replica.drops_now()
        result, masks = call_and_record_masks(recorded, device, expected=drops)
        if result is not None:
            examples, forward, outputs = result
            if isinstance(forward, RecordedForward):
                forward.z.register_hook(self.observer.noting("a layer inside the model"))
        else:
            examples = forward = None
            outputs, masks = call_and_record_masks(plainly, device, expected=drops)
        self._draws = bool(masks)
        gave_loss, self._gives_loss = (
            self._gives_loss,
            any(leaf.ndim == 0 for leaf in tensors_of(outputs)),
        )
        if self._gives_loss and not (gave_loss or with_graph):
            # once more, with the graph between the loss and the other outputs
            return self(args, kwargs)
        call = self._inside.forward_pass(self.observer.tracker, *inputs, outputs, masks)
        call.recorded, call.examples = forward, examples
        leaves = map_tensors(
            lambda x: x.detach().requires_grad_(x.is_floating_point() or x.is_complex()), outputs
        )
        self.observer.watch(call, leaves)
        return map_tensors(lambda leaf: leaf.clone() if leaf.requires_grad else leaf, leaves)


class HookedForward:
    """Watches the forward passes of a module that keeps its own graph, as Opacus's hooks need it.

    Args:
        replica: The model.
        observer: Notes the passes.
    """

    def __init__(self, replica: Replica, observer: Observer) -> None:
        self.replica, self.observer = replica, observer
        self._inside = LossInside(replica)
        self._open = contextlib.ExitStack()  # the recording of masks, while a forward pass runs
        self._masks: list[Tensor] = []
        self._watch: RandomWatch | None = None
        # whether the model drew random numbers in its last pass; recording slows Python down
        self._draws = True
        module = replica.live
        self._handles = [
            module.register_forward_pre_hook(self._before_forward, prepend=True),
            module.register_forward_hook(self._after_forward, with_kwargs=True, always_call=True),
        ]

    def remove(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
        self.observer.forget_finished()

    def _before_forward(self, module: nn.Module, args: object) -> None:
        self._masks, self._watch = [], None
        if not (module.training and torch.is_grad_enabled()):
            return
        if not self.observer.waiting:
            _forget_failed_passes(module)
        self._watch = RandomWatch(self.replica.device)
        # Opacus's hooks would see a layer twice
        self._open.enter_context(models.without_checkpoints())
        if self._draws or self.replica.drops_now():
            self._open.enter_context(differentiable_twice())
            self._masks = self._open.enter_context(recorded_masks())

    def _after_forward(self, module: nn.Module, args: Args, kwargs: Kwargs, outputs: object) -> Any:
        self._open.close()  # also after an error inside the forward pass
        if self._watch is not None:
            self._draws = self._watch.moved()
        if outputs is None or not (module.training and torch.is_grad_enabled()):
            return None
        # An output may be made from another; the loss is differentiated with respect to each alone.
        inputs: tuple[Any, Any] = plain(self.replica.examples_first((args, kwargs)))
        call = self._inside.forward_pass(
            self.observer.tracker, *inputs, outputs, tuple(self._masks)
        )
        apart = map_tensors(
            lambda leaf: leaf.view_as(leaf) if leaf.requires_grad else leaf, outputs
        )
        self.observer.watch(call, apart)
        return apart


class RecordedModule(AbstractGradSampleModule):
    """A module whose outputs are leaves in training.

    Args:
        m: The module.
        loop_forward: Runs its forward passes in training; None: it is a plain wrapper. A deep copy
            is a plain wrapper, so that an average of the weights (``AveragedModel``, timm's
            ``ModelEmaV2``) can be kept next to the private model: it is made from released weights,
            and leaks nothing more.
        **settings: As in Opacus's wrappers.
    """

    def __init__(self, m: nn.Module, *, loop_forward: LoopForward | None, **settings: Any) -> None:
        super().__init__(m, **settings)
        self._loop_forward = loop_forward
        self._handles: list[Any] = []
        if loop_forward is None:
            return
        self._observer = loop_forward.observer
        # a compiled call must not trace the engine's passes
        self._run = torch.compiler.disable(loop_forward.__call__)
        in_training.add(m)
        self._handles = [
            p.register_post_accumulate_grad_hook(self._observer.noting(name))
            for part in {m, loop_forward.replica.live}  # two if the module is sharded
            for name, p in part.named_parameters()
            if p.requires_grad
        ]

    def forward(self, *args: Any, **kwargs: Any) -> Outputs:
        """The module's outputs; in training, cut off from the graph.

        Raises:
            ValueError: An input of a training pass requires a gradient, which would never arrive.
        """
        if self._loop_forward is None or not (self._module.training and torch.is_grad_enabled()):
            return self._module(*args, **kwargs)
        if any(leaf.requires_grad for leaf in tensors_of((args, kwargs))):
            raise ValueError(
                "an input of the model requires a gradient, but backward() ends at the model's "
                "outputs: detach the input, or use grad_sample_mode='hooks'"
            )
        return self._run(args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> RecordedModule:
        """A plain wrapper of a copy of the module: its passes do not belong to the run."""
        module = copy.deepcopy(self._module, memo)
        return RecordedModule(
            module,
            loop_forward=None,
            batch_first=self.batch_first,
            loss_reduction=self.loss_reduction,
        ).train(self.training)

    def __reduce_ex__(self, protocol: object) -> Any:
        """As for any module, but refused while it belongs to a run, which cannot be pickled.

        Raises:
            TypeError: It still trains.
        """
        if self._loop_forward is not None:
            raise TypeError(
                "the private model belongs to a run, which cannot be pickled: save "
                "model._module.state_dict(), or the run with engine.save_checkpoint"
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
        in_training.discard(self._module)

    def _close(self) -> None:
        super()._close()
        self.remove_hooks()


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
                f"the part {name!r} of the model was compiled separately (torch.compile); do not "
                "compile it"
            )
        compiled |= part._compiled_call_impl is not None
        part._compiled_call_impl = None
    if compiled:
        logger.info(
            "the private model is the original of the compiled one; the engine records its passes "
            "itself"
        )
    return original


def _forget_failed_passes(module: nn.Module) -> None:
    """Make Opacus's hooks forget passes that ended half-way in an error.

    The hooks count forward passes that still await their backward pass. If one never comes, they
    would no longer deliver a parameter's gradients.
    """
    for p in module.parameters():
        if getattr(p, "_forward_counter", 0):
            p._forward_counter = 0  # type: ignore[attr-defined]
            vars(p).pop("_current_grad_sample", None)
    for part in module.modules():
        if isinstance(part.__dict__.get("activations"), list):
            part.__dict__["activations"].clear()
