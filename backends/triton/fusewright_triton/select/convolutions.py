"""Convolutions of inference, of two or three spatial dims: channels-last, those of two with batch norm folded into the weight and
fused with an addition and a relu.

A batch norm that no relu follows stays a loop kernel, which fuses more. A shortcut (convolution and batch norm
whose only reader is the addition) gives its shift to the other branch, so that no pass over the image adds it.
Convolutions of patches, whose stride equals their kernel size, become products. Torch adds a bias in a pass of its own behind the
library's call, so kernels that read the result add it instead, in training too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fusewright import ops
from fusewright.interface import OpView, TensorSpec, Value
from fusewright.ops.core import Kind
from fusewright.ops.strides import CHANNELS_LAST
from fusewright.plan.ir import Call, Ref
from fusewright.toolkit.region.builder import channels_last_strides, contiguous_strides, same_strides
from fusewright.toolkit.region.graph import Claim, spec_of
from fusewright.toolkit.region.pattern import Match, chain, find, maybe, one, p
from fusewright.toolkit.region.rewrite import Row
from fusewright.toolkit.rules.space import layout_of
from fusewright_triton.kernels.product_ops import LINEAR
from fusewright_triton.select import epilogues
from fusewright_triton.select.calls import Calls

SHORTCUT = "triton.conv.shortcut"
"""The id of the row's other half: a shortcut convolution whose shift is added by the call that adds its result."""


def reason(op: OpView) -> str | None:
    """Return why a convolution stays torch's own call."""
    x, w = spec_of(op.arg("input")), spec_of(op.arg("weight"))
    if x.rank not in CHANNELS_LAST:
        return "neither 2-d nor 3-d"
    if not x.static or 0 in (*x.shape, *spec_of(op.out).shape):
        return "empty or symbolic sizes"
    return "mixed dtypes" if x.dtype != w.dtype else None


def bias_reason(op: OpView) -> str | None:
    """Return why a convolution of any rank and layout keeps its bias."""
    x, bias = spec_of(op.arg("input")), op.arg("bias")
    if bias is None:
        return "no bias"
    if 0 in spec_of(op.out).shape or not isinstance(x.shape[1], int) or not spec_of(bias).static:
        return "empty, or channels of symbolic number"
    if op.arg("groups") == x.shape[1] > 1 and (x.dtype is torch.float32 or layout_of(x) != "channels_last"):
        return "torch's own kernels of depthwise convolutions, in planes, add the bias"
    return None if x.dtype == spec_of(op.arg("weight")).dtype == spec_of(bias).dtype else "mixed dtypes"


def constant(m: Match, c: Calls) -> bool:
    return c.is_const(m.anchor.arg("weight"), m.anchor.arg("bias"))


def planar(op: OpView) -> bool:
    """Return whether a convolution has two spatial dims and is not transposed, as those that kernels and fused calls take."""
    return spec_of(op.arg("input")).rank == 4 and not op.arg("transposed")


def laid(m: Match, c: Calls) -> bool:
    """Return whether a convolution of constants is channels-last. Groups in three dims, or of transposed ones, stay in planes: none
    are known to have kernels, and what is around them in three dims would be copied."""
    op = m.anchor
    if not constant(m, c) or (op.arg("transposed") and op.arg("groups") != 1):
        return False
    return spec_of(op.out).rank == 4 or not any(map(_grouped_volumes, c.graph))


def _grouped_volumes(op: OpView) -> bool:
    return op.op == "conv" and op.arg("groups") != 1 and spec_of(op.arg("input")).rank == 5


def _cuts(m: Match, c: Calls) -> bool:
    return patches(m.anchor)


def in_kernels(op: OpView) -> bool:
    """Return whether loop kernels compute an op, in any layout."""
    return _kind(op) not in (Kind.VIEW, Kind.CONTRACTION) and op.op != "sdpa"


def is_view(op: OpView) -> bool:
    return _kind(op) is Kind.VIEW


def _kind(op: OpView) -> Kind:
    return ops.OPS[op.op].kind if op.op in ops.OPS else Kind.CONTRACTION


def _kernels_read(value: Value, c: Calls) -> bool:
    """Return whether a loop kernel may read a value, or a view of it."""
    users = c.graph.users(value)
    return any(in_kernels(u) or (is_view(u) and any(_kernels_read(v, c) for v in u.outs)) for u in users)


def _copied_behind(value: Value, stride: Sequence[int], c: Calls) -> bool:
    """Return whether a kernel copies a result that leaves the region with other strides."""
    return c.graph.escapes(value) and not same_strides(spec_of(value), stride)


def bias_apart(m: Match, c: Calls) -> bool:
    """Return whether a kernel that reads a result adds the bias."""
    return bias_reason(m.anchor) is None and _kernels_read(m.out, c)


def whole(m: Match, c: Calls) -> bool:
    """Reject groups and what is transposed, which do not make products of all channels."""
    return constant(m, c) and m.anchor.arg("groups") == 1 and not m.anchor.arg("transposed")


def _fusible(m: Match, c: Calls) -> bool:
    """Return whether the library has fused calls for a convolution; those of three dims are not known to have an engine."""
    return whole(m, c) and planar(m.anchor)


def _normed(op: OpView, m: Match, c: Calls) -> bool:
    """Match a batch norm of constants whose statistics nobody reads."""
    if op.arg("input") != m.out or not all(map(c.graph.unused, op.outs[1:])):
        return False
    return c.is_const(*(op.arg(n) for n in ("weight", "bias", "running_mean", "running_var")))


def _added(op: OpView, m: Match, c: Calls) -> bool:
    a, b = op.args[0], op.args[1]
    both = isinstance(a, Value) and isinstance(b, Value) and a != b and op.arg("alpha") == 1
    return both and _alike(a, m.out) and _alike(b, m.out)  # type: ignore[arg-type]


def _alike(a: Value, b: Value) -> bool:
    return (spec_of(a).shape, spec_of(a).dtype) == (spec_of(b).shape, spec_of(b).dtype)


def _with_other(m: Match, c: Calls) -> Match:
    """Bind the other summand, and the shortcut that makes it."""
    before, (a, b) = (m.get("norm") or m.anchor).out, m["add"].args[:2]
    other = b if a == before else a
    return m.with_ops(other=other, shortcut=_shortcut(other, c))


def _shortcut(other: Value, c: Calls) -> Match | None:
    """Return the convolution and batch norm behind the other side of an addition, if they have no other reader."""
    pattern = p("batch_norm", p("conv", capture="conv", alone=True), capture="norm")
    norm = c.graph.producer(other) if c.graph.only_user(other) is not None else None
    found = find(pattern, norm, c.graph, c) if norm is not None and c.ctx.rules.allows(SHORTCUT) else None
    if found is None or not all(map(c.graph.free, found.ops)):
        return None
    conv = Match(found["conv"], (found["conv"],))
    if reason(conv.anchor) is not None or not _fusible(conv, c) or patches(conv.anchor) or not _normed(found.last, conv, c):
        return None
    return conv.with_ops(found.last, norm=found.last, unshifted=True)


def _with_shortcut(m: Match, ops: tuple[OpView, ...], c: Calls) -> tuple[Claim, ...]:
    s = m["shortcut"]
    return () if s is None else (Claim(s.ops, s.last, partial(write, s), _note(s), rules=(SHORTCUT,)),)


def _note(m: Match) -> str:
    return " + ".join(["convolution, channels-last", *(op.op for op in m.ops[1:])])


def write(m: Match, c: Calls) -> None:
    """Emit calls whose last one makes `m.out`, channels-last."""
    op, b = m.anchor, c.b
    stride = channels_last_strides(spec_of(m.out).shape)  # type: ignore[arg-type]
    x = _told(images(op.arg("input"), c), op, c)
    rest = geometry(op)
    library = partial(b.library, out=m.out, stride=stride, op=op)
    if m.get("relu") is None:
        weight = folded(m, c)[0] if m.get("norm") is not None else packed(b.exact(op.arg("weight")), op, c)
        bias = None if m.get("unshifted") else op.arg("bias")
        apart = _kernels_read(m.out, c) or _copied_behind(m.out, stride, c)
        if bias is not None and spec_of(bias).dtype == spec_of(op.arg("weight")).dtype and apart:
            add_bias(op, (x, weight, None, *rest), stride, c)
        else:
            _convolve("aten::convolution.default", (x, weight, c.exact(bias), *rest), b.with_layout(m.out, stride), op, c)
        return
    weight, bias = folded(m, c)
    if m.get("shortcut") is not None:
        bias = b.prepare("aten::add.Tensor", bias, folded(m["shortcut"], c)[1])
    bias = b.prepare("aten::_to_copy.default", bias, dtype=spec_of(op.arg("weight")).dtype)
    other = b.any_strides(m.get("other"))
    if not c.fused:
        _unfused(c, (x, weight, bias, *rest), other, library)
    elif other is None:
        library("aten::cudnn_convolution_relu.default", x, weight, bias, *rest[:3], 1)
    else:
        library("aten::cudnn_convolution_add_relu.default", x, weight, other, 1.0, bias, *rest[:3], 1)


def geometry(op: OpView) -> tuple[Any, ...]:
    """Return the arguments of a convolution behind its bias."""
    return tuple(op.arg(n) for n in ("stride", "padding", "dilation", "transposed", "output_padding", "groups"))


def images(value: Value, c: Calls) -> Ref:
    """Return images channels-last: torch would copy others in front of each call, without fusing or tiling the copy."""
    spec = c.b.spec(value)
    if same_strides(spec, channels_last_strides(spec.shape)):  # type: ignore[arg-type]
        return Ref(c.b.at_hand(value).id)
    return Ref(c.b.channels_last(value).id)


def _told(x: Ref, op: OpView, c: Calls) -> Ref:
    """Return images with strides that tell torch that they are channels-last. Those of one channel are in either layout, and so is
    their weight of single pixels: torch would make planes."""
    spec = c.b.spec(op.arg("input"))
    if math.prod(spec_of(op.arg("weight")).shape[1:]) != 1 or spec.stride[1] == 1:  # type: ignore[arg-type]
        return x
    return c.made("aten::as_strided.default", x, spec.shape, channels_last_strides(spec.shape))  # type: ignore[arg-type]


def alone(m: Match, c: Calls) -> None:
    """Emit torch's own call without its bias, which a kernel adds."""
    op = m.anchor
    add_bias(op, (c.exact(op.arg("input")), c.exact(op.arg("weight")), None, *geometry(op)), None, c)


def add_bias(
    op: OpView, args: tuple[Any, ...], stride: Sequence[int] | None, c: Calls, target: str = "aten::convolution.default"
) -> None:
    """Emit a convolution without bias, and the bias as an op for the fuser."""
    out = spec_of(op.out)
    made = c.ctx.value(out if stride is None else replace(out, stride=tuple(stride)))
    _convolve(target, args, made, op, c)
    bias_behind(op, made, stride, c)


def _convolve(target: str, args: tuple[Any, ...], out: Value, op: OpView, c: Calls) -> None:
    """Emit a convolution. Simulated devices have no channels-last kernels for some volumes in fp32, and copy the result."""
    spec = spec_of(out)
    if c.fused or spec.dtype is not torch.float32 or spec.rank != 5 or layout_of(spec) != "channels_last":
        c.b.call(target, *args, out=out, op=op)
        return
    made = Ref(c.ctx.value(None).id)
    c.b.append(Call(target, args, (made.id,), op_id=op.id))
    c.b.append(Call("aten::clone.default", (made,), (out.id,), (("memory_format", torch.channels_last_3d),)))


def bias_behind(op: OpView, made: Value, stride: Sequence[int] | None, c: Calls) -> None:
    """Emit the bias of a convolution that was made without it."""
    b, bias = c.b, op.arg("bias")
    b.replace(op, made)
    column = b.append_op("view", bias, (*spec_of(bias).shape, *[1] * (spec_of(op.out).rank - 2)))
    b.append_op("add", made, column, out=b.with_layout(op.out, stride))


def backward_reason(op: OpView) -> str | None:
    """Return why the gradient of a bias stays in torch's call of the other two."""
    grad, (image, weight, bias) = spec_of(op.arg("grad_output")), op.arg("output_mask")
    if not bias or not (image or weight):
        return "no gradient of a bias beside others"
    return "empty" if 0 in grad.shape else None


def _bias_gradient_apart(m: Match, c: Calls) -> None:
    """Emit the gradients of image and weight, and that of the bias as a sum for the fuser."""
    op, b = m.anchor, c.b
    given = [b.exact(a) if isinstance(a, Value) and a.spec is not None else a for a in op.args]
    given[op.argnames.index("output_mask")] = (*op.arg("output_mask")[:2], False)
    made = (*op.outs[:2], c.ctx.value(None))
    b.call(op.target, *given, out=made[0], more=made[1:], op=op)
    b.replace(op, *made)
    rank = spec_of(op.arg("grad_output")).rank
    b.append_op("sum", _before_zeros(op.arg("grad_output"), c), (0, *range(2, rank)), out=op.outs[2])


def _before_zeros(grad: Value, c: Calls) -> Value:
    """Return what a sum over images needs of a gradient: no zeros for what was cut off behind a causal convolution, which often lie
    across the memory of the rest."""
    channels = (1, 1 - spec_of(grad).rank)
    while (made := c.graph.producer(grad)) is not None and made.op == "slice_backward" and made.arg("dim") not in channels:
        grad = made.arg("grad_output")
    return grad


def padded(x: Value, pads: Sequence[int], c: Calls) -> Ref:
    """Return images, channels-last, with zeros around them, those of the last dim first, and behind their channels."""
    if not any(pads):
        return images(x, c)
    n, *sizes = c.b.spec(x).shape
    both = [before + behind for before, behind in zip(pads[::2], pads[1::2], strict=True)]
    shape = (n, *(size + more for size, more in zip(sizes, reversed(both), strict=True)))  # type: ignore[operator]
    made = c.ctx.value(replace(c.b.spec(x), shape=shape, stride=channels_last_strides(shape)))  # type: ignore[arg-type]
    return Ref(c.b.read_instead(x, c.b.append_op("constant_pad_nd", x, tuple(pads), 0, out=made)).id)


def _unfused(c: Calls, args: tuple[Any, ...], other: Ref | None, library: Callable[..., None]) -> None:
    """Emit the same as plain ops, for simulated devices."""
    made = c.ctx.value(None)
    c.b.call("aten::convolution.default", *args, out=made)
    if other is not None:
        summed = c.ctx.value(None)
        c.b.call("aten::add.Tensor", Ref(made.id), other, out=summed)
        made = summed
    library("aten::relu.default", Ref(made.id))


def packed(weight: Ref, op: OpView, c: Calls) -> Ref:
    return c.b.prepare("aten::clone.default", weight, memory_format=CHANNELS_LAST[spec_of(op.arg("weight")).rank])


def folded(m: Match, c: Calls) -> tuple[Ref, Ref]:
    """Return weight (channels-last) and shift (fp32), with the batch norm's scale and shift multiplied in, in fp32."""
    prepare, bias, norm = c.b.prepare, m.anchor.arg("bias"), m.get("norm")
    weight = c.b.exact(m.anchor.arg("weight"))

    def wide(value: Value) -> Ref:
        return prepare("aten::_to_copy.default", c.b.exact(value), dtype=torch.float32)

    if norm is None:
        return packed(weight, m.anchor, c), wide(bias) if bias is not None else _zeros(m, c)
    scale = prepare("aten::rsqrt.default", prepare("aten::add.Scalar", wide(norm.arg("running_var")), norm.arg("eps")))
    if norm.arg("weight") is not None:
        scale = prepare("aten::mul.Tensor", scale, wide(norm.arg("weight")))
    shift = prepare("aten::neg.default", wide(norm.arg("running_mean")))
    if bias is not None:
        shift = prepare("aten::add.Tensor", shift, wide(bias))
    shift = prepare("aten::mul.Tensor", shift, scale)
    if norm.arg("bias") is not None:
        shift = prepare("aten::add.Tensor", shift, wide(norm.arg("bias")))
    column = prepare("aten::view.default", scale, (-1, *(1,) * (spec_of(m.anchor.arg("weight")).rank - 1)))
    scaled = prepare("aten::mul.Tensor", wide(m.anchor.arg("weight")), column)
    scaled = prepare("aten::_to_copy.default", scaled, dtype=spec_of(m.anchor.arg("weight")).dtype)
    return packed(scaled, m.anchor, c), shift


def _zeros(m: Match, c: Calls) -> Ref:
    """Return a zero shift on the weight's device."""
    return c.b.prepare(
        "aten::new_zeros.default", c.b.exact(m.anchor.arg("weight")), (spec_of(m.out).shape[1],), dtype=torch.float32
    )


def patches(op: OpView) -> bool:
    """Return whether every input element is in exactly one window: then windows are rows of a matrix."""
    x, w = spec_of(op.arg("input")), spec_of(op.arg("weight"))
    kernel = tuple(w.shape[2:])
    fits = all(n % k == 0 for n, k in zip(x.shape[2:], kernel, strict=True))  # type: ignore[operator]
    still = tuple(op.arg("stride")) == kernel and not any(op.arg("padding")) and set(op.arg("dilation")) == {1}
    pixels = math.prod(kernel)  # type: ignore[arg-type]
    apart = op.arg("groups") == 1 and not op.arg("transposed") and pixels > 1 and w.shape[1] * pixels % 8 == 0  # type: ignore[operator]
    return fits and still and apart and x.dtype is not torch.float32


def _windows(op: OpView, split: Sequence[Any], order: Sequence[int], c: Calls) -> Value:
    """Return the input of a convolution as a view split into its windows, for a kernel to read."""
    x = c.b.spec(op.arg("input"))
    batch, channel, *steps = x.stride
    strides = (batch, channel, *(s for step, size in zip(steps, split[3::2], strict=True) for s in (step * size, step)))
    apart = c.ctx.value(replace(x, shape=tuple(split), stride=strides))
    ordered = c.ctx.value(replace(x, shape=tuple(split[i] for i in order), stride=tuple(strides[i] for i in order)))
    c.b.append_op("view", c.b.resolved(op).arg("input"), tuple(split), out=apart)
    return c.b.append_op("permute", apart, tuple(order), out=ordered)


def _rows(op: OpView, c: Calls) -> tuple[Ref, bool]:
    """Emit windows as rows of a matrix, and return whether they hold the channels of a pixel together, as memory does."""
    b, x, w = c.b, c.b.spec(op.arg("input")), spec_of(op.arg("weight"))
    n, channels, *sizes = x.shape
    pairs = zip(sizes, w.shape[2:], strict=True)
    split = (n, channels, *(s for size, window in pairs for s in (size // window, window)))  # type: ignore[operator]
    outer, inner, last = range(2, len(split), 2), range(3, len(split), 2), x.stride[1] == 1
    order = (0, *outer, *inner, 1) if last else (0, *outer, 1, *inner)
    windows = b.row_major(_windows(op, split, order, c))
    return c.made("aten::view.default", Ref(windows.id), (-1, math.prod(w.shape[1:]))), last  # type: ignore[arg-type]


def _product(m: Match, c: Calls) -> None:
    """Emit windows as rows, times the weight as a matrix; the result is channels-last."""
    op, b = m.anchor, c.b
    n, outs, *sizes = spec_of(op.out).shape
    rows, last = _rows(op, c)
    make = b.prepare if c.is_const(op.arg("weight")) else c.made
    weight = b.exact(op.arg("weight"))
    if last:
        weight = make("aten::permute.default", weight, _channels_behind(len(sizes)))
    matrix = make("aten::reshape.default", weight, (outs, -1))
    product = c.made("aten::linear.default", rows, matrix, c.exact(op.arg("bias")))
    image = c.made("aten::view.default", product, (n, *sizes, outs))
    stride = channels_last_strides(spec_of(op.out).shape)  # type: ignore[arg-type]
    b.library("aten::permute.default", image, _channels_second(len(sizes)), out=op.out, stride=stride, op=op)


def _channels_behind(spatial: int) -> tuple[int, ...]:
    """Return the order of dims that moves channels behind the spatial ones."""
    return (0, *range(2, spatial + 2), 1)


def _channels_second(spatial: int) -> tuple[int, ...]:
    """Return the order of dims that moves channels back."""
    return (0, spatial + 1, *range(1, spatial + 1))


def patches_backward_reason(op: OpView) -> str | None:
    """Return why the gradient of a weight is no product of windows and gradients."""
    grad, x, (image, weight, _) = spec_of(op.arg("grad_output")), spec_of(op.arg("input")), op.arg("output_mask")
    if image or not weight:
        return "the image's gradient too, or not the weight's"
    if x.rank not in CHANNELS_LAST or not x.static or 0 in (*x.shape, *grad.shape):
        return "neither 2-d nor 3-d, empty or symbolic"
    if len({grad.dtype, x.dtype, spec_of(op.arg("weight")).dtype}) > 1:
        return "mixed dtypes"
    return None if patches(op) else "windows that overlap or leave something out"


def _weight_gradient(m: Match, c: Calls) -> None:
    """Emit the gradient of a weight as a product of gradients and windows, and that of the bias as a sum for the fuser."""
    op, b = m.anchor, c.b
    shape: tuple[Any, ...] = tuple(spec_of(op.arg("weight")).shape)
    outs, channels, *window = shape
    dims = tuple(range(2, len(shape)))
    grads = c.made("aten::permute.default", images(op.arg("grad_output"), c), (1, 0, *dims))
    grads = c.made("aten::reshape.default", grads, (outs, -1))
    rows, last = _rows(op, c)
    made = c.made("aten::mm.default", grads, rows)
    if last:
        made = c.made("aten::view.default", made, (outs, *window, channels))
        order, stride = _channels_second(len(window)), channels_last_strides(shape)
        b.library("aten::permute.default", made, order, out=op.outs[1], stride=stride, op=op)
    else:
        b.library("aten::view.default", made, shape, out=op.outs[1], stride=contiguous_strides(shape), op=op)
    if op.arg("output_mask")[2]:
        image, weight, _ = b.resolved(op).outs
        b.replace(op, image, weight, c.ctx.value(None))
        b.append_op("sum", op.arg("grad_output"), (0, *dims), out=op.outs[2])


def _as_linear(op: OpView, c: Calls) -> OpView:
    """Return a convolution of single pixels, channels-last, as the linear of the same numbers."""
    x, w, out = (spec_of(v) for v in (op.arg("input"), op.arg("weight"), op.out))

    def rows(s: TensorSpec) -> Value:
        shape = tuple(s.shape[i] for i in _channels_behind(s.rank - 2))
        return c.ctx.value(replace(s, shape=shape, stride=contiguous_strides(shape)))  # type: ignore[arg-type]

    matrix = c.ctx.value(replace(w, shape=w.shape[:2], stride=(w.shape[1], 1)))
    given = rows(x), matrix, op.arg("bias")
    return OpView(op.id, "linear", "aten::linear.default", ("input", "weight", "bias"), given, (rows(out),))


def _activated(m: Match, c: Calls) -> Match | None:
    """Match a convolution of single pixels whose activation no later loop kernel would fuse; bind its linear."""
    op = m.anchor
    single = {*spec_of(op.arg("weight")).shape[2:], *op.arg("stride")} == {1} and not any(op.arg("padding"))
    same = spec_of(m.out).dtype == spec_of(op.out).dtype
    named = epilogues.activation_of(m.last) is not None and epilogues.stored(m.out, c)
    if not (single and same and named and whole(m, c) and laid(m, c)):
        return None
    linear = _as_linear(op, c)
    return m.with_ops(linear=linear) if epilogues.suits(linear, c) else None


def _activation_pays(m: Match, c: Calls) -> bool:
    return epilogues.faster(m["linear"], epilogues.Epilogue(epilogues.activation_of(m.last) or ""), c)


def _product_with_activation(m: Match, c: Calls) -> None:
    """Emit pixels as rows of a product with an epilogue."""
    op, b = m.anchor, c.b
    weight, bias = folded(m, c)
    matrix = b.prepare("aten::reshape.default", weight, tuple(spec_of(op.arg("weight")).shape[:2]))
    bias = b.prepare("aten::_to_copy.default", bias, dtype=spec_of(op.arg("weight")).dtype)
    rows, made, spatial = c.ctx.value(None), c.ctx.value(None), spec_of(m.out).rank - 2
    b.call("aten::permute.default", images(op.arg("input"), c), _channels_behind(spatial), out=rows)
    b.call(LINEAR, Ref(rows.id), matrix, bias, epilogues.activation_of(m.last), c.ctx.device.arch, None, out=made)
    stride = channels_last_strides(spec_of(m.out).shape)  # type: ignore[arg-type]
    b.library("aten::permute.default", Ref(made.id), _channels_second(spatial), out=m.out, stride=stride, op=op)


NORM = maybe("batch_norm", _normed, "norm", rule="triton.conv.batch_norm")

BIAS = Row("triton.conv.bias", chain("conv"), when=bias_apart, write=alone, note="convolution, bias in a kernel")
"""Of any layout and dtype."""

PATCHES_BACKWARD = Row(
    "triton.conv_backward.patches", chain("conv_backward"), write=_weight_gradient, note="gradient of patches as a product"
)

BACKWARD = Row(
    "triton.conv_backward.bias", chain("conv_backward"), when=lambda m, c: backward_reason(m.anchor) is None,
    write=_bias_gradient_apart, note="bias's gradient in a kernel",
)  # fmt: skip

ROWS = (
    Row("triton.conv.patches", chain("conv"), when=_cuts, write=_product, note="convolution of patches as a product"),
    Row(
        "triton.conv.residual", chain("conv", NORM, one("add", _added, "add"), one("relu", capture="relu")),
        when=_fusible, extend=_with_other, also=_with_shortcut, write=write, note=_note,
    ),
    Row(
        "triton.conv.activation", chain("conv", NORM, one(epilogues.ACTIVATIONS - {"relu"})),
        extend=_activated, pays=_activation_pays, write=_product_with_activation,
        note=lambda m: f"convolution as a product with {m.last.op}",
    ),
    Row("triton.conv.relu", chain("conv", NORM, one("relu", capture="relu")), when=_fusible, write=write, note=_note),
    Row("triton.conv.alone", chain("conv"), when=laid, write=write, note=_note),
    BIAS,
)  # fmt: skip
"""Rows of convolutions, in matching order: those that `cudnn_convolution_relu` and its like take come first."""
