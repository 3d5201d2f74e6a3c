"""GPU kernels in Triton for computations that take torch many small steps, or that are slow in
torch.

Each has a counterpart in plain torch next to its caller, which other devices use and tests compare
it with. Import this module only through :func:`torchfil.fisher.rules.substitutes.kernels_for`,
because Triton may be missing.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_Tensors = tuple[Tensor, Tensor]
_LARGEST_BLOCK = 4096
_ELEMENTWISE_BLOCK = 1024


def _warps(block: int) -> int:
    """How many warps read a block."""
    return 8 if block >= 2048 else 4 if block >= 512 else 1


@triton.jit
def _group_pulled_kernel(
    gamma_at, x_at, mean_at, scale_at, weight_at, out_at, size, positions, per_group, groups,
    HAS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first_channel = (row % groups) * per_group
    mean, scale = tl.load(mean_at + row), tl.load(scale_at + row)
    lanes = tl.arange(0, BLOCK)
    sum_v = tl.zeros([BLOCK], gamma_at.dtype.element_ty)
    sum_vx = tl.zeros([BLOCK], gamma_at.dtype.element_ty)
    for start in range(0, size, BLOCK):
        place, inside = start + lanes, start + lanes < size
        v = tl.load(gamma_at + row * size + place, mask=inside, other=0.0)
        x_hat = (tl.load(x_at + row * size + place, mask=inside, other=0.0) - mean) * scale
        if HAS_WEIGHT:
            v *= tl.load(weight_at + first_channel + place // positions, mask=inside, other=0.0)
        sum_v += v
        sum_vx += v * x_hat
    mean_v, along_v = tl.sum(sum_v, axis=0) / size, tl.sum(sum_vx, axis=0) / size
    for start in range(0, size, BLOCK):
        place, inside = start + lanes, start + lanes < size
        v = tl.load(gamma_at + row * size + place, mask=inside, other=0.0)
        x_hat = (tl.load(x_at + row * size + place, mask=inside, other=0.0) - mean) * scale
        if HAS_WEIGHT:
            v *= tl.load(weight_at + first_channel + place // positions, mask=inside, other=0.0)
        tl.store(out_at + row * size + place, scale * (v - mean_v - x_hat * along_v), mask=inside)


@triton.jit
def _group_pulled_twice_kernel(
    gamma_at, w_at, x_at, mean_at, scale_at, weight_at, to_gamma_at, to_x_at, size, positions,
    per_group, groups,
    HAS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first_channel = (row % groups) * per_group
    mean, scale = tl.load(mean_at + row), tl.load(scale_at + row)
    lanes = tl.arange(0, BLOCK)
    sum_v = tl.zeros([BLOCK], gamma_at.dtype.element_ty)
    sum_w = tl.zeros([BLOCK], gamma_at.dtype.element_ty)
    sum_vx = tl.zeros([BLOCK], gamma_at.dtype.element_ty)
    sum_wx = tl.zeros([BLOCK], gamma_at.dtype.element_ty)
    sum_vw = tl.zeros([BLOCK], gamma_at.dtype.element_ty)

    # The means over the group come first, because every number of the result needs them.
    for start in range(0, size, BLOCK):
        place, inside = start + lanes, start + lanes < size
        v = tl.load(gamma_at + row * size + place, mask=inside, other=0.0)
        w = tl.load(w_at + row * size + place, mask=inside, other=0.0)
        x_hat = (tl.load(x_at + row * size + place, mask=inside, other=0.0) - mean) * scale
        if HAS_WEIGHT:
            v *= tl.load(weight_at + first_channel + place // positions, mask=inside, other=0.0)
        sum_v += v
        sum_w += w
        sum_vx += v * x_hat
        sum_wx += w * x_hat
        sum_vw += v * w
    mean_v, mean_w = tl.sum(sum_v, axis=0) / size, tl.sum(sum_w, axis=0) / size
    along_v, along_w = tl.sum(sum_vx, axis=0) / size, tl.sum(sum_wx, axis=0) / size
    both = tl.sum(sum_vw, axis=0) / size - mean_v * mean_w - along_v * along_w

    for start in range(0, size, BLOCK):
        place, inside = start + lanes, start + lanes < size
        v = tl.load(gamma_at + row * size + place, mask=inside, other=0.0)
        w = tl.load(w_at + row * size + place, mask=inside, other=0.0)
        x_hat = (tl.load(x_at + row * size + place, mask=inside, other=0.0) - mean) * scale
        v_left, w_left = v, w - mean_w - x_hat * along_w
        to_gamma = scale * w_left
        if HAS_WEIGHT:
            weight = tl.load(weight_at + first_channel + place // positions, mask=inside, other=0.0)
            v_left *= weight
            to_gamma *= weight
        v_left -= mean_v + x_hat * along_v
        tl.store(to_gamma_at + row * size + place, to_gamma, mask=inside)
        to_x = -scale * scale * (along_w * v_left + along_v * w_left + both * x_hat)
        tl.store(to_x_at + row * size + place, to_x, mask=inside)


@triton.jit
def _normalised_sums_kernel(
    delta_at, x_at, mean_at, scale_at, along_at, plain_at, rows, positions, per_group,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = row < rows
    mean = tl.load(mean_at + row // per_group, mask=there, other=0.0)
    scale = tl.load(scale_at + row // per_group, mask=there, other=0.0)
    along = tl.zeros([ROWS, BLOCK], delta_at.dtype.element_ty)
    plain = tl.zeros([ROWS, BLOCK], delta_at.dtype.element_ty)
    lanes = tl.arange(0, BLOCK)
    for start in range(0, positions, BLOCK):
        place = row[:, None] * positions + (start + lanes)[None, :]
        inside = there[:, None] & (start + lanes < positions)[None, :]
        delta = tl.load(delta_at + place, mask=inside, other=0.0)
        x = tl.load(x_at + place, mask=inside, other=0.0)
        along += delta * (x - mean[:, None])
        plain += delta
    tl.store(along_at + row, tl.sum(along, axis=1) * scale, mask=there)
    tl.store(plain_at + row, tl.sum(plain, axis=1), mask=there)


@triton.jit
def _normalised_sums_back_kernel(
    delta_at, x_at, mean_at, scale_at, from_along_at, from_plain_at, mean_v_at, along_v_at,
    to_delta_at, to_x_at,
    size, positions, per_group, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    row = place // positions
    group = row // per_group
    mean = tl.load(mean_at + group, mask=inside, other=0.0)
    scale = tl.load(scale_at + group, mask=inside, other=0.0)
    from_along = tl.load(from_along_at + row, mask=inside, other=0.0)
    x_hat = (tl.load(x_at + place, mask=inside, other=0.0) - mean) * scale
    v = from_along * tl.load(delta_at + place, mask=inside, other=0.0)
    to_delta = from_along * x_hat + tl.load(from_plain_at + row, mask=inside, other=0.0)
    mean_v = tl.load(mean_v_at + group, mask=inside, other=0.0)
    along_v = tl.load(along_v_at + group, mask=inside, other=0.0)
    tl.store(to_delta_at + place, to_delta, mask=inside)
    tl.store(to_x_at + place, scale * (v - mean_v - x_hat * along_v), mask=inside)


@triton.jit
def _gelu_pulled_twice_kernel(
    w_at, gamma_at, x_at, to_gamma_at, to_x_at, size, BLOCK: tl.constexpr
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    kind = tl.float64 if x_at.dtype.element_ty == tl.float64 else tl.float32
    w = tl.load(w_at + place, mask=inside, other=0.0).to(kind)
    gamma = tl.load(gamma_at + place, mask=inside, other=0.0).to(kind)
    x = tl.load(x_at + place, mask=inside, other=0.0).to(kind)
    density = tl.exp(-0.5 * x * x) * 0.3989422804014327
    first = 0.5 * (1 + tl.math.erf(x * 0.7071067811865476)) + x * density
    tl.store(to_gamma_at + place, w * first, mask=inside)
    tl.store(to_x_at + place, w * gamma * (2 - x * x) * density, mask=inside)


@triton.jit
def _unfold_kernel(
    a_at, out_at, size, height, width, out_height, out_width,
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    DILATION_H: tl.constexpr, DILATION_W: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0).to(tl.int64)
    position = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = position < size
    top = position // out_width * STRIDE_H - PAD_H
    left = position % out_width * STRIDE_W - PAD_W
    for i in tl.static_range(KERNEL_H):
        for j in tl.static_range(KERNEL_W):
            h, w = top + i * DILATION_H, left + j * DILATION_W
            there = inside & (h >= 0) & (h < height) & (w >= 0) & (w < width)
            value = tl.load(a_at + image * height * width + h * width + w, mask=there, other=0.0)
            tl.store(
                out_at + (image * KERNEL_H * KERNEL_W + i * KERNEL_W + j) * size + position,
                value,
                mask=inside,
            )


@triton.jit
def _fold_kernel(
    columns_at, out_at, size, width, out_height, out_width,
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    DILATION_H: tl.constexpr, DILATION_W: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0).to(tl.int64)
    pixel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = pixel < size
    positions = out_height * out_width
    total = tl.zeros([BLOCK], out_at.dtype.element_ty)
    for i in tl.static_range(KERNEL_H):
        for j in tl.static_range(KERNEL_W):
            h, w = pixel // width + PAD_H - i * DILATION_H, pixel % width + PAD_W - j * DILATION_W
            row, column = h // STRIDE_H, w // STRIDE_W
            met = inside & (h >= 0) & (w >= 0) & (row < out_height) & (column < out_width)
            if STRIDE_H > 1:
                met &= h % STRIDE_H == 0
            if STRIDE_W > 1:
                met &= w % STRIDE_W == 0
            start = (image * KERNEL_H * KERNEL_W + i * KERNEL_W + j) * positions
            total += tl.load(columns_at + start + row * out_width + column, mask=met, other=0.0)
    tl.store(out_at + image * size + pixel, total, mask=inside)


def group_pulled(
    gamma: Tensor, x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor | None, groups: int
) -> Tensor:
    """P(γ·weight) of :mod:`torchfil.fisher.rules.normalisation`, for contiguous γ and x, [batch,
    channels, positions].

    Mean and scale are [batch, groups], weight [channels].
    """
    out = torch.empty_like(x)
    _over_groups(_group_pulled_kernel, (gamma, x, mean, scale), weight, groups, (out,))
    return out


def group_pulled_twice(
    gamma: Tensor,
    w: Tensor,
    x: Tensor,
    mean: Tensor,
    scale: Tensor,
    weight: Tensor | None,
    groups: int,
) -> _Tensors:
    """The derivatives of ⟨w, P(γ·weight)⟩ with respect to γ and x, each of x's shape."""
    results = torch.empty_like(x), torch.empty_like(x)
    _over_groups(_group_pulled_twice_kernel, (gamma, w, x, mean, scale), weight, groups, results)
    return results


def _over_groups(
    kernel: Any, given: tuple[Tensor, ...], weight: Tensor | None, groups: int, results: Any
) -> None:
    """Launch a kernel for each group of channels of each example."""
    batch, channels, positions = results[0].shape
    size = channels // groups * positions
    block = min(triton.next_power_of_2(size), _LARGEST_BLOCK)
    kernel[(batch * groups,)](
        *given,
        given[0] if weight is None else weight,
        *results,
        size,
        positions,
        channels // groups,
        groups,
        HAS_WEIGHT=weight is not None,
        BLOCK=block,
        num_warps=_warps(block),
    )


def normalised_sums(delta: Tensor, x: Tensor, mean: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_t δ_t x̂_t and Σ_t δ_t, [batch, channels], for contiguous δ and x, [batch, channels,
    positions].
    """
    batch, channels, positions = x.shape
    rows = batch * channels
    block = min(triton.next_power_of_2(positions), 1024)
    together = 2048 // block
    along, plain = x.new_empty(batch, channels), x.new_empty(batch, channels)
    _normalised_sums_kernel[(triton.cdiv(rows, together),)](
        delta,
        x,
        mean,
        scale,
        along,
        plain,
        rows,
        positions,
        channels // mean.shape[1],
        ROWS=together,
        BLOCK=block,
    )
    return along, plain


def normalised_sums_back(
    delta: Tensor, x: Tensor, mean: Tensor, scale: Tensor, sums: _Tensors, cotangents: _Tensors
) -> _Tensors:
    """The derivatives of ⟨cotangents, :func:`normalised_sums`⟩ with respect to δ and x; ``sums`` is
    its result.
    """
    batch, channels, positions = x.shape
    groups = mean.shape[1]
    (along, plain), (from_along, from_plain) = sums, cotangents
    size = channels // groups * positions
    mean_v = (from_along * plain).reshape(batch, groups, -1).sum(dim=2) / size
    along_v = (from_along * along).reshape(batch, groups, -1).sum(dim=2) / size
    to_delta, to_x = torch.empty_like(x), torch.empty_like(x)
    _normalised_sums_back_kernel[(triton.cdiv(x.numel(), _ELEMENTWISE_BLOCK),)](
        delta,
        x,
        mean,
        scale,
        from_along.contiguous(),
        from_plain.contiguous(),
        mean_v,
        along_v,
        to_delta,
        to_x,
        x.numel(),
        positions,
        channels // groups,
        BLOCK=_ELEMENTWISE_BLOCK,
    )
    return to_delta, to_x


def gelu_pulled_twice(w: Tensor, gamma: Tensor, x: Tensor) -> _Tensors:
    """The derivatives of ⟨w, γy′⟩ with respect to γ and x, for y = xΦ(x) and contiguous tensors of
    one shape.
    """
    to_gamma, to_x = torch.empty_like(x), torch.empty_like(x)
    _gelu_pulled_twice_kernel[(triton.cdiv(x.numel(), _ELEMENTWISE_BLOCK),)](
        w, gamma, x, to_gamma, to_x, x.numel(), BLOCK=_ELEMENTWISE_BLOCK
    )
    return to_gamma, to_x


_Pair = tuple[int, int]


def unfold_patches(
    a: Tensor, kernel: _Pair, stride: _Pair, dilation: _Pair, padding: _Pair
) -> Tensor:
    """``F.unfold``, [batch, channels·kernel, positions], of a contiguous [batch, channels, height,
    width].
    """
    batch, channels, height, width = a.shape
    walk = (kernel, stride, dilation, padding)
    outputs = _outputs(a.shape[2:], *walk)
    out = a.new_empty(batch, channels * kernel[0] * kernel[1], outputs[0] * outputs[1])
    _over_images(
        _unfold_kernel,
        a,
        out,
        batch * channels,
        outputs[0] * outputs[1],
        (height, width, *outputs),
        walk,
    )
    return out


def fold_patches(
    columns: Tensor,
    shape: torch.Size,
    kernel: _Pair,
    stride: _Pair,
    dilation: _Pair,
    padding: _Pair,
) -> Tensor:
    """``F.fold`` of contiguous columns, [batch, channels·kernel, positions], into [batch, channels,
    *shape].
    """
    walk, channels = (
        (kernel, stride, dilation, padding),
        columns.shape[1] // (kernel[0] * kernel[1]),
    )
    out = columns.new_empty(len(columns), channels, *shape)
    numbers = (shape[1], *_outputs(shape, *walk))
    _over_images(
        _fold_kernel, columns, out, len(columns) * channels, shape[0] * shape[1], numbers, walk
    )
    return out


def _over_images(
    kernel: Any, given: Tensor, out: Tensor, images: int, size: int, numbers: Any, walk: Any
) -> None:
    """Launch a kernel for blocks of the ``size`` results of each image."""
    block = min(triton.next_power_of_2(size), _ELEMENTWISE_BLOCK)
    kernel[(images, triton.cdiv(size, block))](
        given,
        out,
        size,
        *numbers,
        *chain(*walk),
        BLOCK=block,
        num_warps=max(1, min(4, block // 128)),
    )


def _outputs(
    shape: torch.Size, kernel: _Pair, stride: _Pair, dilation: _Pair, padding: _Pair
) -> tuple[int, ...]:
    return tuple(
        (n + 2 * padding[k] - dilation[k] * (kernel[k] - 1) - 1) // stride[k] + 1
        for k, n in enumerate(shape)
    )
