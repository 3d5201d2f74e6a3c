"""How long a report of many examples takes, how large its page is, and whether a browser scrolls it without freezing.

    python benchmarks/report_million.py [--rows 1000000] [--out DIR] [--browser]

The browser part needs Chromium, its driver and selenium.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from torchfil.report import SavedRun, write_report


def synthetic_run(rows: int, *, seed: int = 0) -> SavedRun:
    """A run of random columns with string ids and two groupings."""
    rng = np.random.default_rng(seed)
    participations = rng.poisson(8, rows)
    fil = np.where(participations > 0, np.exp(rng.normal(-1, 0.8, rows)), 0.0)
    with np.errstate(divide="ignore"):
        bound = 1 / fil**2

    return SavedRun(
        about={
            "title": f"{rows:,} synthetic examples",
            "dataset": {"num_examples": rows, "num_coordinates": 32, "input_range": [0.0, 1.0]},
            "mechanism": {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "poisson": True, "amplification": "poisson"},
            "epsilon": 4.0,
            "delta": 1e-7,
        },
        ids=np.char.add("example-", np.arange(rows).astype(str)),
        columns={
            "fil": fil,
            "fil_error": fil * rng.uniform(0.01, 0.2, rows),
            "sampling_error": np.where(participations > 0, fil * rng.uniform(0.1, 0.3, rows), np.inf),
            "mse_bound": bound,
            "mse_bound_low": bound * rng.uniform(0.5, 0.9, rows),
            "participations": participations,
            "missed": np.zeros(rows, dtype=np.int64),
            "squared_norm": participations * rng.uniform(0.2, 1.0, rows),
            "epsilon": rng.uniform(1.0, 4.0, rows),
        },
        groups={"site": rng.choice(["north", "south", "east"], rows), "sex": rng.choice(["f", "m"], rows)},
    )


def in_browser(page: Path) -> dict[str, float]:
    """Seconds until the table is there, to sort it, to find an id, and the longest of 200 scrolled frames."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service
    from selenium.webdriver.support.ui import WebDriverWait

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    quiet = "disable-gpu disable-quic no-first-run disable-background-networking disable-component-update disable-sync"
    for argument in ("headless=new", "no-sandbox", *quiet.split(), f"user-data-dir={tempfile.mkdtemp()}"):
        options.add_argument(f"--{argument}")
    driver = webdriver.Chrome(service=Service(str(shutil.which("chromedriver"))), options=options)
    try:
        driver.set_script_timeout(120)
        start = time.perf_counter()
        driver.get(page.as_uri())
        WebDriverWait(driver, 120).until(
            lambda d: d.execute_script("return document.getElementById('grid').dataset.ready")
        )
        ready = time.perf_counter() - start
        return {"page ready": ready, **_timed(driver)}
    finally:
        driver.quit()


# sorts twice, searches, then scrolls through the table in 200 frames
SCRIPT = """
const done = arguments[arguments.length - 1], out = {}, now = () => performance.now();
const heading = (key) => document.querySelector(`#head [data-key="${key}"] button`);
let t = now(); heading("fil").click(); out["sort by FIL"] = now() - t;
t = now(); heading("id").click(); out["sort by id"] = now() - t;
t = now();
const box = document.getElementById("search");
box.value = "example-77"; box.dispatchEvent(new Event("input"));
const poll = () => {
  if (!document.getElementById("found").textContent.includes(" of ")) return setTimeout(poll, 5);
  out["search"] = now() - t;
  box.value = ""; box.dispatchEvent(new Event("input"));
  setTimeout(scroll, 600);
};
const view = document.getElementById("viewport");
let frame = 0, last = 0, worst = 0;
const step = () => {
  const at = now();
  if (frame > 2) worst = Math.max(worst, at - last);
  last = at;
  view.scrollTop = view.scrollHeight * frame / 200;
  if (++frame < 200) requestAnimationFrame(step); else { out["longest frame"] = worst; done(out); }
};
const scroll = () => requestAnimationFrame(step);
poll();
"""


def _timed(driver: Any) -> dict[str, float]:
    return {name: milliseconds / 1000 for name, milliseconds in driver.execute_async_script(SCRIPT).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--browser", action="store_true")
    options = parser.parse_args()
    folder = options.out or Path(tempfile.mkdtemp()) / "report"
    run = synthetic_run(options.rows)
    for redacted in (True, False):
        start = time.perf_counter()
        page = write_report(run, folder, redacted=redacted)
        seconds, size = time.perf_counter() - start, page.stat().st_size / 1e6
        print(f"{options.rows:,} rows, {'redacted' if redacted else 'full'}: {seconds:.1f} s, page {size:.1f} MB")
    if options.browser:
        for name, seconds in in_browser(page).items():
            print(f"{name}: {seconds:.2f} s")


if __name__ == "__main__":
    main()
