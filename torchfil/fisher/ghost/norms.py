"""‖g‖² of every example and its gradient with respect to the private coordinates, in one batched pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from torchfil.fisher.ghost.recording import (
    Call,
    CutRecording,
    Part,
    Recording,
    UnsupportedCallError,
    cut,
    holders,
    record,
)
from torchfil.fisher.ghost.rules import ConvolutionRule, GenericRule, rule_for, total_square
from torchfil.fisher.gradients import ExampleGradients, differentiable_twice

__all__ = ["Held", "NormGradient", "Plan", "inner_products", "norm_gradient", "plan", "squared_norms", "weighted_sum"]


@dataclass(frozen=True)
class NormGradient:
    """‖g‖², [batch], and ∇_z‖g‖² = 2Jᵀg, [batch, d]."""

    square: Tensor
    gradient: Tensor


@dataclass(frozen=True)
class Plan:
    """What a trial with one example found.

    Attributes:
        reason: Why the batched pass does not fit this model; None: it does.
        bytes_per_example: What the pass holds for one example.
        generic: The layers without a rule of their own, by name and kind; their gradients are formed one by one.
        convolutions: The share of convolutions among the layers.
    """

    reason: str | None
    bytes_per_example: int
    generic: tuple[str, ...] = ()
    convolutions: float = 1.0


class Held:
    """Bytes that autograd keeps for backward passes, the weights aside.

    Attributes:
        total: What is kept together.
    """

    def __init__(self, weights: list[Tensor]) -> None:
        self.total = 0
        self._known = {weight.untyped_storage().data_ptr() for weight in weights}

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what is kept inside."""

        def pack(tensor: Tensor) -> Tensor:
            pointer = tensor.untyped_storage().data_ptr()
            if pointer not in self._known:
                self._known.add(pointer)
                self.total += min(tensor.untyped_storage().nbytes(), tensor.numel() * tensor.itemsize)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield

    def counted(self, parts: Iterable[Part]) -> Iterator[Part]:
        """The same parts; the largest of them counts, because each is let go before the next."""
        largest = 0
        for part in parts:
            before = self.total
            yield Part(part.calls, partial(self._count, part))
            largest, self.total = max(largest, self.total - before), before
        self.total += largest

    def _count(self, part: Part) -> Tensor:
        generic = [call for call in part.calls if isinstance(rule_for(call.module), GenericRule)]
        if generic:  # it takes no such hooks: two gradients per example
            for call in generic:
                size = sum(value.numel() * value.itemsize for value in call.parameters.values())
                self.total += 2 * size * len(call.delta)
            return part.value()
        with self.counting():
            return part.value()


def squared_norms(recording: Recording) -> Iterator[Part]:
    """What adds up to ‖g‖² of every example, [batch], each of calls that no other one looks at.

    The gradient of a parameter that several calls use is formed and summed over them first.
    """
    uses = Counter(name for call in recording.calls for name in call.shared_names.values())
    sharing: list[Call] = []
    for call in recording.calls:
        if all(uses[name] == 1 for name in call.shared_names.values()):
            yield Part((call,), partial(rule_for(call.module).squared_norm, call))
        else:
            sharing.append(call)
    if sharing:
        yield Part(tuple(sharing), partial(_shared_squared_norm, sharing, recording.losses))


def _shared_squared_norm(calls: Sequence[Call], like: Tensor) -> Tensor:
    summed: dict[str, Tensor] = {}
    for call in calls:
        for local, gradient in rule_for(call.module).gradients(call).items():
            name = call.shared_names[local]
            summed[name] = summed[name] + gradient if name in summed else gradient
    return total_square(summed.values(), like)


def inner_products(
    attached: CutRecording, direction: Mapping[str, Tensor], weight: Tensor
) -> tuple[Tensor, list[Tensor | None]]:
    """⟨g, u⟩ of every example, [batch], for u by the model's parameter names, and its derivative at the cut's leaves.

    The derivative is that of Σ_i weight_i⟨g_i, u⟩.
    """
    total = torch.zeros_like(attached.recording.losses)
    cotangents: list[Tensor | None] = [None] * len(attached.leaves)
    for call in attached.recording.calls:
        part = {local: direction[name] for local, name in call.shared_names.items()}
        value, derivatives = rule_for(call.module).inner(call, part, weight)
        total = total + value
        for leaf, derivative in derivatives:
            attached.put(cotangents, leaf, derivative)
    return total, cotangents


def weighted_sum(recording: Recording, weight: Tensor) -> dict[str, Tensor]:
    """Σ_i weight_i g_i by the model's parameter names, for weights [batch]; not differentiable."""
    result: dict[str, Tensor] = {}
    for call in recording.calls:
        for local, part in rule_for(call.module).weighted_sum(call, weight).items():
            name = call.shared_names[local]
            result[name] = result[name] + part if name in result else part
    return result


def norm_gradient(gradients: ExampleGradients, held: Held | None = None) -> NormGradient:
    """‖g‖² and its gradient with respect to z, by one forward pass, one backward pass, and the backward pass of both.

    Args:
        gradients: The examples with model and loss.
        held: Counts what the graphs keep, where given.

    Raises:
        UnsupportedCallError: See :func:`torchfil.fisher.ghost.record`; :func:`plan` tells beforehand.
    """
    z = gradients.examples.z.detach().requires_grad_()
    with torch.enable_grad(), differentiable_twice():
        with held.counting() if held is not None else nullcontext():
            recording = record(gradients, z)
        attached = cut(recording)
        parts = squared_norms(attached.recording)
        square, cotangents = attached.differentiated(parts if held is None else held.counted(parts))
        if held is not None:
            held.total += sum(leaf.numel() * leaf.itemsize for leaf in attached.leaves)
        gradient = attached.pulled_back(cotangents, z)
    return NormGradient(square, gradient.detach())


def plan(gradients: ExampleGradients) -> Plan:
    """Try the pass on the first two examples: does it give their gradients' norms, and how much does it hold?

    The norms are compared with those of plain backward passes, one example each, which finds parameters that the model
    uses behind its modules' backs and models that mix examples.
    """
    part = replace(gradients, examples=gradients.examples[slice(0, 2)])
    held = Held([*part.parameters.values(), *part.constants.values()])
    try:
        found = norm_gradient(part, held)
    except torch.OutOfMemoryError:
        raise
    except (UnsupportedCallError, RuntimeError) as error:
        return Plan(str(error), 0)
    true = torch.stack([part.squared_norm_of_one(i) for i in range(len(part))])
    tolerance = 1e-3 if true.dtype != torch.float64 else 1e-8
    if not torch.allclose(found.square, true, rtol=tolerance, atol=tolerance * float(true.max())):
        return Plan("the layers' calls do not account for the whole gradient, or the model mixes examples", 0)
    modules = list(holders(part))
    convolutions = sum(isinstance(rule_for(module), ConvolutionRule) for module in modules)
    return Plan(
        None, 2 * held.total // len(part.examples), _without_rule(part.model, modules), convolutions / len(modules)
    )


def _without_rule(model: nn.Module, modules: Sequence[nn.Module]) -> tuple[str, ...]:
    names = {id(module): name for name, module in model.named_modules()}
    found = [module for module in modules if isinstance(rule_for(module), GenericRule)]
    return tuple(f"{names[id(module)] or 'the model itself'} ({type(module).__name__})" for module in found)
