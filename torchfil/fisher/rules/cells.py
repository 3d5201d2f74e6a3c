"""The cells of recurrent layers: one time step, its linear equations in small changes, and their derivatives.

The equations are those of :mod:`torchfil.fisher.rules.recurrence`, which sweeps them over time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["CELLS", "Cell", "Moved", "Slopes"]


@dataclass(frozen=True)
class Slopes:
    """The coefficients of the linear equations, [T, 1, batch, (gates,) H]; None: 0, or 1 for α."""

    into_memory: Tensor  # β
    kept_memory: Tensor | None  # f
    memory_shown: Tensor | None = None  # α
    into_state: Tensor | None = None  # ω


@dataclass(frozen=True)
class Moved:
    """Small changes ȧ, ṁ_{t−1}, ṁ_t, and the derivatives dh_t, dm_t that a backward sweep has left at each step."""

    gates: Tensor
    memory_before: Tensor
    memory: Tensor
    to_state: Tensor
    to_memory: Tensor


class Cell:
    """One kind of cell.

    Attributes:
        gates: The number of blocks of H numbers in a_t.
        has_memory: Whether it has a state c besides h.
    """

    gates: int
    has_memory = False

    def run(self, gates: Tensor, h: Tensor, m: Tensor, weight: Tensor, drop: Tensor | None) -> tuple[Tensor, ...]:
        """The sweep itself: h_0 … h_T, m_0 … m_T (none without a memory), and whatever else the slopes need."""
        raise NotImplementedError

    def slopes(self, seen: tuple[Tensor, ...], drop: Tensor | None) -> Slopes:
        """The coefficients at the values of the forward pass."""
        raise NotImplementedError

    def curvature(self, seen: tuple[Tensor, ...], drop: Tensor | None, moved: Moved) -> tuple[Any, ...]:
        """∂(Σ_t dh_t·ḣ_t + dm_t·ṁ_t)/∂(a_t, m_t, m_{t−1}) through the coefficients alone; None: 0."""
        raise NotImplementedError


class _Lstm(Cell):
    """i, f, o = σ(a), g = tanh(a); c_t = f c_{t−1} + i g; h_t = o tanh(c_t)."""

    gates = 4
    has_memory = True

    def run(self, gates: Tensor, h: Tensor, m: Tensor, weight: Tensor, drop: Tensor | None) -> tuple[Tensor, ...]:
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

    def slopes(self, seen: tuple[Tensor, ...], drop: Tensor | None) -> Slopes:
        _, memories, active, shown = seen
        i, f, g, o = active.unbind(2)
        into = torch.stack([g * _sigmoid_slope(i), memories[:-1] * _sigmoid_slope(f), i * (1 - g * g)], dim=2)
        alpha, omega = o * (1 - shown * shown), shown * _sigmoid_slope(o)
        if drop is not None:
            alpha, omega = alpha * drop, omega * drop
        return Slopes(into[:, None], f[:, None], alpha[:, None], omega[:, None])

    def curvature(self, seen: tuple[Tensor, ...], drop: Tensor | None, moved: Moved) -> tuple[Any, ...]:
        _, memories, active, tau = (value[:, None] for value in seen)
        (i, f, g, o), (ai, af, ag, ao) = active.unbind(3), moved.gates.unbind(3)
        dm, dh = moved.to_memory, moved.to_state if drop is None else moved.to_state * drop[:, None]
        i1, f1, o1, g1 = _sigmoid_slope(i), _sigmoid_slope(f), _sigmoid_slope(o), 1 - g * g
        both, t1 = i1 * g1, 1 - tau * tau

        to_gates = torch.stack(
            [
                dm * (i1 * (1 - 2 * i) * g * ai + both * ag),
                dm * f1 * torch.addcmul(moved.memory_before, (1 - 2 * f) * memories[:-1], af),
                dm * (both * ai - 2 * i * g * g1 * ag),
                dh * o1 * ((1 - 2 * o) * tau * ao + t1 * moved.memory),
            ],
            dim=3,
        )
        to_memory = dh * t1 * (o1 * ao - 2 * o * tau * moved.memory)
        return to_gates, to_memory, dm * f1 * af


class _Gru(Cell):
    """r, z = σ(a); n = tanh(a_n + r a_m); h_t = n + z (h_{t−1} − n), where W h goes into r, z and a_m."""

    gates = 4

    def run(self, gates: Tensor, h: Tensor, m: Tensor, weight: Tensor, drop: Tensor | None) -> tuple[Tensor, ...]:
        steps, batch, width = len(gates), len(h), h.shape[-1]
        states, active = gates.new_empty(steps + 1, batch, width), gates.new_empty(steps, batch, 4, width)
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

    def slopes(self, seen: tuple[Tensor, ...], drop: Tensor | None) -> Slopes:
        states, active = seen
        r, z, n, hidden = active.unbind(2)
        to_n = (1 - z) * (1 - n * n)
        parts = [to_n * hidden * _sigmoid_slope(r), (states[:-1] - n) * _sigmoid_slope(z), to_n, to_n * r]
        into, kept = torch.stack(parts, dim=2), z
        if drop is not None:
            into, kept = into * drop[:, :, None], z * drop
        return Slopes(into[:, None], kept[:, None])

    def curvature(self, seen: tuple[Tensor, ...], drop: Tensor | None, moved: Moved) -> tuple[Any, ...]:
        states, active = (value[:, None] for value in seen)
        (r, z, n, hidden), (ar, az, an, ah) = active.unbind(3), moved.gates.unbind(3)
        dh = moved.to_memory if drop is None else moved.to_memory * drop[:, None]
        r1, z1, n1 = _sigmoid_slope(r), _sigmoid_slope(z), 1 - n * n
        r_moved, z_moved = r1 * ar, z1 * az
        q_moved = an + r_moved * hidden + r * ah  # q = a_n + r a_m
        to_n = dh * (1 - z) * n1
        to_q = -2 * to_n * n * q_moved - dh * z_moved * n1

        to_r = to_q * hidden + to_n * ah
        to_z = dh * ((1 - 2 * z) * z_moved * (states[:-1] - n) + z1 * (moved.memory_before - n1 * q_moved))
        parts = [r1 * to_r + (1 - 2 * r) * r_moved * hidden * to_n, to_z, to_q, to_q * r + to_n * r_moved]
        return torch.stack(parts, dim=3), None, dh * z_moved


class _Elman(Cell):
    """h_t = tanh(a), or ReLU."""

    gates = 1

    def __init__(self, function: str) -> None:
        self.function = function

    def run(self, gates: Tensor, h: Tensor, m: Tensor, weight: Tensor, drop: Tensor | None) -> tuple[Tensor, ...]:
        states = gates.new_empty(len(gates) + 1, *h.shape)
        values = torch.empty_like(states[1:])
        states[0] = h
        for t in range(len(gates)):
            a = torch.addmm(gates[t], states[t], weight.mT)
            torch.tanh(a, out=values[t]) if self.function == "tanh" else torch.clamp(a, min=0, out=values[t])
            states[t + 1] = values[t] if drop is None else values[t] * drop[t]
        return states, values

    def slopes(self, seen: tuple[Tensor, ...], drop: Tensor | None) -> Slopes:
        values = seen[1]
        slope = 1 - values * values if self.function == "tanh" else (values > 0).to(values.dtype)
        return Slopes((slope if drop is None else slope * drop)[:, None, :, None], None)

    def curvature(self, seen: tuple[Tensor, ...], drop: Tensor | None, moved: Moved) -> tuple[Any, ...]:
        if self.function == "relu":
            return None, None, None
        values = seen[1][:, None]
        dh = moved.to_memory if drop is None else moved.to_memory * drop[:, None]
        return (-2 * dh * values * (1 - values * values))[:, :, :, None] * moved.gates, None, None


CELLS: dict[str, Cell] = {"LSTM": _Lstm(), "GRU": _Gru(), "RNN_TANH": _Elman("tanh"), "RNN_RELU": _Elman("relu")}


def _sigmoid_slope(y: Tensor) -> Tensor:
    """σ′ from σ."""
    return y * (1 - y)
