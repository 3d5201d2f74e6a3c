r"""Recurrences h_t = cell(a_t, h_{t−1}), a_t = x_t + W h_{t−1}, whose second derivative is two more sweeps over time.

x are the gates' inputs, however they were computed; m is the cell's memory (c in an LSTM, otherwise h itself). At the
values of a forward pass, every cell is linear in small changes, with coefficients that need no sweep:

    ṁ_t = f_t ṁ_{t−1} + Σ_k β_{kt} ȧ_{kt},       ḣ_t = α_t ṁ_t + ω_t ȧ_{ot}        (an LSTM; ḣ_t = ṁ_t otherwise).

* The derivative δ = ∂⟨γ, h⟩/∂x is a backward sweep through these equations, from γ (:func:`_swept_back`).
* The derivative of ⟨u, δ⟩ = ⟨γ, ḣ(u)⟩ with respect to γ is a forward sweep, ḣ(u) (:func:`_swept_on`).
* The derivative of ⟨u, δ⟩ with respect to x goes through the coefficients. Each cell adds a source at its inputs, which
  also needs no sweep (``Cell.curvature``), and one more backward sweep takes the sources to x.

Time is the first dimension: [T, batch, gates·H] outside, [T, probes, batch, gates, H] inside.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchfil.fisher.rules.cells import Cell, Moved, Slopes
from torchfil.fisher.rules.function import Function

__all__ = ["recurrence"]


def recurrence(
    cell: Cell, gates: Tensor, h: Tensor, m: Tensor | None, weight: Tensor, drop: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """h_1 … h_T and, if the cell has a memory, c_1 … c_T, [T, batch, H] each; differentiable twice, except in W.

    Args:
        cell: One of :data:`torchfil.fisher.rules.cells.CELLS`.
        gates: The gates' inputs besides W h, [T, batch, gates·H].
        h: The first state, [batch, H].
        m: The first memory, if the cell has one.
        weight: W, [gates·H, H].
        drop: Factors for each new state, [T, batch, H]; None: 1.

    Example:
        >>> from torchfil.fisher.rules.cells import CELLS
        >>> states, _ = recurrence(CELLS["RNN_TANH"], torch.ones(2, 1, 1), torch.zeros(1, 1), None, torch.eye(1))
        >>> [round(float(h), 3) for h in states]
        [0.762, 0.943]
    """
    found: Any = _Run.apply(gates, h, m if cell.has_memory else None, weight, drop, cell)
    return (found[0], found[1]) if cell.has_memory else (found, None)


class _Run(Function):
    """(x, h_0, c_0) ↦ h (and c)."""

    @staticmethod
    def forward(ctx: Any, gates: Tensor, h: Tensor, m: Any, weight: Tensor, drop: Tensor | None, cell: Cell) -> Any:
        seen = cell.run(gates, h, m, weight, drop)
        ctx.save_for_backward(gates, h, m, weight, drop, *seen)
        ctx.cell = cell
        ctx.set_materialize_grads(False)
        return (seen[0][1:].clone(), seen[1][1:].clone()) if cell.has_memory else seen[0][1:].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        gates, h, m, weight, drop, *seen = ctx.saved_tensors
        to_h, to_m = gradients if ctx.cell.has_memory else (gradients[0], None)
        if to_h is None and to_m is None:
            return (None,) * 6
        found: Any
        if torch.is_grad_enabled():
            found = _Pulled.apply(to_h, to_m, gates, h, m, weight, drop, ctx.cell, *seen)
        else:  # the last derivative, which may be mapped over probes
            found = _Back.apply(to_h, to_m, weight, drop, ctx.cell, *seen)
        to_gates, to_state, to_memory = found
        return to_gates, to_state, to_memory if ctx.cell.has_memory else None, None, None, None


class _Pulled(Function):
    """(∂h, ∂c, x, h_0, c_0) ↦ δ at x, h_0 and c_0."""

    @staticmethod
    def forward(
        ctx: Any, to_h: Any, to_m: Any, gates: Tensor, h: Any, m: Any, weight: Any, drop: Any, cell: Cell, *seen: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        slopes = cell.slopes(seen, drop)
        one = tuple(None if value is None else value[:, None] for value in (to_h, to_m))
        delta, dh, dm = _swept_back(slopes, weight, cell.gates, *one)
        ctx.save_for_backward(weight, drop, dh, dm, *seen)
        ctx.cell = cell
        ctx.set_materialize_grads(False)
        to_state, to_memory = (value[0] for value in _to_start(cell, slopes, weight, delta, dm))
        return delta.reshape(gates.shape), to_state, to_memory

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        weight, drop, dh, dm, *seen = ctx.saved_tensors
        needs = ctx.needs_input_grad
        if all(u is None for u in gradients):
            return (None,) * len(needs)
        found: Any = _Twice.apply(*gradients, weight, drop, dh, dm, ctx.cell, *seen)
        to_h, to_m, to_gates, to_state, to_memory = found
        by_memory = (to_m if needs[1] else None, to_memory if needs[4] else None)
        return to_h, by_memory[0], to_gates, to_state, by_memory[1], *[None] * (len(needs) - 5)


class _Back(Function):
    """As :class:`_Pulled`, for many (∂h, ∂c) at once if mapped; it is not differentiated."""

    @staticmethod
    def forward(to_h: Any, to_m: Any, *rest: Any) -> tuple[Tensor, ...]:
        each: Any = [None if x is None else x[None] for x in (to_h, to_m)]
        return tuple(value[0] for value in _back(*each, *rest))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Nothing is kept."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[tuple[Tensor, ...], int]:
        """Probes become separate examples."""
        each = _probes_first(info, in_dims[:2], inputs[:2])
        return _back(*each, *inputs[2:]), 0


def _back(to_h: Any, to_m: Any, weight: Tensor, drop: Any, cell: Cell, *seen: Tensor) -> tuple[Tensor, ...]:
    """Probes first, in and out."""
    slopes = cell.slopes(seen, drop)
    by_time = [None if x is None else x.transpose(0, 1) for x in (to_h, to_m)]
    delta, _, dm = _swept_back(slopes, weight, cell.gates, *by_time)
    return delta.flatten(3).transpose(0, 1), *_to_start(cell, slopes, weight, delta, dm)


def _probes_first(info: Any, in_dims: Any, values: Any) -> list[Any]:
    return [
        x if x is None else x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
        for x, dim in zip(values, in_dims, strict=True)
    ]


class _Twice(Function):
    """The derivatives of ⟨u, δ⟩ with respect to (∂h, ∂c, x, h_0, c_0), for many u at once if mapped."""

    @staticmethod
    def forward(u: Any, u_h: Any, u_m: Any, *rest: Any) -> tuple[Tensor, ...]:
        each: Any = [None if x is None else x[None] for x in (u, u_h, u_m)]
        return tuple(value[0] for value in _twice(*each, *rest))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """It is not differentiated."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[tuple[Tensor, ...], int]:
        """Probes become separate examples."""
        each = _probes_first(info, in_dims[:3], inputs[:3])
        return _twice(*each, *inputs[3:]), 0


def _twice(
    u: Any, u_h: Any, u_m: Any, weight: Tensor, drop: Any, dh: Tensor, dm: Tensor, cell: Cell, *seen: Tensor
) -> tuple[Tensor, ...]:
    """Probes first, in and out."""
    slopes, (steps, _, batch, width) = cell.slopes(seen, drop), dm.shape
    count = next(len(x) for x in (u, u_h, u_m) if x is not None)
    state, memory = (dm.new_zeros(count, batch, width) if x is None else x for x in (u_h, u_m))
    if not cell.has_memory:
        memory = state
    shape = (steps, count, batch, cell.gates, width)
    u = dm.new_zeros(shape) if u is None else u.reshape(count, *shape[:1], *shape[2:]).transpose(0, 1)

    gates, states, memories = _swept_on(slopes, weight, u, state, memory)
    moved = Moved(gates, memories[:-1], memories[1:], dh, dm)
    to_gates, to_memory, to_memory_before = cell.curvature(seen, drop, moved)
    sources = to_memory
    if to_memory_before is not None:
        sources = torch.zeros_like(to_memory_before) if to_memory is None else to_memory
        sources[:-1] += to_memory_before[1:]
    delta, _, dm_twice = _swept_back(slopes, weight, cell.gates, None, sources, to_gates, like=gates)

    before = 0 if to_memory_before is None else to_memory_before[0]
    to_state, to_start = _to_start(cell, slopes, weight, delta, dm_twice, before)
    flat = delta.reshape(steps, count, batch, -1)
    return states.transpose(0, 1), memories[1:].transpose(0, 1), flat.transpose(0, 1), to_state, to_start


def _to_start(
    cell: Cell, slopes: Slopes, weight: Tensor, delta: Tensor, dm: Tensor, before: Any = 0
) -> tuple[Tensor, Tensor]:
    """The derivatives at h_0 and c_0, [probes, batch, H]."""
    to_state = (delta[0].flatten(0, 1).flatten(1) @ weight).view(dm.shape[1:])
    to_memory = torch.zeros_like(to_state) if slopes.kept_memory is None else slopes.kept_memory[0] * dm[0]
    to_memory = to_memory + before
    return (to_state, to_memory) if cell.has_memory else (to_state + to_memory, to_memory)


def _swept_back(
    slopes: Slopes,
    weight: Tensor,
    gates: int,
    to_state: Tensor | None,
    to_memory: Tensor | None,
    to_gates: Tensor | None = None,
    like: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """δ at a, [T, probes, batch, gates, H], and dh, dm, from sources at h, m and a; None: 0."""
    given = next(x for x in (to_state, to_memory, to_gates, like) if x is not None)
    steps, count, batch, width = *given.shape[:3], given.shape[-1]
    delta = given.new_empty(steps, count, batch, gates, width)
    dh, dm = (given.new_zeros(steps, count, batch, width) for _ in range(2))
    flat_delta, flat_dh = delta.view(steps, count * batch, -1), dh.view(steps, count * batch, -1)
    flat_source = None if to_state is None else to_state.reshape(steps, count * batch, -1)
    through = slopes.into_memory.shape[3]
    into, shown = slopes.into_memory.unbind(0), slopes.memory_shown

    for t in reversed(range(steps)):
        if t + 1 < steps and flat_source is not None:
            torch.addmm(flat_source[t], flat_delta[t + 1], weight, out=flat_dh[t])
        elif t + 1 < steps:
            torch.mm(flat_delta[t + 1], weight, out=flat_dh[t])
        elif to_state is not None:
            dh[t] = to_state[t]
        torch.mul(dh[t], 1 if shown is None else shown[t], out=dm[t])
        if to_memory is not None:
            dm[t] += to_memory[t]
        if t + 1 < steps and slopes.kept_memory is not None:
            dm[t].addcmul_(slopes.kept_memory[t + 1], dm[t + 1])
        torch.mul(into[t], dm[t].unsqueeze(2), out=delta[t, :, :, :through])
        if slopes.into_state is not None:
            torch.mul(dh[t], slopes.into_state[t], out=delta[t, :, :, through])
        if to_gates is not None:
            delta[t] += to_gates[t]
    return delta, dh, dm


def _swept_on(
    slopes: Slopes, weight: Tensor, u: Tensor, state: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """ȧ, [T, probes, batch, gates, H], ḣ_1 … ḣ_T and ṁ_0 … ṁ_T, for changes u of x and of the first state."""
    steps, count, batch, _, width = u.shape
    a = u.new_empty(u.shape)
    states, memories = u.new_empty(steps, count, batch, width), u.new_empty(steps + 1, count, batch, width)
    flat_u, flat_a = u.reshape(steps, count * batch, -1), a.view(steps, count * batch, -1)
    memories[0] = memory
    through, into, transposed = slopes.into_memory.shape[3], slopes.into_memory.unbind(0), weight.mT

    for t in range(steps):
        before = state if t == 0 else states[t - 1]
        torch.addmm(flat_u[t], before.reshape(count * batch, width), transposed, out=flat_a[t])
        torch.sum(into[t] * a[t, :, :, :through], dim=2, out=memories[t + 1])
        if slopes.kept_memory is not None:
            memories[t + 1].addcmul_(slopes.kept_memory[t], memories[t])
        if slopes.memory_shown is None:
            states[t] = memories[t + 1]
            continue
        torch.mul(slopes.memory_shown[t], memories[t + 1], out=states[t])
        if slopes.into_state is not None:
            states[t].addcmul_(slopes.into_state[t], a[t, :, :, through])
    return a, states, memories
