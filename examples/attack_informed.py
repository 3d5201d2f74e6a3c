"""The attack that the Fisher bound limits: one example from all noisy gradients of a private run,
all others known.

A scalar and a five-dimensional example in a tiny network, trained by DP-SGD 2,000 times at each
noise scale. The table shows the error of the most likely guess as a multiple of the bound on
unbiased guesses.

python examples/attack_informed.py --out out
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import nn

from torchfil import bounds
from torchfil.attacks.transcripts import (
    expected_information,
    informed_reconstruction,
    mean_jacobian,
    record_dpsgd,
)

NOISE = (0.01, 0.03, 0.1, 0.2, 0.4, 0.8)
EXAMPLES, STEPS, ROW = 20, 10, 0


def attack(d: int, sigma: float, runs: int) -> tuple[float, float, float, float]:
    """The bound on unbiased guesses, the bound for this guess's bias, the achieved error, its
    standard error.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(d, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    x = torch.randn(EXAMPLES, d, dtype=torch.float64)
    y = torch.sin(x.sum(dim=1, keepdim=True)) + 0.3
    transcripts = record_dpsgd(
        model,
        nn.MSELoss(),
        x,
        y,
        steps=STEPS,
        lr=0.5,
        max_grad_norm=1.0,
        noise_multiplier=sigma,
        runs=runs,
        seed=1,
    )
    result = informed_reconstruction(transcripts, ROW, restarts=2, iterations=25, seed=2)
    assert result.standard_error is not None
    guesses, information = torch.tensor(result.guesses)[0], expected_information(transcripts, ROW)
    bound = bounds.mse_from_fim(information[None]).item()
    shift = mean_jacobian(transcripts, ROW, guesses)
    biased = bounds.mse_biased(
        information[None], shift[None], (guesses.mean(dim=0) - x[ROW])[None]
    ).item()
    return bound, biased, float(result.achieved[0]), float(result.standard_error[0])


def main() -> None:
    """Print the table and save the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--noise", type=float, nargs="+", default=NOISE, help="multipliers σ")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    figure = Figure(figsize=(8, 3.6), layout="constrained")
    errors, ratios = figure.subplots(1, 2)
    print(f"Data: {EXAMPLES} made-up examples; nothing is downloaded.")
    print(f"{options.runs} runs of {STEPS} steps; ± one standard error")
    print("coordinates  σ     bound    achieved  achieved / bound  achieved / bound for its bias")
    for d, colour, marker in ((1, "#0072B2", "o"), (5, "#D55E00", "s")):
        table = torch.tensor([attack(d, sigma, options.runs) for sigma in options.noise])
        for sigma, (low, own, mse, se) in zip(options.noise, table.tolist(), strict=True):
            ratios_text = f"{mse / low:.3f} ± {se / low:.3f}     {mse / own:.3f} ± {se / own:.3f}"
            print(f"{d:11d}  {sigma:<4g}  {low:.1e}  {mse:.1e}   {ratios_text}", flush=True)

        bound, biased, achieved, error = table.unbind(dim=1)
        name = "scalar" if d == 1 else f"{d} coordinates"
        errors.plot(options.noise, bound, color=colour, linewidth=1.2, label=f"bound, {name}")
        errors.plot(
            options.noise, achieved, marker, color=colour, markersize=5, label=f"attack, {name}"
        )
        ratios.plot(
            options.noise,
            biased / bound,
            ":",
            color=colour,
            linewidth=1.2,
            label=f"bound for its bias, {name}",
        )
        ratios.errorbar(
            options.noise,
            achieved / bound,
            yerr=1.96 * error / bound,
            fmt=marker + "-",
            color=colour,
            capsize=3,
            label=f"attack, {name}",
        )

    errors.set(
        xscale="log",
        yscale="log",
        xlabel="noise multiplier σ",
        ylabel="mean squared error per coordinate",
    )
    ratios.axhline(1, color="0.3", linewidth=1)
    ratios.set(
        xscale="log",
        yscale="log",
        xlabel="noise multiplier σ",
        ylabel="achieved / bound (95 % interval)",
    )
    for axis in (errors, ratios):
        axis.legend(frameon=False, fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(options.out / "attack_informed.png", dpi=90)
    print(f"The picture is {options.out / 'attack_informed.png'}.")


if __name__ == "__main__":
    main()
