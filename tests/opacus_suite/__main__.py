"""Run Opacus's own tests with torchfil's engine: ``python -m tests.opacus_suite``.

See docs/opacus-tests.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import opacus.tests

from .outcomes import (
    PASSED,
    Records,
    is_lost,
    load_expected,
    outcome_of,
    quick_part,
    save_expected,
    summary,
)
from .plugin import ENGINE_VARIABLE, RESULTS_VARIABLE, ROOT

DOCS = ROOT / "docs" / "opacus-tests.md"
MARKS = (
    "<!-- results: written by `python -m tests.opacus_suite --update` -->",
    "<!-- end of results -->",
)


def main() -> int:
    """Run what is asked for, print the outcomes and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.opacus_suite", description=__doc__)
    parser.add_argument(
        "--all", action="store_true", help="every test that calls an engine, not only a part"
    )
    parser.add_argument(
        "--update",
        action="store_true",
        help="run everything and rewrite expected.json and the docs",
    )
    options = parser.parse_args()
    expected: Records = load_expected()
    if options.update:
        # a test that fails with Opacus's engine says nothing about ours
        stock = run_tests("stock")
        tests = [
            test
            for test, record in stock.items()
            if record["engine"] and record["outcome"] == PASSED
        ]
    else:
        tests = list(expected) if options.all else quick_part(expected)

    records = run_tests("torchfil", tests)
    outcomes = {test: outcome_of(test, record) for test, record in records.items()}
    table = summary(outcomes)
    print(table)
    if options.update:
        expected = {
            test: {"outcome": outcomes[test], "seconds": records[test]["seconds"]} for test in tests
        }
        save_expected(
            expected, {name: version(name) for name in ("opacus", "torch", "torchvision")}
        )
        before, _, rest = DOCS.read_text().partition(MARKS[0])
        DOCS.write_text(f"{before}{MARKS[0]}\n\n{table}\n\n{MARKS[1]}{rest.partition(MARKS[1])[2]}")
    lost = False
    for test, outcome in outcomes.items():
        listed = expected[test]["outcome"]
        if outcome != listed or is_lost(outcome, listed):
            print(f"{test}: {outcome}, expected {listed}: {records[test].get('error')}")
            lost |= is_lost(outcome, listed)
    return int(lost)


def run_tests(engine: str, tests: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """Run Opacus's tests in a process of their own and return the plugin's record of each.

    Args:
        engine: "stock" or "torchfil".
        tests: Their names; none: all of the files that name an engine.
    """
    folder = Path(opacus.tests.__file__).parent
    files = [
        path for path in sorted(folder.rglob("*_test.py")) if "PrivacyEngine" in path.read_text()
    ]
    with tempfile.TemporaryDirectory() as temporary:
        results = Path(temporary) / "results.json"
        named = Path(temporary) / "tests.txt"
        named.write_text(
            "\n".join(str(path) for path in ([folder / test for test in tests] or files))
        )
        options = ["-q", "--tb=no", "--no-summary", "--disable-warnings", "-p", "no:cacheprovider"]
        # Neither settings nor conftest.py of a folder above theirs: the latter would also put that
        # folder on the path.
        options += [
            "-p",
            f"{__package__}.plugin",
            "-c",
            os.devnull,
            f"--rootdir={folder}",
            "--noconftest",
        ]
        environment = {**os.environ, ENGINE_VARIABLE: engine, RESULTS_VARIABLE: str(results)}
        command = [sys.executable, "-m", "pytest", *options, f"@{named}"]
        code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        if code not in (0, 1):  # 1: tests failed, which is what is looked at here
            raise SystemExit(f"pytest ended with exit code {code}: the tests could not be run")
        return json.loads(results.read_text())


if __name__ == "__main__":
    sys.exit(main())
