"""The report that the home page shows: ``torchfil demo`` on scikit-learn's digits, made when the site is built."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from torchfil import __version__

EPOCHS = 12


def make_live_report(app: Any) -> None:
    """Train, write the report below ``LIVE_REPORT`` and leave it there for later builds.

    Only the HTML builder shows it. The run is made anew after ``rm -rf build/live-report``, or for another version.
    """
    folder = Path(app.config.LIVE_REPORT)
    page, made_by = folder / "demo" / "report" / "index.html", folder.with_suffix(".version")
    is_current = page.exists() and made_by.exists() and made_by.read_text() == __version__
    if app.builder.name != "html" or is_current:
        return

    command = [sys.executable, "-m", "torchfil", "demo", "--quiet", "--epochs", str(EPOCHS), "-o", str(folder / "demo")]
    subprocess.run(command, check=True, cwd=Path(app.srcdir).parent, stdout=subprocess.DEVNULL)
    (folder / "demo" / "digits.fil").unlink()
    # These digits are public, and a web server must be able to read what a report keeps to its owner.
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    made_by.write_text(__version__)


def setup(app: Any) -> dict[str, bool]:
    """Before pages are read."""
    app.add_config_value("LIVE_REPORT", None, "", ())
    app.connect("builder-inited", make_live_report)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
