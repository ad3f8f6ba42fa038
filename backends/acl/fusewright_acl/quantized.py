"""Products with int8 weights by our own kernels, from q/dq graphs, torchao's `_int_mm` and weight-only linears.

An int8 product is `Int8Linear`, bitwise equal to the graph with a correctly rounded product; loop kernels compute quantization
before it and all that follows. A few float rows times an int8 weight are `Gemv`, which reads the 8-bit weight directly.
Products that no row takes stay in floats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusewright.interface import OpView, Size, Value, is_static
from fusewright.plan.ir import Call, Ref
from fusewright.toolkit.backend.candidates import Lazy, Thunk
from fusewright.toolkit.ir.types import from_torch
from fusewright.toolkit.region.builder import Builder
from fusewright.toolkit.region.graph import RegionGraph, spec_of
from fusewright.toolkit.region.pattern import Match, chain
from fusewright.toolkit.region.quantized import Quantized, Rows, Weight, before_views, dequantized, weight_of
from fusewright.toolkit.region.rewrite import Row
from fusewright.toolkit.region.weight_only import behind, widened, widened_linear
from fusewright_acl.int8 import COLUMNS, PACK, SUMS
from fusewright_acl.rows import is_row_major, row_count, row_major, rows_fit
from fusewright_cpu.kernels.arm.int8_linear import MOST_K, MOST_K_WITH_ZEROS
from fusewright_cpu.kernels.by_hand import MOST_GEMV_ROWS, Gemv, Int8Conv, Int8Linear, form_of
from fusewright_cpu.run.jit import compile_kernels
from fusewright_cpu.run.sources import hash_of
from fusewright_cpu.target import host_target

FLOATS = (torch.float32, torch.bfloat16)
I32 = torch.int32


# -- a linear between dequantized operands


def why_not(op: OpView, graph: RegionGraph) -> str | None:
    """Return why a linear with an int8 weight stays in floats; None if our kernel takes it, or if it has no such weight."""
    w = weight_of(op.arg("weight"), graph)
    x = dequantized(op.arg("input"), graph, views=True)
    if w is None:
        return None if x is None else "its weight is no constant of int8"
    return "its input is not quantized" if x is None else _linear_reason(op, x, w, graph)


def _linear_reason(op: OpView, x: Quantized | Rows, w: Weight, graph: RegionGraph) -> str | None:
    shape = spec_of(w.value).shape
    if not is_static(shape) or 0 in (*shape, *spec_of(x.value).shape):
        return "empty, or a weight of symbolic size"
    if why := product_reason(op, w, int(shape[1]), graph):  # type: ignore[arg-type]
        return why
    if not is_row_major(spec_of(op.out)) or not rows_fit(spec_of(x.value)):
        return "an input of symbolic size or a result that is not row-major"
    return None if _scales_fit(x) else "scales of its input that are neither one nor one for each row"


def product_reason(op: OpView, w: Weight, taps: int, graph: RegionGraph) -> str | None:
    """Return why a linear or convolution with sums of `taps` products is refused, for reasons common to both, or None."""
    most = MOST_K_WITH_ZEROS if has_zeros(w) else MOST_K
    if not form_here():
        return "the CPU multiplies no int8"
    if taps > most:
        return f"sums of {taps} products do not fit int32; {most} do"
    if isinstance(w.scale, Value) and w.axis != 0:
        return "a scale for each input of the weight, not for each output"
    if not (isinstance(w.scale, Value) or w.scale):
        return "a scale of 0"
    if not graph.is_const(op.arg("bias")):
        return "a bias that is computed"
    return None if spec_of(op.out).dtype in FLOATS else "computed in another type than fp32 and bf16"


def form_here() -> str:
    """Return the instruction that multiplies int8 on this machine, or ""."""
    return form_of(host_target())


def has_zeros(w: Weight) -> bool:
    """Whether a weight's zero points must be subtracted; a tensor of them may hold any value."""
    return isinstance(w.zero_point, Value) or bool(w.zero_point)


def _scales_fit(x: Quantized | Rows) -> bool:
    given = [v for v in (x.scale, x.zero_point) if isinstance(v, Value)]
    if isinstance(x, Quantized):
        return all(spec_of(v).numel_hint() == 1 for v in given) and (bool(given) or bool(x.scale))
    return all(spec_of(v).shape == (*spec_of(x.value).shape[:-1], 1) and is_row_major(spec_of(v)) for v in given)


def _is_int8(m: Match, b: Builder) -> bool:
    both = dequantized(m.anchor.arg("input"), b.graph, views=True), weight_of(m.anchor.arg("weight"), b.graph)
    return None not in both and why_not(m.anchor, b.graph) is None


def _write_linear(m: Match, b: Builder) -> None:
    op, x, w = m.anchor, dequantized(m.anchor.arg("input"), b.graph, views=True), weight_of(m.anchor.arg("weight"), b.graph)
    assert x is not None and w is not None
    n, k = (int(s) for s in spec_of(w.value).shape)  # type: ignore[arg-type]
    bias, weight, per_row = op.arg("bias"), b.exact(w.value), isinstance(x, Rows)
    form = form_here()
    kinds = from_torch(spec_of(x.value).dtype), from_torch(spec_of(op.out).dtype)
    kernel = Int8Linear(*kinds, form, bias is not None, has_zeros(w))
    given: list[Ref | Value] = [row_major(x.value, b), b.prepare(PACK, weight, form), *numbers(op, x, w, b)]
    m_ = row_count(spec_of(x.value).shape[:-1])
    launch(kernel, given, (m_, n, k, int(per_row)), op.out, m, b)
    b.notes[op.id] = f"int8 product ({form}), input quantized by {'row' if per_row else 'tensor'}"


def numbers(op: OpView, x: Quantized | Rows, w: Weight, b: Builder, groups: int = 1) -> list[Ref]:
    """Return the int8 kernels' arguments after the weight: scales, sums, zero points and bias (see `Int8Product`)."""
    n, weight, bias = int(spec_of(w.value).shape[0]), b.exact(w.value), op.arg("bias")  # type: ignore[arg-type]
    return [
        _columns(w.scale, n, torch.float32, b, groups), b.prepare(SUMS, weight, groups),
        _per_row(x.scale, torch.float32, b), _per_row(x.zero_point, I32, b),
        *([_columns(w.zero_point, n, I32, b, groups)] if has_zeros(w) else []),
        *([_columns(bias, n, torch.float32, b, groups)] if bias is not None else []),
    ]  # fmt: skip


def _columns(value: Any, n: int, dtype: torch.dtype, b: Builder, groups: int = 1) -> Ref:
    """Expand a number or constant to one per column."""
    given = b.exact(value) if isinstance(value, Value) else b.prepare("aten::full.default", (1,), value, dtype=dtype)
    return b.prepare(COLUMNS, given, n, dtype, groups)


def _per_row(value: Any, dtype: torch.dtype, b: Builder) -> Ref:
    """Return a row-wise scale or zero point, given a number or a value."""
    if not isinstance(value, Value):
        return b.prepare("aten::full.default", (1,), value, dtype=dtype)
    if spec_of(value).dtype is dtype:
        return b.exact(value)
    made = b.ctx.value(None)
    b.append(Call("aten::_to_copy.default", (b.exact(value),), (made.id,), (("dtype", dtype),)))
    return Ref(made.id)


def launch(
    kernel: Int8Linear | Int8Conv | Gemv, given: Sequence[Ref | Value], sizes: tuple[Any, ...], out: Value, m: Match, b: Builder
) -> None:
    """Launch a kernel that computes the whole match."""
    inputs = [v if isinstance(v, Value) else Value(v.id, None) for v in given]
    b.launch(kernel, hash_of(kernel), inputs, sizes, (), out=out, op=m.anchor)
    b.close_call(m.ops)


# -- torchao's integer product


def _int_mm(m: Match, b: Builder) -> bool:
    x, w = spec_of(m.anchor.arg("self")), spec_of(m.anchor.arg("mat2"))
    types = {x.dtype, w.dtype} == {torch.int8} and is_row_major(spec_of(m.anchor.out))
    fits = w.static and not {0} & {*x.shape, *w.shape} and int(w.shape[0]) <= MOST_K  # type: ignore[arg-type]
    fits = fits and rows_fit(x)
    return types and fits and b.is_const(m.anchor.arg("mat2")) and bool(form_here())


def _write_int_mm(m: Match, b: Builder) -> None:
    op, form = m.anchor, form_here()
    x, (k, n) = op.arg("self"), spec_of(op.arg("mat2")).shape
    packed = b.prepare(PACK, b.prepare("aten::t.default", b.exact(op.arg("mat2"))), form)
    launch(Int8Linear("i8", "i32", form), [row_major(x, b), packed], (row_count(spec_of(x).shape[:1]), n, k, 0), op.out, m, b)
    b.notes[op.id] = f"int8 product ({form})"


# -- a few float rows with an int8 weight


def _few(
    m: Match, x: Value, w: Value, shape: Sequence[Size], bias: Value | None, b: Builder, zeros: bool = False
) -> Gemv | None:
    """Return the kernel for these rows and the weight [n, k] if it exists and measures faster than a widened weight."""
    spec, out = b.spec(x), spec_of(m.out)
    if not (spec.static and is_static(shape) and out.static and is_row_major(out)) or 0 in (*spec.shape, *shape):
        return None
    n, k = (int(s) for s in shape)  # type: ignore[arg-type]
    rows = spec.numel_hint() // k
    if rows > MOST_GEMV_ROWS or spec.dtype is not out.dtype or out.dtype not in FLOATS or not b.is_const(w):
        return None
    kernel = Gemv(rows, from_torch(spec.dtype), "i8", "" if bias is None else from_torch(spec_of(bias).dtype), zeros)
    return None if kernel.refused(host_target()) or not _reading_pays(kernel, n, k, b) else kernel


def _reading_pays(kernel: Gemv, n: int, k: int, b: Builder) -> bool:
    """Whether reading an 8-bit weight is faster than reading one widened beforehand."""

    def timed(weight: str) -> Any:
        def make() -> Thunk:
            one = Gemv(kernel.rows, kernel.dtype, weight, zeros=kernel.zeros and weight == "i8")
            launcher, dtype = compile_kernels([one]).launcher(one), torch.bfloat16 if kernel.dtype == "bf16" else torch.float32
            w = torch.ones(n, k, dtype=torch.int8 if weight == "i8" else dtype)
            of_rows = [torch.ones(n)] * ((weight == "i8") + one.zeros)
            given = [torch.ones(kernel.rows, k, dtype=dtype), w, *of_rows, torch.empty(kernel.rows, n, dtype=dtype)]
            return lambda: launcher(given, (n, k))

        return make

    candidates = {"int8": timed("i8"), "float": timed(kernel.dtype)}
    return b.ctx.choose(f"acl int8 weight {kernel.name} {n}x{k}", Lazy(candidates)) == "int8"


def _weight_only(m: Match, b: Builder) -> Match | None:
    op, w = m.anchor, weight_of(m.anchor.arg("weight"), b.graph)
    x = before_views(op.arg("input"), b.graph)
    if w is None or (isinstance(w.scale, Value) and w.axis != 0) or b.is_const(op.arg("input")):
        return None
    if dequantized(x, b.graph) is not None or not (isinstance(w.scale, Value) or w.scale):
        return None
    kernel = _few(m, x, w.value, spec_of(w.value).shape, op.arg("bias"), b, has_zeros(w))
    return m.with_ops(kernel=kernel, x=x, w=w) if kernel is not None else None


def _write_weight_only(m: Match, b: Builder) -> None:
    w, op = m["w"], m.anchor
    zeros = (w.zero_point,) if has_zeros(w) else ()
    _write_few(m, m["x"], b.exact(w.value), spec_of(w.value).shape, (w.scale, *zeros), op.arg("bias"), b)


def _write_few(
    m: Match, x: Value, weight: Ref, shape: Sequence[Size], of_rows: Sequence[Any], bias: Value | None, b: Builder
) -> None:
    """Emit the kernel. `of_rows`: scale and optional zero point, each one per weight row or one for all."""
    n, k = (int(s) for s in shape)  # type: ignore[arg-type]
    more = [] if bias is None else [b.exact(bias)]
    columns = [_columns(v, n, torch.float32, b) for v in of_rows]
    launch(m["kernel"], [row_major(x, b), weight, *columns, *more], (n, k), m.out, m, b)
    b.notes[m.anchor.id] = "product of few rows in one kernel, weight of int8"


def _widened(m: Match, b: Builder) -> Match | None:
    """Match `mm(x, cast(t(w)))` with its scale and bias."""
    if not spec_of(m.anchor.arg("self")).static:
        return None
    found = widened(m, b.graph, MOST_GEMV_ROWS)
    if found is None or not all(map(b.is_const, behind(found).values())):
        return None
    k, n = spec_of(m["weight"]).shape
    kernel = _few(found, m.anchor.arg("self"), m["weight"], (n, k), behind(found).get("bias"), b)
    return found.with_ops(kernel=kernel) if kernel is not None else None


def _write_widened(m: Match, b: Builder) -> None:
    found, (k, n) = behind(m), spec_of(m["weight"]).shape
    rows = b.prepare("aten::t.default", b.exact(m["weight"]))
    _write_few(m, m.anchor.arg("self"), rows, (n, k), (found.get("scale", 1.0),), found.get("bias"), b)


ROWS = (
    Row("acl.int8.linear", chain("linear"), when=_is_int8, write=_write_linear, note="int8 product"),
    Row("acl.int8.int_mm", chain("int_mm"), when=_int_mm, write=_write_int_mm, note="int8 product"),
    Row("acl.int8.weight_only", chain("linear"), extend=_weight_only, write=_write_weight_only, note="int8 weight"),
    Row("acl.int8.widened", widened_linear("acl.int8"), extend=_widened, write=_write_widened, note="int8 weight"),
)  # fmt: skip
"""The rewrite rows, in the order in which they are tried, before those of float products."""
