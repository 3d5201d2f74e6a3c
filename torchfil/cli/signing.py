"""``sign`` and ``verify``: who vouches for a run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from torchfil.cli.output import FAILED, Output, table, with_output
from torchfil.report import signature as signatures
from torchfil.report.run_file import load
from torchfil.utils.files import write_bytes

FILE = click.Path(path_type=Path)


def _with_files(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the files that a signature is about; ``files`` has them by role."""

    @click.argument("run", type=FILE)
    @click.option("--weights", type=FILE, multiple=True, help="The released weights; may be repeated.")
    @click.option("--policy", type=FILE, multiple=True, help="The policy that the run is held against.")
    @click.option("--signature", type=FILE, help="The signature file; RUN.sig if not given.")
    @functools.wraps(command)
    def wrapped(run: Path, weights: Any, policy: Any, signature: Path | None, **options: Any) -> None:
        place = signature or run.with_name(f"{run.name}.sig")
        command(files={"run": [run], "weights": weights, "policy": policy}, place=place, **options)

    return wrapped


@click.command()
@_with_files
@click.option("--key", type=FILE, required=True, help="Your ssh key, e.g. ~/.ssh/id_ed25519.")
@with_output
def sign(files: signatures.Files, place: Path, key: Path, out: Output) -> None:
    """Sign a saved run with an ssh key, together with weights and policy.

    \b
    Examples:
      torchfil sign run.fil --key ~/.ssh/id_ed25519 --weights model.pt --policy policy.toml
    """
    if place.resolve() in [path.resolve() for paths in (*files.values(), [key]) for path in paths]:
        raise ValueError(f"{place} is one of the files to read, which would be lost; name another with --signature")
    load(files["run"][0])  # nobody should sign a damaged file
    write_bytes(place, signatures.sign(files, key.expanduser()).encode())
    out.result(str(place), {"signature": str(place)})


@click.command()
@_with_files
@click.option(
    "--allowed-signers", "trust", type=FILE, required=True, help="Keys you trust: man ssh-keygen describes it."
)
@click.pass_context
@with_output
def verify(ctx: click.Context, files: signatures.Files, place: Path, trust: Path, out: Output) -> None:
    """Check who signed a saved run, weights and policy. Exit code 0: it holds, 1: it does not, 2: bad input.

    Every file that was signed must be given. The list of trusted keys must not come from whoever sent the run.

    \b
    Examples:
      torchfil verify run.fil --allowed-signers signers --weights model.pt --policy policy.toml
    """
    try:
        found = signatures.verify(place, trust, files)
    except signatures.SignatureError as error:
        out.result(f"NOT VERIFIED: {error}", {"verified": False, "reason": str(error)})
        ctx.exit(FAILED)
    rows = [[file.role, file.name, file.sha256] for file in found.files]
    text = f"verified: signed by {found.signer} ({found.key})\n{table(['', 'file', 'SHA-256'], rows, left=3)}"
    out.result(text, {"verified": True, **asdict(found)})
    out.say("It proves who vouches for these files, not that the numbers in them are true.")
