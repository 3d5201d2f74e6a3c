"""The command line's promise, over inputs that nobody would think of: an exit code, one line, never a traceback."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.test_cli import call, run_file
from torchfil.gate.policy import Policy

pytest.importorskip("sklearn")

SETTINGS = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
COUNTS = pytest.mark.parametrize("count", [15, pytest.param(200, marks=pytest.mark.slow)])

ODD = ["", "1", "2.5", "1,5", "1.234,5", "1e400", "nan", "?", '"', '"a', "a;b", "\t", "é", "\0", "x" * 300]
ENTRIES = st.one_of(st.sampled_from(ODD), st.floats().map(str), st.text(max_size=5))
NAMES = st.sampled_from(["a", "b", "y", "y", "", "a b", "=a", '"a, b"', "Unnamed: 0", "é"])


@st.composite
def tables(draw: st.DrawFn) -> bytes:
    """Something like a CSV file: rows of one width or not, any separator, any encoding, cut or damaged or not."""
    width, rows = draw(st.integers(1, 4)), draw(st.integers(0, 12))
    separator = draw(st.sampled_from([",", ";", "\t", "|", " "]))
    lines = [separator.join(draw(NAMES) for _ in range(width))]
    for _ in range(rows):
        lines.append(separator.join(draw(ENTRIES) for _ in range(width + draw(st.sampled_from([0] * 9 + [-1, 1])))))
    text = draw(st.sampled_from(["\n", "\r\n", "\r"])).join(lines)
    content = text.encode(draw(st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "cp1252", "utf-16-le"])), "replace")
    damage = draw(st.sampled_from(["none"] * 4 + ["cut", "bytes", "gzip"]))
    if damage == "cut":
        return content[: draw(st.integers(0, len(content)))]
    return {"bytes": draw(st.binary(max_size=60)), "gzip": b"\x1f\x8b" + content}.get(damage, content)


def option(name: str, *values: str) -> st.SearchStrategy[tuple[str, ...]]:
    return st.tuples(st.just(name), st.sampled_from(values) if values else NAMES)


LISTS = [option(f"--{name}") for name in ["private", "question", "categorical", "ignore", "id", "group"]]
NUMBERS = [option(f"--{name}", "0", "-1", "nan", "inf", "1e-300", "3", "x") for name in ("l2", "sigma", "top")]
OPTIONS = st.lists(
    st.one_of(
        *LISTS,
        *NUMBERS,
        option("--question", "absent", "a+1", "y-2", "a+", "a+1e999", "+1"),
        option("--model", "linear", "logistic", "softmax", "poisson", "tree"),
        option("--separator", ";", "", "ab", "\n", '"', "tab", "\0"),
        option("--decimal", ",", ".", "'"),
        option("--encoding", "utf-8", "base64", "klingon", "undefined", "", "idna", "a\0"),
        st.just(("--drop-missing",)),
        st.just(("--no-intercept",)),
    ),
    max_size=3,
)


def keeps_the_promise(*args: Any) -> int:
    """Exit code 0, 1 or 2, of the gate also 3; with 2 nothing but one line on standard error, without a traceback."""
    found = call(*args)
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    assert found.exit_code in (0, 1, 2) or (args[0] == "gate" and found.exit_code == 3)
    assert "Traceback" not in found.output
    if found.exit_code == 2:
        assert found.stdout == ""
        assert len(found.stderr.strip().splitlines()) == 1, found.stderr
        assert found.stderr.startswith("torchfil")
    return found.exit_code


def glm_of(content: bytes, options: list[tuple[str, ...]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data.csv"
        path.write_bytes(content)
        run, page = Path(folder) / "run.parquet", Path(folder) / "page"
        words = [part for pair in options for part in pair]
        code = keeps_the_promise(
            "glm", path, "--target", "y", "--sigma", "1", "--json", "--save", run, "--report", page, *words
        )
        assert run.exists() == page.exists() == (code == 0)
        if code == 0:
            keeps_the_promise("compare", run, run, "--json")  # refused where ids repeat
            assert keeps_the_promise("inspect", run) == 0


@COUNTS
def test_tables(count: int) -> None:
    glm_of(b"name,a,y\nZoe,1.5,2\n=b,2.5,4\n'c,3.5,5\n", [("--id", "name")])  # an ordinary one, which succeeds
    settings(SETTINGS, max_examples=count)(given(tables(), OPTIONS)(glm_of))()


VALUES = st.one_of(
    st.sampled_from(
        ["1", "0.5", "-1", "nan", "inf", "true", '"a"', "[1]", "{ age = 1 }", "1979-05-27", f"1{'0' * 400}"]
    ),
    st.floats().map(str),
)
KEYS = st.sampled_from([*Policy.__struct_fields__, "max_epsilom", "é"])
POLICIES = st.one_of(
    st.lists(st.tuples(KEYS, VALUES), max_size=4).map(lambda pairs: "\n".join(f"{k} = {v}" for k, v in pairs).encode()),
    st.binary(max_size=40),
)


def gate_of(policy: bytes, damage: list[tuple[int, int]], cut: int) -> None:
    """A policy of any kind, on a run of which some bytes are others, or that is cut short."""
    with tempfile.TemporaryDirectory() as folder:
        run, path = run_file(Path(folder) / "run.parquet"), Path(folder) / "policy.toml"
        content = bytearray(run.read_bytes())
        for place, value in damage:
            content[place % len(content)] = value
        run.write_bytes(bytes(content[: len(content) - cut % len(content)]))
        path.write_bytes(policy)
        keeps_the_promise("gate", run, "--policy", path, "--list", Path(folder) / "who.csv", "--json")
        keeps_the_promise("inspect", run, "--json")
        keeps_the_promise("compare", run, run, "-o", Path(folder) / "compared.html", "--json")
        keeps_the_promise("compare", run_file(Path(folder) / "whole.parquet"), run, "--redacted", "--json")
        if damage or cut:
            keeps_the_promise("report", run, "-o", Path(folder) / "page", "--redacted")


DAMAGES = st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=3)


@COUNTS
def test_policies_and_runs(count: int) -> None:
    cuts = st.sampled_from([0, 0, 1, 8, 4000])
    settings(SETTINGS, max_examples=count)(given(POLICIES, DAMAGES, cuts)(gate_of))()
