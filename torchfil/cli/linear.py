"""``glm``: from a CSV file to a table of leakage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import numpy as np

from torchfil.cli.output import Output, number, table, with_output
from torchfil.utils.csv_files import write_csv

__all__ = ["glm"]


def _names(_ctx: click.Context, _option: click.Parameter, text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


@click.command()
@click.argument("data", type=click.Path(path_type=Path))
@click.option("--target", required=True, help="The column to predict.")
@click.option("--private", callback=_names, default="", help="Columns an attacker wants, e.g. vkorc1,age; none: all.")
@click.option("--categorical", callback=_names, default="", help="Columns whose numbers are codes, e.g. cyp2c9.")
@click.option("--ignore", callback=_names, default="", help="Columns to leave out.")
@click.option("--id", "id_column", help="The column that names the rows; their number (from 0) otherwise.")
@click.option("--drop-missing", is_flag=True, help="Leave out rows that miss an entry in a used column.")
@click.option("--model", type=click.Choice(["linear", "logistic", "softmax", "poisson"]), default="linear")
@click.option("--l2", default=1e-2, show_default=True, help="Penalty λ.")
@click.option("--sigma", default=1.0, show_default=True, help="Noise σ on the released weights.")
@click.option("--intercept/--no-intercept", default=True, show_default=True)
@click.option("--top", default=10, show_default=True, help="How many rows to print.")
@click.option("--out", "out_file", type=click.Path(path_type=Path), help="Write all rows to this CSV file.")
@with_output
def glm(
    data: Path,
    target: str,
    private: list[str],
    categorical: list[str],
    ignore: list[str],
    id_column: str | None,
    drop_missing: bool,
    model: str,
    l2: float,
    sigma: float,
    intercept: bool,
    top: int,
    out_file: Path | None,
    out: Output,
) -> None:
    """How much a linear model, released with noise, leaks about every row of a CSV file.

    Text columns are one-hot encoded, and leak as one attribute. For each private column: its Fisher information loss η,
    and the least error of an unbiased guess by one who knows everything else, in the column's own unit.

    \b
    Examples:
      torchfil glm patients.csv --target dose --private vkorc1,age
      torchfil glm patients.csv --target dose --private vkorc1,age --categorical cyp2c9 --sigma 0.01 --out leakage.csv
      torchfil glm adult.csv --target income --model logistic --l2 0.001 --private marital-status --drop-missing
    """
    try:
        from torchfil.glm import csv_table
    except ImportError as error:
        raise ImportError("linear models need scikit-learn: pip install 'torchfil[glm]'") from error
    rows = csv_table.read_rows(data)
    if out_file is not None and out_file.exists() and out_file.samefile(data):
        raise ValueError(f"--out {out_file} is the data file itself, which would be lost; write to another file")
    if target in private:
        raise ValueError(f"{target!r} is the target; it counts as private where --private is left out")
    total = len(rows)
    ids = [str(place) for place in range(total)]
    if id_column is not None:
        csv_table.check_column(id_column, list(rows[0]))
        ids = [row[id_column] for row in rows]
        ignore = [*ignore, id_column]
    if drop_missing:
        used = [name for name in rows[0] if name not in ignore]
        kept = [place for place, row in enumerate(rows) if csv_table.is_complete(row, used)]
        rows, ids = [rows[place] for place in kept], [ids[place] for place in kept]
        if not rows:
            raise ValueError(f"every one of the {total} rows of {data} misses an entry")

    encoded = csv_table.encode(rows, target, categorical=categorical, ignore=ignore)
    leakage = csv_table.leakage_table(encoded, private, model=model, l2=l2, sigma=sigma, intercept=intercept)  # type: ignore[arg-type]
    if out_file is not None:
        write_csv(out_file, {"id": ids, **leakage.columns})

    # what was made of the table comes first: a column taken for something else changes every number
    nominal = ", ".join(f"{name} ({len(levels)})" for name, levels in encoded.levels.items()) or "none"
    out.say(f"{len(rows):,} rows of {data}, {encoded.inputs.shape[1]} columns; one-hot: {nominal}")
    if encoded.few_values:
        names = ", ".join(f"{name} ({count})" for name, count in encoded.few_values.items())
        out.say(f"whole numbers with few values, taken as quantities: {names}; if they are codes, use --categorical")
    if total > len(rows):
        out.say(f"{total - len(rows):,} rows with missing entries were left out")
    out.say(
        f"{model} model, λ = {l2:g}, score {leakage.score:.3f}; released are the weights plus noise of σ = {sigma:g}"
    )
    out.say("fil: η of all that is private together; _error: least error of an unbiased guess, in the column's unit\n")

    text, exposure = _exposure(leakage.columns, ids, id_column or "row", max(0, top))
    result = {
        "rows": len(rows),
        "columns": list(encoded.columns),
        "levels": {name: list(levels) for name, levels in encoded.levels.items()},
        "model": model,
        "l2": l2,
        "sigma": sigma,
        "score": leakage.score,
        **exposure,
        "out": None if out_file is None else str(out_file),
    }
    out.result(text, result)
    if out_file is not None:
        out.say(f"\nall rows: {out_file}")
    out.say("\nThese numbers depend on private data: keep them confidential.")


def _exposure(
    columns: dict[str, np.ndarray], ids: list[str], name_of_ids: str, top: int
) -> tuple[str, dict[str, list[Any] | dict[str, Any]]]:
    """The most exposed rows and a summary of all, as text and as data."""
    order = np.argsort(-columns["fil"], kind="stable")[:top]
    summary = {
        name: dict(zip(("min", "median", "max"), np.quantile(values, [0, 0.5, 1]).tolist(), strict=True))
        for name, values in columns.items()
    }
    lines = [[ids[row], *(number(float(values[row])) for values in columns.values())] for row in order]
    lines += [
        [f"({part} of {len(ids):,})", *(number(column[part]) for column in summary.values())]
        for part in ("max", "median", "min")
    ]
    exposed = [{"id": ids[row], **{name: values[row] for name, values in columns.items()}} for row in order]
    return table([name_of_ids, *columns], lines), {"summary": summary, "most_exposed": exposed}
