"""How alike images are: SSIM against a loop over its windows, HaarPSI in cases whose answer is known."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from torch import Tensor

from tests.cases import DEVICE
from torchfil.attacks.inversion import haarpsi, require_ssim, ssim

pytest.importorskip("torchmetrics")


def smooth_images(n: int, size: int) -> Tensor:
    across = torch.linspace(0, 1, size)
    phase = torch.arange(n).float()[:, None, None]
    return (0.5 + 0.4 * torch.sin(3 * across[:, None] + 2 * across[None] + phase)).unsqueeze(1).to(DEVICE)


def ssim_by_windows(a: Tensor, b: Tensor) -> float:
    """One grey image [h, w], window by window, as Wang et al. 2004 define it."""
    line = torch.exp(-((torch.arange(11, dtype=a.dtype) - 5) ** 2) / (2 * 1.5**2))
    weights = torch.outer(line, line) / line.sum() ** 2
    found = []
    for top in range(a.shape[0] - 10):
        for left in range(a.shape[1] - 10):
            p, q = a[top : top + 11, left : left + 11], b[top : top + 11, left : left + 11]
            mean_p, mean_q = (weights * p).sum(), (weights * q).sum()
            var_p, var_q = (weights * (p - mean_p) ** 2).sum(), (weights * (q - mean_q) ** 2).sum()
            cov = (weights * (p - mean_p) * (q - mean_q)).sum()
            light = (2 * mean_p * mean_q + 1e-4) / (mean_p**2 + mean_q**2 + 1e-4)
            found.append(light * (2 * cov + 9e-4) / (var_p + var_q + 9e-4))
    return torch.stack(found).mean().item()


def test_ssim_is_the_mean_over_the_windows_inside_each_image() -> None:
    source = torch.Generator().manual_seed(0)
    a, b = (torch.rand(3, 1, 14, 13, generator=source, dtype=torch.float64) for _ in range(2))
    b[0] = 0.9 * a[0] + 0.05
    expected = [ssim_by_windows(p[0], q[0]) for p, q in zip(a, b, strict=True)]
    a, b = a.to(DEVICE), b.to(DEVICE)
    assert ssim(a, b).tolist() == pytest.approx(expected, rel=1e-9)
    two = ssim(torch.cat([a, b], dim=1), torch.cat([b, b], dim=1))  # the second channel is alike
    assert two.tolist() == pytest.approx([(value + 1) / 2 for value in expected], rel=1e-9)


def test_without_torchmetrics_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchmetrics.functional.image", None)
    for ask in (require_ssim, lambda: ssim(torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 2, 2))):
        with pytest.raises(ImportError, match=r"SSIM needs torchmetrics: pip install 'torchfil\[attacks\]'"):
            ask()


def test_ssim_of_flat_images_has_its_closed_form() -> None:
    a, b = (torch.full((1, 1, 20, 20), value, device=DEVICE) for value in (0.2, 0.8))
    expected = (2 * 0.2 * 0.8 + 1e-4) / (0.2**2 + 0.8**2 + 1e-4)  # contrast and structure are 1
    assert ssim(a.double(), b.double()).item() == pytest.approx(expected, rel=1e-6)


def test_ssim_of_a_negative_is_negative_and_of_noise_is_small() -> None:
    images = smooth_images(2, 28)
    assert (ssim(images, 1 - images) < 0).all()
    noise = torch.rand(2, 1, 28, 28, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    assert (ssim(images, noise).abs() < 0.2).all()


def test_haarpsi_falls_with_noise_and_is_symmetric() -> None:
    images = torch.rand(1, 1, 32, 32, generator=torch.Generator().manual_seed(0)).repeat(3, 1, 1, 1)
    noise = torch.randn(1, 1, 32, 32, generator=torch.Generator().manual_seed(1))
    changed = (images + torch.tensor([0.0, 0.05, 0.5])[:, None, None, None] * noise).to(DEVICE)
    images = images.to(DEVICE)
    found = haarpsi(images, changed)
    assert found[0].item() == pytest.approx(1, abs=1e-5)
    assert found[0] > found[1] > found[2]
    torch.testing.assert_close(found, haarpsi(changed, images))
    flat = torch.zeros(1, 1, 32, 32, device=DEVICE)
    assert haarpsi(flat, flat + 0.5)[0] > 0  # finite: the borders differ
    assert math.isclose(haarpsi(flat, flat)[0].item(), 1, abs_tol=1e-5)


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"images of 6×6 pixels are smaller than 11×11"):
        ssim(smooth_images(2, 6), smooth_images(2, 6))
    with pytest.raises(ValueError, match=r"the same shape .n, c, h, w., got .1, 1, 16, 16. and .2, 1, 16, 16."):
        ssim(smooth_images(1, 16), smooth_images(2, 16))
    with pytest.raises(ValueError, match="haarpsi takes grey images"):
        haarpsi(torch.zeros(1, 3, 32, 32), torch.zeros(1, 3, 32, 32))
