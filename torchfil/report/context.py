"""The material of a page, and what kind of run it is about.

A training run, the mean over several (``about["merged"]``), or a linear model's release (``about["kind"]``): what is
random, and how certain the numbers are, differs. All blocks of the page take these words from here.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from torchfil.gate.policy import Policy
from torchfil.gate.rules import Verdict
from torchfil.report.signature import Signature
from torchfil.report.summary import Summary
from torchfil.run.baselines import blind_error_of_inputs, exposed_examples
from torchfil.run.saved_run import SavedRun

__all__ = ["Report", "named_level"]


@dataclass(frozen=True)
class Report:
    """The material of a page.

    Attributes:
        summary: Aggregates.
        run: The run; None where the page is redacted, so that nothing can show an example.
        files: The names of the files beside the page and what they hold.
        notes: Files that could not be written, and why.
        digests: SHA-256 of files beside the page, by name.
        verdicts: What the rules of a policy found; None where no policy was given.
        policy: The policy.
        signature: Who signed the run; None: nobody.
    """

    summary: Summary
    run: SavedRun | None
    files: dict[str, str]
    notes: list[str]
    digests: dict[str, str]
    verdicts: list[Verdict] | None = None
    policy: Policy | None = None
    signature: Signature | None = None

    def about(self, *path: str) -> Any:
        """A value of ``summary.about`` by its path; None where it is not there."""
        value: Any = self.summary.about
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    @property
    def is_linear(self) -> bool:
        """Whether the page is about a linear model's release."""
        return bool(self.about("kind") == "linear")

    @property
    def runs(self) -> int:
        """Over how many runs the numbers are means; 1: one run."""
        count = self.about("merged", "runs")
        return count if isinstance(count, int) and count > 1 else 1

    @property
    def origin(self) -> str:
        """Where a number comes from, after "that is"."""
        if self.is_linear:
            return "computed in closed form, without error"
        return "an estimate from one run" if self.runs == 1 else f"an estimate from {self.runs} runs together"

    @property
    def over(self) -> str:
        """What means are taken over, after "on average"."""
        return "over the noise that is added to the weights" if self.is_linear else "over repeated trainings"

    @property
    def randomness(self) -> str:
        """What is random, after "what is random is"."""
        return "the noise that is added to the weights" if self.is_linear else "the run: its batches and its noise"

    @property
    def sigma(self) -> float | None:
        """The noise that the run was trained with; None where it is not known or there was none."""
        for name in ("noise_multiplier", "sigma"):
            sigma = self.about("mechanism", name)
            if isinstance(sigma, int | float) and 0 < sigma < math.inf:
                return float(sigma)
        return None

    @property
    def blind_error(self) -> float | None:
        """What a blind guess of an input is off by; None: not known, or private and this is the public version."""
        if self.run is None:
            return None if self.summary.guess is None else math.sqrt(self.summary.guess)
        return blind_error_of_inputs(self.run, None if self.policy is None else self.policy.blind_error)

    @property
    def num_measured(self) -> int:
        """How many examples were measured; in public, where that would tell of few, how many there are."""
        unmeasured = self.summary.not_measured
        return self.summary.examples - (unmeasured if isinstance(unmeasured, int) else 0)

    @functools.cached_property
    def exposed_rows(self) -> np.ndarray:
        """Who is exposed, [n] booleans; nobody where no blind guess is known. Not of a public page."""
        assert self.run is not None
        exposed = exposed_examples(self.run, self.blind_error)
        return np.zeros(len(self.run), dtype=bool) if exposed is None else exposed

    @functools.cached_property
    def num_exposed(self) -> int | str | None:
        """How many are exposed; rounded or in words in the public version; None: not known."""
        if self.run is None:
            return self.summary.exposed
        return None if self.blind_error is None else int(self.exposed_rows.sum())

    def tabled_run(self) -> SavedRun:
        """The run as tables of examples show it: without lower ends where bounds are exact, and so their own."""
        assert self.run is not None
        if not self.is_linear:
            return self.run
        columns = {name: values for name, values in self.run.columns.items() if name != "mse_bound_low"}
        return replace(self.run, columns=columns)


def named_level(level: float, summary: Summary) -> str:
    """A level of exposure in words: "5 % are more exposed", or in public "the 10 most exposed together"."""
    if level == 0:
        return f"the {summary.smallest} most exposed together" if summary.redacted else "the most exposed"
    return "half are more exposed" if level == 0.5 else f"{100 * level:g} % are more exposed"
