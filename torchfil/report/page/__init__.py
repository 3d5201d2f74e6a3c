"""The report as one HTML page that needs nothing beside it."""

from torchfil.report.page.document import render

__all__ = ["render"]
