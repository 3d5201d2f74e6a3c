"""The table of a finished run, as a file."""

import os

from torchfil.engine import FILPrivacyEngine
from torchfil.utils.text import write_csv

__all__ = ["write_table"]


def write_table(
    engine: FILPrivacyEngine,
    path: str | os.PathLike[str],
    delta: float | None = None,
    *,
    here: bool = True,
) -> None:
    """Write :meth:`FILPrivacyEngine.leakage` as CSV, one row per example.

    The file is confidential: only its owner may read it. It is replaced only when complete.

    Args:
        engine: The run's engine; all of its ranks must call this (collective).
        path: The file.
        delta: δ of the individual ε; None: the table has no ``individual_epsilon``.
        here: Whether this rank writes.
    """
    engine.gather()
    if here:
        table = engine.leakage(delta=delta).to_arrow()
        write_csv(path, {name: table[name].to_numpy() for name in table.column_names})
