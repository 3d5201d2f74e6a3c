"""Train a small network privately on handwritten digits, and see whose digit leaks most.

The loop is an ordinary Opacus loop; the engine keeps each example's Fisher information as well as
ε. `torchfil demo` trains the same network and writes a report.
"""

from __future__ import annotations

import argparse
import time
import warnings

import torch
from paper_data import small_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torchfil import FILPrivacyEngine

warnings.filterwarnings("ignore", message="Full backward hook is firing")
DELTA = 1e-4
SHADES = " .:-=+*#%@"


def drawn(image: torch.Tensor) -> list[str]:
    """An 8×8 image as text."""
    return ["".join(2 * SHADES[min(int(10 * v), 9)] for v in row) for row in image.tolist()]


def main() -> None:
    """Train, then print the most and the least exposed digits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--noise", type=float, default=1.0, help="noise multiplier σ")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()

    torch.manual_seed(0)
    images, labels = small_digits()  # [1797, 1, 8, 8] in [0, 1], [1797]
    print("Data: scikit-learn's 1,797 handwritten digits; nothing is downloaded.")
    loader = DataLoader(TensorDataset(images, labels), batch_size=128)
    model: nn.Module = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(128, 10)
    ).to(options.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)

    engine = FILPrivacyEngine()
    model, optimizer, loader = engine.make_private(
        model, optimizer, loader, noise_multiplier=options.noise
    )

    start = time.perf_counter()
    for epoch in range(options.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x.to(options.device)), y.to(options.device))
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            correct = (model(images.to(options.device)).argmax(1).cpu() == labels).float().mean()
        print(
            f"epoch {epoch + 1}: accuracy {100 * correct:.0f} %, ε = "
            f"{engine.get_epsilon(DELTA):.2f} at δ = {DELTA:g}"
        )
    print(f"{time.perf_counter() - start:.0f} s\n")

    table = engine.leakage(delta=DELTA).sort_values("mse_bound")
    never = int((table.participations == 0).sum())
    table = table[table.participations > 0]
    table["digit"] = [int(labels[i]) for i in table.index]
    shown = [
        "digit",
        "fil",
        "fil_error",
        "sampling_error",
        "mse_bound",
        "participations",
        "individual_epsilon",
    ]
    guess = (images - images.mean()).square().mean().item()
    print(
        "An unbiased attacker who sees every noisy gradient and knows all other digits guesses "
        "the pixels (0 to 1)"
    )
    print(
        "of a digit with an MSE of at least mse_bound. The MSE of guessing mean grey everywhere "
        f"is {guess:.2f}.\n"
    )
    print("most exposed\n" + table[shown].head(5).round(3).to_string(), end="\n\n")
    print("least exposed\n" + table[shown].tail(5).round(3).to_string(), end="\n\n")
    most, least = table.index[0], table.index[-1]
    print(f"most exposed: {most:<10}  least exposed: {least}")
    for left, right in zip(drawn(images[most, 0]), drawn(images[least, 0]), strict=True):
        print(f"{left:<24}  {right}")
    print(
        "\nfil_error: error of the probes. sampling_error: effect of the random choice of batches "
        "(average runs)."
    )
    print(f"{never} digits were never drawn in this run, so it does not show how much they leak.")
    groups = engine.group_leakage(dict(enumerate(labels.tolist())), quantiles=(0.5,))
    print("\nFisher information loss by digit\n" + groups.sort_index().round(3).to_string())
    print(
        "\nOne bound for all digits, from ε alone (Theorem 1): MSE at least "
        f"{engine.get_rdp_mse_bound(1.0):.2g}"
    )
    print("These numbers depend on private data and are confidential themselves.")


if __name__ == "__main__":
    main()
