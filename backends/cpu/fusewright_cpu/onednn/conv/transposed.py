"""Transposed convolutions of fp32 channels-last images as kernels of our own (`fusewright_cpu.kernels.transposed_conv`), with the
batch norm, the addition and the activation that follow.

oneDNN computes them as gradients of convolutions, with its relu (which loses NaN) and additions in passes of their own.
"""

from __future__ import annotations

import math

import torch

from fusewright.interface import OpView, TensorSpec, Value, hint
from fusewright.plan.ir import Ref
from fusewright.toolkit.region.builder import Builder, channels_last_strides
from fusewright.toolkit.region.graph import spec_of
from fusewright.toolkit.region.pattern import Match
from fusewright.toolkit.region.rewrite import Row
from fusewright_cpu.kernels import transposed_conv
from fusewright_cpu.kernels.by_hand import DirectConv
from fusewright_cpu.onednn import choices, own
from fusewright_cpu.onednn.conv import pointwise
from fusewright_cpu.onednn.conv.direct import emit, made
from fusewright_cpu.onednn.conv.images import dense_channels, image_shape, pair, steps_of
from fusewright_cpu.onednn.folding import folded
from fusewright_cpu.onednn.patterns import POST_OPS
from fusewright_cpu.onednn.tiles import tile_of
from fusewright_cpu.target import host_target

LEAST = 8
"""The least channels of a group."""


def _image(value: Value) -> tuple[int, ...]:
    """Return the shape of an image, or of a signal as one, or of a weight."""
    return tuple(map(hint, image_shape(spec_of(value).shape)))


def _fits(m: Match, b: Builder) -> bool:
    """Match a transposed convolution of fixed size with a constant weight, all of fp32, whose phases are equally large."""
    op = m.anchor
    x, weight, out = spec_of(op.arg("input")), spec_of(op.arg("weight")), spec_of(op.out)
    if not op.arg("transposed") or x.rank not in (3, 4) or not (x.static and weight.static) or 0 in x.shape or 0 in out.shape:
        return False
    typed = all(v.spec is not None and v.spec.dtype is torch.float32 for v in op.inputs())
    constant = b.is_const(op.arg("weight")) and b.is_const(op.arg("bias")) and not b.is_const(op.arg("input"))
    if not typed or not constant or b.ctx.options["prepack"] != "auto" or set(op.arg("dilation")) != {1}:
        return False
    sides = zip(_image(op.arg("weight"))[2:], _stride(op), _image(op.out)[2:], strict=True)
    even = all(taps >= step and size % step == 0 for taps, step, size in sides)
    kernel = _kernel(m) if even and hint(x.shape[1]) // op.arg("groups") >= LEAST else None
    return kernel is not None and not kernel.refused(host_target())


def _stride(op: OpView) -> tuple[int, int]:
    return pair(op, "stride")


def _phase(op: OpView) -> tuple[int, ...]:
    """Return the size of a phase of the result."""
    return tuple(size // step for size, step in zip(_image(op.out)[2:], _stride(op), strict=True))


def _kernel(m: Match) -> DirectConv | None:
    op, (batch, channels, *_) = m.anchor, _image(m.anchor.out)
    tile = tile_of(batch * math.prod(_phase(op)), channels // op.arg("groups"), host_target())
    if tile is None:
        return None
    biased = op.arg("bias") is not None or m.get("batch_norm") is not None
    return DirectConv(tile.rows, tile.columns, biased, m.get("add") is not None, pointwise.after(m)[0], transposed=True)


def _sizes(op: OpView, x: TensorSpec) -> tuple[int, ...]:
    """Return the kernel's sizes for an image."""
    (down, right), groups = _stride(op), op.arg("groups")
    window = _image(op.arg("weight"))[2:]
    taps = transposed_conv.taps((window[0], window[1]), (down, right))
    batch, channels, *size = image_shape(tuple(map(hint, x.shape)))
    phase, n, c = _phase(op), _image(op.out)[1] // groups, channels // groups
    geometry = (*taps, down, right, 1, 1, *pair(op, "padding"))
    sums = batch * math.prod(phase), n, c * math.prod(taps)
    return (*sums, groups, c, *size, *phase, *geometry, *steps_of(x), *window)


def _pays(m: Match, b: Builder) -> bool:
    op, kernel, unary = m.anchor, _kernel(m), m.get("unary")
    assert kernel is not None
    shape = _image(op.arg("input"))
    apart = unary is not None and not (POST_OPS[unary.op].exact or b.ctx.options["finite_math"])
    geometry = tuple(list(pair(op, name)) for name in ("padding", "output_padding", "stride", "dilation"))
    conv = choices.Transposed(shape, _image(op.arg("weight")), _image(op.out), geometry, op.arg("groups"), apart)
    sizes = _sizes(op, TensorSpec(shape, channels_last_strides(shape), torch.float32))
    return choices.transposed_form(b.ctx, kernel, conv, sizes, pointwise.after(m)[1], b.built) == own.FORM


def _write(m: Match, b: Builder) -> None:
    op, kernel, x = m.anchor, _kernel(m), dense_channels(m.anchor.arg("input"), b)
    assert kernel is not None
    weight, bias = folded(m, b)
    packed = _packed(weight, op, kernel.columns, b)
    emit(m, kernel, x, packed, bias, _sizes(op, b.spec(x)), "transposed convolution in one kernel", b)


def _packed(weight: Ref, op: OpView, columns: int, b: Builder) -> Value:
    down, right = _stride(op)
    pad, apart, order = transposed_conv.packing(_image(op.arg("weight")), op.arg("groups"), (down, right), columns)
    padded = b.prepare("aten::reshape.default", b.prepare("aten::constant_pad_nd.default", weight, pad), apart)
    turned = b.prepare("aten::permute.default", b.prepare("aten::flip.default", padded, transposed_conv.REVERSED), order)
    return made(b.prepare("aten::clone.default", turned, memory_format=torch.contiguous_format))


ROW = Row(
    "onednn.transposed", pointwise.conv_chain("onednn.transposed"), when=_fits, pays=_pays, write=_write,
    note="transposed convolution",
)  # fmt: skip
