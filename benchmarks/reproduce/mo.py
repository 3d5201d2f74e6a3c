"""Later."""

from benchmarks.reproduce.rows import Row

ROWS: tuple[Row, ...] = ()
