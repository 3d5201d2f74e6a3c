"""What the accounting costs on this machine, in one run.

    python -m benchmarks [--device cuda] [--quick] [--models mnist cifar] [--sections models run]
    [--out FOLDER]

Writes FOLDER/<device>.json and .md, and rewrites them after every part. If a part fails, they hold
the reason. Parts that are not run again keep their results if machine and versions are the same.
"""

from __future__ import annotations

import argparse
import json
import re
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import opacus
import torch

from benchmarks.comparison import compare
from benchmarks.epochs import whole_run
from benchmarks.loops import MODELS
from benchmarks.measuring import Json, attempt
from benchmarks.tables import page
from torchfil.utils.files import replaced_when_complete

SECTIONS = ("models", "run")


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--sections", nargs="+", default=list(SECTIONS), choices=SECTIONS)
    parser.add_argument(
        "--quick", action="store_true", help="few repeats: the whole in minutes on a CPU"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    options.out.mkdir(parents=True, exist_ok=True)
    present = {"machine": machine(options.device), "quick": options.quick}
    stem = options.out / re.sub(r"[^a-z0-9]+", "-", present["machine"]["device"].lower())
    results = resumed(stem.with_suffix(".json"), present)

    def part(target: Json, name: str, work: Callable[..., Json]) -> None:
        start = time.perf_counter()
        target[name] = attempt(partial(work, device=options.device, quick=options.quick))
        write(results, stem)
        reason = f"  failed: {target[name]['failed']}" if "failed" in target[name] else ""
        print(f"{name}: {time.perf_counter() - start:.0f} s{reason}", flush=True)

    if "models" in options.sections:
        for name in options.models:
            part(results.setdefault("models", {}), name, partial(compare, name))
    if "run" in options.sections:
        part(results, "run", whole_run)
    print(stem.with_suffix(".md").read_text())


def machine(device: str) -> Json:
    """The machine and the versions of the measurement."""
    return {
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else "CPU",
        "torch": torch.__version__,
        "opacus": opacus.__version__,
        "threads": torch.get_num_threads(),
    }


def resumed(path: Path, present: Json) -> Json:
    """The results of an earlier run on the same machine, if it was as thorough as this one.

    Else ``present``.
    """
    earlier: Json = json.loads(path.read_text()) if path.exists() else {}
    return earlier if all(earlier.get(key) == value for key, value in present.items()) else present


def write(results: Json, stem: Path) -> None:
    """Write both files; each is replaced only when complete."""
    for suffix, text in ((".json", json.dumps(results, indent=1)), (".md", page(results))):
        with replaced_when_complete(stem.with_suffix(suffix)) as path:
            Path(path).write_text(text)
            Path(path).chmod(0o644)


if __name__ == "__main__":
    main()
