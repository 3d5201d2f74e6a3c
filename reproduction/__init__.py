"""Every table and figure of the four papers, measured here: ``python -m reproduction``."""

import benchmarks  # noqa: F401  (which makes the examples' data and networks importable)
