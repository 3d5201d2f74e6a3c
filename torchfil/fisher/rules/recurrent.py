r"""Recurrent layers: LSTM, GRU and Elman's, in several layers and both directions, of whole or
packed sequences.

Each of their weights is a linear layer over all time steps, applied to the inputs x_t or to the
states h_{t−1}; δ_t is the gradient at the gates. The states are those of a recurrence h_t =
cell(a_t, h_{t−1}), a_t = x_t + W h_{t−1}, whose second derivative is two more sweeps over time.
From here on, x are the gates' inputs, however they were computed; m is the cell's memory (c in an
LSTM, otherwise h itself). At the values of a forward pass, every cell is linear in small changes,
with coefficients that need no sweep:

    ṁ_t = f_t ṁ_{t−1} + Σ_k β_{kt} ȧ_{kt},       ḣ_t = α_t ṁ_t + ω_t ȧ_{ot}    (else ḣ_t = ṁ_t).

* The derivative δ = ∂⟨γ, h⟩/∂x is a backward sweep through these equations, from γ
  (:func:`_swept_back`).
* The derivative of ⟨u, δ⟩ = ⟨γ, ḣ(u)⟩ with respect to γ is a forward sweep, ḣ(u)
  (:func:`_swept_on`).
* The derivative of ⟨u, δ⟩ with respect to x goes through the coefficients. Each cell adds a source
  at its inputs, which also needs no sweep (``Cell.curvature``), and one more backward sweep takes
  the sources to x.

Time is the first dimension: [T, batch, gates·H] outside, [T, probes, batch, gates, H] inside.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from torchfil.fisher.rules.base import UnsupportedCallError
from torchfil.fisher.rules.linear import LinearRule
from torchfil.fisher.rules.substitutes import Function, register_substitute, report_use

_RULE = LinearRule()

Seen = tuple[Tensor, ...]  # what a cell's sweep has kept
Sources = tuple[Tensor | None, Tensor | None, Tensor | None]  # derivatives at a_t, m_t and m_{t−1}


def run_recurrent(
    module: nn.RNNBase,
    mode: str,
    sequences: Tensor | PackedSequence,
    hx: Tensor | tuple[Tensor, Tensor] | None = None,
    *,
    drops_states: bool = False,
) -> tuple[Any, Any]:
    """The outputs of a recurrent module: all states of its last layer, and the last states of all
    layers.

    Args:
        module: A module with the attributes and parameter names of :class:`torch.nn.LSTM`.
        mode: The cell, by torch's name.
        sequences: Its input, a tensor or packed sequences.
        hx: The first states, h or (h, c), [layers·directions, batch, H] each; None: 0.
        drops_states: Whether dropout applies to every new state before it is used again, as in
            Opacus's layers, or between layers, as in torch's.

    Raises:
        UnsupportedCallError: A single sequence without a batch, projections, or dropout in packed
            sequences.
    """
    dropout = module.dropout if module.training else 0.0
    _check_served(module, sequences, dropout)
    lengths = ends_at = None
    time_first = False
    if isinstance(sequences, PackedSequence):
        x, lengths = pad_packed_sequence(sequences, batch_first=True)
        ends_at = lengths.to(x.device)
    else:
        time_first = not module.batch_first
        x = sequences.transpose(0, 1) if time_first else sequences
    cell = CELLS[mode]
    given = hx if cell.has_memory and hx is not None else (hx, None)

    last: list[tuple[Tensor, Tensor | None]] = []
    for layer in range(module.num_layers):
        outputs = []
        for suffix in (f"l{layer}", f"l{layer}_reverse")[: 1 + module.bidirectional]:
            first = [None if value is None else value[len(last)] for value in given]
            states, at_the_end = _run_layer(
                module, mode, suffix, x, first, ends_at, dropout if drops_states else 0.0
            )
            outputs.append(states)
            last.append(at_the_end)
        x = torch.cat(outputs, dim=2)
        # drawn in torch's order, time steps first
        if dropout and not drops_states and layer + 1 < module.num_layers:
            x = F.dropout(x.transpose(0, 1).contiguous(), dropout).transpose(0, 1)

    x = x.transpose(0, 1) if time_first else x
    h, *c = [torch.stack(values) for values in zip(*last, strict=True) if values[0] is not None]
    ends = (h, *c) if c else h
    if not isinstance(sequences, PackedSequence) or lengths is None:
        return x, ends
    return pack_padded_sequence(
        x, lengths, batch_first=True, enforce_sorted=sequences.sorted_indices is None
    ), ends


def _check_served(module: nn.RNNBase, sequences: Tensor | PackedSequence, dropout: float) -> None:
    """Raise for what the sweeps do not know."""
    kind = type(module).__name__
    if isinstance(sequences, Tensor) and sequences.ndim != 3:
        raise UnsupportedCallError(
            f"a {kind} is given {sequences.ndim} dimensions; give it [batch, time, features]"
        )
    if getattr(module, "proj_size", 0):
        raise UnsupportedCallError(
            f"a {kind} with proj_size={module.proj_size}; use proj_size=0 and a Linear after it"
        )
    if dropout and isinstance(sequences, PackedSequence):
        raise UnsupportedCallError(
            f"a {kind} of packed sequences with dropout={dropout} draws across examples; use 0"
        )


def _run_layer(
    module: nn.RNNBase,
    mode: str,
    suffix: str,
    x: Tensor,
    first: list[Tensor | None],
    lengths: Tensor | None,
    dropout: float,
) -> tuple[Tensor, tuple[Tensor, Tensor | None]]:
    """One layer in one direction: its states [batch, T, H] for x [batch, T, …], and its last state
    and memory.
    """
    cell, backwards = CELLS[mode], suffix.endswith("_reverse")
    kinds = ("weight", "bias") if module.bias else ("weight",)
    names = {part: {kind: f"{kind}_{part}_{suffix}" for kind in kinds} for part in ("ih", "hh")}
    weights = {part: [getattr(module, name) for name in names[part].values()] for part in names}

    def turned(values: Tensor) -> Tensor:
        return _turned(values, lengths) if backwards else values

    inputs = report_use(module, _RULE, x, F.linear(x, *weights["ih"]), names["ih"])
    weight, *bias = weights["hh"]
    gates = hidden = turned(inputs)
    if mode == "GRU":  # the states enter the last gate separately
        hidden = bias[0] if bias else weight.new_zeros(len(weight))
        hidden = hidden.expand(gates.shape).detach().requires_grad_()
        width = 2 * module.hidden_size
        gates = torch.cat(
            [gates[..., :width] + hidden[..., :width], gates[..., width:], hidden[..., width:]],
            dim=2,
        )
        weight = torch.cat([weight[:width], torch.zeros_like(weight[width:]), weight[width:]])
    elif bias:
        gates = gates + bias[0]

    start = [x.new_zeros(len(x), module.hidden_size) if value is None else value for value in first]
    drop = None
    if dropout:  # drawn for each new state
        drop = torch.stack(
            [F.dropout(torch.ones_like(start[0]), dropout) for _ in range(x.shape[1])]
        )
    found, memories = recurrence(cell, gates.transpose(0, 1), start[0], start[1], weight, drop)
    report_use(
        module, _RULE, torch.cat([start[0][None], found[:-1]]).transpose(0, 1), hidden, names["hh"]
    )

    # The sequences end at different times; values after the ends are not used.
    def at_the_end(values: Tensor) -> Tensor:
        return (
            values[-1]
            if lengths is None
            else values[lengths - 1, torch.arange(len(lengths), device=values.device)]
        )

    return turned(found.transpose(0, 1)), (
        at_the_end(found),
        None if memories is None else at_the_end(memories),
    )


def _turned(values: Tensor, lengths: Tensor | None) -> Tensor:
    """[batch, T, …], each sequence reversed."""
    if lengths is None:
        return values.flip(1)
    steps = torch.arange(values.shape[1], device=values.device)
    order = torch.where(steps < lengths[:, None], lengths[:, None] - 1 - steps, steps)
    return values.gather(1, order[:, :, None].expand(values.shape))


def recurrence(
    cell: Cell,
    gates: Tensor,
    h: Tensor,
    m: Tensor | None,
    weight: Tensor,
    drop: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """h_1 … h_T and, if the cell has a memory, c_1 … c_T, [T, batch, H] each.

    Differentiable twice, except in W.

    Args:
        cell: One of :data:`CELLS`.
        gates: The gates' inputs besides W h, [T, batch, gates·H].
        h: The first state, [batch, H].
        m: The first memory, if the cell has one.
        weight: W, [gates·H, H].
        drop: Factors for each new state, [T, batch, H]; None: 1.

    Example:
        >>> states, _ = recurrence(
        ...     CELLS["RNN_TANH"], torch.ones(2, 1, 1), torch.zeros(1, 1), None, torch.eye(1)
        ... )
        >>> [round(float(h), 3) for h in states]
        [0.762, 0.943]
    """
    found = _Run.apply(gates, h, m if cell.has_memory else None, weight, drop, cell)
    return (found[0], found[1]) if cell.has_memory else (found, None)


class _Run(Function):
    """(x, h_0, c_0) ↦ h (and c)."""

    @staticmethod
    def forward(
        ctx: Any,
        gates: Tensor,
        h: Tensor,
        m: Any,
        weight: Tensor,
        drop: Tensor | None,
        cell: Cell,
    ) -> Any:
        seen = cell.run(gates, h, m, weight, drop)
        ctx.save_for_backward(gates, h, m, weight, drop, *seen)
        ctx.cell = cell
        ctx.set_materialize_grads(False)
        return (
            (seen[0][1:].clone(), seen[1][1:].clone()) if cell.has_memory else seen[0][1:].clone()
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        gates, h, m, weight, drop, *seen = ctx.saved_tensors
        to_h, to_m = gradients if ctx.cell.has_memory else (gradients[0], None)
        if to_h is None and to_m is None:
            return (None,) * 6
        if torch.is_grad_enabled():
            found = _Pulled.apply(to_h, to_m, gates, h, m, weight, drop, ctx.cell, *seen)
        else:  # the last derivative, which may be mapped over probes
            found = _ForProbes.apply(_back, (to_h, to_m), weight, drop, ctx.cell, *seen)
        to_gates, to_state, to_memory, *_ = found
        return to_gates, to_state, to_memory if ctx.cell.has_memory else None, None, None, None


class _Pulled(Function):
    """(∂h, ∂c, x, h_0, c_0) ↦ δ at x, h_0 and c_0."""

    @staticmethod
    def forward(
        ctx: Any,
        to_h: Tensor | None,
        to_m: Tensor | None,
        gates: Tensor,
        h: Tensor | None,
        m: Tensor | None,
        weight: Tensor,
        drop: Tensor | None,
        cell: Cell,
        *seen: Tensor,
    ) -> tuple[Tensor, ...]:
        *found, dh, dm = _ForProbes.forward(_back, (to_h, to_m), weight, drop, cell, *seen)
        ctx.save_for_backward(weight, drop, dh, dm, *seen)
        ctx.cell = cell
        ctx.set_materialize_grads(False)
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        weight, drop, dh, dm, *seen = ctx.saved_tensors
        needs = ctx.needs_input_grad
        if all(u is None for u in gradients):
            return (None,) * len(needs)
        found = _ForProbes.apply(_twice, gradients, weight, drop, dh, dm, ctx.cell, *seen)
        to_h, to_m, to_gates, to_state, to_memory = found
        by_memory = (to_m if needs[1] else None, to_memory if needs[4] else None)
        return to_h, by_memory[0], to_gates, to_state, by_memory[1], *[None] * (len(needs) - 5)


class _ForProbes(Function):
    """``function(*values, *rest)`` of values and results with probes first.

    For one probe, or many if mapped.

    It is not differentiated.
    """

    @staticmethod
    def forward(
        function: Callable[..., Any], values: tuple[Tensor | None, ...], *rest: object
    ) -> tuple[Tensor, ...]:
        return tuple(
            result[0]
            for result in function(*(None if x is None else x[None] for x in values), *rest)
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[object, ...], output: object) -> None:
        """Nothing is kept."""

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, function: Any, values: tuple[Tensor | None, ...], *rest: Any
    ) -> tuple[Any, int]:
        """Probes become separate examples."""
        each = [
            x
            if x is None
            else x.expand(info.batch_size, *x.shape)
            if dim is None
            else x.movedim(dim, 0)
            for x, dim in zip(values, in_dims[1], strict=True)
        ]
        return function(*each, *rest), 0


def _back(
    to_h: Tensor | None,
    to_m: Tensor | None,
    weight: Tensor,
    drop: Tensor | None,
    cell: Cell,
    *seen: Tensor,
) -> tuple[Tensor, ...]:
    """δ at x, h_0 and c_0, and dh, dm at every step, with probes first, in and out."""
    slopes = cell.slopes(seen, drop)
    by_time = [None if x is None else x.transpose(0, 1) for x in (to_h, to_m)]
    count = next(len(x) for x in (to_h, to_m) if x is not None)
    delta, dh, dm = _swept_back(slopes, weight, count, *by_time)
    at_start = _to_start(cell, slopes, weight, delta, dm)
    return delta.flatten(3).transpose(0, 1), *at_start, dh.transpose(0, 1), dm.transpose(0, 1)


def _twice(
    u: Tensor | None,
    u_h: Tensor | None,
    u_m: Tensor | None,
    weight: Tensor,
    drop: Tensor | None,
    dh: Tensor,
    dm: Tensor,
    cell: Cell,
    *seen: Tensor,
) -> tuple[Tensor, ...]:
    """The derivatives of ⟨u, δ⟩ with respect to (∂h, ∂c, x, h_0, c_0), with probes first, in and
    out.
    """
    slopes, (steps, batch, width) = cell.slopes(seen, drop), dm.shape
    count = next(len(x) for x in (u, u_h, u_m) if x is not None)
    state, memory = (dm.new_zeros(count, batch, width) if x is None else x for x in (u_h, u_m))
    if not cell.has_memory:
        memory = state
    shape = (steps, count, batch, cell.gates, width)
    u = (
        dm.new_zeros(shape)
        if u is None
        else u.reshape(count, *shape[:1], *shape[2:]).transpose(0, 1)
    )

    gates, states, memories = _swept_on(slopes, weight, u, state, memory)
    to_gates, to_memory, to_memory_before = cell.curvature(
        seen, drop, gates, memories, dh[:, None], dm[:, None]
    )
    sources = to_memory
    if to_memory_before is not None:
        sources = torch.zeros_like(to_memory_before) if to_memory is None else to_memory
        sources[:-1] += to_memory_before[1:]
    delta, _, dm_twice = _swept_back(slopes, weight, count, None, sources, to_gates)

    before = 0 if to_memory_before is None else to_memory_before[0]
    to_state, to_start = _to_start(cell, slopes, weight, delta, dm_twice, before)
    flat = delta.reshape(steps, count, batch, -1)
    return (
        states.transpose(0, 1),
        memories[1:].transpose(0, 1),
        flat.transpose(0, 1),
        to_state,
        to_start,
    )


def _to_start(
    cell: Cell,
    slopes: Slopes,
    weight: Tensor,
    delta: Tensor,
    dm: Tensor,
    before: Tensor | float = 0,
) -> tuple[Tensor, Tensor]:
    """The derivatives at h_0 and c_0, [probes, batch, H]."""
    to_state = (delta[0].flatten(0, 1).flatten(1) @ weight).view(dm.shape[1:])
    to_memory = (
        torch.zeros_like(to_state) if slopes.kept_memory is None else slopes.kept_memory[0] * dm[0]
    )
    to_memory = to_memory + before
    return (to_state, to_memory) if cell.has_memory else (to_state + to_memory, to_memory)


def _swept_back(
    slopes: Slopes,
    weight: Tensor,
    count: int,
    to_state: Tensor | None,
    to_memory: Tensor | None,
    to_gates: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """δ at a, [T, probes, batch, gates, H], and dh, dm, from sources at h, m and a; None: 0."""
    like = slopes.into_memory
    steps, _, batch, through, width = like.shape
    delta = like.new_empty(steps, count, batch, len(weight) // width, width)
    dh, dm = (like.new_zeros(steps, count, batch, width) for _ in range(2))
    flat_delta, flat_dh = delta.view(steps, count * batch, -1), dh.view(steps, count * batch, -1)
    flat_source = None if to_state is None else to_state.reshape(steps, count * batch, -1)
    into, shown = like.unbind(0), slopes.memory_shown

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
) -> tuple[Tensor, ...]:
    """ȧ, [T, probes, batch, gates, H], ḣ_1 … ḣ_T and ṁ_0 … ṁ_T, for changes u of x and of the first
    state.
    """
    steps, count, batch, _, width = u.shape
    a = u.new_empty(u.shape)
    states, memories = (
        u.new_empty(steps, count, batch, width),
        u.new_empty(steps + 1, count, batch, width),
    )
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


class Slopes(NamedTuple):
    """The coefficients of the linear equations, [T, 1, batch, (gates,) H]; None: 0, or 1 for α."""

    into_memory: Tensor  # β
    kept_memory: Tensor | None  # f
    memory_shown: Tensor | None = None  # α
    into_state: Tensor | None = None  # ω


class _Lstm:
    """i, f, o = σ(a), g = tanh(a); c_t = f c_{t−1} + i g; h_t = o tanh(c_t).

    Attributes:
        gates: The number of blocks of H numbers in a_t.
        has_memory: Whether it has a state c besides h.
    """

    gates = 4
    has_memory = True

    def run(self, gates: Tensor, h: Tensor, m: Tensor, weight: Tensor, drop: Tensor | None) -> Seen:
        """The sweep itself: h_0 … h_T, m_0 … m_T (none without a memory), and whatever else the
        slopes need.
        """
        steps, batch, width = len(gates), len(h), h.shape[-1]
        states, memories = (gates.new_empty(steps + 1, batch, width) for _ in range(2))
        shown, active = torch.empty_like(states[1:]), gates.new_empty(steps, batch, 4, width)
        states[0], memories[0] = h, m
        transposed, factors = weight.mT, active.unbind(2)

        for t in range(steps):
            a = torch.addmm(gates[t], states[t], transposed).view(batch, 4, width)
            torch.sigmoid(a, out=active[t])
            i, f, g, o = (factor[t] for factor in factors)
            torch.tanh(a[:, 2], out=g)
            torch.addcmul(i * g, f, memories[t], out=memories[t + 1])
            torch.tanh(memories[t + 1], out=shown[t])
            torch.mul(o, shown[t], out=states[t + 1])
            if drop is not None:
                states[t + 1] *= drop[t]
        return states, memories, active, shown

    def slopes(self, seen: Seen, drop: Tensor | None) -> Slopes:
        """The coefficients at the values of the forward pass."""
        _, memories, active, shown = seen
        i, f, g, o = active.unbind(2)
        into = torch.stack(
            [g * _sigmoid_slope(i), memories[:-1] * _sigmoid_slope(f), i * (1 - g * g)], dim=2
        )
        alpha, omega = o * (1 - shown * shown), shown * _sigmoid_slope(o)
        alpha, omega = (value if drop is None else value * drop for value in (alpha, omega))
        return Slopes(into[:, None], f[:, None], alpha[:, None], omega[:, None])

    def curvature(
        self,
        seen: Seen,
        drop: Tensor | None,
        gates: Tensor,
        memories: Tensor,
        dh: Tensor,
        dm: Tensor,
    ) -> Sources:
        """∂(Σ_t dh_t·ḣ_t + dm_t·ṁ_t)/∂(a_t, m_t, m_{t−1}) through the coefficients alone; None: 0.

        Args:
            seen: The result of :meth:`run`.
            drop: Factors for each new state.
            gates: The small changes ȧ.
            memories: The small changes ṁ_0 … ṁ_T.
            dh: The derivatives that a backward sweep has left at each h_t.
            dm: Those at each m_t.
        """
        _, c, active, tau = (value[:, None] for value in seen)
        (i, f, g, o), (ai, af, ag, ao) = active.unbind(3), gates.unbind(3)
        dh = dh if drop is None else dh * drop[:, None]
        i1, f1, o1, g1 = _sigmoid_slope(i), _sigmoid_slope(f), _sigmoid_slope(o), 1 - g * g
        both, t1 = i1 * g1, 1 - tau * tau

        to_gates = torch.stack(
            [
                dm * (i1 * (1 - 2 * i) * g * ai + both * ag),
                dm * f1 * torch.addcmul(memories[:-1], (1 - 2 * f) * c[:-1], af),
                dm * (both * ai - 2 * i * g * g1 * ag),
                dh * o1 * ((1 - 2 * o) * tau * ao + t1 * memories[1:]),
            ],
            dim=3,
        )
        to_memory = dh * t1 * (o1 * ao - 2 * o * tau * memories[1:])
        return to_gates, to_memory, dm * f1 * af


class _Gru:
    """r, z = σ(a); n = tanh(a_n + r a_m).

    H_t = n + z (h_{t−1} − n), where W h goes into r, z and a_m.
    """

    gates = 4
    has_memory = False

    def run(self, gates: Tensor, h: Tensor, m: Tensor, weight: Tensor, drop: Tensor | None) -> Seen:
        steps, batch, width = len(gates), len(h), h.shape[-1]
        states, active = (
            gates.new_empty(steps + 1, batch, width),
            gates.new_empty(steps, batch, 4, width),
        )
        states[0] = h
        transposed = weight.mT
        for t in range(steps):
            a = torch.addmm(gates[t], states[t], transposed).view(batch, 4, width)
            torch.sigmoid(a[:, :2], out=active[t, :, :2])
            r, z, n, hidden = active[t].unbind(1)
            hidden.copy_(a[:, 3])
            torch.tanh(torch.addcmul(a[:, 2], r, hidden), out=n)
            torch.lerp(n, states[t], z, out=states[t + 1])
            if drop is not None:
                states[t + 1] *= drop[t]
        return states, active

    def slopes(self, seen: Seen, drop: Tensor | None) -> Slopes:
        states, active = seen
        r, z, n, hidden = active.unbind(2)
        to_n = (1 - z) * (1 - n * n)
        parts = [
            to_n * hidden * _sigmoid_slope(r),
            (states[:-1] - n) * _sigmoid_slope(z),
            to_n,
            to_n * r,
        ]
        into, kept = torch.stack(parts, dim=2), z
        if drop is not None:
            into, kept = into * drop[:, :, None], z * drop
        return Slopes(into[:, None], kept[:, None])

    def curvature(
        self,
        seen: Seen,
        drop: Tensor | None,
        gates: Tensor,
        memories: Tensor,
        dh: Tensor,
        dm: Tensor,
    ) -> Sources:
        states, active = (value[:, None] for value in seen)
        (r, z, n, hidden), (ar, az, an, ah) = active.unbind(3), gates.unbind(3)
        dh = dm if drop is None else dm * drop[:, None]
        r1, z1, n1 = _sigmoid_slope(r), _sigmoid_slope(z), 1 - n * n
        r_moved, z_moved = r1 * ar, z1 * az
        q_moved = an + r_moved * hidden + r * ah  # q = a_n + r a_m
        to_n = dh * (1 - z) * n1
        to_q = -2 * to_n * n * q_moved - dh * z_moved * n1

        to_r = to_q * hidden + to_n * ah
        to_z = dh * (
            (1 - 2 * z) * z_moved * (states[:-1] - n) + z1 * (memories[:-1] - n1 * q_moved)
        )
        parts = [
            r1 * to_r + (1 - 2 * r) * r_moved * hidden * to_n,
            to_z,
            to_q,
            to_q * r + to_n * r_moved,
        ]
        return torch.stack(parts, dim=3), None, dh * z_moved


class _Elman:
    """h_t = tanh(a), or ReLU."""

    gates = 1
    has_memory = False

    def __init__(self, function: str) -> None:
        self.function = function

    def run(self, gates: Tensor, h: Tensor, m: Tensor, weight: Tensor, drop: Tensor | None) -> Seen:
        states = gates.new_empty(len(gates) + 1, *h.shape)
        values = torch.empty_like(states[1:])
        states[0] = h
        for t in range(len(gates)):
            a = torch.addmm(gates[t], states[t], weight.mT)
            torch.tanh(a, out=values[t]) if self.function == "tanh" else torch.clamp(
                a, min=0, out=values[t]
            )
            states[t + 1] = values[t] if drop is None else values[t] * drop[t]
        return states, values

    def slopes(self, seen: Seen, drop: Tensor | None) -> Slopes:
        values = seen[1]
        slope = 1 - values * values if self.function == "tanh" else (values > 0).to(values.dtype)
        return Slopes((slope if drop is None else slope * drop)[:, None, :, None], None)

    def curvature(
        self,
        seen: Seen,
        drop: Tensor | None,
        gates: Tensor,
        memories: Tensor,
        dh: Tensor,
        dm: Tensor,
    ) -> Sources:
        if self.function == "relu":
            return None, None, None
        values = seen[1][:, None]
        dh = dm if drop is None else dm * drop[:, None]
        return (-2 * dh * values * (1 - values * values))[:, :, :, None] * gates, None, None


Cell = _Lstm | _Gru | _Elman
CELLS: dict[str, Cell] = {
    "LSTM": _Lstm(),
    "GRU": _Gru(),
    "RNN_TANH": _Elman("tanh"),
    "RNN_RELU": _Elman("relu"),
}


def _sigmoid_slope(y: Tensor) -> Tensor:
    """σ′ from σ."""
    return y * (1 - y)


for _kind in (nn.LSTM, nn.GRU, nn.RNN):
    register_substitute(
        _kind, lambda module: partial(run_recurrent, module, module.mode), reports_uses=True
    )
