"""The code's shape: imports point one way, without cycles; only the engine knows Opacus.

No function branches often.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.mutations import places_gone

ROOT = Path(__file__).parents[1]

# A module imports from its own folder and from rows above; what stands in one row does not know of
# each other.
ROWS = (
    {"_version", "utils"},
    {"private", "clipping", "viz"},
    {"fisher", "smoothness", "questions"},
    {"guessing"},
    {"accounting", "bounds", "glm"},
    {"attribution", "audit", "run"},
    {"gate"},
    {"report"},
    {"attacks"},
    {"planning"},
    {"engine"},
    {"cli", "integrations", "testing"},
    {"__main__", "pytest_plugin"},
)
OPACUS = ("torchfil.engine", "torchfil.audit.replay")  # built on it; watches it
MOST_BRANCHES = 20  # of a function


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


TREES = {
    name_of(path): ast.parse(path.read_text()) for path in sorted((ROOT / "torchfil").rglob("*.py"))
}


def imported(tree: ast.AST) -> Iterator[tuple[str, str | None]]:
    """Every import as (module, name taken from it), wherever it stands: in functions and for type
    checkers too.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from ((node.module or "", alias.name) for alias in node.names)


NAMED = {name: list(imported(tree)) for name, tree in TREES.items()}


def home_of(module: str, name: str | None) -> str:
    """The module that defines what is imported: packages hand names on from where they are
    defined.
    """
    if name is None or module not in TREES:
        return module
    if f"{module}.{name}" in TREES:
        return f"{module}.{name}"
    for source, handed_on in NAMED[module]:
        if handed_on == name:
            return home_of(source, name)
    return module


IMPORTS = {name: {home_of(*entry) for entry in entries} for name, entries in NAMED.items()}


def folder_of(module: str) -> str:
    return module.split(".")[1]


def reachable(start: str) -> set[str]:
    """All modules that ``start`` imports, directly or not."""
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        for module in IMPORTS[waiting.pop()] & TREES.keys() - seen:
            seen.add(module)
            waiting.append(module)
    return seen


def test_no_module_imports_itself_through_others() -> None:
    behind = {name: reachable(name) for name in TREES}
    cycles = {frozenset(other for other in behind[name] if name in behind[other]) for name in TREES}
    assert cycles == {frozenset()}


def test_every_folder_has_its_row() -> None:
    folders = {folder_of(name) for name in TREES if name != "torchfil"}
    assert folders == set().union(*ROWS), "say in ROWS what a new folder may import"


def test_imports_point_one_way() -> None:
    row_of = {folder: place for place, row in enumerate(ROWS) for folder in row}

    def points_back(module: str, importer: str) -> bool:
        ours, theirs = folder_of(importer), folder_of(module)
        return ours != theirs and row_of[theirs] >= row_of[ours]

    wrong_ways = {
        (name, module)
        for name, modules in IMPORTS.items()
        for module in modules & TREES.keys()
        if name != "torchfil" and (module == "torchfil" or points_back(module, name))
    }
    assert not wrong_ways


def test_only_the_engine_knows_opacus() -> None:
    users = {
        name
        for name, modules in IMPORTS.items()
        if any(module.split(".")[0] == "opacus" for module in modules)
    }
    assert {name for name in users if not name.startswith(OPACUS)} == set()


def branches_of(function: ast.AST) -> int:
    """Branches and loops of a function and of those inside it, comprehensions and further operands
    of and/or too.
    """
    count = 0
    for node in ast.walk(function):
        count += isinstance(
            node, ast.If | ast.IfExp | ast.For | ast.While | ast.ExceptHandler | ast.match_case
        )
        if isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
        if isinstance(node, ast.comprehension):
            count += 1 + len(node.ifs)
    return count


def test_no_function_branches_often() -> None:
    functions = {
        f"{path.relative_to(ROOT)}: {node.name}": branches_of(node)
        for folder in ("torchfil", "benchmarks", "reproduction")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert not {name: count for name, count in functions.items() if count > MOST_BRANCHES}


def test_every_planted_fault_has_its_place() -> None:
    assert places_gone() == []
