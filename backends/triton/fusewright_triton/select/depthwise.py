"""Depthwise convolutions of inference as sums in loop kernels, with the norm, activation and addition around them.

cuDNN has fast kernels for squares of 3, 5 and 7 alone. It computes one channel at a time for some images of 2x2, and for several
results of each channel; torch has kernels in planes for both (measured: docs/studies/gpu-models.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count, product

import torch

from fusewright.interface import OpView, TensorSpec, Value
from fusewright.plan.ir import Ref
from fusewright.toolkit.region.builder import channels_last_strides, contiguous_strides, same_strides
from fusewright.toolkit.region.graph import spec_of
from fusewright.toolkit.region.pattern import Match, chain
from fusewright.toolkit.region.rewrite import Row
from fusewright.toolkit.region.sums import write_sum
from fusewright_triton.select.calls import Calls
from fusewright_triton.select.convolutions import geometry

MOST = 32
"""Elements of the largest window."""

SQUARES = ([3, 3], [5, 5], [7, 7])

ALIGNED = 8
"""Channels that a thread reads at once."""


def reason(op: OpView) -> str | None:
    """Return why a convolution is not a depthwise one of a small window for which the library has no kernel of its own."""
    x, w = spec_of(op.arg("input")), spec_of(op.arg("weight"))
    if x.rank not in (3, 4) or op.arg("transposed") or not x.static or not w.static or 0 in (*x.shape, *spec_of(op.out).shape):
        return "neither 1-d nor 2-d, empty or symbolic"
    if op.arg("groups") != x.shape[1] or w.shape[1] != 1 or (x.shape[1] == 1 != w.shape[0]):
        return "not depthwise"
    if x.dtype != w.dtype:
        return "mixed types"
    if not (_is_small(op) or is_one_by_one(op)):
        return "a large window"
    return "the library's own kernel" if has_kernel(op) else None


def _is_small(op: OpView) -> bool:
    w = spec_of(op.arg("weight"))
    return bool(w.numel_hint() <= MOST * w.shape[0])  # type: ignore[operator]


def has_kernel(op: OpView) -> bool:
    """Return whether cuDNN has a kernel for the window that is at least as fast."""
    channels, _, *window = spec_of(op.arg("weight")).shape
    if window not in SQUARES or tuple(op.arg("dilation")) != (1, 1) or is_one_by_one(op):
        return False
    return window != [3, 3] or tuple(op.arg("stride")) != (2, 2) or channels % ALIGNED != 0  # type: ignore[operator]


def is_one_by_one(op: OpView) -> bool:
    """Return whether cuDNN computes one channel of images at a time: for several results of each, and for images of 2x2 where
    windows are larger than 3x3 or strided (384 channels take 160 to 250 us, in planes 4)."""
    channels, _, *window = spec_of(op.arg("weight")).shape
    if len(window) != 2 or channels != op.arg("groups"):
        return len(window) == 2
    square = window in SQUARES and tuple(op.arg("dilation")) == (1, 1)
    slow = window != [3, 3] or tuple(op.arg("stride")) != (1, 1)
    return square and slow and tuple(spec_of(op.arg("input")).shape[2:]) == (2, 2)


def _constant(m: Match, c: Calls) -> bool:
    return c.graph.phase == "infer" and _is_small(m.anchor) and c.is_const(m.anchor.arg("weight"), m.anchor.arg("bias"))


def _one_by_one(m: Match, c: Calls) -> bool:
    return is_one_by_one(m.anchor)


def _in_planes(m: Match, c: Calls) -> None:
    op, b = m.anchor, c.b
    x, weight = (_planes(op.arg(n), c) for n in ("input", "weight"))
    stride = contiguous_strides(spec_of(op.out).shape)  # type: ignore[arg-type]
    b.library("aten::convolution.default", x, weight, c.exact(op.arg("bias")), *geometry(op), out=m.out, stride=stride, op=op)


def _write(m: Match, c: Calls) -> None:
    """Write the sum as ops for the fuser, in fp32."""
    op, b = m.anchor, c.b
    x, w, bias = (op.arg(n) for n in ("input", "weight", "bias"))
    channels, _, *window = spec_of(w).shape
    column, images = (channels, *[1] * len(window)), len(window) == 2
    b.without(op)
    x = b.channels_last(x) if images and b.spec(x).stride[1] != 1 else b.at_hand(x)
    last = images or _is_channels_last(b.spec(x))
    out = b.with_layout(op.out, channels_last_strides(spec_of(op.out).shape) if last else None)  # type: ignore[arg-type]
    rows = b.append_op("permute", b.append_op("view", w, (channels, spec_of(w).numel_hint() // channels)), (1, 0))  # type: ignore[operator]
    rows = b.append_op("cast", b.append_op("clone", rows, torch.contiguous_format), torch.float32)
    total = None if bias is None else b.append_op("view", b.append_op("cast", bias, torch.float32), column)
    padded = _padded(op, x, last and not images, c)
    if channels != op.arg("groups"):
        n, groups, *sizes = spec_of(padded).shape
        each = b.append_op("expand", b.append_op("unsqueeze", padded, 2), (n, groups, channels // groups, *sizes))  # type: ignore[operator]
        padded = b.append_op("reshape", each, (n, channels, *sizes))
    weights = (b.append_op("view", b.append_op("select", rows, 0, k), column) for k in count())
    images_read = (_shifted(op, padded, at, c) for at in product(*map(range, window)))  # type: ignore[arg-type]
    write_sum(total, zip(images_read, weights, strict=False), out, b)


def _planes(value: Value, c: Calls) -> Ref:
    spec = c.b.spec(value)
    dense = same_strides(spec, contiguous_strides(spec.shape))  # type: ignore[arg-type]
    return Ref((c.b.at_hand(value) if dense else c.b.row_major(value)).id)


def _is_channels_last(x: TensorSpec) -> bool:
    """Whether channels are next to each other in memory, as in sequences that are transposed for a convolution."""
    return x.stride[1] == 1 != x.stride[2] and x.shape[1] != 1


def _padded(op: OpView, x: Value, turned: bool, c: Calls) -> Value:
    """Return an image with zeros around it; `turned`: a sequence whose channels stay innermost."""
    if not turned or not any(pads(op)):
        return c.b.append_op("constant_pad_nd", x, pads(op), 0)
    rows = c.b.append_op("constant_pad_nd", c.b.append_op("transpose", x, 1, 2), (0, 0, *pads(op)), 0)
    return c.b.append_op("transpose", rows, 1, 2)


def pads(op: OpView) -> tuple[int, ...]:
    """Return a convolution's zeros around an image, the last dimension first."""
    return tuple(n for p in reversed(op.arg("padding")) for n in (p, p))


def _shifted(op: OpView, x: Value, at: Sequence[int], c: Calls) -> Value:
    """Return what one element of the window reads of the padded image for each result."""
    for d, step in enumerate(op.arg("stride")):
        start = at[d] * op.arg("dilation")[d]
        end = start + (spec_of(op.out).shape[d + 2] - 1) * step + 1  # type: ignore[operator]
        x = c.b.append_op("slice", x, d + 2, start, end, step)
    return x


ROWS = (
    Row("triton.conv.depthwise", chain("conv"), when=_constant, write=_write, note="depthwise convolution, as a sum"),
    Row("triton.conv.planes", chain("conv"), when=_one_by_one, write=_in_planes, note="depthwise convolution, in planes"),
)
