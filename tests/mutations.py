"""Mutations that the tests must catch: ``python -m tests.mutations`` plants each in a copy and runs
tests on it.

Each (mutations.toml) is a mistake that would make a privacy number wrong without an error: a sign,
a factor, an off-by-one. The script prints what survived and exits with 1 if something did; ``--only
NAME`` runs some of them, ``--check`` only looks whether every place is still there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]


class Mutation(NamedTuple):
    name: str
    file: str  # under torchfil/
    right: str
    wrong: str
    tests: list[str]  # under tests/


with open(Path(__file__).with_name("mutations.toml"), "rb") as file:
    MUTATIONS = [Mutation(**each) for each in tomllib.load(file)["mutation"]]


def places_gone() -> list[str]:
    """The mutations whose place the code no longer has, or has several times: adapt them to the
    code.
    """
    sources = {m.file: ROOT / "torchfil" / m.file for m in MUTATIONS}
    texts = {name: path.read_text() if path.exists() else "" for name, path in sources.items()}
    return [m.name for m in MUTATIONS if texts[m.file].count(m.right) != 1]


def survives(mutation: Mutation, copy: Path) -> bool:
    """Whether all tests pass with the mutation in the copy of the project, which is as before
    afterwards.
    """
    path = copy / "torchfil" / mutation.file
    text = path.read_text()
    path.write_text(text.replace(mutation.right, mutation.wrong))
    environment = {
        **os.environ,
        "PYTHONPATH": str(copy),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-n",
        "2",
        "--no-header",
        "-p",
        "no:cacheprovider",
    ]
    try:
        for folder in mutation.tests:
            tests = [*command, "-m", "not slow and not long", f"tests/{folder}"]
            run = subprocess.run(tests, cwd=copy, env=environment, capture_output=True, text=True)
            # 2: xdist stopped at the first failure
            if run.returncode in (1, 2) and "\nFAILED " in run.stdout:
                return False
            if run.returncode != 0:
                sys.exit(f"the tests cannot run: {run.stdout[-2000:]}{run.stderr[-2000:]}")
        return True
    finally:
        path.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="a part of the name")
    parser.add_argument("--check", action="store_true", help="look for the places only")
    given = parser.parse_args()
    if gone := places_gone():
        sys.exit(f"not in the code any more, or not once: {', '.join(gone)}")
    if given.check:
        return
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "project"
        shutil.copytree(
            ROOT, copy, ignore=shutil.ignore_patterns(".*", "build", "carry", "*.egg-info")
        )
        for mutation in MUTATIONS:
            if given.only is None or given.only in mutation.name:
                survived = survives(mutation, copy)
                print("SURVIVED" if survived else "caught  ", mutation.name, flush=True)
                survivors += [mutation.name] * survived
    sys.exit(f"{len(survivors)} survived: {', '.join(survivors)}" if survivors else 0)


if __name__ == "__main__":
    main()
