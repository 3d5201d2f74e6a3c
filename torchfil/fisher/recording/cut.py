"""A recording, cut from the graph that leads to z: its layers are differentiated one by one, the way to z once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from torchfil.fisher.precision import wide
from torchfil.fisher.recording.passes import Recording
from torchfil.fisher.rules.call import Call, UnsupportedCallError
from torchfil.utils.trees import map_tensors

__all__ = ["CutRecording", "Part", "cut"]


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
            gradients = torch.autograd.grad(whole, tuple(leaves), retain_graph=True, allow_unused=True)
            for leaf, gradient in zip(leaves, gradients, strict=True):
                self.put(cotangents, leaf, gradient)
        return total, cotangents

    def put(self, cotangents: list[Tensor | None], leaf: Tensor, gradient: Tensor | None) -> None:
        """Add a gradient to the leaf's place in the list; nothing where the leaf does not depend on z."""
        place = self._places.get(id(leaf))
        if gradient is not None and place is not None:
            before = cotangents[place]
            cotangents[place] = gradient if before is None else before + gradient

    @cached_property
    def _places(self) -> dict[int, int]:
        return {id(leaf): place for place, leaf in enumerate(self.leaves)}

    def pulled_back(self, cotangents: Sequence[Tensor | None], z: Tensor) -> Tensor:
        """Σ_leaf ⟨cotangent, ∂leaf/∂z⟩, [batch, d]; the graph is kept for the next ones."""
        pairs = [(origin, c) for origin, c in zip(self.origins, cotangents, strict=True) if c is not None]
        if not pairs:
            return wide(torch.zeros_like(z))
        origins, given = zip(*((origin, c.to(origin.dtype)) for origin, c in pairs), strict=True)
        (result,) = torch.autograd.grad(origins, z, given, retain_graph=True, allow_unused=True, materialize_grads=True)
        return wide(result)


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
