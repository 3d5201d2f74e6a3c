"""Run Opacus's own tests with torchfil's engine: ``python -m tests.opacus_suite``; see docs/opacus-tests.md."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import opacus.tests

from .outcomes import (
    PASSED,
    REASONS,
    UNEXPLAINED,
    load_expected,
    outcome_of,
    quick_part,
    save_expected,
    summary,
    surprise,
)
from .plugin import ENGINE_VARIABLE, RESULTS_VARIABLE, ROOT

DOCS = ROOT / "docs" / "opacus-tests.md"
MARKS = ("<!-- results: written by `python -m tests.opacus_suite --update` -->", "<!-- end of results -->")

Records = Mapping[str, Mapping[str, Any]]  # {test: what the plugin noted}


def main() -> int:
    """Run what is asked for, print the outcomes and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.opacus_suite", description=__doc__)
    parser.add_argument("--all", action="store_true", help="every test that calls an engine, not only a part")
    parser.add_argument("--update", action="store_true", help="run everything and rewrite expected.json and the docs")
    parser.add_argument("--stock", action="store_true", help="with Opacus's engine: what passes without torchfil")
    options = parser.parse_args()
    if options.update:
        stock = run_tests("stock")
        # a test that fails with Opacus's engine says nothing about ours
        ours = [test for test, record in stock.items() if record["engine"] and record["outcome"] == PASSED]
        return update(run_tests("torchfil", ours))

    expected = {} if options.stock else load_expected()
    records = run_tests(
        "stock" if options.stock else "torchfil",
        [test for test, entry in expected.items() if options.all or entry["quick"]],
    )
    print(summary({test: outcome_of(test, record) for test, record in records.items() if record["engine"]}))
    return 0 if options.stock else tell(records, expected)


def run_tests(engine: str, tests: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """Run Opacus's tests in a process of their own and return the plugin's record of each.

    Args:
        engine: "stock" or "torchfil".
        tests: Their names; none: all of the files that name an engine.
    """
    folder = Path(opacus.tests.__file__).parent
    files = [path for path in sorted(folder.rglob("*_test.py")) if "PrivacyEngine" in path.read_text()]
    with tempfile.TemporaryDirectory() as temporary:
        results = Path(temporary) / "results.json"
        named = Path(temporary) / "tests.txt"
        named.write_text("\n".join(str(path) for path in ([folder / test for test in tests] or files)))
        options = ["-q", "--tb=no", "--no-summary", "--disable-warnings", "-p", "no:cacheprovider"]
        # Neither settings nor conftest.py of a folder above theirs: the latter would also put that folder on the path.
        options += ["-p", f"{__package__}.plugin", "-c", os.devnull, f"--rootdir={folder}", "--noconftest"]
        environment = {**os.environ, ENGINE_VARIABLE: engine, RESULTS_VARIABLE: str(results)}
        command = [sys.executable, "-m", "pytest", *options, f"@{named}"]
        code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        if code not in (0, 1) or not results.exists():  # 1: tests failed, which is what is looked at here
            raise SystemExit(f"pytest ended with exit code {code}: the tests could not be run")
        return json.loads(results.read_text())


def tell(records: Records, expected: Records) -> int:
    """Print what is not as expected and return the exit code."""
    kinds = {
        "lost": "expected to pass, and does not",
        UNEXPLAINED: "ends in a way that reasons.toml does not explain",
        "gained": "passes now (run with --update)",
        "moved": "ends for another reason than expected (run with --update)",
    }
    found = {test: kind for test, record in records.items() if (kind := surprise(test, record, expected))}
    for test, kind in found.items():
        record = records[test]
        text = f": {record['error']}: {record['text']} ({record['line']})" if "error" in record else ""
        print(f"{kinds[kind]}: {test}{text}")
    return int(not {"lost", UNEXPLAINED}.isdisjoint(found.values()))


def update(records: Records) -> int:
    """Rewrite the list of expected outcomes and the table in the docs; return the exit code."""
    outcomes = {test: outcome_of(test, record) for test, record in records.items()}
    quick = quick_part({test: records[test]["seconds"] for test in outcomes}, outcomes)
    entries = {
        test: {"outcome": outcome, "seconds": records[test]["seconds"], "quick": test in quick}
        for test, outcome in outcomes.items()
    }
    save_expected(entries, {name: version(name) for name in ("opacus", "torch", "torchvision")})
    table = summary(outcomes)
    before, _, rest = DOCS.read_text().partition(MARKS[0])
    DOCS.write_text(f"{before}{MARKS[0]}\n\n{table}\n\n{MARKS[1]}{rest.partition(MARKS[1])[2]}")
    print(table)
    for name in {reason.name for reason in REASONS} - set(outcomes.values()):
        print(f"no test ends for the reason {name!r} any more: take it out of reasons.toml")
    return tell(records, entries)


if __name__ == "__main__":
    sys.exit(main())
