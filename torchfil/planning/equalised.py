"""What :func:`torchfil.equalise` did: the weights, every round of training, and what it cost."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from torchfil.accounting.leakage import Leakage

__all__ = ["HELD_FIXED", "Equalised", "Round", "Stopped"]

Stopped = Literal["target met", "no further progress", "floor", "max_rounds"]

HELD_FIXED = (
    "The clip weights were computed from private data and are held fixed in these bounds and in a round's ε, as in "
    "IRFIL: they do not include what the weights themselves reveal about an example. Keep weights and pilot models as "
    "confidential as the data. Alternatives: by= (weights that are functions of public attributes), or quote ε of all "
    "rounds together (epsilon_of_all_rounds)."
)

_REASONS = {
    "target met": "the rounds met it, but the reported runs do not: a larger margin= leaves room for chance",
    "no further progress": "two rounds in a row did not help; raise margin=, or the noise",
    "floor": "no weight would change further; lower floor= or the target, or raise the noise",
    "max_rounds": "all rounds are used up; raise max_rounds=, or the noise",
}


@dataclass(frozen=True)
class Round:
    """One training, and how it treated the most exposed.

    Attributes:
        worst: The smallest MSE bound (unbiased attackers), or the largest true-positive rate of a question (every
            attacker), as estimated from this run; its batches and its noise are random.
        worst_end: The same at the conservative ends of the intervals; ``worst`` itself with ``confidence=None``.
        spread: The standard deviation of FIL (of a question: of sqrt(D)) over examples, over its mean.
        num_below: For how many examples the (conservative) number misses the target.
        num_spared: How many were trained with ω < 1.
        smallest_weight: The smallest ω.
        mean_weight: The mean ω.
        group_ratio: The largest over the smallest of the groups' mean FIL (of a question: mean D); None: no groups.
        group_means: Those means, by group.
        without_interval: How many measured examples have no interval and count by their estimate.
        score: What ``train`` returned besides the engine, for example the accuracy.
        epsilon: ε of this run alone, at the given δ, with its weights held fixed.
        seconds: How long it took.
        fresh: Whether the weights had been chosen before, and nothing was chosen from this run.
    """

    worst: float
    worst_end: float
    spread: float
    num_below: int
    num_spared: int
    smallest_weight: float
    mean_weight: float
    group_ratio: float | None
    group_means: Mapping[Hashable, float]
    without_interval: int
    score: float | None
    epsilon: float | None
    seconds: float
    fresh: bool = False


@dataclass(frozen=True)
class Equalised:
    """Clip weights, the run trained with them, and how they were found; ``str()`` gives a table.

    **The weights depend on the data and are held fixed in every number here**, as in IRFIL; see
    :func:`torchfil.equalise` for ways to deal with that.

    Attributes:
        weights: ω, [n], in the order of the data set, float64; those that ``engine`` was trained with. Confidential.
        engine: The engine that ``train`` returned for them, from the best round: the one in which the fewest examples
            missed the target, or the last one if the target was met.
        leakage: What is reported: that engine's totals, or the average over ``fresh_runs``.
        met: Whether what is reported meets the target (and the groups' ratio).
        stopped: Why the rounds ended.
        target: The target bound (or true-positive rate); None: only groups.
        worst: The smallest bound (or largest true-positive rate) reported.
        worst_end: Its conservative end.
        chosen: The round that ``weights`` and ``engine`` come from.
        history: All rounds, fresh ones last.
        next_weights: The weights of another round: pass them as ``weights=`` to continue.
        epsilon_of_all_rounds: ε of all rounds together, fresh ones included, as if every model was released; None
            without δ, and for rounds of different noise with the "gdp" accountant.
        question: The question; None: Fisher information.
        fil_before: η̄ of every example in the first round, [n], NaN if it was not measured; None if that round
            already had weights.
    """

    weights: Tensor
    engine: Any
    leakage: Leakage
    met: bool
    stopped: Stopped
    target: float | None
    worst: float
    worst_end: float
    chosen: Round = field(repr=False)
    history: tuple[Round, ...] = field(repr=False)
    next_weights: Tensor = field(repr=False)
    epsilon_of_all_rounds: float | None = None
    question: str | None = None
    fil_before: Tensor | None = field(default=None, repr=False)

    @property
    def num_spared(self) -> int:
        """How many examples have ω < 1."""
        return int((self.weights < 1).sum())

    @property
    def seconds(self) -> float:
        """The duration of all rounds."""
        return sum(each.seconds for each in self.history)

    def __str__(self) -> str:
        binds = "smallest MSE bound (unbiased attackers)"
        if self.question is not None:
            binds = f"largest true-positive rate on {self.question!r} (every attacker)"
        aim = "" if self.target is None else f", target {self.target:.4g}"
        ratio = self.chosen.group_ratio
        groups = [] if ratio is None else [f"groups: the largest mean over the smallest is {ratio:.3f}"]
        fresh = sum(each.fresh for each in self.history)
        source = f"from {fresh} fresh run{'s' * (fresh > 1)}" if fresh else "from the run trained with these weights"
        lines = [
            f"{binds}: {self.worst:.4g}, conservative end {self.worst_end:.4g}{aim}; {source}",
            *groups,
            "the target is met" if self.met else f"the target is not met: {_REASONS[self.stopped]}",
            f"{self.num_spared} of {len(self.weights)} examples are spared (ω < 1)",
            *_table(self.history),
            f"{len(self.history)} trainings, {self.seconds:.0f} s",
        ]
        if self.epsilon_of_all_rounds is not None:
            lines.append(f"ε of all {len(self.history)} rounds together: {self.epsilon_of_all_rounds:.3g}")
        return "\n".join([*lines, HELD_FIXED])


# title, and the value of a round; a column is left out if every round has None
_COLUMNS: Sequence[tuple[str, Callable[[Round], str | None]]] = (
    ("worst", lambda each: f"{each.worst:.4g}"),
    ("its end", lambda each: f"{each.worst_end:.4g}"),
    ("short of target", lambda each: f"{each.num_below}"),
    ("spread", lambda each: f"{each.spread:.3f}"),
    ("spared", lambda each: f"{each.num_spared}"),
    ("smallest ω", lambda each: f"{each.smallest_weight:.3f}"),
    ("group ratio", lambda each: None if each.group_ratio is None else f"{each.group_ratio:.3f}"),
    ("score", lambda each: None if each.score is None else f"{each.score:.4f}"),
    ("ε", lambda each: None if each.epsilon is None else f"{each.epsilon:.3g}"),
    ("seconds", lambda each: f"{each.seconds:.0f}"),
)


def _table(history: Sequence[Round]) -> list[str]:
    """The rounds, one per line under their titles."""
    rows = [["round", *(title for title, _ in _COLUMNS)]]
    for number, each in enumerate(history, 1):
        rows.append([f"{number}{' fresh' if each.fresh else ''}", *(show(each) or "" for _, show in _COLUMNS)])
    kept = [column for column in zip(*rows, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in kept]
    return [
        "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in zip(*kept, strict=True)
    ]
