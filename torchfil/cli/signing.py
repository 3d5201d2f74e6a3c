"""``sign`` and ``verify``: who vouches for a run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from torchfil.cli.output import FAILED, Output, table, with_output
from torchfil.report.policy import load_policy
from torchfil.report.run_file import load
from torchfil.report.signature import Files, Signature, SignatureError
from torchfil.report.signature import sign as signed
from torchfil.report.signature import verify as verified
from torchfil.utils.files import write_bytes

__all__ = ["sign", "verify"]

FILE = click.Path(path_type=Path)
MEANING = "It proves who vouches for these files, not that the numbers in them are true."
weights_option = click.option("--weights", type=FILE, multiple=True, help="The released weights; may be repeated.")
policy_option = click.option("--policy", type=FILE, help="The policy that the run is held against.")


@click.command()
@click.argument("run", type=FILE)
@click.option("--key", type=FILE, required=True, help="Your ssh key, e.g. ~/.ssh/id_ed25519.")
@weights_option
@policy_option
@click.option("-o", "--out", "target", type=FILE, help="The signature file; RUN.sig if not given.")
@with_output
def sign(
    run: Path, key: Path, weights: tuple[Path, ...], policy: Path | None, target: Path | None, out: Output
) -> None:
    """Sign a saved run with an ssh key, together with weights and policy.

    \b
    Examples:
      torchfil sign run.fil --key ~/.ssh/id_ed25519 --weights model.pt --policy policy.toml
    """
    target = target or run.with_name(f"{run.name}.sig")
    files = _files(run, weights, policy)
    if target.resolve() in [path.resolve() for paths in (*files.values(), [key]) for path in paths]:
        raise ValueError(f"{target} is one of the files to read, which would be lost; name another with -o")
    load(run)  # whoever signs should not sign a damaged file
    if policy is not None:
        load_policy(policy)
    write_bytes(target, signed(files, key.expanduser()).encode())
    out.result(str(target), {"signature": str(target)})


@click.command()
@click.argument("run", type=FILE)
@click.option(
    "--allowed-signers", type=FILE, required=True, help="Whom you trust: see man ssh-keygen, ALLOWED SIGNERS."
)
@click.option("--signature", type=FILE, help="The signature file; RUN.sig if not given.")
@weights_option
@policy_option
@click.pass_context
@with_output
def verify(
    ctx: click.Context,
    run: Path,
    allowed_signers: Path,
    signature: Path | None,
    weights: tuple[Path, ...],
    policy: Path | None,
    out: Output,
) -> None:
    """Check who signed a saved run, weights and policy. Exit code 0: it holds, 1: it does not, 2: bad input.

    Every file that was signed must be given. The list of trusted keys must not come from whoever sent the run.

    \b
    Examples:
      torchfil verify run.fil --allowed-signers signers --weights model.pt --policy policy.toml
    """
    place = signature or run.with_name(f"{run.name}.sig")
    try:
        found = verified(place, allowed_signers, _files(run, weights, policy))
    except SignatureError as error:
        out.result(f"NOT VERIFIED: {error}", {"verified": False, "reason": str(error)})
        ctx.exit(FAILED)
    out.result(_text(found), {"verified": True, **asdict(found)})
    out.say(MEANING)


def _files(run: Path, weights: tuple[Path, ...], policy: Path | None) -> Files:
    return {"run": [run], "weights": list(weights), "policy": [] if policy is None else [policy]}


def _text(found: Signature) -> str:
    rows = [[file.role, file.name, file.sha256] for file in found.files]
    return f"verified: signed by {found.signer} ({found.key})\n" + table(["", "file", "SHA-256"], rows, left=3)
