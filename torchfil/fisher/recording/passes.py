"""One forward and one backward pass over a batch, with what each layer saw kept as a differentiable graph.

A layer's gradient for one example depends on two things only: its input a_i and the loss's gradient δ_i at its output.
Both are recorded for the whole batch at once, as differentiable functions of the private coordinates z, so that
whatever the layer rules make of them (norms, inner products) can be differentiated with respect to z. The forward half,
:func:`forward_pass`, needs no loss and may run earlier than the rest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils import _pytree as pytree

from torchfil.fisher.gradients import (
    ExampleGradients,
    LossFunction,
    added_to_output,
    call_with,
    differentiable_twice,
    has_active_dropout,
)
from torchfil.fisher.masks import replayed_masks
from torchfil.fisher.recording.watching import WatchedParameters
from torchfil.fisher.rules.base import rule_for
from torchfil.fisher.rules.call import Call, UnsupportedCallError
from torchfil.fisher.rules.generic import GenericRule
from torchfil.fisher.rules.parameters import ParameterRule
from torchfil.fisher.rules.substitutes import FastOnCPU, with_substitutes
from torchfil.utils.trees import flattened, map_tensors, tensors_of

__all__ = ["RecordedForward", "Recording", "UnsupportedCallError", "forward_pass", "holders", "record", "targets_at"]

_overwriting: WeakSet[nn.Module] = WeakSet()  # models that have overwritten what a layer saw
_seen_whole: WeakSet[nn.Module] = WeakSet()  # modules whose parameters cannot be watched one by one
_seen_apart: WeakSet[nn.Module] = WeakSet()  # layers called without the examples, on a range of positions say


@dataclass(frozen=True)
class Recording:
    """The calls of one pass and the losses, [batch], both differentiable with respect to z.

    Attributes:
        calls: In the order of the forward pass, those of parameters outside of layers last.
        losses: ℓ of every example.
        output_gradients: ∂ℓ_i/∂output_i for every tensor of the model's output, in its order; 0 where none leads there.
    """

    calls: tuple[Call, ...]
    losses: Tensor
    output_gradients: tuple[Tensor, ...]


@dataclass
class _Use:
    """One use of a layer in a forward pass, before its δ is known."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor
    versions: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.versions = self._versions()

    def _versions(self) -> list[int]:
        return [tensor._version for tensor in (self.output, *tensors_of((self.args, self.kwargs)))]

    def was_overwritten(self) -> bool:
        return self._versions() != self.versions


@dataclass(frozen=True)
class RecordedForward:
    """A forward pass over a batch at z, with what each layer saw: the half of a recording that needs no loss.

    Attributes:
        gradients: The examples with their model. Their loss and targets do not matter.
        z: [batch, d]; what follows is differentiable with respect to it.
        outputs: What the model gave.
        uses: The layers' calls in order.
        watched: Where parameters outside of layers met the examples.
        once: Whether the model must not be run again: the pass is a training loop's own.
    """

    gradients: ExampleGradients
    z: Tensor
    outputs: Any
    uses: tuple[_Use, ...]
    watched: WatchedParameters
    once: bool = False

    def recording(self, loss_fn: LossFunction, targets: Any, *, differentiable: bool = True) -> Recording:
        """The other half: every example's loss, and the way back to the layers' outputs.

        A model that is seen here to overwrite what a layer saw, or to use a parameter in a way that could not be
        watched, is run once more, in another way; later ones of its passes begin in that way.

        Args:
            loss_fn: ``loss_fn(outputs, targets)``.
            targets: Of the whole batch; a function of z where they are private.
            differentiable: Whether what is recorded is to be differentiated further.

        Raises:
            UnsupportedCallError: What a layer saw is overwritten in spite of that.
        """
        outputs, leaves = tensors_of(self.outputs), self.watched.leaves
        places = [use.output for use in self.uses] + [meeting.rows for meeting in self.watched.meetings]
        ends = [output for output in outputs if output.requires_grad]
        with torch.enable_grad(), differentiable_twice():
            losses = losses_of(loss_fn, self.outputs, targets)
            if self._was_overwritten():
                return self._run_again().recording(loss_fn, targets, differentiable=differentiable)
            to_all = torch.autograd.grad(
                losses.sum(), [*places, *ends, *leaves.values()], create_graph=differentiable, allow_unused=True
            )

        # What still reaches a watched parameter itself has passed by all that was seen of it.
        to_leaves = to_all[len(places) + len(ends) :]
        missed = [name for name, part in zip(leaves, to_leaves, strict=True) if part is not None]
        if missed:
            _seen_whole.update(_holders_of(self.gradients.model, missed))
            return self._again().recording(loss_fn, targets, differentiable=differentiable)

        deltas = [torch.zeros_like(x) if part is None else part for x, part in zip(places, to_all, strict=False)]
        to_ends = iter(to_all[len(places) :])
        at_outputs = tuple(
            torch.zeros_like(x) if not x.requires_grad or (part := next(to_ends)) is None else part.detach()
            for x in outputs
        )
        return Recording(self._calls(deltas), losses, at_outputs)

    def _was_overwritten(self) -> bool:
        return any(use.was_overwritten() for use in self.uses)

    def _run_again(self) -> RecordedForward:
        """With copies of what may be overwritten."""
        model = self.gradients.model
        if model in _overwriting:
            raise UnsupportedCallError(f"{type(model).__name__} or its loss overwrites what a layer saw")
        _overwriting.add(model)
        return self._again()

    def _again(self) -> RecordedForward:
        if self.once:
            raise UnsupportedCallError(f"{type(self.gradients.model).__name__} would have to be run a second time")
        return forward_pass(self.gradients, self.z)

    def _calls(self, deltas: list[Tensor]) -> tuple[Call, ...]:
        gradients = self.gradients
        names = {id(module): name for name, module in gradients.model.named_modules()}
        shared = {id(value): name for name, value in gradients.model.named_parameters()}
        calls = [
            _call(gradients, use, names[id(use.module)], delta, shared)
            for use, delta in zip(self.uses, deltas, strict=False)
        ]
        for meeting, delta in zip(self.watched.meetings, deltas[len(self.uses) :], strict=True):
            parameters = {name: gradients.parameters[name] for name in meeting.names}
            rule = ParameterRule(meeting.value, {name: self.watched.leaves[name] for name in meeting.names})
            own_names = dict(zip(meeting.names, meeting.names, strict=True))
            calls.append(
                Call(", ".join(meeting.names), gradients.model, rule, (), {}, delta, parameters, {}, own_names)
            )
        return tuple(calls)


def record(gradients: ExampleGradients, z: Tensor) -> Recording:
    """Run the batch forward and backward at z, [batch, d], keeping the graph.

    Raises:
        UnsupportedCallError: Active dropout; a module whose output is no tensor or does not run over the examples.
    """
    return forward_pass(gradients, z).recording(gradients.loss_fn, targets_at(gradients, z))


def targets_at(gradients: ExampleGradients, z: Tensor) -> Any:
    """The examples' targets, with z where they are private."""
    return gradients.examples.restore(z, gradients.examples.public)[2]


def forward_pass(gradients: ExampleGradients, z: Tensor, *, once: bool = False) -> RecordedForward:
    """Run the batch forward at z, [batch, d], with ``gradients.parameters`` as weights, keeping the graph.

    The model may be in use elsewhere: its hooks are called as ever, and nothing is left on it, also after an error.
    Dropout uses the examples' masks; a pass that runs once may draw its own.

    Args:
        gradients: The examples with their model.
        z: Their private coordinates.
        once: Whether the model must not be run a second time, in another way, where the first one does not serve.

    Raises:
        UnsupportedCallError: As in :func:`record`; or a second run would be needed.
    """
    for name, module in gradients.model.named_modules():
        if has_active_dropout(module) and not (once or gradients.examples.masks):
            raise UnsupportedCallError(f"{name}: active dropout draws one mask for a batch")
    with torch.enable_grad(), differentiable_twice():
        forward = _forward(gradients, z, once)
    if forward.watched.unserved:
        _seen_whole.update(_holders_of(gradients.model, forward.watched.unserved))
        return forward._again()
    return forward._run_again() if forward._was_overwritten() else forward


def run_alike(model: nn.Module, copy: nn.Module) -> None:
    """From now on passes over ``model`` run in the way that its copy was found to need."""
    if copy in _overwriting:
        _overwriting.add(model)
    for own, other in zip(model.modules(), copy.modules(), strict=True):
        for seen in (_seen_whole, _seen_apart):
            if other in seen:
                seen.add(own)


def _forward(gradients: ExampleGradients, z: Tensor, once: bool) -> RecordedForward:
    examples, model, batch = gradients.examples, gradients.model, len(z)
    clone = model in _overwriting
    args, kwargs, _, offset = examples.restore(z, examples.public)
    uses: list[_Use] = []
    apart: list[nn.Module] = []

    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        if not isinstance(first, Tensor) or first.shape[:1] != (batch,):
            if isinstance(first, Tensor) and module not in _seen_whole | _seen_apart:
                apart.append(module)
                return output
            what = f"shape {tuple(first.shape)}" if isinstance(first, Tensor) else type(first).__name__
            raise UnsupportedCallError(f"a {type(module).__name__} has an output ({what}) that is not one per example")
        constant = not first.requires_grad
        if constant:
            first = first.detach().requires_grad_()
        if clone:
            args, kwargs = map_tensors(Tensor.clone, (args, kwargs))
        uses.append(_Use(module, args, kwargs, first))
        handed_on = first.clone() if clone or constant else first  # a leaf must not be changed in place
        return (handed_on, *output[1:]) if isinstance(output, tuple) else handed_on

    recorded, bare = _layers_and_bare_parameters(gradients)
    watched = WatchedParameters({name: gradients.parameters[name] for name in bare}, (args, kwargs), batch)
    weights = {**gradients.parameters, **gradients.constants, **watched.leaves}
    with contextlib.ExitStack() as stack:
        for module in recorded:  # before the user's hooks, which may change an output
            handle = module.register_forward_hook(hook, with_kwargs=True, prepend=True)
            stack.callback(handle.remove)
        stack.enter_context(added_to_output(model, examples.submodule, offset))
        stack.enter_context(with_substitutes(model))
        if z.device.type == "cpu":
            stack.enter_context(FastOnCPU())
        if watched.leaves:
            stack.enter_context(watched)
        stack.enter_context(replayed_masks(examples.masks))
        outputs = call_with(model, weights, args, kwargs)
    if apart:
        _seen_apart.update(apart)
        if once:
            raise UnsupportedCallError(f"{type(model).__name__} would have to be run a second time")
        return _forward(gradients, z, once)

    # One output may be made from another, and the loss may overwrite it.
    outputs = map_tensors(Tensor.clone if clone else lambda leaf: leaf.view_as(leaf), outputs)
    return RecordedForward(gradients, z, outputs, tuple(uses), watched, once)


def holders(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that hold trainable parameters; attention holds its children's, too, and calls them by itself."""
    inside: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            inside |= {id(child) for child in module.modules() if child is not module}
    for module in model.modules():
        whole = isinstance(module, nn.MultiheadAttention)
        if id(module) not in inside and any(p.requires_grad for p in module.parameters(recurse=whole)):
            yield module


def _layers_and_bare_parameters(gradients: ExampleGradients) -> tuple[list[nn.Module], list[str]]:
    """The modules whose calls are recorded, and the names of the trainable parameters that others hold."""
    recorded: list[nn.Module] = []
    bare: set[int] = set()
    for module in holders(gradients.model):
        ruled = isinstance(module, nn.MultiheadAttention) or not isinstance(rule_for(module), GenericRule)
        if module in _seen_whole or (ruled and module not in _seen_apart):
            recorded.append(module)
        else:
            bare |= {id(value) for value in module.parameters(recurse=isinstance(module, nn.MultiheadAttention))}
    named = gradients.model.named_parameters()
    return recorded, [name for name, value in named if id(value) in bare and name in gradients.parameters]


def _holders_of(model: nn.Module, names: list[str] | set[str]) -> list[nn.Module]:
    """The modules that hold these parameters, under whatever name."""
    wanted = {id(value) for name, value in model.named_parameters() if name in names}
    return [m for m in model.modules() if any(id(value) in wanted for value in m.parameters(recurse=False))]


def losses_of(loss_fn: LossFunction, outputs: Any, targets: Any) -> Tensor:
    """ℓ of every example, [batch]; a tensor without dimensions is the same for all of them."""
    if getattr(loss_fn, "is_models_own", False):
        raise UnsupportedCallError("the model computes its loss itself, as one number for a whole batch")
    leaves, structure = flattened((outputs, targets))
    places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.ndim]

    def one(*rows: Tensor) -> Tensor:
        merged = list(leaves)
        for k, row in zip(places, rows, strict=True):
            merged[k] = row.unsqueeze(0)
        return loss_fn(*pytree.tree_unflatten(merged, structure)).reshape(())

    batched = [leaves[k] for k in places]
    try:
        losses: Tensor = vmap(one)(*batched)
    except RuntimeError:  # a loss that vmap does not know, such as weighted cross-entropy with smoothed labels
        losses = torch.stack([one(*[leaf[i] for leaf in batched]) for i in range(len(batched[0]))])
    return losses


def _call(gradients: ExampleGradients, use: _Use, name: str, delta: Tensor, shared: Mapping[int, str]) -> Call:
    whole = isinstance(use.module, nn.MultiheadAttention)
    parameters: dict[str, Tensor] = {}
    names: dict[str, str] = {}
    for local, value in use.module.named_parameters(recurse=whole):
        canonical = shared[id(value)]
        if canonical in gradients.parameters:
            parameters[local], names[local] = gradients.parameters[canonical], canonical

    prefix = f"{name}." if name else ""
    weights = {**gradients.parameters, **gradients.constants}
    local_weights = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
    constants = {local: value for local, value in local_weights.items() if local not in parameters}
    return Call(name, use.module, rule_for(use.module), use.args, use.kwargs, delta, parameters, constants, names)
