"""An engine's summary of its run, as text and in a notebook."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torchfil.accounting.leakage import Leakage
from torchfil.utils.tables import html_table

__all__ = ["engine_lines", "engine_table", "engine_text"]


def engine_lines(accountant: str, optimizer: Any, ranks: Any, totals: Callable[[], Leakage]) -> list[tuple[str, str]]:
    """What is known about a run, as (name, text).

    Args:
        accountant: Its name.
        optimizer: The run's optimizer; None: there is no run yet.
        ranks: The processes, if several train; reading would need all of them, so nothing is read then.
        totals: Reads the run; raises RuntimeError before the first step.
    """
    if optimizer is None:
        return [("accountant", accountant), ("run", "none yet: call make_private")]
    noise = f"σ = {float(optimizer.noise_multiplier):g}, C = {float(optimizer.max_grad_norm):g}"
    lines = [("accountant", accountant), ("noise and clipping", noise)]
    if ranks is not None:
        return [*lines, ("run", f"rank {ranks.rank}; call metrics() on all ranks to read it")]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a warning would repeat that steps were paused
            return [*lines, *totals().summary().lines()]
    except RuntimeError:
        return [*lines, ("run", "no step yet")]


def engine_text(name: str, lines: list[tuple[str, str]]) -> str:
    """Name and entries, one per line."""
    return "\n".join([name, *(f"  {title}: {text}" for title, text in lines)])


def engine_table(name: str, lines: list[tuple[str, str]]) -> str:
    """The same as HTML."""
    return html_table(f"{name} (confidential)", lines)
