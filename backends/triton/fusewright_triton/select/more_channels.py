"""Convolutions with channels of zeros behind their own, where libraries read eight at once: the kernel that makes an image writes
them.

Libraries pad images of other numbers of channels themselves, in kernels before and behind the call, or have no fast kernel, as
for the three channels of a video.
"""

from __future__ import annotations

from dataclasses import replace

from fusewright.interface import OpView, Value
from fusewright.plan.ir import Ref
from fusewright.toolkit.region.builder import channels_last_strides
from fusewright.toolkit.region.graph import spec_of
from fusewright.toolkit.region.pattern import Match, chain
from fusewright.toolkit.region.rewrite import Row
from fusewright.toolkit.rules.space import layout_of
from fusewright_triton.select.calls import Calls
from fusewright_triton.select.convolutions import (
    add_bias,
    bias_behind,
    geometry,
    images,
    laid,
    packed,
    padded,
    patches,
    whole,
)

ALIGNED, LARGE = 8, 1 << 21
"""Channels that libraries read at once, and elements from which on the copies that they make of other images take long."""


def _large(op: OpView, image: Value, made: Value, c: Calls) -> bool:
    """Return whether images are large, of a device whose library was measured, and not read by windows."""
    known = not c.fused or c.target.fitted is not None
    return known and not patches(op) and spec_of(image).numel_hint() + spec_of(made).numel_hint() >= LARGE


def _odd(op: OpView) -> tuple[int, int]:
    """Return how many channels a convolution lacks, in and out."""
    outs, channels = spec_of(op.arg("weight")).shape[:2]
    return -channels % ALIGNED, -outs % ALIGNED  # type: ignore[operator]


def _constant(m: Match, c: Calls) -> bool:
    op = m.anchor
    fits = c.graph.phase == "infer" and whole(m, c) and laid(m, c)
    return fits and any(_odd(op)) and _large(op, op.arg("input"), op.out, c)


def added(op: OpView, c: Calls) -> tuple[int, int]:
    """Return the channels of zeros that a convolution has, in and out."""
    return _odd(op) if _constant(Match(op, (op,)), c) else (0, 0)


def _write(m: Match, c: Calls) -> None:
    """Emit a convolution of more channels, in and out, and leave out those behind its result."""
    op, b = m.anchor, c.b
    behind, more = _odd(op)
    made, out = c.ctx.value(None), spec_of(op.out)
    pads = (*(0,) * 2 * (out.rank - 2), 0, behind)
    weight = b.prepare("aten::constant_pad_nd.default", b.exact(op.arg("weight")), (*pads, 0, more))
    x = padded(op.arg("input"), pads, c)
    b.call("aten::convolution.default", x, packed(weight, op, c), None, *geometry(op), out=made)
    n, outs, *sizes = out.shape
    stride = channels_last_strides((n, outs + more, *sizes))  # type: ignore[arg-type, operator]
    if op.arg("bias") is None:
        b.library("aten::slice.Tensor", Ref(made.id), 1, 0, outs, out=op.out, stride=stride, op=op)
    else:
        kept = c.ctx.value(replace(out, stride=stride))
        b.call("aten::slice.Tensor", Ref(made.id), 1, 0, outs, out=kept, op=op)
        bias_behind(op, kept, channels_last_strides(out.shape), c)  # type: ignore[arg-type]


def _few(op: OpView, made: Value, c: Calls) -> bool:
    """Return whether a convolution of a training step is of a few channels, in volumes; in images of two dims it is a kernel's."""
    x, w = spec_of(op.arg("input")), spec_of(op.arg("weight"))
    if x.rank != 5 or op.arg("transposed") or op.arg("groups") != 1 or w.shape[1] >= ALIGNED or x.dtype != w.dtype:  # type: ignore[operator]
        return False
    last = x.static and layout_of(spec_of(made)) == "channels_last"
    return last and 0 not in spec_of(made).shape and _large(op, op.arg("input"), made, c)


def _trained(m: Match, c: Calls) -> bool:
    return c.graph.phase != "infer" and _few(m.anchor, m.out, c)


def _operands(op: OpView, c: Calls) -> tuple[Ref, Ref]:
    """Return image and weight with zeros behind their channels, written by kernels."""
    pads = (*(0,) * 6, 0, _odd(op)[0])
    return padded(op.arg("input"), pads, c), padded(op.arg("weight"), pads, c)


def _write_trained(m: Match, c: Calls) -> None:
    op = m.anchor
    given = (*_operands(op, c), None, *geometry(op))
    stride = channels_last_strides(spec_of(op.out).shape)  # type: ignore[arg-type]
    if op.arg("bias") is None:
        c.b.library("aten::convolution.default", *given, out=op.out, stride=stride, op=op)
    else:
        add_bias(op, given, stride, c)


def backward_reason(op: OpView) -> str | None:
    """Return why the gradient of a weight is not computed with more channels."""
    image, weight, _ = op.arg("output_mask")
    if image or not weight:
        return "the image's gradient too, or not the weight's"
    return "neither few channels nor in three dims" if spec_of(op.arg("input")).rank != 5 or not _odd(op)[0] else None


def _reads_few(m: Match, c: Calls) -> bool:
    return _few(m.anchor, m.anchor.arg("grad_output"), c)


def _write_gradient(m: Match, c: Calls) -> None:
    """Emit the gradient of a weight of more channels, its own channels for the fuser, and the bias's as a sum."""
    op, b = m.anchor, c.b
    weight, spec = spec_of(op.arg("weight")), spec_of(op.outs[1])
    outs, channels, *window = weight.shape
    shape = (outs, channels + _odd(op)[0], *window)  # type: ignore[operator]
    made = c.ctx.value(replace(weight, shape=shape, stride=channels_last_strides(shape)))  # type: ignore[arg-type]
    given = (images(op.arg("grad_output"), c), *_operands(op, c), None, *geometry(op), (False, True, False))
    unread = c.ctx.value(None), c.ctx.value(None)
    b.call(op.target, *given, out=unread[0], more=(made, unread[1]), op=op)
    b.replace(op, unread[0], made, unread[1])
    b.append_op("cast", b.append_op("slice", made, 1, 0, channels, 1), spec.dtype, out=op.outs[1])
    if op.arg("output_mask")[2]:
        b.append_op("sum", op.arg("grad_output"), (0, 2, 3, 4), out=op.outs[2])


ROWS = (
    Row(
        "triton.conv.more_channels", chain("conv"), when=_constant, write=_write,
        note="convolution, channels-last, with channels of zeros",
    ),
    Row(
        "triton.conv.more_channels_trained", chain("conv"), when=_trained, write=_write_trained,
        note="convolution of volumes of few channels, with channels of zeros",
    ),
)  # fmt: skip

BACKWARD = Row(
    "triton.conv_backward.more_channels", chain("conv_backward"), when=_reads_few, write=_write_gradient,
    note="gradient of a weight of few channels, with channels of zeros",
)  # fmt: skip
