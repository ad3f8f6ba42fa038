"""The table of float ops that go to torch's oneDNN: under which conditions, and how.

A lowering gets a match (the op and the neighbours fused into its call, see `patterns`) and writes into the fragment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from fusewright import ops
from fusewright.interface import Device, OpView, TensorSpec, Value, Verdict, hint
from fusewright.plan.ir import Ref
from fusewright.toolkit.backend.library import LoweringTable
from fusewright.toolkit.ir.types import from_torch
from fusewright.toolkit.region.builder import Builder, channels_last_strides, contiguous_strides, metadata
from fusewright.toolkit.region.graph import spec_of
from fusewright.toolkit.region.pattern import Chain, Match, chain, find, siblings
from fusewright.toolkit.region.rewrite import Row
from fusewright_cpu.kernels.by_hand import MOST_GEMV_ROWS, Attention
from fusewright_cpu.onednn import choices, heads, own, patterns, planes, sums
from fusewright_cpu.onednn.choices import FITTED, NOTHING, Product, Unary
from fusewright_cpu.onednn.conv import depthwise, direct, few_channels, pointwise, transposed
from fusewright_cpu.onednn.conv.images import as_image, channels_last_of, geometry_of, image_shape
from fusewright_cpu.onednn.folding import folded
from fusewright_cpu.onednn.left_behind import SHAPES
from fusewright_cpu.onednn.patterns import POST_OPS, is_packed, operands, other_of, post_op, posts, rides
from fusewright_cpu.run.sources import hash_of
from fusewright_cpu.target import host_target

OpCode: TypeAlias = Callable[[Match, Builder], None]

FLOATS = {torch.float32: "", torch.bfloat16: "mkldnn_bf16"}
LINEAR = "mkldnn::_linear_pointwise.default"
PACK_LINEAR = "mkldnn::_reorder_linear_weight.default"
MKL_LINEAR = "mkl::_mkl_linear.default"
PACK_MKL_LINEAR = "mkl::_mkl_reorder_linear_weight.default"
CONV = "mkldnn::_convolution_pointwise.default"
CONV_ADD = "mkldnn::_convolution_pointwise.binary"
PACK_CONV = "mkldnn::_reorder_convolution_weight.default"
CONV_TRANSPOSED = "mkldnn::_convolution_transpose_pointwise.default"
PACK_CONV_TRANSPOSED = "mkldnn::_reorder_convolution_transpose_weight.default"


OWN = dict.fromkeys(FLOATS, "")
"""Types of our own kernels, which multiply floats where the CPU has no products of bf16, and what they need."""
FEW_CHANNELS = 4
"""The most channels of an image that may come in planes: inputs of a model, not results of convolutions."""
MASKS = (torch.float32, torch.bfloat16, torch.bool)
"""Dtypes of attention masks that our kernel reads."""

LOWERINGS: LoweringTable[OpCode] = LoweringTable()


def multiplies(dtype: torch.dtype, device: Device) -> bool:
    """Return whether oneDNN multiplies this type on a device."""
    return not FLOATS[dtype] or FLOATS[dtype] in device.features


def static(*sizes: Any) -> bool:
    return all(isinstance(s, int) and s > 0 for s in sizes)


def mixed_types(op: OpView) -> bool:
    return len({v.spec.dtype for v in (*op.inputs(), *op.outs) if v.spec is not None}) > 1


# -- products with a weight


def linear_reason(op: OpView) -> str | None:
    x, w = spec_of(op.arg("input")), spec_of(op.arg("weight"))
    if x.rank < 2 or w.rank != 2:
        return "needs an input of two dimensions or more and a matrix of weights"
    if not static(*w.shape) or 0 in x.shape:
        return "needs a weight of fixed size, and no empty input"
    bias = op.arg("bias")
    if bias is not None and not own.is_dense_bias(spec_of(bias), w.shape[0]):
        return "needs a dense bias with a number for each column"
    return "mixed dtypes" if mixed_types(op) else None


def mm_reason(op: OpView) -> str | None:
    x, w = operands(op)[:2]
    if not static(*spec_of(w).shape) or 0 in spec_of(x).shape:
        return "needs a second matrix of fixed size, and no empty input"
    if not (_dense_matrix(spec_of(x)) and _dense_matrix(spec_of(w))):
        return "needs matrices that are dense, plain or transposed"
    if op.op == "addmm":
        bias = spec_of(op.arg("self"))
        if not own.is_dense_bias(bias, spec_of(w).shape[1]):
            return "adds something else than a bias"
        if (op.arg("beta"), op.arg("alpha")) != (1, 1):
            return "scales what it adds"
    return "mixed dtypes" if mixed_types(op) else None


def _dense_matrix(s: TensorSpec) -> bool:
    return 1 in s.stride and s.rank == 2


def product_of(op: OpView) -> Product:
    """Return the product that `op` computes, with hints for symbolic sizes."""
    x, w, bias = (spec_of(v) if v is not None else None for v in operands(op))
    assert x is not None and w is not None
    k = hint(x.shape[-1])
    n = hint(w.shape[0] if op.op == "linear" else w.shape[1])
    x_rows = x.rank != 2 or x.stride[-1] == 1 or x.shape[-1] == 1
    w_rows = w.stride[-1] == 1 if op.op == "linear" else w.stride[0] == 1
    return Product(x.numel_hint() // max(k, 1), k, n, x.dtype, bias is not None, x_rows, w_rows)


def linear_form(m: Match, b: Builder) -> str:
    """Return the form of a product (see `choices.linear_form`). Only constants are packed, for a fixed number of rows."""
    op = m.anchor
    product = product_of(op)
    x, w, _ = operands(op)
    library = multiplies(product.dtype, b.ctx.device)
    large, tiny = product.k * product.n >= FITTED.gemv_weight, product.m * product.k * product.n <= FITTED.tiny_product
    worth = not library or large or tiny
    few = [own.FEW_ROWS] if worth and own.gemv_of(op, operands(op), b) else []
    if not library:
        return choices.linear_form(b.ctx, product, ("aten", *few), unary_of(m, b))
    if not spec_of(x).static:  # oneDNN generates and keeps code for each number of rows; eager's fp32 library does not
        small = product.m * product.k * product.n < FITTED.small_product
        return "aten" if small or product.dtype is torch.float32 else "dense"
    prepack = b.ctx.options["prepack"]
    if prepack != "always" and not SHAPES.admit(product.key, b.owner):
        b.ctx.provisional()
        return "aten"
    if prepack == "never" or not b.is_const(w):
        tall = (
            not product.x_rows and product.dtype is torch.float32
        )  # in bf16 eager calls oneDNN, which handles such rows well
        forms = ("aten", "dense", "copied") if tall else ("aten", "dense", *few)
        return choices.linear_form(b.ctx, product, forms, unary_of(m, b))
    if prepack == "always":
        return "packed"
    return choices.linear_form(b.ctx, product, ("aten", "dense", *few, *product.packed_forms), unary_of(m, b))


def unary_of(m: Match, b: Builder) -> Unary:
    """Return what follows a product in a match, for a measurement."""
    unary = m.get("unary")
    if unary is None:
        return NOTHING
    call, eager = b.ctx.aten(unary), getattr(torch.ops.aten, unary.op)
    ours = (own.activation(unary), POST_OPS[unary.op].scalars(unary) or ())
    return Unary(
        post_op(m), lambda product: eager(product, *call.args[1:], **dict(call.kwargs), out=product), rides(unary, b), ours
    )


def few_rows_reason(op: OpView) -> str | None:
    """Return why our own kernel for few rows, which needs no instructions of a half type, does not take a product."""
    reason = linear_reason(op) if op.op == "linear" else mm_reason(op)
    rows = product_of(op).m if reason is None else 0
    return f"more than {MOST_GEMV_ROWS} rows" if rows > MOST_GEMV_ROWS else reason


@LOWERINGS.add("linear", dtypes=FLOATS, dynamic=True, when=linear_reason)
@LOWERINGS.add("mm", "addmm", dtypes=FLOATS, dynamic=True, when=mm_reason)
@LOWERINGS.add("linear", "mm", "addmm", dtypes=OWN, when=few_rows_reason)
def linear(m: Match, b: Builder) -> None:
    """Emit input @ weight.T + bias, and a unary op that follows."""
    op = m.anchor
    form = linear_form(m, b)
    if form == "aten":
        for part in m.ops:
            b.leave(part)
        b.notes[op.id] = "ATen: faster for this shape"
        return
    x, w, given = operands(op)
    unary = m.get("unary")
    if unary is not None and form != own.FORM and (form in ("mkl", own.FEW_ROWS) or not rides(unary, b)):
        m = replace(m, ops=tuple(part for part in m.ops if part is not unary), captures={**m.captures, "unary": None})
    kernel = own.gemv_of(op, operands(op), b) if form == own.FEW_ROWS else None
    if kernel is not None:
        factored = (v if v is None or m.get("factor") is None else Value(scaled(b.exact(v), m, b).id, None) for v in (w, given))
        own.emit_few_rows(kernel, (x, *factored), (product_of(op).n, product_of(op).k), m.last.out, op, b)
        _noted(m, unary, form, b)
        return
    weight, bias = scaled(weight_of(op, w, b), m, b), None if given is None else scaled(b.exact(given), m, b)
    if form == own.FORM:
        after = unary_of(m, b).own
        source = _before_view(x, m, b)
        same = spec_of(source).shape[-1] == spec_of(x).shape[-1]
        own.emit(source if same else x, weight, bias, product_of(op).n, after, m.last.out, op, b)
    else:
        x = with_rows(x, m, b)
        emit_linear(m, b, b.row_major(x) if form == "copied" else x, weight, bias, form)
    _noted(m, unary, form, b)


def _noted(m: Match, unary: OpView | None, form: str, b: Builder) -> None:
    """Close the call of a product, note its form, and leave a unary op that it does not compute."""
    b.close_call(m.ops)
    note_parts(m, b, LIBRARIES.get(form, f"oneDNN linear, {form}"))
    if unary is not None and m.get("unary") is None:
        b.leave(unary)


LIBRARIES = {"mkl": "MKL linear, packed", own.FORM: "linear in one kernel", own.FEW_ROWS: "linear of few rows in one kernel"}
"""How reports call the forms that are not oneDNN's."""


def _before_view(x: Value, m: Match, b: Builder) -> Value:
    """Return what model code flattened for a product whose rows a view divides again; else the input."""
    flat = b.graph.producer(x)
    return flat.arg("self") if m.get("rows") is not None and flat is not None and flat.op == "view" else x


def with_rows(x: Value, m: Match, b: Builder) -> Value:
    """Return the input with its rows divided as those of the result: what model code flattened, or a view of it."""
    rows = m.get("rows")
    if rows is None:
        return x
    shape = (*spec_of(rows.out).shape[:-1], spec_of(x).shape[-1])
    x = _before_view(x, m, b)
    if spec_of(x).shape == shape:
        return x
    view = ops.OPS["view"]
    stride = metadata(view.target, view.bind((x, shape)), spec_of).stride()
    made = b.ctx.value(replace(spec_of(x), shape=shape, stride=tuple(stride)))
    b.call("aten::view.default", b.exact(x), shape, out=made)
    return made


def weight_of(op: OpView, w: Value, b: Builder) -> Ref:
    """Return the weight as [n, k], through a view if the product has it transposed."""
    if op.op == "linear":
        return b.exact(w)
    if b.is_const(w):
        return b.prepare("aten::t.default", b.exact(w))
    view = b.ctx.value(None)
    b.call("aten::t.default", b.exact(w), out=view)
    return Ref(view.id)


def scaled(constant: Ref, m: Match, b: Builder) -> Ref:
    """Return a weight or bias times the factor that follows the product."""
    factor = m.get("factor")
    return constant if factor is None else b.prepare("aten::mul.Scalar", constant, factor.arg("other"))


def emit_linear(m: Match, b: Builder, x: Value, weight: Ref, bias: Ref | None, form: str = "dense") -> None:
    out, rows = m.last.out, product_of(m.anchor).m
    shape = spec_of(out).shape
    stride = contiguous_strides(shape) if spec_of(out).static else None  # type: ignore[arg-type]
    if form == "mkl":
        packed = b.prepare(PACK_MKL_LINEAR, weight, rows)
        b.library(MKL_LINEAR, b.any_strides(x), packed, weight, bias, rows, out=out, stride=stride, op=m.anchor)
        return
    if form == "packed":
        weight = b.prepare(PACK_LINEAR, weight, rows)
    b.library(LINEAR, b.any_strides(x), weight, bias, *post_op(m), out=out, stride=stride, op=m.anchor)


def note_parts(m: Match, b: Builder, text: str) -> None:
    b.notes[m.anchor.id] = " + ".join([text, *(p.op for p in posts(m))])
    for p in posts(m):
        b.notes[p.id] = f"in the call of {m.anchor.op}"


def _siblings(m: Match, b: Builder) -> Match | None:
    """Match, from the first of them, linears of one input with copyable constant weights, static sizes and no fused neighbours but
    factors."""
    found: dict[int, Match] = {}

    def eligible(op: OpView) -> bool:
        if not LOWERINGS.supports(op, b.ctx.device):
            return False
        _, w, bias = operands(op)
        x = spec_of(op.arg("input"))
        fixed = b.ctx.options["prepack"] != "never" and x.static and multiplies(x.dtype, b.ctx.device)
        alone, part = (find(p, op, b.graph, b, b.ctx.rules.allows) for p in (patterns.PRODUCT, patterns.SCALED))
        if not (fixed and b.is_const(w) and b.is_const(bias)) or alone is None or part is None or alone.get("unary") is not None:
            return False
        found[op.id] = part
        return True

    readers = b.graph.ordered(b.graph.users(m.anchor.arg("input")))
    group = next((g for g in siblings(readers, eligible, any_bias=True) if g[0] is m.anchor), None)
    if group is None:
        return None
    parts = tuple(found[op.id] for op in group)
    return replace(m, ops=b.graph.ordered(op for part in parts for op in part.ops), at=group[0], captures={"parts": parts})


def _concat_pays(m: Match, b: Builder) -> bool:
    """Whether one product for all siblings is faster than one each."""
    widths = [product_of(part.anchor).n for part in m["parts"]]
    if not SHAPES.admit(f"{product_of(m.anchor).key} {widths}", b.owner):
        b.ctx.provisional()
        return False
    return bool(_siblings_form(m, b))


def _siblings_form(m: Match, b: Builder) -> str:
    p, parts = product_of(m.anchor), m["parts"]
    return choices.siblings_form(b.ctx, p.m, p.k, [product_of(part.anchor).n for part in parts], p.dtype, _biased(parts))


def _biased(parts: Sequence[Match]) -> bool:
    return any(part.anchor.arg("bias") is not None for part in parts)


def _bias_of(part: Match, b: Builder) -> Ref:
    """Return the bias of one of several linears, or what adds nothing: of 0.0, -0.0 would become 0.0."""
    bias, weight = part.anchor.arg("bias"), spec_of(part.anchor.arg("weight"))
    if bias is None:
        return b.prepare("aten::full.default", (weight.shape[0],), -0.0, dtype=weight.dtype)
    return scaled(b.exact(bias), part, b)


def _concatenated(m: Match, b: Builder) -> None:
    """Emit all siblings as one product; each result is a slice of it, without a copy."""
    parts, first = m["parts"], m.anchor
    x = first.arg("input")
    p, form = product_of(first), _siblings_form(m, b)
    weights = tuple(scaled(b.exact(part.anchor.arg("weight")), part, b) for part in parts)
    weight = b.prepare("aten::cat.default", weights, 0)
    if form != own.FORM:
        weight = b.prepare(PACK_LINEAR if form == "packed" else PACK_MKL_LINEAR, weight, p.m)
    bias = None
    if _biased(parts):
        bias = b.prepare("aten::cat.default", tuple(_bias_of(part, b) for part in parts), 0)
    widths = [product_of(part.anchor).n for part in parts]
    shape = (*spec_of(first.out).shape[:-1], sum(widths))
    stride = contiguous_strides(shape)  # type: ignore[arg-type]
    whole = b.ctx.value(TensorSpec(shape, stride, spec_of(first.out).dtype))
    if form == own.FORM:
        own.emit(x, weight, bias, sum(widths), NOTHING.own, whole, first, b)
    elif form == "packed":
        b.call(LINEAR, b.any_strides(x), weight, bias, "none", (), "", out=whole, op=first)
    else:  # of the weight as it was it reads only the sizes, so that nothing need keep all of them side by side
        sizes = b.prepare("aten::as_strided.default", weights[0], (sum(widths), p.k), (0, 0))
        b.call(MKL_LINEAR, b.any_strides(x), weight, sizes, bias, p.m, out=whole, op=first)
    start = 0
    for part, width in zip(parts, widths, strict=True):
        args = (Ref(whole.id), len(shape) - 1, start, start + width)
        b.library("aten::slice.Tensor", *args, out=part.out, stride=stride, op=part.anchor)
        note_parts(part, b, f"{LIBRARIES.get(form, 'oneDNN linear, packed')}, one product for {len(parts)}")
        start += width
    b.close_call(m.ops)


# -- convolution


def conv_reason(op: OpView) -> str | None:
    x, w = spec_of(op.arg("input")), spec_of(op.arg("weight"))
    if x.rank not in (3, 4, 5) or x.rank != w.rank:
        return "only 1-d to 3-d convolutions of a batch"
    if 0 in x.shape or 0 in spec_of(op.out).shape:
        return "an empty input or output"
    return "mixed dtypes" if mixed_types(op) else None


@LOWERINGS.add("conv", dtypes=FLOATS, when=conv_reason)
def conv(m: Match, b: Builder) -> None:
    """Emit a channels-last convolution with its batch norm folded in, followed by an addition and a unary op.

    A 1-d convolution runs as a 2-d one over images of height 1, because oneDNN packs no weights of fewer dimensions.
    Weights that require gradients are not packed: eager calls the same oneDNN kernels for them.
    """
    op = m.anchor
    if patterns.transposes_packed(op, b):
        return _conv_transposed(m, b)
    if not is_packed(op, b):
        for part in m.ops:
            known = not op.arg("transposed") and spec_of(op.arg("input")).rank != 5
            b.leave(part, any_strides=known)  # torch's metadata functions mispredict the strides of others
        b.notes[op.id] = "ATen: calls oneDNN with the weight as it is"
        return
    weight, bias = folded(m, b)
    x, out = op.arg("input"), m.last.out
    geometry = geometry_of(op)
    parts = sums.parts_of(op)
    if parts > 1:
        return _conv_in_parts(m, parts, weight, bias, b)
    packed = packed_conv(weight, geometry, x, b)
    attr, scalars, algorithm = post_op(m)
    other = other_of(m)
    if other is None:
        args = (as_image(_turned(x, b), b), packed, bias, *geometry, attr, scalars, algorithm)
        emit_conv(CONV, args, out, op, b)
    else:
        unary = (attr, scalars, algorithm) if m.get("unary") is not None else (None, (), None)
        args = (as_image(x, b), as_image(other, b), packed, bias, *geometry, "add", 1.0, *unary)
        emit_conv(CONV_ADD, args, out, op, b)
    b.close_call(m.ops)
    note_parts(m, b, "oneDNN conv, packed, channels-last")


def _conv_transposed(m: Match, b: Builder) -> None:
    """Emit a transposed convolution of channels-last images. Of planes, as eager gives them to it, oneDNN takes two to four times
    as long."""
    op = m.anchor
    weight, bias = folded(m, b)
    neutral = (0,) * (4 - spec_of(op.arg("input")).rank)
    padding, stride, dilation, groups = geometry_of(op)
    geometry = (padding, (*neutral, *op.arg("output_padding")), stride, dilation, groups)
    image = as_dense_image(op.arg("input"), b)
    packed = b.prepare(PACK_CONV_TRANSPOSED, weight, *geometry, image_shape(spec_of(op.arg("input")).shape))
    emit_conv(CONV_TRANSPOSED, (image, packed, bias, *geometry, *post_op(m)), m.last.out, op, b)
    b.close_call(m.ops)
    note_parts(m, b, "oneDNN transposed conv, packed, channels-last")


def packed_conv(weight: Ref, geometry: tuple[Any, ...], x: Value, b: Builder) -> Ref:
    layout = torch.channels_last_3d if spec_of(x).rank == 5 else torch.channels_last
    weight = b.prepare("aten::clone.default", weight, memory_format=layout)
    return b.prepare(PACK_CONV, weight, *geometry, image_shape(spec_of(x).shape))


def _conv_in_parts(m: Match, parts: int, weight: Ref, bias: Ref | None, b: Builder) -> None:
    """Emit a convolution whose long sums are split into `parts` shorter ones, computed as groups; a kernel adds them up."""
    op, out, x = m.anchor, m.last.out, m.anchor.arg("input")
    geometry = (*geometry_of(op)[:-1], parts)
    packed = packed_conv(sums.grouped(weight, spec_of(op.arg("weight")).shape, parts, b), geometry, x, b)
    n, channels, *points = spec_of(out).shape
    assert isinstance(channels, int)
    if bias is not None:
        bias = b.prepare("aten::constant_pad_nd.default", bias, (0, (parts - 1) * channels))
    shape = (n, channels * parts, *points)
    whole = b.ctx.value(TensorSpec(shape, channels_last_of(shape), spec_of(out).dtype))
    emit_conv(CONV, (as_image(x, b), packed, bias, *geometry, "none", (), ""), whole, op, b)
    b.replace(op, whole)
    sums.add_up(whole, parts, out, channels_last_of(spec_of(out).shape), b)
    note_parts(m, b, f"oneDNN conv, packed, channels-last, in {parts} sums")



def _turned(value: Value, b: Builder) -> Value:
    """Return images of few channels and fixed size channels-last, copied in a kernel: the operator's own copy takes five times as
    long."""
    spec = b.spec(value)
    few = spec.rank == 4 and spec.static and hint(spec.shape[1]) <= FEW_CHANNELS
    return pointwise.channels_last(value, b) if few else value


def as_dense_image(value: Value, b: Builder) -> Ref | None:
    """Refer to images with dense channels-last strides, copied to these if they have others."""
    return as_image(value, b) if b.spec(value).rank == 3 else b.any_strides(pointwise.channels_last(value, b))


def emit_conv(target: str, args: tuple[Any, ...], out: Value, op: OpView, b: Builder) -> None:
    shape = spec_of(out).shape
    stride = channels_last_strides(image_shape(shape))
    if len(shape) > 3:
        b.library(target, *args, out=out, stride=stride, op=op)
        return
    image = b.ctx.value(TensorSpec(image_shape(shape), stride, spec_of(out).dtype))
    b.call(target, *args, out=image, op=op)
    b.library("aten::squeeze.dim", Ref(image.id), 2, out=out, stride=(*stride[:2], stride[3]), op=op)


# -- attention


def sdpa_reason(op: OpView) -> str | None:
    q, k, v = (spec_of(op.arg(n)) for n in ("query", "key", "value"))
    if op.arg("dropout_p"):
        return "has dropout"
    if not (q.rank == k.rank == v.rank == 4) or q.shape[:2] != k.shape[:2] or k.shape[:2] != v.shape[:2]:
        return "needs [batch, heads, length, width] with equally many heads"
    if q.shape[-1] != k.shape[-1] or k.shape != v.shape or 0 in q.shape or 0 in k.shape:
        return "empty, or query, key and value of different width or length"
    mask = op.arg("attn_mask")
    if mask is not None and (op.arg("is_causal") or spec_of(mask).rank not in (2, 4)):
        return "a mask of other than two or four dimensions, or a causal one beside it"
    return None if op.arg("scale") is None or isinstance(op.arg("scale"), int | float) else "a scale that is computed"


@LOWERINGS.add("sdpa", "sdpa_with_lse", dtypes=OWN, dynamic=True, when=sdpa_reason)
def sdpa(m: Match, b: Builder) -> None:
    """Emit softmax(q k^T * scale + mask) v with our own kernel (`fusewright_cpu.kernels.attention`) if it measures faster than
    torch's."""
    op = _with_dense_mask(m.anchor, b)
    mask, scale = op.arg("attn_mask"), op.arg("scale")
    values = [op.arg(n) for n in ("query", "key", "value")] + ([mask] if mask is not None else [])
    specs = [b.spec(v) for v in values]
    why = _not_our_attention(op, specs, b)
    if not why:
        query, key, *_ = specs
        masked = "" if mask is None else from_torch(specs[3].dtype)
        kernel = Attention(from_torch(query.dtype), hint(query.shape[-1]), masked, bool(op.arg("is_causal")))
        sizes = (*query.shape[:3], key.shape[2], *(n for s in (*specs, spec_of(op.out)) for n in _steps(s)))
        factor = 1.0 / math.sqrt(kernel.width) if scale is None else float(scale)
        why = kernel.refused(host_target())
        if not why and all(s.static for s in specs):
            form = choices.attention_form(b.ctx, kernel, (*specs, spec_of(op.out)), sizes, factor, b.built)
            why = "" if form == "kernel" else "torch's kernel is faster for this shape"
    if why:
        _leave_attention(_with_added_mask(op, b), b)
        b.notes[op.id] = f"ATen: {why}"
        return
    b.launch(kernel, hash_of(kernel), values, sizes, (factor,), out=op.out, op=op)
    b.close_call((op,))
    b.notes[op.id] = f"attention in one kernel{', causal' if kernel.causal else ''}"


def _leave_attention(op: OpView, b: Builder) -> None:
    """Leave attention to torch. Where its operands lie otherwise than in the graph, so may the result; where torch's rule does not
    explain the graph's, the operands are copied to the graph's strides."""
    given = next(o for o in b.graph.source.ops if o.id == op.id)
    traced, actual = ([of(o.arg(n)) for n in heads.OPERANDS] for of, o in ((spec_of, given), (b.spec, op)))
    if [s.stride for s in traced] == [s.stride for s in actual] or not all(s.static for s in (*traced, *actual)):
        b.leave(op)
    elif _torchs_strides(traced) == spec_of(given.outs[0]).stride:
        b.leave_with(op, _torchs_strides(actual))
    else:
        b.with_layout(op.outs[0], spec_of(given.outs[0]).stride)  # type: ignore[arg-type]
        back = {op.arg(n): b.row_major(op.arg(n)) for n, t in zip(heads.OPERANDS, traced, strict=True) if _row_major(t)}
        b.leave(replace(op, args=tuple(back.get(a, a) if isinstance(a, Value) else a for a in op.args)))


def _row_major(s: TensorSpec) -> bool:
    return s.stride == contiguous_strides(s.shape)  # type: ignore[arg-type]


def _torchs_strides(operands: Sequence[TensorSpec]) -> tuple[int, ...]:
    """The strides of torch's result: like the query's if all rows are dense, else row-major."""
    query, _, value = operands
    shape = (*query.shape[:3], value.shape[3])
    if any(s.stride[-1] != 1 and s.shape[-1] != 1 for s in operands):
        return contiguous_strides(shape)  # type: ignore[arg-type]
    like = torch.empty_strided(query.shape, query.stride, device="meta")  # type: ignore[arg-type]
    return torch.empty_like(like).stride()


def _with_dense_mask(op: OpView, b: Builder) -> OpView:
    """Return an attention whose mask has a dense last dimension: another (T5's positions, whose heads are last) is copied once for
    all attention that reads it. Torch copies it in each call."""
    mask = op.arg("attn_mask")
    if mask is None or not b.spec(mask).static:
        return op
    spec = b.spec(mask)
    repeated = any(step == 0 and n != 1 for n, step in zip(spec.shape, spec.stride, strict=True))
    if repeated or spec.shape[-1] == 1 or spec.stride[-1] == 1:
        return op
    dense = b.once(("dense mask", mask.id), lambda: b.row_major(mask))
    return replace(op, args=tuple(dense if a is mask else a for a in op.args))


def _with_added_mask(op: OpView, b: Builder) -> OpView:
    """Return an attention left to torch with the mask of zeros and -inf that torch makes of a bool mask in each call, here once for
    all attention that reads the mask."""
    mask = op.arg("attn_mask")
    if op.op != "sdpa" or mask is None or spec_of(mask).dtype is not torch.bool or not spec_of(mask).static:
        return op
    dtype = spec_of(op.out).dtype

    def added() -> Value:
        zeros = b.append_op("full_like", mask, 0.0, dtype)
        return b.append_op("masked_fill", zeros, b.append_op("logical_not", mask), -math.inf)

    shared = b.once(("added mask", mask.id, dtype), added)
    return replace(op, args=tuple(shared if a is mask else a for a in op.args))


def _not_our_attention(op: OpView, specs: Sequence[TensorSpec], b: Builder) -> str:
    """Return why attention of these tensors stays torch's call, or ""."""
    (query, key, value), mask = specs[:3], specs[3] if len(specs) > 3 else None
    if not all(b.graph.unused(v) for v in op.outs[1:]):
        return "its gradient needs the log-sum-exp"
    if not static(query.shape[-1]):
        return "heads of a symbolic width"
    if any(s.stride[-1] != 1 and s.shape[-1] != 1 for s in (query, key, value)):
        return "rows of heads that are not dense"
    if mask is not None and (mask.shape[-1] != key.shape[-2] or mask.stride[-1] != 1 or mask.dtype not in MASKS):
        return "a mask without a dense last dimension, or of another type"
    return ""


def _steps(s: TensorSpec) -> tuple[Any, ...]:
    """Return the strides of batch, head and row, 0 where a mask is broadcast."""
    missing = 4 - s.rank
    steps = (0,) * missing + tuple(0 if n == 1 else d for n, d in zip(s.shape, s.stride, strict=True))
    return steps[:3]


# -- rewrite rows


def of_table(table: LoweringTable[OpCode], id: str, pattern: Chain, note: str) -> Row:
    """Return a rewrite row that writes with the table's code. It checks the table first, because an op may be in a region for the
    sake of another row, or as eager's own call."""

    def takes(m: Match, b: Builder) -> bool:
        return bool(table.supports(m.anchor, b.ctx.device))

    def write(m: Match, b: Builder) -> None:
        row = table.find(m.anchor, b.ctx.device)
        if isinstance(row, Verdict):
            raise ValueError(f"{m.anchor.op} was claimed, but the table says {row}")
        row.code(m, b)

    return Row(id, pattern, when=takes, write=write, note=note)


ROWS = (
    Row(
        "onednn.product.siblings", chain("linear"), extend=_siblings, pays=_concat_pays, write=_concatenated,
        note="one product for several",
    ),
    planes.ROW,
    of_table(LOWERINGS, "onednn.product", patterns.PRODUCT, "product"),
    depthwise.ROW,
    few_channels.ROW,
    pointwise.ROW,
    direct.FEW,
    direct.ROW,
    transposed.ROW,
    of_table(LOWERINGS, "onednn.conv", patterns.CONV, "convolution"),
    of_table(LOWERINGS, "onednn.attention", patterns.ATTENTION, "attention"),
)  # fmt: skip
"""The rewrite rows, in the order in which they are tried."""
