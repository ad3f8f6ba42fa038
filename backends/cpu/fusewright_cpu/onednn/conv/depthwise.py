"""Depthwise convolutions as one kernel (`fusewright_cpu.kernels.depthwise`) with the padding and the activations around them.

oneDNN's post-ops lose NaN in relu and clamp, so each was a pass over memory, in networks of inverted residuals (MobileNetV2) two
for every depthwise convolution. Its silu takes longer than the kernel's.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch

from fusewright.interface import OpView, TensorSpec, Value
from fusewright.plan.ir import Ref
from fusewright.toolkit.ir.types import from_torch
from fusewright.toolkit.region.builder import Builder, channels_last_strides
from fusewright.toolkit.region.graph import spec_of
from fusewright.toolkit.region.pattern import Match, chain, maybe
from fusewright.toolkit.region.rewrite import Row
from fusewright_cpu.kernels.by_hand import DEPTHWISE_CHANNELS, Depthwise
from fusewright_cpu.onednn import choices
from fusewright_cpu.onednn.conv.images import pair
from fusewright_cpu.onednn.folding import folded
from fusewright_cpu.onednn.patterns import POST_OPS, folds_batch_norm, is_packed, same_type
from fusewright_cpu.run.sources import hash_of
from fusewright_cpu.target import CpuTarget, host_target

MOST_COLUMNS = 13
"""The widest window: the code for a pixel is unrolled over its columns, and of wider ones oneDNN leaves out what is outside of the
image."""
FEW_TAPS = 25
"""Windows up to 5x5, of which a pass over memory costs more than what the kernel may lose."""
ACTIVATIONS = frozenset({"relu", "clamp", "silu", "hardswish"})


def _value(arg: Any) -> Value:
    assert isinstance(arg, Value)
    return arg


def _sizes(arg: Any) -> tuple[int, ...]:
    """Return a fixed shape."""
    return cast(tuple[int, ...], spec_of(arg).shape)


def _limits(op: OpView | None) -> tuple[float, ...] | None:
    """Return the kernel's arguments for an activation, or None if it cannot compute it."""
    if op is None or op.op != "clamp":
        return ()
    low, high = op.arg("min"), op.arg("max")
    given = isinstance(low, int | float) and isinstance(high, int | float) and not (math.isnan(low) or math.isnan(high))
    return (float(low), float(high)) if given else None


def _activation(op: OpView, m: Match, b: Builder) -> bool:
    return op.args[0] == m.out and same_type(op.out, m.out) and _limits(op) is not None


CONV = chain(
    "conv",
    maybe("batch_norm", folds_batch_norm, "batch_norm", rule="onednn.depthwise.batch_norm"),
    maybe(ACTIVATIONS, _activation, "after", rule="onednn.depthwise.after"),
)


def may_be(op: OpView) -> bool:
    return op.op == "conv" and op.arg("groups") > 1


def _fits(m: Match, b: Builder) -> bool:
    """Match a depthwise convolution of images of fixed size with constant weights."""
    op = m.anchor
    x, weight, out = (spec_of(v) for v in (op.arg("input"), op.arg("weight"), op.out))
    if not may_be(op) or not is_packed(op, b) or x.rank != 4 or not (x.static and weight.static) or 0 in x.shape or 0 in out.shape:
        return False
    one_by_one = op.arg("groups") == x.shape[1] == weight.shape[0] and weight.shape[1] == 1
    typed = x.dtype in (torch.float32, torch.bfloat16) and len({v.spec.dtype for v in op.inputs() if v.spec is not None}) == 1
    window: tuple[int, ...] = weight.shape[2:]  # type: ignore[assignment]
    plain = one_by_one and typed and set(op.arg("dilation")) == {1} and math.prod(window) > 1 and window[-1] <= MOST_COLUMNS
    return plain and b.is_const(op.arg("bias")) and not _kernel(m, host_target()).refused(host_target())


def _with_what_it_reads(m: Match, b: Builder) -> Match:
    """Add a padding with zeros and an activation that nothing else reads."""
    last = m.last
    pad = _only_for(m.anchor, _value(m.anchor.args[0]), b)
    if pad is not None and pad.op == "constant_pad_nd" and _zeros_around(pad):
        m = m.with_ops(pad, at=last, pad=pad)
    reader = m.get("pad") or m.anchor
    before = _only_for(reader, _value(reader.args[0]), b)
    known = before is not None and before.op in ACTIVATIONS and _limits(before) is not None
    if before is not None and known and same_type(before.out, _value(before.args[0])):
        m = m.with_ops(before, at=last, before=before)
    return m


def _only_for(op: OpView, value: Value, b: Builder) -> OpView | None:
    """Return the op that makes `value` if only `op` reads it and no call has taken it."""
    made = b.graph.producer(value)
    return made if made is not None and b.graph.free(made) and b.graph.only_user(value) is op else None


def _zeros_around(pad: OpView) -> bool:
    """Match a padding of height and width with zeros; a negative one cuts off."""
    return len(pad.arg("pad")) <= 4 and all(isinstance(n, int) and n >= 0 for n in pad.arg("pad")) and not pad.arg("value")


def _kernel(m: Match, target: CpuTarget) -> Depthwise:
    op = m.anchor
    before, after = (part.op if (part := m.get(side)) is not None else "" for side in ("before", "after"))
    (_, channels, _, _), (_, _, ky, kx) = _sizes(op.arg("input")), _sizes(op.arg("weight"))
    width = _sizes(op.out)[-1]
    most = 8 if target.registers == 32 else 4
    columns = min(range(most, most // 2, -1), key=lambda n: (width % n, -n))
    part = channels % (target.vector_bytes // 4) != 0
    return Depthwise(from_torch(spec_of(op.out).dtype), (ky, kx), pair(op, "stride"), columns, before, after, part)


def _geometry(m: Match, x: TensorSpec) -> tuple[int, ...]:
    """Return the kernel's sizes for an image `x`."""
    op, pad = m.anchor, m.get("pad")
    around = (*(() if pad is None else pad.arg("pad")), 0, 0, 0)
    above, left = pair(op, "padding")
    first = (around[2] + above, around[0] + left)
    steps = (x.stride[0], *x.stride[2:])
    return cast(tuple[int, ...], (*x.shape, *_sizes(op.out)[2:], *first, *steps))


def _image(m: Match) -> Value:
    """Return the value that the kernel reads."""
    return _value((m.get("before") or m.get("pad") or m.anchor).args[0])


def _pays(m: Match, b: Builder) -> bool:
    """Whether the kernel saves a pass over memory that oneDNN's call needs, or measures faster."""
    before, after = m.get("before"), m.get("after")
    made = b.graph.producer(_image(m))
    in_front = made is not None and made.op in ("conv", "batch_norm")
    apart = not _rides(after, b)
    saves = m.get("pad") is not None or apart or not (_rides(before, b) and (before is None or in_front))
    if saves and math.prod(_sizes(m.anchor.arg("weight"))[2:]) <= FEW_TAPS:
        return True
    shape = _sizes(_image(m))
    x = TensorSpec(shape, channels_last_strides(shape), spec_of(_image(m)).dtype)
    kernel, sizes = _kernel(m, host_target()), _geometry(m, x)
    return choices.depthwise_form(b.ctx, kernel, sizes, pair(m.anchor, "padding"), _both_limits(m), b.built, apart) == "kernel"


def _rides(activation: OpView | None, b: Builder) -> bool:
    """Whether a convolution of oneDNN computes an activation in its call."""
    return activation is None or POST_OPS[activation.op].exact or bool(b.ctx.options["finite_math"])


def _both_limits(m: Match) -> tuple[float, ...]:
    """Return the kernel's arguments for its activations."""
    return tuple(limit for side in ("before", "after") for limit in _limits(m.get(side)) or ())


def _write(m: Match, b: Builder) -> None:
    image = _image(m)
    if b.spec(image).stride[1] != 1:
        image = b.channels_last(image)
    kernel = _kernel(m, host_target())
    weight, bias = folded(m, b, torch.float32)
    channels = _sizes(m.anchor.out)[1]
    rows = _padded(weight, channels, b)
    shift = b.prepare("aten::zeros.default", (channels,), dtype=torch.float32) if bias is None else bias
    values = [image, *(Value(r.id, None) for r in (rows, _padded(shift, channels, b)))]
    out = b.with_layout(m.out, channels_last_strides(_sizes(m.out)))
    b.launch(kernel, hash_of(kernel), values, _geometry(m, b.spec(image)), _both_limits(m), out=out, op=m.anchor)
    b.close_call(m.ops)
    b.notes[m.anchor.id] = "depthwise convolution in one kernel"
    for part in m.ops:
        if part is not m.anchor:
            b.notes[part.id] = "in the kernel of conv"


def _padded(x: Ref, channels: int, b: Builder) -> Ref:
    """Return a weight or bias as the kernel reads it: fp32 rows of channels, padded to whole blocks."""
    wide = b.prepare("aten::_to_copy.default", x, dtype=torch.float32)
    rows = b.prepare("aten::t.default", b.prepare("aten::reshape.default", wide, (channels, -1)))
    padded = b.prepare("aten::constant_pad_nd.default", rows, (0, -channels % DEPTHWISE_CHANNELS))
    return b.prepare("aten::clone.default", padded, memory_format=torch.contiguous_format)


ROW = Row("onednn.depthwise", CONV, when=_fits, extend=_with_what_it_reads, pays=_pays, write=_write, note="depthwise convolution")
"""These claim before other rows: the call in front would take the activation that they read (see `region`)."""
