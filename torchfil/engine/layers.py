"""Opacus's recurrent layers, which a recorded pass computes as torch's: importing this registers them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opacus.layers import DPGRU, DPLSTM, DPRNN

from torchfil.fisher.rules.recurrent import run_recurrent
from torchfil.fisher.rules.substitutes import register_substitute

__all__ = ["recurrent_forward"]


def recurrent_forward(module: Any) -> Callable[..., Any]:
    """The substitute for ``module.forward``; its dropout applies to every state before it is used again."""
    modes = {DPLSTM: "LSTM", DPGRU: "GRU"}
    mode = modes.get(type(module)) or f"RNN_{module.cell_params['nonlinearity'].upper()}"

    def forward(sequences: Any, state_init: Any = None) -> Any:
        return run_recurrent(module, mode, sequences, state_init, drops_states=True)

    return forward


for _kind in (DPLSTM, DPGRU, DPRNN):
    register_substitute(_kind, recurrent_forward, reports_uses=True)
