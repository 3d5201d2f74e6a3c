"""From a saved run to a page: reads tables, computes no privacy."""

from torchfil.report.comparison import compare_runs
from torchfil.report.page import write_report
from torchfil.run.file import load, save
from torchfil.run.linear_run import linear_run, save_linear_run
from torchfil.run.saved_run import AttackRecord, Attributes, Records, SavedRun, Texts

__all__ = [
    "AttackRecord",
    "Attributes",
    "Records",
    "SavedRun",
    "Texts",
    "compare_runs",
    "linear_run",
    "load",
    "save",
    "save_linear_run",
    "write_report",
]
