"""Split long sums of fp32 convolutions into parts, so that they are as exact as eager's.

oneDNN's channels-last convolutions add the products of a pixel one by one; its kernels for blocked layouts, which eager uses for
contiguous images, add up parts of 16 channels (for AVX2 only in 1x1 convolutions). The rounding error of one running sum grows with
the root of its length, that of split sums with the root of a part's length (N. J. Higham, "The accuracy of floating point
summation", SIAM J. Sci. Comput. 14, 1993). oneDNN computes all parts in one call as groups: the same products, with the parts side
by side in the channels of the result, and a loop kernel adds them up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from fusewright.interface import OpView, TensorSpec, Value
from fusewright.plan.ir import Ref
from fusewright.toolkit.region.builder import Builder

LONGEST = 576
"""The most products in one running sum: 3x3 over 64 channels has 1.95 times the error of eager's kernels, which hardly grows with
the length (docs/studies/fp32-accuracy.md)."""

FEWEST = 8
"""The least channels in a part. Their number need not be a multiple of a vector's, as oneDNN's vectors go over the results."""

LARGEST = 1 << 25
"""The limit in bytes of all parts together. For larger blocks a C library maps new memory at every call (mallopt(3),
M_MMAP_THRESHOLD), and the page faults take up to as long as the convolution."""


def parts_of(op: OpView) -> int:
    """Return into how many sums a convolution with a packed weight is split; 1 for no split."""
    x, weight, out = op.arg("input").spec, op.arg("weight").spec, op.out.spec
    channels, *kernel = weight.shape[1:]
    # Taps of one pixel that lie inside of the image.
    sides = zip(kernel, x.shape[2:], op.arg("dilation"), strict=True)
    taps = math.prod(min(k, -(-size // dilation)) for k, size, dilation in sides)
    if weight.dtype is not torch.float32 or op.arg("groups") != 1 or channels * taps <= LONGEST:
        return 1
    assert out is not None
    most = min(channels // FEWEST, (LARGEST - 1) // out.bytes_hint())
    found = [p for p in range(1, most + 1) if channels % p == 0]
    return min((p for p in found if channels // p * taps <= LONGEST), default=max(found, default=1))


def grouped(weight: Ref, shape: Sequence[Any], parts: int, b: Builder) -> Ref:
    """Return [O, I, H, W] as [parts * O, I / parts, H, W]: the channels of each part are a group. `shape` may have no H."""
    out, channels, *taps = shape
    taps = [1, *taps] if len(taps) == 1 else taps
    apart = b.prepare("aten::view.default", weight, (out, parts, channels // parts, *taps))
    turned = b.prepare("aten::transpose.int", apart, 0, 1)
    return b.prepare("aten::reshape.default", turned, (parts * out, channels // parts, *taps))


def add_up(whole: Value, parts: int, out: Value, stride: tuple[int, ...], b: Builder) -> None:
    """Emit ops that add, in pairs, the parts that lie side by side in the channels of `whole`, into `out` with these strides."""
    assert whole.spec is not None and out.spec is not None
    shape, n = out.spec.shape, out.spec.shape[1]
    assert isinstance(n, int)
    side, dense = (TensorSpec(shape, s, out.spec.dtype) for s in (whole.spec.stride, stride))
    terms = [b.append_op("slice", whole, 1, k * n, (k + 1) * n, 1, out=b.ctx.value(side)) for k in range(parts)]
    while len(terms) > 2:
        pairs = zip(terms[::2], terms[1::2], strict=False)
        odd = terms[len(terms) & ~1 :]
        terms = [b.append_op("add", x, y, out=b.ctx.value(dense)) for x, y in pairs] + odd
    b.append_op("add", *terms, out=b.with_layout(out, stride))
