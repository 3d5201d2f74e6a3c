"""What users can call stays: every name and argument of ``public_names.txt`` is still there and
accepted.

A line is a function, class, method or command with its arguments, as torchfil's folders (their
``__all__``, which docs/api documents) and the command line had them when the list was frozen. A
line leaves the list only by a decision that the changelog names. ``python -m
tests.test_public_names`` prints today's names in the same form.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

import torchfil
from torchfil.cli import main

FROZEN = Path(__file__).with_name("public_names.txt")
NOT_FOR_USERS = ("__main__", "_version", "cli", "utils")


def offered() -> Iterator[tuple[str, Any]]:
    """What torchfil and its folders and modules offer (``__all__``)."""
    folders = [
        each.name
        for each in pkgutil.iter_modules(torchfil.__path__)
        if each.name not in NOT_FOR_USERS
    ]
    for name in ("torchfil", *(f"torchfil.{folder}" for folder in folders)):
        module = importlib.import_module(name)
        yield from ((each, getattr(module, each)) for each in getattr(module, "__all__", ()))


def arguments(value: Any) -> list[str]:
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return []
    return [parameter.name for parameter in parameters if parameter.name not in ("self", "cls")]


def commands(group: click.Command, path: str) -> Iterator[tuple[str, list[str]]]:
    options = [max(each.opts, key=len) for each in group.params if each.name != "help"]
    yield path, options
    for name, command in sorted(getattr(group, "commands", {}).items()):
        yield from commands(command, f"{path} {name}")


def public_names() -> dict[str, set[str]]:
    """By name, its arguments; methods and properties as ``Class.name``."""
    found: dict[str, set[str]] = {}
    for name, value in offered():
        if callable(value):
            found.setdefault(name, set()).update(arguments(value))
        if inspect.isclass(value):
            for attribute in dir(value):
                if (
                    not attribute.startswith("_")
                    and inspect.getattr_static(value, attribute, None) is not None
                ):
                    owner = next((base for base in value.__mro__ if attribute in vars(base)), value)
                    if owner.__module__.startswith("torchfil"):
                        member = getattr(value, attribute, None)
                        found.setdefault(f"{name}.{attribute}", set()).update(
                            arguments(member) if inspect.isroutine(member) else ()
                        )
    found |= {name: set(options) for name, options in commands(main, "torchfil")}
    return found


def as_lines(names: dict[str, set[str]]) -> list[str]:
    return [f"{name}({', '.join(sorted(names[name]))})" for name in sorted(names)]


def test_frozen_names_and_arguments_are_kept() -> None:
    now = public_names()
    gone = []
    for line in FROZEN.read_text().splitlines():
        name, _, rest = line.partition("(")
        wanted = set(filter(None, rest.removesuffix(")").split(", ")))
        if name not in now:
            gone.append(name)
        elif wanted - now[name]:
            gone.append(f"{name}: {', '.join(sorted(wanted - now[name]))}")
    assert not gone, "; ".join(gone)


if __name__ == "__main__":
    print("\n".join(as_lines(public_names())))
