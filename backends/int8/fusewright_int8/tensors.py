"""Rewrite rows for models quantized by torchao's `quantize_` (version 2 of its configurations). Its tensors emit `_int_mm` between
arithmetic that quantizes, or a product with a widened weight, instead of q/dq ops.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from fusewright.interface import OpView, Value, hint
from fusewright.toolkit.region.builder import Builder
from fusewright.toolkit.region.graph import RegionGraph, spec_of
from fusewright.toolkit.region.pattern import Match, chain
from fusewright.toolkit.region.quantized import before_casts
from fusewright.toolkit.region.rewrite import Row
from fusewright_int8.engines import ENGINES, Engine, Product, sums_pay
from fusewright_int8.floats import EPS, FLOATS, FloatInput, fastest_dynamic, reads
from fusewright_int8.lowerings import emit_rows, note, post_of, rows_fit
from fusewright_int8.operators import name
from fusewright_int8.run import native


@dataclass
class Trail:
    """Walks forward along ops, each the only reader of the result before it."""

    graph: RegionGraph
    value: Value
    ops: list[OpView] = field(default_factory=list)

    def step(self, op: str, fits: Callable[[OpView], bool] = lambda op: True) -> OpView | None:
        """Advance to the next op and return it, if it has this name and fits; else return None and stay."""
        user = self.graph.free_user(self.value)
        if user is None or user.op != op or not fits(user):
            return None
        self.ops.append(user)
        self.value = user.out
        return user

    def other(self, op: OpView) -> Value | None:
        """Return the operand of a binary op that is not the current value."""
        found = [v for v in op.inputs() if v != self.value]
        return found[0] if len(found) == 1 else None


def _back(value: Any, graph: RegionGraph, *names: str) -> OpView | None:
    """Return the op that produces a value if it has one of these names."""
    made = graph.producer(value) if isinstance(value, Value) else None
    return made if made is not None and made.op in names else None


def _through(value: Value, graph: RegionGraph, *names: str) -> Value:
    """Return a value as it was before unary ops of these names."""
    while (made := _back(value, graph, *names)) is not None:
        value = made.args[0]  # type: ignore[assignment]
    return value


def _zero(value: Any, graph: RegionGraph) -> bool:
    made = _back(_through(value, graph, "cast", "view"), graph, "full", "full_like") if isinstance(value, Value) else None
    return (made is not None and made.arg("fill_value") == 0) or value == 0


def _symmetric_scale(scale: Value, graph: RegionGraph) -> Value | None:
    """Return the tensor whose rows' largest magnitudes determine `scale`, or None if it was computed otherwise."""
    clamp = _back(_through(scale, graph, "cast"), graph, "clamp")
    div = (
        _back(clamp.arg("self"), graph, "div")
        if clamp is not None and clamp.arg("min") == EPS["row_symmetric"]
        else None
    )
    top = _back(div.arg("self"), graph, "maximum") if div is not None and div.arg("other") == 127.5 else None
    neg = _back(top.arg("self"), graph, "neg") if top is not None else None
    low = _back(neg.arg("self"), graph, "minimum") if neg is not None else None
    high = _back(top.arg("other"), graph, "maximum") if top is not None else None
    if low is None or high is None or not (_zero(low.arg("other"), graph) and _zero(high.arg("other"), graph)):
        return None
    least, most = _back(low.arg("self"), graph, "amin"), _back(high.arg("self"), graph, "amax")
    if least is None or most is None or least.arg("self") != most.arg("self"):
        return None
    x: Value = least.arg("self")
    last = (spec_of(x).rank - 1,)
    return x if tuple(least.arg("dim")) in (last, (-1,)) and tuple(most.arg("dim")) in (last, (-1,)) else None


def _affine_rows(value: Value, graph: RegionGraph) -> tuple[Value, Value, bool] | None:
    """Match rows quantized by `quantize_affine` without zero points: return input, scale and whether 128 was added."""
    shifted = spec_of(value).dtype == torch.uint8
    if shifted:
        add = _back(_through(value, graph, "cast"), graph, "add")
        if add is None or add.arg("other") != 128:
            return None
        value = _through(add.arg("self"), graph, "cast", "view") if _is_int32(add) else value
        made = graph.producer(value)
    else:
        value = _through(value, graph, "view")
        made = _back(value, graph, "cast")
        value = made.arg("self") if made is not None else value
        made = graph.producer(value)
    if made is None or made.op != "clamp" or (made.arg("min"), made.arg("max")) != (-128, 127):
        return None
    moved = _back(made.arg("self"), graph, "add")
    rounded = (
        _back(moved.arg("self"), graph, "round") if moved is not None and _zero(moved.arg("other"), graph) else None
    )
    scaled = _back(rounded.arg("self"), graph, "mul") if rounded is not None else None
    factor = _back(scaled.arg("other"), graph, "reciprocal") if scaled is not None else None
    if scaled is None or factor is None:
        return None
    return scaled.arg("self"), factor.arg("self"), shifted


def _is_int32(op: OpView) -> bool:
    return spec_of(op.out).dtype == torch.int32


def _matrix(value: Value, b: Builder) -> Value | None:
    """Return the constant int8 weight [n, k] that `value` transposes, or None."""
    made = _back(value, b.graph, "t", "transpose", "permute")
    found: Any = made.args[0] if made is not None else None
    fits = found is not None and spec_of(found).dtype == torch.int8 and b.is_const(found) and spec_of(found).static
    return found if fits else None


def _compensated(trail: Trail, weight: Value) -> bool:
    """Step over the subtraction that compensates the shift by 128; return whether it is there."""
    op = trail.step("sub")
    times = _back(op.arg("other"), trail.graph, "mul") if op is not None else None
    sums = _back(times.arg("self"), trail.graph, "sum") if times is not None and times.arg("other") == 128 else None
    return (
        sums is not None and _through(sums.arg("self"), trail.graph, "t") == weight and tuple(sums.arg("dim")) == (0,)
    )


def _columns(trail: Trail, op: OpView | None, n: int) -> Value | None:
    """Return the constant with one number per column that a step multiplies by or adds, or None."""
    if op is None:
        return None
    before = trail.ops[-2].out if len(trail.ops) > 1 else None
    others = [v for v in op.inputs() if v != before and v.spec is not None and v.spec.shape == (n,)]
    return others[0] if others else None


@dataclass(frozen=True)
class Affine:
    """A matched torchao product: input and rule, weight, scales, bias."""

    x: Value
    weight: Value
    scale: Value
    bias: Value | None


def _finish(trail: Trail, n: int, b: Builder) -> tuple[Value | None, OpView | None]:
    """Step over a view, the bias, a cast and a unary op; return the bias and the unary op."""
    trail.step("view", lambda op: spec_of(op.out).shape[-1] == n)

    def adds_bias(op: OpView) -> bool:
        return op.arg("alpha") == 1 and any(b.is_const(v) and spec_of(v).shape == (n,) for v in op.inputs())

    add = trail.step("add", adds_bias)
    bias = _columns(trail, add, n)
    trail.step("cast", lambda op: spec_of(op.out).dtype in FLOATS)
    unary = trail.step("relu") or trail.step("gelu") or trail.step("silu")
    return bias, unary


def _int_mm(m: Match, b: Builder) -> Match | None:
    op = m.anchor
    weight, rows = _matrix(op.arg("mat2"), b), _affine_rows(op.arg("self"), b.graph)
    if weight is None or rows is None or b.graph.phase != "infer":
        return None
    (x, scale, shifted), n, trail = rows, spec_of(weight).shape[0], Trail(b.graph, op.out)
    if (
        _symmetric_scale(scale, b.graph) != x
        or (shifted and not _compensated(trail, weight))
        or trail.step("cast") is None
    ):
        return None
    by_row = trail.step("mul")
    if by_row is None or not any(_through(v, b.graph, "view") == scale for v in by_row.inputs()):
        return None
    trail.step("cast")
    scales = _columns(trail, trail.step("mul"), n)  # type: ignore[arg-type]
    if scales is None or not b.is_const(scales):
        return None
    return _affine_match(m, trail, x, weight, scales, b)


def _affine_match(m: Match, trail: Trail, x: Value, weight: Value, scales: Value, b: Builder) -> Match | None:
    bias, unary = _finish(trail, spec_of(weight).shape[0], b)  # type: ignore[arg-type]
    found = m.with_ops(*trail.ops, affine=Affine(x, weight, scales, bias), unary=unary)
    fits = spec_of(found.out).dtype in FLOATS and spec_of(x).dtype in FLOATS and b.is_const(bias)
    return found if fits and rows_fit(found.out, x) else None


def _affine_pays(e: Engine, m: Match, b: Builder) -> bool:
    found: Affine = m["affine"]
    return fastest_dynamic(e, FloatInput(found.x, "row_symmetric"), spec_of(found.weight).shape, b)


def _affine_args(pack: str, m: Match, b: Builder, *rule: str) -> tuple[Any, ...]:
    found: Affine = m["affine"]
    post = post_of(m.get("unary"))
    assert post is not None
    scale = b.prepare(name("scales"), b.exact(found.scale), spec_of(found.weight).shape[0])
    packed = b.prepare(pack, b.prepare(name("center"), b.exact(found.weight), None))
    bias = None if found.bias is None else b.exact(found.bias)
    if found.bias is not None and spec_of(found.bias).dtype != torch.float32:
        bias = b.prepare("aten::_to_copy.default", bias, dtype=torch.float32)
    return packed, scale, bias, *rule, None, *post, spec_of(m.out).dtype


def _affine_write(e: Engine, m: Match, b: Builder) -> None:
    emit_rows(e.dynamic, m["affine"].x, _affine_args(e.pack_linear, m, b, "row_symmetric"), m, b)
    note(m, b, f"int8 linear, {e.name}, input quantized by row")


def _sums(m: Match, b: Builder) -> Match | None:
    """Match integer sums that become fp32, however rows were quantized (by tensor, with zero points, in fp16): the core rounds
    exact sums as a cast does."""
    rows, matrix, trail = m.anchor.arg("self"), m.anchor.arg("mat2"), Trail(b.graph, m.anchor.out)
    if spec_of(rows).dtype == torch.uint8:  # with VNNI and no AMX
        add = _back(_through(rows, b.graph, "cast"), b.graph, "add")
        if add is None or add.arg("other") != 128 or not _compensated(trail, _through(matrix, b.graph, "t")):
            return None
        widened = _back(add.arg("self"), b.graph, "cast")
        rows = rows if widened is None else widened.arg("self")
    x, weight = spec_of(rows), spec_of(matrix)
    known = weight.static and b.is_const(matrix) and {x.dtype, weight.dtype} == {torch.int8}
    if not known or 0 in (*x.shape, *weight.shape) or weight.shape[0] > native.MOST_K:  # type: ignore[operator]
        return None
    if trail.step("cast", lambda op: spec_of(op.out).dtype is torch.float32) is None:
        return None
    found = m.with_ops(*trail.ops, rows=rows)
    return found if rows_fit(found.out, rows) else None


def _sums_pay(m: Match, b: Builder) -> bool:
    (k, n), rows = spec_of(m.anchor.arg("mat2")).shape, spec_of(m["rows"]).shape[0]
    return sums_pay(b.ctx, Product(hint(rows), int(k), int(n), torch.int8, torch.float32))  # type: ignore[arg-type]


def _sums_write(m: Match, b: Builder) -> None:
    x, weight = m["rows"], m.anchor.arg("mat2")
    packed = b.prepare(name("pack_linear"), b.prepare("aten::t.default", b.exact(weight)))
    ones = b.prepare("aten::full.default", (spec_of(weight).shape[1],), 1.0, dtype=torch.float32)
    emit_rows(name("linear"), x, (packed, ones, None, 1.0, 0, None, 1.0, 0, "none", (), torch.float32, 1.0, 0, 0, 0), m, b)
    note(m, b, "int8 product, core")


def _widened(m: Match, b: Builder) -> Match | None:
    op = m.anchor
    cast = _back(before_casts(op.arg("mat2"), b.graph), b.graph, "cast")
    weight = _matrix(cast.arg("self"), b) if cast is not None else None
    if weight is None or spec_of(op.out).dtype not in FLOATS or b.graph.phase != "infer":
        return None
    trail = Trail(b.graph, op.out)
    trail.step("cast", lambda op: spec_of(op.out).dtype in FLOATS)
    scales = _columns(trail, trail.step("mul"), spec_of(weight).shape[0])  # type: ignore[arg-type]
    if scales is None and trail.ops:
        first = trail.ops[-1]
        others = [v for v in first.inputs() if v != op.out]
        scales = others[0] if others and spec_of(others[0]).shape == spec_of(weight).shape[:1] else None
    if scales is None or not b.is_const(scales):
        return None
    given = before_casts(op.arg("self"), b.graph)
    x = _through(given, b.graph, "view") if spec_of(given).rank == 2 else given
    x = x if spec_of(x).shape[-1:] == spec_of(given).shape[-1:] else given
    return _affine_match(m, trail, x, weight, scales, b)


def _widened_pays(m: Match, b: Builder) -> bool:
    return reads(m["affine"].x, spec_of(m["affine"].weight).shape, b)


def _widened_write(m: Match, b: Builder) -> None:
    emit_rows(name("weight_linear"), m["affine"].x, _affine_args(name("pack_linear"), m, b), m, b)
    note(m, b, "int8 weight, core")


ROWS: tuple[Row, ...] = (
    *(
        Row(
            f"int8.int_mm.{e.name}", chain("int_mm"), extend=_int_mm, pays=partial(_affine_pays, e),
            write=partial(_affine_write, e), note="int8 linear",
        )
        for e in ENGINES if e.absent() is None
    ),
    Row("int8.int_mm.sums", chain("int_mm"), extend=_sums, pays=_sums_pay, write=_sums_write, note="int8 product"),
    Row("int8.widened", chain("mm"), extend=_widened, pays=_widened_pays, write=_widened_write, note="int8 weight"),
)  # fmt: skip
"""The rewrite rows, in the order in which they are tried."""
