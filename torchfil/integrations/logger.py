"""A run's leakage in the dashboards that teams already have: TensorBoard, Weights & Biases, MLflow and Aim.

Dashboards are shared, so that by default nothing in them is about few people: counts of at least ``min_group`` examples
on scales that were fixed beforehand, and no two of them, of whatever steps, differ by fewer
(:mod:`torchfil.run.series`).
"""

from __future__ import annotations

import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchfil.engine import FILPrivacyEngine
from torchfil.engine.reading import check_delta
from torchfil.engine.saving.build import Kept, check_options
from torchfil.engine.watching import surviving
from torchfil.report.charts import TONES
from torchfil.report.page import write_report
from torchfil.report.summary import FALSE_POSITIVE_RATE, Summary
from torchfil.run import baselines
from torchfil.run.saved_run import SavedRun
from torchfil.run.series import CountSeries, Levels
from torchfil.utils.errors import require

__all__ = ["Calls", "LeakageLogger", "sinks_of"]

EXPONENTS = np.arange(-64, 65) / 8  # of the bounds' scale, which has eight steps a factor of ten
RATES = (0.05, 0.1, 0.5)
QUANTILES = (0.05, 0.5, 0.95)
_BOUNDS, _CLASSES, _QUESTION, _WITHHELD = "bounds", "classes", "question ", "not told"
_NAME = "leakage-report"


# ---------------------------------------------------------------------- what is logged


def levels_of(run: SavedRun) -> dict[str, Levels]:
    """Every example's class of exposure, rates at questions and MSE bound (lower end), on fixed scales."""
    told, exposure, n = baselines.is_told(run), baselines.exposure_of(run), len(run)
    levels = {} if exposure is None else {_CLASSES: Levels(exposure, len(TONES))}
    for question in run.questions:  # of the measured ones, as on the page
        rates = np.where(baselines.status_of(run) < baselines.NOT_MEASURED, question.rate(FALSE_POSITIVE_RATE), 0.0)
        levels[_QUESTION + question.name] = Levels(np.searchsorted(RATES, rates), len(RATES) + 1)
    low = np.asarray(run.columns.get("mse_bound_low", run.column("mse_bound")), dtype=np.float64)
    with np.errstate(divide="ignore"):
        places = np.searchsorted(EXPONENTS, np.log10(low, where=told, out=np.zeros(n)) - 1e-9)
    levels[_BOUNDS] = Levels(np.where(told, places, len(EXPONENTS) + 1), len(EXPONENTS) + 2, with_empty=False)
    return levels


def point_of(
    counts: Mapping[str, Mapping[int, int]], n: int, multiple: int = 0
) -> tuple[dict[str, float], np.ndarray, np.ndarray]:
    """Shares and quantiles, and the histogram that follow from counts: by name, level ↦ examples at most there, of n.

    Counts were rounded to multiples of ``multiple`` (0: they are exact), except 0 and n. A quantile holds whatever they
    were before. Without a count of the told examples there is neither a quantile nor a histogram.

    ``share/half``, ``share/below``, ``share/beyond`` and ``share/untold`` are the four classes of exposure;
    ``mse_bound_quantile/0.05`` is a number that the lower ends of the bounds of 95 % of the told examples exceed;
    ``question/NAME/share_above_0.1`` is the share of examples about whom any attacker is right in more than 10 % of the
    cases where it is wrong in 1 %, at most.

    The histogram is of log10 of the lower ends: edges [k + 1] and counts [k], none if k = 0. Its outer bins are open,
    and drawn half a factor of ten wide.
    """
    scalars = dict[str, float]()
    for name, known in counts.items():
        if name == _CLASSES:
            nested = {-1: 0, **known, len(TONES) - 1: n}
            pairs = {level: (nested.get(level - 1), nested.get(level)) for level in TONES}
            shares = {TONES[level]: (b - a) / n for level, (a, b) in pairs.items() if a is not None and b is not None}
            scalars |= {f"share/{tone}": max(0.0, share) for tone, share in shares.items()}
        elif name.startswith(_QUESTION):
            asked = f"question/{name.removeprefix(_QUESTION)}/share_above_"
            scalars |= {f"{asked}{RATES[level]:g}": max(0.0, 1 - some / n) for level, some in known.items()}

    # a quantile is the lower edge of its bin, and none is told for the first bin, which has no lower edge
    cumulative = dict(counts.get(_BOUNDS, {}))
    told = cumulative.pop(len(EXPONENTS), None)
    first = max((level for level, some in cumulative.items() if some == 0), default=0)
    last = min((level for level, some in cumulative.items() if some == told), default=len(EXPONENTS))
    inner = {EXPONENTS[level]: some for level, some in cumulative.items() if first <= level <= last}
    if not inner or told is None:
        return scalars, np.zeros(0), np.zeros(0)
    off = multiple / 2  # by which a rounded count may be wrong
    for level in QUANTILES:
        least = told - off * (told < n)
        below = [edge for edge, some in inner.items() if some + off * (some > 0) <= level * least]
        scalars |= {f"mse_bound_quantile/{level:g}": float(10 ** max(below))} if below else {}
    edges = np.asarray([min(inner) - 0.5, *inner, max(inner) + 0.5])
    return scalars, edges, np.maximum(np.diff([0, *inner.values(), told]), 0)


def _withheld(summary: Summary, counts: Mapping[str, Mapping[int, int]]) -> Summary:
    """The summary of a public page without counts that would differ by a few examples from one in the log.

    That nobody is counted may be told: the empty set is among those that were published.
    """
    known = {-1: 0, **counts.get(_CLASSES, {}), len(TONES) - 1: summary.examples}

    def question(name: str, above: Mapping[str, int | str]) -> dict[str, int | str]:
        told = [f"{RATES[level]:g}" for level in counts.get(_QUESTION + name, ())]
        return {level: count if level in told else _WITHHELD for level, count in above.items()}

    return replace(
        summary,
        not_measured=summary.not_measured and _WITHHELD,
        lower_bounds=summary.lower_bounds and _WITHHELD,
        classes={each: n if {each - 1, each} <= known.keys() else _WITHHELD for each, n in summary.classes.items()},
        exposed=summary.exposed if baselines.BELOW in known else None,
        mse_histogram=None,
        ratio_histogram=None,
        epsilon_histogram=None,
        attributes=[replace(each, exposed=each.exposed and _WITHHELD) for each in summary.attributes],
        attacks=[
            replace(each, violated=each.violated and _WITHHELD, below=None, blind_below=None)
            for each in summary.attacks
        ],
        questions=[replace(each, above=question(each.name, each.above)) for each in summary.questions],
        groupings=[
            replace(each, groups=[replace(group, measured=_WITHHELD) for group in each.groups])
            for each in summary.groupings
        ],
        spared=summary.spared and replace(summary.spared, examples=summary.spared.examples and _WITHHELD, rounds={}),
    )


# ---------------------------------------------------------------------- where it goes


class Calls:
    """Any function of (numbers, step).

    Args:
        writer: What logs.
        *first: What its methods take first.
    """

    def __init__(self, writer: Any, *first: Any) -> None:
        self.writer, self.first = writer, first
        self.surviving = surviving(f"writing to {writer!r} failed", lambda _, write, *args: write(*args))

    def scalars(self, numbers: dict[str, float], step: int) -> None:
        """Log numbers by name."""
        self.writer(numbers, step)

    def histogram(self, name: str, edges: np.ndarray, counts: np.ndarray, step: int) -> None:
        """Log counts between edges, [k] and [k + 1]; a function has no place for them."""

    def folder(self, path: Path) -> None:
        """Keep the files of a folder; a function has no place for them."""


class _TensorBoard(Calls):
    def scalars(self, numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def histogram(self, name: str, edges: np.ndarray, counts: np.ndarray, step: int) -> None:
        middles = (edges[:-1] + edges[1:]) / 2  # TensorBoard's own sums would come from the values
        sums = {"num": int(counts.sum()), "sum": float(counts @ middles), "sum_squares": float(counts @ middles**2)}
        bins = {"bucket_limits": edges[1:].tolist(), "bucket_counts": counts.tolist()}
        self.writer.add_histogram_raw(name, min=edges[0], max=edges[-1], **sums, **bins, global_step=step)

    def folder(self, path: Path) -> None:
        target = Path(self.writer.log_dir) / _NAME
        shutil.rmtree(target, ignore_errors=True)  # an earlier one may be confidential
        shutil.copytree(path, target)
        self.writer.add_text(_NAME, f"The report is {target / 'index.html'}.")


class _WandB(Calls):
    def scalars(self, numbers: dict[str, float], step: int) -> None:
        for name in numbers:  # with steps of their own: those of the run belong to whoever logs the loss
            self.writer.define_metric(re.sub(r"\*.+", "*", name), step_metric="private_steps")  # * ends a pattern
        self.writer.log({**numbers, "private_steps": step})

    def histogram(self, name: str, edges: np.ndarray, counts: np.ndarray, step: int) -> None:
        import wandb

        bins: Any = (counts.tolist(), edges.tolist())
        self.writer.log({name: wandb.Histogram(np_histogram=bins)}, commit=False)  # its row is that of the numbers

    def folder(self, path: Path) -> None:
        import wandb

        artifact = wandb.Artifact(_NAME, type="report")
        artifact.add_dir(str(path))
        self.writer.log_artifact(artifact)


class _MLflow(Calls):
    """The module or a client, which takes the run's id first."""

    def scalars(self, numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            plain = re.sub(r"[^\w\-. /]|(?<=/)[./]", lambda sign: f"_{ord(sign[0]):x}", name)  # names stay different
            self.writer.log_metric(*self.first, plain, value, step=step)

    def histogram(self, name: str, edges: np.ndarray, counts: np.ndarray, step: int) -> None:
        self.writer.log_dict(*self.first, {"edges": edges.tolist(), "counts": counts.tolist()}, f"{name}/{step}.json")

    def folder(self, path: Path) -> None:
        self.writer.log_artifacts(*self.first, str(path), _NAME)


class _Aim(Calls):
    def scalars(self, numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            self.writer.track(value, name=name, step=step)

    def histogram(self, name: str, edges: np.ndarray, counts: np.ndarray, step: int) -> None:
        from aim import Distribution

        widths = np.rint(np.diff(edges) * 8).astype(int)  # Aim's bins have one width
        bins = Distribution(hist=np.repeat(counts / widths, widths), bin_range=(edges[0], edges[-1]))
        self.writer.track(bins, name=name, step=step)

    def folder(self, path: Path) -> None:
        self.writer.log_artifacts(str(path), _NAME)


def sinks_of(writer: Any) -> list[Calls]:
    """What writes to a dashboard, by the methods that it has; two for a logger of Lightning, one for its numbers."""
    kinds = {"add_histogram_raw": _TensorBoard, "define_metric": _WandB, "log_dict": _MLflow, "track": _Aim}
    if isinstance(writer, Calls):
        return [writer]
    remedy = "an MlflowClient does not know the run; pass the module mlflow, or a logger of Lightning"
    require(not hasattr(writer, "create_run"), remedy)
    for method, kind in kinds.items():
        if hasattr(writer, method):
            return [kind(writer)]
    if hasattr(writer, "log_metrics"):  # Lightning's, which knows the writer beneath
        beneath, first = getattr(writer, "experiment", None), getattr(writer, "run_id", None)
        found = [kind for method, kind in kinds.items() if hasattr(beneath, method)]
        return [kind(beneath, *[first] * (first is not None)) for kind in found[:1]] or [Calls(writer.log_metrics)]
    known = "a SummaryWriter, a W&B run, mlflow, an Aim run, a logger of Lightning, or a function of (numbers, step)"
    require(callable(writer), f"writer {type(writer).__name__} has no way to log that is known; pass {known}")
    return [Calls(writer)]


# ---------------------------------------------------------------------- when


class LeakageLogger:
    """Logs a run's leakage while it trains: scalars, a histogram, and at the end the report.

    In use::

        with torchfil.LeakageLogger(SummaryWriter(), delta=1e-5).attach(engine):
            ...  # the loop

    With Lightning and Hugging Face, pass it to ``FILCallback(logger=…)`` or ``FILTrainer(logger=…)``, and give no
    writers: it uses those of the trainer (``report_to``).

    Guarantees:
        * ε is that of :meth:`FILPrivacyEngine.get_epsilon`: it binds every attacker. The bounds bind unbiased
          attackers, on average over runs; they are lower ends of 95 % intervals from this run so far.
        * Redacted (the default): no value, minimum or maximum of single examples. Every count, and every difference of
          two counts of whatever steps, rests on nobody or on ``min_group`` examples or more; what does not is left
          out, so that a series may have gaps. The report is the public page, whose counts of examples keep this rule,
          except the sizes of groups, which do not depend on the training.
        * Training is the same with and without it. A writer that fails is a warning, once for each cause, and neither
          ends the training nor keeps points from the other writers; it is tried again at the next point.

    Args:
        *writers: Where to log: TensorBoard's ``SummaryWriter``, a W&B run, the module ``mlflow``, an Aim
            run, a Lightning logger, or any function of (numbers, step).
        delta: δ of ε.
        every: Private steps between two points; None: about one pass over the data.
        confidential: Whether exact counts, minimum and maximum, and the confidential report go into the log.
        min_group: m, the least number of examples behind a number.
        prefix: Prepended to every name.
        **options: Options of :meth:`FILPrivacyEngine.save_run` for the report.
    """

    def __init__(
        self,
        *writers: Any,
        delta: float,
        every: int | None = None,
        confidential: bool = False,
        min_group: int = 10,
        prefix: str = "privacy/",
        **options: Any,
    ) -> None:
        require(min_group >= 2, f"min_group={min_group} must be at least 2: a group of one is an example")
        check_delta(delta)
        check_options(options)
        if confidential:
            shared = "whoever reads the log learns about single examples; keep it as confidential as the data"
            warnings.warn(f"LeakageLogger(confidential=True): {shared}", stacklevel=2)
        self.sinks = [sink for writer in writers for sink in sinks_of(writer)]
        self.delta, self.every, self.confidential = delta, every, confidential
        self.min_group, self.prefix, self.options = min_group, prefix, options
        self._series, self._kept = CountSeries(min_group), dict[str, Any]()
        self._engine: FILPrivacyEngine | None = None
        self._stop: Callable[[], None] = lambda: None

    def attach(self, engine: FILPrivacyEngine, *writers: Any) -> LeakageLogger:
        """Log this run from now on; call it after ``make_private``. A logger serves one run.

        Args:
            engine: The run's engine; on all ranks, of which rank 0 logs.
            *writers: More of them.
        """
        require(self._engine is None and not self._kept, "this logger belongs to a run already; make one for each run")
        self.sinks += [sink for writer in writers for sink in sinks_of(writer)]
        require(bool(self.sinks), "LeakageLogger has no writer; pass one, such as SummaryWriter()")
        steps = max(1, round(1 / engine._training.sample_rate)) if self.every is None else self.every
        # a point has no need of what only the report shows
        self._stop = engine.call_every(
            steps, surviving("LeakageLogger logged nothing", lambda _: self._log(pictures=0, texts=None, attacks=()))
        )
        self._engine = engine
        return self

    def _log(self, **light: Any) -> tuple[SavedRun, dict[str, dict[int, int]]] | None:
        """Log a point; the run and what was published of it, or None on ranks that do not write."""
        engine = self._engine
        if engine is None or engine.ledger is None:
            return None
        step = engine.ledger.steps
        run = engine._saved_run("LeakageLogger", self.delta, kept=self._kept, **{**self.options, **light})
        if run is None:
            return None

        levels, own = levels_of(run), dict[str, float]()
        if self.confidential:
            cumulative = {name: np.bincount(each.codes, minlength=each.count).cumsum() for name, each in levels.items()}
            counts = {name: dict(enumerate(each.tolist()[:-1])) for name, each in cumulative.items()}
            own = {"smallest_mse_bound": run.column("mse_bound").min(), "largest_fil": run.column("fil").max()}
        else:
            counts = self._series.publish(levels)
        scalars, edges, heights = point_of(counts, len(run), 0 if self.confidential else self.min_group)
        numbers = {"epsilon": run.about["epsilon"], **own, **scalars}
        for sink in self.sinks:
            if len(heights):
                sink.surviving(step, sink.histogram, f"{self.prefix}log10_mse_bound", edges, heights, step)
            sink.surviving(step, sink.scalars, {f"{self.prefix}{name}": float(numbers[name]) for name in numbers}, step)
        return run, counts

    def close(self) -> None:
        """Log the last point and the report, and let go of the run; on all ranks."""
        self._stop()
        found, self._engine = self._log(), None
        if found is None:
            return
        run, counts = found
        public: Any = {"redacted": True, "min_group": self.min_group, "adjusted": partial(_withheld, counts=counts)}
        with tempfile.TemporaryDirectory() as folder:
            path = write_report(run, Path(folder) / _NAME, **({} if self.confidential else public)).parent
            for sink in self.sinks:
                sink.surviving(run.about["mechanism"]["steps"], sink.folder, path)

    def __enter__(self) -> LeakageLogger:
        return self

    def __exit__(self, kind: Any, *error: object) -> None:
        if kind is not None:  # what went wrong is not to be hidden by an error of the report
            self._engine = None
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """What was published, for a checkpoint: a resumed run must not publish counts that differ by a few."""
        kept = self._series.kept
        return {"published": [(torch.from_numpy(codes), sets.tolist()) for codes, sets in kept]}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """The inverse of :meth:`state_dict`; None: nothing was published."""
        kept = state["published"] if state else []
        self._series.kept = [(codes.cpu().numpy(), np.asarray(sets)) for codes, sets in kept]
