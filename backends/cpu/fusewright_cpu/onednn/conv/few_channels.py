"""Convolutions of images of few channels, as a network's first, as a kernel of our own (`fusewright_cpu.kernels.first_conv`), with
the batch norm, the addition and the activation that follow.

oneDNN's vectors are channels, of which there are three, and images in planes are copied for its call.
"""

from __future__ import annotations

import math

import torch

from fusewright.interface import TensorSpec, hint
from fusewright.toolkit.ir.types import from_torch
from fusewright.toolkit.region.builder import Builder, channels_last_strides
from fusewright.toolkit.region.graph import spec_of
from fusewright.toolkit.region.pattern import Match
from fusewright.toolkit.region.rewrite import Row
from fusewright_cpu.kernels import vector_linear
from fusewright_cpu.kernels.by_hand import FirstConv
from fusewright_cpu.onednn import choices, own, sums
from fusewright_cpu.onednn.conv import direct, pointwise
from fusewright_cpu.onednn.conv.images import pair
from fusewright_cpu.onednn.folding import folded
from fusewright_cpu.onednn.patterns import POST_OPS, is_packed, other_of
from fusewright_cpu.onednn.tiles import first_tile_of
from fusewright_cpu.run.sources import hash_of
from fusewright_cpu.target import host_target

MOST = 384
"""The most products of a result, whose sum is not divided (see `direct_conv`)."""


def _shape(m: Match, name: str) -> tuple[int, ...]:
    return tuple(map(hint, spec_of(m.anchor.arg(name)).shape))


def _fits(m: Match, b: Builder) -> bool:
    """Match a convolution of images of fixed size and few channels with a constant weight."""
    op = m.anchor
    x, weight, out = spec_of(op.arg("input")), spec_of(op.arg("weight")), spec_of(op.out)
    if x.rank != 4 or not (x.static and weight.static) or 0 in x.shape or 0 in out.shape or op.arg("groups") != 1:
        return False
    (_, channels, *window), typed = _shape(m, "weight"), {v.spec.dtype for v in op.inputs() if v.spec is not None}
    if channels >= direct.LEAST or math.prod(window) == 1 or channels * math.prod(window) > MOST or set(op.arg("dilation")) != {1}:
        return False
    known = typed in ({torch.float32}, {torch.bfloat16}) and is_packed(op, b) and b.ctx.options["prepack"] == "auto"
    if not known or b.is_const(op.arg("input")) or not b.is_const(op.arg("bias")):
        return False
    kernel = _kernel(m)
    return kernel is not None and not kernel.refused(host_target())


def _kernel(m: Match) -> FirstConv | None:
    op = m.anchor
    (_, channels, _, width), (ky, kx) = map(hint, spec_of(op.out).shape), _shape(m, "weight")[2:]
    tile = first_tile_of(width, channels, host_target())
    if tile is None:
        return None
    biased = op.arg("bias") is not None or m.get("batch_norm") is not None
    dtype, (after, _) = from_torch(spec_of(op.out).dtype), pointwise.after(m)
    return FirstConv(dtype, (ky, kx), pair(op, "stride"), tile.rows, tile.columns, biased, m.get("add") is not None, after)


def _sizes(m: Match, x: TensorSpec) -> tuple[int, ...]:
    """Return the kernel's sizes for an image."""
    batch, n, oh, ow = map(hint, spec_of(m.anchor.out).shape)
    _, c, h, w = map(hint, x.shape)
    k, padding, steps = math.prod(_shape(m, "weight")[1:]), pair(m.anchor, "padding"), map(hint, x.stride)
    return (batch * oh * ow, n, k, c, h, w, oh, ow, *padding, *steps)


def _pays(m: Match, b: Builder) -> bool:
    op, kernel, unary = m.anchor, _kernel(m), m.get("unary")
    assert kernel is not None
    x = b.spec(op.arg("input"))
    apart = unary is not None and not (POST_OPS[unary.op].exact or b.ctx.options["finite_math"])
    geometry = tuple(list(pair(op, name)) for name in ("padding", "stride", "dilation"))
    parts = sums.parts_of(op)
    post = pointwise.riding(m, parts, b)
    conv = choices.Convolution(_shape(m, "input"), _shape(m, "weight"), geometry, 1, parts, apart, post)
    return choices.first_form(b.ctx, kernel, conv, _sizes(m, x), pointwise.after(m)[1], b.built) == own.FORM


def _write(m: Match, b: Builder) -> None:
    op, kernel, x, other = m.anchor, _kernel(m), m.anchor.arg("input"), other_of(m)
    assert kernel is not None
    weight, bias = folded(m, b, torch.float32)
    sizes = _sizes(m, b.spec(x))
    n, k = sizes[1:3]
    rows = b.prepare("aten::reshape.default", b.prepare("aten::_to_copy.default", weight, dtype=torch.float32), (n, k))
    values = [x, direct.made(own.packed(rows, vector_linear.packing(n, k, kernel.columns), b))]
    if bias is not None:
        wide = b.prepare("aten::_to_copy.default", bias, dtype=torch.float32)
        values.append(direct.made(b.prepare("aten::constant_pad_nd.default", wide, (0, -n % kernel.columns))))
    values += [] if other is None else [pointwise.channels_last(other, b)]
    out = b.with_layout(m.out, channels_last_strides(tuple(map(hint, spec_of(m.out).shape))))
    b.launch(kernel, hash_of(kernel), values, sizes, pointwise.after(m)[1], out=out, op=op)
    b.close_call(m.ops)
    b.notes[op.id] = " + ".join(["first convolution in one kernel", *(p.op for p in m.ops[1:])])
    for part in m.ops[1:]:
        b.notes[part.id] = "in the kernel of conv"


ROW = Row(
    "onednn.first", pointwise.conv_chain("onednn.first"), when=_fits, pays=_pays, write=_write, note="first convolution"
)  # fmt: skip
