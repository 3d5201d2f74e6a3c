"""Exact spectral FIL of every example, compared with the paper's method: a Jacobian and an SVD per
example.

python benchmarks/glm_fil.py [--large]
"""

from __future__ import annotations

import argparse
import resource
import time

import numpy as np

from torchfil.glm import LogisticRegression


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--large", action="store_true", help="also one million examples of 100 columns"
    )
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    for n, d in [(12_665, 784)] + [(1_000_000, 100)] * options.large:
        X = rng.normal(size=(n, d)) * np.geomspace(1, 1e-2, d)
        X /= np.linalg.norm(X, axis=1).max()
        y = (X[:, 0] + 0.1 * rng.normal(size=n) > 0).astype(float)

        start = time.perf_counter()
        model = LogisticRegression(l2=1e-3).fit(X, y)
        fitted = time.perf_counter() - start
        start = time.perf_counter()
        eta = model.fil(X, y)
        ours = time.perf_counter() - start
        start = time.perf_counter()
        model.fil(X, y, groups=["all"] * n)
        everybody = time.perf_counter() - start

        # the paper's method, timed on 64 examples and extrapolated linearly
        sensitivity = model.sensitivity(X, y)
        sample = rng.choice(n, 64, replace=False)
        start = time.perf_counter()
        theirs = np.array([np.linalg.norm(sensitivity.jacobian(int(i)).numpy(), 2) for i in sample])
        paper = (time.perf_counter() - start) / 64 * n

        error = np.abs(eta[sample] / theirs - 1).max()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(
            f"n = {n:,}, d = {d}: fit {fitted:.1f} s, every example {ours:.1f} s, the whole set "
            f"{everybody:.1f} s"
        )
        print(
            f"  an SVD per example {paper:.0f} s (64 timed): × {paper / ours:.0f}; they differ by "
            f"{error:.1e} relative"
        )
        print(f"  peak memory of the process {peak:.1f} GiB")


if __name__ == "__main__":
    main()
