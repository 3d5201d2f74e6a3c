"""Run a tutorial from the command line, without Jupyter: its code cells in order, in one process.

    python run.py first-report.md
    python run.py first-report.md --set EPOCHS=2
    python run.py --notebooks FOLDER

It prints what a notebook would show as text. Pictures are drawn but not kept, unless you pass
``--pictures FOLDER``. The last line writes all tutorials as .ipynb files, whose first cell installs
torchfil if it is missing.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

__all__ = ["as_notebook", "code_cells", "run_notebook", "write_notebooks"]

CELL = re.compile(r"^```\{code-cell\}[^\n]*\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
ADMONITION = re.compile(r"^```\{(\w+)\}\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[([^\]]*)\]\((?!https?:)([^)#]*)[^)]*\)")
HTML = re.compile(r"<a [^>]*>(.*?)</a>", flags=re.DOTALL)
INSTALL = """import importlib.util
import subprocess
import sys
from pathlib import Path

if importlib.util.find_spec("torchfil") is None:
    # torchfil is not on PyPI yet: put its wheel (`make wheel` in a clone) into this folder
    here = [str(path.resolve()) for path in Path().glob("torchfil-*.whl")]
    wanted = f"{{(here or ['torchfil'])[0]}}[{extras}]"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", wanted], check=True)
"""


def code_cells(text: str) -> list[tuple[str, str]]:
    """(tags, code) of every cell of a MyST notebook.

    Tags as written, for example "[parameters]".
    """
    cells = []
    for body in CELL.findall(text):
        options = re.match(r"(?::[\w-]+:[^\n]*\n)*", body)[0]
        tags = re.search(r"^:tags: (.*)$", options, flags=re.MULTILINE)
        cells.append((tags[1] if tags else "", body[len(options) :]))
    return cells


def as_notebook(text: str, page: str = "docs/tutorials") -> dict[str, Any]:
    """A tutorial as the content of an .ipynb file, to be opened by Jupyter, Colab or Kaggle.

    Links into the site become the names of the files in the source, as a notebook may lie anywhere.

    Args:
        text: The MyST notebook.
        page: The folder that its links start from.
    """
    body = text.partition("\n---\n")[2]
    more = ",hf" if re.search(r"^from (peft|transformers) ", body, flags=re.MULTILINE) else ""
    extras = f"report,glm{more}"
    cells = [_cell("code", INSTALL.format(extras=extras))]
    codes, end = iter(code_cells(text)), 0
    for match in CELL.finditer(body):
        tags, code = next(codes)
        cells += [
            _cell("markdown", _plain(body[end : match.start()], page)),
            _cell("code", code, tags),
        ]
        end = match.end()
    cells.append(_cell("markdown", _plain(body[end:], page)))
    cells = [
        {**cell, "id": f"cell-{number}"} for number, cell in enumerate(cells) if cell["source"]
    ]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    about = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": about, "nbformat": 4, "nbformat_minor": 5}


def write_notebooks(folder: Path) -> list[Path]:
    """Write every tutorial next to this file into a folder, as NAME.ipynb."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for path in sorted(Path(__file__).parent.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        if code_cells(text):
            written.append(folder / f"{path.stem}.ipynb")
            notebook = json.dumps(as_notebook(text), indent=1, ensure_ascii=False)
            written[-1].write_text(notebook + "\n", encoding="utf-8")
    return written


def _cell(kind: str, source: str, tags: str = "") -> dict[str, Any]:
    names = re.findall(r"[\w-]+", tags)
    cell = {
        "cell_type": kind,
        "metadata": {"tags": names} if names else {},
        "source": source.strip("\n"),
    }
    return {**cell, "execution_count": None, "outputs": []} if kind == "code" else cell


def _plain(text: str, page: str) -> str:
    """MyST as Markdown that every viewer shows."""

    def quoted(match: re.Match[str]) -> str:
        return f"> **{match[1].capitalize()}.** " + match[2].strip().replace("\n", "\n> ")

    def named(match: re.Match[str]) -> str:
        target = os.path.normpath(f"{page}/{match[2]}")
        return f"{match[1]} (`{target}`)"

    return HTML.sub(r"\1", LINK.sub(named, ADMONITION.sub(quoted, text)))


def run_notebook(
    path: Path, settings: dict[str, Any] | None = None, pictures: Path | None = None
) -> dict[str, Any]:
    """Run all cells and return the names that they define.

    Args:
        path: The notebook, a MyST file.
        settings: Values that replace those of the cell tagged ``parameters``, as in papermill. A
            name that this cell does not set is refused.
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("notebook", type=Path, nargs="?")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting, for example EPOCHS=2",
    )
    parser.add_argument("--pictures", type=Path, help="the folder for pictures")
    parser.add_argument(
        "--notebooks",
        type=Path,
        metavar="FOLDER",
        help="write all tutorials as .ipynb files, and end",
    )
    options = parser.parse_args()
    if options.notebooks is not None:
        print(*write_notebooks(options.notebooks), sep="\n")
        return
    if options.notebook is None:
        parser.error("name a tutorial, for example first-report.md, or pass --notebooks FOLDER")
    pairs = (entry.partition("=")[::2] for entry in options.set)
    run_notebook(
        options.notebook, {name: ast.literal_eval(value) for name, value in pairs}, options.pictures
    )


if __name__ == "__main__":
    main()
