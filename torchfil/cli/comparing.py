"""``compare``: two saved runs beside each other."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from torchfil.cli.output import Output, checked_min_group, min_group_option, number, table, with_output
from torchfil.report.comparison import Comparison, compare_runs
from torchfil.report.page.compared import changes, in_short, render_comparison
from torchfil.report.run_file import load
from torchfil.utils.csv_files import visible
from torchfil.utils.files import write_bytes

FILE = click.Path(path_type=Path)


@click.command()
@click.argument("before", type=FILE)
@click.argument("after", type=FILE)
@click.option("-o", "--out", "page", type=FILE, help="Write a page, an HTML file; replaced when complete.")
@click.option("--redacted", is_flag=True, help="Leave out everything about single examples; may be shared.")
@min_group_option
@with_output
def compare(before: Path, after: Path, page: Path | None, redacted: bool, min_group: int | None, out: Output) -> None:
    """Compare two saved runs on the same examples: what a change did, and who moved.

    Examples are matched by their ids. Runs that share none, protect other inputs or ask other questions are refused.

    \b
    Examples:
      torchfil compare before.fil after.fil
      torchfil compare before.fil after.fil -o compared.html
      torchfil compare before.fil after.fil -o public.html --redacted --min-group 20
    """
    if page is not None and page.resolve() in (before.resolve(), after.resolve()):
        raise ValueError(f"-o {page} is one of the runs, which would be lost; write to another file")
    smallest = checked_min_group(min_group, redacted=redacted)
    comparison = compare_runs(load(before), load(after), redacted=redacted, min_group=smallest)
    if page is not None:
        write_bytes(page, render_comparison(comparison).encode("utf-8", "replace"))

    out.result(_text(comparison), {**_data(comparison), "page": None if page is None else str(page)})
    if page is not None:
        out.say(f"\npage: {page}")
    if not redacted:
        out.say("\nThese numbers depend on private data: keep them confidential (--redacted makes a page to share).")


def _text(comparison: Comparison) -> str:
    rows = [*comparison.settings, *changes(comparison)]
    shown = table(["", "before", "after"], [[name, _shown(one), _shown(other)] for name, one, other in rows])
    lines = [*in_short(comparison), *comparison.notes]
    return "\n".join([shown, "", *map(visible, lines)])


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else "none" if value is None else number(value)


def _data(comparison: Comparison) -> dict[str, Any]:
    """For JSON: without the table of all examples, of which the most moved are in the page."""
    names = [name for name in comparison.__dataclass_fields__ if name != "moves"]
    values = {name: getattr(comparison, name) for name in names}
    for name in ("before", "after"):
        values[name] = asdict(values[name])
    values["settings"] = {name: {"before": one, "after": other} for name, one, other in comparison.settings}
    for name in ("attributes", "questions"):
        values[name] = [asdict(pair) for pair in values[name]]
    values["groups"] = {name: [asdict(pair) for pair in pairs] for name, pairs in comparison.groups.items()}
    return values
