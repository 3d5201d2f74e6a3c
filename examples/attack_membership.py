"""Who was trained on? Membership inference on an overfitted network, and on one trained with DP-SGD
at σ = 1.

2,000 digits of MNIST, a fifth of them with a wrong label, which a network can only memorise. Every
run trains a small network on a random half of them. Each of sixteen runs is attacked with all
others as shadows. A table shows FIL, individual ε and how often the attack was right for each
example.

Without the data's files, it runs on a small stand-in and says so (examples/README.md).

TORCHFIL_DATA=/path/to/data python examples/attack_membership.py --out out
"""

from __future__ import annotations

import argparse
import contextlib
import warnings
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from paper_data import PaperData
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from torchfil import FILPrivacyEngine
from torchfil.attacks.membership import MembershipResult, membership_inference, shadow_runs

DELTA = 1e-5
ATTACKED = 16
STYLES = {"loss threshold": "--", "likelihood ratio": "-"}


def mislabelled(labels: Tensor, share: float, source: torch.Generator) -> Tensor:
    """The labels, with about this share replaced by another random digit."""
    wrong = torch.rand(len(labels), generator=source) < share
    return torch.where(
        wrong, (labels + torch.randint(1, 10, labels.shape, generator=source)) % 10, labels
    )


def network(seed: int, device: torch.device) -> nn.Sequential:
    """A small dense network with weights drawn from this seed."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 64), nn.Tanh(), nn.Linear(64, 10)).to(
        device
    )


def overfit(images: Tensor, labels: Tensor, seed: int, steps: int) -> nn.Module:
    """Full-batch steps of Adam: after 200, nearly every training label is memorised, including the
    wrong ones.
    """
    model = network(seed, images.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return model


def train_privately(
    images: Tensor, labels: Tensor, seed: int, *, measured: bool
) -> tuple[nn.Module, FILPrivacyEngine]:
    """Five epochs of DP-SGD at σ = 1."""
    model, engine = network(seed, images.device), FILPrivacyEngine()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = DataLoader(TensorDataset(images, labels), batch_size=50)
    _, _, loader = engine.make_private(
        model,
        optimizer,
        loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        criterion=nn.CrossEntropyLoss(),
    )
    with contextlib.nullcontext() if measured else engine.paused():
        for _ in range(5):
            for x, y in loader:
                engine.train_step(x, y)
    return model, engine


def main() -> None:
    """Train, attack, print the tables and save the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--runs", type=int, default=32)
    parser.add_argument("--examples", type=int, default=2000)
    parser.add_argument("--label-noise", type=float, default=0.2, help="share of wrong labels")
    parser.add_argument("--steps", type=int, default=200, help="steps of the overfitted network")
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    data = PaperData("mnist")
    images, digits = data.mnist()
    if data.made:  # a minute on two cores
        options.runs, options.examples = min(options.runs, 24), min(options.examples, 500)
    warnings.filterwarnings("ignore", message="Fisher accounting is paused")
    options.out.mkdir(parents=True, exist_ok=True)

    source = torch.Generator().manual_seed(options.seed)
    chosen = torch.randperm(len(images), generator=source)[: options.examples]
    labels = mislabelled(digits[chosen], options.label_noise, source).to(options.device)
    images, digits = images[chosen].to(options.device), digits[chosen].to(options.device)

    first = options.seed * options.runs
    settings = {"runs": options.runs, "seed": options.seed + 1, "progress": True}
    plain = shadow_runs(
        lambda rows, run: overfit(images[rows], labels[rows], first + run, options.steps),
        images,
        labels,
        **settings,
    )
    private = shadow_runs(
        lambda rows, run: train_privately(images[rows], labels[rows], first + run, measured=False)[
            0
        ],
        images,
        labels,
        **settings,
    )

    # probability above one half
    memorised = (plain.log_odds[plain.members] > 0).double().mean().item()
    wrong = int((labels != digits).sum())
    print(
        f"{wrong} of {len(labels)} labels are wrong; overfitted, {100 * memorised:.2f} % of "
        "training labels memorised"
    )
    attacked = min(ATTACKED, options.runs)
    results = {
        "overfitted": membership_inference(plain, targets=attacked),
        "DP-SGD, σ = 1": membership_inference(private, targets=attacked),
    }
    for training, by_attack in results.items():
        for name, result in by_attack.items():
            print(
                f"{training}, {name}: AUC {result.auc:.3f} ± {result.auc_error:.3f}, true "
                f"positives at 1 % false alarms {100 * result.tpr_at(0.01):.1f} %, at 10 % "
                f"{100 * result.tpr_at(0.1):.1f} %"
            )

    # Measure the first private run again: its leakage, and how often the attack was right.
    members = private.members[0].nonzero().squeeze(1)
    _, engine = train_privately(images[members], labels[members], first, measured=True)
    print_exposed(engine, members, labels == digits, results)
    save(results, options.out / "attack_membership.png")
    print(f"The picture is {options.out / 'attack_membership.png'}.")
    print("These numbers depend on private data and are confidential themselves.")


def print_exposed(
    engine: FILPrivacyEngine,
    members: Tensor,
    right: Tensor,
    results: dict[str, dict[str, MembershipResult]],
) -> None:
    """The five members of a run that leak most, whether their labels are right, and how often
    attacks were right.
    """
    print(
        f"private: ε = {engine.get_epsilon(DELTA):.2f} at δ = {DELTA:g}. The five most exposed of "
        "the first run:"
    )
    table = engine.leakage(delta=DELTA)
    fil, epsilon = np.asarray(table["fil"]), np.asarray(table["individual_epsilon"])
    by_example = {
        name: by_attack["likelihood ratio"].by_example().achieved
        for name, by_attack in results.items()
    }
    print("digit  label  FIL    its own ε  attack right, overfitted  attack right, DP-SGD")
    for place in np.argsort(-fil)[:5]:
        row = int(members[place])
        told = "                 ".join(
            f"{100 * values[row]:5.0f} %" for values in by_example.values()
        )
        print(
            f"{row:5d}  {'right' if right[row] else 'wrong'}  {fil[place]:.3f}  "
            f"{epsilon[place]:9.2f}  {told}"
        )


def save(results: dict[str, dict[str, MembershipResult]], path: Path) -> None:
    """True against false positives, both logarithmic."""
    figure = Figure(figsize=(5.6, 4.2), layout="constrained")
    axis = figure.subplots()
    for (training, by_attack), colour in zip(results.items(), ("#D55E00", "#0072B2"), strict=True):
        for name, result in by_attack.items():
            label = f"{training}, {name}: AUC {result.auc:.2f}"
            axis.plot(*result.curve(), STYLES[name], color=colour, linewidth=1.6, label=label)
    guess = np.geomspace(1e-3, 1, 50)
    axis.plot(guess, guess, ":", color="0.3", linewidth=1, label="guessing")
    axis.set(xscale="log", yscale="log", xlim=(1e-3, 1), ylim=(1e-3, 1.1))
    axis.set(xlabel="false positive rate", ylabel="true positive rate")
    axis.legend(frameon=False, fontsize=8, loc="lower right")
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    main()
