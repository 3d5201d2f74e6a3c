"""The refusals that more than one module makes, under names that users of Opacus know."""

from __future__ import annotations

__all__ = ["RunFileError", "UnsupportedModuleError"]


class UnsupportedModuleError(ValueError):
    """The model holds a module for which per-example quantities are undefined or not smooth."""


class RunFileError(ValueError):
    """A file is not a saved run, is damaged, or was written by another version."""
