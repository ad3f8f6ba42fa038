"""Convolutions of inference: channels-last, with batch norm folded into the weight, fused with an addition and a relu.

A batch norm that no relu follows stays a loop kernel, which fuses more. A shortcut (convolution and batch norm
whose only reader is the addition) gives its shift to the other branch, so that no pass over the image adds it.
Convolutions of patches, whose stride equals their kernel size, become products. Torch adds a bias in a pass of its own behind the
library's call, so kernels that read the result add it instead, in training too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fusewright import ops
from fusewright.interface import OpView, TensorSpec, Value
from fusewright.ops.core import Kind
from fusewright.plan.ir import Ref
from fusewright.toolkit.region.builder import channels_last_strides, contiguous_strides, same_strides
from fusewright.toolkit.region.graph import Claim, spec_of
from fusewright.toolkit.region.pattern import Match, chain, find, maybe, one, p
from fusewright.toolkit.region.rewrite import Row
from fusewright.toolkit.rules.space import layout_of
from fusewright_triton.kernels.product_ops import LINEAR
from fusewright_triton.select import epilogues
from fusewright_triton.select.calls import Calls

ALIGNED, LARGE = 8, 1 << 21
"""Channels that libraries read at once, and elements from which on the copies that they make of other images take long."""

SHORTCUT = "triton.conv.shortcut"
"""The id of the row's other half: a shortcut convolution whose shift is added by the call that adds its result."""


def reason(op: OpView) -> str | None:
    """Return why a convolution stays torch's own call."""
    x, w = spec_of(op.arg("input")), spec_of(op.arg("weight"))
    if x.rank != 4 or op.arg("transposed"):
        return "only 2-d convolutions that are not transposed"
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


def _cuts(m: Match, c: Calls) -> bool:
    return _patches(m.anchor)


def _kernels_read(value: Value, c: Calls) -> bool:
    """Return whether a loop kernel may read a value, or a view of it."""
    for user in c.graph.users(value):
        kind = ops.OPS[user.op].kind if user.op in ops.OPS else Kind.CONTRACTION
        if kind is Kind.VIEW and any(_kernels_read(v, c) for v in user.outs):
            return True
        if kind not in (Kind.VIEW, Kind.CONTRACTION) and user.op != "sdpa":
            return True
    return False


def _bias_apart(m: Match, c: Calls) -> bool:
    return bias_reason(m.anchor) is None and _kernels_read(m.out, c)


def _whole(m: Match, c: Calls) -> bool:
    """Reject groups, which the library's fused calls do not take."""
    return constant(m, c) and m.anchor.arg("groups") == 1


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
    if reason(conv.anchor) is not None or not _whole(conv, c) or _patches(conv.anchor) or not _normed(found.last, conv, c):
        return None
    return conv.with_ops(found.last, norm=found.last, unshifted=True)


def _with_shortcut(m: Match, ops: tuple[OpView, ...], c: Calls) -> tuple[Claim, ...]:
    s = m["shortcut"]
    return () if s is None else (Claim(s.ops, s.last, partial(_write, s), _note(s), rules=(SHORTCUT,)),)


def _note(m: Match) -> str:
    return " + ".join(["convolution, channels-last", *(op.op for op in m.ops[1:])])


def _write(m: Match, c: Calls) -> None:
    """Emit calls whose last one makes `m.out`, channels-last."""
    op, b = m.anchor, c.b
    stride = channels_last_strides(spec_of(m.out).shape)  # type: ignore[arg-type]
    x = images(op.arg("input"), c)
    geometry = tuple(op.arg(n) for n in ("stride", "padding", "dilation"))
    groups = op.arg("groups")
    library = partial(b.library, out=m.out, stride=stride, op=op)
    if m.get("relu") is None:
        weight = folded(m, c)[0] if m.get("norm") is not None else _packed(b.exact(op.arg("weight")), c)
        bias = None if m.get("unshifted") else op.arg("bias")
        if bias is not None and spec_of(bias).dtype == spec_of(op.arg("weight")).dtype and _kernels_read(m.out, c):
            add_bias(op, (x, weight, None, *geometry, False, (0, 0), groups), stride, c)
        else:
            library("aten::convolution.default", x, weight, c.exact(bias), *geometry, False, (0, 0), groups)
        return
    weight, bias = folded(m, c)
    if m.get("shortcut") is not None:
        bias = b.prepare("aten::add.Tensor", bias, folded(m["shortcut"], c)[1])
    bias = b.prepare("aten::_to_copy.default", bias, dtype=spec_of(op.arg("weight")).dtype)
    other = b.any_strides(m.get("other"))
    if not c.fused:
        _unfused(c, (x, weight, bias, *geometry, False, (0, 0), groups), other, library)
    elif other is None:
        library("aten::cudnn_convolution_relu.default", x, weight, bias, *geometry, groups)
    else:
        library("aten::cudnn_convolution_add_relu.default", x, weight, other, 1.0, bias, *geometry, groups)


def images(value: Value, c: Calls) -> Ref:
    """Return images channels-last: torch would copy others in front of each call, without fusing or tiling the copy."""
    spec = c.b.spec(value)
    if same_strides(spec, channels_last_strides(spec.shape)):  # type: ignore[arg-type]
        return Ref(c.b.at_hand(value).id)
    return Ref(c.b.channels_last(value).id)


def _alone(m: Match, c: Calls) -> None:
    """Emit torch's own call without its bias, which a kernel adds."""
    op = m.anchor
    rest = (op.arg(n) for n in ("stride", "padding", "dilation", "transposed", "output_padding", "groups"))
    add_bias(op, (c.exact(op.arg("input")), c.exact(op.arg("weight")), None, *rest), None, c)


def add_bias(
    op: OpView, args: tuple[Any, ...], stride: Sequence[int] | None, c: Calls, target: str = "aten::convolution.default"
) -> None:
    """Emit a convolution without bias, and the bias as an op for the fuser."""
    b, out = c.b, spec_of(op.out)
    made = c.ctx.value(out if stride is None else replace(out, stride=tuple(stride)))
    b.call(target, *args, out=made, op=op)
    _bias_behind(op, made, stride, c)


def _bias_behind(op: OpView, made: Value, stride: Sequence[int] | None, c: Calls) -> None:
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
    b.append_op("sum", op.arg("grad_output"), (0, *range(2, rank)), out=op.outs[2])


def _unaligned(m: Match, c: Calls) -> bool:
    op = m.anchor
    outs, channels = spec_of(op.arg("weight")).shape[:2]
    large = spec_of(op.arg("input")).numel_hint() + spec_of(op.out).numel_hint() >= LARGE
    odd = channels % ALIGNED != 0 or outs % ALIGNED != 0  # type: ignore[operator]
    return odd and large and c.graph.phase == "infer" and _whole(m, c) and (not c.fused or c.target.fitted is not None)


def _with_more_channels(m: Match, c: Calls) -> None:
    """Emit a convolution of images and results with channels of zeros behind their own, which kernels write and leave out."""
    op, b = m.anchor, c.b
    outs, channels = spec_of(op.arg("weight")).shape[:2]
    behind, more = -channels % ALIGNED, -outs % ALIGNED  # type: ignore[operator]
    weight = b.prepare("aten::constant_pad_nd.default", b.exact(op.arg("weight")), (0, 0, 0, 0, 0, behind, 0, more))
    geometry = tuple(op.arg(n) for n in ("stride", "padding", "dilation"))
    made, out = c.ctx.value(None), spec_of(op.out)
    b.call(
        "aten::convolution.default", padded(op.arg("input"), (0, 0, 0, 0, 0, behind), c), _packed(weight, c), None, *geometry,
        False, (0, 0), 1, out=made,
    )  # fmt: skip
    n, _, height, width = out.shape
    stride = channels_last_strides((n, outs + more, height, width))  # type: ignore[arg-type, operator]
    if op.arg("bias") is None:
        b.library("aten::slice.Tensor", Ref(made.id), 1, 0, outs, out=op.out, stride=stride, op=op)
    else:
        kept = c.ctx.value(replace(out, stride=stride))
        b.call("aten::slice.Tensor", Ref(made.id), 1, 0, outs, out=kept, op=op)
        _bias_behind(op, kept, channels_last_strides(out.shape), c)  # type: ignore[arg-type]


def padded(x: Value, pads: Sequence[int], c: Calls) -> Ref:
    """Return images, channels-last, with zeros around them and behind their channels."""
    if not any(pads):
        return images(x, c)
    n, channels, height, width = c.b.spec(x).shape
    left, right, above, below, _, behind = pads
    shape = (n, channels + behind, height + above + below, width + left + right)  # type: ignore[operator]
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


def _packed(weight: Ref, c: Calls) -> Ref:
    return c.b.prepare("aten::clone.default", weight, memory_format=torch.channels_last)


def folded(m: Match, c: Calls) -> tuple[Ref, Ref]:
    """Return weight (channels-last) and shift (fp32), with the batch norm's scale and shift multiplied in, in fp32."""
    prepare, bias, norm = c.b.prepare, m.anchor.arg("bias"), m.get("norm")
    weight = c.b.exact(m.anchor.arg("weight"))

    def wide(value: Value) -> Ref:
        return prepare("aten::_to_copy.default", c.b.exact(value), dtype=torch.float32)

    if norm is None:
        return _packed(weight, c), wide(bias) if bias is not None else _zeros(m, c)
    scale = prepare("aten::rsqrt.default", prepare("aten::add.Scalar", wide(norm.arg("running_var")), norm.arg("eps")))
    if norm.arg("weight") is not None:
        scale = prepare("aten::mul.Tensor", scale, wide(norm.arg("weight")))
    shift = prepare("aten::neg.default", wide(norm.arg("running_mean")))
    if bias is not None:
        shift = prepare("aten::add.Tensor", shift, wide(bias))
    shift = prepare("aten::mul.Tensor", shift, scale)
    if norm.arg("bias") is not None:
        shift = prepare("aten::add.Tensor", shift, wide(norm.arg("bias")))
    column = prepare("aten::view.default", scale, (-1, 1, 1, 1))
    scaled = prepare("aten::mul.Tensor", wide(m.anchor.arg("weight")), column)
    return _packed(prepare("aten::_to_copy.default", scaled, dtype=spec_of(m.anchor.arg("weight")).dtype), c), shift


def _zeros(m: Match, c: Calls) -> Ref:
    """Return a zero shift on the weight's device."""
    return c.b.prepare(
        "aten::new_zeros.default", c.b.exact(m.anchor.arg("weight")), (spec_of(m.out).shape[1],), dtype=torch.float32
    )


def _patches(op: OpView) -> bool:
    """Return whether every input element is in exactly one window: then windows are rows of a matrix."""
    x, w = spec_of(op.arg("input")), spec_of(op.arg("weight"))
    kernel = tuple(w.shape[2:])
    fits = all(n % k == 0 for n, k in zip(x.shape[2:], kernel, strict=True))  # type: ignore[operator]
    still = tuple(op.arg("stride")) == kernel and not any(op.arg("padding")) and set(op.arg("dilation")) == {1}
    rows = w.shape[1] * kernel[0] * kernel[1]  # type: ignore[operator]
    whole = op.arg("groups") == 1 and kernel != (1, 1) and rows % 8 == 0
    return fits and still and whole and x.dtype is not torch.float32


def _windows(op: OpView, split: Sequence[Any], order: Sequence[int], c: Calls) -> Value:
    """Return the input of a convolution as a view split into its windows, for a kernel to read."""
    x = c.b.spec(op.arg("input"))
    (batch, channel, row, column), kh, kw = x.stride, split[3], split[5]
    strides = (batch, channel, row * kh, row, column * kw, column)
    apart = c.ctx.value(replace(x, shape=tuple(split), stride=strides))
    ordered = c.ctx.value(replace(x, shape=tuple(split[i] for i in order), stride=tuple(strides[i] for i in order)))
    c.b.append_op("view", c.b.resolved(op).arg("input"), tuple(split), out=apart)
    return c.b.append_op("permute", apart, tuple(order), out=ordered)


def _rows(op: OpView, c: Calls) -> tuple[Ref, Sequence[int]]:
    """Emit windows as rows of a matrix, and return in which order they hold channels (1), rows (3) and columns (5)."""
    b, x, w = c.b, c.b.spec(op.arg("input")), spec_of(op.arg("weight"))
    n, channels, height, width = x.shape
    kh, kw = w.shape[2:]
    inner = (3, 5, 1) if x.stride[1] == 1 else (1, 3, 5)  # in which memory lies
    split = (n, channels, height // kh, kh, width // kw, kw)  # type: ignore[operator]
    windows = b.row_major(_windows(op, split, (0, 2, 4, *inner), c))
    return c.made("aten::view.default", Ref(windows.id), (-1, channels * kh * kw)), inner  # type: ignore[operator]


def _product(m: Match, c: Calls) -> None:
    """Emit windows as rows, times the weight as a matrix; the result is channels-last."""
    op, b = m.anchor, c.b
    n, outs, h, v = spec_of(op.out).shape
    rows, inner = _rows(op, c)
    make = b.prepare if c.is_const(op.arg("weight")) else c.made
    weight = b.exact(op.arg("weight"))
    if inner != (1, 3, 5):
        weight = make("aten::permute.default", weight, (0, 2, 3, 1))
    matrix = make("aten::reshape.default", weight, (outs, -1))
    product = c.made("aten::linear.default", rows, matrix, c.exact(op.arg("bias")))
    image = c.made("aten::view.default", product, (n, h, v, outs))
    stride = channels_last_strides(spec_of(op.out).shape)  # type: ignore[arg-type]
    b.library("aten::permute.default", image, (0, 3, 1, 2), out=op.out, stride=stride, op=op)


def patches_backward_reason(op: OpView) -> str | None:
    """Return why the gradient of a weight is no product of windows and gradients."""
    grad, x, (image, weight, _) = spec_of(op.arg("grad_output")), spec_of(op.arg("input")), op.arg("output_mask")
    if image or not weight:
        return "the image's gradient too, or not the weight's"
    if x.rank != 4 or op.arg("transposed") or not x.static or 0 in (*x.shape, *grad.shape):
        return "not 2-d, transposed, empty or symbolic"
    if len({grad.dtype, x.dtype, spec_of(op.arg("weight")).dtype}) > 1:
        return "mixed dtypes"
    return None if _patches(op) else "windows that overlap or leave something out"


def _weight_gradient(m: Match, c: Calls) -> None:
    """Emit the gradient of a weight as a product of gradients and windows, and that of the bias as a sum for the fuser."""
    op, b = m.anchor, c.b
    outs, channels, kh, kw = spec_of(op.arg("weight")).shape
    grads = c.made("aten::permute.default", images(op.arg("grad_output"), c), (1, 0, 2, 3))
    grads = c.made("aten::reshape.default", grads, (outs, -1))
    rows, inner = _rows(op, c)
    made = c.made("aten::mm.default", grads, rows)
    shape: tuple[Any, ...] = (outs, channels, kh, kw)
    if inner == (1, 3, 5):
        b.library("aten::view.default", made, shape, out=op.outs[1], stride=contiguous_strides(shape), op=op)
    else:
        last = c.made("aten::view.default", made, (outs, kh, kw, channels))
        b.library("aten::permute.default", last, (0, 3, 1, 2), out=op.outs[1], stride=channels_last_strides(shape), op=op)
    if op.arg("output_mask")[2]:
        image, weight, _ = b.resolved(op).outs
        b.replace(op, image, weight, c.ctx.value(None))
        b.append_op("sum", op.arg("grad_output"), (0, 2, 3), out=op.outs[2])


def _as_linear(op: OpView, c: Calls) -> OpView:
    """Return a convolution of single pixels, channels-last, as the linear of the same numbers."""
    x, w, out = (spec_of(v) for v in (op.arg("input"), op.arg("weight"), op.out))

    def rows(s: TensorSpec) -> Value:
        shape = tuple(s.shape[i] for i in (0, 2, 3, 1))
        return c.ctx.value(replace(s, shape=shape, stride=contiguous_strides(shape)))  # type: ignore[arg-type]

    matrix = c.ctx.value(replace(w, shape=w.shape[:2], stride=(w.shape[1], 1)))
    given = rows(x), matrix, op.arg("bias")
    return OpView(op.id, "linear", "aten::linear.default", ("input", "weight", "bias"), given, (rows(out),))


def _activated(m: Match, c: Calls) -> Match | None:
    """Match a convolution of single pixels whose activation no later loop kernel would fuse; bind its linear."""
    op = m.anchor
    single = tuple(spec_of(op.arg("weight")).shape[2:]) == (1, 1) == tuple(op.arg("stride")) and not any(op.arg("padding"))
    same = spec_of(m.out).dtype == spec_of(op.out).dtype
    named = epilogues.activation_of(m.last) is not None and epilogues.stored(m.out, c)
    if not (single and same and named and _whole(m, c)):
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
    rows, made = c.ctx.value(None), c.ctx.value(None)
    b.call("aten::permute.default", images(op.arg("input"), c), (0, 2, 3, 1), out=rows)
    b.call(LINEAR, Ref(rows.id), matrix, bias, epilogues.activation_of(m.last), c.ctx.device.arch, None, out=made)
    stride = channels_last_strides(spec_of(m.out).shape)  # type: ignore[arg-type]
    b.library("aten::permute.default", Ref(made.id), (0, 3, 1, 2), out=m.out, stride=stride, op=op)


NORM = maybe("batch_norm", _normed, "norm", rule="triton.conv.batch_norm")

BIAS = Row("triton.conv.bias", chain("conv"), when=_bias_apart, write=_alone, note="convolution, bias in a kernel")
"""Of any layout and dtype."""

PATCHES_BACKWARD = Row(
    "triton.conv_backward.patches", chain("conv_backward"), write=_weight_gradient, note="gradient of patches as a product"
)

BACKWARD = Row("triton.conv_backward.bias", chain("conv_backward"), write=_bias_gradient_apart, note="bias's gradient in a kernel")

ROWS = (
    Row("triton.conv.patches", chain("conv"), when=_cuts, write=_product, note="convolution of patches as a product"),
    Row(
        "triton.conv.more_channels", chain("conv"), when=_unaligned, write=_with_more_channels,
        note="convolution, channels-last, with channels of zeros",
    ),
    Row(
        "triton.conv.residual", chain("conv", NORM, one("add", _added, "add"), one("relu", capture="relu")),
        when=_whole, extend=_with_other, also=_with_shortcut, write=_write, note=_note,
    ),
    Row(
        "triton.conv.activation", chain("conv", NORM, one(epilogues.ACTIVATIONS - {"relu"})),
        extend=_activated, pays=_activation_pays, write=_product_with_activation,
        note=lambda m: f"convolution as a product with {m.last.op}",
    ),
    Row("triton.conv.relu", chain("conv", NORM, one("relu", capture="relu")), when=_whole, write=_write, note=_note),
    Row("triton.conv.alone", chain("conv"), when=constant, write=_write, note=_note),
    BIAS,
)  # fmt: skip
"""Rows of convolutions, in matching order: those that `cudnn_convolution_relu` and its like take come first."""
