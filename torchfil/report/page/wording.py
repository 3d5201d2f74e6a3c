"""What kind of run a page is about, in the words that its chapters share.

A training run, the mean over several (``about["merged"]``), or a linear model's release (``about["kind"]``): what is
random, and how certain the numbers are, differs. Chapters take these words from here and need few cases of their own.
"""

from __future__ import annotations

from dataclasses import replace

from torchfil.report.page.context import Report
from torchfil.run.saved_run import SavedRun

__all__ = ["certainty", "every_attacker", "is_linear", "num_merged", "origin", "over", "randomness", "tabled_run"]


def is_linear(report: Report) -> bool:
    """Whether the page is about a linear model's release."""
    return bool(report.about("kind") == "linear")


def num_merged(report: Report) -> int:
    """Over how many runs the numbers are means; 1: one run."""
    count = report.about("merged", "runs")
    return count if isinstance(count, int) and count > 1 else 1


def origin(report: Report) -> str:
    """Where a number comes from, after "that is"."""
    if is_linear(report):
        return "computed in closed form, without error"
    runs = num_merged(report)
    return "an estimate from one run" if runs == 1 else f"an estimate from {runs} runs together"


def tabled_run(report: Report) -> SavedRun | None:
    """The run as tables of its examples show it: without lower ends where bounds are exact, and so their own."""
    run = report.run
    if run is None or not is_linear(report):
        return run
    return replace(run, columns={name: values for name, values in run.columns.items() if name != "mse_bound_low"})


def over(report: Report) -> str:
    """What means are taken over, after "on average"."""
    return "over the noise that is added to the weights" if is_linear(report) else "over repeated trainings"


def randomness(report: Report) -> str:
    """What is random, in a sentence."""
    if is_linear(report):
        return "What is random is the noise that is added to the weights."
    return "What is random is the run: its batches and its noise."


def certainty(report: Report) -> str:
    """How certain each number of a table of bounds is, in a sentence."""
    if is_linear(report):
        return "Each number is computed in closed form, without error."
    return "Each number is the lower end of a 95 % interval, of each example by itself."


def every_attacker(report: Report) -> str:
    """What on the page binds every attacker, biased or not; half a sentence."""
    if not is_linear(report):
        return "ε and ReRo bind every attacker"
    if report.summary.questions:
        return "the questions below bind every attacker"
    return "a question (torchfil glm --question) would tell what binds every attacker"
