"""One forward and one backward pass over a batch that keep every layer's inputs and output
gradients, differentiably.

A layer's gradient for one example depends only on its input a_i and on the loss's gradient δ_i at
its output. Both are recorded for the whole batch at once, as differentiable functions of the
private coordinates z. Whatever the layer rules compute from them (norms, inner products) can
therefore be differentiated with respect to z. The forward half, :func:`forward_pass`, needs no loss
and may run earlier than the rest, :func:`backward_pass`.

How a pass runs follows from ``gradients.facts``. If it shows something new about the model (a layer
that is not called, a tensor that is overwritten, examples along another dimension), the facts are
completed and the pass is run once more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from torchfil.fisher.gradients import ExampleGradients, LossFunction, ModelFacts
from torchfil.fisher.masks import replayed_masks
from torchfil.fisher.models import Replaced, autocast_now, call_with, has_active_dropout, wide
from torchfil.fisher.recording.uses import Use, Uses, WatchedParameters, by_example, layouts_of
from torchfil.fisher.rules.attention import attends_in_steps
from torchfil.fisher.rules.base import Call, LayerRule, SummedRule, UnsupportedCallError, rule_for
from torchfil.fisher.rules.parameters import GenericRule, ParameterRule, ReparametrisedRule
from torchfil.fisher.rules.substitutes import FUNCTIONS, listening, reports_uses, with_substitutes
from torchfil.private import added_to_outputs
from torchfil.utils.given import Args, Kwargs, Outputs, Targets
from torchfil.utils.trees import map_tensors, tensors_of


@dataclass(frozen=True)
class Recording:
    """What one forward and backward pass left: plain fields, differentiable with respect to z.

    Attributes:
        z: [batch, d].
        calls: In the order of the forward pass; calls for parameters outside layers come last.
        losses: ℓ of every example, [batch].
        output_gradients: ∂ℓ_i/∂output_i for every tensor of the model's output, in order; 0 if not
            used.
        narrow: Whether some call holds numbers with fewer digits than float32, which rules take in
            their wide form.
    """

    z: Tensor
    calls: tuple[Call, ...]
    losses: Tensor
    output_gradients: tuple[Tensor, ...]
    narrow: bool


@dataclass(frozen=True)
class RecordedForward:
    """A forward pass over a batch at z, with the layers' inputs: the half of a recording that needs
    no loss.

    Attributes:
        gradients: The examples with their model. Their loss and targets do not matter.
        z: [batch, d]; everything below is differentiable with respect to it.
        outputs: The model's outputs.
        targets: The examples' own targets; a function of z if they are private.
        uses: The layers' calls.
        watched: Where parameters outside layers met the examples.
        layers: What the pass did with each module.
        once: Whether the model must not be run again, because this is the training loop's own pass.
    """

    gradients: ExampleGradients
    z: Tensor
    outputs: Outputs
    targets: Targets
    uses: Uses
    watched: WatchedParameters
    layers: _Layers
    once: bool = False


@dataclass(frozen=True)
class _Layer:
    """A module whose uses are recorded: its name, its rule, and the model's names of its weights by
    local name.
    """

    name: str
    rule: LayerRule
    parameters: dict[str, str]
    constants: dict[str, str]


@dataclass(frozen=True)
class _Layers:
    """What a recorded pass does with each module of a model.

    Found once, from the model and the facts.

    Attributes:
        by_module: The modules whose calls are recorded or whose uses are reported.
        hooked: Those of them whose calls are recorded.
        expected: Those of the hooked ones whose parameters would be watched if they were not
            called.
        plain: The modules that hold watched parameters, which have no substitute.
        watched: The names of these parameters.
        dropout: A module with active dropout; None: there is none.
    """

    by_module: dict[nn.Module, _Layer]
    hooked: tuple[nn.Module, ...]
    expected: frozenset[nn.Module]
    plain: frozenset[nn.Module]
    watched: tuple[str, ...]
    dropout: str | None


def record(gradients: ExampleGradients, z: Tensor, *, differentiable: bool = True) -> Recording:
    """Run the batch forward and backward at z, [batch, d], keeping the graph if it will be
    differentiated further.

    Raises:
        UnsupportedCallError: Dropout is active, or a module's output is not a tensor or does not
            run over the examples.
    """
    return backward_pass(gradients, forward_pass(gradients, z), differentiable=differentiable)


def forward_pass(gradients: ExampleGradients, z: Tensor, *, once: bool = False) -> RecordedForward:
    """Run the batch forward at z, [batch, d], with ``gradients.parameters`` as weights, keeping the
    graph.

    The model may be in use elsewhere: its hooks are called as usual, and it is left unchanged, even
    after an error. Dropout uses the examples' masks; a pass that runs only once may draw its own.

    Args:
        gradients: The examples with their model.
        z: Their private coordinates.
        once: Whether the model must not be run a second time, in another way, if the first run does
            not work.

    Raises:
        UnsupportedCallError: As in :func:`record`; or a second run would be needed.
    """
    while True:
        layers = _layers_of(gradients)
        if layers.dropout is not None and not (once or gradients.examples.masks):
            raise UnsupportedCallError(
                f"{layers.dropout}: active dropout draws one mask for a batch"
            )
        with torch.enable_grad(), gradients.forward_state():
            overwrites = gradients.facts.overwrites
            uses = Uses(len(z), clone=overwrites, layouts=gradients.facts.layouts)
            outputs, targets, watched = _run(gradients, z, layers, uses)

            # One output may be made from another, and the loss may overwrite it.
            outputs = map_tensors(
                Tensor.clone if overwrites else lambda leaf: leaf.view_as(leaf), outputs
            )
        forward = RecordedForward(gradients, z, outputs, targets, uses, watched, layers, once)
        if not _shows_something_new(forward):
            return forward
        if once:
            raise _second_run(gradients)


def backward_pass(
    gradients: ExampleGradients, forward: RecordedForward, *, differentiable: bool = True
) -> Recording:
    """The other half: every example's loss, and the backward pass to the layers' outputs.

    Args:
        gradients: The examples with their loss and targets.
        forward: A forward pass over them.
        differentiable: Whether the recording will be differentiated further.

    Raises:
        UnsupportedCallError: A layer's input or output is overwritten even in a pass with copies,
            or a second run would be needed.
    """
    examples, z = gradients.examples, forward.z
    targets = forward.targets
    if forward.gradients.examples is not examples:  # the loop's pass, which did not know them
        targets = examples.restore(z, examples.public)[2]
    found = _taken_back(gradients, forward, targets, differentiable=differentiable)
    while found is None:
        if forward.once:
            raise _second_run(forward.gradients)
        forward = forward_pass(forward.gradients, z)
        found = _taken_back(gradients, forward, targets, differentiable=differentiable)

    losses, deltas, at_outputs = found
    seen = {tensor.dtype for use in forward.uses.noted for tensor, _ in use.versions}
    dtypes = seen.union(
        [x.dtype for x in deltas], [value.dtype for value in gradients.parameters.values()]
    )
    narrow = not dtypes.isdisjoint((torch.bfloat16, torch.float16))
    return Recording(z, _calls(forward, deltas), losses, at_outputs, narrow)


def _taken_back(
    gradients: ExampleGradients, forward: RecordedForward, targets: object, *, differentiable: bool
) -> tuple[Tensor, list[Tensor], tuple[Tensor, ...]] | None:
    """The losses, δ at each use and meeting, and the gradients at the outputs.

    None: run it anew, as the facts say.
    """
    facts, leaves = forward.gradients.facts, forward.watched.leaves
    places = [use.output for use in forward.uses.noted] + [
        use.rows for use in forward.watched.meetings
    ]
    outputs = tensors_of(forward.outputs)
    ends = [output for output in outputs if output.requires_grad]
    with torch.enable_grad(), gradients.backward_state():
        with forward.gradients.forward_state():
            losses = losses_of(gradients.loss_fn, forward.outputs, targets)
        if _learn_overwritten(forward):
            return None
        wanted = [*places, *ends, *leaves.values()]
        to_all = torch.autograd.grad(
            losses.sum(), wanted, create_graph=differentiable, allow_unused=True
        )

    # A gradient that still reaches a watched parameter comes from a use that was not seen.
    to_leaves = to_all[len(places) + len(ends) :]
    missed = [name for name, part in zip(leaves, to_leaves, strict=True) if part is not None]
    if missed:
        _learn(facts, facts.whole, _holders_of(forward.gradients.model, missed))
        return None
    deltas = [
        torch.zeros_like(x) if part is None else part
        for x, part in zip(places, to_all, strict=False)
    ]
    to_ends = iter(to_all[len(places) :])
    found = [(x, next(to_ends) if x.requires_grad else None) for x in outputs]
    return (
        losses,
        deltas,
        tuple(torch.zeros_like(x) if part is None else part.detach() for x, part in found),
    )


def _second_run(gradients: ExampleGradients) -> UnsupportedCallError:
    return UnsupportedCallError(
        f"{type(gradients.model).__name__} would have to be run a second time"
    )


def _shows_something_new(forward: RecordedForward) -> bool:
    """Complete the facts from a forward pass; return whether it has to be run again."""
    gradients, uses, layers = forward.gradients, forward.uses, forward.layers
    if uses.layout_unknown:
        return forward.once or learn_layouts(gradients)
    uncalled = layers.expected.difference([use.module for use in uses.noted])
    if uncalled and not forward.once:  # other modules may have used their parameters
        _learn(
            gradients.facts,
            gradients.facts.watched,
            [layers.by_module[module].name for module in uncalled],
        )
        return True
    if forward.watched.unserved:
        _learn(
            gradients.facts,
            gradients.facts.whole,
            _holders_of(gradients.model, forward.watched.unserved),
        )
        return True
    return _learn_overwritten(forward)


def _learn_overwritten(forward: RecordedForward) -> bool:
    """Whether a layer's input or output was overwritten: later passes copy them."""
    facts = forward.gradients.facts
    if not forward.uses.overwritten():
        return False
    if facts.overwrites:
        raise UnsupportedCallError(
            f"{type(forward.gradients.model).__name__} or its loss overwrites what a layer saw"
        )
    facts.overwrites = True
    return True


def _learn(facts: ModelFacts, treated: set[str], modules: Collection[str]) -> None:
    """From now on, treat these modules so (``facts.whole`` or ``watched``).

    The layouts must then be learned again.
    """
    treated.update(modules)
    facts.layouts = None
    facts.layers.clear()


def watch_parameters(gradients: ExampleGradients, names: Collection[str]) -> bool:
    """From now on, watch each use of these parameters instead of their layers' calls.

    Return whether that was new.

    This is for a model that uses them without calling their layers: ``F.linear(x,
    self.layer.weight)``.
    """
    layers = set(_holders_of(gradients.model, names))
    new = not layers <= gradients.facts.watched
    _learn(gradients.facts, gradients.facts.watched, layers)
    return new


def learn_layouts(gradients: ExampleGradients) -> bool:
    """Find the dimension of the examples in layers' outputs, by passes over two and three.

    Return whether it was new.

    If a layer is called without the examples (for example on a range of positions), its parameters
    are watched instead.
    """
    facts = gradients.facts
    if facts.layouts is not None:
        return False
    modules = {name for name, _ in gradients.model.named_modules()}
    while True:
        shapes = []
        for count in (2, 3):  # copies of the first example
            rows = torch.zeros(count, dtype=torch.int64, device=gradients.device)
            repeated = replace(gradients, examples=gradients.examples[rows])
            uses = Uses(count, learning=True)
            with torch.enable_grad(), gradients.forward_state():
                _run(
                    repeated,
                    repeated.examples.z.detach().requires_grad_(),
                    _layers_of(gradients),
                    uses,
                )
            shapes.append(uses.shapes)
        layouts = layouts_of(*shapes)
        without = {name for name, dims in layouts.items() if name in modules and None in dims}
        if without <= facts.watched:
            facts.layouts = layouts
            return True
        # watch where their parameters meet the examples later
        _learn(facts, facts.watched, without)


def _run(
    gradients: ExampleGradients, z: Tensor, layers: _Layers, uses: Uses
) -> tuple[Any, Any, WatchedParameters]:
    """The model's outputs, the targets, and what happened to parameters outside layers; ``uses``
    notes the layers.
    """
    examples, model = gradients.examples, gradients.model
    args, kwargs, targets, offsets = examples.restore(z, examples.public)

    def hook(module: nn.Module, args: Args, kwargs: Kwargs, output: Outputs) -> Outputs:
        with torch._C.DisableTorchFunction():
            first = output[0] if isinstance(output, tuple) else output
            if not isinstance(first, Tensor):
                raise _not_one_per_example(module, type(first).__name__)
            name = layers.by_module[module].name
            dim = uses.dim_of_examples(name, first.shape)
            if uses.learning or uses.layout_unknown:
                return output
            if dim is None:
                raise _not_one_per_example(module, f"shape {tuple(first.shape)}")
            handed_on = uses.take(Use(name, module, args, kwargs, first, dim))
            return (handed_on, *output[1:]) if isinstance(output, tuple) else handed_on

    def listener(
        module: nn.Module, rule: LayerRule, a: Tensor, output: Tensor, reported: Mapping[str, str]
    ) -> None:
        if uses.learning:
            return
        if len(output) % max(1, len(z)):
            raise UnsupportedCallError(
                f"a {type(module).__name__} is given {len(output)} rows for {len(z)} examples"
            )
        given = a.clone() if gradients.facts.overwrites else a
        uses.note(
            Use(
                layers.by_module[module].name,
                module,
                (given,),
                {},
                output,
                rule=rule,
                reported=reported,
            )
        )

    watched = WatchedParameters(
        {name: gradients.parameters[name] for name in layers.watched}, (args, kwargs), uses
    )
    weights = {**gradients.parameters, **gradients.constants, **watched.leaves}
    with contextlib.ExitStack() as stack:
        for module in layers.hooked:  # before the user's hooks, which may change an output
            stack.callback(
                module.register_forward_hook(hook, with_kwargs=True, prepend=True).remove
            )
        if offsets:
            stack.enter_context(added_to_outputs(model, offsets))
        stack.enter_context(with_substitutes(model, layers.plain, z.device.type))
        if len(layers.by_module) > len(layers.hooked):
            stack.enter_context(listening(listener))
        stack.enter_context(Replaced(FUNCTIONS.get(z.device.type, {})))
        if watched.leaves:
            stack.enter_context(watched)
        if examples.masks:
            stack.enter_context(replayed_masks(examples.masks))
        outputs = call_with(model, weights, args, kwargs)
    return outputs, targets, watched


def _not_one_per_example(module: nn.Module, what: str) -> UnsupportedCallError:
    return UnsupportedCallError(
        f"a {type(module).__name__} has an output ({what}) that is not one per example"
    )


def _layers_of(gradients: ExampleGradients) -> _Layers:
    """What a pass does with each module; looked up unless the facts have changed."""
    known: dict[nn.Module, _Layers] = gradients.facts.layers
    if gradients.model not in known:
        known[gradients.model] = _find_layers(gradients)
    return known[gradients.model]


def _find_layers(gradients: ExampleGradients) -> _Layers:
    """The modules that hold trainable parameters are recorded, report their uses, or have their
    parameters watched.

    Attention treated as a whole also holds its children's parameters. A parameter that recorded and
    other modules hold is watched.
    """
    model, facts = gradients.model, gradients.facts
    names = {module: name for name, module in model.named_modules()}
    whole = {module for module, name in names.items() if _is_whole(module, name in facts.whole)}
    hooked, reporting, plain = _sorted_modules(gradients, names, whole)
    bare = {id(value) for module in plain for value in module.parameters(recurse=False)}
    holding = {m for m in hooked if not bare.isdisjoint(map(id, m.parameters(recurse=False)))}

    trainable = {
        name: value for name, value in model.named_parameters() if name in gradients.parameters
    }
    watched = tuple(name for name, value in trainable.items() if id(value) in bare)
    own = {id(value): name for name, value in trainable.items() if name not in watched}
    by_module = {
        module: _layer(gradients, module, names[module], own, module in whole)
        for module in (*hooked, *reporting)
    }
    expected = frozenset(module for module in hooked if names[module] not in facts.whole)
    without = frozenset(m for m in (*plain, *holding) if not isinstance(m, nn.MultiheadAttention))
    dropout = next((name for module, name in names.items() if has_active_dropout(module)), None)
    return _Layers(by_module, tuple(hooked), expected, without, watched, dropout)


def _sorted_modules(
    gradients: ExampleGradients, names: Mapping[nn.Module, str], whole: Collection[nn.Module]
) -> tuple[list[nn.Module], list[nn.Module], list[nn.Module]]:
    """The modules with trainable parameters: recorded, reporting their uses, and with parameters to
    be watched.
    """
    facts = gradients.facts
    inside = {child for module in whole for child in module.modules() if child is not module}
    hooked, reporting, plain = list[nn.Module](), list[nn.Module](), list[nn.Module]()
    for module, name in names.items():
        if module in inside or not any(
            p.requires_grad for p in module.parameters(recurse=module in whole)
        ):
            continue
        ruled = module in whole or not isinstance(rule_for(module), GenericRule)
        if reports_uses(module):
            reporting.append(module)
        elif name in facts.whole or (ruled and name not in facts.watched):
            hooked.append(module)
        else:
            plain.append(module)
    return hooked, reporting, plain


def _layer(
    gradients: ExampleGradients, module: nn.Module, name: str, own: Mapping[int, str], whole: bool
) -> _Layer:
    """A recorded module; ``own`` are the names of parameters that are not watched, by id."""
    kept = module.named_parameters(recurse=whole, remove_duplicate=not reports_uses(module))
    parameters = {local: own[id(value)] for local, value in kept if id(value) in own}
    prefix = f"{name}." if name else ""
    below = [key for key in (*gradients.parameters, *gradients.constants) if key.startswith(prefix)]
    constants = {key[len(prefix) :]: key for key in below if key[len(prefix) :] not in parameters}
    return _Layer(name, rule_for(module), parameters, constants)


def _is_whole(module: nn.Module, seen_whole: bool) -> bool:
    """Whether it uses its children's parameters itself: attention, recurrent layers."""
    if isinstance(module, nn.MultiheadAttention):
        return seen_whole or not attends_in_steps(module)
    return reports_uses(module)


def _holders_of(model: nn.Module, names: Collection[str]) -> list[str]:
    """The modules that hold these parameters, under whatever name."""
    wanted = {id(value) for name, value in model.named_parameters() if name in names}
    return [
        name
        for name, m in model.named_modules()
        if any(id(p) in wanted for p in m.parameters(recurse=False))
    ]


def losses_of(loss_fn: LossFunction, outputs: object, targets: object) -> Tensor:
    """ℓ of every example, [batch], in float32 or wider.

    Under autocast it is computed in float32, as torch does.

    Outputs and targets are trees. Anything in them that is not a tensor (a cache of keys and
    values), or that is a single number, is shared by all examples.
    """
    if getattr(loss_fn, "is_models_own", False):
        raise UnsupportedCallError(
            "the model computes its loss itself, as one number for a whole batch"
        )
    if hasattr(loss_fn, "by_example"):  # of several rows, which it maps over itself
        return wide(loss_fn.by_example(outputs, targets))
    if autocast_now(tensors_of(outputs)[0].device) is not None:
        outputs, targets = map_tensors(wide, (outputs, targets))
    tensors = tensors_of((outputs, targets))
    by_row = [tensor.ndim > 0 for tensor in tensors]

    def one(*rows: Tensor) -> Tensor:
        left = iter(
            [row.unsqueeze(0) if mapped else row for row, mapped in zip(rows, by_row, strict=True)]
        )
        return loss_fn(*map_tensors(lambda _: next(left), (outputs, targets))).reshape(())

    try:
        losses: Tensor = vmap(one, in_dims=tuple([0 if mapped else None for mapped in by_row]))(
            *tensors
        )
    except RuntimeError:
        # a loss that vmap does not support, such as weighted cross-entropy with smoothed labels
        count = next(len(tensor) for tensor in tensors if tensor.ndim)
        losses = torch.stack(
            [
                one(*(tensor[i] if tensor.ndim else tensor for tensor in tensors))
                for i in range(count)
            ]
        )
    return wide(losses)


def _calls(forward: RecordedForward, deltas: list[Tensor]) -> tuple[Call, ...]:
    """The calls of the layers, from their uses and δ at each use's output."""
    gradients, batch, uses, leaves = (
        forward.gradients,
        len(forward.z),
        forward.uses.noted,
        forward.watched.leaves,
    )
    weights = {**gradients.constants, **gradients.parameters}
    calls = []

    # layers, and operations with their weights
    for use, delta in zip(uses, deltas, strict=False):
        args, kwargs = use.inputs_by_example(batch)
        constants: Mapping[str, str] = {}
        if use.values:
            rule, names = _operation(use, leaves)
        else:
            layer = forward.layers.by_module[use.module]
            rule, names, constants = use.rule or layer.rule, layer.parameters, layer.constants
            if use.reported is not None:  # it concerns only some of the module's parameters
                names, constants = (
                    {local: names[name] for local, name in use.reported.items() if name in names},
                    {},
                )
        if names:
            own = {local: weights[name] for local, name in names.items()}
            fixed = {local: weights[name] for local, name in constants.items()} if constants else {}
            rows = by_example(delta, use.dim, batch)
            rule = rule if delta.shape[use.dim] == batch or rule.takes_rows else SummedRule(rule)
            calls.append(Call(use.name, use.module, rule, args, kwargs, rows, own, fixed, names))

    # parameters outside layers come last
    for meeting, delta in zip(forward.watched.meetings, deltas[len(uses) :], strict=True):
        rule = ParameterRule(meeting.value, {name: leaves[name] for name in meeting.names})
        own, names = (
            {name: weights[name] for name in meeting.names},
            {name: name for name in meeting.names},
        )
        rows = by_example(delta, meeting.dim, batch)
        calls.append(Call(", ".join(names), gradients.model, rule, (), {}, rows, own, {}, names))
    return tuple(calls)


def _operation(use: Use, leaves: Mapping[str, Tensor]) -> tuple[LayerRule, dict[str, str]]:
    """Rule and parameters of an operation with watched weights.

    Its layer's rule serves parameters directly.
    """
    by_id = {id(leaf): name for name, leaf in leaves.items()}
    names = {local: by_id[id(value)] for local, value in use.values.items() if id(value) in by_id}
    assert use.rule is not None
    if len(names) == len(use.values):
        return use.rule, names
    # functions of parameters: gradients by the model's names
    names = {name: name for name in use.name.split(", ")}
    return ReparametrisedRule(use.rule, use.values, {name: leaves[name] for name in names}), names
