"""``audit``: replays a training function on neighbouring data sets."""

import contextlib
import pkgutil
import sys
from typing import Any

import click

from torchfil.cli.output import FAILED, Output, with_output


@click.command()
@click.argument("train", metavar="MODULE:TRAIN")
@click.option(
    "--data",
    required=True,
    metavar="MODULE:DATA",
    help="The data set, or a function that returns it.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="Releases to compare.",
)
@click.option(
    "--example",
    "examples",
    type=int,
    multiple=True,
    help="Whom to leave out; three at random if not given.",
)
@click.option("--hidden-n", is_flag=True, help="The number of examples is not public.")
@click.pass_context
@with_output
def audit(
    ctx: click.Context, train: str, data: str, hidden_n: bool, out: Output, **options: Any
) -> None:
    """Train on neighbouring data sets with equal randomness.

    Name every step that is not as private as accounted.

    The function takes the data set, makes model, optimizer and loader private (by Opacus or
    torchfil) and trains; it is stopped after a few steps. It prints what was compared. Exit code 0:
    no fault was seen, 1: faults, 2: bad input.

    \b
    Examples:
      torchfil audit training:train --data training:dataset
      torchfil audit training:train --data training:dataset --example 17 --hidden-n
    """
    from torchfil.audit.replay import replay

    sys.path.insert(0, "")
    with contextlib.redirect_stdout(sys.stderr):  # what train prints is no result
        try:
            function, dataset = map(pkgutil.resolve_name, (train, data))
            dataset = dataset() if callable(dataset) else dataset
            found = replay(function, dataset, n_is_public=not hidden_n, **options)
        except Exception as error:
            raise ValueError(f"{train} on {data}: {type(error).__name__}: {error}") from error
    out.result(str(found), dict(vars(found)))
    ctx.exit(0 if found.passed else FAILED)
