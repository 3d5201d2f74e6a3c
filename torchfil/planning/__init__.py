"""Choosing noise for a target of leakage, and weights that spare the most exposed."""
