"""A run's leakage in the dashboards that teams already have: TensorBoard, Weights & Biases, MLflow
and Aim.

Dashboards are shared, so that by default nothing in them is about few people: counts of at least
``min_group`` examples on scales that were fixed beforehand, and no two of them, of whatever steps,
differ by fewer (:mod:`torchfil.run.disclosure`).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from torchfil.engine import FILPrivacyEngine
from torchfil.engine.reading import check_delta
from torchfil.engine.saving.build import Kept
from torchfil.engine.watching import surviving
from torchfil.report.charts import TONES
from torchfil.report.summary import FALSE_POSITIVE_RATE
from torchfil.run import baselines
from torchfil.run.disclosure import CountSeries, Levels, smallest_group
from torchfil.run.saved_run import SavedRun

__all__ = ["LeakageLogger", "writer_of"]

Write = Callable[[dict[str, float], int], None]

EXPONENTS = np.arange(-64, 65) / 8  # of the bounds' scale, which has eight steps a factor of ten
RATES = (0.05, 0.1, 0.5)
QUANTILES = (0.05, 0.5, 0.95)
_BOUNDS, _CLASSES, _QUESTION = "bounds", "classes", "question "


# ---------------------------------------------------------------------- what is logged


def levels_of(run: SavedRun) -> dict[str, Levels]:
    """Every example's class of exposure, rates at questions and MSE bound (lower end), on fixed
    scales.
    """
    told, exposure, n = baselines.is_told(run), baselines.exposure_of(run), len(run)
    levels = {} if exposure is None else {_CLASSES: Levels(exposure, len(TONES))}
    for question in run.questions:  # of the measured ones, as on the page
        rates = np.where(
            baselines.status_of(run) < baselines.NOT_MEASURED,
            question.rate(FALSE_POSITIVE_RATE),
            0.0,
        )
        levels[_QUESTION + question.name] = Levels(np.searchsorted(RATES, rates), len(RATES) + 1)
    low = run.lower_ends
    with np.errstate(divide="ignore"):
        places = np.searchsorted(EXPONENTS, np.log10(low, where=told, out=np.zeros(n)) - 1e-9)
    levels[_BOUNDS] = Levels(
        np.where(told, places, len(EXPONENTS) + 1), len(EXPONENTS) + 2, with_empty=False
    )
    return levels


def point_of(counts: Mapping[str, Mapping[int, int]], n: int, multiple: int) -> dict[str, float]:
    """Shares and quantiles that follow from counts: by name, level ↦ examples at most there, of n.

    Counts were rounded to multiples of ``multiple``, except 0 and n. A quantile holds whatever they
    were before.

    ``share/half``, ``share/below``, ``share/beyond`` and ``share/untold`` are the four classes of
    exposure; ``mse_bound_quantile/0.05`` is a number that the lower ends of the bounds of 95 % of
    the told examples exceed; ``question/NAME/share_above_0.1`` is the share of examples about whom
    any attacker is right in more than 10 % of the cases where it is wrong in 1 %, at most.
    """
    scalars = dict[str, float]()
    for name, known in counts.items():
        if name.startswith(_QUESTION):
            asked = f"question/{name.removeprefix(_QUESTION)}/share_above_"
            scalars |= {
                f"{asked}{RATES[level]:g}": max(0.0, 1 - some / n) for level, some in known.items()
            }
    classes = {-1: 0, **counts[_CLASSES], len(TONES) - 1: n} if _CLASSES in counts else {}
    for level, tone in TONES.items():
        if {level - 1, level} <= classes.keys():
            scalars[f"share/{tone}"] = max(0.0, (classes[level] - classes[level - 1]) / n)
    return scalars | _quantiles(dict(counts.get(_BOUNDS, {})), n, multiple / 2)


def _quantiles(cumulative: dict[int, int], n: int, off: float) -> dict[str, float]:
    """Quantiles of the bounds, none without the count of the told examples.

    A count may be wrong by ``off``.

    A quantile is the lower edge of its bin, and none is told for the first bin, which has no lower
    edge.
    """
    told = cumulative.pop(len(EXPONENTS), None)
    if told is None:
        return {}
    first = max((level for level, some in cumulative.items() if some == 0), default=0)
    inner = {EXPONENTS[level]: some for level, some in cumulative.items() if first <= level}
    scalars = dict[str, float]()
    for level in QUANTILES:
        least = told - off * (told < n)
        below = [edge for edge, some in inner.items() if some + off * (some > 0) <= level * least]
        scalars |= {f"mse_bound_quantile/{level:g}": float(10 ** max(below))} if below else {}
    return scalars


# ---------------------------------------------------------------------- where it goes


def writer_of(writer: Any) -> Write:
    """A function that writes numbers to a dashboard, found by the methods that it has."""

    def tensorboard(numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)

    def wandb(numbers: dict[str, float], step: int) -> None:
        # with steps of their own: those of the run belong to whoever logs the loss
        for name in numbers:
            # * ends a pattern
            writer.define_metric(re.sub(r"\*.+", "*", name), step_metric="private_steps")
        writer.log({**numbers, "private_steps": step})

    def mlflow(numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            # names stay different
            plain = re.sub(r"[^\w\-. /]|(?<=/)[./]", lambda sign: f"_{ord(sign[0]):x}", name)
            writer.log_metric(plain, value, step=step)

    def aim(numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            writer.track(value, name=name, step=step)

    kinds = {"add_scalar": tensorboard, "define_metric": wandb, "log_dict": mlflow, "track": aim}
    if hasattr(writer, "log_metrics") and not hasattr(writer, "log_dict"):
        return writer.log_metrics  # a logger of Lightning
    if hasattr(writer, "create_run"):
        raise ValueError("an MlflowClient does not know the run; pass the module mlflow")
    for method, write in kinds.items():
        if hasattr(writer, method):
            return write
    if not callable(writer):
        raise ValueError(
            f"writer {type(writer).__name__} has no way to log that is known; pass a "
            "SummaryWriter, a W&B run, mlflow, an Aim run, a logger of Lightning, or a function "
            "of (numbers, step)"
        )
    return writer


# ---------------------------------------------------------------------- when


class LeakageLogger:
    """Logs a run's leakage while it trains.

    In use::

        with torchfil.LeakageLogger(SummaryWriter(), delta=1e-5).attach(engine):
            ...  # the loop

    With Lightning and Hugging Face, pass it to ``FILCallback(logger=…)`` or
    ``FILTrainer(logger=…)``, and give no writers: it uses those of the trainer (``report_to``).

    Guarantees:
        * ε is that of :meth:`FILPrivacyEngine.get_epsilon`: it binds every attacker. The bounds
          bind unbiased attackers, on average over runs; they are lower ends of 95 % intervals from
          this run so far.
        * No value, minimum or maximum of single examples. Every count, and every difference of two
          counts of whatever steps, rests on nobody or on ``min_group`` examples or more; what does
          not is left out, so that a series may have gaps.
        * Training is the same with and without it. A writer that fails is a warning, once for each
          cause, and neither ends the training nor keeps points from the other writers; it is tried
          again at the next point.

    Args:
        *writers: Where to log: TensorBoard's ``SummaryWriter``, a W&B run, the module ``mlflow``,
            an Aim run, a Lightning logger, or any function of (numbers, step).
        delta: δ of ε.
        every: Private steps between two points; None: about one pass over the data.
        min_group: m, the least number of examples behind a number.
        prefix: Prepended to every name.
    """

    def __init__(
        self,
        *writers: object,
        delta: float,
        every: int | None = None,
        min_group: int = 10,
        prefix: str = "privacy/",
    ) -> None:
        check_delta(delta)
        self.writers = [_Surviving(writer) for writer in writers]
        self.delta, self.every, self.min_group, self.prefix = delta, every, min_group, prefix
        self._series, self._kept = CountSeries(smallest_group(True, min_group)), Kept()
        self._engine: FILPrivacyEngine | None = None
        self._stop: Callable[[], None] = lambda: None

    def attach(self, engine: FILPrivacyEngine, *writers: object) -> LeakageLogger:
        """Log this run from now on; call it after ``make_private``. A logger serves one run.

        Args:
            engine: The run's engine; on all ranks, of which rank 0 logs.
            *writers: More of them.
        """
        if not (self._engine is None and self._kept == Kept()):
            raise ValueError("this logger belongs to a run already; make one for each run")
        self.writers += [_Surviving(writer) for writer in writers]
        if not self.writers:
            raise ValueError("LeakageLogger has no writer; pass one, such as SummaryWriter()")
        steps = (
            max(1, round(1 / engine._training.sample_rate)) if self.every is None else self.every
        )
        self._stop = engine.call_every(
            steps, surviving("LeakageLogger logged nothing", lambda _: self._log())
        )
        self._engine = engine
        return self

    def _log(self) -> None:
        """Log a point, on the rank that writes."""
        engine = self._engine
        if engine is None or engine.ledger is None:
            return
        step = engine.ledger.steps
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # at every point they would say the same
            run = engine._saved_run("LeakageLogger", self.delta, kept=self._kept, records=False)
        if run is None:
            return
        levels = levels_of(run)
        counts = self._series.publish(levels)
        numbers = {"epsilon": run.about["epsilon"], **point_of(counts, len(run), self.min_group)}
        for writer in self.writers:
            writer.write(
                step, {f"{self.prefix}{name}": float(value) for name, value in numbers.items()}
            )

    def close(self) -> None:
        """Log the last point, and let go of the run; on all ranks."""
        self._stop()
        self._log()
        self._engine = None

    def __enter__(self) -> LeakageLogger:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is not None:  # what went wrong is not to be hidden by an error of a last point
            self._engine = None
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """What was published, for a checkpoint: a resumed run must not publish counts that differ
        by a few.
        """
        kept = self._series.kept
        return {"published": [(torch.from_numpy(codes), sets.tolist()) for codes, sets in kept]}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """The inverse of :meth:`state_dict`; None: nothing was published."""
        kept = state["published"] if state else []
        self._series.kept = [(codes.cpu().numpy(), np.asarray(sets)) for codes, sets in kept]


class _Surviving:
    """A writer whose failure is a warning, once for each cause."""

    def __init__(self, writer: object) -> None:
        write = writer_of(writer)
        self.write = surviving(
            f"writing to {writer!r} failed", lambda step, numbers: write(numbers, step)
        )
