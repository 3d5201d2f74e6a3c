"""Figure 5 of Guo et al. 2022, and beyond: every one of 60,000 digits protected, with an accurate
network.

The paper's CNN learns MNIST by DP-SGD, one run with ``engine.train_step``. Besides ε, the engine
keeps a lower bound on the mean squared error (pixels in [0, 1]) of any unbiased reconstruction, for
every training digit. The figure shows test accuracy during the run against the smallest and the
median bound so far, from the exact Poisson factors, from the paper's Theorem 4 and from Rényi DP
(Theorem 1). Theorem 4 needs a second run from the same seed.

The weights may be averaged over steps (``--ema``): the average is computed from released weights
and costs no privacy.

``--two-rounds`` trains twice from the same network, with new batches and noise
(:func:`torchfil.equalise`): first without weights, then with clip weights that are fixed
beforehand, smaller for the digits whose bound in the first round was below ``--target`` times
``--margin``. The second round's bounds hold with these weights, which depend on the data, held
fixed; ε is that of both rounds together, which covers the weights. The first round has no extra
probes, because these go to digits that stand out in their batch, and a weight must not depend on
other digits. The curves show both.

Without the data's files, it runs on a small stand-in and says so (examples/README.md).

TORCHFIL_DATA=/path/to/data python examples/mnist_dpsgd.py --device cuda --out out
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from networks import mnist_cnn
from paper_data import PaperData, ResidentDataset
from torch import Tensor, nn
from torch.utils.data import DataLoader

from torchfil import Accounting, Execution, FILPrivacyEngine, equalise
from torchfil.fisher import analytic_gaussian_epsilon
from torchfil.utils.files import replaced_when_complete

warnings.filterwarnings("ignore", message="Full backward hook is firing")
DELTA = 1e-5
ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "softplus": nn.Softplus,
}
TITLES = {
    "poisson": "exact Poisson factors",
    "theorem4": "Theorem 4",
    "rdp": "Rényi DP",
    "rdp_paper": "ε_RDP(2)",
}


class Affine(nn.Module):
    """x ↦ (x − centre) · scale, with constants that do not depend on the data."""

    def __init__(self, centre: float, scale: float) -> None:
        super().__init__()
        self.centre, self.scale = centre, scale

    def forward(self, x: Tensor) -> Tensor:
        """(x − centre) · scale."""
        return (x - self.centre) * self.scale


@dataclass(frozen=True)
class Recipe:
    """How to train.

    Attributes:
        noise_multiplier: σ.
        max_grad_norm: C.
        batch: Expected batch size.
        steps: T.
        lr: The learning rate at the start.
        schedule: "cosine", to 0 at the last step, or "constant".
        momentum: The momentum of SGD.
        weight_decay: The weight decay of SGD.
        ema: The decay of the average of the weights, which is tested; 0: test the last weights.
        activation: The network's activation.
        centre: The number that the network's first layer subtracts from the pixels.
        scale: The number that it then multiplies them by.
        clip: The clip function.
        probes: The probes per step.
        seed: The seed of everything that is random.
    """

    noise_multiplier: float = 3.0
    max_grad_norm: float = 0.1
    batch: int = 2048
    steps: int = 8000
    lr: float = 1.5
    schedule: str = "constant"
    momentum: float = 0.9
    weight_decay: float = 0.0
    ema: float = 0.999
    activation: str = "tanh"
    centre: float = 0.13
    scale: float = 3.0
    clip: str = "rsqrt"
    probes: int = 1
    seed: int = 0


def network(recipe: Recipe) -> nn.Module:
    """The paper's CNN."""
    cnn = mnist_cnn(activation=ACTIVATIONS[recipe.activation])
    if (recipe.centre, recipe.scale) == (0.0, 1.0):
        return cnn
    return nn.Sequential(Affine(recipe.centre, recipe.scale), *cnn)


def batches(loader: Any, steps: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(step, images, labels) for this many steps, pass after pass over the data."""
    step = 0
    while step < steps:
        for x, y in loader:
            step += 1
            yield step, x, y
            if step == steps:
                return


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The accuracy in percent."""
    right = [
        (model(x).argmax(1) == y).sum()
        for x, y in zip(images.split(2000), labels.split(2000), strict=True)
    ]
    return 100 * float(torch.stack(right).sum()) / len(labels)


class Theorem4:
    """Guo et al. 2022, Theorem 4: κ = q / (q + (1−q) e^{−ε}), valid up to a failure probability δ
    per step.

    ε is that of one step for neighbours that differ in one example's value: the sensitivity is 2C.
    """

    secret_batches = True
    delta = 1e-9

    def factors(self, rho: Tensor, q: float | None, sigma: float) -> tuple[Tensor, Tensor]:
        """κ for both parts of the Fisher information."""
        assert q is not None
        kappa = torch.full_like(
            rho, q / (q + (1 - q) * math.exp(-analytic_gaussian_epsilon(sigma / 2, self.delta)))
        )
        return kappa, kappa


def moments(steps: int, count: int) -> set[int]:
    """The steps at which to evaluate: more at the start, and the last one."""
    return {max(1, round(steps * (k / count) ** 2)) for k in range(1, count + 1)}


def train(
    recipe: Recipe,
    digits: ResidentDataset,
    test: tuple[Tensor, Tensor],
    amplification: str,
    *,
    looks: int,
    max_memory: int,
    weights: Tensor | None = None,
    draws: int | None = None,
) -> tuple[FILPrivacyEngine, dict[str, Any]]:
    """One private run, with clip weights by example and a seed for batches and noise if given.

    Returns:
        The engine, and "curve": step, accuracy and the bounds so far; "result": the same at the
        end, with intervals, ε and time.
    """
    torch.manual_seed(recipe.seed)
    device = digits.device
    model = network(recipe).to(device)
    if draws is not None:
        torch.manual_seed(draws)
    tested = copy.deepcopy(model)
    plain = torch.optim.SGD(
        model.parameters(), lr=recipe.lr, momentum=recipe.momentum, weight_decay=recipe.weight_decay
    )
    engine = FILPrivacyEngine()
    private, _, loader = engine.make_private(
        model,
        plain,
        DataLoader(
            digits,
            batch_size=recipe.batch,
            collate_fn=digits.collate,
            generator=torch.Generator().manual_seed(recipe.seed if draws is None else draws),
        ),
        noise_multiplier=recipe.noise_multiplier,
        max_grad_norm=recipe.max_grad_norm,
        criterion=nn.CrossEntropyLoss(),
        clip=recipe.clip,
        clip_weights=weights,
        accounting=Accounting(
            num_probes=recipe.probes,
            amplification=Theorem4() if amplification == "theorem4" else amplification,
            execution=Execution(max_memory=max_memory),
        ),
    )
    scheduler: Any = None
    if recipe.schedule == "cosine":
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(plain, recipe.steps)

    # A running mean of the weights is tested; training continues with the private weights.
    curve: dict[str, list[float]] = {}
    looked = moments(recipe.steps, looks)
    start, spent_looking = time.perf_counter(), 0.0
    for step, x, y in batches(loader, recipe.steps):
        engine.train_step(x, y)
        if scheduler is not None:
            scheduler.step()
        decay = min(recipe.ema, step / (step + 9))
        with torch.no_grad():
            for average, value in zip(tested.parameters(), private.parameters(), strict=True):
                average.lerp_(value, 1 - decay)
        if step in looked:
            began = time.perf_counter()
            point = {"step": step, "accuracy": accuracy(tested, *test), **bounds_so_far(engine)}
            for name, value in point.items():
                curve.setdefault(name, []).append(value)
            spent_looking += time.perf_counter() - began
            print(
                f"  step {step:5d}: {point['accuracy']:.2f} %, smallest bound "
                f"{point['smallest']:.3g}, median {point['median']:.3g}; "
                f"{time.perf_counter() - start:.0f} s",
                flush=True,
            )

    seconds = time.perf_counter() - start
    result: dict[str, Any] = {
        "seconds": seconds,
        "seconds_looking": spent_looking,
        **final(engine, len(digits)),
    }
    result |= {"accuracy": curve["accuracy"][-1], "sample_rate": loader.sample_rate}
    title = TITLES[amplification] + (
        f", {int((weights < 1).sum())} down-weighted" if weights is not None else ""
    )
    return engine, {
        "amplification": amplification,
        "title": title,
        "curve": curve,
        "result": result,
    }


def train_in_two_rounds(
    recipe: Recipe, target: float, margin: float, floor: float, **given: Any
) -> list[dict[str, Any]]:
    """A round without weights and, unless it meets the target, one with weights from it.

    Prints both, and their ε.
    """
    runs: list[dict[str, Any]] = []

    def trained(weights: Tensor | None) -> tuple[FILPrivacyEngine, float]:
        # no round repeats the batches and the noise that chose its weights
        draws = recipe.seed + 1000 * len(runs)
        engine, run = train(recipe, amplification="poisson", weights=weights, draws=draws, **given)
        run["result"]["down_weighted"] = 0 if weights is None else int((weights < 1).sum())
        report(run, len(given["digits"]))
        runs.append(run)
        return engine, run["result"]["accuracy"]

    rounds = equalise(
        trained,
        target=target,
        margin=margin,
        floor=floor,
        confidence=None,
        max_rounds=2,
        delta=DELTA,
    )
    print(rounds)
    print(
        f"\nTwo rounds, seed {recipe.seed}, bounds of at least {target:g} wanted, margin "
        f"{margin:g}:"
    )
    for number, run in enumerate(runs, 1):
        result = run["result"] = {
            **run["result"],
            "epsilon_of_all_rounds": rounds.epsilon_of_all_rounds,
        }
        print(
            f"  round {number}: accuracy {result['accuracy']:.2f} %, smallest bound "
            f"{result['smallest']:.3g} (lower end {result['smallest_95_together']:.3g}, 95 % for "
            f"all together, by the probes' errors), median {result['median']:.3g}, "
            f"{result['below_1']} below 1, {result['down_weighted']} down-weighted, ε of this "
            f"round alone {result['epsilon']:.2f}"
        )
    print(
        f"  ε of all rounds together: {rounds.epsilon_of_all_rounds:.2f} at δ = {DELTA:g}\n",
        flush=True,
    )
    return runs


def bounds_so_far(engine: FILPrivacyEngine) -> dict[str, float]:
    """The smallest and the median bound over examples, and Rényi DP's bound for all."""
    bound = engine.get_mse_bound()[engine.was_measured()].value
    return {
        "smallest": float(bound.min()),
        "median": float(bound.median()),
        "rdp": engine.get_rdp_mse_bound(),
        "rdp_paper": engine.get_rdp_mse_bound(reading="paper"),
    }


def final(engine: FILPrivacyEngine, count: int) -> dict[str, float]:
    """The final bounds, their lower ends by the probes' errors and by everything that is random in
    a run, and ε.
    """
    bound = engine.get_mse_bound()[engine.was_measured()]
    each = bound.interval(0.95, "probes")[0]
    every = bound.interval(1 - 0.05 / count, "probes")[0]
    together = engine.get_smallest_mse_bound(0.95, "probes")[1]
    never = sum(drawn == 0 for drawn in engine.leakage()["participations"])
    return {
        **bounds_so_far(engine),
        "smallest_95_each": float(each.min()),
        "smallest_95_together": together,
        "smallest_95_every": float(every.min()),
        "median_95_each": float(each.median()),
        "smallest_95_run": float(bound.interval(0.95)[0].min()),
        "below_1": int((bound.value < 1).sum()),
        "never_drawn": int(never),
        "epsilon": float(engine.get_epsilon(DELTA)),
    }


def report(run: dict[str, Any], count: int) -> None:
    """Print the result of a run."""
    result = run["result"]
    print(f"\nFIL, {run['title']}, {count:,} examples, q = {result['sample_rate']:.4f}")
    print(
        f"  wall-clock          {result['seconds']:.1f} s, of which "
        f"{result['seconds_looking']:.1f} s for the curve"
    )
    print(f"  test accuracy       {result['accuracy']:.2f} %")
    together, smallest = result["smallest_95_together"], result["smallest"]
    print(
        f"  smallest MSE bound  {smallest:.3g}; given the probes' errors, none is below "
        f"{together:.3g} (95 % for all together; {together / smallest:.2f} of it), or "
        f"{result['smallest_95_every']:.3g} by Bonferroni intervals; given everything random in a "
        f"run, at least {result['smallest_95_run']:.3g} (95 % for each)"
    )
    print(f"  median MSE bound    {result['median']:.3g}; at least {result['median_95_each']:.3g}")
    print(
        f"  bounds below 1      {result['below_1']}; examples never drawn: {result['never_drawn']}"
    )
    print(
        f"  Rényi DP's bound    {result['rdp']:.3g} (replace-one); {result['rdp_paper']:.3g} "
        "(paper's reading)"
    )
    print(f"  Opacus's ε          {result['epsilon']:.2f} at δ = {DELTA:g}\n", flush=True)


def save_curves(runs: list[dict[str, Any]], recipe: Recipe, options: argparse.Namespace) -> None:
    """Save the runs as JSON."""
    content = {
        "recipe": asdict(recipe),
        "examples": options.examples,
        "device": options.device,
        "runs": runs,
    }
    with replaced_when_complete(options.out / "mnist_dpsgd.json") as path:
        Path(path).write_text(json.dumps(content, indent=1))


def save_figure(runs: list[dict[str, Any]], path: Path) -> None:
    """Accuracy against the smallest (solid) and median (dashed) bound so far.

    Rényi DP has one bound for all.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.6, 5.0), layout="constrained")
    axes = figure.subplots()
    for run, colour in zip(runs, ("C0", "C1"), strict=False):
        curve, title = run["curve"], run["title"]
        axes.plot(
            curve["smallest"],
            curve["accuracy"],
            color=colour,
            label=f"{title}, smallest of all examples",
        )
        axes.plot(curve["median"], curve["accuracy"], "--", color=colour, label=f"{title}, median")
    curve = runs[0]["curve"]
    axes.plot(curve["rdp"], curve["accuracy"], color="C3", label="Rényi DP, replace-one")
    axes.plot(
        curve["rdp_paper"],
        curve["accuracy"],
        ":",
        color="C3",
        label="Rényi DP, the paper's reading",
    )
    axes.axvline(1.0, color="0.6", linewidth=0.8)
    lowest = min(curve["rdp"][-1], *(run["curve"]["smallest"][-1] for run in runs))
    top = max(run["curve"]["accuracy"][-1] for run in runs)
    axes.set(
        xscale="log",
        xlim=(max(lowest / 2, 1e-4), 1e4),
        ylim=(min(88.0, top - 30), 100.0),
        xlabel="lower bound on the MSE per pixel so far",
        ylabel="test accuracy, %",
    )
    axes.invert_xaxis()
    figure.legend(fontsize=8, loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=110)


def options_and_recipe() -> tuple[argparse.Namespace, Recipe, PaperData]:
    """The command line's options, the recipe, whose fields are all options, and the data."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--examples", type=int, default=60_000, help="how many digits to train on")
    parser.add_argument(
        "--amplifications",
        nargs="+",
        choices=("poisson", "theorem4"),
        default=["poisson", "theorem4"],
    )
    parser.add_argument(
        "--two-rounds", action="store_true", help="a second round with weights from the first"
    )
    parser.add_argument(
        "--target", type=float, default=1.0, help="with --two-rounds: the bound that all must reach"
    )
    parser.add_argument(
        "--margin",
        type=float,
        default=4.0,
        help="with --two-rounds: aim at this many times the target",
    )
    parser.add_argument(
        "--floor", type=float, default=1 / 16, help="with --two-rounds: the smallest weight"
    )
    parser.add_argument(
        "--looks", type=int, default=None, help="points of the curve: 40, or 6 with --quick"
    )
    parser.add_argument(
        "--max-memory", type=int, default=None, help="bytes; 32 GiB on a GPU, else 1 GiB"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="2,000 digits, 60 steps: a quick try on a CPU, as without files",
    )
    choices = {
        "activation": list(ACTIVATIONS),
        "schedule": ["cosine", "constant"],
        "clip": ["gelu", "rsqrt", "hard"],
    }
    for name, default in asdict(Recipe()).items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(
            flag, type=type(default), default=None, choices=choices.get(name), help=f"{default}"
        )
    options = parser.parse_args()
    data = PaperData("mnist")
    options.quick = options.quick or bool(data.made)
    values: dict[str, Any] = (
        {"batch": 250, "steps": 60, "noise_multiplier": 1.0, "lr": 0.5} if options.quick else {}
    )
    values |= {
        name: given for name in asdict(Recipe()) if (given := getattr(options, name)) is not None
    }
    options.looks = options.looks or (6 if options.quick else 40)
    if options.quick:
        options.examples = min(options.examples, 2000)
    if options.max_memory is None:
        options.max_memory = 2**35 if options.device.startswith("cuda") else 2**30
    return options, Recipe(**values), data


def main() -> None:
    """Train, print, save the curves and the picture."""
    options, recipe, data = options_and_recipe()
    images, labels = (part[: options.examples].to(options.device) for part in data.mnist())
    test_images, test_labels = (part.to(options.device) for part in data.mnist("test"))
    test = test_images, test_labels
    options.out.mkdir(parents=True, exist_ok=True)
    digits = ResidentDataset(images, labels)
    given = {
        "digits": digits,
        "test": test,
        "looks": options.looks,
        "max_memory": options.max_memory,
    }
    runs: list[dict[str, Any]] = []
    print(recipe, flush=True)
    if options.two_rounds:
        runs = train_in_two_rounds(recipe, options.target, options.margin, options.floor, **given)
        save_curves(runs, recipe, options)
    else:
        for amplification in options.amplifications:
            runs.append(train(recipe, amplification=amplification, **given)[1])
            report(runs[-1], len(digits))
            save_curves(runs, recipe, options)
    try:
        save_figure(runs, options.out / "mnist_dpsgd.png")
    except ModuleNotFoundError as error:
        print(f"no picture: {error}; pip install 'torchfil[report]'")
    print(f"Curves and picture are {options.out}/mnist_dpsgd.*.")
    print("These numbers depend on private data and are confidential themselves.")


if __name__ == "__main__":
    main()
