"""Several runs together: what their mean speaks of, and what releasing more than one of them would mean."""

from __future__ import annotations

import math

from torchfil.report.page.context import Report, paragraph
from torchfil.report.page.html import Markup, join, number, table
from torchfil.report.page.wording import num_merged

__all__ = ["render"]


def render(report: Report) -> Markup | None:
    """How many runs, what the mean is about, and the composition; None for one run."""
    runs = num_merged(report)
    if runs == 1:
        return None

    # independent releases add Fisher information up: η̄ grows by √k, the bound falls to its k-th part
    epsilon, of_all, delta = report.about("epsilon"), report.about("merged", "epsilon_of_all"), report.about("delta")
    at = f" (δ = {number(delta)})" if delta is not None else ""
    rows = [
        ["FIL η̄ of everybody", "as shown", f"{number(math.sqrt(runs))} times as large"],
        ["MSE bound", "as shown", f"the {runs}th part" if runs > 3 else {2: "half", 3: "a third"}[runs]],
    ]
    if epsilon is not None and of_all is not None:
        rows.append([f"ε for everybody{at}", number(epsilon), number(of_all)])

    return join(
        paragraph(
            f"The numbers are means over {runs} trainings that were repeated with the same settings on the same data. "
            "They speak of one such training: what it leaks on average over batches and noise. Their errors are those "
            "from run to run, and hold all that is random in a run. They do not say that all the models were released."
        ),
        table(["", "one model is released", f"all {runs} are released"], rows),
        paragraph(
            f"Who sees the noisy gradients of all {runs} trainings has the sum of their amounts of Fisher information "
            "(composition), and their ε together is that of one training as long as all of them. An example’s own ε "
            "belongs to one run’s outputs and is not shown here.",
            class_="note",
        ),
    )
