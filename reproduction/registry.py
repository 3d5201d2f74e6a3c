"""All rows, in the order of the page."""

from __future__ import annotations

from collections.abc import Sequence

from reproduction import (
    guo_digits,
    guo_linear,
    guo_photographs,
    guo_tables,
    hannun_examples,
    hannun_penalties,
    hannun_rounds,
    hannun_table1,
    mo,
    plis_maps,
    plis_reconstruction,
)
from reproduction.rows import Row

__all__ = ["ROWS", "chosen"]

ROWS: tuple[Row, ...] = (
    *hannun_examples.ROWS,
    *hannun_table1.ROWS,
    *hannun_penalties.ROWS,
    *hannun_rounds.ROWS,
    *guo_linear.ROWS,
    *guo_digits.ROWS,
    *guo_photographs.ROWS,
    *guo_tables.ROWS,
    *plis_maps.ROWS,
    *plis_reconstruction.ROWS,
    *mo.ROWS,
)


def chosen(only: Sequence[str], *, gpu: bool) -> list[Row]:
    """The rows to run: the named ones, else all that two cores can run, or all that need a GPU.

    Raises:
        ValueError: A name is not in the registry, or its row has nothing to measure.
    """
    by_id = {row.id: row for row in ROWS}
    if unknown := [name for name in only if name not in by_id]:
        raise ValueError(f"no row is called {', '.join(unknown)}; there are {', '.join(by_id)}")
    if idle := [name for name in only if by_id[name].measure is None]:
        raise ValueError(f"nothing to measure in {', '.join(idle)}: {by_id[idle[0]].reason}")
    if only:
        return [by_id[name] for name in only]
    return [row for row in ROWS if row.measure is not None and row.gpu == gpu]
