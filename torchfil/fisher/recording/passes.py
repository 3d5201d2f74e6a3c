"""One batched forward and backward pass, with what each layer saw kept as a differentiable graph.

A layer's gradient for one example depends on two things only: its input a_i and the loss's gradient δ_i at its output.
Both are recorded for the whole batch at once, as differentiable functions of the private coordinates z, so that
whatever the layer rules make of them (norms, inner products) can be differentiated with respect to z.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils import _pytree as pytree

from torchfil.fisher.gradients import (
    ExampleGradients,
    added_to_output,
    call_with,
    differentiable_twice,
    has_active_dropout,
)
from torchfil.fisher.masks import replayed_masks
from torchfil.fisher.rules.call import Call, UnsupportedCallError
from torchfil.fisher.rules.substitutes import FastOnCPU, with_substitutes
from torchfil.utils.trees import map_tensors, tensors_of

__all__ = ["Call", "CutRecording", "Part", "Recording", "UnsupportedCallError", "cut", "holders", "record"]


@dataclass(frozen=True)
class Recording:
    """The calls of one pass and the losses, [batch], both differentiable with respect to z.

    Attributes:
        calls: In the order of the forward pass.
        losses: ℓ of every example.
        output_gradients: ∂ℓ_i/∂output_i for every tensor of the model's output, in its order; 0 where none leads there.
    """

    calls: tuple[Call, ...]
    losses: Tensor
    output_gradients: tuple[Tensor, ...]


@dataclass(frozen=True)
class Part:
    """A summand of every example, [batch], that depends on these calls only."""

    calls: tuple[Call, ...]
    value: Callable[[], Tensor]


@dataclass(frozen=True)
class CutRecording:
    """A recording whose calls begin at leaves: what rules make of the calls is differentiated up to there.

    Attributes:
        recording: The calls, with leaves for their inputs and δ.
        leaves: The leaves.
        origins: What each of them stands for, still attached to z.
    """

    recording: Recording
    leaves: tuple[Tensor, ...]
    origins: tuple[Tensor, ...]

    def differentiated(self, parts: Iterable[Part]) -> tuple[Tensor, list[Tensor | None]]:
        """Σ parts, [batch], and ∂(Σ_i Σ parts_i)/∂leaf for every leaf, None where it does not matter.

        Part by part, so that the graph of one layer is held at a time.
        """
        total = torch.zeros_like(self.recording.losses)
        cotangents: list[Tensor | None] = [None] * len(self.leaves)
        for part in parts:
            with torch.enable_grad():
                value = part.value()
                whole = value.sum()
            total = total + value.detach()
            if not whole.requires_grad:
                continue
            leaves = {id(leaf): leaf for call in part.calls for leaf in call.leaves}.values()
            found = torch.autograd.grad(whole, tuple(leaves), retain_graph=True, allow_unused=True)
            for leaf, gradient in zip(leaves, found, strict=True):
                self.put(cotangents, leaf, gradient)
        return total, cotangents

    def put(self, cotangents: list[Tensor | None], leaf: Tensor, gradient: Tensor | None) -> None:
        """Add a gradient to the leaf's place in the list; nothing where the leaf does not depend on z."""
        place = self._places.get(id(leaf))
        if gradient is not None and place is not None:
            known = cotangents[place]
            cotangents[place] = gradient if known is None else known + gradient

    @cached_property
    def _places(self) -> dict[int, int]:
        return {id(leaf): place for place, leaf in enumerate(self.leaves)}

    def pulled_back(self, cotangents: Sequence[Tensor | None], z: Tensor) -> Tensor:
        """Σ_leaf ⟨cotangent, ∂leaf/∂z⟩, [batch, d]; the graph is kept for the next ones."""
        pairs = [(origin, c) for origin, c in zip(self.origins, cotangents, strict=True) if c is not None]
        if not pairs:
            return torch.zeros_like(z)
        origins, given = zip(*pairs, strict=True)
        (result,) = torch.autograd.grad(origins, z, given, retain_graph=True, allow_unused=True, materialize_grads=True)
        return result


def cut(recording: Recording) -> CutRecording:
    """The recording, cut from the graph that leads to z.

    Raises:
        UnsupportedCallError: An input that depends on z does not run over the examples first.
    """
    leaves: dict[int, Tensor] = {}
    origins: dict[int, Tensor] = {}

    def leaf(name: str, value: Tensor) -> Tensor:
        if not value.requires_grad:
            return value
        if value.shape[:1] != recording.losses.shape:
            raise UnsupportedCallError(f"{name}: an input of shape {tuple(value.shape)} is not one per example")
        if id(value) not in leaves:
            leaves[id(value)], origins[id(value)] = value.detach().requires_grad_(), value
        return leaves[id(value)]

    calls = []
    for call in recording.calls:
        args, kwargs, delta = map_tensors(partial(leaf, call.name), (call.args, dict(call.kwargs), call.delta))
        calls.append(replace(call, args=args, kwargs=kwargs, delta=delta, memo={}))
    return CutRecording(
        replace(recording, calls=tuple(calls), losses=recording.losses.detach()),
        tuple(leaves.values()),
        tuple(origins.values()),
    )


@dataclass
class _Seen:
    """What a forward hook saw."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor
    versions: list[int]

    def tensors(self) -> list[Tensor]:
        return [self.output, *tensors_of((self.args, self.kwargs))]

    def was_overwritten(self) -> bool:
        return [tensor._version for tensor in self.tensors()] != self.versions


def record(gradients: ExampleGradients, z: Tensor) -> Recording:
    """Run the batch forward and backward at z, [batch, d], keeping the graph.

    Raises:
        UnsupportedCallError: Active dropout; a module whose output is no tensor or does not run over the examples.
    """
    for name, module in gradients.model.named_modules():
        if has_active_dropout(module) and not gradients.examples.masks:
            raise UnsupportedCallError(f"{name}: active dropout draws one mask for a batch")
    with differentiable_twice():
        seen, losses, outputs = _forward(gradients, z, clone=False)
        if any(call.was_overwritten() for call in seen):
            seen, losses, outputs = _forward(gradients, z, clone=True)
        places = [*(call.output for call in seen), *(output for output in outputs if output.requires_grad)]
        found = torch.autograd.grad(losses.sum(), places, create_graph=True, allow_unused=True, materialize_grads=True)
        deltas, rest = found[: len(seen)], iter(found[len(seen) :])
        at_outputs = tuple((next(rest) if x.requires_grad else torch.zeros_like(x)).detach() for x in outputs)
    names = {id(module): name for name, module in gradients.model.named_modules()}
    shared = {id(value): name for name, value in gradients.model.named_parameters()}
    calls = tuple(
        _call(gradients, call, names[id(call.module)], delta, shared) for call, delta in zip(seen, deltas, strict=True)
    )
    return Recording(calls, losses, at_outputs)


def _forward(gradients: ExampleGradients, z: Tensor, *, clone: bool) -> tuple[list[_Seen], Tensor, list[Tensor]]:
    """The modules' calls in order, every example's loss, and the tensors of the model's output.

    ``clone`` keeps copies of what may be overwritten.
    """
    examples, batch = gradients.examples, len(z)
    args, kwargs, targets, offset = examples.restore(z, examples.public)
    seen: list[_Seen] = []

    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        if not isinstance(first, Tensor) or first.ndim == 0 or first.shape[0] != batch:
            what = f"shape {tuple(first.shape)}" if isinstance(first, Tensor) else type(first).__name__
            raise UnsupportedCallError(f"a {type(module).__name__} has an output ({what}) that is not one per example")
        constant = not first.requires_grad
        if constant:
            first = first.detach().requires_grad_()
        if clone:
            args, kwargs = map_tensors(Tensor.clone, (args, kwargs))
        call = _Seen(module, args, kwargs, first, [])
        call.versions = [tensor._version for tensor in call.tensors()]
        seen.append(call)
        handed_on = first.clone() if clone or constant else first  # a leaf must not be changed in place
        return (handed_on, *output[1:]) if isinstance(output, tuple) else handed_on

    with contextlib.ExitStack() as stack:
        for module in holders(gradients):
            handle = module.register_forward_hook(hook, with_kwargs=True)
            stack.callback(handle.remove)
        stack.enter_context(added_to_output(gradients.model, examples.submodule, offset))
        stack.enter_context(with_substitutes(gradients.model))
        if z.device.type == "cpu":
            stack.enter_context(FastOnCPU())
        stack.enter_context(replayed_masks(examples.masks))
        weights = {**gradients.parameters, **gradients.constants}
        outputs = call_with(gradients.model, weights, args, kwargs)
    outputs = map_tensors(lambda leaf: leaf.view_as(leaf), outputs)  # one may be made from another
    return seen, _losses(gradients, outputs, targets), tensors_of(outputs)


def holders(gradients: ExampleGradients) -> Iterator[nn.Module]:
    """The modules that hold trainable parameters; attention holds its children's, too, and calls them by itself."""
    inside: set[int] = set()
    for module in gradients.model.modules():
        if isinstance(module, nn.MultiheadAttention):
            inside |= {id(child) for child in module.modules() if child is not module}
    for module in gradients.model.modules():
        whole = isinstance(module, nn.MultiheadAttention)
        if id(module) not in inside and any(p.requires_grad for p in module.parameters(recurse=whole)):
            yield module


def _losses(gradients: ExampleGradients, outputs: Any, targets: Any) -> Tensor:
    def one(output: Any, target: Any) -> Tensor:
        single = map_tensors(lambda tensor: tensor.unsqueeze(0), (output, target))
        return gradients.loss_fn(*single).reshape(())

    in_dims = pytree.tree_map(lambda x: 0 if isinstance(x, Tensor) else None, (outputs, targets))
    try:
        losses: Tensor = vmap(one, in_dims=in_dims)(outputs, targets)
    except RuntimeError:  # a loss that vmap does not know, such as weighted cross-entropy with smoothed labels
        rows = range(len(tensors_of(outputs)[0]))
        losses = torch.stack([one(*_row((outputs, targets), i)) for i in rows])
    return losses


def _row(tree: Any, i: int) -> Any:
    return map_tensors(lambda tensor: tensor[i], tree)


def _call(gradients: ExampleGradients, seen: _Seen, name: str, delta: Tensor, shared: Mapping[int, str]) -> Call:
    whole = isinstance(seen.module, nn.MultiheadAttention)
    weights = {**gradients.parameters, **gradients.constants}
    parameters: dict[str, Tensor] = {}
    names: dict[str, str] = {}
    for local, value in seen.module.named_parameters(recurse=whole):
        canonical = shared[id(value)]
        if canonical in gradients.parameters:
            parameters[local], names[local] = gradients.parameters[canonical], canonical
    prefix = f"{name}." if name else ""
    local_weights = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
    constants = {local: value for local, value in local_weights.items() if local not in parameters}
    return Call(name, seen.module, seen.args, seen.kwargs, delta, parameters, constants, names)


class RecordedForward:  # TEMP
    outputs: Any


def forward_pass(gradients: Any, z: Any) -> RecordedForward:
    raise UnsupportedCallError("TEMP")
