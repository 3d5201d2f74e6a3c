"""docs/models.md: written from outcomes, and read back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from .outcomes import CASES, Case, Outcome
from .truth import WAYS

DOCS = Path(__file__).parents[3] / "docs" / "models.md"
PACKAGES = ("torch", "opacus", "transformers", "peft", "timm", "torchvision")
COLUMNS = [(way, dropout) for way in WAYS for dropout in (True, False)]
NONE = "–"

HEADER = """# The models people train

Models that run unchanged, and those that are refused. `make test-integrations` trains every row again and fails if
this page is no longer true; `make models` rewrites it.

Each model is built from a small configuration, in float64, and takes two private steps with the defaults of
`make_private`: Poisson sampling, smooth clipping, three weight probes, the recorded pass. Private are the input of
images and tables, and the word embedding's output for texts, which are padded and come with an attention mask.
Dropout is 0.2 wherever a model offers it.

**runs** means that every example's trace of the Fisher information after both steps, and the sum of clipped gradients
released at each step, agree with brute force to 1e-6: plain reverse mode through the clipped gradient of one example
after the other, with the step's own masks and probes. **runs (vmap)** means the same, but gradients are mapped over
examples, which is slower; the log says why. A number in brackets refers to a note below with the reason and the remedy.

Three ways to train, each with dropout and without:

* **out.loss**: `model(**batch).loss.backward()` and `optimizer.step()`, as Hugging Face's models are trained;
* **loop**: a torch loss on the model's outputs in the loop, and `optimizer.step()`;
* **train_step**: `engine.train_step(inputs, labels)`, with the loss as `criterion=`.

The numbers bind an unbiased attacker who sees every released gradient and knows all other examples and the masks:
Fisher information bounds what it can learn about one example. The noise is random.
"""


def text_of(outcomes: Mapping[Case, Outcome]) -> str:
    """The page."""
    reasons = sorted({outcome.reason for outcome in outcomes.values() if outcome.reason})
    notes = {reason: number for number, reason in enumerate(reasons, 1)}

    def cell(case: Case) -> str:
        outcome = outcomes.get(case)
        if outcome is None:
            return NONE
        return f"{outcome.kind} [{notes[outcome.reason]}]" if outcome.reason else outcome.kind

    names = list(dict.fromkeys(case.name for case in outcomes))
    refused = [name for name in names if any(outcomes[case].reason for case in CASES if case.name == name)]
    lines = [
        HEADER,
        f"{len(names)} models, {len(outcomes)} runs; {len(refused)} models are refused in some way or fail. Versions: "
        + ", ".join(f"{name} {version(name)}" for name in PACKAGES)
        + ".",
        "",
        "| model | out.loss, dropout | out.loss | loop, dropout | loop | train_step, dropout | train_step |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [f"| {name} | {' | '.join(cell(Case(name, *column)) for column in COLUMNS)} |" for name in names]
    if notes:
        lines += ["", "## Notes", ""]
        lines += [f"{number}. {reason}" for reason, number in notes.items()]
    return "\n".join(lines) + "\n"


def read_table(text: str) -> dict[Case, Outcome]:
    """What the page says of every case."""
    notes = dict(re.findall(r"^(\d+)\. (.*)$", text, re.MULTILINE))
    outcomes: dict[Case, Outcome] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if not line.startswith("| ") or len(cells) != 1 + len(COLUMNS) or cells[0] == "model":
            continue
        for column, cell in zip(COLUMNS, cells[1:], strict=True):
            kind, _, number = cell.removesuffix("]").partition(" [")
            if cell != NONE:
                outcomes[Case(cells[0], *column)] = Outcome(kind, notes[number] if number else "")
    return outcomes


def told(outcomes: Mapping[Case, Outcome]) -> str:
    """A line for every case that does not run, for the terminal."""
    return "\n".join(
        f"{case}: {outcome.kind}: {outcome.reason}" for case, outcome in outcomes.items() if outcome.reason
    )
