"""What a run costs at another size: time, memory and messages of a step, from formulas fitted to
measurements.

    python -m benchmarks.scale_model

Prints the constants, the errors of the formulas on the measurements, and tables for 10⁶, 10⁸ and
10⁹ examples and models of 10⁸ and 10¹⁰ parameters.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy.optimize import nnls
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.loops import MODELS
from torchfil.accounting.ledger import Ledger
from torchfil.accounting.norms import NormHistory

__all__ = ["Constants", "Measured", "Size", "fit", "fitted", "measured_in_float32", "tables"]

RESULTS = Path(__file__).parent / "results" / "nvidia-h200.json"
PROBES = {"not measured": 0, "1 probe": 1, "3 probes": 3}
TERA = 1e12


@dataclass(frozen=True)
class Measured:
    """A ``train_step`` that was timed on one H200.

    Attributes:
        title: The model's name.
        work: Operations of a forward pass over the batch, in 10¹² (2 · parameters · positions).
        held: The memory of a pass with one probe, in 10⁹ bytes.
        probes: k.
        seconds: The time of the step.
    """

    title: str
    work: float
    held: float
    probes: int
    seconds: float


# docs/guide/scale.md: 32 × 128 tokens in BERT-base (86 · 10⁶ trained parameters), 8 × 512 in a
# Llama of 1.1 · 10⁹
BERT_WORK, LLAMA_WORK = 2 * 86e6 * 32 * 128 / TERA, 2 * 1.1e9 * 8 * 512 / TERA
LARGE_IN_FLOAT32 = [
    Measured("BERT-base", BERT_WORK, 16.1, 1, 0.108),
    Measured("BERT-base", BERT_WORK, 16.1, 3, 0.179),
]
IN_BFLOAT16 = [
    Measured("BERT-base", BERT_WORK, 16.0, 1, 0.088),
    Measured("BERT-base", BERT_WORK, 16.0, 3, 0.149),
    Measured("Llama, LoRA", LLAMA_WORK, 43.0, 1, 0.35),
]
# of BERT-base: by layer, width and position
BYTES_PER_ACTIVATION = (16.1e9 - 4 * 4 * 110e6) / (12 * 768 * 32 * 128)


def measured_in_float32() -> list[Measured]:
    """The models of the benchmark's table, with their operations counted, and BERT-base."""
    rows: list[Measured] = []
    table = json.loads(RESULTS.read_text())["models"]
    for name, model in MODELS.items():
        work = model.cuda_batch * _forward_operations(name) / TERA
        timed = {
            probes: table[name]["rows"][f"torchfil train_step, {method}"]
            for method, probes in PROBES.items()
        }
        for probes, row in timed.items():
            rows.append(Measured(model.title, work, timed[1]["peak_gb"], probes, row["seconds"]))
    return rows + LARGE_IN_FLOAT32


def _forward_operations(name: str) -> int:
    """Operations of one example, counted by torch in training mode, as it does not count fused
    attention kernels.
    """
    model = MODELS[name]
    with FlopCounterMode(display=False) as counter:
        model.build().train()(model.data(1)[0])
    return int(counter.get_total_flops())


@dataclass(frozen=True)
class Constants:
    """seconds = fixed + (passes + probe · k) · work + (moving + moving_probe · k) · held.

    Attributes:
        passes: Seconds per 10¹² operations of a forward pass, for the matrix products of all passes
            except probes.
        probe: The same for a probe.
        fixed: Seconds of a step of any size: launches, noise, update, ledger.
        moving: Seconds per 10⁹ bytes that a pass holds: everything that does little more than read
            and write.
        moving_probe: The same for a probe.
        off_by: The largest factor between the formula and a measurement.
    """

    passes: float
    probe: float
    fixed: float = 0.0
    moving: float = 0.0
    moving_probe: float = 0.0
    off_by: float = 1.0

    def seconds(self, work: float, held: float, probes: int = 1) -> float:
        """The time of a step in one process."""
        products = (self.passes + self.probe * probes) * work
        return self.fixed + products + (self.moving + self.moving_probe * probes) * held

    def ratios(self, measured: Sequence[Measured]) -> list[float]:
        """The formula's times divided by the measured times."""
        return [self.seconds(each.work, each.held, each.probes) / each.seconds for each in measured]


def fit(products: Constants, measured: Sequence[Measured]) -> Constants:
    """Fit everything except the matrix products, all terms ≥ 0, with the smallest squared relative
    errors.

    Example:
        >>> made = Constants(0.1, 0.05, 0.002, 0.003, 0.001)
        >>> sizes = [(0.1, 2.0), (1.0, 3.0), (2.0, 30.0)]
        >>> timed = [
        ...     Measured("", w, h, k, made.seconds(w, h, k)) for w, h in sizes for k in (0, 1, 3)
        ... ]
        >>> found = fit(Constants(0.1, 0.05), timed)
        >>> (
        ...     round(found.fixed, 6),
        ...     round(found.moving, 6),
        ...     round(found.moving_probe, 6),
        ...     round(found.off_by, 6),
        ... )
        (0.002, 0.003, 0.001, 1.0)
    """
    seconds = np.array([each.seconds for each in measured])
    columns = np.array([[1.0, each.held, each.probes * each.held] for each in measured])
    rest = 1 - np.array(products.ratios(measured))
    fixed, moving, moving_probe = nnls(columns / seconds[:, None], rest)[0].tolist()
    return _with_error(
        replace(products, fixed=fixed, moving=moving, moving_probe=moving_probe), measured
    )


def in_another_precision(
    constants: Constants, products: Constants, measured: Sequence[Measured]
) -> Constants:
    """The constants for other matrix products, with data movement slowed by the factor that fits
    the times best.
    """
    other = replace(constants, passes=products.passes, probe=products.probe)
    moved = [(other.moving + other.moving_probe * each.probes) * each.held for each in measured]
    rest = [
        each.seconds * (1 - r) + m
        for each, r, m in zip(measured, other.ratios(measured), moved, strict=True)
    ]
    factor = float(np.exp(np.mean(np.log(np.array(rest) / moved))))
    slower = replace(other, moving=factor * other.moving, moving_probe=factor * other.moving_probe)
    return _with_error(slower, measured)


def fitted(measured: Sequence[Measured]) -> tuple[Constants, Constants]:
    """The constants of models in float32 and in bfloat16.

    Of BERT-base's 108 ms, matrix products in full float32 (forward, back, sums) take 42, those with
    a probe in TF32 16. Of the Llama's 350 ms all products take 139 (its profile); a quarter of
    these are assumed to be the probe's.
    """
    of_bert = Constants(0.042 / BERT_WORK, 0.016 / BERT_WORK)
    of_llama = Constants(0.75 * 0.139 / LLAMA_WORK, 0.25 * 0.139 / LLAMA_WORK)
    float32 = fit(of_bert, measured)
    return float32, in_another_precision(float32, of_llama, IN_BFLOAT16)


def _with_error(constants: Constants, measured: Sequence[Measured]) -> Constants:
    ratios = constants.ratios(measured)
    return replace(constants, off_by=max(*ratios, *(1 / ratio for ratio in ratios)))


@dataclass(frozen=True)
class Size:
    """A run.

    Attributes:
        examples: n.
        parameters: P.
        trained: How many of them are trained.
        layers: The transformer's layers.
        width: The width of its layers.
        positions: The positions of an example.
        weight_bytes: The bytes of a stored weight.
        batch: The batch of all processes together.
        ranks: The number of processes, one per GPU.
    """

    examples: float
    parameters: float
    trained: float
    layers: int
    width: int
    weight_bytes: int
    ranks: int = 1
    positions: int = 512
    batch: int = 8192

    def step_seconds(self, constants: Constants, bandwidth: float) -> float:
        """The time of a step with one probe.

        Then gradients go round a ring at ``bandwidth`` bytes per second.
        """
        share = self.batch / self.ranks
        work, held = (
            2 * self.parameters * self.positions * share / TERA,
            self.example_bytes * share / 1e9,
        )
        return constants.seconds(work, held) + self.gradient_bytes / bandwidth

    @property
    def gradient_bytes(self) -> float:
        """The bytes that a rank sends for the gradients of a step, in float32."""
        return 2 * (self.ranks - 1) / self.ranks * 4 * self.trained

    @property
    def accounting_bytes(self) -> float:
        """The bytes that a rank receives for the accounting, mean per step: answers, norms, η̄ over
        time.
        """
        if self.ranks == 1:
            return 0.0
        points_per_step = 8 * self.batch / self.examples
        return 72 * self.ranks + 12 * self.batch + points_per_step * 16 * self.examples

    @property
    def model_bytes(self) -> float:
        """The bytes of the weights and, for trained ones, of the sum, the noisy gradient and Adam's
        two states.
        """
        return self.weight_bytes * self.parameters + 4 * 4 * self.trained

    @property
    def example_bytes(self) -> float:
        """The bytes of one example's pass: no chunk can be smaller."""
        return BYTES_PER_ACTIVATION * self.layers * self.width * self.positions

    @property
    def ledger_bytes(self) -> float:
        """The bytes of every process's ledger if only the trace is tracked: rows and norm history
        of all examples.
        """
        return self.examples * (Ledger.bytes_needed(1, 1) + NormHistory.bytes_needed(1))


MODELS_READ_OUT = {
    "10⁸, all trained, float32": {
        "parameters": 1e8,
        "trained": 1e8,
        "layers": 12,
        "width": 832,
        "weight_bytes": 4,
    },
    "10¹⁰, LoRA (0.2 % trained), bfloat16": {
        "parameters": 1e10,
        "trained": 2e7,
        "layers": 40,
        "width": 4564,
        "weight_bytes": 2,
    },
}
BANDWIDTHS = {
    1: 1.0,
    8: 300e9,
    64: 40e9,
}  # bytes per second, not measured: NVLink in a machine, 400 Gb/s between machines


def tables(float32: Constants, bfloat16: Constants) -> str:
    """Time, memory and messages at other sizes, as Markdown."""
    lines = [
        "| model | examples | GPUs | a step | a pass | model + one example | ledger, each process "
        "| gradients, a step | accounting, a step |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for title, model in MODELS_READ_OUT.items():
        for examples in (1e6, 1e8, 1e9):
            for ranks, bandwidth in BANDWIDTHS.items():
                size = Size(examples=examples, ranks=ranks, **model)  # type: ignore[arg-type]
                seconds = size.step_seconds(
                    float32 if model["weight_bytes"] == 4 else bfloat16, bandwidth
                )
                cells = [title, f"{examples:.0e}".replace("e+0", "e"), str(ranks), _time(seconds)]
                cells += [
                    _time(seconds * examples / size.batch),
                    _bytes(size.model_bytes + size.example_bytes),
                ]
                cells += [
                    _bytes(size.ledger_bytes),
                    _bytes(size.gradient_bytes),
                    _bytes(size.accounting_bytes),
                ]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _time(seconds: float) -> str:
    for unit, name in ((86400 * 365, "years"), (86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:,.1f} {name}"
    return f"{seconds:.2g} s"


def _bytes(count: float) -> str:
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:.0f} B"


def main() -> None:
    """Print constants, residuals and tables."""
    measured = measured_in_float32()
    float32, bfloat16 = fitted(measured)
    for name, constants, rows in (
        ("float32", float32, measured),
        ("bfloat16", bfloat16, IN_BFLOAT16),
    ):
        print(f"{name}: {constants}")
        for each, ratio in zip(rows, constants.ratios(rows), strict=True):
            print(
                f"  {each.title}, {each.probes} probes: {1e3 * each.seconds:.3g} ms, formula "
                f"{ratio:.2f} times that"
            )
    print(
        f"one example: {BYTES_PER_ACTIVATION:.0f} bytes by layer, width and position\n\n"
        f"{tables(float32, bfloat16)}"
    )


if __name__ == "__main__":
    main()
