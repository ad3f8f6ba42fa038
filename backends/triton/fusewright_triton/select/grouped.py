"""Convolutions of small groups, and their gradients, by kernels of our own.

Libraries have channels-last kernels for few sizes of groups, and compute others one group at a time or in planes (measured:
docs/studies/gpu-models.md).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fusewright.interface import OpView, Value
from fusewright.plan.ir import Ref
from fusewright.toolkit.region.builder import channels_last_strides, contiguous_strides
from fusewright.toolkit.region.graph import spec_of
from fusewright.toolkit.region.pattern import Match, chain
from fusewright.toolkit.region.rewrite import Row
from fusewright.toolkit.rules.space import layout_of
from fusewright_triton.kernels import grouped_ops as kernels
from fusewright_triton.select.calls import Calls
from fusewright_triton.select.convolutions import add_bias, images

WINDOW, WIDEST = 5, 64
"""Longest side of a window, and most channels of a group, that were measured."""

ELEMENTS = 1 << 16
"""Elements of the smallest image for which it is worth it; of images below three million nothing was measured."""

LIBRARY = frozenset({8, 16, 32, 64})
"""Channels of groups, in and out, for which libraries have channels-last kernels of 3x3 windows."""


def reason(op: OpView) -> str | None:
    """Return why a convolution, or its gradients, are none of small groups."""
    x, w, groups = spec_of(op.arg("input")), spec_of(op.arg("weight")), op.arg("groups")
    if x.rank != 4 or op.arg("transposed") or not x.static or not w.static or groups == 1:
        return "no groups, not 2-d, transposed or symbolic"
    if x.dtype != w.dtype or x.numel_hint() < ELEMENTS:
        return "mixed types, or small images"
    outs, ins, *window = _shape(op)
    outs //= groups
    if max(window) > WINDOW or len(set(op.arg("stride"))) > 1 or ins == 1:
        return "a large window, strides that differ, or depthwise"
    together = kernels.tile(ins, outs, groups).groups
    if max(ins, outs) > WIDEST or together * ins % kernels.RUN or together * outs % kernels.RUN:
        return "channels that make no tile"
    dense = window == [3, 3] and set(op.arg("dilation")) == {1}
    return "the library's own kernel" if ins == outs and ins in LIBRARY and dense else None


def backward_reason(op: OpView) -> str | None:
    """Return why gradients are not computed by kernels of small groups."""
    image, weight, _ = op.arg("output_mask")
    if not (image or weight) or spec_of(op.arg("grad_output")).dtype != spec_of(op.arg("input")).dtype:
        return "the bias's gradient alone, or mixed types"
    return reason(op) if layout_of(spec_of(op.arg("input"))) == "channels_last" else "in planes"


def _suits(m: Match, c: Calls) -> bool:
    op = m.anchor
    laid = layout_of(spec_of(op.arg("input"))) == "channels_last"
    constant = c.graph.phase == "infer" and c.is_const(op.arg("weight"))
    return (laid or constant) and reason(op) is None


def _blocks(op: OpView, c: Calls) -> Ref:
    """Return the weight as the kernels read it: kept where it is constant, else made at each call."""
    make = c.b.prepare if c.is_const(op.arg("weight")) else c.made
    return make(kernels.BLOCKS, c.b.exact(op.arg("weight")), op.arg("groups"))


def _shape(op: OpView) -> tuple[int, ...]:
    return tuple(spec_of(op.arg("weight")).shape)  # type: ignore[arg-type]


def _how(op: OpView, c: Calls) -> tuple[tuple[int, ...], int, str]:
    """Return the last arguments of the kernels."""
    steps = (*op.arg("stride"), *op.arg("padding"), *op.arg("dilation"))
    return steps, op.arg("groups"), c.ctx.device.arch


def _write(m: Match, c: Calls) -> None:
    op = m.anchor
    given = (images(op.arg("input"), c), _blocks(op, c), _shape(op), *_how(op, c))
    last = channels_last_strides(spec_of(op.out).shape)  # type: ignore[arg-type]
    if op.arg("bias") is None:
        c.b.library(kernels.OPERATOR, *given, out=op.out, stride=last, op=op)
    else:
        add_bias(op, given, last, c, kernels.OPERATOR)


def _write_gradients(m: Match, c: Calls) -> None:
    """Emit the gradients that are asked for; those of weight and bias as sums for the fuser."""
    op, b = m.anchor, c.b
    x, weight, wanted = spec_of(op.arg("input")), spec_of(op.arg("weight")), op.arg("output_mask")
    grad, shape, how = images(op.arg("grad_output"), c), _shape(op), _how(op, c)
    made = [c.ctx.value(None) for _ in op.outs]
    if wanted[0]:
        made[0] = b.with_layout(op.outs[0], channels_last_strides(x.shape))  # type: ignore[arg-type]
        b.call(kernels.IMAGE_GRADIENT, grad, _blocks(op, c), x.shape[2:], shape, *how, out=made[0], op=op)
    if wanted[1]:
        pixels = spec_of(op.arg("grad_output")).numel_hint() // shape[0]
        parts = kernels.parts(pixels, shape, op.arg("groups"))
        made[1] = c.ctx.value(replace(weight, shape=parts, stride=contiguous_strides(parts), dtype=torch.float32))
        b.call(kernels.WEIGHT_GRADIENT, grad, images(op.arg("input"), c), shape, *how, out=made[1], op=op)
    b.replace(op, *made)
    if wanted[1]:
        _give_weight(op, made[1], c)
    if wanted[2]:
        b.append_op("sum", op.arg("grad_output"), (0, 2, 3), out=op.outs[2])


def _give_weight(op: OpView, parts: Value, c: Calls) -> None:
    """Emit the sum of the parts of a weight's gradient."""
    b, spec = c.b, spec_of(op.outs[1])
    summed = b.append_op("permute", b.append_op("sum", parts, (0,), False), (0, 3, 1, 2))
    b.append_op("cast", summed, spec.dtype, out=b.with_layout(op.outs[1], channels_last_strides(spec.shape)))  # type: ignore[arg-type]


ROWS = (Row("triton.conv.grouped", chain("conv"), when=_suits, write=_write, note="convolution of small groups"),)

BACKWARD = Row(
    "triton.conv_backward.grouped", chain("conv_backward"), write=_write_gradients, note="gradients of small groups"
)
