"""The refusals that more than one module makes, under names that users of Opacus know."""

from __future__ import annotations

__all__ = ["UnsupportedModuleError"]


class UnsupportedModuleError(ValueError):
    """The model holds a module for which per-example quantities are undefined or not smooth."""
