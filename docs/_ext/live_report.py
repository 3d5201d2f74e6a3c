"""The report that the home page shows: ``torchfil demo`` on scikit-learn's digits, made when the
site is built.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from torchfil import __version__

POLICY = Path(__file__).with_name("live_policy.toml")
DEMO = ("--epochs", "20", "--noise", "2")
MADE_OF = f"torchfil {__version__} demo {' '.join(DEMO)}\n{POLICY.read_text()}"


def make_live_report(app: Any) -> None:
    """Train, write the report below ``LIVE_REPORT`` and leave it there for later builds.

    Only the HTML builder shows it. It is made anew for another version, setting or policy, or after
    ``rm -rf build/live-report``.
    """
    folder = Path(app.config.LIVE_REPORT)
    report, made_of = folder / "demo" / "report", folder.with_suffix(".txt")
    is_current = report.exists() and made_of.exists() and made_of.read_text() == MADE_OF
    if app.builder.name != "html" or is_current:
        return

    run = folder / "demo" / "run.parquet"
    _torchfil(app, "demo", "--quiet", *DEMO, "-o", str(run.parent))
    _torchfil(app, "report", str(run), "-o", str(report), "--policy", str(POLICY))
    run.unlink()
    # These digits are public, and a web server must be able to read what a report keeps to its
    # owner.
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    made_of.write_text(MADE_OF)


def _torchfil(app: Any, *arguments: str) -> None:
    command = [sys.executable, "-m", "torchfil", *arguments]
    subprocess.run(command, check=True, cwd=Path(app.srcdir).parent, stdout=subprocess.DEVNULL)


def setup(app: Any) -> dict[str, bool]:
    """Before pages are read."""
    app.add_config_value("LIVE_REPORT", None, "", ())
    app.connect("builder-inited", make_live_report)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
