"""Convolutions of inference: channels-last, with batch norm folded into the weight, an addition and a relu taken in.

A batch norm without a relu behind it stays a loop kernel, which takes in more. A shortcut (convolution and batch norm
whose only reader is the addition) gives its shift to the other branch, so that no pass over the image adds it.
Convolutions of patches, whose stride is their size, are products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from fusewright.interface import OpView, Value
from fusewright.plan.ir import Ref
from fusewright.toolkit.region.builder import channels_last_strides
from fusewright_triton.select.calls import Calls, Found, spec_of


@dataclass
class Match:
    """A convolution and what its call takes in: batch norm, addition of `other`, relu. `ops` are all, in order.

    `shortcut` is the convolution behind `other` whose shift this call adds; `shifted` is False for that one."""

    conv: OpView
    ops: list[OpView] = field(default_factory=list)
    norm: OpView | None = None
    other: Value | None = None
    relu: bool = False
    shortcut: Match | None = None
    shifted: bool = True

    @property
    def out(self) -> Value:
        return self.ops[-1].out


def reason(op: OpView) -> str | None:
    """Why a convolution stays torch's own call."""
    x, w = spec_of(op.arg("input")), spec_of(op.arg("weight"))
    if x.rank != 4 or op.arg("transposed"):
        return "only 2-d convolutions that are not transposed"
    if not x.static or 0 in (*x.shape, *spec_of(op.out).shape):
        return "empty or symbolic sizes"
    return "mixed dtypes" if x.dtype != w.dtype else None


def lower(op: OpView, c: Calls) -> Found | None:
    """One convolution, by `cudnn_convolution_relu` and its like where they take all of it."""
    if not c.is_const(op.arg("weight"), op.arg("bias")):
        return None
    if _patches(op):
        return Found((op,), op, partial(_product, op), "convolution of patches as a product")
    m = _match(op, c)
    if m.other is not None:
        m.shortcut = _shortcut(m, c)
    return _call(m)


def _call(m: Match) -> Found:
    ops = tuple(m.ops)
    note = " + ".join(["convolution, channels-last", *(p.op for p in ops[1:])])
    return Found(ops, m.ops[-1], partial(_write, m), note, (_call(m.shortcut),) if m.shortcut is not None else ())


def _match(op: OpView, c: Calls) -> Match:
    """The convolution with its neighbours when a relu ends them, else alone."""
    alone, m = Match(op, [op]), Match(op, [op])
    if op.arg("groups") != 1:
        return alone
    then = c.only_user(op.out)
    if then is not None and _is_norm(then, op.out, c):
        m.norm = then
        m.ops.append(then)
        then = c.only_user(then.out)
    if then is not None and _adds(then, m.out):
        a, b = then.args[0], then.args[1]
        m.other = b if a == m.out else a  # type: ignore[assignment]
        m.ops.append(then)
        then = c.only_user(then.out)
    if then is None or then.op != "relu":
        return alone
    m.relu = True
    m.ops.append(then)
    return m


def _is_norm(op: OpView, value: Value, c: Calls) -> bool:
    if op.op != "batch_norm" or op.arg("input") != value or not all(map(c.b.links.unused, op.outs[1:])):
        return False
    return c.is_const(*(op.arg(n) for n in ("weight", "bias", "running_mean", "running_var")))


def _adds(op: OpView, value: Value) -> bool:
    if op.op != "add" or op.arg("alpha") != 1:
        return False
    a, b = op.args[0], op.args[1]
    return isinstance(a, Value) and isinstance(b, Value) and a != b and _alike(a, value) and _alike(b, value)


def _alike(a: Value, b: Value) -> bool:
    return (spec_of(a).shape, spec_of(a).dtype) == (spec_of(b).shape, spec_of(b).dtype)


def _shortcut(m: Match, c: Calls) -> Match | None:
    """The convolution and batch norm behind the other side of an addition, if nobody else reads it."""
    assert m.other is not None
    norm = c.producer(m.other)
    if norm is None or norm.op != "batch_norm" or not c.free(norm) or c.b.links.only_user(m.other) is None:
        return None
    conv = c.producer(norm.arg("input"))
    if conv is None or conv.op != "conv" or not c.free(conv):
        return None
    if reason(conv) is not None or conv.arg("groups") != 1 or _patches(conv):
        return None
    if not _is_norm(norm, conv.out, c) or c.b.links.only_user(conv.out) is not norm:
        return None
    if not c.is_const(conv.arg("weight"), conv.arg("bias")):
        return None
    return Match(conv, [conv, norm], norm, shifted=False)


def _write(m: Match, c: Calls) -> None:
    """Calls whose last one makes `m.out`, channels-last."""
    op, b = m.conv, c.b
    stride = channels_last_strides(spec_of(m.out).shape)  # type: ignore[arg-type]
    x = b.any_strides(op.arg("input"))
    geometry = tuple(op.arg(n) for n in ("stride", "padding", "dilation"))
    groups = op.arg("groups")
    library = partial(b.library, out=m.out, stride=stride, op=op)
    if not m.relu:
        weight = _folded(m, c)[0] if m.norm is not None else _packed(b.exact(op.arg("weight")), c)
        bias = c.exact(op.arg("bias")) if m.shifted else None
        library("aten::convolution.default", x, weight, bias, *geometry, False, (0, 0), groups)
        return
    weight, bias = _folded(m, c)
    if m.shortcut is not None:
        bias = b.prepare("aten::add.Tensor", bias, _folded(m.shortcut, c)[1])
    bias = b.prepare("aten::_to_copy.default", bias, dtype=spec_of(op.arg("weight")).dtype)
    other = b.any_strides(m.other)
    if not c.fused:
        _unfused(c, (x, weight, bias, *geometry, False, (0, 0), groups), other, library)
    elif other is None:
        library("aten::cudnn_convolution_relu.default", x, weight, bias, *geometry, groups)
    else:
        library("aten::cudnn_convolution_add_relu.default", x, weight, other, 1.0, bias, *geometry, groups)


def _unfused(c: Calls, args: tuple[Any, ...], other: Ref | None, library: Callable[..., None]) -> None:
    """The same by plain ops, for simulated devices."""
    made = c.ctx.value(None)
    c.b.call("aten::convolution.default", *args, out=made)
    if other is not None:
        summed = c.ctx.value(None)
        c.b.call("aten::add.Tensor", Ref(made.id), other, out=summed)
        made = summed
    library("aten::relu.default", Ref(made.id))


def _packed(weight: Ref, c: Calls) -> Ref:
    return c.b.prepare("aten::clone.default", weight, memory_format=torch.channels_last)


def _folded(m: Match, c: Calls) -> tuple[Ref, Ref]:
    """Weight (channels-last) and shift (fp32), with the batch norm's scale and shift multiplied in, in fp32."""
    prepare, bias, norm = c.b.prepare, m.conv.arg("bias"), m.norm
    weight = c.b.exact(m.conv.arg("weight"))

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
    scaled = prepare("aten::mul.Tensor", wide(m.conv.arg("weight")), column)
    return _packed(prepare("aten::_to_copy.default", scaled, dtype=spec_of(m.conv.arg("weight")).dtype), c), shift


def _zeros(m: Match, c: Calls) -> Ref:
    """A shift of nothing, where the weight is."""
    return c.b.prepare(
        "aten::new_zeros.default", c.b.exact(m.conv.arg("weight")), (spec_of(m.out).shape[1],), dtype=torch.float32
    )


def _patches(op: OpView) -> bool:
    """Whether every input element is in one window, once: then windows are rows of a matrix."""
    x, w = spec_of(op.arg("input")), spec_of(op.arg("weight"))
    kernel = tuple(w.shape[2:])
    fits = all(n % k == 0 for n, k in zip(x.shape[2:], kernel, strict=True))  # type: ignore[operator]
    still = tuple(op.arg("stride")) == kernel and not any(op.arg("padding")) and set(op.arg("dilation")) == {1}
    rows = w.shape[1] * kernel[0] * kernel[1]  # type: ignore[operator]
    whole = op.arg("groups") == 1 and kernel != (1, 1) and rows % 8 == 0
    return fits and still and whole and x.dtype is not torch.float32


def _windows(op: OpView, split: Sequence[Any], order: Sequence[int], c: Calls) -> Value:
    """The input of a convolution as a view with its windows apart, for a kernel to read."""
    x = c.b.spec(op.arg("input"))
    (batch, channel, row, column), kh, kw = x.stride, split[3], split[5]
    strides = (batch, channel, row * kh, row, column * kw, column)
    apart = c.ctx.value(replace(x, shape=tuple(split), stride=strides))
    ordered = c.ctx.value(replace(x, shape=tuple(split[i] for i in order), stride=tuple(strides[i] for i in order)))
    for name, given, made in (("view", (op.arg("input"), tuple(split)), apart), ("permute", (apart, tuple(order)), ordered)):
        names = tuple(a.name for a in getattr(torch.ops.aten, name).default._schema.arguments)
        c.b.ops.append(c.b.at_hand(OpView(c.ctx.value(None).id, name, f"aten::{name}.default", names, given, (made,))))
    return ordered


def _product(op: OpView, c: Calls) -> None:
    """Windows as rows, times the weight as a matrix; the result is channels-last."""
    b, x, w = c.b, c.b.spec(op.arg("input")), spec_of(op.arg("weight"))
    n, channels, height, width = x.shape
    outs, _, kh, kw = w.shape
    h, v = height // kh, width // kw  # type: ignore[operator]

    def call(target: str, *args: Any) -> Ref:
        made = c.ctx.value(None)
        b.call(target, *args, out=made)
        return Ref(made.id)

    inner = (3, 5, 1) if x.stride[1] == 1 else (1, 3, 5)  # rows in the order in which memory lies
    windows = b.in_rows(_windows(op, (n, channels, h, kh, v, kw), (0, 2, 4, *inner), c))
    rows = call("aten::view.default", Ref(windows.id), (-1, channels * kh * kw))  # type: ignore[operator]
    weight = b.exact(op.arg("weight"))
    if inner != (1, 3, 5):
        weight = b.prepare("aten::permute.default", weight, (0, 2, 3, 1))
    matrix = b.prepare("aten::reshape.default", weight, (outs, -1))
    product = call("aten::linear.default", rows, matrix, c.exact(op.arg("bias")))
    image = call("aten::view.default", product, (n, h, v, outs))
    stride = channels_last_strides(spec_of(op.out).shape)  # type: ignore[arg-type]
    b.library("aten::permute.default", image, (0, 3, 1, 2), out=op.out, stride=stride, op=op)
