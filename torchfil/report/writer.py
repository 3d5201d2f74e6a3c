"""A report as a folder: complete or not there."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from torchfil.gate.gate import check
from torchfil.gate.policy import Policy
from torchfil.report.charts import charts_of
from torchfil.report.context import Report
from torchfil.report.page import asset, label_of, render
from torchfil.report.signature import Signature
from torchfil.report.summary import summarise
from torchfil.report.svg import standalone
from torchfil.run.saved_run import SavedRun
from torchfil.run.tables import write_leakage_csv
from torchfil.utils.files import explain_disk_full, file_sha256, flush, temporary_beside

__all__ = ["check_replaceable", "write_report"]

PAGE, SUMMARY, MARKER = "index.html", "summary.json", "torchfil-report"


def write_report(
    run: SavedRun,
    directory: str | os.PathLike[str],
    *,
    redacted: bool = False,
    min_group: int = 10,
    policy: Policy | None = None,
    signature: Signature | None = None,
    pictures: bool = False,
) -> Path:
    """Write a report: ``index.html``, ``summary.json`` and, unless redacted, a table of all examples.

    Guarantees:
        * The folder is replaced only when the new report is complete. A folder that is not a report is never replaced.
        * Only the owner may read it (folder 0700, files 0600).
        * The page loads nothing from anywhere and opens from the disk.
        * Redacted: no file holds an id, a value of one example, a picture, the data's hash or the seed; every number
          rests on ``min_group`` examples or more. No noise is added: it is not a differentially
          private release.

    Args:
        run: What to report.
        directory: The folder to write; its parent must exist.
        redacted: Whether to write the version that may be published.
        min_group: The least number of examples behind a number of the redacted version, at least 2.
        policy: Thresholds (:func:`torchfil.gate.policy.load_policy`): the page begins with the verdict.
        signature: Who signed the run (:func:`torchfil.report.signature.verify`); None: the page says that nobody did.
        pictures: Whether to write the page's charts as SVG files beside it, too.

    Returns:
        The path of ``index.html``.
    """
    for name in ("fil", "mse_bound"):
        if name not in run.columns:
            raise ValueError(f"the run has no column {name!r}, which a report is about; it has {sorted(run.columns)}")
    if redacted and policy is not None:
        raise ValueError(
            "policy= is for the private report: a verdict may hang on a single example, and the public version says "
            "nothing about fewer than min_group; leave out policy= (--policy) or redacted=True (--redacted)"
        )
    verdicts = None if policy is None else check(run, policy)
    summary = summarise(run, redacted=redacted, min_group=min_group)
    files, notes, digests = dict[str, str](), list[str](), dict[str, str]()
    with _replaced_folder(Path(directory)) as folder:
        # every example, with a digest for the page, which is signed by hand
        if not redacted:
            write_leakage_csv(run, folder / "leakage.csv")
            files["leakage.csv"] = "every example"
            digests["leakage.csv"] = file_sha256(folder / "leakage.csv")

        # charts for other documents, from what the page shows
        report = Report(summary, None if redacted else run, files, notes, digests, verdicts, policy, signature)
        for name, chart in charts_of(report).items() if pictures else ():
            drawn = standalone(chart, asset("charts.css"), label_of(redacted))
            (folder / f"{name}.svg").write_text(drawn, encoding="utf-8")
            files[f"{name}.svg"] = "a chart of the page"

        files[SUMMARY] = "the aggregates"
        content = {
            "format": MARKER,
            "confidential": not redacted,
            **_json_ready(summary),
            **({} if verdicts is None else {"verdict": _json_ready([verdict.as_dict() for verdict in verdicts])}),
            "signed_by": None if signature is None else signature.signer,
            "files": files,
            "notes": notes,
        }
        (folder / SUMMARY).write_text(
            json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False), encoding="utf-8"
        )

        # the page comes last: it names the files beside it
        (folder / PAGE).write_text(render(report), encoding="utf-8", errors="replace")
    return Path(directory) / PAGE


@contextlib.contextmanager
def _replaced_folder(target: Path) -> Iterator[Path]:
    """A new folder beside ``target`` that takes its place at the end, and vanishes if anything fails."""
    target = target.resolve()
    if not target.parent.is_dir():
        raise FileNotFoundError(f"the folder {target.parent} does not exist; create it or choose another place")
    check_replaceable(target)
    with explain_disk_full(target), temporary_beside(target, folder=True) as temporary:
        beside = Path(temporary)
        new = beside / "new"
        new.mkdir(mode=0o700)
        yield new
        for path in new.iterdir():
            path.chmod(0o600)
            flush(path)

        # writing took its time: somebody may have put a file into the folder meanwhile
        check_replaceable(target)
        if target.exists():
            target.rename(beside / "old")
        try:
            new.rename(target)
        except BaseException:
            if (beside / "old").exists():
                (beside / "old").rename(target)
            raise


def check_replaceable(target: Path) -> None:
    """Refuse to replace anything but nothing, an empty folder or a report."""
    if not target.exists():
        return
    if not target.is_dir():
        raise FileExistsError(f"{target} is a file; name a folder for the report")
    own_files: set[str] = set()
    with contextlib.suppress(OSError, ValueError, AttributeError, KeyError, TypeError):
        summary = json.loads((target / SUMMARY).read_text(encoding="utf-8"))
        if summary.get("format") == MARKER:
            own_files = {PAGE, SUMMARY, *summary["files"]}
    foreign = sorted(path.name for path in target.iterdir() if path.name not in own_files)
    if foreign:
        raise FileExistsError(
            f"{target} holds {', '.join(foreign[:3])}{' …' if len(foreign) > 3 else ''}, which is no part of a report, "
            "and is not replaced; name a new folder"
        )


def _json_ready(value: Any) -> Any:
    """Dataclasses as dicts; numbers that JSON cannot write as "infinite" or null."""
    if hasattr(value, "__dataclass_fields__"):
        value = asdict(value)
    if isinstance(value, dict):
        return {str(key): _json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_ready(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "infinite" if value > 0 else "-infinite"
    return value
