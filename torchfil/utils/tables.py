"""Tables by example that other programs read: pandas, Arrow, Polars, DuckDB, and whatever takes an
Arrow stream.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

__all__ = ["ArrowTable", "as_table", "as_texts", "plain_names"]


class ArrowTable:
    """What has :meth:`to_arrow`, for programs that read Arrow or Polars.

    Its ``__arrow_c_stream__`` is the protocol by which ``polars.DataFrame(table)``,
    ``pyarrow.table(table)`` and DuckDB (``SELECT … FROM table``) read other people's tables. What
    is not known is NaN in torchfil and null in Arrow.
    """

    def to_arrow(self) -> Any:
        """The table as a ``pyarrow.Table``, the names as its first column.

        Numbers are not copied where possible.
        """
        raise NotImplementedError

    def to_polars(self) -> Any:
        """The table as a ``polars.DataFrame``, the names as its first column.

        Raises:
            ImportError: Polars is not installed.
        """
        try:
            import polars
        except ImportError as error:
            raise ImportError("to_polars needs Polars: pip install polars") from error
        return polars.from_arrow(self.to_arrow())

    def __arrow_c_stream__(self, requested_schema: object = None) -> Any:
        return self.to_arrow().__arrow_c_stream__(requested_schema)


class Columns(dict[str, Any], ArrowTable):
    """Columns by name, [rows] each, the names of the rows first."""

    def to_arrow(self) -> Any:
        """The table as a ``pyarrow.Table``."""
        import pyarrow as pa

        columns = {
            name: own if isinstance(own, np.ndarray) else plain_names(own)
            for name, own in self.items()
        }
        return pa.table({name: pa.array(own, from_pandas=True) for name, own in columns.items()})


@cache
def _frame() -> type[Any]:
    """The class of tables with pandas, which is imported when the first is made."""
    import pandas

    class LeakageFrame(ArrowTable, pandas.DataFrame):
        """A DataFrame with :class:`ArrowTable`'s methods.

        What is sliced, copied or pickled from it is a DataFrame.
        """

        @property
        def _constructor(self) -> type[Any]:
            return pandas.DataFrame

        def __reduce__(self) -> Any:
            return pandas.DataFrame, (pandas.DataFrame(self),)

        def to_arrow(self) -> Any:
            """The table as a ``pyarrow.Table``, the index as its first column."""
            return Columns(self.reset_index().items()).to_arrow()

    return LeakageFrame


def as_table(
    names: Sequence[Hashable], columns: Mapping[str, object], *, index_name: str = "id"
) -> Any:
    """A pandas DataFrame indexed by the names, or :class:`Columns` if pandas is not installed.

    Both ArrowTables.

    Args:
        names: Of the rows.
        columns: By name, [rows] each: arrays or lists.
        index_name: What the names are called.

    Example:
        >>> as_table([3, 1], {"fil": np.array([0.5, np.nan])}).to_arrow().to_pylist()
        [{'id': 3, 'fil': 0.5}, {'id': 1, 'fil': None}]
    """
    columns = {name: np.asarray(values) for name, values in columns.items()}
    try:
        import pandas
    except ImportError:
        return Columns(
            {index_name: plain_names(names) if isinstance(names, range) else list(names), **columns}
        )
    # pyarrow.table would drop a range
    keys = np.asarray(names) if isinstance(names, range) else names
    return _frame()(columns, index=pandas.Index(keys, name=index_name, tupleize_cols=False))


def as_texts(values: np.ndarray) -> np.ndarray:
    """The values as Python's texts, [n]: in NumPy's own, each would take the room of the
    longest.
    """
    return np.asarray([str(value) for value in values.tolist()], dtype=object)


def plain_names(keys: Any) -> Any:
    """Names of one type, [n]: numbers as int64.

    Anything else as text, with repr() if two texts would be the same.

    Columns that are arrays of numbers or texts already are returned as they are.

    Example:
        >>> plain_names(["a", 1, "1"]).tolist(), plain_names(range(2)).tolist()
        (["'a'", '1', "'1'"], [0, 1])
    """
    if isinstance(keys, range):
        return np.arange(keys.start, keys.stop, keys.step)
    if getattr(keys, "dtype", np.dtype(object)) != np.dtype(object):
        return keys
    if all(isinstance(key, int) and not isinstance(key, bool) and abs(key) < 2**63 for key in keys):
        return np.asarray(keys, dtype=np.int64)
    texts = [str(key) for key in keys]
    return np.asarray(
        texts if len(set(texts)) == len(texts) else [repr(key) for key in keys], dtype=str
    )
