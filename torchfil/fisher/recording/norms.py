"""‖g‖² of every example and its gradient with respect to the private coordinates, in one recorded pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from torchfil.fisher.gradients import ExampleGradients
from torchfil.fisher.precision import probes_are_narrow
from torchfil.fisher.recording.cut import CutRecording, Part, cut
from torchfil.fisher.recording.passes import Recording, record
from torchfil.fisher.rules.base import Call, UnsupportedCallError, products_of, total_square
from torchfil.fisher.rules.generic import GenericRule

__all__ = [
    "Held",
    "NormGradient",
    "gradient_products",
    "inner_products",
    "norm_gradient",
    "squared_norms",
    "squares_and_slopes",
    "weighted_sum",
]


@dataclass(frozen=True)
class NormGradient:
    """‖g‖², [batch], and ∇_z‖g‖² = 2Jᵀg, [batch, d]."""

    square: Tensor
    gradient: Tensor


class Held:
    """Bytes that autograd keeps for backward passes, not counting the weights.

    Attributes:
        total: The bytes kept at the same time.
    """

    def __init__(self, weights: list[Tensor]) -> None:
        self.total = 0
        self._weights = weights
        self._known = {weight.untyped_storage().data_ptr() for weight in weights}

    def anew(self) -> Held:
        """A new count from 0, for the same weights."""
        return Held(self._weights)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the bytes kept inside this context."""

        def pack(tensor: Tensor) -> Tensor:
            pointer = tensor.untyped_storage().data_ptr()
            if pointer not in self._known:
                self._known.add(pointer)
                self.total += min(tensor.untyped_storage().nbytes(), tensor.numel() * tensor.itemsize)
            return tensor.detach()  # attached, a node that keeps its own result would keep itself alive

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield

    def counted(self, parts: Iterable[Part]) -> Iterator[Part]:
        """The same parts; only the largest counts, because each is freed before the next."""
        largest = 0
        for part in parts:
            before = self.total
            yield Part(part.calls, partial(self._count, part))  # each is differentiated immediately
            largest, self.total = max(largest, self.total - before), before
        self.total += largest

    def _count(self, part: Part) -> Tensor:
        generic = [call for call in part.calls if isinstance(call.rule, GenericRule)]
        if generic:  # such hooks do not work there; estimate two gradients per example
            for call in generic:
                size = sum(value.numel() * value.itemsize for value in call.parameters.values())
                self.total += 2 * size * len(call.delta)
            return part.value()
        with self.counting():
            return part.value()


def squared_norms(recording: Recording) -> Iterator[Part]:
    """Terms that add up to ‖g‖² of every example, [batch]; each call belongs to one term.

    If several calls use a parameter, its gradient is formed and summed over them first.
    """
    uses = Counter(name for call in recording.calls for name in call.shared_names.values())
    sharing: list[Call] = []
    for call in recording.calls:
        if all(uses[name] == 1 for name in call.shared_names.values()):
            yield Part((call,), partial(_squared_norm, call), light=call.is_wide and call.rule.squares_lightly(call))
        else:
            sharing.append(call)
    if sharing:
        yield Part(tuple(sharing), partial(_shared_squared_norm, sharing, recording.losses))


def _squared_norm(call: Call) -> Tensor:
    square: Tensor = call.rule.squared_norm(call.wide())
    return square


def _shared_squared_norm(calls: Sequence[Call], like: Tensor) -> Tensor:
    summed: dict[str, Tensor] = {}
    for call in calls:
        _add_gradients(summed, call)
    return total_square(summed.values(), like)


def _add_gradients(summed: dict[str, Tensor], call: Call) -> None:
    for local, gradient in call.rule.gradients(call.wide()).items():
        name = call.shared_names[local]
        summed[name] = summed[name] + gradient if name in summed else gradient


def gradient_products(own: Recording, other: Recording) -> Tensor:
    """‖g‖², ‖g′‖² and ⟨g, g′⟩, [3, batch], from a pass over the examples and one over changed examples.

    Raises:
        UnsupportedCallError: The model did not call the same layers in both passes.
    """
    if [call.name for call in own.calls] != [call.name for call in other.calls]:
        raise UnsupportedCallError(
            "the model calls other layers for an alternative answer than for the original examples"
        )
    uses = Counter(name for call in own.calls for name in call.shared_names.values())
    total = own.losses.new_zeros(3, len(own.losses))
    shared: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}
    with torch.no_grad():
        for pair in zip(own.calls, other.calls, strict=True):
            if all(uses[name] == 1 for name in pair[0].shared_names.values()):
                total = total + pair[0].rule.products(*(call.wide() for call in pair))
                continue
            for call, summed in zip(pair, shared, strict=True):
                _add_gradients(summed, call)
        return total + products_of(*shared, own.losses)


def inner_products(attached: CutRecording, direction: Mapping[str, Tensor]) -> tuple[Tensor, list[Tensor | None]]:
    """⟨g, u⟩ of every example, [batch], for u by the model's parameter names, and its derivative at the cut's leaves.

    The derivative is that of Σ_i ⟨g_i, u⟩.
    """
    total = torch.zeros_like(attached.recording.losses)
    cotangents: list[Tensor | None] = [None] * len(attached.leaves)
    for call in attached.recording.calls:
        part = {local: direction[name] for local, name in call.shared_names.items()}
        widened = call if call.rule.narrow_probes and probes_are_narrow() else call.wide()
        value, derivatives = call.rule.inner(widened, part)
        total = total + value
        for leaf, derivative in derivatives:
            attached.put(cotangents, widened.origin(leaf), derivative)
    return total, cotangents


def weighted_sum(recording: Recording, weight: Tensor) -> dict[str, Tensor]:
    """Σ_i weight_i g_i by the model's parameter names, for weights [batch]; not differentiable."""
    result: dict[str, Tensor] = {}
    for call in recording.calls:
        for local, part in call.rule.weighted_sum(call.wide(), weight).items():
            name = call.shared_names[local]
            result[name] = result[name] + part if name in result else part
    return result


def norm_gradient(gradients: ExampleGradients) -> NormGradient:
    """‖g‖² and its gradient with respect to z: a forward pass, a backward pass, and a backward pass through both.

    Raises:
        UnsupportedCallError: See :func:`torchfil.fisher.recording.record`; ``recording.plan`` finds out beforehand.
    """
    z = gradients.examples.z.detach().requires_grad_()
    with torch.enable_grad(), gradients.backward_state():
        return squares_and_slopes(cut(record(gradients, z)), z)


def squares_and_slopes(attached: CutRecording, z: Tensor, held: Held | None = None) -> NormGradient:
    """‖g‖² and its gradient with respect to z; ``held``, if given, counts the bytes that this keeps."""
    parts = squared_norms(attached.recording)
    summed = attached.differentiable_sum(parts if held is None else held.counted(parts))
    if held is not None:
        held.total += sum(leaf.numel() * leaf.itemsize for leaf in attached.leaves)
    cotangents: list[Tensor | None] = [None] * len(attached.leaves)
    summed.add_derivative(cotangents)
    return NormGradient(summed.total, attached.pulled_back(cotangents, z).detach())
