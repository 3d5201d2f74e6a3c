"""``report``, ``inspect``, ``compare``, ``sign`` and ``verify``: saved runs to read, to compare and to vouch for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import numpy as np

from torchfil.cli.output import FAILED, FILE, Output, checked_min_group, min_group_option, number, table, with_output
from torchfil.report import signature as signatures
from torchfil.report.comparison import Comparison, changes, compare_runs, in_short
from torchfil.report.page import render_comparison
from torchfil.run.baselines import LOWER_BOUND, NOT_MEASURED, blind_error_of_inputs, exposed_examples, status_of
from torchfil.run.file import load
from torchfil.run.saved_run import SavedRun
from torchfil.run.statistics import is_spared
from torchfil.utils.files import write_bytes
from torchfil.utils.text import visible


@click.command()
@click.argument("run", type=FILE)
@click.option("-o", "--out", "directory", type=FILE, required=True, help="Folder to write; replaced when complete.")
@click.option("--redacted", is_flag=True, help="Leave out everything about single examples; may be shared.")
@min_group_option
@click.option("--policy", type=FILE, help="Thresholds, a TOML file (gate --init): the page begins with the verdict.")
@click.option("--pictures", is_flag=True, help="Write the charts as SVG files beside the page, too.")
@click.option("--signature", type=FILE, help="A signature of the run (torchfil sign): the page says who signed.")
@click.option("--allowed-signers", type=FILE, help="With --signature: whom you trust, as in torchfil verify.")
@with_output
def report(
    run: Path, directory: Path, redacted: bool, min_group: int | None, pictures: bool, out: Output, **given: Path | None
) -> None:
    """Write the report of a saved run: a page that opens in any browser, with tables beside it.

    \b
    Examples:
      torchfil report run.parquet -o report
      torchfil report run.parquet -o report --policy policy.toml
      torchfil report run.parquet -o report --signature run.parquet.sig --allowed-signers signers
      torchfil report run.parquet -o public --redacted --min-group 20
    """
    from torchfil.gate.policy import load_policy
    from torchfil.report.writer import write_report

    smallest = checked_min_group(min_group, redacted=redacted)
    policy, signature, trust = (given[name] for name in ("policy", "signature", "allowed_signers"))
    if (signature is None) != (trust is None):
        raise ValueError("--signature and --allowed-signers belong together; give both or neither")
    thresholds = None if policy is None else load_policy(policy)
    files = {"run": [run], "policy": [] if policy is None else [policy]}
    vouched = None if signature is None or trust is None else signatures.verify(signature, trust, files, complete=False)
    options: dict[str, Any] = {"min_group": smallest, "policy": thresholds, "signature": vouched, "pictures": pictures}
    page = write_report(load(run), directory, redacted=redacted, **options)
    if not redacted:
        out.say("The report depends on private data: keep it confidential (--redacted makes one to share).")
    out.result(str(page), {"page": str(page), "redacted": redacted})


@click.command()
@click.argument("run", type=FILE)
@click.option(
    "--top",
    type=click.IntRange(min=0),
    default=5,
    show_default=True,
    help="How many of the most exposed examples to name.",
)
@with_output
def inspect(run: Path, top: int, out: Output) -> None:
    """Summarise a saved run in the terminal.

    \b
    Examples:
      torchfil inspect run.parquet
      torchfil inspect run.parquet --top 20 --json
    """
    text, data = summary(load(run), top)
    out.result(text, data)
    out.say("\nThese numbers depend on private data: keep them confidential.")


def summary(run: SavedRun, top: int) -> tuple[str, dict[str, Any]]:
    """A run in a few lines, with its ``top`` most exposed examples, as text and as data."""
    data = _summary(run, top)
    return _summary_text(run, data), data


def _summary(run: SavedRun, top: int) -> dict[str, Any]:
    run.column("fil")
    status = status_of(run)
    measured = np.flatnonzero(status != NOT_MEASURED)
    fil, low = run.column("fil")[measured], run.column("mse_bound_low")[measured]
    order = measured[np.argsort(-fil, kind="stable")][:top]
    quantiles = np.quantile(fil, [0.5, 0.95, 1.0]).tolist() if len(fil) else [None] * 3

    return {
        "about": run.about,
        "examples": {
            "total": len(run),
            "not_measured": int((status == NOT_MEASURED).sum()),
            "lower_bounds_only": int((status == LOWER_BOUND).sum()),
            "spared": int(is_spared(run).sum()),
            "exposed": None if (exposed := exposed_examples(run)) is None else int(exposed.sum()),
        },
        "fil": dict(zip(("median", "q95", "max"), quantiles, strict=True)),
        "smallest_mse_bound": float(low.min()) if len(low) else None,
        "most_exposed": [
            {"id": run.ids[row], **{name: values[row] for name, values in run.columns.items()}} for row in order
        ],
        "groups": {name: len(run.coded_group(name)[0]) for name in run.groups},
        "attributes": len(run.attributes.names) if run.attributes is not None else 0,
        "pictures": len(run.pictures.rows) if run.pictures is not None else 0,
        "questions": {
            question.name: float(np.max(question.rate()[measured], initial=0.0)) for question in run.questions
        },
        "attacks": [
            {
                "name": attack.name,
                "violated": int(attack.violated.sum()),
                "testable": attack.testable,
                "untestable": attack.untestable or ("" if attack.testable else "one trial"),
            }
            for attack in run.attacks
        ],
    }


def _summary_text(run: SavedRun, data: dict[str, Any]) -> str:
    about, examples, fil = run.about, data["examples"], data["fil"]
    model = about.get("model", {})
    lines = [
        ["", str(about.get("title", "a saved run"))],
        ["model", f"{model.get('name')}, {number(model.get('num_parameters'))} parameters"],
        [
            "data",
            f"{examples['total']:,} examples, SHA-256 {about.get('dataset', {}).get('data_sha256') or 'not taken'}",
        ],
        *(_release_lines(about) if about.get("kind") == "linear" else _training_lines(about)),
        ["FIL", f"median {number(fil['median'])}, 95 % below {number(fil['q95'])}, largest {number(fil['max'])}"],
        *_bound_lines(about, data["smallest_mse_bound"]),
    ]

    # the rest only where there is something to tell
    if examples["exposed"] is not None:
        blind = number(blind_error_of_inputs(run))
        means = f"an unbiased guess may come closer to them than a blind one, ± {blind} an input"
        text = f"{examples['exposed']:,} examples ({means})"
        lines.append(["exposed", text])
    if examples["not_measured"]:
        lines.append(
            ["not measured", f"{examples['not_measured']:,} examples: not spared, the run says nothing of them"]
        )
    if examples["lower_bounds_only"]:
        lines.append(["in part", f"{examples['lower_bounds_only']:,} examples: some of their steps were not measured"])
    if examples["spared"]:
        lines.append(["spared", f"{examples['spared']:,} examples: trained with a smaller weight, held fixed here"])
    if run.groups:
        lines.append(["groups", ", ".join(f"{name} ({count})" for name, count in data["groups"].items())])
    if run.attributes is not None:
        lines.append(["attributes", _shortened(run.attributes.names)])
    for name, rate in data["questions"].items():
        text = f"{name}: any attacker is right at most {100 * rate:.3g} % of the time where wrong 1 % of the time"
        lines.append(["question", text])
    for attack in data["attacks"]:
        tested = f"{attack['violated']} bounds violated"
        found = tested if attack["testable"] else f"not testable: {attack['untestable']}"
        lines.append(["attack", f"{attack['name']}: {found}"])
    lines.append(["saved", f"{about.get('created')} by torchfil {about.get('versions', {}).get('torchfil')}"])

    text = table(lines[0], lines[1:], left=2)
    if data["most_exposed"]:
        shown = [name for name in ("fil", "fil_error", "mse_bound", "mse_bound_low", "epsilon") if name in run.columns]
        rows = [[str(row["id"]), *(number(float(row[name])) for name in shown)] for row in data["most_exposed"]]
        text += f"\n\nmost exposed ({_origin(about)})\n" + table(["id", *shown], rows)
    return text


def _training_lines(about: dict[str, Any]) -> list[list[str]]:
    """How it was trained, how often, and the ε of that."""
    mechanism, runs = about.get("mechanism", {}), (about.get("merged") or {}).get("runs")
    target, count = mechanism.get("rel_error"), mechanism.get("num_probes")
    drawn = f"{count} probes" if target is None else f"probes for a relative error of {100 * target:g} %"
    probed = "no probes" if about.get("exact") else f"{drawn}, {mechanism.get('estimator')}"
    lines = [
        [
            "training",
            f"{number(mechanism.get('steps'))} steps, σ = {mechanism.get('noise_multiplier')}, "
            f"C = {mechanism.get('max_grad_norm')}, sampling rate {number(mechanism.get('sample_rate'))}, {probed}",
        ],
        ["ε", f"{number(about.get('epsilon'))} at δ = {about.get('delta')} ({about.get('accountant')})"],
    ]
    if runs is not None:
        of_all = number(about["merged"].get("epsilon_of_all"))
        lines.append(["runs", f"means over {runs}: they speak of one release; ε of all {runs} together is {of_all}"])
    return lines


def _release_lines(about: dict[str, Any]) -> list[list[str]]:
    """What was released of a linear model."""
    mechanism = about.get("mechanism", {})
    several = mechanism.get("releases", 1)
    how = f"once, with noise σ = {mechanism.get('sigma')}" if several == 1 else f"{several} times, with noise"
    return [
        ["release", f"the fitted weights, {how}; penalty λ = {mechanism.get('l2')}; no steps, no batches, no clipping"],
        ["ε", "none: no accountant; what is random is the noise on the weights alone"],
    ]


def _bound_lines(about: dict[str, Any], smallest: float | None) -> list[list[str]]:
    if about.get("kind") == "linear":
        unit = f" ({about['unit_of_inputs']}, squared)" if about.get("unit_of_inputs") else ""
        return [
            ["MSE bound", f"{number(smallest)}, the smallest{unit}, in closed form:"],
            ["", "unbiased attackers err by at least this on average over the noise, biased ones may err less"],
        ]
    return [
        ["MSE bound", f"{number(smallest)}, the smallest lower end (95 %, each example by itself):"],
        ["", "unbiased attackers err by at least this on average, biased ones may err less; 0: one run does not tell"],
    ]


def _origin(about: dict[str, Any]) -> str:
    if about.get("kind") == "linear":
        return "closed forms"
    runs = (about.get("merged") or {}).get("runs")
    return "estimates from one run" if runs is None else f"means over {runs} runs"


def _shortened(names: list[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")


@click.command()
@click.argument("before", type=FILE)
@click.argument("after", type=FILE)
@click.option("-o", "--out", "page", type=FILE, help="Write a page, an HTML file; replaced when complete.")
@click.option("--redacted", is_flag=True, help="Leave out everything about single examples; may be shared.")
@min_group_option
@with_output
def compare(before: Path, after: Path, page: Path | None, redacted: bool, min_group: int | None, out: Output) -> None:
    """Compare two saved runs on the same examples: what a change did, and who moved.

    Examples are matched by their ids. Runs that share none, protect other inputs or ask other questions are refused.

    \b
    Examples:
      torchfil compare before.parquet after.parquet
      torchfil compare before.parquet after.parquet -o compared.html
      torchfil compare before.parquet after.parquet -o public.html --redacted --min-group 20
    """
    if page is not None and page.resolve() in (before.resolve(), after.resolve()):
        raise ValueError(f"-o {page} is one of the runs, which would be lost; write to another file")
    smallest = checked_min_group(min_group, redacted=redacted)
    comparison = compare_runs(load(before), load(after), redacted=redacted, min_group=smallest)
    if page is not None:
        write_bytes(page, render_comparison(comparison).encode("utf-8", "replace"))

    out.result(
        _comparison_text(comparison), {**_comparison_data(comparison), "page": None if page is None else str(page)}
    )
    if page is not None:
        out.say(f"\npage: {page}")
    if not redacted:
        out.say("\nThese numbers depend on private data: keep them confidential (--redacted makes a page to share).")


def _comparison_text(comparison: Comparison) -> str:
    rows = [*comparison.settings, *changes(comparison)]
    shown = table(["", "before", "after"], [[name, _shown(one), _shown(other)] for name, one, other in rows])
    lines = [*in_short(comparison), *comparison.notes]
    return "\n".join([shown, "", *map(visible, lines)])


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else "none" if value is None else number(value)


def _comparison_data(comparison: Comparison) -> dict[str, Any]:
    """For JSON: without the table of all examples, of which the most moved are in the page."""
    names = [name for name in comparison.__dataclass_fields__ if name != "moves"]
    values = {name: getattr(comparison, name) for name in names}
    for name in ("before", "after"):
        values[name] = asdict(values[name])
    values["settings"] = {name: {"before": one, "after": other} for name, one, other in comparison.settings}
    for name in ("attributes", "questions"):
        values[name] = [asdict(pair) for pair in values[name]]
    values["groups"] = {name: [asdict(pair) for pair in pairs] for name, pairs in comparison.groups.items()}
    return values


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
      torchfil sign run.parquet --key ~/.ssh/id_ed25519 --weights model.pt --policy policy.toml
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
      torchfil verify run.parquet --allowed-signers signers --weights model.pt --policy policy.toml
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
