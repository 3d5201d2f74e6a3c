"""Run a tutorial from the command line, without Jupyter: its code cells in order, in one process.

    python run.py first-report.md
    python run.py first-report.md --set EPOCHS=2

Prints what a notebook would show as text. Pictures are drawn and dropped; ``--pictures FOLDER`` keeps them.
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
    """(tags, code) of every cell of a MyST notebook; tags as they are written, "[parameters]" say."""
    cells = []
    for body in CELL.findall(text):
        options = re.match(r"(?::[\w-]+:[^\n]*\n)*", body)[0]
        tags = re.search(r"^:tags: (.*)$", options, flags=re.MULTILINE)
        cells.append((tags[1] if tags else "", body[len(options) :]))
    return cells


def run_notebook(path: Path, settings: dict[str, Any] | None = None, pictures: Path | None = None) -> dict[str, Any]:
    """Run all cells; the names that they leave behind.

    Args:
        path: The notebook, a MyST file.
        settings: Put in place of values that the cell tagged ``parameters`` sets, as papermill does. A name that it
            does not set is refused.
        pictures: A folder for every picture that a cell shows, ``01.png`` and on.
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
    """pyplot's figures, which a notebook shows at the end of their cell; they are closed."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is None:
        return []
    figures = [pyplot.figure(number) for number in pyplot.get_fignums()]
    pyplot.close("all")
    return figures


def _run_cell(code: str, name: str, namespace: dict[str, Any]) -> Any:
    """The value of its last line where that is an expression, as notebooks show it."""
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
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting, EPOCHS=2 say")
    parser.add_argument("--pictures", type=Path, help="folder to keep pictures in")
    options = parser.parse_args()
    pairs = (entry.partition("=")[::2] for entry in options.set)
    run_notebook(options.notebook, {name: ast.literal_eval(value) for name, value in pairs}, options.pictures)


if __name__ == "__main__":
    main()
