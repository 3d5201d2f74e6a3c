"""Figure 2 of the PLIS paper: which pixels of a digit drive its privacy loss, and does an x-ray
among digits stand out?

A network learns MNIST without and with DP-SGD, (ε, δ) = (1, 1e-5). The results are PLIS maps of
training digits and of a chest x-ray, which the network has never seen, and how well the
subject-level PLIS distinguishes 500 x-rays from 500 training digits. The paper does not say which
digit it uses as an x-ray's label. No digit is right, so PLIS is averaged over all ten; two other
choices are shown: a random digit (the predicted one in a tenth of the cases), and the predicted
one.

In the private model PLIS has two readings: of the norm of the plain gradient, and of the clipped
one. An outlier's gradient is clipped, so the released gradient no longer depends on its norm, and
the second reading is nearly 0.

Without the data's files, it runs on a small stand-in and says so (examples/README.md).

TORCHFIL_DATA=/path/to/data python examples/plis_mnist.py --out out
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure
from networks import mnist_cnn
from paper_data import PaperData
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from torchfil import PLIS, FILPrivacyEngine, viz
from torchfil.attribution.exposure import AUROC, auroc

warnings.filterwarnings("ignore", message="Full backward hook is firing")
EPSILON, DELTA = 1.0, 1e-5
MAX_GRAD_NORM = 1.0
LOSS = nn.CrossEntropyLoss()
COMPARED = 500
COLUMNS = ("lowest digit", "median digit", "90 % digit", "highest digit", "x-ray")


@dataclass(frozen=True)
class Trained:
    """A trained network and, if it was trained privately, the noise multiplier σ and ε."""

    model: nn.Module
    noise_multiplier: float | None = None
    epsilon: float | None = None

    def plis(self, *, clipped: bool = False) -> PLIS:
        """PLIS of the plain gradient, or of the clipped one.

        In units of the noise if there is any.
        """
        if self.noise_multiplier is None:
            return PLIS(self.model, LOSS)
        noise_std = self.noise_multiplier * MAX_GRAD_NORM
        return PLIS(self.model, LOSS, noise_std, MAX_GRAD_NORM if clipped else None)

    @torch.no_grad()
    def accuracy(self, images: Tensor, labels: Tensor) -> float:
        """The accuracy in percent."""
        return 100 * float((self.model(images).argmax(1) == labels).float().mean())


def train(
    model: nn.Module, images: Tensor, labels: Tensor, *, epochs: int = 3, batch_size: int = 64
) -> Trained:
    """Ordinary training with Adam."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(images)).split(batch_size):
            optimizer.zero_grad()
            LOSS(model(images[rows]), labels[rows]).backward()
            optimizer.step()
    return Trained(model)


def train_privately(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    *,
    epochs: int = 4,
    batch_size: int = 1000,
    lr: float = 0.3,
) -> Trained:
    """DP-SGD to (1, 1e-5); weight decay keeps the noise from inflating the weights.

    The Fisher information is not needed, so its accounting is paused.
    """
    engine = FILPrivacyEngine()
    private, optimizer, loader = engine.make_private_with_epsilon(
        model,
        torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=5e-3),
        DataLoader(TensorDataset(images, labels), batch_size=batch_size),
        target_epsilon=EPSILON,
        target_delta=DELTA,
        epochs=epochs,
        max_grad_norm=MAX_GRAD_NORM,
        criterion=LOSS,
    )
    warnings.filterwarnings("ignore", message="Fisher accounting is paused")
    with engine.paused():
        for _ in range(epochs):
            for x, y in loader:
                engine.train_step(x, y)
    return Trained(
        private.to_standard_module(), optimizer.noise_multiplier, engine.get_epsilon(DELTA)
    )


def random_labels(count: int) -> Tensor:
    """Labels for images that are not digits."""
    return torch.randint(10, (count,), generator=torch.Generator().manual_seed(0))


def strangers_scores(plis: PLIS, images: Tensor, choice: str) -> tuple[Tensor, Tensor]:
    """Subject-level PLIS and PL of images that are not digits, with labels "random", "predicted" or
    "every" digit.

    For "every", the mean over the ten labels.
    """
    if choice == "every":
        labels = [torch.full((len(images),), digit) for digit in range(10)]
    elif choice == "random":
        labels = [random_labels(len(images))]
    else:
        with torch.no_grad():
            labels = [plis.model(images).argmax(1)]
    subject = torch.stack([plis.subject(images, given) for given in labels]).mean(dim=0)
    return subject, torch.stack([plis.privacy_loss(images, given) for given in labels]).mean(dim=0)


def outlier_auroc(digits: Tensor, others: Tensor) -> AUROC:
    """How well a score distinguishes x-rays from digits."""
    is_outlier = torch.arange(len(digits) + len(others)) >= len(digits)
    return auroc(torch.cat([digits, others]), is_outlier)


CHOICES = ("every", "random", "predicted")


@dataclass(frozen=True)
class Comparison:
    """Both networks of one seed, their readings of PLIS, and what was compared.

    Attributes:
        networks: The networks by name.
        readings: The readings of PLIS by name.
        rows: Row numbers of the training digits in MNIST.
        digits: The training digits that are compared.
        targets: Their labels.
        strangers: The x-rays.
        scores: Subject-level PLIS and PL by (reading, "digits" or the x-rays' labels).
    """

    networks: dict[str, Trained]
    readings: dict[str, PLIS]
    rows: Tensor
    digits: Tensor
    targets: Tensor
    strangers: Tensor
    scores: dict[tuple[str, str], tuple[Tensor, Tensor]]

    def auroc(self, reading: str, choice: str, measure: int = 0) -> AUROC:
        """The AUROC of x-rays labelled by ``choice`` against digits.

        Measure 0: subject-level PLIS, 1: PL.
        """
        return outlier_auroc(
            self.scores[reading, "digits"][measure], self.scores[reading, choice][measure]
        )


def compare(
    seed: int,
    digits: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    xrays: Tensor,
    count: int,
    activation: str,
) -> Comparison:
    """Train both networks on ``count`` digits and score digits and x-rays.

    The seed fixes everything random.
    """
    torch.manual_seed(seed)
    images, labels = digits
    rows = torch.randperm(len(images))[:count]
    images, labels = images[rows], labels[rows]
    xrays = xrays[torch.randperm(len(xrays))]  # the file is sorted by diagnosis

    networks: dict[str, Trained] = {}
    trainings: dict[str, Callable[..., Trained]] = {
        "non-private": train,
        "private": train_privately,
    }
    for name, training in trainings.items():
        start = time.perf_counter()
        network = mnist_cnn(activation={"gelu": nn.GELU, "tanh": nn.Tanh}[activation])
        trained = networks[name] = training(network, images, labels)
        epsilon = "" if trained.epsilon is None else f", ε = {trained.epsilon:.2f} at δ = {DELTA:g}"
        seconds = time.perf_counter() - start
        print(
            f"seed {seed}, {name}: {trained.accuracy(*test):.1f} % of test digits right{epsilon}; "
            f"{seconds:.0f} s"
        )

    shown, targets, strangers = images[:COMPARED], labels[:COMPARED], xrays[:COMPARED]
    readings = {
        "non-private": networks["non-private"].plis(),
        "private": networks["private"].plis(),
        "private, clipped": networks["private"].plis(clipped=True),
    }
    scores: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}
    for name, plis in readings.items():
        scores[name, "digits"] = plis.subject(shown, targets), plis.privacy_loss(shown, targets)
        for choice in CHOICES:
            scores[name, choice] = strangers_scores(plis, strangers, choice)
    return Comparison(networks, readings, rows, shown, targets, strangers, scores)


def print_table(comparison: Comparison) -> None:
    """AUROC of every reading and label."""
    print(
        f"\nAUROC of {COMPARED} x-rays against {COMPARED} training digits, with its 95 % "
        "interval; PL: privacy loss"
    )
    print(
        f"{'':<18}{'label':<11}{'subject-level PLIS':<26}{'PL':<26}"
        f"{'median PLIS of digits, x-rays'}"
    )
    for name in comparison.readings:
        for choice in CHOICES:
            values = [comparison.auroc(name, choice, measure) for measure in (0, 1)]
            texts = [f"{a.value:.3f} [{a.low:.3f}, {a.high:.3f}]" for a in values]
            medians = ", ".join(
                f"{comparison.scores[name, key][0].median():.3g}" for key in ("digits", choice)
            )
            print(f"{name:<18}{choice:<11}{texts[0]:<26}{texts[1]:<26}{medians}")


def main() -> None:
    """Train both networks, print how well outliers are found, save the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--examples", type=int, default=20_000, help="how many digits to train on")
    parser.add_argument("--activation", choices=("gelu", "tanh"), default="gelu")
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        default=[0],
        help="one training each; pictures show the first",
    )
    options = parser.parse_args()
    data = PaperData("mnist", "pneumoniamnist")
    digits, test, (xrays, _) = data.mnist(), data.mnist("test"), data.chest_xrays()
    options.out.mkdir(parents=True, exist_ok=True)

    results = []
    for seed in options.seeds:
        results.append(compare(seed, digits, test, xrays, options.examples, options.activation))
        print_table(results[-1])
        print(flush=True)
    if len(results) > 1:
        print("AUROC of the subject-level PLIS over seeds: smallest, mean, largest")
        for name in results[0].readings:
            for choice in CHOICES:
                values = [result.auroc(name, choice).value for result in results]
                mean = sum(values) / len(values)
                print(f"{name:<18}{choice:<11}{min(values):.3f}  {mean:.3f}  {max(values):.3f}")

    first = results[0]
    save_maps(
        first.readings,
        first.digits,
        first.targets,
        first.strangers[:1],
        options.out / "plis_mnist_maps.png",
    )
    gallery = viz.gallery(
        first.digits,
        first.scores["non-private", "digits"][0],
        attributions=first.readings["non-private"].attribute(first.digits, first.targets),
        ids=[
            f"{label} (no. {i})"
            for label, i in zip(first.targets.tolist(), first.rows.tolist(), strict=False)
        ],
        title=f"PLIS of {COMPARED} training digits, non-private",
        label="PLIS",
    )
    gallery.savefig(options.out / "plis_mnist_gallery.png", dpi=80)
    save_distribution(first, options.out / "plis_mnist_outliers.png")
    print(f"\nThe pictures are {options.out}/plis_mnist_*.png.")
    print("These numbers depend on private data and are confidential themselves.")


def number(value: float) -> str:
    """Two or three digits, without an exponent if that is short."""
    return f"{value:,.0f}" if 10 <= value < 1e5 else f"{value:.2g}"


def save_maps(
    readings: dict[str, PLIS], digits: Tensor, targets: Tensor, xray: Tensor, path: Path
) -> None:
    """A column per image: digits from low to high PLIS in the non-private network, and an x-ray.

    A row per reading.
    """
    order = readings["non-private"].subject(digits, targets).argsort()
    picked = order[[0, len(order) // 2, 9 * len(order) // 10, -1]]
    shown = torch.cat([digits[picked], xray])
    label = torch.cat([targets[picked], random_labels(len(xray))])
    figure = Figure(figsize=(9, 7.6), layout="constrained")
    axes = figure.subplots(1 + len(readings), len(shown))
    for column, title in enumerate(COLUMNS):
        axes[0, column].imshow(shown[column, 0], cmap="gray", vmin=0, vmax=1)
        axes[0, column].set_title(f"{title}\nlabelled {label[column]}", fontsize=10)
    for row, (name, plis) in zip(axes[1:], readings.items(), strict=True):
        maps, norms = plis.attribute(shown, label), plis.subject(shown, label)
        for axis, image, heat, norm in zip(row, shown, maps, norms, strict=True):
            viz.show_map(image, heat, axis=axis)
            axis.set_title(f"‖PLIS‖ = {number(float(norm))}", fontsize=10)
        row[0].set_ylabel(name, fontsize=11)
    axes[0, 0].set_ylabel("image", fontsize=11)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    figure.supxlabel(
        "|PLIS| by pixel; darker: larger, each map on its own scale", fontsize=9, color="0.35"
    )
    figure.savefig(path, dpi=80)


def save_distribution(comparison: Comparison, path: Path) -> None:
    """Digits, and x-rays with every label, in both networks, for plain gradients."""
    shown = {
        f"{name}: {who}": comparison.scores[name, key][0]
        for name in ("non-private", "private")
        for who, key in (("digits", "digits"), ("x-rays", "every"))
    }
    figure = viz.distribution(
        torch.cat(list(shown.values())),
        groups=[name for name, values in shown.items() for _ in values],
        label="subject-level PLIS",
    )
    figure.axes[0].set_xlim(left=max(float(figure.axes[0].get_xlim()[0]), 1e-6))
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    main()
