"""The command line's promise, over inputs that nobody would think of: an exit code, one line, never a traceback."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.test_cli import call, run_file

pytest.importorskip("sklearn")

MANY = settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
FEW = settings(MANY, max_examples=15)

ENTRIES = st.one_of(
    st.sampled_from(
        [
            "",
            "1",
            "2.5",
            "-3",
            "1,5",
            "1.234,5",
            "1e400",
            "nan",
            "?",
            "NA",
            '"',
            '"a',
            "a;b",
            "\t",
            "é",
            "\0",
            "x" * 300,
        ]
    ),
    st.floats().map(str),
    st.text(max_size=5),
)
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


OPTIONS = st.lists(
    st.one_of(
        st.tuples(
            st.sampled_from(["--private", "--question", "--categorical", "--quantity", "--ignore", "--id", "--group"]),
            NAMES,
        ),
        st.tuples(st.just("--question"), st.sampled_from(["absent", "a+1", "y-2", "a+", "a+1e999", "+1"])),
        st.tuples(st.just("--model"), st.sampled_from(["linear", "logistic", "softmax", "poisson", "tree"])),
        st.tuples(
            st.sampled_from(["--l2", "--sigma", "--top"]),
            st.sampled_from(["0", "-1", "nan", "inf", "1e-300", "3", "x"]),
        ),
        st.tuples(st.just("--separator"), st.sampled_from([";", "", "ab", "\n", '"', "tab", "\0"])),
        st.tuples(st.just("--decimal"), st.sampled_from([",", ".", "'"])),
        st.tuples(
            st.just("--encoding"), st.sampled_from(["utf-8", "base64", "klingon", "undefined", "", "idna", "a\0"])
        ),
        st.just(("--drop-missing",)),
        st.just(("--no-intercept",)),
    ),
    max_size=3,
)


def keeps_the_promise(*args: Any) -> int:
    """Exit code 0, 1 or 2; with 2 nothing but one line on standard error, without a traceback."""
    found = call(*args)
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    assert found.exit_code in (0, 1, 2)
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


@pytest.mark.slow
@given(tables(), OPTIONS)
@MANY
def test_200_tables(content: bytes, options: list[tuple[str, ...]]) -> None:
    glm_of(content, options)


@given(tables(), OPTIONS)
@FEW
def test_some_tables(content: bytes, options: list[tuple[str, ...]]) -> None:
    glm_of(content, options)


VALUES = st.one_of(
    st.sampled_from(
        ["1", "0.5", "-1", "nan", "inf", "true", '"a"', "[1]", "{ age = 1 }", "1979-05-27", "1" + "0" * 400, ""]
    ),
    st.floats().map(str),
)
KEYS = st.sampled_from(
    [
        *("min_error_share", "max_share_exposed", "blind_error", "min_mse_bound", "max_epsilon", "min_attacks"),
        *("max_gain_over_guessing", "min_attribute_error_share", "attribute_spread", "min_attribute_error"),
        *(
            "max_true_positive_rate",
            "at_false_positive_rate",
            "min_group_size",
            "max_group_disparity",
            "max_epsilom",
            "é",
        ),
    ]
)
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


@pytest.mark.slow
@given(POLICIES, DAMAGES, st.sampled_from([0, 0, 1, 8, 4000]))
@MANY
def test_200_policies_and_runs(policy: bytes, damage: list[tuple[int, int]], cut: int) -> None:
    gate_of(policy, damage, cut)


@given(POLICIES, DAMAGES, st.sampled_from([0, 0, 1, 8, 4000]))
@FEW
def test_some_policies_and_runs(policy: bytes, damage: list[tuple[int, int]], cut: int) -> None:
    gate_of(policy, damage, cut)


@given(
    st.lists(
        st.one_of(
            st.sampled_from(["gate", "glm", "inspect", "report", "compare", "--json", "-q", "--top", "-1"]),
            st.text(max_size=6),
        ),
        max_size=4,
    )
)
@settings(FEW, max_examples=60)
def test_any_words(words: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        found = call(*words)
        assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
        assert found.exit_code in (0, 1, 2)


def test_json_is_json(tmp_path: Path) -> None:
    """What is infinite or not a number is null."""
    run = run_file(tmp_path / "run.parquet")
    json.loads(call("inspect", run, "--json").stdout, parse_constant=lambda name: pytest.fail(name))
