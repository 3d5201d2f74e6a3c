"""Are one run's intervals valid? Many private runs on digits: each run's lower ends against the
mean of all runs.

The bound of an example is d / E[tr I], a mean over everything that is random in a run. Many runs
give that mean. Each run reports the lower end of a 95 % interval, which may lie above the bound for
at most 2.5 % of the examples. The same is checked for D of two questions (was the example in the
data; does it have the next label): there, the upper end may lie below the mean for at most 2.5 %.

OMP_NUM_THREADS=1 python -m benchmarks.coverage --runs 40
OMP_NUM_THREADS=1 python -m benchmarks.coverage --simulate --runs 60  # SGD, momentum, Adam
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from paper_data import small_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import simulated_runs
from torchfil import Accounting, FILPrivacyEngine
from torchfil.questions import Absent, Change

__all__ = ["Readings", "main", "readings_of"]

EXAMPLES, BATCH = 1000, 100
LEARNING_RATES = (0.5, 2.0)
PARTICIPATIONS = (10, 40)
QUESTIONS = {
    "member": Absent(),
    "label": Change(lambda inputs, targets: (inputs, (targets + 1) % 10)),
}


@dataclass
class Readings:
    """The results of runs for every example, one row per run.

    Attributes:
        trace: tr Î, [n] each.
        low: The lower end of the bound's 95 % interval; 0 if the run claims none.
        low_of_probes: The same for the probes' errors alone.
        attributes: I_jj, [n, d] each, if they were tracked.
        high_of_attributes: The upper ends of their intervals.
        divergences: D by question, [n] each.
        high_of_divergences: The upper ends of their intervals.
    """

    trace: list[Tensor] = field(default_factory=list)
    low: list[Tensor] = field(default_factory=list)
    low_of_probes: list[Tensor] = field(default_factory=list)
    attributes: list[Tensor] = field(default_factory=list)
    high_of_attributes: list[Tensor] = field(default_factory=list)
    divergences: dict[str, list[Tensor]] = field(default_factory=dict)
    high_of_divergences: dict[str, list[Tensor]] = field(default_factory=dict)

    def note(self, engine: FILPrivacyEngine) -> None:
        """Add the current results of a run."""
        bound = engine.get_mse_bound()
        self.trace.append(engine.totals.get_trace().value)
        self.low.append(bound.interval(0.95)[0])
        self.low_of_probes.append(bound.interval(0.95, "probes")[0])
        if "diagonal" in engine.totals.ledger.track:
            fil = engine.get_attribute_fil()
            self.attributes.append(fil.value.square().float())
            self.high_of_attributes.append(fil.interval(0.95)[1].square().float())
        for question in engine.totals.ledger.questions:
            divergence = engine.get_guess(question).divergence
            self.divergences.setdefault(question, []).append(divergence.value)
            self.high_of_divergences.setdefault(question, []).append(divergence.interval(0.95)[1])

    def shares(self, num_coordinates: int) -> dict[str, float]:
        """The share of (run, example) whose lower end is too high, in percent, and how low the ends
        are.
        """
        trace, low, probes = (
            torch.stack(self.trace),
            torch.stack(self.low),
            torch.stack(self.low_of_probes),
        )
        truth = num_coordinates / trace.mean(dim=0)
        claimed = low > 0
        bound = num_coordinates / trace
        # the safest-looking hundredth of each run
        largest = trace <= trace.quantile(0.01, dim=1, keepdim=True)
        found = {
            "too high, probes alone": _percent(probes > truth, probes > 0),
            "claimed": 100 * float(claimed.double().mean()),
            "too high": _percent(low > truth, claimed),
            "too high, worst run": max(
                _percent(a, b) for a, b in zip(low > truth, claimed, strict=True)
            ),
            "too high, safest-looking 1 %": _percent(low > truth, claimed & largest),
            "median end over bound": float((low / bound)[claimed].median()),
            "smallest end over smallest bound": float(
                low.where(claimed, bound).amin(dim=1).max() / truth.min()
            ),
        }
        if self.attributes:
            value, high = torch.stack(self.attributes), torch.stack(self.high_of_attributes)
            told = high.isfinite() & (value.mean(dim=0) > 0)
            found["too high, attributes"] = _percent(value.mean(dim=0) > high, told)
        for question, values in self.divergences.items():
            value, high = torch.stack(values), torch.stack(self.high_of_divergences[question])
            told = high.isfinite()
            found[f"too low, D of {question!r}"] = _percent(value.mean(dim=0) > high, told)
            found[f"median end over D of {question!r}"] = float((high / value)[told].median())
        return found


def readings_of(
    lr: float, runs: int, *, participations: tuple[int, ...] = PARTICIPATIONS, **accounting: Any
) -> dict[int, Readings]:
    """Runs of a tanh network from the same weights (σ = C = 1), read after given expected
    participations.
    """
    x, y = small_digits()
    data = TensorDataset(x[:EXAMPLES], y[:EXAMPLES])
    steps = {round(count * EXAMPLES / BATCH): count for count in participations}
    readings = {count: Readings() for count in participations}
    for run in range(runs):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
        torch.manual_seed(1 + run)
        engine = FILPrivacyEngine()
        _, _, loader = engine.make_private(
            module,
            torch.optim.SGD(module.parameters(), lr=lr),
            DataLoader(data, BATCH, generator=torch.Generator().manual_seed(run)),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            criterion=nn.CrossEntropyLoss(),
            accounting=Accounting(seed=run, questions=QUESTIONS, **accounting),
        )
        for step, (inputs, targets) in _batches(loader, max(steps)):
            engine.train_step(inputs, targets)
            if step in steps:
                readings[steps[step]].note(engine)
    return readings


def _batches(loader: Any, steps: int) -> Iterator[tuple[int, Any]]:
    """Batches numbered from 1, pass after pass over the data."""
    step = 0
    while True:
        for batch in loader:
            step += 1
            yield step, batch
            if step == steps:
                return


def _percent(wrong: Tensor, among: Tensor) -> float:
    return 100 * float(wrong[among].double().mean())


def main() -> None:
    """Print a table, and write it to a file if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--probes", type=int, default=3)
    parser.add_argument("--track", nargs="*", default=[])
    parser.add_argument("--lr", type=float, nargs="+", default=LEARNING_RATES)
    parser.add_argument("--out", type=Path, help="a JSON file for the numbers")
    parser.add_argument(
        "--simulate", action="store_true", help="simulated runs under SGD, momentum and Adam"
    )
    given = parser.parse_args()
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    torch.set_num_threads(1)

    results: dict[str, dict[str, float]] = {}
    for setting in simulated_runs.SETTINGS if given.simulate else ():
        results[str(setting)] = found = simulated_runs.shares(setting, given.runs)
        print(
            f"{setting!s:<46}" + "  ".join(f"{name} {value:.3g}" for name, value in found.items()),
            flush=True,
        )
    for lr in () if given.simulate else given.lr:
        began = time.perf_counter()
        for count, readings in readings_of(
            lr, given.runs, num_probes=given.probes, track=tuple(given.track)
        ).items():
            results[f"lr {lr:g}, {count} participations"] = found = readings.shares(64)
            print(f"lr {lr:g}, {count} participations, {given.runs} runs, {given.probes} probes")
            print(
                "".join(f"  {name:<34}{value:8.3g}\n" for name, value in found.items()), flush=True
            )
        print(f"  {time.perf_counter() - began:.0f} s", flush=True)
    if given.out is not None:
        given.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
