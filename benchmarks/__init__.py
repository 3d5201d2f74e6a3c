"""What the accounting costs: ``python -m benchmarks``."""
