"""The command line's promise, over inputs that nobody would think of: an exit code, one line, never
a traceback.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.test_cli import call, run_file

pytest.importorskip("sklearn")

EXAMPLES = settings(
    max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
ODD = ["", "1", "2.5", "1,5", "1e400", "nan", "?", '"', "a;b", "\t", "é", "\0", "x" * 300]
LINES = st.lists(st.lists(st.sampled_from(ODD), min_size=2, max_size=3).map(",".join), max_size=12)


def keeps_the_promise(*args: Any) -> None:
    """Exit code 0, 1, 2 or 3.

    With 2 nothing but one line on standard error, without a traceback.
    """
    found = call(*args)
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    assert found.exit_code in (0, 1, 2, 3)
    if found.exit_code == 2:
        assert found.stdout == ""
        assert len(found.stderr.strip().splitlines()) == 1, found.stderr


@EXAMPLES
@given(LINES, st.sampled_from(["utf-8", "utf-16", "cp1252"]))
def test_tables(lines: list[str], encoding: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data.csv"
        path.write_bytes("\n".join(["a,y", *lines]).encode(encoding, "replace"))
        keeps_the_promise("glm", path, "--target", "y", "--sigma", "1", "--json")


@EXAMPLES
@given(st.binary(max_size=40), st.integers(0, 10_000), st.integers(0, 255))
def test_policies_and_runs(policy: bytes, place: int, value: int) -> None:
    """A policy of any kind, on a run of which a byte is another."""
    with tempfile.TemporaryDirectory() as folder:
        run, path = run_file(Path(folder) / "run.parquet"), Path(folder) / "policy.toml"
        content = bytearray(run.read_bytes())
        content[place % len(content)] = value
        run.write_bytes(content)
        path.write_bytes(policy)
        keeps_the_promise("gate", run, "--policy", path, "--json")
        keeps_the_promise("inspect", run, "--json")
