"""From a saved run to a page: reads tables, computes no privacy."""

from torchfil.report.saved_run import AttackResult, Attributes, Pictures, SavedRun, load, save

__all__ = ["AttackResult", "Attributes", "Pictures", "SavedRun", "load", "save"]
