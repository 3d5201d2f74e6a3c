"""The table of a finished run, as a file."""

from __future__ import annotations

import csv
import os
from typing import TYPE_CHECKING

from torchfil.utils.files import replaced_when_complete

if TYPE_CHECKING:
    from torchfil.engine import FILPrivacyEngine

__all__ = ["write_table"]


def write_table(engine: FILPrivacyEngine, path: str | os.PathLike[str], delta: float | None = None) -> None:
    """Write :meth:`FILPrivacyEngine.leakage` as CSV, one row per example.

    The file is confidential: it is readable for its owner only, and replaced only when complete.
    """
    names, columns = engine.leakage_columns(delta=delta)
    with replaced_when_complete(path) as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["id", *columns])
        writer.writerows(zip(names, *columns.values(), strict=True))
