"""``gate``: saved runs against a policy, for people and pipelines."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from msgspec.structs import replace

from torchfil.cli.output import FILE, Output, check_places, printed, table, with_output
from torchfil.gate import pipelines
from torchfil.gate.gate import check, default_policy, notes, outcome, public, worst_of
from torchfil.gate.policy import PRESETS, Policy, load_policy, parse_policy, preset
from torchfil.gate.rules import RULES, Verdict
from torchfil.report.options import Options, options_of
from torchfil.run.composed import compose
from torchfil.run.file import load
from torchfil.run.matching import check_same_recipe
from torchfil.run.saved_run import SavedRun, value_at
from torchfil.utils.files import write_bytes
from torchfil.utils.text import json_ready, visible, write_csv


@click.command()
@click.argument("run", type=FILE, nargs=-1)
@click.option(
    "--policy",
    type=FILE,
    help="Thresholds, a TOML file; policy.toml if it exists, else the default policy.",
)
@click.option(
    "--preset",
    "named",
    type=click.Choice(PRESETS),
    help="Thresholds for a purpose, instead of a file.",
)
@click.option(
    "--init",
    is_flag=True,
    help="Write a commented policy to start from, instead; with --preset, that one.",
)
@click.option(
    "--baseline", type=FILE, help="An earlier run on the same examples, for max_worsening."
)
@click.option(
    "--fail-if-worse",
    is_flag=True,
    help="Fail if the run leaks more than --baseline, beyond chance.",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(0, 100),
    help="With --fail-if-worse: what is allowed; 0.1: a tenth.",
)
@click.option(
    "--released",
    type=FILE,
    multiple=True,
    help="A model released before, on the same people; repeatable.",
)
@click.option(
    "--list",
    "list_file",
    type=FILE,
    help="Write the ids of the examples that break a rule, a CSV file.",
)
@click.option(
    "--sarif",
    "sarif_file",
    type=FILE,
    help="Write what is broken for code scanning, a SARIF 2.1.0 file.",
)
@click.option("--json-file", "json_file", type=FILE, help="Write what --json prints to a file.")
@click.option(
    "--redacted",
    is_flag=True,
    help="Say of each rule whether it holds, and no number that was measured.",
)
@click.pass_context
@with_output
def gate(ctx: click.Context, init: bool, redacted: bool, out: Output, **given: Any) -> None:
    """Check saved runs against a policy.

    Exit code 0: passed, 1: failed, 2: bad input, 3: cannot tell.

    Files are readable by their owner only, and replaced when complete. Only the file of --list
    names examples. On GitHub, verdicts are added to the file that GITHUB_STEP_SUMMARY names, and
    broken rules are annotated. Annotations and SARIF never have a measured number; with --redacted,
    nothing but --list has, for logs that others read.

    \b
    Examples:
      torchfil gate --init                            # writes policy.toml (--preset: that one)
      torchfil gate run.parquet --policy policy.toml  # stops a pipeline if a threshold is broken
      torchfil gate run.parquet --preset clinical --sarif gate.sarif --redacted
      torchfil gate run.parquet --list who.csv        # whom to look at
      torchfil gate run.parquet --baseline old.parquet --fail-if-worse --tolerance 0.1
      torchfil gate run.parquet --released old.parquet  # what both models together tell
      torchfil gate a.parquet b.parquet c.parquet     # repetitions: aggregate = "pessimistic"
    """
    runs = given["run"]
    if init:
        _begin_policy(given["policy"] or Path("policy.toml"), given["named"] or "default", out)
        return
    if not runs:
        raise click.UsageError("name a saved run, or use --init to write a policy", ctx)
    given_policy, source = _thresholds(given)
    read = [
        path for path in (*runs, *given["released"], given["baseline"], source) if path is not None
    ]
    check_places(read, {f"--{name}": given[f"{name}_file"] for name in ("list", "sarif", "json")})

    policy, judged = _judge(runs, given, given_policy)
    verdicts, remarks, about = (
        judged[0][1],
        notes(judged[0][0], redacted=redacted),
        judged[0][0].about,
    )
    if given_policy is None:
        remarks.insert(
            0, f"no policy was given: judged by {policy.name}, as on the page of torchfil report"
        )
    if len(runs) > 1:
        verdicts = worst_of({str(path): own for path, (_, own) in zip(runs, judged, strict=True)})
        remarks.append(
            f"the worst of {len(runs)} runs decides each rule; other notes are about the first"
        )
    advice = Options() if redacted or len(runs) > 1 else options_of(judged[0][0], policy, verdicts)
    if redacted:
        verdicts = [public(verdict) for verdict in verdicts]

    end = outcome(verdicts)
    data = {
        "passed": end.code == 0,
        "outcome": end.word,
        "rules": [verdict.as_dict() for verdict in verdicts],
        "notes": remarks,
        "audit": None if redacted else about.get("audit"),
        "not_smooth": value_at(about, "model.not_smooth"),
    }
    _write_files(given, judged, data, pipelines.sarif(verdicts, source))
    _tell_github(
        pipelines.step_summary(str(about.get("title", runs[0])), verdicts, remarks),
        verdicts,
        source,
    )
    lines = _in_lines(verdicts, remarks, given["list_file"], out)
    lines += [each for each in (advice.change, *advice.others) if each]
    out.result("\n".join([*lines, pipelines.in_short(verdicts)]), json_ready(data, for_people=True))
    ctx.exit(end.code)


def _begin_policy(file: Path, named: str, out: Output) -> None:
    """Write a commented policy to start from."""
    if file.exists():
        raise FileExistsError(
            f"{file} exists already and is not overwritten; name another with --policy"
        )
    write_bytes(file, preset(named).encode())
    out.result(
        f"wrote {file}; edit it, then: torchfil gate RUN --policy {file}", {"policy": str(file)}
    )


def _write_files(
    given: dict[str, Any],
    judged: list[tuple[SavedRun, list[Verdict]]],
    data: dict[str, Any],
    sarif: dict[str, Any],
) -> None:
    """The files of --list, --sarif and --json-file."""
    if given["list_file"] is not None:
        _write_list(given["list_file"], judged)
    for path, content in ((given["sarif_file"], sarif), (given["json_file"], data)):
        if path is not None:
            ready = json_ready(content, for_people=True)
            write_bytes(path, json.dumps(ready, indent=1, ensure_ascii=False).encode())


def _in_lines(
    verdicts: list[Verdict], remarks: list[str], listed: Path | None, out: Output
) -> list[str]:
    """The rules in a table, the notes, and where the examples are listed.

    With --quiet the broken rules alone.
    """
    shown = [verdict for verdict in verdicts if not (out.quiet and verdict.passed)]
    lines = [table(["", *pipelines.COLUMNS], pipelines.rows_of(shown), left=5)] if shown else []
    if out.quiet:
        return lines
    lines += [f"note: {visible(remark)}" for remark in remarks]
    if listed is not None:
        broken = any(not own.passed for own in verdicts)
        lines.append(
            f"{'whom the broken rules concern' if broken else 'no rule is broken'}: {listed}"
        )
    return lines


def _thresholds(given: dict[str, Any]) -> tuple[Policy | None, Path | None]:
    """The policy, None for the default one of a run, and its file where there is one."""
    source, named, worse, allowed = (
        given[name] for name in ("policy", "named", "fail_if_worse", "tolerance")
    )
    if source is not None and named is not None:
        raise ValueError(
            f"--preset {named} and --policy {source} are two policies; keep --policy, and let it "
            f"say extends = {named!r}"
        )
    if not worse and allowed is not None:
        raise ValueError(
            "--tolerance has no effect without --fail-if-worse; add it, or leave it out"
        )
    if given["baseline"] is None and worse:
        raise ValueError("--fail-if-worse needs --baseline, the file of an earlier run")
    policy: Policy | None
    if named is not None:
        policy = parse_policy({"extends": named, "name": named})
    elif source is None and not Path("policy.toml").exists():
        # only the comparison counts
        policy = Policy(levels=dict.fromkeys(RULES, "off")) if worse else None
    else:
        policy = load_policy(source := source or Path("policy.toml"))
    if worse and policy is not None:
        allowed = (
            allowed
            if allowed is not None
            else policy.max_worsening
            if policy.max_worsening is not None
            else 0.1
        )
        policy = replace(
            policy, max_worsening=allowed, levels={**policy.levels, "max_worsening": "error"}
        )
    compares = policy is not None and policy.max_worsening is not None
    if given["baseline"] is not None and not compares:
        raise ValueError(
            f"--baseline {given['baseline']} has no effect; add --fail-if-worse, or max_worsening "
            "to the policy"
        )
    return policy, source


def _judge(
    runs: Sequence[Path], given: dict[str, Any], policy: Policy | None
) -> tuple[Policy, list[tuple[SavedRun, list[Verdict]]]]:
    """The policy, and each run, with everything that was released besides, and the verdicts on
    it.
    """
    released, baseline = given["released"], given["baseline"]
    paths = [path.resolve() for path in (*runs, *released, baseline) if path is not None]
    if len(set(paths)) != len(paths):
        raise ValueError("a run file is named twice; name each once")
    if not (len(runs) == 1 or (policy is not None and policy.aggregate is not None)):
        raise ValueError(
            f"the policy does not say how {len(runs)} runs count together; add aggregate = "
            '"pessimistic", or give one'
        )
    if released and baseline is not None:
        raise ValueError("--baseline compares single releases; leave out --released or --baseline")
    loaded, others = {str(path): load(path) for path in runs}, [load(path) for path in released]
    check_same_recipe(loaded)
    before = None if baseline is None else load(baseline)
    together = [compose([run, *others]) if others else run for run in loaded.values()]
    policy = policy or default_policy(together[0])
    return policy, [(run, check(run, policy, before)) for run in together]


def _write_list(path: Path, judged: list[tuple[SavedRun, list[Verdict]]]) -> None:
    """One line for each rule that is not kept and example, over all runs."""
    broken = [
        (verdict.rule, run.ids[verdict.rows])
        for run, own in judged
        for verdict in own
        if not verdict.passed
    ]
    ids = np.concatenate([judged[0][0].ids[:0], *(own for _, own in broken)])
    write_csv(path, {"rule": [rule for rule, own in broken for _ in own], "id": ids})


def _tell_github(summary: str, verdicts: Sequence[Verdict], policy: Path | None) -> None:
    """The step's summary and its annotations, where the environment says that this runs there."""
    if where := os.environ.get("GITHUB_STEP_SUMMARY"):
        with open(where, "a", encoding="utf-8", errors="replace") as file:
            file.write(summary)
    if os.environ.get("GITHUB_ACTIONS") == "true":
        for line in pipelines.github_annotations(verdicts, policy):
            click.echo(f"::{printed(line[2:])}", err=True)  # the one command that is meant
