"""What would keep the policy: options, how many rules each would break, and its cost in the user's metric."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchfil.gate.policy import Policy
from torchfil.gate.rules import Verdict
from torchfil.run.saved_run import SavedRun


@dataclass(frozen=True)
class Option:
    """A change of the run.

    Attributes:
        change: What to change, e.g. "Noise σ = 2.7".
        broken: The titles of the rules that the prediction still breaks; empty: it keeps the policy.
        rules: How many rules the policy has.
        cost: What it costs in the user's metric, e.g. "accuracy 0.91 (now 0.93)", or "not measured".
    """

    change: str
    broken: list[str]
    rules: int
    cost: str


@dataclass(frozen=True)
class Options:
    """What would help.

    Attributes:
        rows: The options, the best first; empty where nothing need be done, or nothing is known to help.
        curve: (σ, the smallest ratio to a blind guess's error, whether it was measured), ascending in σ.
        limit: What the policy asks of that ratio; None: nothing.
        others: What helps with broken rules that no option keeps, a sentence each.
    """

    rows: list[Option] = field(default_factory=list)
    curve: list[tuple[float, float, bool]] = field(default_factory=list)
    limit: float | None = None
    others: list[str] = field(default_factory=list)


def options_of(run: SavedRun, policy: Policy, verdicts: list[Verdict]) -> Options:
    """The options for a run whose policy is broken; none where it is kept."""
    return Options()
