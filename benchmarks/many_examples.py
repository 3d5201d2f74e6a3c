"""What a run of many examples costs: training, saving, inspecting, gating and reporting, each in
its own process.

    python -m benchmarks.many_examples [--sizes 100000 1000000] [--all-drawn]
    python -m benchmarks.many_examples --page 1000000 [--browser]

The first prints CPU seconds and peak memory of 5 steps of batch 4,096 with individual ε, and of
everything after them. The second writes the report of made-up columns and measures the page in a
browser (needs Chromium, its driver, selenium).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.measuring import Json, power
from torchfil import Accounting, FILPrivacyEngine
from torchfil.accounting.norms import NormHistory
from torchfil.report import SavedRun, write_report

__all__ = ["many_examples"]

STEPS, BATCH, INPUTS = 5, 4096, 8
POLICY = "max_epsilon = 20.0\nmax_individual_epsilon = 20.0\nmax_share_too_few_draws = 1.0\n"
STAGES = ("train and save", "inspect", "gate", "report")


class MadeRows(Dataset[tuple[Tensor, Tensor]]):
    """Rows computed from their number when they are read, so the data take no memory."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.waves = torch.linspace(0.1, 3.0, INPUTS)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return torch.sin(self.waves * (row % 9973)), torch.tensor(row % 3 % 2)


def many_examples(sizes: Sequence[int], *, all_drawn: bool = False) -> Json:
    """CPU seconds and peak memory of every stage for each number of examples, and their powers of
    growth.

    Args:
        sizes: Numbers of examples.
        all_drawn: Whether every example has a row, as after a pass over the data; if not, the
            examples of 5 steps.
    """
    result: Json = {
        "sizes": list(sizes),
        "all_drawn": all_drawn,
        "seconds": {},
        "peak_gb": {},
        "details": [],
    }
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            run, policy = Path(folder, "run.parquet"), Path(folder, "policy.toml")
            policy.write_text(POLICY)
            tool = [sys.executable, "-m", "torchfil"]
            commands = (
                [
                    sys.executable,
                    "-m",
                    __spec__.name,
                    "--train",
                    str(size),
                    str(run),
                    *["--all-drawn"] * all_drawn,
                ],
                [*tool, "inspect", str(run)],
                [*tool, "gate", str(run), "--policy", str(policy), "--json"],
                [*tool, "report", str(run), "-o", str(Path(folder, "report"))],
            )
            for stage, command in zip(STAGES, commands, strict=True):
                seconds, peak, output = _measured(command)
                result["seconds"].setdefault(stage, []).append(seconds)
                result["peak_gb"].setdefault(stage, []).append(peak)
                if stage == STAGES[0]:
                    result["details"].append(json.loads(output.splitlines()[-1]))
                print(f"{size:,} {stage}: {seconds:.1f} s, {peak:.2f} GB", flush=True)
            result["details"][-1]["file_gb"] = run.stat().st_size / 1e9
            result["details"][-1]["page_mb"] = (
                Path(folder, "report", "index.html").stat().st_size / 1e6
            )
    if len(sizes) > 1:
        result["power"] = {
            stage: power(sizes, seconds) for stage, seconds in result["seconds"].items()
        }
    return result


def _measured(command: Sequence[str]) -> tuple[float, float, str]:
    """Seconds of CPU time and peak memory (GB, resident) of a command, and its output."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, text=True)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read()
    if process.returncode not in (0, 1):  # 1: a threshold of the gate is exceeded
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}: {text[-300:]}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e9, text


def train_and_save(size: int, path: Path, *, all_drawn: bool) -> Json:
    """Five steps with trace and individual ε, saved; the memory of the rows."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(INPUTS, 8), nn.Tanh(), nn.Linear(8, 2))
    engine = FILPrivacyEngine()
    _, _, loader = engine.make_private(
        module,
        torch.optim.SGD(module.parameters(), lr=0.1),
        DataLoader(MadeRows(size), batch_size=BATCH),
        noise_multiplier=1.0,
        criterion=nn.CrossEntropyLoss(),
        accounting=Accounting(num_probes=2),
    )
    times = {"begin": time.process_time()}
    for step, (x, y) in enumerate(loader):
        if step == STEPS:
            break
        engine.train_step(x, y)
    if all_drawn:
        _draw_all(engine)
    times["trained"] = time.process_time()
    engine.save_run(path, delta=1e-8, hash_data=False, input_range=(-1.0, 1.0))
    times["saved"] = time.process_time()
    ledger, history = engine.ledger, engine._training.run.history
    assert ledger is not None
    return {
        "train_seconds": times["trained"] - times["begin"],
        "save_seconds": times["saved"] - times["trained"],
        "bytes_an_example": (ledger.sums.num_bytes + history.num_bytes) / size,
        "bytes_an_example_drawn": ledger.bytes_per_example + NormHistory.bytes_needed(1),
    }


def _draw_all(engine: FILPrivacyEngine) -> None:
    """Give every example the sums of one that was drawn."""
    ledger, history = engine.ledger, engine._training.run.history
    assert ledger is not None
    drawn = int(ledger.sums["participations"].argmax())
    for rows in torch.arange(ledger.num_examples).split(2**20):
        for values in ledger.sums.values():
            values[rows] = values[drawn].clone()
        history.set_ratios(rows, torch.rand(len(rows)))


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
            "mechanism": {
                "noise_multiplier": 1.0,
                "max_grad_norm": 1.0,
                "poisson": True,
                "amplification": "poisson",
            },
            "epsilon": 4.0,
            "delta": 1e-7,
        },
        ids=np.char.add("example-", np.arange(rows).astype(str)),
        columns={
            "fil": fil,
            "fil_error": fil * rng.uniform(0.01, 0.2, rows),
            "sampling_error": np.where(
                participations > 0, fil * rng.uniform(0.1, 0.3, rows), np.inf
            ),
            "mse_bound": bound,
            "mse_bound_low": bound * rng.uniform(0.5, 0.9, rows),
            "participations": participations,
            "missed": np.zeros(rows, dtype=np.int64),
            "squared_norm": participations * rng.uniform(0.2, 1.0, rows),
            "epsilon": rng.uniform(1.0, 4.0, rows),
        },
        groups={
            "site": rng.choice(["north", "south", "east"], rows),
            "sex": rng.choice(["f", "m"], rows),
        },
    )


def in_browser(page: Path) -> dict[str, float]:
    """Seconds to show the table, to sort it and to find an id, and the longest of 200 scrolled
    frames.
    """
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service
    from selenium.webdriver.support.ui import WebDriverWait

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    quiet = (
        "disable-gpu disable-quic no-first-run disable-background-networking "
        "disable-component-update disable-sync"
    )
    for argument in (
        "headless=new",
        "no-sandbox",
        *quiet.split(),
        f"user-data-dir={tempfile.mkdtemp()}",
    ):
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
    return {
        name: milliseconds / 1000
        for name, milliseconds in driver.execute_async_script(SCRIPT).items()
    }


def page_of(rows: int, folder: Path, *, browser: bool) -> None:
    """Times of a report of made-up columns, and of its page in a browser."""
    run = synthetic_run(rows)
    for redacted in (True, False):
        start = time.perf_counter()
        page = write_report(run, folder, redacted=redacted)
        seconds, size = time.perf_counter() - start, page.stat().st_size / 1e6
        print(
            f"{rows:,} rows, {'redacted' if redacted else 'full'}: {seconds:.1f} s, page "
            f"{size:.1f} MB"
        )
    for name, seconds in in_browser(page).items() if browser else ():
        print(f"{name}: {seconds:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--all-drawn", action="store_true")
    parser.add_argument("--train", nargs=2, metavar=("SIZE", "PATH"), help=argparse.SUPPRESS)
    parser.add_argument("--page", type=int, metavar="ROWS")
    parser.add_argument("--browser", action="store_true")
    options = parser.parse_args()
    if options.train is not None:
        size, path = options.train
        print(json.dumps(train_and_save(int(size), Path(path), all_drawn=options.all_drawn)))
    elif options.page is not None:
        page_of(options.page, Path(tempfile.mkdtemp()) / "report", browser=options.browser)
    else:
        print(json.dumps(many_examples(options.sizes, all_drawn=options.all_drawn), indent=1))


if __name__ == "__main__":
    main()
