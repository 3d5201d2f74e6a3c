"""What every command shares: quiet and JSON output, tables, progress bars, and errors in one
line.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
from tqdm import tqdm

from torchfil.utils.text import aligned, json_ready, visible

FAILED, BAD_INPUT = 1, 2
FILE = click.Path(path_type=Path)
T = TypeVar("T")


def check_places(read: Iterable[Path], written: Mapping[str, Path | None]) -> None:
    """Refuse to write over what is read, or two things into one place; ``written`` is by option."""
    taken = list(read)
    for option, path in written.items():
        if path is None:
            continue
        for other in taken:
            if path.resolve() == other.resolve() or (
                path.exists() and other.exists() and path.samefile(other)
            ):
                raise ValueError(f"{option} {path} would overwrite {other}; name another place")
        taken.append(path)


class BadInputError(click.ClickException):
    """Something the user gave does not fit; told in one line."""

    exit_code = BAD_INPUT


class OneLineGroup(click.Group):
    """Commands whose errors are one line on standard error, without usage and traceback."""

    def main(self, *args: Any, standalone_mode: bool = True, **options: Any) -> Any:
        """Run a command; the process ends with its exit code where ``standalone_mode``."""
        try:
            code = super().main(*args, standalone_mode=False, **options) or 0  # type: ignore[call-overload]
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            code = BAD_INPUT
        except click.ClickException as error:
            where = (
                error.ctx.command_path
                if isinstance(error, click.UsageError) and error.ctx
                else "torchfil"
            )
            hint = f" (see {where} --help)" if isinstance(error, click.UsageError) else ""
            click.echo(
                printed(f"{where}: {' '.join(error.format_message().split())}{hint}"), err=True
            )
            code = error.exit_code
        except (click.Abort, KeyboardInterrupt):
            click.echo("torchfil: stopped", err=True)
            code = 130
        if standalone_mode:
            sys.exit(code)
        return code


@dataclass(frozen=True)
class Output:
    """How to speak: in full, only the result, or JSON."""

    quiet: bool
    as_json: bool

    def say(self, text: str = "") -> None:
        """An explanation: left out with --quiet and --json."""
        if not (self.quiet or self.as_json):
            with tqdm.external_write_mode():
                click.echo(printed(text))

    def result(self, text: str, data: object) -> None:
        """The result: as text, or its data as JSON."""
        as_json = json.dumps(json_ready(data), indent=1).replace("##[", r"\u0023#[")
        click.echo(as_json if self.as_json else printed(text))

    def progress(self, items: Iterable[T], **options: object) -> tqdm[T]:
        """A bar on standard error where that is a terminal."""
        hidden = self.quiet or self.as_json or not sys.stderr.isatty()
        return tqdm(items, disable=hidden, leave=False, **options)


def printed(text: str) -> str:
    """The text as a terminal may show it.

    GitHub's runner would read a line that begins with :: as a command, and ##[…] wherever it
    stands.
    """
    return re.sub(r"(?m)^(\s*):(?=:)", r"\1: ", visible(text, keep="\n").replace("##[", "# #["))


def with_output(command: Callable[..., object]) -> Callable[..., object]:
    """Give a command the options --quiet and --json, and turn what the user did wrong into one
    line.
    """

    @click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
    @click.option(
        "-q", "--quiet", is_flag=True, help="Print the result only; no progress, no explanations."
    )
    @functools.wraps(command)
    def wrapped(*args: object, quiet: bool, as_json: bool, **options: object) -> object:
        try:
            return command(*args, out=Output(quiet, as_json), **options)
        except (BrokenPipeError, click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except (ValueError, OSError, ImportError, MemoryError) as error:
            raise BadInputError(_message(error)) from error
        except Exception as error:  # not exit code 1, with which a gate says that a rule is broken
            raise BadInputError(
                f"{type(error).__name__}: {error} (the input is not as torchfil writes it, or "
                "this is a fault of torchfil; please report it)"
            ) from error

    return wrapped


def with_redaction(command: Callable[..., object]) -> Callable[..., object]:
    """Give a command the options --redacted and --min-group, which means nothing on a page that is
    not redacted.
    """

    @click.option(
        "--redacted",
        is_flag=True,
        help="Leave out everything about single examples; may be shared.",
    )
    @click.option(
        "--min-group",
        type=int,
        help="Smallest group behind a number, with --redacted (10 if not given).",
    )
    @functools.wraps(command)
    def wrapped(*args: object, redacted: bool, min_group: int | None, **options: object) -> object:
        if not redacted and min_group is not None:
            raise ValueError(
                f"--min-group {min_group} has no effect without --redacted; add --redacted, or "
                "leave it out"
            )
        return command(
            *args, redacted=redacted, min_group=10 if min_group is None else min_group, **options
        )

    return wrapped


def table(names: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Columns lined up, the first ``left`` to the left, the others to the right.

    Cells are :func:`visible`.
    """
    return "\n".join(
        aligned([[visible(cell) for cell in line] for line in [names, *rows]], left=range(left))
    )


def _message(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__
