"""How alike two images are: SSIM by torchmetrics, HaarPSI after its paper's formulas; 1 means the same image."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_SSIM_WINDOW, _SSIM_SIGMA = 11, 1.5


def require_ssim() -> Any:
    """The function of torchmetrics that computes :func:`ssim`; call this before a long attack that needs SSIM.

    Raises:
        ImportError: torchmetrics is not installed.
    """
    try:
        from torchmetrics.functional.image import structural_similarity_index_measure
    except ImportError as error:
        raise ImportError("SSIM needs torchmetrics: pip install 'torchfil[attacks]'") from error
    return structural_similarity_index_measure


def ssim(a: Tensor, b: Tensor, *, data_range: float = 1.0) -> Tensor:
    """Structural similarity of images [n, c, h, w], [n] (Wang et al. 2004): 11×11 Gaussian window, σ = 1.5, no padding.

    The mean is over the windows that lie inside the image, as in the paper. torchmetrics extends images beyond their
    border, and whether its own mean counts those windows depends on its version; here they are cut off.

    Raises:
        ImportError: torchmetrics is not installed.

    Example:
        >>> x = torch.rand(2, 1, 16, 16)
        >>> ssim(x, x).round(decimals=3)
        tensor([1., 1.])
    """
    measure = require_ssim()
    _check_pair(a, b, _SSIM_WINDOW)
    _, windows = measure(
        a, b, sigma=_SSIM_SIGMA, data_range=data_range, reduction="none", return_full_image=True
    )  # [n, c, h, w], one window around each pixel
    border = _SSIM_WINDOW // 2
    return windows[..., border:-border, border:-border].flatten(1).mean(dim=1)


def haarpsi(a: Tensor, b: Tensor, *, data_range: float = 1.0) -> Tensor:
    """Haar wavelet perceptual similarity of grey images [n, 1, h, w], [n] (Reisenhofer et al. 2018): C = 30, α = 4.2.

    Both images are first averaged over 2×2 pixels and downsampled, as in the original. There are three scales of Haar
    filters in both directions: the first two give the similarity, the third the weights.

    Example:
        >>> x = torch.rand(2, 1, 32, 32)
        >>> haarpsi(x, x).round(decimals=3)
        tensor([1., 1.])
    """
    _check_pair(a, b, 16)
    if a.shape[1] != 1:
        raise ValueError(f"images have {a.shape[1]} channels; haarpsi takes grey images, [n, 1, h, w]")
    C, alpha = 30.0, 4.2
    scaled = [nn.functional.avg_pool2d(x * (255 / data_range), 2) for x in (a, b)]
    similarity, weight = [], []
    for direction in (0, 1):
        first, second = [[_haar(x, scale, direction).abs() for scale in (1, 2, 3)] for x in scaled]
        pairs = [(2 * p * q + C) / (p**2 + q**2 + C) for p, q in zip(first[:2], second[:2], strict=True)]
        similarity.append((pairs[0] + pairs[1]) / 2)
        weight.append(torch.maximum(first[2], second[2]))
    local, weights = torch.cat(similarity, dim=1), torch.cat(weight, dim=1)
    lifted = (torch.sigmoid(alpha * local) * weights).flatten(1).sum(dim=1)
    total = weights.flatten(1).sum(dim=1)
    mean = torch.where(total > 0, lifted / total.clamp(min=1e-12), torch.sigmoid(torch.as_tensor(alpha)).to(a))
    return (torch.logit(mean) / alpha).square()


def _haar(x: Tensor, scale: int, direction: int) -> Tensor:
    """Haar coefficients of one scale, in the image's size; ``direction`` 0: differences down, 1: across."""
    size = 2**scale
    kernel = torch.full((size, size), 2.0**-scale, dtype=x.dtype, device=x.device)
    kernel[: size // 2] *= -1
    kernel = kernel if direction == 0 else kernel.mT
    before, after = (size - 1) // 2, size // 2
    padded = nn.functional.pad(x, (before, after, before, after))
    return nn.functional.conv2d(padded, kernel[None, None])


def _check_pair(a: Tensor, b: Tensor, smallest: int) -> None:
    if a.shape != b.shape or a.ndim != 4:
        raise ValueError(f"images must have the same shape [n, c, h, w], got {list(a.shape)} and {list(b.shape)}")
    if min(a.shape[2:]) < smallest:
        raise ValueError(f"images of {a.shape[2]}×{a.shape[3]} pixels are smaller than {smallest}×{smallest}")
