"""What any attacker can infer about a patient: the VKORC1 genotype from a dose model trained by
DP-SGD (IWPC).

A small network learns warfarin doses privately. For every patient the run keeps D = KL(P ‖ P′),
where P and P′ are the laws of everything that training releases with the true genotype and with
another. D binds every attacker, even one who knows everything else: how often it names the right
genotype if it rarely names it wrongly, and how far a prior of 39 % can rise on average. With
--attacked, the best attacker (the likelihood ratio of recorded runs) attacks some patients.

Without the data's files, it runs on a small stand-in and says so (examples/README.md).

TORCHFIL_DATA=/path/to/data python examples/questions_iwpc.py --out out
TORCHFIL_DATA=/path/to/data python examples/questions_iwpc.py --out out --attacked 4 --runs 1000
--device cuda
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from paper_data import PaperData, TabularTask
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from torchfil import Accounting, FILPrivacyEngine
from torchfil.attacks import best_guess
from torchfil.guessing import Guess, fano_success, largest_true_positive_rate
from torchfil.questions import OneHot

ATTRIBUTE, HIDDEN, LEARNING_RATE, THRESHOLD = "vkorc1", 8, 2.0, 1.0
ALPHA = (0.001, 0.01, 0.1)


def genotype(task: TabularTask) -> OneHot:
    """The question: every level of the attribute is an answer; the first has no column."""
    columns = task.attributes[ATTRIBUTE]
    first, *others = task.levels[ATTRIBUTE]
    names = tuple(task.columns[column].split("=")[1] for column in columns)
    assert sorted(names) == sorted(others)
    return OneHot(columns, names=names, dropped=first)


def network(inputs: int) -> nn.Module:
    """One hidden layer."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1)).double()


def train(
    x: Tensor, y: Tensor, question: OneHot, sigma: float, rate: float, steps: int
) -> FILPrivacyEngine:
    """A private run that asks for the genotype."""
    torch.manual_seed(1)
    model = network(x.shape[1]).to(x.device)
    engine = FILPrivacyEngine()
    loader = DataLoader(TensorDataset(x, y), batch_size=max(1, round(rate * len(x))))
    _, _, loader = engine.make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=LEARNING_RATE),
        loader,
        noise_multiplier=sigma,
        max_grad_norm=THRESHOLD,
        criterion=nn.MSELoss(),
        accounting=Accounting(num_probes=1, questions={ATTRIBUTE: question}),
    )
    done = 0
    while done < steps:
        for batch in loader:
            engine.train_step(*batch)
            done += 1
            if done == steps:
                break
    return engine


def main() -> None:
    """Print the tables and save the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--noise-multiplier", type=float, default=2.0, help="σ")
    parser.add_argument("--rate", type=float, default=1 / 15, help="q")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--attacked", type=int, default=0, help="how many patients the best attacker attacks"
    )
    parser.add_argument(
        "--runs", type=int, default=1000, help="the attacker's runs with each genotype"
    )
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    task = PaperData("iwpc").iwpc()

    x = torch.tensor(task.train_inputs, device=options.device)
    y = torch.tensor(task.train_targets, device=options.device)[:, None]
    question, levels = genotype(task), task.level_numbers(ATTRIBUTE, task.train_inputs)
    sigma, rate, steps = options.noise_multiplier, options.rate, options.steps
    engine = train(x, y, question, sigma, rate, steps)
    print(
        f"{len(x):,} patients, {steps} steps, σ = {sigma:g}, q = {rate:.3f}: ε = "
        f"{engine.get_epsilon(1e-5):.2f}"
    )

    # all patients: D of the worst other genotype, and the posterior of the true one
    guess = engine.get_guess(ATTRIBUTE).upper(0.95)
    divergence = guess.divergence.value.cpu()
    shares = torch.tensor(np.bincount(levels, minlength=len(question.answers)) / len(levels))
    order = list(task.levels[ATTRIBUTE])
    prior = shares[[order.index(answer) for answer in question.answers]]
    worst = divergence.max(dim=1).values
    rates = guess.true_positive_rate(0.01).amax(dim=1).cpu()
    mixture = guess.mixture_divergence(prior.to(guess.divergence.value.device)).cpu()
    print(
        f"prior: {', '.join(f'{a} {p:.2f}' for a, p in zip(question.answers, prior, strict=True))}"
    )
    print("patients              D      right at most, if wrong 1 % of the time")
    for name, level in (
        ("the most exposed", 1.0),
        ("5 % are more exposed", 0.95),
        ("half are more exposed", 0.5),
    ):
        print(
            f"{name:<20}  {np.quantile(worst, level, method='lower'):6.3f}"
            f"  {100 * np.quantile(rates, level, method='lower'):5.1f} %"
        )

    # on average over patients, and for the most exposed one, if the attacker names its genotype as
    # often as it occurs
    average = float(fano_success(mixture.mean(), prior))
    own = prior[[question.answers.index(order[level]) for level in levels]]
    named = largest_true_positive_rate(mixture, own)
    blind = 100 * float(prior.max())
    print(
        f"any attacker names the genotype of at most {100 * average:.0f} % of the patients; "
        f"blindly {blind:.0f} %"
    )
    print(f"for the most exposed patient, in at most {100 * named.max():.0f} % of such runs")
    summary: dict[str, Any] = {
        "divergence": worst.tolist(),
        "rate": rates.tolist(),
        "mixture": mixture.tolist(),
    }

    if options.attacked:
        summary["attacks"] = attack(x, y, question, engine.get_guess(ATTRIBUTE), options)
    (options.out / "questions_iwpc.json").write_text(json.dumps(summary))
    draw(worst, rates, summary.get("attacks"), options.out / "questions_iwpc.png")


def attack(
    x: Tensor, y: Tensor, question: OneHot, guess: Guess, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """The best attacker against one genotype, on patients with another, from the most to the least
    exposed.
    """
    divergence = guess.divergence.value[:, 0]
    others = (divergence > 1e-9).nonzero()[:, 0]  # D of the true genotype is 0
    ranked = others[divergence[others].argsort(descending=True)]
    places = np.unique(np.linspace(0, len(ranked) - 1, options.attacked).round().astype(int))
    rows = ranked[places.tolist()].tolist()
    result = best_guess(
        network(x.shape[1]).to(x.device),
        nn.MSELoss(),
        x,
        y,
        question,
        rows,
        runs=options.runs,
        false_positive_rates=ALPHA,
        seed=0,
        steps=options.steps,
        lr=LEARNING_RATE,
        max_grad_norm=THRESHOLD,
        noise_multiplier=options.noise_multiplier,
        sample_rate=options.rate,
    )

    print(
        f"\nthe best attacker against {question.answers[0]}, {options.runs} runs with each genotype"
    )
    print(
        "patient  D in one run  D over runs  "
        + "  ".join(f"wrong {100 * alpha:g} %: right / bound" for alpha in ALPHA)
    )
    found = []
    for k, row in enumerate(rows):
        pairs = zip(result.achieved[k], result.bound[k], result.verdicts[k], strict=True)
        text = "  ".join(
            f"{100 * rate:8.1f} % / {100 * bound:.1f} % {verdict}" for rate, bound, verdict in pairs
        )
        print(
            f"{row:7d}  {float(divergence[row]):12.3f}  {result.divergence[k]:11.3f}  {text}",
            flush=True,
        )
        found.append(
            {
                "row": row,
                "divergence": float(result.divergence[k]),
                "achieved": result.achieved[k].tolist(),
                "bound": result.bound[k].tolist(),
                "limit": result.normal_limit[k].tolist(),
            }
        )
    return found


def draw(worst: Tensor, rates: Tensor, attacks: list[dict[str, Any]] | None, path: Path) -> None:
    """Every patient's bound over D, and the rates of the best attacker."""
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axis = figure.subplots()
    axis.scatter(
        worst,
        100 * rates,
        s=5,
        color="#0072B2",
        linewidths=0,
        alpha=0.5,
        label="bound for every attacker",
    )
    if attacks:
        place = ALPHA.index(0.01)
        reached = [100 * one["achieved"][place] for one in attacks]
        at = [one["divergence"] for one in attacks]
        axis.scatter(
            at, reached, s=36, marker="^", color="#D55E00", label="the best attacker, in many runs"
        )
    axis.axhline(1, color="#666666", linestyle=":", linewidth=1.2, label="blind guess")
    axis.set(
        xscale="log",
        yscale="log",
        xlabel="D of the other genotype (nats)",
        ylabel="right, if wrong 1 % of the time (%)",
    )
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
