"""Convolutions and their gradients in forms that ACL or oneDNN's SVE code computes, never oneDNN's reference.

Read from ONEDNN_VERBOSE on aarch64: ACL takes 1-d and 2-d convolutions of one group in fp32 and bf16; depthwise ones and
gradients are SVE code in fp32 alone, gradients in planes alone; what remains is `ref`. So other bf16 convolutions are computed
in fp32, between kernels that cast, groups one by one, and gradients in planes, or as products of columns without SVE.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from fusewright.interface import OpView, TensorSpec, Value
from fusewright.plan.ir import Call, Ref
from fusewright.toolkit.region.builder import Builder, contiguous_strides
from fusewright.toolkit.region.pattern import Match
from fusewright_acl import fpmath
from fusewright_cpu.onednn.lowerings import (
    CONV,
    as_image,
    channels_last_of,
    emit_conv,
    folded,
    geometry_of,
    note_parts,
    packed_conv,
    spec_of,
)
from fusewright_cpu.onednn.patterns import is_packed, post_op

F32 = torch.float32
MOST_GROUPS = 64
"""Groups that are convolved one by one."""


def kind_of(op: OpView) -> str:
    """ "plain" (one group), "depthwise" (a channel each), "grouped", or "other": transposed or of three dimensions."""
    x, w, groups = spec_of(op.arg("input")), spec_of(op.arg("weight")), op.arg("groups")
    if op.arg("transposed") or x.rank not in (3, 4):
        return "other"
    return "plain" if groups == 1 else "depthwise" if w.shape[1] == 1 and w.shape[0] == groups else "grouped"


def takes_neighbours(op: OpView, b: Builder) -> bool:
    """Whether its call computes a batch norm and an activation behind it."""
    kind = kind_of(op)
    known = kind == "plain" or (kind == "depthwise" and "sve" in b.ctx.device.features) or kind == "grouped"
    return known and is_packed(op, b) and (kind != "grouped" or op.arg("groups") <= MOST_GROUPS)


def lower(m: Match, b: Builder) -> None:
    """A convolution with what rides on it, in the form for its kind, type and weight."""
    op, kind = m.anchor, kind_of(m.anchor)
    half = spec_of(op.out).dtype is not F32
    if kind == "plain" and is_packed(op, b):
        _packed(m, b)
    elif kind == "plain" or (not half and (kind == "other" or not is_packed(op, b))):
        _leave(m, b, "ATen: calls ACL with the weight as it is" if kind == "plain" else "ATen")
    elif kind == "depthwise" and is_packed(op, b) and "sve" in b.ctx.device.features:
        _depthwise(m, b)
    elif kind == "grouped" and is_packed(op, b) and op.arg("groups") <= MOST_GROUPS and not half:
        _one_by_one(m, b)
    elif half:
        _widened(m, b)
    else:
        _leave(m, b, "ATen")


def _leave(m: Match, b: Builder, why: str) -> None:
    for part in m.ops:
        b.leave(part, any_strides=not m.anchor.arg("transposed"))
    b.notes[m.anchor.id] = why


def _packed(m: Match, b: Builder) -> None:
    """Channels-last, the weight in ACL's blocks, fp32 with its batch norm folded in; multiplied in bf16 under `fpmath`."""
    op, x = m.anchor, m.anchor.arg("input")
    weight, bias = folded(m, b)
    packed = packed_conv(weight, geometry_of(op), x, b)
    args = (as_image(x, b), packed, bias, *geometry_of(op))
    if b.ctx.options["fpmath"] == "bf16" and spec_of(op.out).dtype is F32:
        emit_conv(fpmath.CONV, args, m.last.out, op, b)
        note = "ACL convolution, packed, channels-last, multiplied in bf16 (fpmath)"
    else:
        emit_conv(CONV, (*args, *post_op(m)), m.last.out, op, b)
        note = "ACL convolution, packed, channels-last"
    b.close_call(m.ops)
    note_parts(m, b, note)


def _depthwise(m: Match, b: Builder) -> None:
    """Packed, channels-last, in fp32."""
    op, x, out = m.anchor, m.anchor.arg("input"), m.last.out
    if spec_of(out).dtype is F32:
        weight, bias = folded(m, b)
        args = (as_image(x, b), packed_conv(weight, geometry_of(op), x, b), bias, *geometry_of(op), *post_op(m))
        emit_conv(CONV, args, out, op, b)
        b.close_call(m.ops)
        return note_parts(m, b, "oneDNN depthwise convolution, packed, channels-last")
    shape, wide = spec_of(out).shape, _wide(op, b)
    weight = _prepared(wide["weight"], b)
    made = b.ctx.value(TensorSpec(shape, channels_last_of(shape), F32))
    packed = packed_conv(weight, geometry_of(op), wide["input"], b)
    args = (as_image(wide["input"], b), packed, b.any_strides(wide.get("bias")), *geometry_of(op), "none", (), "")
    emit_conv(CONV, args, made, op, b)
    b.replace(_reads(op, wide), made)
    b.append_op("cast", made, spec_of(out).dtype, out=b.with_layout(out, channels_last_of(shape)))
    b.notes[op.id] = "oneDNN depthwise convolution in fp32, packed, channels-last"


def _prepared(weight: Value, b: Builder) -> Ref:
    """A weight of a convolution, one over [N, C, L] as one over images."""
    ref = b.exact(weight)
    return ref if spec_of(weight).rank == 4 else b.prepare("aten::unsqueeze.default", ref, 2)


def _wide(op: OpView, b: Builder) -> dict[str, Value]:
    """Its tensors in fp32."""
    return {n: _cast(op.arg(n), F32, b) for n in ("input", "weight", "bias") if op.arg(n) is not None}


def _reads(op: OpView, values: Mapping[str, Value]) -> OpView:
    """The op, reading other values: whoever orders ops sees what its call waits for."""
    return replace(op, args=tuple(values.get(n, a) for n, a in zip(op.argnames, op.args, strict=True)))


def _one_by_one(m: Match, b: Builder) -> None:
    """Each group by ACL, then side by side."""
    op, x, out = m.anchor, m.anchor.arg("input"), m.last.out
    weight, bias = folded(m, b)
    groups, geometry = op.arg("groups"), (*geometry_of(op)[:-1], 1)
    image, parts = as_image(x, b), []
    taken, made = spec_of(x).shape[1] // groups, spec_of(out).shape[1] // groups
    part_of = replace(x, spec=replace(spec_of(x), shape=(spec_of(x).shape[0], taken, *spec_of(x).shape[2:])))
    for g in range(groups):
        own = b.prepare("aten::slice.Tensor", weight, 0, g * made, (g + 1) * made)
        shift = None if bias is None else b.prepare("aten::slice.Tensor", bias, 0, g * made, (g + 1) * made)
        given = _called("aten::slice.Tensor", image, 1, g * taken, (g + 1) * taken, b=b)
        parts.append(_called(CONV, given, packed_conv(own, geometry, part_of, b), shift, *geometry, *post_op(m), b=b))
    emit_conv("aten::cat.default", (tuple(parts), 1), out, op, b)
    b.close_call(m.ops)
    note_parts(m, b, f"{groups} ACL convolutions, one for each group")


def _widened(m: Match, b: Builder) -> None:
    """Eager's call in fp32, between casts: its kernels for bf16 are oneDNN's reference."""
    op, out = m.anchor, m.last.out
    wide = {n: _dense(v, b) for n, v in _wide(op, b).items()}
    shape = spec_of(out).shape
    made = b.ctx.value(TensorSpec(shape, contiguous_strides(shape), F32))  # type: ignore[arg-type]
    _call(op, wide, (made,), b)
    b.append_op("cast", made, spec_of(out).dtype, out=b.with_layout(out, spec_of(made).stride))  # type: ignore[arg-type]
    b.notes[op.id] = "ATen in fp32"


def _call(op: OpView, values: dict[str, Value], outs: tuple[Value, ...], b: Builder) -> None:
    """Eager's call of `op` with other values, which ops behind it cast."""
    b.append(b.ctx.aten(replace(_reads(op, values), outs=outs)))
    b.replace(_reads(op, values), *outs)


def _cast(value: Value, dtype: torch.dtype, b: Builder) -> Value:
    return value if spec_of(value).dtype is dtype else b.append_op("cast", b.at_hand(value), dtype)


def _dense(value: Value, b: Builder) -> Value:
    spec = b.spec(value)
    dense = contiguous_strides(spec.shape)  # type: ignore[arg-type]
    same = all(n == 1 or s == d for n, s, d in zip(spec.shape, spec.stride, dense, strict=True))
    return b.at_hand(value) if same else b.row_major(value)


def _called(target: str, *args: Any, b: Builder) -> Ref:
    made = b.ctx.value(None)
    b.call(target, *args, out=made)
    return Ref(made.id)


# -- gradients


def backward(m: Match, b: Builder) -> None:
    """The gradients of a convolution by its input, weight and bias, computed in fp32 and in planes."""
    op = m.anchor
    wide = {n: _dense(_cast(op.arg(n), F32, b), b) for n in ("grad_output", "input", "weight")}
    outs = tuple(_planes(v, b) for v in op.outs)
    if _columns(op, b):
        kernel = spec_of(op.arg("weight")).shape[2:]
        mask = (*op.arg("output_mask")[:2], False)
        args = (*(Ref(v.id) for v in wide.values()), kernel, op.arg("stride"), op.arg("padding"), mask)
        products = (*outs[:2], b.ctx.value(None))
        b.append(Call(SLOW, args, tuple(v.id for v in products), packed=True, op_id=op.id))
        _bias_gradient(op, wide["grad_output"], outs[2], b)
        b.replace(_reads(op, wide), *outs)
    else:
        _call(op, wide, outs, b)
    for made, out in zip(outs, op.outs, strict=True):
        if out.spec is not None and made is not out:
            b.append_op("cast", made, out.spec.dtype, out=b.with_layout(out, spec_of(made).stride))  # type: ignore[arg-type]
    b.notes[op.id] = "OpenBLAS, in columns" if _columns(op, b) else "ATen in fp32 planes"


SLOW = "aten::_slow_conv2d_backward.output_mask"


def _columns(op: OpView, b: Builder) -> bool:
    """Whether its products are OpenBLAS's: oneDNN has SVE code alone."""
    plain = spec_of(op.arg("input")).rank == 4 and not op.arg("transposed") and op.arg("groups") == 1
    wanted = any(op.arg("output_mask")[:2])
    return wanted and plain and set(op.arg("dilation")) == {1} and "sve" not in b.ctx.device.features


def _bias_gradient(op: OpView, grad: Value, out: Value, b: Builder) -> None:
    if out.spec is not None:
        b.call("aten::sum.dim_IntList", Ref(grad.id), (0, 2, 3), out=out)


def _planes(out: Value, b: Builder) -> Value:
    """What the call makes in place of a result: fp32, dense and row-major."""
    if out.spec is None:
        return out
    stride = contiguous_strides(out.spec.shape)  # type: ignore[arg-type]
    if out.spec.dtype is F32:
        return b.with_layout(out, stride)
    return b.ctx.value(TensorSpec(out.spec.shape, stride, F32))


def backward_reason(op: OpView) -> str | None:
    """Why a gradient stays eager's: empty tensors, and mixed types."""
    specs = [spec_of(op.arg(n)) for n in ("grad_output", "input", "weight")]
    if any(0 in s.shape for s in specs):
        return "an empty tensor"
    return "mixed dtypes" if len({s.dtype for s in specs}) > 1 else None
