"""Convolutions of fp32 channels-last images as kernels of our own (`fusewright_cpu.kernels.direct_conv`, of a few pixels `gemv`),
with the batch norm, the addition and the activation that follow.

oneDNN's relu and additions lose NaN, so each is a pass over memory behind its calls; its long sums are split (see `sums`) and added
in another pass; and torch's dispatcher takes longer than a small convolution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from fusewright.interface import OpView, TensorSpec, Value, hint
from fusewright.plan.ir import Ref
from fusewright.toolkit.ir.types import from_torch
from fusewright.toolkit.region.builder import Builder, channels_last_strides
from fusewright.toolkit.region.graph import spec_of
from fusewright.toolkit.region.pattern import Match, chain, maybe
from fusewright.toolkit.region.rewrite import Row
from fusewright_cpu.kernels import direct_conv
from fusewright_cpu.kernels.by_hand import MOST_GEMV_ROWS, DirectConv, Gemv
from fusewright_cpu.onednn import choices, own, sums
from fusewright_cpu.onednn.conv import pointwise
from fusewright_cpu.onednn.conv.images import channels_last_of, dense, dense_channels, image_shape, pair, steps_of
from fusewright_cpu.onednn.folding import folded
from fusewright_cpu.onednn.patterns import POST_OPS, folds_batch_norm, is_packed, other_of
from fusewright_cpu.onednn.tiles import conv_tile_of
from fusewright_cpu.run.sources import hash_of
from fusewright_cpu.target import host_target

FEW_OF_LARGE = 2
"""The most pixels that a weight out of the caches is read for without packing: with more, oneDNN's products may be faster."""
LEAST = 8
"""The least channels of a group: below, oneDNN's kernels, which take several pixels of a row as one run, are faster."""


def _shape(value: Any) -> tuple[int, ...]:
    """Return the shape of an image, or of a signal as one, or of a weight."""
    return tuple(map(hint, image_shape(spec_of(value).shape)))


def _fixed(op: OpView, b: Builder) -> bool:
    """Match a convolution of images or signals of fixed size with constant weights, all of one type."""
    x, weight, out = spec_of(op.arg("input")), spec_of(op.arg("weight")), spec_of(op.out)
    if x.rank not in (3, 4) or not (x.static and weight.static) or 0 in x.shape or 0 in out.shape:
        return False
    typed = all(v.spec is not None and v.spec.dtype == x.dtype for v in op.inputs())
    return typed and is_packed(op, b) and b.ctx.options["prepack"] == "auto" and b.is_const(op.arg("bias"))


def _fits(m: Match, b: Builder) -> bool:
    op = m.anchor
    if not _fixed(op, b) or spec_of(op.out).dtype is not torch.float32 or b.is_const(op.arg("input")):
        return False
    kernel = _kernel(m)
    return _shape(op.arg("weight"))[1] >= LEAST and kernel is not None and not kernel.refused(host_target())


def _kernel(m: Match, x: TensorSpec | None = None) -> DirectConv | None:
    """Return the kernel for an image, by default a dense one."""
    op = m.anchor
    batch, channels, *points = _shape(op.out)
    tile = conv_tile_of(batch * math.prod(points), channels // op.arg("groups"), host_target())
    if tile is None:
        return None
    biased = op.arg("bias") is not None or m.get("batch_norm") is not None
    after, _ = pointwise.after(m)
    return DirectConv(tile.rows, tile.columns, biased, m.get("add") is not None, after, _is_product(op, x), narrow=tile.narrow)


def _is_product(op: OpView, x: TensorSpec | None) -> bool:
    """Whether each pixel is multiplied alone, and pixels of the image are equally far apart."""
    one = all(set(sizes) == {1} for sizes in (spec_of(op.arg("weight")).shape[2:], op.arg("stride")))
    if not one or set(op.arg("padding")) != {0}:
        return False
    if x is None:
        return True
    batch, _, height, width = image_shape(tuple(map(hint, x.shape)))
    n, y, step = steps_of(x)
    return (height == 1 or y == width * step) and (batch == 1 or n == height * width * step)


def _sizes(m: Match, x: TensorSpec) -> tuple[int, ...]:
    """Return the kernel's sizes for an image."""
    op = m.anchor
    (channels, _, ky, kx), groups = _shape(op.arg("weight")), op.arg("groups")
    of_group = hint(x.shape[1]) // groups
    batch, _, oh, ow = _shape(op.out)
    window = (ky, kx, *pair(op, "stride"), *pair(op, "dilation"), *pair(op, "padding"))
    image = image_shape(tuple(map(hint, x.shape)))[2:]
    return (batch * oh * ow, channels // groups, of_group * ky * kx, groups, of_group, *image, oh, ow, *window, *steps_of(x))


def _pays(m: Match, b: Builder) -> bool:
    op, shape = m.anchor, _shape(m.anchor.arg("input"))
    kernel, unary = _kernel(m), m.get("unary")
    assert kernel is not None
    image = spec_of(op.arg("input"))
    if kernel.pointwise and op.arg("groups") == 1 and image.rank == 4 and pointwise.covers(image):
        return False  # it was slower
    channels, of_group, *window = _shape(op.arg("weight"))
    of_group = _like(of_group)
    shape = (shape[0], of_group * op.arg("groups"), *shape[2:])
    x = TensorSpec(shape, channels_last_strides(shape), torch.float32)
    apart = unary is not None and not (POST_OPS[unary.op].exact or b.ctx.options["finite_math"])
    geometry = tuple(list(pair(op, name)) for name in ("padding", "stride", "dilation"))
    parts = min(of_group, 1 << (sums.parts_of(op) - 1).bit_length())
    post = pointwise.riding(m, parts, b)
    conv = choices.Convolution(shape, (channels, of_group, *window), geometry, op.arg("groups"), parts, apart, post)
    return choices.conv_form(b.ctx, kernel, conv, _sizes(m, x), pointwise.after(m)[1], b.built) == own.FORM


def _like(channels: int) -> int:
    """Return a number of channels that behaves alike, of few: a power of two, or one and a half. Each layer of a DenseNet has
    another number."""
    power = 1 << (channels.bit_length() - 1)
    return next(n for n in (power, power * 3 // 2, power * 2) if channels <= n)


def _write(m: Match, b: Builder) -> None:
    x = dense_channels(m.anchor.arg("input"), b)
    kernel = _kernel(m, b.spec(x))
    assert kernel is not None
    weight, bias = folded(m, b)
    emit(m, kernel, x, _packed(weight, m.anchor, kernel, b), bias, _sizes(m, b.spec(x)), "convolution in one kernel", b)


def emit(
    m: Match, kernel: DirectConv, x: Value, weight: Value, bias: Ref | None, sizes: Sequence[int], note: str, b: Builder
) -> None:
    """Emit the launch of a convolution with what follows it. `sizes`: the kernel's; `weight` as the kernel reads it."""
    op, other = m.anchor, other_of(m)
    values = [x, weight]
    if bias is not None:
        values.append(made(b.prepare("aten::constant_pad_nd.default", bias, (0, kernel.columns))))
    values += [] if other is None else [dense(other, b)]
    if not kernel.pointwise:
        channels = sizes[kernel.symbols.index("c")]
        values.append(made(b.prepare("aten::zeros.default", (channels,), dtype=torch.float32)))
    out = b.with_layout(m.out, channels_last_of(spec_of(m.out).shape))
    b.launch(kernel, hash_of(kernel), values, sizes, pointwise.after(m)[1], out=out, op=op)
    b.close_call(m.ops)
    b.notes[op.id] = " + ".join([note, *(p.op for p in m.ops[1:])])
    for part in m.ops[1:]:
        b.notes[part.id] = "in the kernel of conv"


def made(ref: Ref) -> Value:
    """Return what was prepared as a kernel's argument."""
    return Value(ref.id, None)


def _packed(weight: Ref, op: OpView, kernel: DirectConv, b: Builder) -> Value:
    (channels, *rest), groups = _shape(op.arg("weight")), op.arg("groups")
    n, first, parts = channels // groups, 0, []
    kinds = [kind for kind in kernel.panels(n) if kind[0]]
    whole = b.prepare("aten::reshape.default", weight, (groups, n, *rest))
    for count, columns in kinds:
        end = min(n, first + count * columns)
        part = whole if len(kinds) == 1 else b.prepare("aten::slice.Tensor", whole, 1, first, end)
        _, pad, panels, order = direct_conv.packing((groups * (end - first), *rest), groups, columns)
        padded = b.prepare("aten::constant_pad_nd.default", part, pad)
        turned = b.prepare("aten::permute.default", b.prepare("aten::reshape.default", padded, panels), order)
        parts.append(b.prepare("aten::clone.default", turned, memory_format=torch.contiguous_format))
        first = end
    if len(parts) == 1:
        return made(parts[0])
    return made(b.prepare("aten::cat.default", tuple(b.prepare("aten::reshape.default", p, (groups, -1)) for p in parts), 1))


ROW = Row(
    "onednn.direct", pointwise.conv_chain("onednn.direct"), when=_fits, pays=_pays, write=_write, note="convolution"
)  # fmt: skip


# -- few pixels, as behind a pooling of the whole image


def _few(m: Match, b: Builder) -> bool:
    """Match a convolution of so few pixels, each alone, that the weight is read once."""
    op = m.anchor
    if not _fixed(op, b) or spec_of(op.out).rank != 4 or op.arg("groups") != 1 or not _is_product(op, None):
        return False
    n, k = _shape(op.arg("weight"))[:2]
    few = _pixels(op) <= (MOST_GEMV_ROWS if n * k < choices.FITTED.gemv_weight else FEW_OF_LARGE)
    return few and _gemv(m) is not None


def _pixels(op: OpView) -> int:
    x = spec_of(op.arg("input"))
    return x.numel_hint() // hint(x.shape[1])


def _gemv(m: Match) -> Gemv | None:
    op, dtype = m.anchor, from_torch(spec_of(m.anchor.arg("input")).dtype)
    biased = op.arg("bias") is not None or m.get("batch_norm") is not None
    kernel = Gemv(_pixels(op), dtype, dtype, "f32" if biased else "")
    return None if kernel.refused(host_target()) else kernel


def _write_few(m: Match, b: Builder) -> None:
    op, kernel = m.anchor, _gemv(m)
    assert kernel is not None
    weight, bias = folded(m, b)
    n, k = _shape(op.arg("weight"))[:2]
    matrix = b.prepare("aten::reshape.default", weight, (n, k))
    rows = b.prepare("aten::clone.default", matrix, memory_format=torch.contiguous_format)
    values = [pointwise.channels_last(op.arg("input"), b), made(rows)]
    if bias is not None:
        values.append(made(b.prepare("aten::_to_copy.default", bias, dtype=torch.float32)))
    out = b.with_layout(m.out, channels_last_strides(_shape(m.out)))
    b.launch(kernel, hash_of(kernel), values, (n, k), (), out=out, op=op)
    b.close_call(m.ops)
    b.notes[op.id] = "convolution of few pixels in one kernel"
    for part in m.ops[1:]:
        b.notes[part.id] = "folded into the weights of conv"


FEW = Row(
    "onednn.few_pixels",
    chain("conv", maybe("batch_norm", folds_batch_norm, "batch_norm", rule="onednn.few_pixels.batch_norm")),
    when=_few,
    write=_write_few,
    note="convolution of few pixels",
)
