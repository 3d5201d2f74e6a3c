"""Sums of leakage by example over a run: kept, paced, read."""
