"""``gate``: a saved run against a policy, for people and for pipelines."""

from __future__ import annotations

import json
import os
from pathlib import Path
from xml.etree import ElementTree

import click
import numpy as np

from torchfil.cli.output import FAILED, FILE, Output, plain, table, with_output
from torchfil.gate.gate import check, notes, template
from torchfil.gate.policy import load_policy
from torchfil.gate.rules import Verdict, told_apart
from torchfil.run.file import load
from torchfil.run.saved_run import SavedRun
from torchfil.utils.files import write_bytes
from torchfil.utils.text import visible, write_csv

_COLUMNS = ("rule", "what", "limit", "found", "examples")


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
    _check_places([run, policy], [list_file, junit_file, json_file])

    saved = load(run)
    verdicts, remarks = check(saved, load_policy(policy)), notes(saved)
    passed = all(verdict.passed for verdict in verdicts)
    data = {"passed": passed, "rules": [verdict.as_dict() for verdict in verdicts], "notes": remarks}
    if list_file is not None:
        _write_list(list_file, saved, verdicts)
    if junit_file is not None:
        write_bytes(junit_file, _junit(verdicts))
    if json_file is not None:
        write_bytes(json_file, json.dumps(plain(data), indent=1, ensure_ascii=False).encode())
    _add_to_step_summary(str(saved.about.get("title", run)), verdicts, remarks)

    shown = [verdict for verdict in verdicts if not (out.quiet and verdict.passed)]
    lines = [table(["", *_COLUMNS], _rows(shown), left=3)] if shown else []
    if not out.quiet:
        lines += [f"note: {visible(remark)}" for remark in remarks]
    if list_file is not None and not out.quiet:
        lines.append(
            f"no rule is broken: {list_file} is empty" if passed else f"whom the broken rules concern: {list_file}"
        )
    out.result("\n".join([*lines, _in_short(verdicts)]), data)
    ctx.exit(0 if passed else FAILED)


def _check_places(read: list[Path], written: list[Path | None]) -> None:
    """Refuse to write over what is read, or two things into one file."""
    places = [path for path in written if path is not None]
    for number, path in enumerate(places):
        for other in [*read, *places[:number]]:
            if path.resolve() == other.resolve():
                raise ValueError(f"{path} is written to, but it is {other} too; name another file")


def _in_short(verdicts: list[Verdict]) -> str:
    broken = sum(not verdict.passed for verdict in verdicts)
    return f"FAILED: {broken} rule{'s' if broken > 1 else ''} broken" if broken else "passed"


def _rows(verdicts: list[Verdict]) -> list[list[str]]:
    return [
        ["pass" if v.passed else "FAIL", v.rule, v.detail, *told_apart(v.limit, v.found), f"{v.offending:,}"]
        for v in verdicts
    ]


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
        limit, found = told_apart(verdict.limit, verdict.found)
        case = ElementTree.SubElement(suite, "testcase", classname="torchfil.gate", name=visible(verdict.rule))
        if not verdict.passed:
            message = f"limit {limit}, found {found}, {verdict.offending:,} examples"
            ElementTree.SubElement(case, "failure", message=message).text = visible(verdict.detail)
    return ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True)


def _add_to_step_summary(title: str, verdicts: list[Verdict], remarks: list[str]) -> None:
    """A table in Markdown, at the end of the file that GitHub shows for a step."""
    where = os.environ.get("GITHUB_STEP_SUMMARY")
    if not where:
        return
    rows = [[_marked(cell) for cell in row] for row in _rows(verdicts)]
    lines = [f"| {' | '.join(row)} |" for row in [["verdict", *_COLUMNS], ["---"] * 6, *rows]]
    notes_listed = [f"* {_marked(remark)}" for remark in remarks]
    heading = f"### torchfil gate, {_marked(title)}: {_in_short(verdicts)}"
    confidential = "These numbers depend on private data: keep them confidential."
    with open(where, "a", encoding="utf-8", errors="replace") as file:
        file.write("\n".join([heading, "", *lines, "", *notes_listed, "", confidential, ""]))


def _marked(text: str) -> str:
    """Text that Markdown does not read as its own signs."""
    flat = visible(" ".join(text.split()))
    return "".join(f"\\{sign}" if sign in "\\`*_{}[]<>#|~&" else sign for sign in flat)
