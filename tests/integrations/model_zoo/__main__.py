"""Write docs/models.md: ``python -m tests.integrations.model_zoo`` in the environment of ``make
test-integrations``.
"""

from __future__ import annotations

import logging
import sys
from concurrent.futures import ProcessPoolExecutor

import torch

from .outcomes import CASES, DOCS, WRONG, Case, Outcome, outcome_of, text_of


def main() -> int:
    """Train everything, rewrite the page and return the exit code."""
    with ProcessPoolExecutor(2, initializer=_quiet) as pool:
        outcomes = dict(zip(CASES, pool.map(_outcome, CASES), strict=True))
    DOCS.write_text(text_of(outcomes))
    for case, outcome in outcomes.items():
        if outcome.reason:
            print(f"{case}: {outcome.kind}: {outcome.reason}")
    return int(any(outcome.kind == WRONG for outcome in outcomes.values()))


def _quiet() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.NOTSET)
    logging.getLogger("torchfil").propagate = False


def _outcome(case: Case) -> Outcome:
    try:
        return outcome_of(case)
    except Exception as error:
        return Outcome(WRONG, f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    sys.exit(main())
