"""Recurrent layers: LSTM, GRU and Elman's, in several layers and both directions, of whole or packed sequences.

Each of their weights is a linear layer over all time steps, applied to the inputs x_t or to the states h_{t−1}; δ_t is
the gradient at the gates. :mod:`torchfil.fisher.rules.recurrence` computes the states from the gates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from torchfil.fisher.rules.call import UnsupportedCallError
from torchfil.fisher.rules.cells import CELLS
from torchfil.fisher.rules.linear import LinearRule
from torchfil.fisher.rules.recurrence import recurrence
from torchfil.fisher.rules.telling import register_telling, tell_use

__all__ = ["run_recurrent"]

_RULE = LinearRule()


@dataclass(frozen=True)
class _Sequences:
    """The layout of the sequences outside: whole ones with batch or time first, or packed ones.

    Attributes:
        batch_first: Whether examples come before time steps.
        packed: The packed sequences; None: whole ones.
    """

    batch_first: bool
    packed: PackedSequence | None = None

    @property
    def _places(self) -> Tensor:
        """The places of the packed rows in [T, batch], with the longest sequence first."""
        assert self.packed is not None
        sizes = self.packed.batch_sizes
        return (torch.arange(int(sizes[0])) < sizes[:, None]).flatten().nonzero()[:, 0].to(self.packed.data.device)

    @property
    def lengths(self) -> Tensor | None:
        """The lengths of packed sequences, [batch]."""
        if self.packed is None:
            return None
        sizes = self.packed.batch_sizes
        lengths = (torch.arange(int(sizes[0])) < sizes[:, None]).sum(dim=0).to(self.packed.data.device)
        order = self.packed.unsorted_indices
        return lengths if order is None else lengths[order]

    def laid_out(self, data: Tensor) -> Tensor:
        """[batch, T, …], with zeros after the ends."""
        if self.packed is None:
            return data if self.batch_first else data.transpose(0, 1)
        sizes, order = self.packed.batch_sizes, self.packed.unsorted_indices
        rows = data.new_zeros(len(sizes) * int(sizes[0]), data.shape[1]).index_copy(0, self._places, data)
        rows = rows.reshape(len(sizes), -1, data.shape[1])
        return (rows if order is None else rows[:, order]).transpose(0, 1)

    def put_back(self, values: Tensor) -> Any:
        """From [batch, T, …] to the original layout."""
        if self.packed is None:
            return values if self.batch_first else values.transpose(0, 1)
        _, sizes, order, inverse = self.packed
        values = values.transpose(0, 1)
        values = values if order is None else values[:, order]
        return PackedSequence(values.flatten(0, 1)[self._places], sizes, order, inverse)


def run_recurrent(
    module: Any, mode: str, sequences: Tensor | PackedSequence, state: Any = None, *, drops_states: bool = False
) -> tuple[Any, Any]:
    """The outputs of a recurrent module: all states of its last layer, and the last states of all layers.

    Args:
        module: A module with the attributes and parameter names of :class:`torch.nn.LSTM`.
        mode: The cell, by torch's name.
        sequences: Its input.
        state: The first states, h or (h, c), [layers·directions, batch, H] each; None: 0.
        drops_states: Whether dropout applies to every new state before it is used again, as in Opacus's layers, or
            between layers, as in torch's.

    Raises:
        UnsupportedCallError: A single sequence without a batch, projections, or dropout in packed sequences.
    """
    dropout = module.dropout if module.training else 0.0
    packed = sequences if isinstance(sequences, PackedSequence) else None
    _check(module, sequences, dropout)
    layout = _Sequences(module.batch_first, packed)
    x = layout.laid_out(sequences.data if isinstance(sequences, PackedSequence) else sequences)
    cell, directions = CELLS[mode], 2 if module.bidirectional else 1
    given = state if cell.has_memory and state is not None else (state, None)

    last: list[tuple[Tensor, Tensor | None]] = []
    for layer in range(module.num_layers):
        outputs = []
        for direction in range(directions):
            place = layer * directions + direction
            first = [None if value is None else value[place] for value in given]
            drop = partial(_drawn_by_step, dropout) if drops_states and dropout else None
            states, ends = _run_layer(module, mode, layer, direction == 1, x, first, layout.lengths, drop)
            outputs.append(states)
            last.append(ends)
        x = outputs[0] if directions == 1 else torch.cat(outputs, dim=2)
        if dropout and not drops_states and layer + 1 < module.num_layers:  # drawn in torch's order, time steps first
            x = F.dropout(x.transpose(0, 1), dropout).transpose(0, 1)

    h = torch.stack([state for state, _ in last])
    c = torch.stack([memory for _, memory in last if memory is not None]) if cell.has_memory else None
    return layout.put_back(x), h if c is None else (h, c)


def _check(module: Any, sequences: Any, dropout: float) -> None:
    kind = type(module).__name__
    if not isinstance(sequences, PackedSequence) and sequences.ndim != 3:
        raise UnsupportedCallError(f"a {kind} is given {sequences.ndim} dimensions; give it [batch, time, features]")
    if getattr(module, "proj_size", 0):
        raise UnsupportedCallError(f"a {kind} with proj_size={module.proj_size}; use proj_size=0 and a Linear after it")
    if isinstance(sequences, PackedSequence) and dropout:
        raise UnsupportedCallError(
            f"a {kind} with dropout={dropout} of packed sequences draws across examples; use dropout=0 there"
        )


def _run_layer(
    module: Any,
    mode: str,
    layer: int,
    backwards: bool,
    x: Tensor,
    first: list[Tensor | None],
    lengths: Tensor | None,
    drop: Callable[[Tensor], Tensor] | None,
) -> tuple[Tensor, tuple[Tensor, Tensor | None]]:
    """One layer in one direction: its states [batch, T, H] for x [batch, T, …], and its last state and memory."""
    cell, suffix = CELLS[mode], f"l{layer}{'_reverse' if backwards else ''}"
    names = {
        part: {kind: f"{kind}_{part}_{suffix}" for kind in ("weight", "bias")[: 2 if module.bias else 1]}
        for part in ("ih", "hh")
    }
    weights = {part: [getattr(module, name) for name in names[part].values()] for part in names}
    turned = partial(_turned, lengths=lengths) if backwards else lambda value: value

    inputs = tell_use(module, _RULE, x, F.linear(x, *weights["ih"]), names["ih"])
    weight, *bias = weights["hh"]
    gates = hidden = turned(inputs)
    if mode == "GRU":  # the states enter the last gate separately
        hidden = bias[0] if bias else weight.new_zeros(len(weight))
        hidden = hidden.expand(gates.shape).detach().requires_grad_()
        width = 2 * module.hidden_size
        gates = torch.cat([gates[..., :width] + hidden[..., :width], gates[..., width:], hidden[..., width:]], dim=2)
        weight = torch.cat([weight[:width], torch.zeros_like(weight[width:]), weight[width:]])
    elif bias:
        gates = gates + bias[0]

    start = [x.new_zeros(len(x), module.hidden_size) if value is None else value for value in first]
    multiplier = None if drop is None else torch.stack([drop(start[0]) for _ in range(x.shape[1])])
    found, memories = recurrence(cell, gates.transpose(0, 1), start[0], start[1], weight, multiplier)
    before = torch.cat([start[0][None], found[:-1]]).transpose(0, 1)
    tell_use(module, _RULE, before, hidden, names["hh"])

    # The sequences end at different times; values after the ends are not used.
    def at_the_end(values: Tensor) -> Tensor:
        return values[-1] if lengths is None else values[lengths - 1, torch.arange(len(lengths), device=values.device)]

    return turned(found.transpose(0, 1)), (at_the_end(found), None if memories is None else at_the_end(memories))


def _turned(values: Tensor, lengths: Tensor | None) -> Tensor:
    """[batch, T, …], each sequence reversed."""
    if lengths is None:
        return values.flip(1)
    steps = torch.arange(values.shape[1], device=values.device)
    order = torch.where(steps < lengths[:, None], lengths[:, None] - 1 - steps, steps)
    return values.gather(1, order[:, :, None].expand(values.shape))


def _drawn_by_step(dropout: float, like: Tensor) -> Tensor:
    return F.dropout(torch.ones_like(like), dropout)


def _substitute(module: nn.RNNBase) -> Callable[..., Any]:
    def forward(sequences: Any, hx: Any = None) -> Any:
        return run_recurrent(module, module.mode, sequences, hx)

    return forward


for _kind in (nn.LSTM, nn.GRU, nn.RNN):
    register_telling(_kind, _substitute)
