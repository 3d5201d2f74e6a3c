"""Run a tutorial from the command line, without Jupyter: its code cells in order, in one process.

    python run.py first-report.md
    python run.py first-report.md --set EPOCHS=2

It prints what a notebook would show as text. Pictures are drawn but not kept, unless you pass ``--pictures FOLDER``.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import sys
from pathlib import Path
from typing import Any

__all__ = ["code_cells", "run_notebook"]

CELL = re.compile(r"^```\{code-cell\}[^\n]*\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


def code_cells(text: str) -> list[tuple[str, str]]:
    """(tags, code) of every cell of a MyST notebook; tags as written, for example "[parameters]"."""
    cells = []
    for body in CELL.findall(text):
        options = re.match(r"(?::[\w-]+:[^\n]*\n)*", body)[0]
        tags = re.search(r"^:tags: (.*)$", options, flags=re.MULTILINE)
        cells.append((tags[1] if tags else "", body[len(options) :]))
    return cells


def run_notebook(path: Path, settings: dict[str, Any] | None = None, pictures: Path | None = None) -> dict[str, Any]:
    """Run all cells and return the names that they define.

    Args:
        path: The notebook, a MyST file.
        settings: Values that replace those of the cell tagged ``parameters``, as in papermill. A name that this cell
            does not set is refused.
        pictures: A folder for every picture that a cell shows: ``01.png``, ``02.png`` and so on.
    """
    os.environ.setdefault("MPLBACKEND", "Agg")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    shown = 0
    for number, (tags, code) in enumerate(code_cells(path.read_text(encoding="utf-8")), start=1):
        value = _run_cell(code, f"{path.name}, cell {number}", namespace)
        if "parameters" in tags and settings:
            unknown = set(settings) - set(namespace)
            if unknown:
                raise SystemExit(f"{path.name} has no setting {', '.join(sorted(unknown))}")
            namespace.update(settings)

        figures = _open_figures()
        if hasattr(value, "savefig"):
            figures.append(value)
        elif value is not None:
            print(value)
        for figure in figures if pictures is not None else ():
            shown += 1
            pictures.mkdir(parents=True, exist_ok=True)
            figure.savefig(pictures / f"{shown:02}.png", dpi=100)
    return namespace


def _open_figures() -> list[Any]:
    """pyplot's open figures, which a notebook shows at the end of the cell; this closes them."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is None:
        return []
    figures = [pyplot.figure(number) for number in pyplot.get_fignums()]
    pyplot.close("all")
    return figures


def _run_cell(code: str, name: str, namespace: dict[str, Any]) -> Any:
    """The value of the last line if that is an expression, as notebooks show it."""
    tree = ast.parse(code, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), namespace)
    if last is None:
        return None
    value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
    return None if code.rstrip().endswith(";") else value


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebook", type=Path)
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a setting, for example EPOCHS=2"
    )
    parser.add_argument("--pictures", type=Path, help="the folder for pictures")
    options = parser.parse_args()
    pairs = (entry.partition("=")[::2] for entry in options.set)
    run_notebook(options.notebook, {name: ast.literal_eval(value) for name, value in pairs}, options.pictures)


if __name__ == "__main__":
    main()
