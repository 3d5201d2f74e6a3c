"""A recording cut off from the graph that leads to z: layers are differentiated one by one, the path to z only once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from torchfil.fisher.precision import wide
from torchfil.fisher.recording.passes import Recording
from torchfil.fisher.rules.base import Call, UnsupportedCallError
from torchfil.utils.trees import map_tensors

__all__ = ["CutRecording", "DifferentiableSum", "Part", "cut"]


@dataclass(frozen=True)
class Part:
    """One term of a sum, [batch], that depends only on these calls.

    Attributes:
        calls: The calls.
        value: Computes the term.
        light: Whether its graph needs less memory than its derivatives.
    """

    calls: tuple[Call, ...]
    value: Callable[[], Tensor]
    light: bool = False

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """The leaves of its calls, without repetition."""
        return tuple({id(leaf): leaf for call in self.calls for leaf in call.leaves}.values())


@dataclass(frozen=True)
class CutRecording:
    """A recording whose calls begin at leaves, so that the results of rules are differentiated only that far.

    Attributes:
        recording: The calls, with leaves as their inputs and δ.
        leaves: The leaves.
        origins: The tensor that each leaf replaces, still attached to z.
    """

    recording: Recording
    leaves: tuple[Tensor, ...]
    origins: tuple[Tensor, ...]

    def differentiable_sum(self, parts: Iterable[Part]) -> DifferentiableSum:
        """Σ parts, with its derivatives at the leaves.

        Each part is differentiated in turn, so that only one layer's graph is in memory; light graphs are kept.
        """
        total = torch.zeros_like(self.recording.losses)
        derivatives: list[tuple[Part, Tensor | tuple[Tensor | None, ...]]] = []
        for part in parts:
            with torch.enable_grad():
                value = part.value()
            total = total + value.detach()
            if not value.requires_grad:
                continue
            derivatives.append((part, value if part.light else _derivatives(part, value)))
        return DifferentiableSum(self, total, derivatives)

    def put(
        self, cotangents: list[Tensor | None], leaf: Tensor, gradient: Tensor | None, weight: Tensor | None = None
    ) -> None:
        """Add a gradient, times weights [batch], at the leaf's place; do nothing if the leaf does not depend on z."""
        place = self._places.get(id(leaf))
        if gradient is None or place is None:
            return
        before = cotangents[place]
        if weight is None:
            cotangents[place] = gradient if before is None else before + gradient
            return
        each = weight.reshape(-1, *[1] * (gradient.ndim - 1))
        alike = before is not None and before.dtype == each.dtype == gradient.dtype
        if before is not None and alike:
            cotangents[place] = torch.addcmul(before, each, gradient)
        else:
            cotangents[place] = each * gradient if before is None else before + each * gradient

    @cached_property
    def _places(self) -> dict[int, int]:
        return {id(leaf): place for place, leaf in enumerate(self.leaves)}

    def pulled_back(self, cotangents: Sequence[Tensor | None], z: Tensor) -> Tensor:
        """Σ_leaf ⟨cotangent, ∂leaf/∂z⟩, [batch, d]; the graph is kept for further calls."""
        pairs = [(origin, c) for origin, c in zip(self.origins, cotangents, strict=True) if c is not None]
        if not pairs:
            return wide(torch.zeros_like(z))
        origins, given = zip(*((origin, c.to(origin.dtype)) for origin, c in pairs), strict=True)
        (result,) = torch.autograd.grad(origins, z, given, retain_graph=True, allow_unused=True, materialize_grads=True)
        return wide(result)


@dataclass(frozen=True)
class DifferentiableSum:
    """Σ parts of every example, [batch], and what is needed for its derivatives.

    Attributes:
        attached: The cut at which the derivatives end.
        total: The sum.
        derivatives: For each part, its derivatives at its leaves, or its value with the graph that leads to them.
    """

    attached: CutRecording
    total: Tensor
    derivatives: Sequence[tuple[Part, Tensor | tuple[Tensor | None, ...]]]

    def add_derivative(self, cotangents: list[Tensor | None], weight: Tensor | None = None) -> None:
        """Add Σ_i weight_i ∂total_i/∂leaf to the list, for weights [batch] (None: 1); part by part."""
        for part, known in self.derivatives:
            if isinstance(known, Tensor):
                for leaf, derivative in zip(part.leaves, _derivatives(part, known, weight), strict=True):
                    self.attached.put(cotangents, leaf, derivative)
                continue
            for leaf, derivative in zip(part.leaves, known, strict=True):
                self.attached.put(cotangents, leaf, derivative, weight)


def _derivatives(part: Part, value: Tensor, weight: Tensor | None = None) -> tuple[Tensor | None, ...]:
    """∂(Σ_i weight_i value_i)/∂leaf for the part's leaves; the graph is kept."""
    weight = torch.ones_like(value) if weight is None else weight
    return torch.autograd.grad(value, part.leaves, weight.to(value.dtype), retain_graph=True, allow_unused=True)


def cut(recording: Recording) -> CutRecording:
    """The recording, cut off from the graph that leads to z.

    Raises:
        UnsupportedCallError: The first dimension of an input that depends on z does not run over the examples.
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
