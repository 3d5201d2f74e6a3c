"""``glm``: from a CSV file to a table of leakage."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from torchfil.cli.output import FILE, Output, check_places, table, with_output
from torchfil.gate.rules import in_digits as number
from torchfil.report.page import write_report
from torchfil.run.file import save
from torchfil.run.saved_run import SavedRun
from torchfil.utils.errors import installed_by
from torchfil.utils.text import write_csv

if TYPE_CHECKING:
    from torchfil.glm import BestGuess
    from torchfil.glm.tables import EncodedTable, LeakageTable

OFTEN = 0.9  # rows whose answer is guessed rightly at least so often are counted


def _names(_ctx: click.Context, option: click.Parameter, text: str) -> list[str]:
    """Names between commas; one that has a comma itself stands in double quotes."""
    try:
        fields = next(csv.reader([text], skipinitialspace=True, strict=True), [])
    except csv.Error as error:
        raise click.BadParameter(
            f'{text!r}: names stand between commas, e.g. age,"height, cm" ({error})'
        ) from error
    return [name.strip() for name in fields if name.strip()]


@click.command()
@click.argument("data", type=FILE)
@click.option("--target", required=True, help="The column to predict.")
@click.option("--sigma", required=True, type=float, help="Noise σ on the released weights.")
@click.option(
    "--private",
    callback=_names,
    default="",
    help="Columns an attacker wants, e.g. vkorc1,age; none: all.",
)
@click.option(
    "--question", callback=_names, default="", help="What to guess, e.g. vkorc1,age+10,absent."
)
@click.option(
    "--categorical",
    callback=_names,
    default="",
    help="Columns whose numbers are codes, e.g. cyp2c9.",
)
@click.option("--ignore", callback=_names, default="", help="Columns to leave out.")
@click.option(
    "--id",
    "id_column",
    help="The column that names the rows; without it, rows are numbered from 0.",
)
@click.option(
    "--drop-missing", is_flag=True, help="Leave out rows that miss an entry in a used column."
)
@click.option(
    "--model", type=click.Choice(["linear", "logistic", "softmax", "poisson"]), default="linear"
)
@click.option("--l2", default=1e-2, show_default=True, help="Penalty λ.")
@click.option("--intercept/--no-intercept", default=True, show_default=True)
@click.option(
    "--separator", default=",", show_default=True, help="One character between columns, or tab."
)
@click.option(
    "--decimal",
    type=click.Choice([".", ","]),
    default=".",
    show_default=True,
    help="The decimal sign.",
)
@click.option(
    "--encoding", default="utf-8-sig", show_default=True, help="Of the file, e.g. cp1252."
)
@click.option(
    "--top",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    help="How many rows to print.",
)
@click.option("--out", "out_file", type=FILE, help="Write all rows to this CSV file.")
@click.option(
    "--group",
    callback=_names,
    default="",
    help="Columns by which the page compares rows, e.g. sex,site.",
)
@click.option("--save", "run_file", type=FILE, help="Save the run, for gate, report and compare.")
@click.option("--report", "folder", type=FILE, help="Write its page into this folder.")
@with_output
def glm(
    data: Path,
    target: str,
    sigma: float,
    private: list[str],
    question: list[str],
    model: str,
    l2: float,
    intercept: bool,
    top: int,
    out_file: Path | None,
    run_file: Path | None,
    folder: Path | None,
    out: Output,
    **reading: Any,
) -> None:
    """How much a linear model, released with noise, leaks about every row of a CSV file.

    A text column is one-hot encoded and counts as one attribute. For each private column you get
    its Fisher information loss η and the smallest error of an unbiased attacker who knows
    everything else, in the column's own unit.

    For each question you get how often the best attacker who knows everything else answers
    correctly; no attacker, biased or not, does better. "vkorc1" asks which value the column has,
    "age+10" whether it is as recorded or 10 more, "absent" whether the row is there at all. Choose
    σ without looking at the data; what the noise costs is printed as the score of the released
    model.

    \b
    Examples:
      torchfil glm patients.csv --target dose --sigma 0.01 --private vkorc1,age
      torchfil glm patients.csv --target dose --sigma 0.001 --question vkorc1,age+10,absent
      torchfil glm patients.csv --target dose --sigma 0.01 --private vkorc1 --categorical cyp2c9
      --out leakage.csv torchfil glm adult.csv --target income --model logistic --sigma 0.1
      --private marital-status --drop-missing torchfil glm patienten.csv --target dosis --sigma 0.01
      --separator ";" --decimal , torchfil glm patients.csv --target dose --sigma 0.01 --group sex
      --save run.parquet --report page
    """
    with installed_by("glm", "linear models need pandas and scikit-learn"):
        from torchfil.glm.tables import FALSE_POSITIVE_RATE, leakage_table, read_table
    check_places([data], {"--out": out_file, "--save": run_file, "--report": folder})
    if target in private:
        raise ValueError(
            f"{target!r} is the target; it counts as private where --private is left out"
        )
    rows = read_table(data, target, **reading)
    leakage = leakage_table(
        rows, private, questions=question, model=model, l2=l2, sigma=sigma, intercept=intercept
    )
    written_run = run_file is not None or folder is not None
    run = _run(
        leakage, rows, private, sigma, title=f"{target} of {data.name}", hash_data=written_run
    )
    columns = {**{name: run.columns[name] for name in ("fil", "mse_bound")}, **leakage.columns}
    if out_file is not None:
        write_csv(out_file, {"id": rows.ids, **columns})
    if run_file is not None:
        save(run, run_file)
    page = None if folder is None else write_report(run, folder)

    # what was made of the table: a column taken for something else changes every number
    one_hot = ", ".join(f"{name} ({len(levels)})" for name, levels in rows.levels.items()) or "none"
    notes = _notes(rows)
    out.say(f"{len(rows.ids):,} rows of {data}, {len(rows.columns)} columns; one-hot: {one_hot}")
    out.say("".join(f"{note}\n" for note in notes) + _explanation(leakage, model, l2, sigma))
    text, exposure = _exposure(columns, rows.ids, reading["id_column"] or "row", top)
    answers, questions = _questions(leakage.guesses, FALSE_POSITIVE_RATE)
    read = {"rows": len(rows.ids), "columns": rows.columns, "levels": rows.levels}
    scores = {"score": leakage.score, "released_score": leakage.released_score}
    written = {"out": out_file, "run": run_file, "page": page}
    result = {
        **read,
        "notes": notes,
        "model": model,
        "l2": l2,
        "sigma": sigma,
        **scores,
        **exposure,
    }
    out.result(text + answers, {**result, "questions": questions, **written})
    for name, path in written.items():
        if path is not None:
            out.say(f"\n{'all rows' if name == 'out' else name}: {path}")
    out.say("\nThese numbers depend on private data: keep them confidential.")


def _run(
    leakage: LeakageTable, rows: EncodedTable, private: list[str], sigma: float, **about: Any
) -> SavedRun:
    """The release as a run: what the terminal shows, and what is saved and reported."""
    from torchfil.run.linear_run import linear_run

    name, on = leakage.model.score_name, f"the {len(rows.ids):,} fitted rows"
    finite = math.isfinite(leakage.released_score)
    metrics = {name: (leakage.released_score, f"{on}, mean over the noise")} if finite else {}
    metrics[f"{name} before noise"] = leakage.score, on
    given: dict[str, Any] = {**about, "ids": rows.ids, "target": rows.target, "groups": rows.groups}
    given["attributes"] = {
        name: own for name, own in rows.attributes.items() if not private or name in private
    }
    given |= {"private_target": not private, "questions": leakage.guesses, "metrics": metrics}
    given["scores"] = {"blind_score": leakage.blind_score}
    return linear_run(leakage.model, rows.inputs, leakage.targets, sigma, **given)


def _notes(rows: EncodedTable) -> list[str]:
    """What a reader should look at: rows left out, and columns that may be something else."""
    notes = []
    if rows.left_out:
        notes.append(f"{rows.left_out:,} rows with missing entries were left out")
    if rows.few_values:
        names = ", ".join(f"{name} ({count})" for name, count in rows.few_values.items())
        notes.append(
            f"whole numbers with few values, taken as quantities: {names}; for codes, use "
            "--categorical"
        )
    return notes


def _explanation(leakage: LeakageTable, model: str, l2: float, sigma: float) -> str:
    """The model's score without noise, and with it; what the columns mean, and whom they bind."""
    text = f"{model} model, λ = {l2:g}; released are the weights plus noise of σ = {sigma:g}\n"
    text += f"{leakage.model.score_name} on the fitted rows: {leakage.score:.3f} before noise, "
    text += f"{number(leakage.released_score)} as released (mean over the noise)"
    if not leakage.released_score > leakage.blind_score:
        text += (
            f": no better than a model that knows no column ({leakage.blind_score:.3g}); σ = "
            f"{sigma:g} is too much"
        )
    text += (
        "\nmse_bound: the least mean squared error of an unbiased attacker, over all that is "
        "private, on average over the\nnoise; each column counts in units of its standard "
        "deviation. fil is 1/sqrt(mse_bound).\n"
    )
    if any(name.endswith("_error") for name in leakage.columns):
        text += (
            "_error: of one column, the least root mean squared error, in the column's own "
            "unit; _fil: its η\n"
        )
    if leakage.guesses:
        text += (
            "_guess: how often the best attacker is right, who knows all else and how common each "
            "answer is; no attacker does better\n"
            "_divergence, _tpr: of the row's own answer against the one told most easily from it\n"
        )
    return text


def _questions(
    guesses: Mapping[str, BestGuess], false_positive_rate: float
) -> tuple[str, dict[str, object]]:
    """How well the best attacker answers each question, as text and as data."""
    lines, data = list[list[str]](), dict[str, object]()
    for name, best in guesses.items():
        rate, often = (
            best.true_positive_rate(false_positive_rate),
            int((best.accuracy >= OFTEN).sum()),
        )
        prior, mean, most = float(best.prior_accuracy[0]), best.accuracy.mean(), best.accuracy.max()
        data[name] = {
            "answers": best.answers,
            "prior": best.prior[0],
            "prior_accuracy": prior,
            "accuracy": {"mean": mean, "max": most},
            "accuracy_error": best.accuracy_error.max(),
            "often_right": {"at_least": OFTEN, "rows": often},
            "false_positive_rate": false_positive_rate,
            "true_positive_rate": {"mean": rate.mean(), "max": rate.max()},
        }
        shares = [f"{share:.3f}" for share in (prior, mean, most, rate.mean(), rate.max())]
        lines.append([name, str(len(best.answers)), *shares[:3], f"{often:,}", *shares[3:]])
    names = ["question", "answers", "prior", "best: mean", "largest", f"rows ≥ {100 * OFTEN:g} %"]
    names += [f"TPR at FPR {100 * false_positive_rate:g} %: mean", "largest"]
    return f"\n\n{table(names, lines)}" if data else "", data


def _exposure(
    columns: dict[str, np.ndarray], ids: Sequence[str | int], name_of_ids: str, top: int
) -> tuple[str, dict[str, list[Any] | dict[str, Any]]]:
    """The most exposed rows and a summary of all, as text and as data."""
    order = np.argsort(-columns["fil"], kind="stable")[:top]
    quantiles = {
        name: np.quantile(values, [0, 0.5, 1]).tolist() for name, values in columns.items()
    }
    summary = {
        name: dict(zip(("min", "median", "max"), own, strict=True))
        for name, own in quantiles.items()
    }
    lines = [
        [str(ids[row]), *(number(float(values[row])) for values in columns.values())]
        for row in order
    ]
    parts = ("max", "median", "min")
    lines += [
        [f"({part} of {len(ids):,})", *(number(own[part]) for own in summary.values())]
        for part in parts
    ]
    exposed = [
        {"id": str(ids[row]), **{name: values[row] for name, values in columns.items()}}
        for row in order
    ]
    return table([name_of_ids, *columns], lines), {"summary": summary, "most_exposed": exposed}
