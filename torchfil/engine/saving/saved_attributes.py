"""What a run file keeps about attributes: their errors by example, and the error of a blind guess."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from torchfil.accounting.leakage import Leakage
from torchfil.engine.saving.attribute_table import AttributeTable, attribute_table
from torchfil.engine.saving.data_spread import DataSpread, pixels_of_coordinates
from torchfil.engine.saving.run_view import RunView
from torchfil.report.saved_run import Attributes, Spread, Yardsticks

__all__ = ["attributes_of", "table_to_save", "yardsticks_of"]

_LARGEST_ATTRIBUTES = 2**31  # bytes of a table that is mostly empty


def table_to_save(leakage: Leakage, named: Mapping[str, Any], *, with_texts: bool) -> AttributeTable | None:
    """The attributes to save; None if they were not tracked, or for so few that the table would be mostly empty.

    Coordinates of words have no names; the words identify them.
    """
    count, d = leakage.ids.num_examples, leakage.num_coordinates
    table = attribute_table(d, *named.values())
    given = next((name for name, value in named.items() if value is not None), None)
    if not {"diagonal", "fim"} & leakage.ledger.sums.keys():
        if given is not None:
            raise ValueError(f"{given} were given, but attributes were not tracked: make_private(track=('diagonal',))")
        return None
    if leakage.ledger.chosen and 8 * count * d > _LARGEST_ATTRIBUTES:
        warnings.warn(
            f"the attributes of chosen ids are not saved: a table of {count:,} examples and {d:,} attributes would be "
            "mostly empty; read them with engine.get_attribute_fil(ids)",
            stacklevel=5,
        )
        return None
    return table if given is not None or not with_texts else None


def attributes_of(run: RunView, table: AttributeTable) -> Attributes:
    """How well each attribute of every example could be inferred."""

    def errors(leakage: Leakage, rows: Tensor) -> dict[str, Tensor]:
        """The least errors and their lower ends, [rows, k] each, and which rows are unknown, [rows]."""
        fil = leakage.read_attribute_fil(rows)
        low = table.errors(fil.interval(0.95)[1].double().square())
        unknown = fil.standard_error.isnan() & ~fil.value.isnan()  # unknown for ids that were not chosen
        error = table.errors(fil.value.double().square())
        return {
            "error": error.float(),
            "error_low": low.where(~error.isnan(), math.nan).float(),
            "is_unknown": unknown.any(dim=1),
        }

    found = run.leakage.by_parts(errors)
    return Attributes(
        names=table.names,
        units=table.units,
        error=found["error"],
        error_low=None if found["is_unknown"].any() else found["error_low"],
        pixels=pixels_of_coordinates(run) if len(table.attributes) == len(table.coordinates) else None,
    )


def yardsticks_of(spread: DataSpread, table: AttributeTable | None) -> Yardsticks:
    """The error of a blind guess: of inputs, and of attributes if there are any."""
    if table is None:
        nothing = Spread(*(np.zeros(0) for _ in range(4)))
        return Yardsticks(spread.examples, spread.inputs, nothing, {})
    return Yardsticks(spread.examples, spread.inputs, *table.spread(spread.coordinates))
