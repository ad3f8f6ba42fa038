"""The rewrite rows of x86_int8: which quantized patterns become int8 calls, under which conditions, and how."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fusewright.interface import OpView, TensorSpec, Value, hint, is_static
from fusewright.plan.ir import Call, Ref
from fusewright.toolkit.region.builder import Builder
from fusewright.toolkit.region.graph import RegionGraph, spec_of
from fusewright.toolkit.region.pattern import Chain, Match
from fusewright.toolkit.region.quantized import (
    BYTES,
    Quantized,
    Weight,
    before_padding,
    dequantized,
    product,
    residual_of,
    target_of,
    weight_of,
)
from fusewright.toolkit.region.rewrite import Row
from fusewright.toolkit.rules.space import is_contiguous
from fusewright_int8 import engines
from fusewright_int8.engines import ENGINES, Convolution, Engine, Product, fastest, present
from fusewright_int8.operators import name
from fusewright_int8.run.native import MOST_K

FLOATS = (torch.float32, torch.bfloat16)


# -- post-ops


def post_of(op: OpView | None) -> tuple[str, tuple[float, ...]] | None:
    """Return the engines' name and arguments for a unary op, or None if they lack it."""
    if op is None:
        return "none", ()
    match op.op:
        case "gelu":
            return ("gelu_tanh" if op.arg("approximate") == "tanh" else "gelu"), ()
        case "clamp":
            limits = op.arg("min"), op.arg("max")
            both = all(isinstance(x, int | float) for x in limits)
            return ("clamp", tuple(map(float, limits))) if both else None
        case "relu" | "silu" as found:
            return found, ()
    return None


UNARY = frozenset({"relu", "clamp", "gelu", "silu"})


# -- what stays in floats, and why


def why_not(op: OpView, graph: RegionGraph) -> str | None:
    """Return why a linear or convolution with quantized operands stays in floats; None if an engine takes it, or if it has no
    such operands."""
    x, w = dequantized(op.arg("input"), graph, op.op == "linear"), weight_of(op.arg("weight"), graph)
    if x is None and w is None:
        return None
    if w is None:
        return "its weight is no constant of int8"
    if x is None:
        return None if op.op == "linear" else "its input is not quantized"
    return _linear_reason(op, w, graph) if op.op == "linear" else _conv_reason(op, w, graph)


def _linear_reason(op: OpView, w: Weight, graph: RegionGraph) -> str | None:
    x, weight = spec_of(op.arg("input")), spec_of(w.value)
    if not is_static(weight.shape) or 0 in x.shape or 0 in weight.shape:
        return "empty, or a weight of symbolic size"
    return _common_reason(op, w, graph, weight.shape[1])


def _conv_reason(op: OpView, w: Weight, graph: RegionGraph) -> str | None:
    x, weight = spec_of(op.arg("input")), spec_of(w.value)
    if op.arg("transposed") or x.rank != 4:
        return "only plain 2-d convolutions of a batch are int8"
    if not is_static(weight.shape) or 0 in x.shape or 0 in spec_of(op.out).shape:
        return "empty, or a weight of symbolic size"
    taps = 1
    for size in weight.shape[1:]:
        taps *= int(size)  # type: ignore[arg-type]
    return _common_reason(op, w, graph, taps)


def _common_reason(op: OpView, w: Weight, graph: RegionGraph, k: Any) -> str | None:
    if k > MOST_K:
        return f"sums of {k} products do not fit int32; {MOST_K} do"
    if isinstance(w.scale, Value) and w.axis != 0:
        return "a scale for each input of the weight, not for each output"
    if isinstance(w.scale, int | float) and not w.scale:
        return "a scale of 0"
    if not graph.is_const(op.arg("bias")):
        return "a bias that is computed"
    return None if spec_of(op.out).dtype in FLOATS else "computed in another type than fp32 and bf16"


# -- static products


def static_input(op: OpView, graph: RegionGraph) -> Quantized | None:
    """Return the input of a product if its scale and zero point are known numbers, else None."""
    found = dequantized(op.arg("input"), graph, op.op == "linear")
    return found if isinstance(found, Quantized) and found.static and found.scale else None


def static_when(m: Match, b: Builder) -> bool:
    """Whether a linear or convolution has an input with known scale and zero point, and can be int8."""
    if static_input(m.anchor, b.graph) is None or weight_of(m.anchor.arg("weight"), b.graph) is None:
        return False
    x = static_input(m.anchor, b.graph)
    assert x is not None
    if why_not(m.anchor, b.graph) is not None:
        return False
    return laid_out(m.anchor, m.out, x.value)


def laid_out(op: OpView, out: Value, x: Value) -> bool:
    """Whether an engine makes `out` of a linear or convolution of `x` in the graph's layout; a convolution's is channels-last."""
    return rows_fit(out, x) if op.op == "linear" else is_static(spec_of(out).shape[1:])


def dense(value: Value) -> bool:
    """Whether the strides of a row-major result are static, or equal the graph's for all its sizes."""
    spec = spec_of(value)
    return is_static(spec.shape[1:]) or is_contiguous(spec)


def rows_fit(out: Value, x: Value) -> bool:
    """Whether the rows of `x` give `out`: in its shape, or in one that a view turns into it, for which sizes must be numbers."""
    return dense(out) and (spec_of(x).shape[:-1] == spec_of(out).shape[:-1] or spec_of(out).static)


def emit_rows(target: str, x: Value, rest: tuple[Any, ...], m: Match, b: Builder) -> None:
    """Emit a call that maps each row of `x` to a row, and the view that gives its result the graph's shape."""
    out, stride = spec_of(m.out), result_strides(m.out)
    if spec_of(x).shape[:-1] == out.shape[:-1]:
        b.library(target, b.any_strides(x), *rest, out=m.out, stride=stride, op=m.anchor)
    else:
        made = b.ctx.value(_dense((*spec_of(x).shape[:-1], out.shape[-1]), out))
        b.call(target, b.any_strides(x), *rest, out=made, op=m.anchor)
        b.library("aten::view.default", Ref(made.id), tuple(out.shape), out=m.out, stride=stride, op=m.anchor)
    b.close_call(m.ops)


def beside_rows(residual: Value, x: Value, m: Match, b: Builder) -> Ref | None:
    """Return the residual of a product of the rows of `x`, reshaped to match them if views lie between."""
    rows = spec_of(x).shape[:-1]
    if m.anchor.op != "linear" or rows == spec_of(m.out).shape[:-1]:
        return b.any_strides(residual)
    return reshaped(residual, (*rows, spec_of(residual).shape[-1]), m.anchor, b)


def reshaped(value: Value, shape: tuple[Any, ...], op: OpView, b: Builder) -> Ref | None:
    """Return a value in another shape, for the call that computes `op`."""
    given = b.any_strides(value)
    if spec_of(value).shape == shape:
        return given
    spec = b.spec(value)
    made = b.ctx.value(_dense(shape, spec) if spec == _dense(spec.shape, spec) else None)
    b.call("aten::reshape.default", given, shape, out=made, op=op)
    return Ref(made.id)


def _dense(shape: Sequence[Any], like: TensorSpec) -> TensorSpec | None:
    """The spec of a dense tensor of this shape; None for a symbolic one."""
    made = replace(like, shape=tuple(shape), stride=())
    return replace(made, stride=strides_of(made)) if is_static(made.shape) else None


def strides_of(spec: TensorSpec, channels_last: bool = False) -> tuple[Any, ...]:
    """Return dense strides: row-major, or channels-last for a batch of images. Only the first size may be symbolic."""
    order = [*range(spec.rank)]
    if channels_last:
        order = [0, *range(2, spec.rank), 1]
    found: dict[int, Any] = {}
    step: Any = 1
    for d in reversed(order):
        found[d] = step
        size = spec.shape[d]
        if d != order[0]:
            step = step * size
    return tuple(found[d] for d in range(spec.rank))


def takes(e: Engine, m: Match) -> bool:
    """Whether an engine can quantize to the match's limits."""
    target = target_of(m.get("quantize"))
    if target is None or e.limits:
        return True
    info = torch.iinfo(target.dtype)
    return (target.low, target.high) == (info.min, info.max)


def _pays(e: Engine, m: Match, b: Builder) -> bool:
    """Whether this engine takes the match. Each engine is asked with the match that it would fuse, so with a shape of its own. The
    last able engine takes what the others declined, unless floats are faster."""
    able = [o for o in present() if takes(o, m)]
    if e not in able:
        return False
    found = fastest(b.ctx, shape_of(m, b), able, spec_of(m.anchor.out).dtype)
    last = b.ctx.options.get("engine", "auto") == "auto" and e == able[-1]
    return found == e.name or (last and found != engines.FLOATS)


def shape_of(m: Match, b: Builder) -> Product | Convolution:
    """Return the shape of a match, with hints for symbolic sizes."""
    op, x, w = m.anchor, static_input(m.anchor, b.graph), weight_of(m.anchor.arg("weight"), b.graph)
    assert x is not None and w is not None
    xs, ws = (tuple(map(hint, spec_of(v).shape)) for v in (x.value, w.value))
    types = spec_of(x.value).dtype, spec_of(m.out).dtype, _type_of_residual(m, b)
    if op.op == "linear":
        rows = spec_of(x.value).numel_hint() // max(xs[-1], 1)
        return Product(rows, ws[1], ws[0], *types)
    stride, padding, dilation, groups = geometry_of(op)
    return Convolution(xs, ws, stride, padding, dilation, groups, *types)


def _type_of_residual(m: Match, b: Builder) -> torch.dtype | None:
    """Return the type in which a match's residual is read."""
    found = residual_of(m)
    if found is None:
        return None
    q = dequantized(found, b.graph)
    return spec_of(q.value if isinstance(q, Quantized) and q.static else found).dtype


def geometry_of(op: OpView) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]:
    """Return stride, padding, dilation and groups of a convolution."""
    return tuple(op.arg("stride")), tuple(op.arg("padding")), tuple(op.arg("dilation")), op.arg("groups")


def _write(e: Engine, m: Match, b: Builder) -> None:
    op, x, w = m.anchor, static_input(m.anchor, b.graph), weight_of(m.anchor.arg("weight"), b.graph)
    assert x is not None and w is not None
    weight, scale = centered(w, b)
    given = (b.any_strides(x.value), None, scale, bias_of(op, b), float(x.scale), x.zero_point)
    after = epilogue(m, x.value, b)
    if e.adds is not None and after[0] is not None:
        after = _summand(after, m, b)
    if op.op == "linear":
        rest = (b.prepare(e.pack_linear, weight), *given[2:], *after)
        emit_rows(e.linear, x.value, rest, m, b)
    else:
        kernel = tuple(spec_of(w.value).shape[2:])
        geometry = geometry_of(op)
        unsigned = x.zero_point + (128 if spec_of(x.value).dtype is torch.int8 else 0)  # oneDNN's operator multiplies uint8
        shape = tuple(map(hint, spec_of(x.value).shape))
        rest = geometry[-1:] if e.name == "core" else (scale, float(x.scale), unsigned, *geometry, shape)
        x_ref, geometry = _images(x, geometry, b) if e.name == "core" else (given[0], geometry)
        args = (x_ref, b.prepare(e.pack_conv, weight, *rest), *given[2:], kernel, *geometry, *after)
        target = e.conv if after[0] is None else e.conv_sum
        b.library(target, *args, out=m.out, stride=result_strides(m.out, channels_last=True), op=op)
        b.close_call(m.ops)
    note(m, b, f"int8 {op.op}, {e.name}")


def _images(x: Quantized, geometry: tuple[Any, ...], b: Builder) -> tuple[Ref | None, tuple[Any, ...]]:
    """Return the input of the core's convolution and its geometry: the core pads, and reads channels-last images."""
    images, (stride, padding, *rest) = x.value, geometry
    if (padded := before_padding(x, b.graph)) is not None:
        images, more = padded
        padding = tuple(own + p for own, p in zip((*padding, *padding), more, strict=True))
    spec = b.spec(images)
    if spec.static and spec.shape[1] != 1 and spec.stride[1] != 1:
        images = b.channels_last(images)
    return b.any_strides(images), (stride, padding, *rest)


def result_strides(value: Value, channels_last: bool = False) -> tuple[int, ...] | None:
    spec = spec_of(value)
    return strides_of(spec, channels_last) if is_static(spec.shape[1:]) else None


def centered(w: Weight, b: Builder) -> tuple[Ref, Ref]:
    """Return the weight minus its zero points, and one fp32 scale per index of its first dimension."""
    n = spec_of(w.value).shape[0]
    weight, zero, scale = b.exact(w.value), w.zero_point, w.scale
    if isinstance(zero, Value):
        zero = b.exact(zero)
    elif zero:
        zero = b.prepare("aten::full.default", (1,), zero, dtype=torch.int32)
    else:
        zero = None
    if not isinstance(scale, Value):
        scale = b.prepare("aten::new_full.default", weight, (1,), float(scale), dtype=torch.float32)
    else:
        scale = b.exact(scale)
    return b.prepare(name("center"), weight, zero), b.prepare(name("scales"), scale, n)


def bias_of(op: OpView, b: Builder) -> Ref | None:
    """Return the bias in fp32."""
    bias = op.arg("bias")
    if bias is None:
        return None
    ref = b.exact(bias)
    return (
        ref if spec_of(bias).dtype is torch.float32 else b.prepare("aten::_to_copy.default", ref, dtype=torch.float32)
    )


def epilogue(m: Match, x: Value, b: Builder) -> tuple[Any, ...]:
    """Return residual, post-op and quantization of a result computed from `x`, as operator arguments."""
    found, target, post = residual_of(m), target_of(m.get("quantize")), post_of(m.get("unary"))
    assert post is not None
    residual = (None, 1.0, 0) if found is None else _residual(found, x, m, b)
    if target is None:
        return (*residual, *post, spec_of(m.out).dtype, 1.0, 0, 0, 0)
    return (*residual, *post, target.dtype, float(target.scale), target.zero_point, target.low, target.high)


def _residual(value: Value, x: Value, m: Match, b: Builder) -> tuple[Any, ...]:
    """Return the residual with scale and zero point; a dequantized one is read in 8 bits."""
    q = dequantized(value, b.graph)
    if isinstance(q, Quantized) and q.static:
        return beside_rows(q.value, x, m, b), float(q.scale), q.zero_point
    return beside_rows(value, x, m, b), 1.0, 0


def _summand(after: tuple[Any, ...], m: Match, b: Builder) -> tuple[Any, ...]:
    """Return an epilogue with its residual in the result's type, for oneDNN. Its convolution overwrites it, so it is copied; a pass
    over plans drops the copy where nobody reads the original later."""
    ref, scale, zero, *rest = after
    held, out, made = _type_of_residual(m, b), spec_of(m.out).dtype, b.ctx.value(None)
    if held is not out and held in BYTES and out in BYTES:
        b.call(name("other_sign"), ref, out=made, op=m.anchor)
        return Ref(made.id), scale, zero + (128 if out is torch.uint8 else -128), *rest
    if m.anchor.op == "linear":
        return after
    b.append(Call("aten::clone.default", (ref,), (made.id,), (("memory_format", torch.channels_last),), op_id=m.anchor.id))
    return Ref(made.id), scale, zero, *rest


def note(m: Match, b: Builder, text: str) -> None:
    """Note for reports how a match is computed."""
    b.notes[m.anchor.id] = " + ".join([text, *(p.op for p in m.ops if p is not m.anchor)])
    for p in m.ops:
        if p is not m.anchor:
            b.notes[p.id] = f"in the call of {m.anchor.op}"


def _adds(e: Engine, m: Match, b: Builder) -> bool:
    """Whether there is a residual that this engine adds, which adds only some."""
    return static_when(m, b) and m.get("add") is not None and e.adds is not None and e.adds(shape_of(m, b))


def _rows(e: Engine, anchor: str) -> Iterator[Row]:
    """An engine that adds only some residuals has a row for those, and one for products whose residual stays outside."""
    rule = f"int8.{anchor}.{e.name}"
    rest: dict[str, Any] = {"pays": partial(_pays, e), "write": partial(_write, e), "note": f"int8 {anchor}"}

    def matched(rule: str, posts: Sequence[str], residual: bool) -> Chain:
        def among(op: OpView) -> Any:
            found = post_of(op)
            return found if found is not None and found[0] in posts else None

        return product(anchor, rule, among, UNARY, residual=residual, views=anchor == "linear")

    if e.adds is not None:
        yield Row(f"{rule}.sum", matched(f"{rule}.sum", e.posts_of_sums, True), when=partial(_adds, e), **rest)
    yield Row(rule, matched(rule, e.posts, e.adds is None), when=static_when, **rest)


ROWS: tuple[Row, ...] = tuple(
    row for e in ENGINES if e.absent() is None for anchor in ("linear", "conv") for row in _rows(e, anchor)
)
"""The rewrite rows, in the order in which they are tried."""
