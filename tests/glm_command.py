"""The command ``torchfil glm``, called with noise where none is named, and a table for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from click.testing import Result

from tests.test_cli import call, refused


def with_noise(args: tuple[Any, ...]) -> list[Any]:
    return ["glm", *args, *([] if "--sigma" in args else ["--sigma", "1"])]


def glm(*args: Any) -> Result:
    return call(*with_noise(args))


def refused_glm(*args: Any) -> str:
    return refused(*with_noise(args))


def table_file(
    path: Path, *, separator: str = ",", decimal: str = ".", encoding: str = "utf-8", rows: int = 40
) -> Path:
    """The same numbers however they are written."""
    rng = np.random.default_rng(0)
    lines = [separator.join(["größe", "art", "y"])]
    for _ in range(40):
        size, kind, y = rng.normal(), rng.choice(["süß", "sauer"]), rng.normal()
        lines.append(separator.join([f"{size:.4f}".replace(".", decimal), kind, f"{y:.2f}".replace(".", decimal)]))
    path.write_bytes("\r\n".join(lines).encode(encoding))
    return path
