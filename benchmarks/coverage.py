"""Are one run's intervals valid, and how sharp are they?

Private runs of a setting start from the same weights; their batches, noise and probes differ. The
bounds are about means over runs, so the truth of one run is the mean of the *other* runs' readings.
The trace bounds an unbiased attacker's error (d / E[tr I]), D every attacker. By setting, for both:

* claimed: the share of readings with an interval, in %, like all shares;
* missed: how many claimed upper ends lie below the truth, so that the bound's end is too high; at
  most 2.5 % should. Of all, of the 5 % with the largest truth, and of runs, by the largest upper
  end against the largest truth ("the smallest bound");
* end / bound: a reading over its upper end (median), which is the lower end of the MSE bound over
  the bound; and the inverse;
* error: the relative rms error of the 5 %; and that of the plain sum Σ B (M/π) X of the same run;
* named: how many of the 1 % with the largest readings are among the true 1 %; and by plain sums;
* mean / plain mean: over all examples and runs; plain sums are unbiased;
* not positive: readings ≤ 0.

OMP_NUM_THREADS=1 python -m benchmarks.coverage --workers 16 --out coverage.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from torchfil import Accounting, FILPrivacyEngine
from torchfil.accounting.ledger import Contribution, Ledger
from torchfil.questions import Absent

__all__ = ["OPTIMIZERS", "Setting", "main", "shares"]

COLUMNS = {"trace": "trace", "D": "question in"}  # of the ledger
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.5),
    "momentum 0.9": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "momentum 0.97": partial(torch.optim.SGD, lr=0.05, momentum=0.97),
    "Adam": partial(torch.optim.Adam, lr=0.01),
}
STEPS = {0.05: 400, 0.3: 320, 0.02: 1000}  # by q


@dataclass(frozen=True)
class Setting:
    """How the runs train: a tanh network with one hidden layer, cross entropy, σ = C = 1.

    Attributes:
        data: "digits", or "random": six normal inputs, three classes by a noisy linear rule, five
            outliers and five wrong labels.
        optimizer: A name in ``OPTIMIZERS``.
        sample_rate: q.
        steps: T.
        num_examples: n.
        num_probes: At every step; None: the engine's own plan.
        digits: A file with arrays x [n, 64] and y [n]; None: scikit-learn has them.
    """

    data: str
    optimizer: str
    sample_rate: float
    steps: int
    num_examples: int = 1797
    num_probes: int | None = None
    digits: Path | None = None

    def __str__(self) -> str:
        return f"{self.data}, {self.optimizer}, q = {self.sample_rate:g}"


def shares(setting: Setting, runs: int) -> dict[str, float]:
    """The numbers of a setting, by name."""
    return summarized([readings(setting, run) for run in range(runs)])


# ------------------------------------------------------------------ one run


def readings(setting: Setting, run: int) -> dict[str, Tensor]:
    """What a run says of trace and D, [2, n] each: "value"; "high", the upper ends of 95 %
    intervals; "plain", the plain sums. Also the share of draws that were "measured", and "seconds".
    """
    began, q = time.perf_counter(), setting.sample_rate
    x, y, (hidden, classes) = _data(setting)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(x.shape[1], hidden), nn.Tanh(), nn.Linear(hidden, classes))
    engine = FILPrivacyEngine(noise_seed=run)
    _, _, loader = engine.make_private(
        module,
        OPTIMIZERS[setting.optimizer](module.parameters()),
        DataLoader(TensorDataset(x, y), round(q * len(x))),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        criterion=nn.CrossEntropyLoss(),
        accounting=Accounting(
            num_probes=setting.num_probes,
            seed=run,
            sample_rate=q,
            epochs=setting.steps * q,
            questions={"in": Absent()},
        ),
    )
    plain = torch.zeros(2, len(x)).double()
    with patch.object(Ledger, "add", _also_plain(plain)):
        batches = itertools.chain.from_iterable(itertools.repeat(loader))
        for batch in itertools.islice(batches, setting.steps):
            engine.train_step(*batch)
    sums = engine.totals.ledger.sums
    found = engine.totals.get_trace(), engine.get_guess("in").divergence
    return {
        "value": torch.stack([each.value for each in found]),
        "high": torch.stack([each.interval(0.95)[1] for each in found]),
        "plain": plain,
        "measured": sums["measured"].sum() / sums["participations"].sum(),
        "seconds": torch.tensor(time.perf_counter() - began),
    }


def _data(setting: Setting) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Inputs [n, d], labels [n], and how many units and classes the network has."""
    count = setting.num_examples
    if setting.data == "digits":
        if setting.digits is None:
            from sklearn.datasets import load_digits

            x, y = load_digits(return_X_y=True)
        else:
            file = np.load(setting.digits)
            x, y = file["x"], file["y"]
        return torch.tensor(x[:count] / 16).float(), torch.tensor(y[:count]).long(), (16, 10)
    source = torch.Generator().manual_seed(0)
    inputs, rule = torch.randn(count, 6, generator=source), torch.randn(6, 3, generator=source)
    targets = (inputs @ rule + 0.5 * torch.randn(count, 3, generator=source)).argmax(dim=1)
    inputs[:5] *= 4
    targets[5:10] = torch.randint(0, 3, (5,), generator=source)
    return inputs, targets, (8, 3)


def _also_plain(plain: Tensor) -> Callable[..., None]:
    """``Ledger.add`` that also adds to plain sums, [2, n]; norms give D at every step."""
    add = Ledger.add

    def noting(ledger: Ledger, *contributions: Contribution, **how: Any) -> None:
        for each in contributions:
            for own, name in zip(plain, COLUMNS.values(), strict=True):
                if name in each.columns:
                    rate = each.rate if name == "trace" else 1.0
                    value = each.columns[name]["value"].reshape(len(each.rows)).double()
                    own.index_add_(0, each.rows, value / rate)
        add(ledger, *contributions, **how)

    return noting


# ------------------------------------------------------------------ all runs of a setting


def summarized(runs: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """The numbers of a setting from :func:`readings` of its runs."""
    stacked = {name: torch.stack([run[name] for run in runs]) for name in runs[0]}
    numbers = {
        "run: runs": float(len(runs)),
        "run: seconds": float(stacked["seconds"].mean()),
        "run: measured": _percent(stacked["measured"]),
    }
    for place, column in enumerate(COLUMNS):
        own = _numbers(*(stacked[name][:, place] for name in ("value", "high", "plain")))
        numbers |= {f"{column}: {name}": number for name, number in own.items()}
    return numbers


def _numbers(value: Tensor, high: Tensor, plain: Tensor) -> dict[str, float]:
    """Of one column, from [runs, n] each."""
    runs, n = value.shape
    mean, others = value.mean(dim=0), (value.sum(dim=0) - value) / (runs - 1)
    claimed, missed = high.isfinite(), high < others
    exposed = mean >= mean.quantile(0.95)
    top, largest = claimed & exposed, high.where(claimed, 0.0).amax(dim=1)
    most_exposed = mean.topk(n // 100 or 1).indices

    def error(sums: Tensor) -> float:
        return 100 * float((sums / mean - 1)[:, exposed].square().mean().sqrt())

    def named(sums: Tensor) -> float:
        return _percent(torch.isin(sums.topk(len(most_exposed)).indices, most_exposed))

    return {
        "claimed": _percent(claimed),
        "missed": _percent(missed[claimed]),
        "missed, 5 %": _percent(missed[top]),
        "missed, smallest": _percent(largest < others.amax(dim=1)),
        "end / bound": float((value / high)[claimed].median()),
        "end / bound, 5 %": float((value / high)[top].median()),
        "bound / end, 5 %": float((high / value)[top].median()),
        "error, 5 %": error(value),
        "error of plain, 5 %": error(plain),
        "named, 1 %": named(value),
        "named by plain, 1 %": named(plain),
        "mean / plain mean": float(value.sum() / plain.sum()),
        "not positive": _percent(value <= 0),
    }


def _percent(flags: Tensor) -> float:
    return 100 * float(flags.double().mean())


def tables(results: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """Lines of Markdown: a table of the runs, of the trace and of D."""
    for part in ("run", *COLUMNS):
        names = dict.fromkeys(
            name for found in results.values() for name in found if name.startswith(f"{part}: ")
        )
        yield f"\n| {part} | " + " | ".join(name.removeprefix(f"{part}: ") for name in names) + " |"
        yield "|---" * (1 + len(names)) + "|"
        for setting, found in results.items():
            yield f"| {setting} | " + " | ".join(f"{found[name]:.3g}" for name in names) + " |"


# ------------------------------------------------------------------ settings side by side


def measured(
    settings: Sequence[Setting], runs: int, workers: int
) -> Iterator[tuple[Setting, dict[str, float]]]:
    """The numbers of each setting once its last run has ended, without runs that failed."""
    context, began = get_context("spawn"), time.perf_counter()
    with ProcessPoolExecutor(workers, context, initializer=_one_thread) as pool:
        tasks = {
            pool.submit(readings, setting, run): setting
            for setting in settings
            for run in range(runs)
        }
        found: dict[Setting, list[dict[str, Tensor]]] = {setting: [] for setting in settings}
        left = dict.fromkeys(settings, runs)
        for task in as_completed(tasks):
            setting, error = tasks[task], task.exception()
            left[setting] -= 1
            if error is None:
                found[setting].append(task.result())
            else:
                print(f"{setting}: a run failed: {error!r}", flush=True)
            if left[setting]:
                continue
            print(
                f"{time.perf_counter() - began:6.0f} s  {setting}: {len(found[setting])} runs",
                flush=True,
            )
            if len(found[setting]) > 1:
                yield setting, summarized(found[setting])


def _one_thread() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    logging.disable(logging.WARNING)


def main() -> None:
    """Print tables, and write the numbers to a file if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--workers", type=int, default=1, help="processes of one thread")
    parser.add_argument("--probes", type=int, help="at every step; default: the engine's plan")
    parser.add_argument("--digits", type=Path, help="an .npz file of x [n, 64] and y [n]")
    parser.add_argument("--only", nargs="+", default=[], help="texts in a setting's name, all of")
    parser.add_argument("--out", type=Path, help="a JSON file for the numbers")
    parser.add_argument("--table", type=Path, nargs="+", help="print what such files hold")
    given = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    for file in given.table or ():
        results |= json.loads(file.read_text())
    every = [
        Setting(data, optimizer, q, steps, num_probes=given.probes, digits=given.digits)
        for data in ("digits", "random")
        for q, steps in STEPS.items()
        for optimizer in OPTIMIZERS
    ]
    wanted = [each for each in every if all(text in str(each) for text in given.only)]
    for setting, found in measured(wanted, given.runs, given.workers) if not given.table else ():
        results[str(setting)] = found
        if given.out is not None:
            given.out.write_text(json.dumps(results, indent=1) + "\n")
    print("\n".join(tables(results)))


if __name__ == "__main__":
    main()
