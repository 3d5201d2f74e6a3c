"""From one gradient back to the chest x-ray: gradient inversion on untrained networks, without and
with DP noise.

A random sample of x-rays is attacked through several untrained networks (Geiping et al. 2020). Are
x-rays with a high subject-level PLIS reconstructed better? In each network the x-rays are divided
into thirds by PLIS. Printed are the mean SSIM of the lowest and of the highest third, their
difference and Spearman's correlation: means over networks, with 95 % bootstrap intervals over
x-rays (an x-ray is drawn with its attacks through all networks). The answer is yes while the search
is still running, as after the usual 400 steps. After 4,800 steps all x-rays are found, and the
difference is gone (docs/attacks-networks.md).

The main reading of PLIS is that of one plain gradient, without clipping or noise, because the
attacker sees this gradient: ‖∂‖g‖²/∂x‖ at the attacked weights and the true label. Two others are
shown for comparison: ‖g‖² itself, and ‖∂ log ‖g‖²/∂x‖, because the attack uses only the gradient's
direction.

Without the data's files, it runs on a small stand-in and says so (examples/README.md).

TORCHFIL_DATA=/path/to/data python examples/attack_inversion.py --out out  # two minutes on a core
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from networks import mnist_cnn
from paper_data import PaperData
from scipy.stats import rankdata
from torch import Tensor, nn
from torchmetrics.functional.image import structural_similarity_index_measure

from torchfil import PLIS
from torchfil.attacks.inversion import invert_gradients, observed_gradients

LOSS = nn.CrossEntropyLoss()
READINGS = {"plis": "PLIS", "gradient_signal": "‖g‖²", "relative_plis": "‖∂ log ‖g‖²/∂x‖"}
SETTINGS = (
    "images",
    "noisy_images",
    "steps",
    "restarts",
    "total_variation",
    "noise_multiplier",
    "seed",
    "chunk",
)
NUMBERS = "attack_inversion.json"
SHOWN = 6
OTHER_DRAWS = 10**6  # noise and starts must not use the random numbers of the weights
Record = dict[str, Any]


def ssim(a: Tensor, b: Tensor) -> Tensor:
    """Structural similarity of images [n, c, h, w] in [0, 1], [n] (Wang et al. 2004): 11×11
    Gaussian window, σ = 1.5.

    The mean is over the windows that lie inside the image, as in the paper. torchmetrics extends
    images beyond their border, and whether its own mean counts those windows depends on its
    version; here they are cut off.
    """
    _, windows = structural_similarity_index_measure(
        a, b, sigma=1.5, data_range=1.0, reduction="none", return_full_image=True
    )
    return windows[..., 5:-5, 5:-5].flatten(1).mean(dim=1)


def haarpsi(a: Tensor, b: Tensor) -> Tensor:
    """Haar wavelet perceptual similarity of grey images in [0, 1], [n, 1, h, w], [n] (Reisenhofer
    et al. 2018).

    C = 30, α = 4.2. Both images are first averaged over 2×2 pixels and downsampled, as in the
    original. There are three scales of Haar filters in both directions: the first two give the
    similarity, the third the weights.
    """
    C, alpha = 30.0, 4.2
    scaled = [nn.functional.avg_pool2d(255 * x, 2) for x in (a, b)]
    similarity, weight = [], []
    for direction in (0, 1):
        first, second = [[_haar(x, scale, direction).abs() for scale in (1, 2, 3)] for x in scaled]
        pairs = [
            (2 * p * q + C) / (p**2 + q**2 + C) for p, q in zip(first[:2], second[:2], strict=True)
        ]
        similarity.append((pairs[0] + pairs[1]) / 2)
        weight.append(torch.maximum(first[2], second[2]))
    local, weights = torch.cat(similarity, dim=1), torch.cat(weight, dim=1)
    lifted = (torch.sigmoid(alpha * local) * weights).flatten(1).sum(dim=1)
    total = weights.flatten(1).sum(dim=1)
    mean = torch.where(
        total > 0, lifted / total.clamp(min=1e-12), torch.sigmoid(torch.as_tensor(alpha)).to(a)
    )
    return (torch.logit(mean) / alpha).square()


def _haar(x: Tensor, scale: int, direction: int) -> Tensor:
    """Haar coefficients of one scale, in the image's size; ``direction`` 0: differences down, 1:
    across.
    """
    size = 2**scale
    kernel = torch.full((size, size), 2.0**-scale, dtype=x.dtype, device=x.device)
    kernel[: size // 2] *= -1
    kernel = kernel if direction == 0 else kernel.mT
    before, after = (size - 1) // 2, size // 2
    return nn.functional.conv2d(
        nn.functional.pad(x, (before, after, before, after)), kernel[None, None]
    )


MEASURES = {"ssim": ("SSIM", ssim), "haarpsi": ("HaarPSI", haarpsi)}


def observe(
    model: nn.Module, images: Tensor, labels: Tensor, source: torch.Generator, options: Any
) -> Tensor:
    """The gradient of every x-ray, then of the first few again with C = 1 and noise, [n + few,
    p].
    """
    few = options.noisy_images
    private = {"max_grad_norm": 1.0, "noise_multiplier": options.noise_multiplier, "seed": source}
    return torch.cat(
        [observed_gradients(model, LOSS, x, y) for x, y in chunks(images, labels, options.chunk)]
        + [
            observed_gradients(model, LOSS, x, y, **private)
            for x, y in chunks(images[:few], labels[:few], options.chunk)
        ]
    )


def chunks(a: Tensor, b: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows of both tensors, in chunks of this size."""
    return zip(a.split(size), b.split(size), strict=True)


def attack(
    images: Tensor, labels: Tensor, seed: int, options: Any
) -> tuple[Record, dict[str, Tensor]]:
    """Both attacks through the untrained network of this seed: numbers by x-ray, and the
    reconstructed images.
    """
    torch.manual_seed(seed)
    model = mnist_cnn(2, activation=nn.Tanh).to(images.device)
    plis = PLIS(model, LOSS, cuda_graphs=False)
    subject, signal = plis.subject(images, labels), plis.privacy_loss(images, labels)

    # Both attacks together, as one list of gradients.
    source = torch.Generator(images.device).manual_seed(seed + OTHER_DRAWS)
    seen = observe(model, images, labels, source, options)
    their_labels = torch.cat([labels, labels[: options.noisy_images]])
    guesses = [
        invert_gradients(
            model,
            LOSS,
            g,
            y,
            shape=tuple(images.shape[1:]),
            total_variation_weight=options.total_variation,
            restarts=options.restarts,
            steps=options.steps,
            seed=source,
            progress=True,
        ).images
        for g, y in chunks(seen, their_labels, options.chunk)
    ]
    plain, noisy = torch.cat(guesses).split([len(images), options.noisy_images])

    record: Record = {
        "seed": seed,
        "plis": subject.tolist(),
        "gradient_signal": signal.tolist(),
        "relative_plis": (subject / signal).tolist(),
    }
    for arm, guess in (("plain", plain), ("noisy", noisy)):
        record[arm] = {
            name: judge(guess, images[: len(guess)]).tolist()
            for name, (_, judge) in MEASURES.items()
        }
    return record, {"plain": plain.cpu(), "noisy": noisy.cpu()}


def statistics(exposure: np.ndarray, values: np.ndarray, resamples: int) -> dict[str, list[float]]:
    """Thirds and rank correlation within each network, [networks, n] both.

    Means over networks with 95 % intervals.

    Returns:
        For "low" and "high" (the mean value of the third of lowest and highest exposure),
        "difference" (high − low), "spearman" and "all" (the mean value): estimate, lower and upper
        end; x-rays are resampled, networks are not.
    """
    n = values.shape[1]
    third = n // 3

    def of(rows: np.ndarray) -> list[float]:
        e, v = exposure[:, rows], values[:, rows]
        ranked = np.take_along_axis(v, np.argsort(e, axis=1, kind="stable"), axis=1)
        low, high = ranked[:, :third].mean(), ranked[:, -third:].mean()
        ranks = [rankdata(part, axis=1) for part in (e, v)]
        centred = [part - part.mean(axis=1, keepdims=True) for part in ranks]
        lengths = [np.linalg.norm(part, axis=1) for part in centred]
        correlation = (centred[0] * centred[1]).sum(axis=1) / np.maximum(
            lengths[0] * lengths[1], 1e-300
        )
        return [low, high, high - low, correlation.mean(), v.mean()]

    draws = np.random.default_rng(0).integers(n, size=(resamples, n))
    ends = np.quantile([of(rows) for rows in draws], [0.025, 0.975], axis=0)
    table = np.column_stack([of(np.arange(n)), *ends])
    return dict(zip(("low", "high", "difference", "spearman", "all"), table.tolist(), strict=True))


def summary(networks: list[Record], resamples: int) -> Record:
    """The statistics of both attacks, by measure and reading."""
    by_arm: Record = {}
    for arm in ("plain", "noisy"):
        for measure in MEASURES:
            values = np.array([network[arm][measure] for network in networks])
            for reading in READINGS:
                exposure = np.array([network[reading] for network in networks])[
                    :, : values.shape[1]
                ]
                by_arm.setdefault(arm, {}).setdefault(measure, {})[reading] = statistics(
                    exposure, values, resamples
                )
    return by_arm


def told(by_arm: Record) -> str:
    """The summary in lines."""
    lines = []
    for arm, by_measure in by_arm.items():
        for measure, by_reading in by_measure.items():
            for reading, numbers in by_reading.items():
                low, high, difference, spearman, every = (
                    f"{value:.3f} [{lower:.3f}, {upper:.3f}]"
                    for value, lower, upper in numbers.values()
                )
                lines.append(
                    f"{arm}, mean {MEASURES[measure][0]} by {READINGS[reading]}: low third {low}, "
                    f"high third {high}, difference {difference}, rank correlation {spearman}, "
                    f"all {every}"
                )
    return "\n".join(lines)


def main() -> None:
    """Invert, compare, save the numbers after every network, then the pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--images", type=int, default=90)
    parser.add_argument(
        "--noisy-images", type=int, default=21, help="how many of them are also attacked with noise"
    )
    parser.add_argument("--networks", type=int, default=1)
    parser.add_argument(
        "--skip", type=int, default=0, help="skip this many networks, attacked elsewhere"
    )
    parser.add_argument(
        "--join", type=Path, nargs="+", help="do not attack; join the results in these JSON files"
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--restarts", type=int, default=1)
    parser.add_argument("--total-variation", type=float, default=1e-4, help="α")
    parser.add_argument("--noise-multiplier", type=float, default=1.0)
    parser.add_argument("--chunk", type=int, default=37, help="gradients attacked at once")
    parser.add_argument(
        "--resamples", type=int, default=1000, help="bootstrap samples for the intervals"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the sample and the first network; the others follow"
    )
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    if options.join:
        finish(joined(options.join), options)
        return
    if not 3 <= options.noisy_images <= options.images:
        parser.error(
            f"--noisy-images {options.noisy_images} must lie between 3 and --images "
            f"{options.images}"
        )

    images, labels = PaperData("pneumoniamnist").chest_xrays()
    torch.backends.cudnn.allow_tf32 = False  # gradients of ten bits would be another, weaker attack
    rows = torch.randperm(len(images), generator=torch.Generator().manual_seed(options.seed))[
        : options.images
    ]
    images, labels = images[rows].to(options.device), labels[rows].to(options.device)

    networks: list[Record] = []
    settings = {name: getattr(options, name) for name in SETTINGS}
    everything: Record = {"settings": settings, "rows": rows.tolist(), "networks": networks}
    first = options.seed + options.skip
    for seed in range(first, first + options.networks):
        start = time.perf_counter()
        record, guesses = attack(images, labels, seed, options)
        networks.append(record)
        if len(networks) == 1:
            shown = images.cpu(), guesses
        (options.out / NUMBERS).write_text(json.dumps(everything))
        print(f"network {seed}: {time.perf_counter() - start:.0f} s", flush=True)

    if images.is_cuda:
        print(
            f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB, {options.chunk} "
            "gradients at once"
        )
    save_images(*shown, networks[0], options)
    finish(everything, options)


def joined(paths: list[Path]) -> Record:
    """Several runs through different networks as one.

    They must have attacked the same x-rays in the same way.
    """
    runs = [json.loads(path.read_text()) for path in paths]
    networks = [network for run in runs for network in run["networks"]]
    seeds = [network["seed"] for network in networks]
    for path, run in zip(paths, runs, strict=True):
        if (run["settings"], run["rows"]) != (runs[0]["settings"], runs[0]["rows"]):
            raise SystemExit(
                f"{path} has other settings or x-rays than {paths[0]}; join runs that differ in "
                "--skip only"
            )
    if len(set(seeds)) < len(seeds):
        raise SystemExit(f"networks {seeds} must differ; set --skip to attack through further ones")
    return {"settings": runs[0]["settings"], "rows": runs[0]["rows"], "networks": networks}


def finish(everything: Record, options: Any) -> None:
    """Statistics over all networks: printed, saved with the numbers, drawn."""
    everything["summary"] = summary(everything["networks"], options.resamples)
    (options.out / NUMBERS).write_text(json.dumps(everything))
    print(told(everything["summary"]))
    save_tenths(everything["networks"], options.out / "attack_inversion_plis.png")
    print(f"The pictures and numbers are in {options.out}. They show private data.")


def save_images(images: Tensor, guesses: dict[str, Tensor], record: Record, options: Any) -> None:
    """X-rays with the lowest and highest PLIS in one network, of those attacked both ways, above
    the results.
    """
    order = np.argsort(record["plis"][: len(guesses["noisy"])])
    half = min(SHOWN // 2, len(order) // 2)
    figure = Figure(figsize=(8, 4.4), layout="constrained")
    axes = figure.subplots(1 + len(guesses), 2 * half)
    for column, row in enumerate([*order[:half], *order[-half:]]):
        axes[0, column].set_title(f"{'low' if column < half else 'high'} PLIS", fontsize=9)
        axes[0, column].imshow(images[row, 0].numpy(), cmap="gray", vmin=0, vmax=1)
        for axis, (arm, guess) in zip(axes[1:, column], guesses.items(), strict=True):
            axis.imshow(guess[row, 0].numpy(), cmap="gray", vmin=0, vmax=1)
            axis.set_title(f"SSIM {record[arm]['ssim'][row]:.2f}", fontsize=8)
    names = ("x-ray", "without noise", f"DP, σ = {options.noise_multiplier:g}")
    for axis, name in zip(axes[:, 0], names, strict=True):
        axis.set_ylabel(name, fontsize=9)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    figure.savefig(options.out / "attack_inversion.png", dpi=80)


def save_tenths(networks: list[Record], path: Path) -> None:
    """Mean SSIM without noise by decile of PLIS: a thin line for each network, a thick one for
    their mean.
    """
    figure = Figure(figsize=(5.2, 3.4), layout="constrained")
    axis = figure.subplots()
    curves = []
    for network in networks:
        ranked = np.array(network["plain"]["ssim"])[np.argsort(network["plis"])]
        curves.append([part.mean() for part in np.array_split(ranked, 10) if len(part)])
        axis.plot(np.arange(1, len(curves[-1]) + 1), curves[-1], color="0.75", linewidth=1)
    mean = np.mean(curves, axis=0)
    axis.plot(
        np.arange(1, len(mean) + 1),
        mean,
        "o-",
        color="#0072B2",
        label=f"mean over networks: {len(networks)}",
    )
    axis.set(xlabel="tenth of subject-level PLIS, lowest to highest", ylabel="mean SSIM")
    axis.legend(frameon=False, fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    main()
