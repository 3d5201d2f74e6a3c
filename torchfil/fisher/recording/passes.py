"""One forward and one backward pass over a batch that keep every layer's inputs and output gradients, differentiably.

A layer's gradient for one example depends only on its input a_i and on the loss's gradient δ_i at its output. Both are
recorded for the whole batch at once, as differentiable functions of the private coordinates z. Whatever the layer rules
compute from them (norms, inner products) can therefore be differentiated with respect to z. The forward half,
:func:`forward_pass`, needs no loss and may run earlier than the rest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.func import vmap

from torchfil.fisher.gradients import ExampleGradients, LossFunction
from torchfil.fisher.masks import replayed_masks
from torchfil.fisher.models import call_with, has_active_dropout
from torchfil.fisher.precision import autocast_now, wide
from torchfil.fisher.recording.uses import Layouts, Use, Uses, by_example, layouts_of
from torchfil.fisher.recording.watching import WatchedParameters
from torchfil.fisher.rules.attention import attends_in_steps
from torchfil.fisher.rules.base import Call, LayerRule, UnsupportedCallError, rule_for
from torchfil.fisher.rules.generic import GenericRule
from torchfil.fisher.rules.parameters import ParameterRule, ReparametrisedRule
from torchfil.fisher.rules.substitutes import FastFunctions, listening, reports_uses, with_substitutes
from torchfil.private import added_to_outputs
from torchfil.utils.trees import map_tensors, tensors_of

__all__ = [
    "RecordedForward",
    "Recording",
    "UnsupportedCallError",
    "forward_pass",
    "holders",
    "learn_layouts",
    "losses_of",
    "record",
    "run_alike",
    "targets_at",
    "watch_parameters",
]

_overwriting: WeakSet[nn.Module] = WeakSet()  # models that overwrite a layer's input or output
_seen_whole: WeakSet[nn.Module] = WeakSet()  # modules whose parameters cannot be watched one by one
_seen_apart: WeakSet[nn.Module] = WeakSet()  # layers called without the examples, for example on a range of positions
_layouts: WeakKeyDictionary[nn.Module, Layouts] = WeakKeyDictionary()  # of models with examples not first


@dataclass(frozen=True)
class Recording:
    """The calls of one pass and the losses, [batch], both differentiable with respect to z.

    Attributes:
        calls: In the order of the forward pass; calls for parameters outside layers come last.
        losses: ℓ of every example.
        output_gradients: ∂ℓ_i/∂output_i for every tensor of the model's output, in order; 0 if not used.
    """

    calls: tuple[Call, ...]
    losses: Tensor
    output_gradients: tuple[Tensor, ...]


@dataclass(frozen=True)
class RecordedForward:
    """A forward pass over a batch at z, with the layers' inputs: the half of a recording that needs no loss.

    Attributes:
        gradients: The examples with their model. Their loss and targets do not matter.
        z: [batch, d]; everything below is differentiable with respect to it.
        outputs: The model's outputs.
        uses: The layers' calls in order.
        watched: Where parameters outside layers met the examples.
        once: Whether the model must not be run again, because this is the training loop's own pass.
    """

    gradients: ExampleGradients
    z: Tensor
    outputs: Any
    uses: tuple[Use, ...]
    watched: WatchedParameters
    once: bool = False

    def recording(self, loss_fn: LossFunction, targets: Any, *, differentiable: bool = True) -> Recording:
        """The other half: every example's loss, and the backward pass to the layers' outputs.

        If the model turns out to overwrite a layer's input or output, or to use a parameter in a way that could not be
        watched, it is run once more in another way. Its later passes then begin in that way.

        Args:
            loss_fn: ``loss_fn(outputs, targets)``.
            targets: The targets of the whole batch; a function of z if they are private.
            differentiable: Whether the recording will be differentiated further.

        Raises:
            UnsupportedCallError: A layer's input or output is overwritten even then.
        """
        outputs, leaves = tensors_of(self.outputs), self.watched.leaves
        places = [use.output for use in self.uses] + [meeting.rows for meeting in self.watched.meetings]
        ends = [output for output in outputs if output.requires_grad]
        with torch.enable_grad(), self.gradients.backward_state():
            with self.gradients.forward_state():
                losses = losses_of(loss_fn, self.outputs, targets)
            if self._was_overwritten():
                return self._run_again().recording(loss_fn, targets, differentiable=differentiable)
            to_all = torch.autograd.grad(
                losses.sum(), [*places, *ends, *leaves.values()], create_graph=differentiable, allow_unused=True
            )

        # A gradient that still reaches a watched parameter comes from a use that was not seen.
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
        """Run the pass again, with copies of the tensors that may be overwritten."""
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
        gradients, batch, leaves = self.gradients, len(self.z), self.watched.leaves
        own = {id(value): name for name, value in gradients.model.named_parameters() if name not in leaves}
        calls = []
        for use, delta in zip(self.uses, deltas, strict=False):
            rows = by_example(delta, use.dim, batch)
            operation = bool(use.values)
            calls.append(
                _call_of_operation(gradients, use, rows, leaves) if operation else _call(gradients, use, rows, own)
            )
        for meeting, delta in zip(self.watched.meetings, deltas[len(self.uses) :], strict=True):
            rule = ParameterRule(meeting.value, {name: leaves[name] for name in meeting.names})
            rows = by_example(delta, meeting.dim, batch)
            calls.append(_call_of_parameters(gradients, gradients.model, rule, (), rows, meeting.names))
        return tuple(call for call in calls if call.parameters)


def record(gradients: ExampleGradients, z: Tensor) -> Recording:
    """Run the batch forward and backward at z, [batch, d], keeping the graph.

    Raises:
        UnsupportedCallError: Dropout is active, or a module's output is not a tensor or does not run over the examples.
    """
    return forward_pass(gradients, z).recording(gradients.loss_fn, targets_at(gradients, z))


def targets_at(gradients: ExampleGradients, z: Tensor) -> Any:
    """The examples' targets, taken from z if they are private."""
    return gradients.examples.restore(z, gradients.examples.public)[2]


def forward_pass(gradients: ExampleGradients, z: Tensor, *, once: bool = False) -> RecordedForward:
    """Run the batch forward at z, [batch, d], with ``gradients.parameters`` as weights, keeping the graph.

    The model may be in use elsewhere: its hooks are called as usual, and it is left unchanged, even after an error.
    Dropout uses the examples' masks; a pass that runs only once may draw its own.

    Args:
        gradients: The examples with their model.
        z: Their private coordinates.
        once: Whether the model must not be run a second time, in another way, if the first run does not work.

    Raises:
        UnsupportedCallError: As in :func:`record`; or a second run would be needed.
    """
    for name, module in gradients.model.named_modules():
        if has_active_dropout(module) and not (once or gradients.examples.masks):
            raise UnsupportedCallError(f"{name}: active dropout draws one mask for a batch")
    with torch.enable_grad(), gradients.forward_state():
        forward = _forward(gradients, z, once)
    if forward.watched.unserved:
        _seen_whole.update(_holders_of(gradients.model, forward.watched.unserved))
        return forward._again()
    return forward._run_again() if forward._was_overwritten() else forward


def run_alike(model: nn.Module, copy: nn.Module) -> None:
    """Run later passes over ``model`` in the way that its copy was found to need."""
    if copy in _overwriting:
        _overwriting.add(model)
    if copy in _layouts:
        _layouts[model] = _layouts[copy]
    for own, other in zip(model.modules(), copy.modules(), strict=True):
        for seen in (_seen_whole, _seen_apart):
            if other in seen:
                seen.add(own)


def learn_layouts(gradients: ExampleGradients) -> bool:
    """Find the dimension of the examples in layers' outputs, by passes over two and three; return whether it was new.

    If a layer is called without the examples (for example on a range of positions), its parameters are watched instead.
    """
    model = gradients.model
    if model in _layouts:
        return False
    modules, apart = dict(model.named_modules()), True
    while apart:  # a layer without examples: watch where its parameters meet the examples later
        layouts = layouts_of(*(_shapes(gradients, count) for count in (2, 3)))
        without = {modules[name] for name, dims in layouts.items() if name in modules and None in dims}
        apart = not without <= set(_seen_apart)
        _seen_apart.update(without)
    _layouts[model] = layouts
    return True


def watch_parameters(model: nn.Module, names: Collection[str]) -> bool:
    """From now on, watch each use of these parameters instead of their layers' calls; return whether that was new.

    This is for a model that uses them without calling their layers: ``F.linear(x, self.layer.weight)``.
    """
    layers = set(_holders_of(model, names))
    new = bool(layers - set(_seen_apart))
    _watch(model, layers)
    return new


def _watch(model: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Watch the parameters of these layers; the layouts must then be learned again."""
    _seen_apart.update(layers)
    _layouts.pop(model, None)


def _shapes(gradients: ExampleGradients, count: int) -> dict[str, list[torch.Size]]:
    """The shapes of the layers' outputs in a pass over this many copies of the first example."""
    rows = torch.zeros(count, dtype=torch.int64, device=gradients.device)
    repeated = replace(gradients, examples=gradients.examples[rows])
    uses = Uses(count, learning=True)
    _run(repeated, repeated.examples.z.detach().requires_grad_(), uses)
    return uses.shapes


def _forward(gradients: ExampleGradients, z: Tensor, once: bool) -> RecordedForward:
    model = gradients.model
    uses = Uses(len(z), clone=model in _overwriting, layouts=_layouts.get(model))
    outputs, watched = _run(gradients, z, uses)
    if uses.odd:
        if once:
            raise UnsupportedCallError(f"{type(model).__name__} would have to be run a second time")
        learn_layouts(gradients)
        return _forward(gradients, z, once)
    uncalled = _uncalled(gradients, uses)
    if uncalled and not once:
        _watch(model, uncalled)
        return _forward(gradients, z, once)

    # One output may be made from another, and the loss may overwrite it.
    outputs = map_tensors(Tensor.clone if model in _overwriting else lambda leaf: leaf.view_as(leaf), outputs)
    return RecordedForward(gradients, z, outputs, tuple(uses.noted), watched, once)


def _run(gradients: ExampleGradients, z: Tensor, uses: Uses) -> tuple[Any, WatchedParameters]:
    """The model's outputs, the uses of its layers, and what happened to its other parameters."""
    examples, model = gradients.examples, gradients.model
    args, kwargs, _, offsets = examples.restore(z, examples.public)
    names = {module: name for name, module in model.named_modules()}

    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        if not isinstance(first, Tensor):
            raise _not_one_per_example(module, type(first).__name__)
        dim = uses.dim_of_examples(names[module], first.shape)
        if uses.learning or uses.odd:
            return output
        if dim is None:
            raise _not_one_per_example(module, f"shape {tuple(first.shape)}")
        handed_on = uses.take(Use(names[module], module, args, kwargs, first, dim))
        return (handed_on, *output[1:]) if isinstance(output, tuple) else handed_on

    def listener(module: nn.Module, rule: LayerRule, a: Tensor, output: Tensor, told: Mapping[str, str]) -> None:
        if uses.learning:
            return
        if output.shape[:1] != z.shape[:1]:
            raise UnsupportedCallError(f"a {type(module).__name__} is given {len(output)} rows for {len(z)} examples")
        given = a.clone() if model in _overwriting else a
        uses.noted.append(Use(names[module], module, (given,), {}, output, rule=rule, told=told))

    recorded, unrecorded, bare = _layers_and_bare_parameters(gradients)
    watched = WatchedParameters({name: gradients.parameters[name] for name in bare}, (args, kwargs), uses)
    weights = {**gradients.parameters, **gradients.constants, **watched.leaves}
    with contextlib.ExitStack() as stack:
        for module in recorded:  # before the user's hooks, which may change an output
            handle = module.register_forward_hook(hook, with_kwargs=True, prepend=True)
            stack.callback(handle.remove)
        stack.enter_context(added_to_outputs(model, offsets))
        stack.enter_context(with_substitutes(model, but=unrecorded))
        stack.enter_context(listening(listener))
        stack.enter_context(FastFunctions(z.device.type))
        if watched.leaves:
            stack.enter_context(watched)
        stack.enter_context(replayed_masks(examples.masks))
        outputs = call_with(model, weights, args, kwargs)
    return outputs, watched


def _uncalled(gradients: ExampleGradients, uses: Uses) -> list[nn.Module]:
    """The layers that were not called, so that other modules may have used their parameters."""
    called = {use.module for use in uses.noted}
    recorded = _layers_and_bare_parameters(gradients)[0]
    return [module for module in recorded if module not in called and module not in _seen_whole]


def _not_one_per_example(module: nn.Module, what: str) -> UnsupportedCallError:
    return UnsupportedCallError(f"a {type(module).__name__} has an output ({what}) that is not one per example")


def holders(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that hold trainable parameters; attention treated as a whole also holds its children's."""
    inside: set[nn.Module] = set()
    for module in model.modules():
        if _is_whole(module):
            inside |= set(module.modules()) - {module}
    for module in model.modules():
        if module not in inside and any(p.requires_grad for p in module.parameters(recurse=_is_whole(module))):
            yield module


def _is_whole(module: nn.Module) -> bool:
    """Whether it uses its children's parameters itself: attention, recurrent layers."""
    if isinstance(module, nn.MultiheadAttention):
        return module in _seen_whole or not attends_in_steps(module)
    return reports_uses(module)


def _layers_and_bare_parameters(gradients: ExampleGradients) -> tuple[list[nn.Module], set[nn.Module], list[str]]:
    """The modules whose calls are recorded, those that hold watched parameters, and these parameters' names.

    A parameter that modules of both kinds hold is watched.
    """
    recorded: list[nn.Module] = []
    unrecorded: set[nn.Module] = set()
    bare: set[int] = set()
    for module in holders(gradients.model):
        if reports_uses(module):
            continue
        ruled = _is_whole(module) or not isinstance(rule_for(module), GenericRule)
        if module in _seen_whole or (ruled and module not in _seen_apart):
            recorded.append(module)
        else:
            unrecorded.add(module)
            bare |= {id(value) for value in module.parameters(recurse=False)}
    named = gradients.model.named_parameters()
    names = [name for name, value in named if id(value) in bare and name in gradients.parameters]
    unrecorded |= {m for m in recorded if any(id(value) in bare for value in m.parameters(recurse=False))}
    return recorded, {module for module in unrecorded if not isinstance(module, nn.MultiheadAttention)}, names


def _holders_of(model: nn.Module, names: Collection[str]) -> list[nn.Module]:
    """The modules that hold these parameters, under whatever name."""
    wanted = {id(value) for name, value in model.named_parameters() if name in names}
    return [m for m in model.modules() if any(id(value) in wanted for value in m.parameters(recurse=False))]


def losses_of(loss_fn: LossFunction, outputs: Any, targets: Any) -> Tensor:
    """ℓ of every example, [batch], in float32 or wider; under autocast it is computed in float32, as torch does.

    Outputs and targets are trees. Anything in them that is not a tensor (a cache of keys and values), or that is a
    single number, is shared by all examples.
    """
    if getattr(loss_fn, "is_models_own", False):
        raise UnsupportedCallError("the model computes its loss itself, as one number for a whole batch")
    (first, *_) = tensors_of(outputs)
    if autocast_now(first.device) is not None:
        outputs, targets = map_tensors(wide, (outputs, targets))
    tensors = tensors_of((outputs, targets))

    def one(*rows: Tensor) -> Tensor:
        left = iter(rows)
        single = map_tensors(lambda whole: _as_batch(next(left), whole), (outputs, targets))
        return loss_fn(*single).reshape(())

    try:
        losses: Tensor = vmap(one, in_dims=tuple(0 if tensor.ndim else None for tensor in tensors))(*tensors)
    except RuntimeError:  # a loss that vmap does not support, such as weighted cross-entropy with smoothed labels
        count = next(len(tensor) for tensor in tensors if tensor.ndim)
        losses = torch.stack([one(*(tensor[i] if tensor.ndim else tensor for tensor in tensors)) for i in range(count)])
    return wide(losses)


def _as_batch(row: Tensor, whole: Tensor) -> Tensor:
    """One example's row of a tensor as a batch of one; a single number as it is."""
    return row.unsqueeze(0) if whole.ndim else row


def _call(gradients: ExampleGradients, use: Use, delta: Tensor, unwatched: Mapping[int, str]) -> Call:
    """The call of a module with its parameters that are not watched, named by their ids.

    If the module has reported this use, it concerns only some of its parameters.
    """
    told, rule = use.told, use.rule or rule_for(use.module)
    own = dict(use.module.named_parameters(recurse=_is_whole(use.module), remove_duplicate=told is None))
    parameters: dict[str, Tensor] = {}
    names: dict[str, str] = {}
    for local, value in own.items() if told is None else ((local, own[name]) for local, name in told.items()):
        canonical = unwatched.get(id(value))
        if canonical in gradients.parameters:
            parameters[local], names[local] = gradients.parameters[canonical], canonical
    if told is not None:
        return Call(use.name, use.module, rule, use.args, use.kwargs, delta, parameters, {}, names)

    prefix = f"{use.name}." if use.name else ""
    weights = {**gradients.parameters, **gradients.constants}
    local_weights = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
    constants = {local: value for local, value in local_weights.items() if local not in parameters}
    args, kwargs = use.inputs_by_example(len(delta))
    return Call(use.name, use.module, rule, args, kwargs, delta, parameters, constants, names)


def _call_of_operation(gradients: ExampleGradients, use: Use, delta: Tensor, leaves: Mapping[str, Tensor]) -> Call:
    """The call of an operation with watched weights; if these are parameters, its layer's rule serves it directly."""
    args, _ = use.inputs_by_example(len(delta))
    by_id = {id(leaf): name for name, leaf in leaves.items()}
    assert use.rule is not None
    names = {local: by_id[id(value)] for local, value in use.values.items() if id(value) in by_id}
    if len(names) == len(use.values):
        parameters = {local: gradients.parameters[name] for local, name in names.items()}
        return Call(use.name, use.module, use.rule, args, {}, delta, parameters, {}, names)
    own = {name: leaves[name] for name in use.name.split(", ")}
    rule = ReparametrisedRule(use.rule, use.values, own)
    return _call_of_parameters(gradients, use.module, rule, args, delta, tuple(own))


def _call_of_parameters(
    gradients: ExampleGradients,
    module: nn.Module,
    rule: LayerRule,
    args: tuple[Any, ...],
    delta: Tensor,
    names: tuple[str, ...],
) -> Call:
    """A call whose rule gives gradients by the model's names."""
    parameters = {name: gradients.parameters[name] for name in names}
    return Call(", ".join(names), module, rule, args, {}, delta, parameters, {}, dict(zip(names, names, strict=True)))
