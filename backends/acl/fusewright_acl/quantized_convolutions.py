"""Convolutions of dequantized int8 images by our own kernel, because oneDNN on aarch64 runs its reference gemm for them."""

from __future__ import annotations

import torch

from fusewright.interface import OpView, Value, is_static
from fusewright.plan.ir import Ref
from fusewright.toolkit.ir.types import from_torch
from fusewright.toolkit.region.builder import Builder, channels_last_strides
from fusewright.toolkit.region.graph import RegionGraph, spec_of
from fusewright.toolkit.region.pattern import Match, chain
from fusewright.toolkit.region.quantized import Quantized, Weight, dequantized, weight_of
from fusewright.toolkit.region.rewrite import Row
from fusewright_acl.int8 import PACK_CONV
from fusewright_acl.quantized import form_here, has_zeros, launch, numbers, product_reason
from fusewright_cpu.kernels.arm.int8_conv import Geometry
from fusewright_cpu.kernels.by_hand import Int8Conv

MOST_WASTE = 4
"""Most multiplications performed per useful one; above this, float convolutions are faster."""


def why_not(op: OpView, graph: RegionGraph) -> str | None:
    """Return why a convolution with an int8 weight stays in floats; None if our kernel takes it, or if it has no such weight."""
    x, w = dequantized(op.arg("input"), graph), weight_of(op.arg("weight"), graph)
    if w is None:
        return None if x is None else "its weight is no constant of int8"
    return _reason(op, x, w, graph) if isinstance(x, Quantized) else "its input is not quantized"


def _reason(op: OpView, x: Quantized, w: Weight, graph: RegionGraph) -> str | None:
    shapes = [spec_of(v).shape for v in (x.value, w.value, op.out)]
    if op.arg("transposed") or len(shapes[0]) != 4:
        return "only plain 2-d convolutions of a batch are int8"
    if not all(map(is_static, shapes)) or any(0 in shape for shape in shapes):
        return "empty, or of symbolic size"
    geometry = geometry_of(op, x, w)
    if why := product_reason(op, w, geometry.taps, graph):
        return why
    limits = torch.iinfo(spec_of(x.value).dtype)
    if not (x.static and x.scale and limits.min <= x.zero_point <= limits.max):
        return "a scale or a zero point of its input that is computed, 0, or no number of its type"
    return "groups of few channels: tiles would be padding" if geometry.waste > MOST_WASTE else None


def geometry_of(op: OpView, x: Quantized, w: Weight) -> Geometry:
    """Return the geometry of the convolution that the kernel computes."""
    image, (columns, _, *kernel) = spec_of(x.value).shape, spec_of(w.value).shape
    given = (tuple(op.arg(name)) for name in ("stride", "padding", "dilation"))
    stride, padding, dilation = (pair * 2 if len(pair) == 1 else pair for pair in given)  # one number serves both dimensions
    return Geometry(image, columns, tuple(kernel), stride, padding, dilation, op.arg("groups"))  # type: ignore[arg-type]


def _is_int8(m: Match, b: Builder) -> bool:
    return weight_of(m.anchor.arg("weight"), b.graph) is not None and why_not(m.anchor, b.graph) is None


def _write(m: Match, b: Builder) -> None:
    """Emit the kernel. Its result is channels-last, as for other convolutions; loop kernels compute what follows."""
    op, x, w = m.anchor, dequantized(m.anchor.arg("input"), b.graph), weight_of(m.anchor.arg("weight"), b.graph)
    assert isinstance(x, Quantized) and w is not None
    geometry, form, out = geometry_of(op, x, w), form_here(), spec_of(op.out)
    kernel = Int8Conv(from_torch(spec_of(x.value).dtype), from_torch(out.dtype), form, op.arg("bias") is not None, has_zeros(w))
    weight = b.prepare(PACK_CONV, b.exact(w.value), geometry.groups, geometry.run, form)
    given: list[Ref | Value] = [_channels_last(x.value, b), weight, *numbers(op, x, w, b, geometry.groups)]
    made = b.with_layout(op.out, channels_last_strides(out.shape))  # type: ignore[arg-type]
    launch(kernel, given, geometry.sizes(), made, m, b)
    b.notes[op.id] = f"int8 convolution ({form})"


def _channels_last(x: Value, b: Builder) -> Value:
    spec = b.spec(x)
    wanted = channels_last_strides(spec.shape)  # type: ignore[arg-type]
    same = all(n == 1 or s == d for n, s, d in zip(spec.shape, spec.stride, wanted, strict=True))
    return b.at_hand(x) if same else b.channels_last(x)


ROWS = (Row("acl.int8.conv", chain("conv"), when=_is_int8, write=_write, note="int8 convolution"),)
