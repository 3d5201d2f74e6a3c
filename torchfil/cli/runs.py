"""``report``, ``inspect``, ``compare``, ``sign`` and ``verify``: saved runs to read, to compare and
to vouch for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from torchfil.cli.output import (
    FAILED,
    FILE,
    Output,
    check_places,
    table,
    with_output,
    with_redaction,
)
from torchfil.gate.policy import load_policy
from torchfil.gate.rules import audit_in_words
from torchfil.gate.rules import in_digits as number
from torchfil.report import signature as signatures
from torchfil.report.comparison import changes, compare_runs, in_short
from torchfil.report.formats import lines_of
from torchfil.report.page import render_comparison, write_report
from torchfil.run import baselines
from torchfil.run.baselines import CLASSES, LOWER_BOUND, NOT_MEASURED
from torchfil.run.file import load
from torchfil.run.saved_run import SavedRun, jumps_of
from torchfil.run.statistics import is_spared
from torchfil.utils.files import file_sha256, write_bytes
from torchfil.utils.text import visible


@click.command()
@click.argument("run", type=FILE)
@click.option(
    "-o",
    "--out",
    "directory",
    type=FILE,
    required=True,
    help="Folder to write; replaced when complete.",
)
@click.option(
    "--policy",
    type=FILE,
    help="Thresholds, a TOML file (gate --init): the page begins with the verdict.",
)
@click.option(
    "--signature",
    type=FILE,
    help="A signature of the run (torchfil sign): the page says who signed.",
)
@click.option(
    "--allowed-signers", type=FILE, help="With --signature: whom you trust, as in torchfil verify."
)
@click.option(
    "--weights",
    type=FILE,
    multiple=True,
    help="The released weights: their hash is on the sheet to sign.",
)
@with_output
@with_redaction
def report(
    run: Path, directory: Path, redacted: bool, min_group: int, out: Output, **given: Any
) -> None:
    """Write the report of a saved run: a page that opens in any browser, with tables beside it.

    \b
    Examples:
      torchfil report run.parquet -o report
      torchfil report run.parquet -o report --policy policy.toml --weights model.pt
      torchfil report run.parquet -o report --signature run.parquet.sig --allowed-signers signers
      torchfil report run.parquet -o public --redacted --min-group 20
    """
    policy, signature, trust = (given[name] for name in ("policy", "signature", "allowed_signers"))
    if policy is not None and redacted:
        raise ValueError("A public page carries no verdict; drop --policy or --redacted.")
    if (signature is None) != (trust is None):
        raise ValueError("--signature and --allowed-signers belong together; give both")
    thresholds = None if policy is None else load_policy(policy)
    files = {
        "run": [run],
        "policy": [] if policy is None else [policy],
        "weights": given["weights"],
    }
    digests = {
        f"{role} {each.name}": file_sha256(each) for role, paths in files.items() for each in paths
    }
    vouched = (
        None
        if signature is None or trust is None
        else signatures.verify(signature, trust, files, complete=False)
    )
    options: dict[str, Any] = {"min_group": min_group, "policy": thresholds, "signature": vouched}
    page = write_report(load(run), directory, redacted=redacted, digests=digests, **options)
    if not redacted:
        out.say(
            "The report depends on private data: keep it confidential (--redacted makes one to "
            "share)."
        )
    out.result(str(page), {"page": str(page), "redacted": redacted})


@click.command()
@click.argument("run", type=FILE)
@click.option(
    "--top",
    type=click.IntRange(min=0),
    default=5,
    show_default=True,
    help="How many examples to name.",
)
@with_output
def inspect(run: Path, top: int, out: Output) -> None:
    """Summarise a saved run in the terminal.

    \b
    Examples:
      torchfil inspect run.parquet
      torchfil inspect run.parquet --top 20 --json
    """
    out.result(*summary(load(run), top))
    out.say("\nThese numbers depend on private data: keep them confidential.")


def summary(run: SavedRun, top: int) -> tuple[str, dict[str, Any]]:
    """A run in a few lines, with its ``top`` most exposed examples, as text and as data."""
    run.column("fil")
    status, told = baselines.status_of(run), np.flatnonzero(baselines.is_told(run))
    fil, low = run.column("fil")[told], run.column("mse_bound_low")[told]
    order = told[np.argsort(-fil, kind="stable")][:top]
    quantiles = np.quantile(fil, [0.5, 0.95, 1.0]).tolist() if len(fil) else [None] * 3
    exposure = baselines.exposure_of(run)
    counts = (
        None
        if exposure is None
        else {text: int((exposure == each).sum()) for each, text in CLASSES.items()}
    )

    data: dict[str, Any] = {
        "about": run.about,
        "examples": {
            "total": len(run),
            "not_measured": int((status == NOT_MEASURED).sum()),
            "lower_bounds_only": int((status == LOWER_BOUND).sum()),
            "spared": int(is_spared(run).sum()),
            "exposure": counts,
            "too_few_draws": len(run) - len(told),
        },
        "fil": dict(zip(("median", "q95", "max"), quantiles, strict=True)),
        "smallest_mse_bound": float(low.min()) if len(low) else None,
        "most_exposed": [
            {"id": run.ids[i], **{name: own[i] for name, own in run.columns.items()}} for i in order
        ],
        "groups": {name: len(run.coded_group(name)[0]) for name in run.groups},
        "attributes": len(run.attributes.names) if run.attributes is not None else 0,
        "questions": {
            each.name: float(np.max(each.rate()[told], initial=0.0)) for each in run.questions
        },
        "attacks": [
            {"name": each.name, "violated": int(each.violated.sum()), "testable": each.testable}
            | {"untestable": each.untestable or ("" if each.testable else "one trial")}
            for each in run.attacks
        ],
    }
    words = {
        "blind": baselines.typical_blind_error(run),
        "in_digits": number,
        "audit_in_words": audit_in_words,
    }
    lines = [
        line.split("\t")
        for line in lines_of("inspect.txt", run=run, data=data, jumps=jumps_of(run.about), **words)
    ]
    text = table(lines[0], lines[1:], left=2)
    return text + _most_exposed(run, data["most_exposed"]), data


def _most_exposed(run: SavedRun, examples: list[dict[str, Any]]) -> str:
    """A table of these examples, and where its numbers come from; "" if there are none."""
    if not examples:
        return ""
    merged = (run.about.get("merged") or {}).get("runs")
    origin = "estimates from one run" if merged is None else f"means over {merged} runs"
    if run.about.get("kind") == "linear":
        origin = "closed forms"
    known = "num_rows", "fil", "fil_error", "mse_bound", "mse_bound_low", "epsilon"
    names = [name for name in known if name in run.columns]
    rows = [[str(row["id"]), *(number(float(row[name])) for name in names)] for row in examples]
    return f"\n\nmost exposed ({origin})\n{table(['id', *names], rows)}"


@click.command()
@click.argument("before", type=FILE)
@click.argument("after", type=FILE)
@click.option(
    "-o", "--out", "page", type=FILE, help="Write a page, an HTML file; replaced when complete."
)
@with_output
@with_redaction
def compare(
    before: Path, after: Path, page: Path | None, redacted: bool, min_group: int, out: Output
) -> None:
    """Compare two saved runs on the same examples: what a change did, and who moved.

    Examples are matched by their ids. Runs that share none, protect other inputs or ask other
    questions are refused.

    \b
    Examples:
      torchfil compare before.parquet after.parquet
      torchfil compare before.parquet after.parquet -o compared.html
      torchfil compare before.parquet after.parquet -o public.html --redacted --min-group 20
    """
    check_places([before, after], {"-o": page})
    comparison = compare_runs(load(before), load(after), redacted=redacted, min_group=min_group)
    if page is not None:
        write_bytes(page, render_comparison(comparison).encode("utf-8", "replace"))

    # without the table of all examples, of which the most moved are in the page
    data = {**asdict(replace(comparison, moves=None)), "page": page}
    data["settings"] = {
        name: {"before": one, "after": other} for name, one, other in comparison.settings
    }
    del data["moves"]
    rows = [
        [name, _shown(one), _shown(other)]
        for name, one, other in (*comparison.settings, *changes(comparison))
    ]
    told = map(visible, [*in_short(comparison), *comparison.notes])
    out.result("\n".join([table(["", "before", "after"], rows), "", *told]), data)
    if page is not None:
        out.say(f"\npage: {page}")
    if not redacted:
        out.say(
            "\nThese numbers depend on private data: keep them confidential (--redacted makes a "
            "page to share)."
        )


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else "none" if value is None else number(value)


def _with_files(command: Callable[..., object]) -> Callable[..., object]:
    """Give a command the files that a signature is about; ``files`` has them by role."""

    @click.argument("run", type=FILE)
    @click.option(
        "--weights", type=FILE, multiple=True, help="The released weights; may be repeated."
    )
    @click.option(
        "--policy", type=FILE, multiple=True, help="The policy that the run is held against."
    )
    @click.option("--signature", type=FILE, help="The signature file; RUN.sig if not given.")
    @functools.wraps(command)
    def wrapped(
        run: Path, weights: object, policy: object, signature: Path | None, **options: object
    ) -> None:
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
      torchfil sign run.parquet --key ~/.ssh/id_ed25519 --weights model.pt --policy policy.toml
    """
    check_places(
        [key, *(path for paths in files.values() for path in paths)], {"--signature": place}
    )
    load(files["run"][0])  # nobody should sign a damaged file
    write_bytes(place, signatures.sign(files, key.expanduser()).encode())
    out.result(str(place), {"signature": str(place)})


@click.command()
@_with_files
@click.option(
    "--allowed-signers",
    "trust",
    type=FILE,
    required=True,
    help="Keys you trust; see man ssh-keygen.",
)
@click.pass_context
@with_output
def verify(
    ctx: click.Context, files: signatures.Files, place: Path, trust: Path, out: Output
) -> None:
    """Check who signed a saved run, weights and policy.

    Exit code 0: it holds, 1: it does not, 2: bad input.

    Every file that was signed must be given. The list of trusted keys must not come from whoever
    sent the run.

    \b
    Examples:
      torchfil verify run.parquet --allowed-signers signers --weights model.pt --policy policy.toml
    """
    try:
        found = signatures.verify(place, trust, files)
    except signatures.SignatureError as error:
        out.result(f"NOT VERIFIED: {error}", {"verified": False, "reason": str(error)})
        ctx.exit(FAILED)
    rows = [[file.role, file.name, file.sha256] for file in found.files]
    text = (
        f"verified: signed by {found.signer} ({found.key})\n"
        f"{table(['', 'file', 'SHA-256'], rows, left=3)}"
    )
    out.result(text, {"verified": True, **asdict(found)})
    out.say("It proves who vouches for these files, not that the numbers in them are true.")
