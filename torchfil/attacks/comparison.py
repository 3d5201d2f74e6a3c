"""Compares bounds and attacks: for each example, the least error in theory and the error that an
attack achieved.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import stats

from torchfil.accounting.ids import ExampleIds
from torchfil.attacks.base import AttackResult
from torchfil.run.saved_run import AttackRecord
from torchfil.utils.tables import as_table
from torchfil.viz.common import NEUTRAL, as_array, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HELD, BROKEN = "#0072B2", "#D55E00"


@dataclass(frozen=True, eq=False)
class BoundComparison:
    """The result of :func:`compare_with_bounds` by attacked example, [m] each.

    Confidential: depends on private data.

    Attributes:
        attack: The attack's result.
        predicted: The bound on the mean squared error per coordinate of an unbiased attacker.
        predicted_low: The lower end of its interval if it is an estimate, otherwise the bound
            itself.
        predicted_high: The upper end, likewise.
        achieved_low: The lower end of the interval of the achieved error.
        achieved_high: Its upper end; infinite if the attack is not testable.
        violated: Whether ``achieved_high`` lies below ``predicted_low``: below the bound beyond
            chance.
        confidence: The confidence of the intervals.
    """

    attack: AttackResult
    predicted: np.ndarray
    predicted_low: np.ndarray
    predicted_high: np.ndarray
    achieved_low: np.ndarray
    achieved_high: np.ndarray
    violated: np.ndarray
    confidence: float

    @property
    def ratio(self) -> np.ndarray:
        """Achieved over predicted: 1 meets the bound, [m]."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return self.attack.achieved / self.predicted

    @property
    def ratio_interval(self) -> tuple[np.ndarray, np.ndarray]:
        """The interval of the ratio, from the ends of both, [m] each.

        Entirely below 1 if the bound is violated.

        It covers with the confidence of the achieved error if the bound is exact; if the bound is
        an estimate, both intervals cover with probability 1 − 2·(1 − confidence) or more.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            return self.achieved_low / self.predicted_high, self.achieved_high / self.predicted_low

    @property
    def testable(self) -> bool:
        """Whether the attack could have broken a bound: it saw the model, in more than one trial.

        One trial does not show its own spread. An attacker who never saw the model guesses from the
        data, and comes below any bound that exceeds the data's spread; this says nothing about the
        model.
        """
        return not self.attack.untestable

    @property
    def verdicts(self) -> list[str]:
        """For each example "held", "violated" or "not testable", [m]."""
        if not self.testable:
            return ["not testable"] * len(self.violated)
        return ["violated" if broken else "held" for broken in self.violated]

    @property
    def violations(self) -> float:
        """The share of examples whose bound was broken beyond chance.

        NaN if that was not testable.
        """
        return float(self.violated.mean()) if self.testable else math.nan

    @property
    def share_below(self) -> float:
        """The share of examples whose achieved error lies below the bound, by chance or not."""
        return float((self.attack.achieved < self.predicted).mean())

    @property
    def blind_share_below(self) -> float:
        """The same for a guess without the model; NaN if it was not computed.

        If it is not smaller than :attr:`share_below`, falling below the bound is no achievement of
        the attack.
        """
        return (
            math.nan
            if self.attack.blind is None
            else float((self.attack.blind < self.predicted).mean())
        )

    def table(self) -> Any:
        """A pandas DataFrame by example id, or a dict of arrays if pandas is not installed."""
        columns = {"predicted": self.predicted, "achieved": self.attack.achieved}
        columns |= {
            "achieved_low": self.achieved_low,
            "achieved_high": self.achieved_high,
            "ratio": self.ratio,
        }
        columns |= dict(zip(("ratio_low", "ratio_high"), self.ratio_interval, strict=True))
        columns |= {"violated": self.violated, "verdict": np.asarray(self.verdicts)}
        optional = {"squared_bias": self.attack.squared_bias, "blind": self.attack.blind}
        columns |= {name: values for name, values in optional.items() if values is not None}
        return as_table(self.attack.ids, columns)

    def record(self, ids: Sequence[Hashable]) -> AttackRecord:
        """The comparison in the form of a saved run; ``engine.save_run(attacks=[…])`` calls this.

        Args:
            ids: The run's examples in their order.
        """
        places, attack = ExampleIds(len(ids), ids).places(self.attack.ids).numpy(), self.attack
        predicted, achieved = self.predicted.astype(np.float64), attack.achieved.astype(np.float64)
        blind = None if attack.blind is None else attack.blind.astype(np.float64)
        verdict = self.violated, self.testable, attack.untestable
        return AttackRecord(
            attack.name, attack.threat_model, places, predicted, achieved, *verdict, blind
        )

    def plot(self, *, title: str | None = None, blind: float | None = None) -> Figure:
        """Achieved error over bound, one dot per example, as in Guo et al. 2022, Figure 3.

        Needs matplotlib.

        Args:
            title: The figure's title; None: the attack's name.
            blind: The error of guessing without the model, drawn as a line.
        """
        # Logarithmic axes cannot show an infinite bound, or an error of 0.
        achieved = self.attack.achieved
        drawn = (
            np.isfinite(self.predicted)
            & np.isfinite(achieved)
            & (self.predicted > 0)
            & (achieved > 0)
        )

        figure = new_figure(6.4, 4.6, "constrained")
        axis = figure.subplots()
        untold = "bound held" if self.testable else f"not testable: {self.attack.untestable}"
        for chosen, colour, marker, label in (
            (drawn & ~self.violated, HELD if self.testable else NEUTRAL, "o", untold),
            (drawn & self.violated, BROKEN, "^", "below the bound beyond chance"),
        ):
            if chosen.any():
                style: dict[str, Any] = {"s": 7, "linewidths": 0, "alpha": 0.5, "rasterized": True}
                style |= {
                    "marker": marker,
                    "color": colour,
                    "label": f"{label} ({int(chosen.sum()):,})",
                }
                axis.scatter(self.predicted[chosen], achieved[chosen], **style)

        ends = [float(self.predicted[drawn].min()), float(self.predicted[drawn].max())]
        axis.plot(ends, ends, color=NEUTRAL, linewidth=1.3, label="the bound")
        if blind is not None:
            axis.axhline(
                blind,
                color=NEUTRAL,
                linestyle=":",
                linewidth=1.3,
                label=f"blind guess ({blind:.3g})",
            )

        axis.set(
            xscale="log",
            yscale="log",
            xlabel="bound on the MSE",
            ylabel="MSE that the attack achieved",
        )
        axis.set_title(self.attack.name if title is None else title, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize="small", loc="best")
        return figure


def compare_with_bounds(
    source: object,
    attack: AttackResult,
    *,
    confidence: float = 0.95,
    simultaneous: bool = False,
    **options: object,
) -> BoundComparison:
    """Compare the bound of every attacked example with the error that the attack achieved.

    A bound is violated if achieved + t·standard error < bound, with t the quantile of Student's
    distribution with ``trials`` − 1 degrees of freedom; if the bound is an estimate, its lower end
    counts.

    An example that a run has not measured has no bound that could be violated (NaN).

    The bound is about unbiased attackers. A biased one (who guesses the mean of all, or stays
    within a range) can go below it, especially if the bound exceeds the spread of the data.
    ``squared_bias`` in the table shows this, and ``blind`` shows what a guess without the model
    achieves. An attack that never saw the model is not testable.

    Args:
        source: The source of the bounds: a :class:`FILPrivacyEngine` or :class:`Leakage`, a fitted
            generalised linear model (with ``X``, ``y`` and more options of its ``mse_bound``), or
            the bounds themselves: a mapping by id, or one number for each attacked example, in
            order.
        attack: A result whose measure is "mse".
        confidence: The confidence of each interval.
        simultaneous: Whether the intervals hold for all examples together (Bonferroni): then a
            single violation is meaningful.
        **options: Options of the linear model's ``mse_bound``. ``sigma`` is the attack's own if
            that is known; ``private_target`` is False unless given, because a reconstruction's
            error is that of the inputs.

    Raises:
        ValueError: The attack's measure is not "mse", or the bounds do not fit its examples.
    """
    if attack.measure != "mse":
        raise ValueError(
            f"the attack's measure is {attack.measure!r}; a Fisher bound is about the 'mse'"
        )
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence} must lie strictly between 0 and 1")
    if np.isnan(attack.achieved).any():
        raise ValueError(
            "the attack's achieved error is NaN for some examples: it says nothing about their "
            "bounds"
        )

    level = 1 - (1 - confidence) / (len(attack.ids) if simultaneous else 1)
    predicted, predicted_low, predicted_high = _bounds(source, attack, level, options)

    # An attack that is not testable has an infinite interval, and violates no bound.
    width = np.full(len(predicted), np.inf)
    if attack.standard_error is not None and not attack.untestable:
        width = float(stats.t.ppf(0.5 + level / 2, attack.trials - 1)) * attack.standard_error
    low, high = np.maximum(attack.achieved - width, 0), attack.achieved + width
    violated = high < predicted_low
    return BoundComparison(
        attack, predicted, predicted_low, predicted_high, low, high, violated, confidence
    )


def _bounds(
    source: Any, attack: AttackResult, level: float, options: Mapping[str, Any]
) -> tuple[np.ndarray, ...]:
    """The bounds of the attacked examples and the ends of their intervals, [m] each."""
    if hasattr(source, "mse_bound"):
        values = _of_linear_model(source, attack, dict(options))
        return values, values, values

    if options:
        raise ValueError(f"unknown options {list(options)}: they apply only to linear models")
    if hasattr(source, "get_mse_bound"):
        estimate = source.get_mse_bound(attack.ids)
        low, high = estimate.interval(level)
        # unmeasured examples have no bound to violate
        measured = as_array(source.was_measured(attack.ids))
        return as_array(estimate.value), np.where(measured, as_array(low), 0.0), as_array(high)

    if isinstance(source, Mapping):
        source = [float(source[key]) for key in attack.ids]

    values, count = as_array(source).astype(np.float64), len(attack.ids)
    if values.shape != (count,):
        raise ValueError(
            f"{list(values.shape)} bounds for {count} attacked examples; give one for each"
        )
    if not (values >= 0).all():
        raise ValueError(f"bounds {values[~(values >= 0)][:5]} are negative or NaN")
    return values, values, values


def _of_linear_model(model: Any, attack: AttackResult, options: dict[str, Any]) -> np.ndarray:
    """The bounds of the attacked rows of the training set, [m]."""
    # a composition of releases has its own
    has_sigma = "sigma" in signature(model.mse_bound).parameters
    if has_sigma and attack.sigma is not None:
        sigma = options.setdefault("sigma", attack.sigma)
        if sigma != attack.sigma:
            raise ValueError(
                f"sigma={sigma}, but the attack was on releases of sigma={attack.sigma}"
            )
    missing = {"X", "y", *(["sigma"] if has_sigma else [])} - options.keys()
    if missing:
        raise ValueError(
            f"the bounds of a linear model need {sorted(missing)}: compare_with_bounds(model, "
            "attack, X=…, y=…, sigma=…)"
        )
    parts = [name for name in ("attributes", "groups") if options.get(name) is not None]
    if parts:
        raise ValueError(f"the attack guessed whole examples: their bounds take no {parts}")

    options.setdefault("private_target", False)
    values = as_array(model.mse_bound(**options))
    # the ids are row numbers of X
    return values[ExampleIds(len(values)).places(attack.ids).numpy()]
