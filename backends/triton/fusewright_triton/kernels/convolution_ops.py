"""Convolutions of few channels as products, as a torch operator that a plan can name, on GPUs and (interpreted) on CPU tensors.

`fusewright_triton::convolution`: activation(convolution + bias), channels-last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fusewright_triton.kernels.product_ops import ACTIVATIONS, Tiles
from fusewright_triton.run.handwritten import NAMESPACE, Kernel, operator, or_else
from fusewright_triton.target import named

KERNEL = Kernel("product", "convolution")
CONVOLUTION = f"{NAMESPACE}::convolution.default"

MOST = 8
"""Elements that a load may take at once."""


def tiles(run: int, outs: int) -> Tiles:
    """Return the blocks for `outs` results of windows with `run` numbers side by side."""
    bn = min(max(16, 1 << (outs - 1).bit_length()), 128)
    bk = min((16, 32, 64), key=lambda k: (-(-run // k) * k, -k))
    return Tiles(128, bn, bk, 4 if bn <= 64 else 8, 3)


def by_torch(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, stride: Sequence[int], groups: int, target: str
) -> Tensor:
    """Compute `convolution` by torch's own calls."""
    out = torch.nn.functional.conv2d(x, weight, bias, stride, groups=groups)
    return ACTIVATIONS[activation](out).contiguous(memory_format=torch.channels_last)


@or_else(by_torch)
def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, stride: Sequence[int], groups: int, target: str
) -> Tensor:
    """Compute activation(convolution + bias) without padding, channels-last, with one rounding at the end.

    x [n, groups * c, h, w], channels-last, weight [groups * outs, c, kh, kw], as `packed` lays it out, bf16 or fp16; with groups,
    kw is 1. `activation` as in `linear_activation`.
    """
    out = _meta(x, weight, bias, activation, stride, groups, target)
    if not out.numel():
        return out
    x = x.contiguous(memory_format=torch.channels_last)
    (kh, kw), outs = weight.shape[2:], weight.shape[0] // groups
    run, pixels = kw * weight.shape[1], out.shape[0] * out.shape[2] * out.shape[3]
    image, row, pixel = (x[0].numel(), x.shape[3] * x.shape[1], x.shape[1])
    steps = (image, row * stride[0], pixel * stride[1], row)
    how = tiles(run, outs)
    matrix = packed(weight).permute(2, 3, 1, 0)
    args = (x, matrix, out if bias is None else bias.contiguous(), out, pixels, outs, run, groups, *out.shape[2:], kh, *steps)
    fixed = {
        "BIAS": bias is not None, "ACT": activation, "VECTOR": math.gcd(MOST, run if groups > 1 else MOST, *steps),
        "BM": how.bm, "BN": how.bn, "BK": how.bk,
    }  # fmt: skip
    programs = -(-pixels // how.bm) * -(-outs // how.bn) * groups
    KERNEL.launch(named(target), programs, args, fixed, num_warps=how.warps, num_stages=how.stages)
    return out


def packed(weight: Tensor) -> Tensor:
    """Lay a weight out as a matrix of windows and results, [kh, kw, channels, outs], unless it lies so."""
    return weight.permute(2, 3, 1, 0).contiguous().permute(3, 2, 0, 1)


def _meta(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, stride: Sequence[int], groups: int, target: str
) -> Tensor:
    sizes = [(n - k) // s + 1 for n, k, s in zip(x.shape[2:], weight.shape[2:], stride, strict=True)]
    shape = (x.shape[0], weight.shape[0], *sizes)
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


operator(
    "convolution(Tensor x, Tensor weight, Tensor? bias, str activation, int[2] stride, int groups, str target) -> Tensor",
    convolution,
    _meta,
)
