"""Whether two runs can be compared, and which examples of theirs are the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from torchfil.run.baselines import NOT_MEASURED, status_of
from torchfil.run.saved_run import SavedRun
from torchfil.utils.csv_files import visible

__all__ = ["check_alike", "check_enough", "matched_rows", "setting"]


def setting(run: SavedRun, name: str) -> Any:
    """A value of ``about`` by its path, e.g. "mechanism.sigma"; None where it is not there or empty."""
    value: Any = run.about
    for key in name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if value != "" else None


def check_alike(before: SavedRun, after: SavedRun) -> None:
    """Refuse runs whose numbers mean different things."""
    for name, what in (
        ("dataset.num_coordinates", "private inputs of an example"),
        ("unit_of_inputs", "the unit of inputs"),
        ("linear.private", "what is private"),
    ):
        one, other = (setting(run, name) for run in (before, after))
        if one != other and not (name == "dataset.num_coordinates" and None in (one, other)):
            raise ValueError(
                f"the runs speak of different things: {what} is {one!r} in the first and {other!r} in the second; "
                "compare runs that protect the same inputs"
            )
    asked, asked_after = ({q.name: q.answers for q in run.questions} for run in (before, after))
    for name in asked.keys() & asked_after.keys():
        if asked[name] != asked_after[name]:
            one, other = (visible(", ".join(answers[name])) for answers in (asked, asked_after))
            raise ValueError(
                f"the runs answer different questions: {name!r} has the answers {one} in the first and {other} in the "
                "second"
            )
    if asked and asked_after and not asked.keys() & asked_after.keys():
        one, other = (visible(", ".join(names)) for names in (asked, asked_after))
        raise ValueError(
            f"the runs answer different questions: {one} in the first, {other} in the second; ask the same in both"
        )


def matched_rows(before: SavedRun, after: SavedRun) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The ids that both runs have measured, and their places in both, [m] each."""
    names = [np.asarray(run.ids) for run in (before, after)]
    if names[0].dtype.kind != names[1].dtype.kind:
        names = [own.astype(str) for own in names]
    for own, which in zip(names, ("first", "second"), strict=True):
        values, counts = np.unique(own, return_counts=True)
        if len(values) < len(own):
            twice = visible(str(values[counts.argmax()]))
            raise ValueError(
                f"the {which} run has the id {twice} {counts.max()} times, so that its examples cannot be matched; "
                "save both runs with ids of their own"
            )
    ids, rows, rows_after = np.intersect1d(names[0], names[1], assume_unique=True, return_indices=True)
    if not len(ids):
        raise ValueError(
            f"the runs share no ids ({visible(str(names[0][0]))}, … and {visible(str(names[1][0]))}, …): examples are "
            "matched by id"
            if len(names[0]) and len(names[1])
            else "a run without examples cannot be compared"
        )
    known = (status_of(before)[rows] != NOT_MEASURED) & (status_of(after)[rows_after] != NOT_MEASURED)
    if not known.any():
        raise ValueError(f"no example was measured in both runs, of {len(ids):,} that both have")
    return ids[known], rows[known], rows_after[known]


def check_enough(before: SavedRun, after: SavedRun, matched: int, smallest: int) -> None:
    """A public number over all, beside the same of the run's own public page, tells of those that differ."""
    if matched < smallest:
        raise ValueError(f"{matched} examples are in both runs, fewer than min_group={smallest}: nothing may be told")
    for run in (before, after):
        alone = len(run) - matched
        if 0 < alone < smallest:
            raise ValueError(
                f"{alone} of {len(run):,} examples of one run are not compared (no partner, or not measured): beside "
                f"that run's own public page, numbers would tell of fewer than min_group={smallest}"
            )
