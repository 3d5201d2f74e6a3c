"""``glm``: from a CSV file to a table of leakage."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from torchfil.cli.output import Output, number, table, with_output
from torchfil.utils.csv_files import write_csv

if TYPE_CHECKING:
    from torchfil.glm import Guess
    from torchfil.glm.csv_leakage import LeakageTable
    from torchfil.glm.csv_table import EncodedTable

__all__ = ["glm"]

OFTEN = 0.9  # rows whose answer is guessed rightly at least so often are counted


def _names(_ctx: click.Context, _option: click.Parameter, text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


@click.command()
@click.argument("data", type=click.Path(path_type=Path))
@click.option("--target", required=True, help="The column to predict.")
@click.option("--private", callback=_names, default="", help="Columns an attacker wants, e.g. vkorc1,age; none: all.")
@click.option("--question", callback=_names, default="", help="What to guess, e.g. vkorc1,age+10,absent.")
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
    question: list[str],
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
    and the least error of an unbiased attacker who knows everything else, in the column's own unit.

    For each question, how often the best attacker who knows everything else answers rightly; no attacker, biased or
    not, does better. "vkorc1": which value has the column; "age+10": is it what it is, or 10 more; "absent": is the row
    there at all. The noise must not be chosen by a look at the data.

    \b
    Examples:
      torchfil glm patients.csv --target dose --private vkorc1,age
      torchfil glm patients.csv --target dose --question vkorc1,age+10,absent --sigma 0.001
      torchfil glm patients.csv --target dose --private vkorc1,age --categorical cyp2c9 --sigma 0.01 --out leakage.csv
      torchfil glm adult.csv --target income --model logistic --l2 0.001 --private marital-status --drop-missing
    """
    try:
        from torchfil.glm import csv_leakage, csv_table
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
    leakage = csv_leakage.leakage_table(
        encoded,
        private,
        questions=question,
        model=model,  # type: ignore[arg-type]
        l2=l2,
        sigma=sigma,
        intercept=intercept,
    )
    if out_file is not None:
        write_csv(out_file, {"id": ids, **leakage.columns})

    out.say(f"{len(rows):,} rows of {data}, {_encoding(encoded)}")
    if total > len(rows):
        out.say(f"{total - len(rows):,} rows with missing entries were left out")
    out.say(
        f"{model} model, λ = {l2:g}, score {leakage.score:.3f}; released are the weights plus noise of σ = {sigma:g}"
    )
    out.say(_legend(leakage))
    text, exposure = _exposure(leakage.columns, ids, id_column or "row", max(0, top))
    answers, questions = _questions(leakage.guesses, csv_leakage.FALSE_POSITIVE_RATE)
    result = {
        "rows": len(rows),
        "columns": list(encoded.columns),
        "levels": {name: list(levels) for name, levels in encoded.levels.items()},
        "model": model,
        "l2": l2,
        "sigma": sigma,
        "score": leakage.score,
        **exposure,
        "questions": questions,
        "out": None if out_file is None else str(out_file),
    }
    out.result(text + answers, result)
    if out_file is not None:
        out.say(f"\nall rows: {out_file}")
    out.say("\nThese numbers depend on private data: keep them confidential.")


def _encoding(encoded: EncodedTable) -> str:
    """What was made of the table: a column taken for something else changes every number."""
    nominal = ", ".join(f"{name} ({len(levels)})" for name, levels in encoded.levels.items()) or "none"
    text = f"{encoded.inputs.shape[1]} columns; one-hot: {nominal}"
    if encoded.few_values:
        names = ", ".join(f"{name} ({count})" for name, count in encoded.few_values.items())
        text += f"\nwhole numbers with few values, taken as quantities: {names}; if they are codes, use --categorical"
    return text


def _legend(leakage: LeakageTable) -> str:
    """What the columns mean, and whom they bind."""
    text = "fil: η of all that is private together; mse_bound, _error: least error of an unbiased attacker\n"
    if leakage.guesses:
        text += (
            "_guess: how often the best attacker is right, who knows all else and how common each answer is; no "
            "attacker does better\n"
            "_divergence, _tpr: of the row's own answer against the one told most easily from it\n"
        )
    return text


def _questions(guesses: Mapping[str, Guess], false_positive_rate: float) -> tuple[str, dict[str, Any]]:
    """How well the best attacker answers each question, as text and as data."""
    data: dict[str, Any] = {}
    for name, best in guesses.items():
        rate = best.true_positive_rate(false_positive_rate)
        data[name] = {
            "answers": list(best.answers),
            "prior": best.prior[0],
            "prior_accuracy": best.prior_accuracy[0],
            "accuracy": {"mean": best.accuracy.mean(), "max": best.accuracy.max()},
            "accuracy_error": best.accuracy_error.max(),
            "often_right": {"at_least": OFTEN, "rows": int((best.accuracy >= OFTEN).sum())},
            "false_positive_rate": false_positive_rate,
            "true_positive_rate": {"mean": rate.mean(), "max": rate.max()},
        }
    if not data:
        return "", data

    names = ["question", "answers", "prior", "best: mean", "largest", f"rows ≥ {100 * OFTEN:g} %"]
    names += [f"TPR at FPR {100 * false_positive_rate:g} %: mean", "largest"]
    lines = [
        [
            name,
            str(len(row["answers"])),
            *(f"{value:.3f}" for value in (row["prior_accuracy"], row["accuracy"]["mean"], row["accuracy"]["max"])),
            f"{row['often_right']['rows']:,}",
            *(f"{value:.3f}" for value in (row["true_positive_rate"]["mean"], row["true_positive_rate"]["max"])),
        ]
        for name, row in data.items()
    ]
    return f"\n\n{table(names, lines)}", data


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
