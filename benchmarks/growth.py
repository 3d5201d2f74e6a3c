"""How the time of a step grows with the batch, the width, the input and the number of probes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks import zoo
from benchmarks.loops import MODELS, UNIT, Loop, Model, Variant, random_images
from benchmarks.measuring import attempt, line, peak_gigabytes, power, seconds_in_turns

__all__ = ["growth"]

METHODS = {UNIT: Variant("hooks"), "torchfil train_step, 1 probe": Variant("train_step", (("num_probes", 1),))}


def growth(device: str, *, quick: bool) -> dict[str, Any]:
    """Times against sizes, with the slopes of log time over log size, and times and memory against probes."""
    on_gpu = device.startswith("cuda")
    mnist = MODELS["mnist"]
    sizes = (512, 1024, 2048, 4096) if on_gpu else (16, 32, 64, 128)
    batch = {size: replace(mnist, cuda_batch=size, cpu_batch=size) for size in sizes}
    widths = (16, 32, 64, 128) if on_gpu else (8, 16, 32, 48)
    width = {size: _resnet(size, 32 if on_gpu else 16, 64 if on_gpu else 2) for size in widths}
    sides = (32, 48, 64, 96) if on_gpu else (8, 16, 32, 48)
    pixels = {side * side: _resnet(16 if on_gpu else 8, side, 64 if on_gpu else 2) for side in sides}
    return {
        "batch": {"what": "MNIST CNN; expected batch", **_against(batch, device, quick)},
        "width": {"what": "ResNet-18; channels of the first stage", **_against(width, device, quick)},
        "input": {"what": "ResNet-18, narrow; pixels of the image", **_against(pixels, device, quick)},
        "probes": {"what": "MNIST CNN; probes", **_against_probes(mnist, device, quick)},
    }


def _resnet(width: int, side: int, batch: int) -> Model:
    build = partial(zoo.resnet18, width=width)
    return Model(f"ResNet-18, width {width}", build, random_images(3, side), batch, batch)


def _against(models: Mapping[int, Model], device: str, quick: bool) -> dict[str, Any]:
    """Seconds of each method for each size; the powers of growth over all sizes and over the last two."""
    sizes = list(models)
    methods = {
        title: {
            size: partial(Loop, model, variant, device, batches=1 if quick else 2) for size, model in models.items()
        }
        for title, variant in METHODS.items()
    }
    times = {title: _times(builders, device, quick) for title, builders in methods.items()}
    result: dict[str, Any] = {"sizes": sizes, "seconds": {}, "power": {}, "last_power": {}}
    for title, rows in times.items():
        result["seconds"][title] = [rows[size].get("seconds") for size in sizes]
        timed = [(size, rows[size]["seconds"]) for size in sizes if "seconds" in rows[size]]
        failed = {size: rows[size]["failed"] for size in sizes if "failed" in rows[size]}
        if failed:
            result.setdefault("failed", {})[title] = failed
        if len(timed) > 1:
            result["power"][title] = power(*zip(*timed, strict=True))
            result["last_power"][title] = power(*zip(*timed[-2:], strict=True))
    return result


def _times(builders: Mapping[int, Callable[[], Loop]], device: str, quick: bool) -> dict[int, dict[str, Any]]:
    """The median time of each method's step, all sizes in turns."""

    def all_sizes() -> dict[str, Any]:
        steps = {str(size): build().step for size, build in builders.items()}
        return seconds_in_turns(steps, device, repeats=1 if quick else 10, warm_up=1 if quick else 3)

    rows = attempt(all_sizes)
    return {size: {"failed": rows["failed"]} if "failed" in rows else rows[str(size)] for size in builders}


def _against_probes(model: Model, device: str, quick: bool) -> dict[str, Any]:
    """Seconds and peak memory with 1 to 8 probes, and the line through the seconds."""
    if not device.startswith("cuda"):
        model = replace(model, cpu_batch=64)
    title = "torchfil train_step"
    counts = (1, 2, 4, 8) if quick else tuple(range(1, 9))
    variants = {count: Variant("train_step", (("num_probes", count),)) for count in counts}
    builders = {
        count: partial(Loop, model, variant, device, batches=1 if quick else 2) for count, variant in variants.items()
    }
    rows = _times(builders, device, quick)
    peaks = [
        attempt(
            lambda v=variant: {"gb": peak_gigabytes(lambda: Loop(model, v, device, batches=1).step, device)}  # type: ignore[misc]
        ).get("gb")
        for variant in variants.values()
    ]
    result: dict[str, Any] = {"sizes": list(counts), "seconds": {title: [rows[c].get("seconds") for c in counts]}}
    result["peak_gb"] = peaks
    timed = [(count, rows[count]["seconds"]) for count in counts if "seconds" in rows[count]]
    if len(timed) > 1:
        intercept, slope = line(*zip(*timed, strict=True))
        result |= {"seconds_without": intercept, "seconds_per_probe": slope}
    failed = {count: rows[count]["failed"] for count in counts if "failed" in rows[count]}
    return result | ({"failed": {title: failed}} if failed else {})
