"""GEMV as reduction kernels: products of few rows with a large matrix, as in decoding, where time goes into reading weights.

The same holds for a batch of vectors, each with a matrix that it gathers (`bmm(w[experts], x)`, the experts of a decoded token):
a library's product needs a copy of the gathered matrices, a sum reads each in its place.

`linear(x, w)` becomes `sum(x[:, None, :] * w, -1)`, whose elementwise product is never stored: the fuser builds one kernel of
it and its epilogue (bias, residual, activation), and one kernel for several products of the same rows. If a norm scales the
rows (`x = h * g * rsqrt(mean(h * h) + eps)`), the kernel does not wait for it: factors that are constant along the row move
out of the sum and are computed in the same kernel, from the row that it reads anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch

from fusewright import ops
from fusewright.interface import CompileContext, OpView, TensorSpec, Value
from fusewright.ops import Kind
from fusewright.toolkit.region.builder import contiguous_strides, metadata
from fusewright.toolkit.region.graph import RegionGraph, made_of, spec_of
from fusewright.toolkit.region.pattern import ANY, Match, find, p, siblings
from fusewright.toolkit.region.rewrite import Row, rewrite

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class Bounds:
    """Limits for using sums instead of a library's product: the most rows, the fewest elements of the weight, and the shortest
    and longest rows of the weight; a kernel holds a row in registers."""

    rows: int
    weights: int
    shortest: int = 256
    longest: int = 1 << 15

    def hold(self, terms: int, weights: int) -> bool:
        """Whether a matrix of so many elements, of which so many are added up for a result, is within the bounds."""
        return weights >= self.weights and self.shortest <= terms <= self.longest


FLOATS = (torch.float32, torch.bfloat16, torch.float16)

SHAPED = frozenset({"view", "reshape", "alias", "unsqueeze", "squeeze"})
"""Ops that preserve the rows of a tensor as long as they preserve its last dimension."""

ALONG = frozenset({"cast", "mul", "div", "neg", "abs", "pow_scalar", "add", "sub", "rsqrt", "sqrt"})
"""Elementwise ops that may be recomputed for a per-row factor."""

GATHERS = frozenset({"index", "index_select", "embedding"})
"""Ops that select matrices by number."""

BETWEEN = SHAPED | {"cast", "mul", "t", "transpose", "permute"}
"""Ops between a gather and the product that a kernel computes as it reads."""

MOST_AGAIN = 12
"""The most ops recomputed for a factor."""


def _none(op: OpView) -> bool:
    return False


def rewrite_products(
    graph: RegionGraph, ctx: CompileContext, bounds: Bounds, other: Callable[[OpView], bool] = _none
) -> None:
    """Rewrite the products of few rows in a region as sums, except those for which `other` holds: they have another kernel."""
    found = (op for op in graph if op.op in PRODUCTS and _reads_weight(op, graph, bounds))
    products = frozenset(op.id for op in found if not other(op))
    if products and rewrite(graph, ROWS, _Sums(graph, ctx, products), ctx.rules):
        graph.sweep(SHAPED | ALONG | {"mean", "sum"})  # ops that only served the rows of those products


def _suits(op: OpView, x: Any, w: Any, bias: Any, bounds: Bounds) -> bool:
    """Whether a product of `x` with the rows of `w`, which may be int8, is bound by reading `w`."""
    if any(v.spec is None or not v.spec.static for v in (x, w, op.out)) or x.spec.dtype not in FLOATS:
        return False
    if spec_of(op.out).dtype != x.spec.dtype or w.spec.dtype not in (x.spec.dtype, torch.int8):
        return False
    if (
        w.spec.rank != 2
        or x.spec.rank < 1
        or not w.spec.shape[1]
        or (bias is not None and bias.spec.dtype != x.spec.dtype)
    ):
        return False
    n, k = w.spec.shape
    rows = x.spec.numel_hint() // k
    dense = w.spec.stride[1] == 1 and w.spec.stride[0] >= k
    return 1 <= rows <= bounds.rows and bounds.hold(k, n * k) and dense


@dataclass(frozen=True)
class _Batch:
    """A batch of `vectors` times `matrices`, summed over dimension `dim` of the matrices."""

    vectors: Value
    matrices: Value
    dim: int

    @staticmethod
    def of(op: OpView) -> _Batch | None:
        a, b = op.arg("self"), op.arg("mat2")
        if any(v.spec is None or not v.spec.static for v in (a, b, op.out)):
            return None
        if dims_of(b)[2] == 1:
            return _Batch(b, a, 2)
        return _Batch(a, b, 1) if dims_of(a)[1] == 1 else None

    def suits(self, graph: RegionGraph, bounds: Bounds) -> bool:
        """Whether the matrices are gathered, large and read only here."""
        shape = dims_of(self.matrices)
        large = bounds.hold(shape[self.dim], shape[1] * shape[2])
        return large and shape[0] > 0 and spec_of(self.matrices).dtype in FLOATS and _gathered(self.matrices, graph)


@dataclass
class _Scaled:
    """Rows as a product of `base`, factors that vary `along` the row, and factors `per_row`."""

    base: Value
    along: list[Value] = field(default_factory=list)
    per_row: list[Value] = field(default_factory=list)


class _Sums:
    """The context of the rewrite rows: the graph, the ids of products of few rows, and values written for one product that
    others may reuse. `made` are the new ops of the current product."""

    def __init__(self, graph: RegionGraph, ctx: CompileContext, products: frozenset[int]) -> None:
        self.graph, self.ctx, self.products = graph, ctx, products
        self.written: set[int] = set()
        self.made: list[OpView] = []
        self.again: dict[tuple[int, Shape], Value] = {}

    def producer(self, value: Value) -> OpView | None:
        """The op that made a value before the rewrite; None for ops that the rewrite wrote."""
        made = self.graph.producer(value)
        return None if made is not None and made.id in self.written else made

    def replace(self, ops: Sequence[OpView]) -> None:
        """Replace products by the ops in `made`."""
        self.graph.replace(ops, self.made)
        self.written.update(op.id for op in self.made)
        self.made = []

    # ---- ops

    def _op(self, name: str, *args: Any, shape: Shape, dtype: torch.dtype = torch.float32, **named: Any) -> Value:
        """Add an op with a result of this type: dense, or a view with the strides of the memory it views."""
        row = ops.OPS[name]
        bound = row.bind(args, named)
        given = tuple(tuple(a) if isinstance(a, list) else a for a in bound.values())
        target = row.target.name()
        op = OpView(0, name, target if "." in target else f"{target}.default", tuple(bound), given, ())
        device = next(v.spec.device for v in op.inputs() if v.spec is not None)
        strides = metadata(row.target, bound, spec_of).stride() if row.kind is Kind.VIEW else contiguous_strides(shape)
        out = self.ctx.value(made_of(op.inputs(), TensorSpec(shape, tuple(strides), dtype, device)))
        self.made.append(replace(op, id=out.id, outs=(out,)))
        return out

    def product(self, rows: _Scaled, weight: Value, bias: Value | None, out: Value, id: int) -> None:
        """Write the ops that make `out`. The one that represents the product in reports gets this id."""
        n, k = dims_of(weight)
        full = (numel(rows.base) // k, n, k)
        v = self._spread(rows.base, full)
        for factor in (*rows.along, weight):  # not cast first: a cast of constants would be stored as a constant, in fp32
            v = self._op("mul", v, factor, shape=full)
        v = self._op("sum", v, [-1], False, shape=full[:2])
        for factor in rows.per_row:
            v = self._op("mul", v, self._per_row(factor, rows.base, full), shape=full[:2])
        if bias is not None:
            v = self._op("add", v, self._wide(bias), shape=full[:2])
        self._finish(v, out, id)

    def batched(self, batch: _Batch, out: Value, id: int) -> None:
        """Write the ops that make `out`, a batch of vectors times gathered matrices."""
        full = dims_of(batch.matrices)
        shape = tuple(1 if d == 3 - batch.dim else s for d, s in enumerate(full))
        x = self._op("reshape", batch.vectors, list(shape), shape=shape, dtype=spec_of(batch.vectors).dtype)
        v = self._op("mul", self._wide(x), batch.matrices, shape=full)
        v = self._op("sum", v, [batch.dim], False, shape=(full[0], full[3 - batch.dim]))
        self._finish(v, out, id)

    def _finish(self, v: Value, out: Value, id: int) -> None:
        """Round a sum of fp32 and shape it, which makes `out`."""
        spec, shape = spec_of(out), dims_of(v)
        shaped = dims_of(out) != shape
        if spec.dtype != torch.float32:
            v = self._op("cast", v, dtype=spec.dtype, shape=shape)
            self.made[-1] = replace(self.made[-1], args=_with_dtype(self.made[-1], spec.dtype))
        self.made[-1] = replace(self.made[-1], id=id, outs=self.made[-1].outs if shaped else (out,))
        if shaped:
            self._op("view", v, list(dims_of(out)), shape=dims_of(out), dtype=spec.dtype)
            self.made[-1] = replace(self.made[-1], outs=(out,))

    def joined(self, rows: _Scaled, group: Sequence[OpView]) -> None:
        """Write one product for several that read the same row: each result is a part of it, with strides of its own."""
        weights, biases = ([op.arg(name) for op in group] for name in ("weight", "bias"))
        dtype, k = spec_of(weights[0]).dtype, dims_of(weights[0])[1]
        n = sum(dims_of(w)[0] for w in weights)
        weight = self._op("cat", tuple(weights), 0, shape=(n, k), dtype=dtype)
        bias = None if biases[0] is None else self._op("cat", tuple(biases), 0, shape=(n,), dtype=dtype)
        whole = self.ctx.value(TensorSpec((n,), (1,), dtype, spec_of(weights[0]).device))
        self.product(rows, weight, bias, whole, self.ctx.value(None).id)
        start = 0
        for op in group:
            stop = start + dims_of(op.out)[-1]
            part = self._op("slice", whole, 0, start, stop, shape=(stop - start,), dtype=dtype)
            self._op("view", part, list(dims_of(op.out)), shape=dims_of(op.out), dtype=dtype)
            self.made[-1] = replace(self.made[-1], id=op.id, outs=(op.out,))
            start = stop

    def transposed(self, weight: Value) -> Value:
        """Undo the transpose of a product's weight: the result has the weight's rows."""
        spec = spec_of(weight)
        rows = self.ctx.value(replace(spec, shape=spec.shape[::-1], stride=spec.stride[::-1]))
        self.made.append(OpView(self.ctx.value(None).id, "t", "aten::t.default", ("self",), (weight,), (rows,)))
        return rows

    # ---- rows

    def _spread(self, v: Value, full: Shape) -> Value:
        """Expand rows [.., K], or one row for all, to fp32 over [M, N, K]; only views, nothing is stored."""
        key = (v.id, full)
        if key not in self.again:
            found, dtype, shape = v, spec_of(v).dtype, (numel(v) // full[2], 1, full[2])
            if dims_of(v) != shape:
                found = self._op("reshape", v, list(shape), shape=shape, dtype=dtype)
            self.again[key] = self._wide(self._op("expand", found, list(full), shape=full, dtype=dtype))
        return self.again[key]

    def _wide(self, v: Value) -> Value:
        """Cast to fp32 if necessary."""
        if spec_of(v).dtype == torch.float32:
            return v
        out = self._op("cast", v, dtype=torch.float32, shape=dims_of(v))
        self.made[-1] = replace(self.made[-1], args=_with_dtype(self.made[-1], torch.float32))
        return out

    def scaled(self, x: Value, m: int, k: int) -> _Scaled:
        """Split `x` into base and factors, if only products of few rows read the scaled values."""
        found = _Scaled(x)
        passed: list[Value] = []
        while (op := self.producer(found.base)) is not None:
            step = self._stripped(op, m, k)
            if step is None:
                break
            passed.append(found.base)
            found.base = step[0]
            found.along += step[1]
            found.per_row += step[2]
        inside = {v.id for v in passed} | {
            v.id for f in found.per_row for op in self._chain(f, found.base).values() for v in op.outs
        }
        return found if found.per_row and all(self._only_for_products(v, inside) for v in passed) else _Scaled(x)

    def _stripped(self, op: OpView, m: int, k: int) -> tuple[Value, list[Value], list[Value]] | None:
        """Peel off one op: return its input, and the factors along and per row that it multiplies by."""
        if op.op in SHAPED or op.op == "cast":
            v = op.arg("self")
            same = dims_of(v)[-1:] == (k,) and numel(v) == m * k and spec_of(v).dtype in FLOATS
            return (v, [], []) if same else None
        if op.op != "mul" or not isinstance(op.arg("other"), Value):
            return None
        for v, factor in (op.args[:2], op.args[1::-1]):
            if not isinstance(v, Value) or not isinstance(factor, Value) or spec_of(factor).dtype not in FLOATS:
                continue
            if dims_of(v)[-1:] != (k,) or numel(v) != m * k:
                continue
            if dims_of(factor)[-1:] == (1,) and numel(factor) == m:
                return v, [], [factor]
            if dims_of(factor) == (k,) and len(dims_of(v)) > 1:
                return v, [factor], []
        return None

    def _only_for_products(self, v: Value, inside: set[int]) -> bool:
        """Whether only products of few rows, and ops that lead to them, read a value."""
        return not self.graph.escapes(v) and all(
            u.id in self.products or u.out.id in inside or (u.op in SHAPED and self._only_for_products(u.out, inside))
            for u in self.graph.users(v)
        )

    def _per_row(self, v: Value, base: Value, full: Shape) -> Value:
        """A per-row factor [.., 1] as fp32 over [M, N], recomputed if only a few ops lead to it."""
        if len(self._chain(v, base)) <= MOST_AGAIN:
            return self._again(v, full)
        return self._stored(v)

    def _stored(self, v: Value) -> Value:
        """The stored factor, one number per row or one for all."""
        return self._wide(self._op("reshape", v, [numel(v), 1], shape=(numel(v), 1), dtype=spec_of(v).dtype))

    def _chain(self, v: Value, base: Value) -> dict[int, OpView]:
        """The ops that `_again` would recompute from `base`."""
        found: dict[int, OpView] = {}
        todo = [v]
        while todo and len(found) <= MOST_AGAIN:
            source = todo.pop()
            op = self.producer(source) if source.id != base.id else None
            if op is not None and op.id not in found and self._repeatable(op):
                found[op.id] = op
                todo += op.inputs()
        return found

    @staticmethod
    def _repeatable(op: OpView) -> bool:
        """Whether an op can be recomputed from its arguments, in fp32, instead of reading its result."""
        if any(v.spec is None or v.spec.dtype not in FLOATS for v in (*op.inputs(), op.out)):
            return False
        if op.op in ("mean", "sum"):
            last = op.arg("self").spec.rank - 1
            return tuple(d % (last + 1) for d in op.arg("dim") or ()) == (last,) and bool(op.arg("keepdim"))
        return op.op in SHAPED | ALONG

    def _again(self, v: Value, full: Shape) -> Value:
        """Recompute a value [.., K] over [M, N, K], or a value [.., 1] over [M, N]."""
        shape = full if dims_of(v)[-1:] == (full[2],) else full[:2]
        if (v.id, shape) in self.again:
            return self.again[v.id, shape]
        op = self.producer(v)
        if op is None or not self._repeatable(op) or numel(v) != full[0] * (full[2] if shape == full else 1):
            return self._spread(v, full) if shape == full else self._stored(v)
        if op.op in SHAPED or op.op == "cast":
            out = self._again(op.arg("self"), full)
        elif op.op in ("mean", "sum"):
            out = self._op(op.op, self._again(op.arg("self"), full), [-1], False, shape=shape)
        else:
            args = [self._again(a, full) if isinstance(a, Value) else a for a in op.args]
            args = [self._column(a, shape) if isinstance(a, Value) else a for a in args]
            named: dict[str, Any] = dict(zip(op.argnames[2:], args[2:], strict=True))
            out = self._op(op.op, *args[:2], shape=shape, **named)
        self.again[v.id, shape] = out
        return out

    def _column(self, v: Value, shape: Shape) -> Value:
        """Reshape a per-row factor so that it broadcasts along the row."""
        if len(shape) == 3 and len(dims_of(v)) == 2:
            return self._op("reshape", v, [*dims_of(v), 1], shape=(*dims_of(v), 1))
        return v


def _reads_weight(op: OpView, graph: RegionGraph, bounds: Bounds) -> bool:
    """Whether an op is a product of few rows with a weight, with an int8 weight that the region widens, or with matrices that it
    gathers."""
    if op.op == "linear":
        return _suits(op, op.arg("input"), op.arg("weight"), op.arg("bias"), bounds)
    if op.op == "bmm":
        return (batch := _Batch.of(op)) is not None and batch.suits(graph, bounds)
    found = find(_WIDENED, op, graph, None) if graph.phase == "infer" else None
    if found is None or spec_of(found["weight"]).dtype != torch.int8 or not transposed(found["weight"]):
        return False
    spec = spec_of(found["weight"])
    rows = Value(-1, replace(spec, shape=spec.shape[::-1], stride=spec.stride[::-1]))
    return _suits(op, op.arg("self"), rows, None, bounds)


def _gathered(v: Value, graph: RegionGraph) -> bool:
    """Whether a gather makes a value, of which nothing on the way to its one reader would be stored."""
    while (op := graph.producer(v)) is not None and graph.only_user(v) is not None:
        if op.op in GATHERS:
            return True
        if op.op not in BETWEEN:
            return False
        v = next(iter(op.inputs()))
    return False


def transposed(value: Value) -> bool:
    """Whether a matrix is the transpose of a dense one."""
    spec = spec_of(value)
    return spec.rank == 2 and spec.stride == (1, spec.shape[0])


def _is_product(m: Match, s: _Sums) -> bool:
    return m.anchor.id in s.products


def _with_rows(m: Match, s: _Sums) -> Match:
    """Add the product's scaled rows to the match, while the graph is still unchanged."""
    x, k = m.anchor.args[0], dims_of(m.anchor.args[0])[-1]  # type: ignore[arg-type]
    return m.with_ops(rows=s.scaled(x, numel(x) // k, k))  # type: ignore[arg-type]


def _siblings(m: Match, s: _Sums) -> Match | None:
    """Match products of the same row with constant weights of different heights: they become one product with concatenated
    weights, whose slices are the results. Products of equal height share a kernel without that."""

    def eligible(op: OpView) -> bool:
        given = [v for v in (op.arg("weight"), op.arg("bias")) if v is not None]
        alike = all(spec_of(v).dtype == spec_of(op.out).dtype for v in given)
        return op.id in s.products and rows_of(op) == 1 and alike and all(map(s.graph.is_const, given))

    readers = s.graph.ordered(s.graph.users(m.anchor.arg("input")))
    group = next((g for g in siblings(readers, eligible) if m.anchor in g), ())
    made = [s.graph.producer(v) for op in group for v in (op.arg("weight"), op.arg("bias")) if v is not None]
    if len({dims_of(op.arg("weight"))[0] for op in group}) < 2:
        return None
    if not all(op is None or s.graph.before(op, group[0]) for op in made):
        return None
    return _with_rows(replace(m, ops=group, at=group[0]), s)


def _write_siblings(m: Match, s: _Sums) -> None:
    s.joined(m["rows"], m.ops)
    s.replace(m.ops)


def _write(m: Match, s: _Sums) -> None:
    op = m.anchor
    s.product(m["rows"], op.arg("weight"), op.arg("bias"), op.out, op.id)
    s.replace([op])


def _write_batched(m: Match, s: _Sums) -> None:
    op = m.anchor
    batch = _Batch.of(op)
    assert batch is not None
    s.batched(batch, op.out, op.id)
    s.replace([op])


def _widened(m: Match, s: _Sums) -> Match:
    return _with_rows(replace(m, ops=(m.anchor,)), s)


def _write_widened(m: Match, s: _Sums) -> None:
    """Write a product that widens the weight as it reads it."""
    s.product(m["rows"], s.transposed(m["weight"]), None, m.out, m.anchor.id)
    s.replace([m.anchor])


def rows_of(op: OpView) -> int:
    """The number of rows that a linear multiplies."""
    return numel(op.arg("input")) // dims_of(op.arg("weight"))[1]


def dims_of(v: Value) -> Shape:
    """The static shape of a tensor value."""
    return tuple(int(s) for s in spec_of(v).shape)  # type: ignore[arg-type]


def numel(v: Value) -> int:
    return spec_of(v).numel_hint()


def _with_dtype(op: OpView, dtype: torch.dtype) -> tuple[Any, ...]:
    """The arguments of a cast to `dtype`."""
    return tuple(dtype if name == "dtype" else a for name, a in zip(op.argnames, op.args, strict=True))


PRODUCTS = ("linear", "mm", "bmm")
"""The ops that may be products of few rows."""

_WIDENED = p("mm", ANY, p("cast", "weight"))

ROWS = (
    Row(
        "gemv.siblings", p("linear"), when=_is_product, extend=_siblings, write=_write_siblings,
        note="products of few rows as one sum",
    ),
    Row(
        "gemv.gathered", p("bmm"), when=_is_product, write=_write_batched, note="product of vectors with gathered matrices",
    ),
    Row("gemv", p("linear"), when=_is_product, extend=_with_rows, write=_write, note="product of few rows"),
    Row(
        "gemv.int8", _WIDENED, when=_is_product, extend=_widened, write=_write_widened,
        note="product of few rows with int8 weights",
    ),
)  # fmt: skip
"""The rewrite rows for products of few rows, in the order in which they are tried."""
