"""``card``: what a model card may say about a saved run."""

from __future__ import annotations

import json
from pathlib import Path

import click

from torchfil.cli.output import FAILED, FILE, Output, check_places, with_output
from torchfil.gate.policy import load_policy
from torchfil.report.card import NotReleasedError, card_of, merged
from torchfil.run.file import load
from torchfil.utils.files import write_bytes


@click.command()
@click.argument("run", type=FILE)
@click.option(
    "--into",
    type=FILE,
    help="The card to update, or to begin: README.md. Without it, the card is printed.",
)
@click.option(
    "--cyclonedx",
    "bom",
    type=FILE,
    help="Write a CycloneDX 1.6 bill of materials, a JSON file, too.",
)
@click.option(
    "--policy",
    type=FILE,
    help="Publish this policy's limits and its decision, if it is “May be released”.",
)
@click.option(
    "--min-group", type=int, default=10, show_default=True, help="Smallest group behind a number."
)
@with_output
def card(
    run: Path, into: Path | None, bom: Path | None, policy: Path | None, min_group: int, out: Output
) -> None:
    """Write the section on privacy of a model card, from public numbers alone: no example, no small
    group.

    It stands between two markers, and metadata for the Hugging Face Hub in the front matter.
    Written again, it replaces itself and leaves the rest of the card as it is. Exit code 0:
    written, 2: bad input, 1: nothing was written, for the policy's decision is not “May be
    released”.

    \b
    Examples:
      torchfil card run.parquet                      # prints it
      torchfil card run.parquet --into README.md --policy policy.toml
      torchfil card run.parquet --into README.md --cyclonedx card.cdx.json
    """
    check_places([run, *([policy] if policy else [])], {"--into": into, "--cyclonedx": bom})
    try:
        made = card_of(
            load(run), min_group=min_group, policy=load_policy(policy) if policy else None
        )
    except NotReleasedError as error:
        out.result(f"NOT WRITTEN: {error}", {"written": False, "reason": str(error)})
        raise click.exceptions.Exit(FAILED) from error

    # everything is made before anything is written; an existing card keeps its permissions, and is
    # found behind a link
    before, mode = (
        (into.read_bytes(), into.stat().st_mode) if into and into.exists() else (b"", 0o600)
    )
    text = merged(before.decode("utf-8-sig"), made)
    if bom:
        write_bytes(bom, json.dumps(made.bom, indent=1, ensure_ascii=False).encode())
    if into:
        write_bytes(into.resolve(), text.encode())
        into.chmod(mode)
    out.result(
        f"wrote {into}" if into else text,
        {"written": True, "metadata": made.metadata, "bom": made.bom},
    )
