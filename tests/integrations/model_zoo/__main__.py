"""Write docs/models.md: ``python -m tests.integrations.model_zoo`` in the environment of ``make test-integrations``."""

from __future__ import annotations

import argparse
import logging
import sys
from concurrent.futures import ProcessPoolExecutor

import torch

from .outcomes import CASES, DOCS, WRONG, Case, Outcome, outcome_of, read_table, text_of


def main() -> int:
    """Train what is asked for, rewrite the page and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.integrations.model_zoo", description=__doc__)
    parser.add_argument(
        "-k", default="", metavar="TEXT", help="only models whose name has this; others stay as they are"
    )
    parser.add_argument("--workers", type=int, default=2, help="processes at once")
    options = parser.parse_args()
    chosen = [case for case in CASES if options.k.lower() in case.name.lower()]
    with ProcessPoolExecutor(options.workers, initializer=_quiet) as pool:
        outcomes = dict(zip(chosen, pool.map(_outcome, chosen), strict=True))

    written = read_table(DOCS.read_text()) if options.k and DOCS.exists() else {}
    everything = {case: outcomes.get(case) or written.get(case) for case in CASES}
    DOCS.write_text(text_of({case: outcome for case, outcome in everything.items() if outcome is not None}))
    print(
        *(f"{case}: {outcome.kind}: {outcome.reason}" for case, outcome in outcomes.items() if outcome.reason), sep="\n"
    )
    print(f"{sum(not outcome.reason for outcome in outcomes.values())} of {len(outcomes)} run; {DOCS} is written")
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
