"""``report``, ``inspect``, ``compare``, ``sign`` and ``verify``: saved runs to read, to compare and to vouch for."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import click
import numpy as np

from torchfil.cli.output import FAILED, FILE, Output, check_places, table, with_output, with_redaction
from torchfil.gate.gate import check, decision, in_words, notes, template
from torchfil.gate.policy import load_policy
from torchfil.gate.rules import RULES, Verdict, audit_in_words
from torchfil.gate.rules import in_digits as number
from torchfil.report import signature as signatures
from torchfil.report.comparison import changes, compare_runs, in_short
from torchfil.report.options import options_of
from torchfil.report.page import render_comparison, write_report
from torchfil.run import baselines
from torchfil.run.baselines import CLASSES, LOWER_BOUND, NOT_MEASURED
from torchfil.run.file import load
from torchfil.run.saved_run import SavedRun
from torchfil.run.statistics import is_spared
from torchfil.run.unit import counted
from torchfil.utils.errors import require
from torchfil.utils.files import file_sha256, write_bytes
from torchfil.utils.text import json_ready, visible, write_csv


@click.command()
@click.argument("run", type=FILE)
@click.option("-o", "--out", "directory", type=FILE, required=True, help="Folder to write; replaced when complete.")
@click.option("--policy", type=FILE, help="Thresholds, a TOML file (gate --init): the page begins with the verdict.")
@click.option("--pictures", is_flag=True, help="Write the charts as SVG files beside the page, too.")
@click.option("--signature", type=FILE, help="A signature of the run (torchfil sign): the page says who signed.")
@click.option("--allowed-signers", type=FILE, help="With --signature: whom you trust, as in torchfil verify.")
@click.option("--weights", type=FILE, multiple=True, help="The released weights: their hash is on the sheet to sign.")
@with_output
@with_redaction
def report(
    run: Path, directory: Path, redacted: bool, min_group: int, pictures: bool, out: Output, **given: Any
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
    require(policy is None or not redacted, "A public page carries no verdict; drop --policy or --redacted.")
    require((signature is None) == (trust is None), "--signature and --allowed-signers belong together; give both")
    thresholds = None if policy is None else load_policy(policy)
    files = {"run": [run], "policy": [] if policy is None else [policy], "weights": given["weights"]}
    digests = {f"{role} {each.name}": file_sha256(each) for role, paths in files.items() for each in paths}
    vouched = None if signature is None or trust is None else signatures.verify(signature, trust, files, complete=False)
    options: dict[str, Any] = {"min_group": min_group, "policy": thresholds, "signature": vouched, "pictures": pictures}
    page = write_report(load(run), directory, redacted=redacted, digests=digests, **options)
    if not redacted:
        out.say("The report depends on private data: keep it confidential (--redacted makes one to share).")
    out.result(str(page), {"page": str(page), "redacted": redacted})


@click.command()
@click.argument("run", type=FILE)
@click.option("--top", type=click.IntRange(min=0), default=5, show_default=True, help="How many examples to name.")
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
    counts = None if exposure is None else {text: int((exposure == each).sum()) for each, text in CLASSES.items()}

    data = {
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
        "most_exposed": [{"id": run.ids[i], **{name: own[i] for name, own in run.columns.items()}} for i in order],
        "groups": {name: len(run.coded_group(name)[0]) for name in run.groups},
        "attributes": len(run.attributes.names) if run.attributes is not None else 0,
        "pictures": len(run.pictures.rows) if run.pictures is not None else 0,
        "questions": {each.name: float(np.max(each.rate()[told], initial=0.0)) for each in run.questions},
        "attacks": [
            {"name": each.name, "violated": int(each.violated.sum()), "testable": each.testable}
            | {"untestable": each.untestable or ("" if each.testable else "one trial")}
            for each in run.attacks
        ],
    }
    return _summary_text(run, data), data


def _summary_text(run: SavedRun, data: dict[str, Any]) -> str:
    about, examples, fil = run.about, data["examples"], data["fil"]
    model, digest = about.get("model", {}), about.get("dataset", {}).get("data_sha256") or "not taken"
    lines = [
        ["", str(about.get("title", "a saved run"))],
        ["model", f"{model.get('name')}, {number(model.get('num_parameters'))} parameters"],
        ["data", f"{counted(len(run), run.unit.one)}, SHA-256 {digest}"],
        *(_release_lines(about) if about.get("kind") == "linear" else _training_lines(about)),
        ["FIL", f"median {number(fil['median'])}, 95 % below {number(fil['q95'])}, largest {number(fil['max'])}"],
        *_bound_lines(run, data["smallest_mse_bound"]),
    ]

    # the rest only where there is something to tell
    if examples["exposure"] is not None:
        knows = "" if run.baselines is None else f", which answers {run.unit.say(run.baselines.knows)}"
        blind = number(baselines.typical_blind_error(run))
        lines.append(["exposure", f"beside a blind guess{knows} and errs by {blind}:"])
        lines += [["", f"{count:,} {text}"] for text, count in examples["exposure"].items() if count]
    for kind, name, text in (
        ("too_few_draws", "too few draws", "the run tells neither leakage nor protection"),
        ("lower_bounds_only", "in part", "some of their steps were not measured"),
        ("spared", "down-weighted", "trained with a smaller weight, held fixed here"),
    ):
        if examples[kind]:
            lines.append([name, f"{counted(examples[kind], run.unit.one)}: {text}"])
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
        names = ("num_rows", "fil", "fil_error", "mse_bound", "mse_bound_low", "epsilon")
        shown = [name for name in names if name in run.columns]
        rows = [[str(row["id"]), *(number(float(row[name])) for name in shown)] for row in data["most_exposed"]]
        text += f"\n\nmost exposed ({_origin(about)})\n" + table(["id", *shown], rows)
    return text


def _training_lines(about: dict[str, Any]) -> list[list[str]]:
    """How it was trained, how often, and the ε of that."""
    mechanism, runs = about.get("mechanism", {}), (about.get("merged") or {}).get("runs")
    target, count = mechanism.get("rel_error"), mechanism.get("num_probes")
    drawn = f"{count} probes" if target is None else f"probes for a relative error of {100 * target:g} %"
    probed = "no probes" if about.get("exact") else f"{drawn}, {mechanism.get('estimator')}"
    noise = f"σ = {mechanism.get('noise_multiplier')}, C = {mechanism.get('max_grad_norm')}"
    steps, rate = number(mechanism.get("steps")), number(mechanism.get("sample_rate"))
    lines = [
        ["training", f"{steps} steps, {noise}, sampling rate {rate}, {probed}"],
        ["ε", f"{number(about.get('epsilon'))} at δ = {about.get('delta')} ({about.get('accountant')})"],
    ]
    if audit := about.get("audit"):
        lines.append(["audit", audit_in_words(audit)])
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


def _bound_lines(run: SavedRun, smallest: float | None) -> list[list[str]]:
    about, of_all = run.about, run.unit.say("the smallest lower end (95 %, each example by itself)")
    if about.get("kind") == "linear":
        unit = f" ({about['unit_of_inputs']}, squared)" if about.get("unit_of_inputs") else ""
        of_all = f"the smallest{unit}, in closed form"
    means = "unbiased attackers err by at least this on average, biased ones may err less"
    return [["MSE bound", f"{number(smallest)}, {of_all}:"], ["", means]]


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
@with_output
@with_redaction
def compare(before: Path, after: Path, page: Path | None, redacted: bool, min_group: int, out: Output) -> None:
    """Compare two saved runs on the same examples: what a change did, and who moved.

    Examples are matched by their ids. Runs that share none, protect other inputs or ask other questions are refused.

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
    data["settings"] = {name: {"before": one, "after": other} for name, one, other in comparison.settings}
    del data["moves"]
    rows = [[name, _shown(one), _shown(other)] for name, one, other in (*comparison.settings, *changes(comparison))]
    told = map(visible, [*in_short(comparison), *comparison.notes])
    out.result("\n".join([table(["", "before", "after"], rows), "", *told]), data)
    if page is not None:
        out.say(f"\npage: {page}")
    if not redacted:
        out.say("\nThese numbers depend on private data: keep them confidential (--redacted makes a page to share).")


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else "none" if value is None else number(value)


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
    check_places([key, *(path for paths in files.values() for path in paths)], {"--signature": place})
    load(files["run"][0])  # nobody should sign a damaged file
    write_bytes(place, signatures.sign(files, key.expanduser()).encode())
    out.result(str(place), {"signature": str(place)})


@click.command()
@_with_files
@click.option("--allowed-signers", "trust", type=FILE, required=True, help="Keys you trust; see man ssh-keygen.")
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


# ---------------------------------------------------------------------- the gate


_COLUMNS = ("rule", "what", "found", "limit")


@click.command()
@click.argument("run", type=FILE, required=False)
@click.option("--policy", type=FILE, default=Path("policy.toml"), show_default=True, help="Thresholds, a TOML file.")
@click.option("--init", is_flag=True, help="Write a commented policy to start from, instead.")
@click.option("--list", "list_file", type=FILE, help="Write the ids of the examples that break a rule, a CSV file.")
@click.option("--junit", "junit_file", type=FILE, help="Write the verdicts for a pipeline, a JUnit XML file.")
@click.option("--json-file", type=FILE, help="Write what --json prints to a file.")
@click.pass_context
@with_output
def gate(
    ctx: click.Context,
    run: Path | None,
    policy: Path,
    init: bool,
    list_file: Path | None,
    junit_file: Path | None,
    json_file: Path | None,
    out: Output,
) -> None:
    """Check a saved run against a policy. Exit code 0: passed, 1: failed, 2: bad input.

    Files are readable by their owner only, and replaced when complete. Only the file of --list names examples. If
    GITHUB_STEP_SUMMARY names a file, as on GitHub, the verdicts are added to it.

    \b
    Examples:
      torchfil gate --init                            # writes policy.toml
      torchfil gate run.parquet --policy policy.toml  # stops a pipeline if a threshold is broken
      torchfil gate run.parquet --list who.csv        # whom to look at
      torchfil gate run.parquet --junit gate.xml --json-file gate.json --quiet
    """
    if init:
        if policy.exists():
            raise FileExistsError(f"{policy} exists already and is not overwritten; name another with --policy")
        write_bytes(policy, template().encode())
        out.result(f"wrote {policy}; edit it, then: torchfil gate RUN --policy {policy}", {"policy": str(policy)})
        return
    if run is None:
        raise click.UsageError("name a saved run, or use --init to write a policy", ctx)
    check_places([run, policy], {"--list": list_file, "--junit": junit_file, "--json-file": json_file})

    saved = load(run)
    thresholds = load_policy(policy)
    verdicts, remarks = check(saved, thresholds), notes(saved)
    passed = all(verdict.passed for verdict in verdicts)
    rules, audit = [verdict.as_dict() for verdict in verdicts], saved.about.get("audit")
    data = {"passed": passed, "rules": rules, "notes": remarks, "audit": audit}
    if list_file is not None:
        _write_list(list_file, saved, verdicts)
    if junit_file is not None:
        write_bytes(junit_file, _junit(verdicts))
    if json_file is not None:
        write_bytes(json_file, json.dumps(json_ready(data), indent=1, ensure_ascii=False).encode())
    _add_to_step_summary(str(saved.about.get("title", run)), verdicts, remarks)

    shown = [verdict for verdict in verdicts if not (out.quiet and verdict.passed)]
    lines = [table(["", *_COLUMNS], _rows(shown), left=5)] if shown else []
    if not out.quiet:
        lines += [f"note: {visible(remark)}" for remark in remarks]
    if list_file is not None and not out.quiet:
        nobody, concerned = f"no rule is broken: {list_file} is empty", f"whom the broken rules concern: {list_file}"
        lines.append(nobody if passed else concerned)
    for best in options_of(saved, thresholds, verdicts).rows[:1]:
        kept = f"{best.rules - len(best.broken)} of {best.rules} rules, as predicted from this run"
        lines.append(f"{best.change} would keep {kept}; its cost: {best.cost}")
    out.result("\n".join([*lines, _in_short(verdicts)]), data)
    ctx.exit(0 if passed else FAILED)


def _in_short(verdicts: list[Verdict]) -> str:
    broken = sum(not verdict.passed for verdict in verdicts)
    kept = f"{broken} of {len(verdicts)} rules broken" if broken else f"all {len(verdicts)} rules kept"
    return f"{'FAILED' if broken else 'passed'}: {decision(verdicts).lower()} ({kept})"


def _rows(verdicts: list[Verdict]) -> list[list[str]]:
    rows = []
    for verdict in verdicts:
        title, found, limit = RULES[verdict.key].row(verdict)
        missing = f": {verdict.detail}" if verdict.found is None else ""
        rows.append(["pass" if verdict.passed else "FAIL", verdict.rule, title + missing, found, limit])
    return rows


def _write_list(path: Path, run: SavedRun, verdicts: list[Verdict]) -> None:
    """One line for each broken rule and example."""
    broken = [verdict for verdict in verdicts if not verdict.passed]
    rules = [verdict.rule for verdict in broken for _ in range(verdict.offending)]
    rows = np.concatenate([np.zeros(0, dtype=np.int64), *(verdict.rows for verdict in broken)])
    write_csv(path, {"rule": rules, "id": run.ids[rows]})


def _junit(verdicts: list[Verdict]) -> bytes:
    """Each rule as a test case, which pipelines show beside their tests."""
    failures = sum(not verdict.passed for verdict in verdicts)
    suite = ElementTree.Element("testsuite", name="torchfil gate", tests=str(len(verdicts)), failures=str(failures))
    for verdict in verdicts:
        case = ElementTree.SubElement(suite, "testcase", classname="torchfil.gate", name=visible(verdict.rule))
        if not verdict.passed:
            message = visible(in_words(verdict))
            ElementTree.SubElement(case, "failure", message=message).text = visible(verdict.detail)
    return ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True)


def _add_to_step_summary(title: str, verdicts: list[Verdict], remarks: list[str]) -> None:
    """A table in Markdown, at the end of the file that GitHub shows for a step."""
    where = os.environ.get("GITHUB_STEP_SUMMARY")
    if not where:
        return
    rows = [[_marked(cell) for cell in row] for row in _rows(verdicts)]
    lines = [f"| {' | '.join(row)} |" for row in [["verdict", *_COLUMNS], ["---"] * 5, *rows]]
    notes_listed = [f"* {_marked(remark)}" for remark in remarks]
    heading = f"### torchfil gate, {_marked(title)}: {_in_short(verdicts)}"
    confidential = "These numbers depend on private data: keep them confidential."
    with open(where, "a", encoding="utf-8", errors="replace") as file:
        file.write("\n".join([heading, "", *lines, "", *notes_listed, "", confidential, ""]))


def _marked(text: str) -> str:
    """Text that Markdown does not read as its own signs."""
    return "".join(f"\\{sign}" if sign in "\\`*_{}[]<>#|~&" else sign for sign in visible(" ".join(text.split())))
