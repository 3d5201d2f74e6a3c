"""What the accounting costs on this machine, in one run.

    python -m benchmarks [--device cuda] [--quick] [--models mnist cifar] [--sections models growth] [--out FOLDER]
    python -m benchmarks --device cuda --models bert gpt2 vit_base convnext_tiny llama_lora

Writes FOLDER/<device>.json and .md, and rewrites them after every part. If a part fails, they hold the reason. Parts
that are not run again keep their results if machine and versions are the same.
"""

from __future__ import annotations

import argparse
import json
import re
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import opacus
import torch

from benchmarks.comparison import compare
from benchmarks.epochs import whole_run
from benchmarks.growth import growth
from benchmarks.large import LARGE, compare_large
from benchmarks.loops import MODELS
from benchmarks.many_examples import many_examples
from benchmarks.matched import matched
from benchmarks.measuring import attempt
from benchmarks.precision import precision
from benchmarks.tables import page
from torchfil.utils.files import replaced_when_complete

SECTIONS = ("models", "matched", "run", "growth", "precision", "examples")


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=[*MODELS, *LARGE])
    parser.add_argument("--sections", nargs="+", default=list(SECTIONS), choices=SECTIONS)
    parser.add_argument("--examples", nargs="+", type=int, default=[100_000, 1_000_000], help='of section "examples"')
    parser.add_argument("--quick", action="store_true", help="few repeats: the whole in minutes on a CPU")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    options.out.mkdir(parents=True, exist_ok=True)
    stem = options.out / slug(device_name(options.device))
    results: dict[str, Any] = {"machine": machine(options.device), "quick": options.quick}
    results = resumed(stem.with_suffix(".json"), results)
    small = [name for name in options.models if name in MODELS]
    large = [name for name in options.models if name in LARGE]
    if large and not small:  # the other sections are of the small models
        options.sections = ["models"]

    def part(where: list[str], work: Callable[[], dict[str, Any]]) -> None:
        start = time.perf_counter()
        outcome = attempt(work)
        target = results
        for key in where[:-1]:
            target = target.setdefault(key, {})
        target[where[-1]] = outcome
        write(results, stem)
        reason = f"  failed: {outcome['failed']}" if "failed" in outcome else ""
        print(f"{' '.join(where)}: {time.perf_counter() - start:.0f} s{reason}", flush=True)

    if "models" in options.sections:
        for name in small:
            part(["models", name], lambda name=name: compare(name, options.device, quick=options.quick))  # type: ignore[misc]
        for name in large:
            part(["large", name], lambda name=name: compare_large(name, options.device, quick=options.quick))  # type: ignore[misc]
    if "matched" in options.sections:
        for name in small:
            part(["matched", name], lambda name=name: matched(name, options.device, quick=options.quick))  # type: ignore[misc]
    if "run" in options.sections:
        part(["run"], lambda: whole_run(options.device, quick=options.quick))
    if "precision" in options.sections:
        few = options.quick and not options.device.startswith("cuda")
        for name in [name for name in small if not few or name in ("mnist", "vit")]:
            part(["precision", name], lambda name=name: precision([name], options.device)[name])  # type: ignore[misc]
    if "growth" in options.sections:
        part(["growth"], lambda: growth(options.device, quick=options.quick))
    if "examples" in options.sections and not options.device.startswith("cuda"):
        part(["examples"], lambda: many_examples(options.examples[: 1 if options.quick else None]))
    print(stem.with_suffix(".md").read_text())


def device_name(device: str) -> str:
    """The GPU's name, or "CPU"."""
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else "CPU"


def slug(name: str) -> str:
    """The device as a file name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def machine(device: str) -> dict[str, Any]:
    """The machine and the versions of the measurement."""
    return {
        "device": device_name(device),
        "torch": torch.__version__,
        "opacus": opacus.__version__,
        "threads": torch.get_num_threads(),
    }


def resumed(path: Path, present: dict[str, Any]) -> dict[str, Any]:
    """The results of an earlier run on the same machine, if it was as thorough as this one; else ``present``."""
    earlier: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return earlier if all(earlier.get(key) == value for key, value in present.items()) else present


def write(results: dict[str, Any], stem: Path) -> None:
    """Write both files; each is replaced only when complete."""
    for suffix, text in ((".json", json.dumps(results, indent=1)), (".md", page(results))):
        with replaced_when_complete(stem.with_suffix(suffix)) as path:
            Path(path).write_text(text)
            Path(path).chmod(0o644)


if __name__ == "__main__":
    main()
