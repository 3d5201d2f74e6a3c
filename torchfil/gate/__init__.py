"""A run against a policy: one rule after the other."""
