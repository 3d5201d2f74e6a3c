"""The PLIS paper, 2022: reconstruction from gradients (Table 1 and the second column of Figure
3).
"""

from __future__ import annotations

import argparse
from functools import lru_cache

import attack_inversion
import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.measuring import Json
from benchmarks.zoo import mnist_cnn
from reproduction.rows import Earlier, Outcome, Row, Run, check_near, check_that
from torchfil import PLIS

__all__ = ["ROWS"]

XRAYS = "PneumoniaMNIST: 3,882 chest x-rays, 28 × 28"


@lru_cache(maxsize=1)
def inverted(run: Run) -> tuple[Tensor, Tensor, Json, dict[str, Tensor]]:
    """Attacks on 90 x-rays through one untrained network (Geiping et al. 2020), on 21 of them also
    with DP noise.
    """
    images, labels = run.data("pneumoniamnist").chest_xrays()
    count, steps, few = (6, 2, 3) if run.tiny else (90, 400, 21)
    rows = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[:count]
    options = argparse.Namespace(
        noisy_images=few,
        steps=steps,
        restarts=1,
        total_variation=1e-4,
        noise_multiplier=1.0,
        chunk=37,
    )
    record, guesses = attack_inversion.attack(images[rows], labels[rows], 0, options)
    return images[rows], labels[rows], record, guesses


def table_1(run: Run, measure: str, theirs: tuple[float, float]) -> Outcome:
    """The similarity of guesses for x-rays with low and with high PLIS."""
    _, _, record, _ = inverted(run)
    values, exposure = np.array(record["plain"][measure]), np.array(record["plis"])
    found = attack_inversion.statistics(exposure[None], values[None], 20 if run.tiny else 1000)
    low, high, difference = found["low"], found["high"], found["difference"]
    order = np.argsort(exposure)
    pair = float(values[order[0]]), float(values[order[-1]])
    checks = (
        check_that(
            "x-rays of high PLIS",
            "reconstructed better",
            f"difference {difference[0]:.3f} [{difference[1]:.3f}, {difference[2]:.3f}]",
            "95 % interval of high − low third above 0",
            difference[1] > 0,
        ),
        check_near("low PLIS", theirs[0], low[0], 0.05),
        check_near("high PLIS", theirs[1], high[0], 0.05),
    )
    here = (
        f"{low[0]:.3f} (lowest third) and {high[0]:.3f} (highest third), difference "
        f"{difference[0]:.3f} [{difference[1]:.3f}, {difference[2]:.3f}]; the one of lowest PLIS "
        f"{pair[0]:.3f}, of highest {pair[1]:.3f}"
    )
    return Outcome(here, checks)


def figure_3_where(run: Run) -> Outcome:
    """Within an x-ray: is the guess worst where PLIS is lowest?"""
    images, labels, _, guesses = inverted(run)
    torch.manual_seed(0)  # the network of the attack
    model = mnist_cnn(2, activation=nn.Tanh)
    maps = PLIS(model, nn.CrossEntropyLoss(), cuda_graphs=False).attribute(images, labels).abs()
    errors = (guesses["plain"] - images).abs()
    # Both as means over 16 squares of 7 × 7 pixels: single pixels are noisy.
    coarse = [nn.functional.avg_pool2d(part, 7).flatten(1) for part in (maps, errors)]
    ranks = [part.argsort(dim=1).argsort(dim=1).double() for part in coarse]
    centred = [part - part.mean(dim=1, keepdim=True) for part in ranks]
    each = (centred[0] * centred[1]).sum(dim=1) / (centred[0].norm(dim=1) * centred[1].norm(dim=1))
    mean, error = float(each.mean()), float(each.std() / len(each) ** 0.5)
    told = f"rank correlation {mean:.2f} ± {error:.2f}"
    checks = (
        check_that(
            "parts of low PLIS",
            "reconstructed worst",
            told,
            "negative beyond two standard errors",
            mean + 2 * error < 0,
        ),
    )
    here = f"{told} of PLIS and error over 16 squares, mean over {len(each)} x-rays"
    return Outcome(here, checks)


def figure_3_private(run: Run) -> Outcome:
    """With C = 1 and σ = 1: is anything reconstructed?"""
    images, _, record, guesses = inverted(run)
    attack_inversion.save_images(
        images, guesses, record, argparse.Namespace(out=run.out, noise_multiplier=1.0)
    )
    (run.out / "attack_inversion.png").replace(run.out / "repro_plis_table1.png")
    ssim = float(np.mean(record["noisy"]["ssim"]))
    checks = (
        check_that(
            "with DP",
            "no reconstruction possible",
            f"mean SSIM {ssim:.3f}",
            "below 0.1",
            ssim < 0.1,
        ),
    )
    return Outcome(
        f"mean SSIM {ssim:.3f} over {len(record['noisy']['ssim'])} x-rays",
        checks,
        pictures=("repro_plis_table1.png",),
    )


UNTRAINED = (
    "The paper attacks its trained network and reports one x-ray of either kind; here untrained "
    "networks are attacked, 90 x-rays, 400 steps. With 4,800 steps all x-rays are found, and the "
    "difference is gone (docs/attacks-networks.md)."
)


ROWS = (
    Row(
        "plis-table1-ssim",
        "plis",
        "Table 1, SSIM",
        "0.8536 for a low-PLIS x-ray, 0.9912 for a high-PLIS one",
        XRAYS + ", 90 of them",
        lambda run: table_1(run, "ssim", (0.8536, 0.9912)),
        3,
        ("pneumoniamnist",),
        stand_in="untrained network, thirds of 90 x-rays",
        reason=UNTRAINED,
    ),
    Row(
        "plis-table1-haarpsi",
        "plis",
        "Table 1, HaarPSI",
        "0.7323 for a low-PLIS x-ray, 0.7779 for a high-PLIS one",
        XRAYS + ", the same 90",
        lambda run: table_1(run, "haarpsi", (0.7323, 0.7779)),
        0.1,
        ("pneumoniamnist",),
        stand_in="untrained network, thirds of 90 x-rays",
        reason=UNTRAINED,
    ),
    Row(
        "plis-figure3-where",
        "plis",
        "Figure 3, where it is reconstructed",
        "in the low-PLIS x-ray, the part of lowest PLIS is reconstructed worst",
        XRAYS + ", the same 90",
        figure_3_where,
        0.1,
        ("pneumoniamnist",),
        stand_in="untrained network; the paper shows one x-ray",
    ),
    Row(
        "plis-figure3-dp",
        "plis",
        "Figure 3, with DP",
        "no reconstruction was possible",
        XRAYS + ", 21 of the 90; C = 1, σ = 1",
        figure_3_private,
        0.1,
        ("pneumoniamnist",),
        stand_in="untrained network",
    ),
    Row(
        "plis-table1-gpu",
        "plis",
        "Table 1, many x-rays",
        "SSIM 0.8536 and 0.9912 (one x-ray each)",
        XRAYS + ": 1,200 of them, five untrained networks, 400 steps",
        None,
        stand_in="untrained networks, thirds of 1,200 x-rays",
        reason=UNTRAINED,
        earlier=Earlier(
            here="0.728 [0.721, 0.735] (lowest third) and 0.791 [0.785, 0.796] (highest third), "
            "difference 0.063 [0.054, 0.071]; HaarPSI 0.712 and 0.753",
            checks=(
                check_that(
                    "x-rays of high PLIS",
                    "reconstructed better",
                    "difference 0.063 [0.054, 0.071]",
                    "95 % interval above 0",
                    True,
                ),
                check_near("low PLIS", 0.8536, 0.728, 0.05),
                check_near("high PLIS", 0.9912, 0.791, 0.05),
            ),
            device="one NVIDIA H200",
            source="docs/attacks-networks.md",
            quotes=(
                "0.728 [0.721, 0.735]",
                "0.791 [0.785, 0.796]",
                "**0.063 [0.054, 0.071]**",
                "0.712 and 0.753",
            ),
            command="python examples/attack_inversion.py --device cuda --images 1200 --networks 5 "
            "--seed 20 --noisy-images 210",
        ),
    ),
)
