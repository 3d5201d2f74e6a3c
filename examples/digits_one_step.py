"""How much does one step of DP-SGD leak about each of ten handwritten digits?

Compares exact Fisher information with a few random probes, and shows what it means for an attacker.
"""

from __future__ import annotations

import time

import torch
from paper_data import small_digits
from torch import Tensor, nn

from torchfil import bounds, fisher

SIGMA, C, Q = 1.0, 1.0, 0.05


def train(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    """A few epochs without privacy, so the step is measured on a model that has learned
    something.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()


def main() -> None:
    """Print the table."""
    torch.manual_seed(0)
    images, labels = small_digits()  # [1797, 1, 8, 8], pixels in [0, 1]
    print("Data: scikit-learn's 1,797 handwritten digits; nothing is downloaded.")
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(128, 10)
    )
    train(model, images, labels)
    print(
        f"One step of DP-SGD on small digits: noise multiplier {SIGMA}, gradients clipped to {C}."
    )
    print(
        f"The model gets {100 * (model(images).argmax(1) == labels).float().mean():.0f} % of them "
        "right.\n"
    )

    batch, targets = images[:200], labels[:200]

    def trace(**options: object) -> tuple[fisher.Estimate, float]:
        start = time.perf_counter()
        result = fisher.fim_trace(
            model,
            nn.CrossEntropyLoss(),
            batch,
            targets,
            max_grad_norm=C,
            noise_multiplier=SIGMA,
            **options,  # type: ignore[arg-type]
        )
        return result, time.perf_counter() - start

    exact, exact_seconds = trace(estimator="exact")
    probed, probed_seconds = trace(
        estimator="weight-probes", num_probes=8, generator=torch.Generator().manual_seed(0)
    )
    amplified, _ = trace(estimator="exact", amplification=fisher.PoissonAmplification(Q))
    attacker_error = bounds.mse_from_trace(exact.value, 64).sqrt()
    # it takes part with probability Q
    hidden_error = bounds.mse_from_trace(amplified.value * Q, 64).sqrt()

    order = exact.value.argsort(descending=True)
    print(
        "          Fisher information (trace)   an unbiased attacker's error per pixel is at least"
    )
    print("digit     exact    8 probes            batch known     batch secret (5 % sampled)")
    for title, rows in (("most exposed", order[:5]), ("least exposed", order[-5:])):
        print(f"-- {title}")
        for i in rows.tolist():
            probe = f"{probed.value[i]:>9.2f} ± {probed.standard_error[i]:<8.2f}"
            errors = f"± {attacker_error[i]:>8.2f}        ± {hidden_error[i]:>8.2f}"
            print(f"{targets[i].item():>5} {exact.value[i]:>9.2f} {probe} {errors}")
    low, high = probed.interval(0.95)
    covered = ((low <= exact.value) & (exact.value <= high)).float().mean()
    print("\nPixels lie between 0 and 1: an error above about 0.3 is no better than a guess.")
    print(
        f"The probes' 95 % intervals contain the exact value for {100 * covered:.0f} % of the "
        f"{len(batch)} examples."
    )
    print(f"Exact: {exact_seconds:.2f} s; 8 probes: {probed_seconds:.2f} s.")
    print("These numbers depend on private data and are confidential themselves.")


if __name__ == "__main__":
    main()
