"""Convolutions and their gradients in forms that ACL or oneDNN's SVE code computes, to avoid oneDNN's reference kernels.

According to ONEDNN_VERBOSE on aarch64, ACL takes 1-d and 2-d convolutions of one group in fp32 and bf16. Depthwise convolutions and
gradients have SVE code for fp32 only, gradients only in contiguous (NCHW) layout and where a group's channels fill whole vectors;
everything else is `ref`. So other bf16 convolutions run in fp32 between casts, grouped ones group by group. Gradients run in NCHW,
or as im2col products without SVE; those of groups with few channels run group by group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fusewright.interface import OpView, TensorSpec, Value
from fusewright.plan.ir import Call, Ref
from fusewright.toolkit.region.builder import Builder, contiguous_strides
from fusewright.toolkit.region.pattern import Match
from fusewright_acl import fpmath
from fusewright_cpu.onednn.conv.images import as_image, channels_last_of, geometry_of
from fusewright_cpu.onednn.folding import folded
from fusewright_cpu.onednn.lowerings import CONV, emit_conv, note_parts, packed_conv, spec_of
from fusewright_cpu.onednn.patterns import is_packed, post_op

F32 = torch.float32
MOST_GROUPS = 64
"""Most groups that are convolved one by one."""
WHOLE = 8
"""oneDNN's SVE code takes groups whose channels are a multiple of this, or depthwise ones."""


def kind_of(op: OpView) -> str:
    """Return "plain" (one group), "depthwise" (one input channel per group), "grouped", or "other": transposed or 3-d."""
    x, w, groups = spec_of(op.arg("input")), spec_of(op.arg("weight")), op.arg("groups")
    if op.arg("transposed") or x.rank not in (3, 4):
        return "other"
    return "plain" if groups == 1 else "depthwise" if w.shape[1] == 1 and w.shape[0] == groups else "grouped"


def takes_neighbours(op: OpView, b: Builder) -> bool:
    """Whether the convolution's call can also compute a batch norm and an activation that follow."""
    kind = kind_of(op)
    known = kind == "plain" or (kind == "depthwise" and "sve" in b.ctx.device.features) or kind == "grouped"
    return known and is_packed(op, b) and (kind != "grouped" or op.arg("groups") <= MOST_GROUPS)


def lower(m: Match, b: Builder) -> None:
    """Emit a convolution with its fused neighbours, in the form for its kind, type and weight."""
    op, kind = m.anchor, kind_of(m.anchor)
    half = spec_of(op.out).dtype is not F32
    if kind == "plain" and is_packed(op, b):
        _packed(m, b)
    elif kind == "grouped" and op.arg("groups") <= MOST_GROUPS and (is_packed(op, b) or _few_channels(op, b)):
        _one_by_one(m, b)
    elif kind == "plain" or (not half and (kind == "other" or not is_packed(op, b))):
        _leave(m, b, "ATen: calls ACL with the weight as it is" if kind == "plain" else "ATen")
    elif kind == "depthwise" and is_packed(op, b) and "sve" in b.ctx.device.features:
        _depthwise(m, b)
    elif half:
        _widened(m, b)
    else:
        _leave(m, b, "ATen")


def _few_channels(op: OpView, b: Builder) -> bool:
    """Whether oneDNN has only reference kernels for these groups."""
    out, own, *_ = spec_of(op.arg("weight")).shape
    return "sve" not in b.ctx.device.features or bool(own % WHOLE or out // op.arg("groups") % WHOLE)  # type: ignore[operator]


def _leave(m: Match, b: Builder, why: str) -> None:
    for part in m.ops:
        b.leave(part, any_strides=not m.anchor.arg("transposed"))
    b.notes[m.anchor.id] = why


def _packed(m: Match, b: Builder) -> None:
    """Emit a channels-last call with the weight in ACL's blocks and the batch norm folded in; `fpmath` may multiply in bf16."""
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
    """Emit a packed channels-last call in fp32; bf16 is cast around it."""
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
    """Return a convolution's weight, that of a 1-d one as a 2-d weight."""
    ref = b.exact(weight)
    return ref if spec_of(weight).rank == 4 else b.prepare("aten::unsqueeze.default", ref, 2)


def _wide(op: OpView, b: Builder) -> dict[str, Value]:
    """Return the op's tensors, cast to fp32."""
    return {n: _cast(op.arg(n), F32, b) for n in ("input", "weight", "bias") if op.arg(n) is not None}


def _reads(op: OpView, values: Mapping[str, Value]) -> OpView:
    """Return the op with other inputs, so that whatever orders ops sees the true dependencies of its call."""
    return replace(op, args=tuple(values.get(n, a) for n, a in zip(op.argnames, op.args, strict=True)))


def _one_by_one(m: Match, b: Builder) -> None:
    """Convolve each group with ACL, then concatenate."""
    op, out, groups, held = m.anchor, m.last.out, m.anchor.arg("groups"), is_packed(m.anchor, b)
    image, made = as_image(op.arg("input"), b), spec_of(m.last.out).shape[1] // groups
    parts = []
    for g in range(groups):
        x = _slice(image, 1, g, spec_of(op.arg("input")).shape[1] // groups, b)
        parts.append((_packed_group if held else _plain_group)(m, x, g, made, b))
    emit_conv("aten::cat.default", (tuple(parts), 1), out, op, b)
    b.close_call(m.ops)
    note_parts(m, b, f"{groups} ACL convolutions, one for each group")


def _slice(value: Any, dim: int, g: int, size: Any, b: Builder) -> Ref:
    """Return the `g`th slice of length `size`."""
    return _called("aten::slice.Tensor", value, dim, g * size, (g + 1) * size, b=b)


def _packed_group(m: Match, x: Ref, g: int, made: Any, b: Builder) -> Ref:
    """Emit one group of a convolution with a constant weight."""
    given, geometry = m.anchor.arg("input"), (*geometry_of(m.anchor)[:-1], 1)
    weight, bias = folded(m, b)
    bounds = (0, g * made, (g + 1) * made)
    own = b.prepare("aten::slice.Tensor", weight, *bounds)
    shift = None if bias is None else b.prepare("aten::slice.Tensor", bias, *bounds)
    shape = spec_of(given).shape
    part = replace(given, spec=replace(spec_of(given), shape=(shape[0], shape[1] // m.anchor.arg("groups"), *shape[2:])))
    return _called(CONV, x, packed_conv(own, geometry, part, b), shift, *geometry, *post_op(m), b=b)


def _plain_group(m: Match, x: Ref, g: int, made: Any, b: Builder) -> Ref:
    """Emit one group of a convolution in training: eager's call, channels-last."""
    padding, stride, dilation, _ = geometry_of(m.anchor)
    weight = as_image(m.anchor.arg("weight"), b)
    bias = m.anchor.arg("bias")
    shift = None if bias is None else _slice(b.any_strides(bias), 0, g, made, b)
    dense = b.ctx.value(None)
    b.append(Call("aten::clone.default", (x,), (dense.id,), (("memory_format", torch.channels_last),)))
    how = (stride, padding, dilation, False, (0, 0), 1)
    return _called("aten::convolution.default", Ref(dense.id), _slice(weight, 0, g, made, b), shift, *how, b=b)


def _widened(m: Match, b: Builder) -> None:
    """Emit eager's call in fp32 between casts, because in bf16 it would run oneDNN's reference."""
    op, out = m.anchor, m.last.out
    wide = {n: _dense(v, b) for n, v in _wide(op, b).items()}
    shape = spec_of(out).shape
    made = b.ctx.value(TensorSpec(shape, contiguous_strides(shape), F32))  # type: ignore[arg-type]
    _call(op, wide, (made,), b)
    b.append_op("cast", made, spec_of(out).dtype, out=b.with_layout(out, spec_of(made).stride))  # type: ignore[arg-type]
    b.notes[op.id] = "ATen in fp32"


def _call(op: OpView, values: dict[str, Value], outs: tuple[Value, ...], b: Builder) -> None:
    """Emit eager's call of `op` with other inputs and results; the caller casts the results."""
    b.append(b.ctx.aten(replace(_reads(op, values), outs=outs)))
    b.replace(_reads(op, values), *outs)


def _cast(value: Value, dtype: torch.dtype, b: Builder) -> Value:
    return value if spec_of(value).dtype is dtype else b.append_op("cast", value, dtype)


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
    """Emit a convolution's gradients with respect to input, weight and bias, computed in fp32 and NCHW."""
    op = m.anchor
    wide = {n: _dense(_cast(op.arg(n), F32, b), b) for n in ("grad_output", "input", "weight")}
    outs = tuple(_planes(v, b) for v in op.outs)
    columns, apart = _columns(op, b), _apart(op, b)
    if columns or apart:
        given = [Ref(v.id) for v in wide.values()]
        if apart:
            _gradients_of_groups(op, given, outs, columns, b)
        else:
            _gradients(op, given, (*outs[:2], b.ctx.value(None)), columns, b)
        _bias_gradient(op, wide["grad_output"], outs[2], b)
        b.replace(_reads(op, wide), *outs)
    else:
        _call(op, wide, outs, b)
    for made, out in zip(outs, op.outs, strict=True):
        if out.spec is not None and made is not out:
            b.append_op("cast", made, out.spec.dtype, out=b.with_layout(out, spec_of(made).stride))  # type: ignore[arg-type]
    b.notes[op.id] = f"{'OpenBLAS, in columns' if columns else 'ATen in fp32 planes'}{', group by group' if apart else ''}"


SLOW = "aten::_slow_conv2d_backward.output_mask"


def _apart(op: OpView, b: Builder) -> bool:
    """Whether gradients are computed group by group."""
    groups = 1 < op.arg("groups") <= MOST_GROUPS and not op.arg("transposed") and any(op.arg("output_mask")[:2])
    vectors = kind_of(op) == "depthwise" and "sve" in b.ctx.device.features
    return groups and kind_of(op) != "other" and not vectors and _few_channels(op, b)


def _columns(op: OpView, b: Builder) -> bool:
    """Whether the gradients are im2col products by OpenBLAS: without SVE oneDNN has only its reference."""
    plain = spec_of(op.arg("input")).rank == 4 and not op.arg("transposed") and (op.arg("groups") == 1 or _apart(op, b))
    wanted = any(op.arg("output_mask")[:2])
    return wanted and plain and set(op.arg("dilation")) == {1} and "sve" not in b.ctx.device.features


def _gradients(op: OpView, given: Sequence[Any], outs: Sequence[Value], columns: bool, b: Builder) -> None:
    """Emit the gradients of one group with respect to input and weight."""
    stride, padding, mask = op.arg("stride"), op.arg("padding"), (*op.arg("output_mask")[:2], False)
    target, how = SLOW, (spec_of(op.arg("weight")).shape[2:], stride, padding)
    if not columns:
        target = "aten::convolution_backward.default"
        how = (None, stride, padding, op.arg("dilation"), False, op.arg("output_padding"), 1)  # type: ignore[assignment]
    b.append(Call(target, (*given, *how, mask), tuple(v.id for v in outs), packed=True, op_id=op.id))


def _gradients_of_groups(op: OpView, given: Sequence[Any], outs: Sequence[Value], columns: bool, b: Builder) -> None:
    """Emit the gradients of each group, then concatenate."""
    grad, x, weight = given
    groups, (made, own, *_) = op.arg("groups"), spec_of(op.arg("weight")).shape
    parts = []
    for g in range(groups):
        part = [_slice(grad, 1, g, made // groups, b), _slice(x, 1, g, own, b), _slice(weight, 0, g, made // groups, b)]
        parts.append([b.ctx.value(None) for _ in range(3)])
        _gradients(op, part, parts[-1], columns, b)
    for k, dim in ((0, 1), (1, 0)):
        if op.arg("output_mask")[k]:
            b.call("aten::cat.default", tuple(Ref(p[k].id) for p in parts), dim, out=outs[k])


def _bias_gradient(op: OpView, grad: Value, out: Value, b: Builder) -> None:
    if out.spec is not None:
        b.call("aten::sum.dim_IntList", Ref(grad.id), (0, 2, 3), out=out)


def _planes(out: Value, b: Builder) -> Value:
    """Return the value that the call produces for a result: fp32, dense and row-major."""
    if out.spec is None:
        return out
    stride = contiguous_strides(out.spec.shape)  # type: ignore[arg-type]
    if out.spec.dtype is F32:
        return b.with_layout(out, stride)
    return b.ctx.value(TensorSpec(out.spec.shape, stride, F32))


def backward_reason(op: OpView) -> str | None:
    """Return why a gradient stays eager's (empty tensors, mixed types), or None."""
    specs = [spec_of(op.arg(n)) for n in ("grad_output", "input", "weight")]
    if any(0 in s.shape for s in specs):
        return "an empty tensor"
    return "mixed dtypes" if len({s.dtype for s in specs}) > 1 else None
