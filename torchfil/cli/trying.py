"""``demo`` and ``bench``: torchfil at work on this machine."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from torchfil.cli.output import FAILED, FILE, Output, number, table, with_output
from torchfil.cli.runs import summary

if TYPE_CHECKING:
    from torchfil.cli.digits import DigitsRun


@click.command()
@click.option(
    "-o", "--out", "directory", type=FILE, default=Path("out/demo"), show_default=True, help="Folder to write."
)
@click.option("--epochs", type=click.IntRange(min=1), default=20, show_default=True)
@click.option("--noise", type=click.FloatRange(min=0, min_open=True), default=1.0, show_default=True, help="σ.")
@click.option("--device", default="cpu", show_default=True)
@with_output
def demo(directory: Path, epochs: int, noise: float, device: str, out: Output) -> None:
    """Train privately on handwritten digits, save the run and write its report.

    \b
    Examples:
      torchfil demo
      torchfil demo --epochs 30 --noise 0.7 -o /tmp/digits
    """
    from torchfil.cli.digits import DELTA, train_on_digits
    from torchfil.datasets.stand_ins import small_digits_in_words
    from torchfil.report.writer import check_replaceable, write_report
    from torchfil.run.file import load

    _check_device(device)
    if directory.is_file():
        raise ValueError(f"{directory} is a file; name a folder for run and report")
    check_replaceable(directory / "report")
    directory.mkdir(parents=True, exist_ok=True)
    out.say(f"Data: {small_digits_in_words()}; nothing is downloaded.")

    def after_epoch(done: int, run: DigitsRun) -> None:
        epsilon = run.engine.get_epsilon(DELTA)
        out.say(f"epoch {done}: accuracy {100 * run.accuracy():.0f} %, ε = {epsilon:.2f} at δ = {DELTA:g}")

    with warnings.catch_warnings():  # of Opacus, about nothing that a newcomer could change
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        warnings.filterwarnings("ignore", message="Optimal order is the")
        run = train_on_digits(
            epochs=epochs,
            noise_multiplier=noise,
            device=device,
            progress=lambda turns: out.progress(turns, desc="epochs"),
            after_epoch=after_epoch,
        )
        path = run.saved(directory / "run.parquet")

    saved = load(path)
    page = write_report(saved, directory / "report")
    out.say(f"\n{summary(saved, 5)[0]}\n")
    out.say("These numbers depend on private data: keep them confidential.\n")
    out.say(f"run:    {path}")
    out.result(str(page) if out.quiet else f"report: {page}", {"run": str(path), "page": str(page)})


@click.command()
@click.option(
    "--model",
    "name",
    metavar="MODULE:FUNCTION",
    help="A function that returns (model, batch) or (model, batch, criterion).",
)
@click.option("--batch", type=click.IntRange(min=1), default=64, show_default=True, help="Examples, without --model.")
@click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--device", default="cpu", show_default=True)
@click.pass_context
@with_output
def bench(ctx: click.Context, name: str | None, batch: int, repeats: int, device: str, out: Output) -> None:
    """Measure what the accounting costs on this machine, beside a step of stock Opacus.

    With --model, your model: the table of torchfil.check (which layers run by which rule, what is not smooth, what
    falls back, what to change), then the time of a step; exit code 1 where the model is refused. A model that computes
    its loss itself needs no criterion. Without, one small network on random images, a minute at most. The benchmarks
    behind the README's figures are in the folder benchmarks/ of the source, which is not installed.

    \b
    Examples:
      torchfil bench
      torchfil bench --batch 256 --device cuda --json
      torchfil bench --model my_package.training:small_job
    """
    from torchfil.cli.timing import mnist_job, named_job, own_errors, step_times
    from torchfil.engine import check

    _check_device(device)
    job = mnist_job(batch, device) if name is None else named_job(name, device)
    with own_errors(f"--model {name!r}, a pass of the model over its batch"):
        checked = check(job.model, job.batch, job.criterion, job.private) if name is not None else None
    result: dict[str, Any] = {"batch": job.batch_size, "device": device, "repeats": repeats}
    if checked is not None:
        result["check"] = checked.to_dict()
        if not checked.runs:
            out.result(str(checked), result)
            ctx.exit(FAILED)

    times = step_times(
        job,
        repeats=repeats,
        device=device,
        progress=lambda turns: out.progress(turns, desc="turns", total=repeats + 1),
    )
    what = "MNIST network, random images" if name is None else name
    out.say(f"{what}, batch {job.batch_size}, {device}; medians of {repeats} turns\n")
    rows = [[each.name, number(each.milliseconds), f"{each.relative:.2f}"] for each in times if each.relative]
    lines = [table(["step", "ms", f"× {rows[0][0] if rows else 'none'}"], rows)]
    lines += [f"{each.name}: not possible: {each.failed}" for each in times if each.failed]
    shown = "\n".join(lines)
    result["steps"] = [asdict(each) for each in times]
    out.result(shown if checked is None else f"{checked}\n\n{shown}", result)


def _check_device(device: str) -> None:
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from error
