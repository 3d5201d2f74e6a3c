"""Opacus's own tests, run with torchfil's engine in place of Opacus's; see docs/opacus-tests.md."""
