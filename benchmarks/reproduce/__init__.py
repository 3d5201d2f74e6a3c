"""Every table and figure of the four papers, measured here: ``python -m benchmarks.reproduce``."""
