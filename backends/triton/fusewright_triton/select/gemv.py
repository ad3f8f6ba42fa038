"""Products of few rows with a large matrix as kernels of reductions: decoding, where reading the weights is all the time.

`linear(x, w)` becomes `sum(x[:, None, :] * w, -1)`, whose product is never stored: the fuser makes one kernel of it with
what follows (bias, residual, activation), and one of several that read the same rows. Rows that were scaled before
(`x = h * g * rsqrt(mean(h * h) + eps)`, a norm) are not waited for: a factor that is constant along the row moves behind
the sum, and is computed beside it, from the row that the kernel reads anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch

from fusewright import ops
from fusewright.interface import CompileContext, Device, OpView, Region, TensorSpec, Value
from fusewright.toolkit.region.builder import contiguous_strides
from fusewright.toolkit.region.match import Links, made_of, siblings
from fusewright_triton.target import named

Shape: TypeAlias = tuple[int, ...]

LONGEST = 1 << 15
"""Longest row: a program holds it in registers."""

FLOATS = (torch.float32, torch.bfloat16, torch.float16)

SHAPED = frozenset({"view", "reshape", "alias", "unsqueeze", "squeeze"})
"""Ops after which the rows of a tensor are what they were, if its last dimension is."""

ALONG = frozenset({"cast", "mul", "div", "neg", "abs", "pow_scalar", "add", "sub", "rsqrt", "sqrt"})
"""Ops that are computed again, element by element, for a factor of each row."""

MOST_AGAIN = 12
"""Most ops that are computed again for a factor."""


def opened(region: Region, ctx: CompileContext) -> Region:
    """The region with its products of few rows written as sums."""
    if not any(op.op == "linear" and suits(op, ctx.device) for op in region.ops):
        return region
    return _Opener(region, ctx).run()


def suits(op: OpView, device: Device) -> bool:
    """Whether a linear is one whose time is that of reading its weight, which may be int8 (see `quantized`). A library's
    call stays where nobody measured: to do it here would build a kernel for every weight."""
    target = named(device.arch)
    if target.fitted is None and not device.simulated:
        return False
    x, w, bias = (op.arg(n) for n in ("input", "weight", "bias"))
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
    return 1 <= rows <= target.bounds.gemv_rows and n * k >= target.bounds.gemv_weights and 256 <= k <= LONGEST and dense


@dataclass
class _Scaled:
    """Rows as a product: `base`, factors that vary `along` the row, and factors `per_row`."""

    base: Value
    along: list[Value] = field(default_factory=list)
    per_row: list[Value] = field(default_factory=list)


class _Opener:
    """Rewrites one region. `made` are the new ops of the product at hand."""

    def __init__(self, region: Region, ctx: CompileContext) -> None:
        self.region, self.ctx = region, ctx
        self.found = {op.id: op for op in region.ops if op.op == "linear" and suits(op, ctx.device)}
        self.producer = {v.id: op for op in region.ops for v in op.outs}
        self.position = {op.id: k for k, op in enumerate(region.ops)}
        self.escaping = frozenset(v.id for v in region.outputs)
        self.links = Links(region.ops, self.escaping)
        self.const = region.constants
        self.made: list[OpView] = []
        self.again: dict[tuple[int, Shape], Value] = {}

    def run(self) -> Region:
        together = {op.id: g for g in self._concatenated() for op in g}
        out: list[OpView] = []
        for op in self.region.ops:
            group = together.get(op.id, (op,))
            if op.id not in self.found:
                out.append(op)
            elif len(group) == 1:
                self._product(op.arg("input"), op.arg("weight"), op.arg("bias"), op.out, op.id)
            elif group[0] is op:
                self._joined(group)
            out += self.made
            self.made = []
        return replace(self.region, ops=tuple(self._alive(out)))

    def _concatenated(self) -> list[tuple[OpView, ...]]:
        """Products of the same row with constant weights of several heights: one with the weights one below another,
        whose results are parts of it. Those of one height share a kernel as they are."""

        def eligible(op: OpView) -> bool:
            given = [v for v in (op.arg("weight"), op.arg("bias")) if v is not None]
            alike = all(spec_of(v).dtype == spec_of(op.out).dtype for v in given)
            return op.id in self.found and rows_of(op) == 1 and alike and all(v.id in self.const for v in given)

        def early(group: Sequence[OpView]) -> bool:
            made = [
                self.producer.get(v.id) for op in group for v in (op.arg("weight"), op.arg("bias")) if v is not None
            ]
            return all(op is None or self.position[op.id] < self.position[group[0].id] for op in made)

        groups = siblings(self.region.ops, eligible)
        return [g for g in groups if len({op.arg("weight").spec.shape[0] for op in g}) > 1 and early(g)]

    def _alive(self, made: Sequence[OpView]) -> list[OpView]:
        """Without what only the rows of opened products needed."""
        read = {v.id for v in self.region.outputs}
        kept = []
        for op in reversed(made):
            pure = op.op in SHAPED | ALONG | {"mean", "sum"}
            if not pure or any(o.id in read for o in op.outs):
                kept.append(op)
                read.update(v.id for v in op.inputs())
        return kept[::-1]

    # ---- ops

    def _op(self, name: str, *args: Any, shape: Shape, dtype: torch.dtype = torch.float32, **named: Any) -> Value:
        """A new op with a dense result of this type."""
        row = ops.OPS[name]
        bound = row.bind(args, named)
        given = tuple(tuple(a) if isinstance(a, list) else a for a in bound.values())
        target = row.target.name()
        op = OpView(0, name, target if "." in target else f"{target}.default", tuple(bound), given, ())
        device = next(v.spec.device for v in op.inputs() if v.spec is not None)
        out = self.ctx.value(made_of(op.inputs(), TensorSpec(shape, contiguous_strides(shape), dtype, device)))
        self.made.append(replace(op, id=out.id, outs=(out,)))
        return out

    def _product(self, x: Value, weight: Value, bias: Value | None, out: Value, id: int) -> None:
        """The ops that make `out`; the one of them that stands for the product in reports gets this id."""
        n, k = dims_of(weight)
        full = (numel(x) // k, n, k)
        rows = self._scaled(x, full)
        v = self._spread(rows.base, full)
        for factor in (*rows.along, weight):  # not cast first: what is made of constants alone would be kept, in fp32
            v = self._op("mul", v, factor, shape=full)
        v = self._op("sum", v, [-1], False, shape=full[:2])
        for factor in rows.per_row:
            v = self._op("mul", v, self._per_row(factor, rows.base, full), shape=full[:2])
        if bias is not None:
            v = self._op("add", v, self._wide(bias), shape=full[:2])
        spec = spec_of(out)
        shaped = dims_of(out) != full[:2]
        if spec.dtype != torch.float32:
            v = self._op("cast", v, dtype=spec.dtype, shape=full[:2])
            self.made[-1] = replace(self.made[-1], args=_with_dtype(self.made[-1], spec.dtype))
        self.made[-1] = replace(self.made[-1], id=id, outs=self.made[-1].outs if shaped else (out,))
        if shaped:
            self._op("view", v, list(dims_of(out)), shape=dims_of(out), dtype=spec.dtype)
            self.made[-1] = replace(self.made[-1], outs=(out,))

    def _joined(self, group: Sequence[OpView]) -> None:
        """One product of one row for several: each result is a part of it."""
        weights, biases = ([op.arg(name) for op in group] for name in ("weight", "bias"))
        dtype, k = spec_of(weights[0]).dtype, dims_of(weights[0])[1]
        n = sum(dims_of(w)[0] for w in weights)
        weight = self._op("cat", tuple(weights), 0, shape=(n, k), dtype=dtype)
        bias = None if biases[0] is None else self._op("cat", tuple(biases), 0, shape=(n,), dtype=dtype)
        shape = (*dims_of(group[0].out)[:-1], n)
        whole = self.ctx.value(TensorSpec(shape, contiguous_strides(shape), dtype, spec_of(weights[0]).device))
        self._product(group[0].arg("input"), weight, bias, whole, self.ctx.value(None).id)
        start = 0
        for op in group:
            stop = start + dims_of(op.out)[-1]
            self._op("slice", whole, -1, start, stop, shape=dims_of(op.out), dtype=dtype)
            self.made[-1] = replace(self.made[-1], id=op.id, outs=(op.out,))
            start = stop

    # ---- rows

    def _spread(self, v: Value, full: Shape) -> Value:
        """Rows [.., K], or one for all, as fp32 over [M, N, K]: views, nothing is stored."""
        key = (v.id, full)
        if key not in self.again:
            found, dtype, shape = v, spec_of(v).dtype, (numel(v) // full[2], 1, full[2])
            if dims_of(v) != shape:
                found = self._op("reshape", v, list(shape), shape=shape, dtype=dtype)
            self.again[key] = self._wide(self._op("expand", found, list(full), shape=full, dtype=dtype))
        return self.again[key]

    def _wide(self, v: Value) -> Value:
        """In fp32."""
        if spec_of(v).dtype == torch.float32:
            return v
        out = self._op("cast", v, dtype=torch.float32, shape=dims_of(v))
        self.made[-1] = replace(self.made[-1], args=_with_dtype(self.made[-1], torch.float32))
        return out

    def _scaled(self, x: Value, full: Shape) -> _Scaled:
        """`x` without its factors, if nobody but opened products wants it with them."""
        found, m, k = _Scaled(x), full[0], full[2]
        passed: list[Value] = []
        while (op := self.producer.get(found.base.id)) is not None:
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
        """One op less: what is left, and the factors that it brought."""
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
        """Whether all that reads a value are opened products, and what leads to them."""
        return v.id not in self.escaping and all(
            u.id in self.found or u.out.id in inside or (u.op in SHAPED and self._only_for_products(u.out, inside))
            for u in self.links.users(v)
        )

    def _per_row(self, v: Value, base: Value, full: Shape) -> Value:
        """A factor of each row [.., 1] as fp32 over [M, N]: computed again where a few ops make it of a sum."""
        if len(self._chain(v, base)) <= MOST_AGAIN:
            return self._again(v, full)
        return self._stored(v)

    def _stored(self, v: Value) -> Value:
        """As it is, one number to a row or one to all."""
        return self._wide(self._op("reshape", v, [numel(v), 1], shape=(numel(v), 1), dtype=spec_of(v).dtype))

    def _chain(self, v: Value, base: Value) -> dict[int, OpView]:
        """What `_again` would compute of `base`."""
        found: dict[int, OpView] = {}
        todo = [v]
        while todo and len(found) <= MOST_AGAIN:
            source = todo.pop()
            op = self.producer.get(source.id) if source.id != base.id else None
            if op is not None and op.id not in found and self._repeatable(op):
                found[op.id] = op
                todo += op.inputs()
        return found

    @staticmethod
    def _repeatable(op: OpView) -> bool:
        """Whether it is computed again from its arguments, in fp32, rather than read."""
        if any(v.spec is None or v.spec.dtype not in FLOATS for v in (*op.inputs(), op.out)):
            return False
        if op.op in ("mean", "sum"):
            last = op.arg("self").spec.rank - 1
            return tuple(d % (last + 1) for d in op.arg("dim") or ()) == (last,) and bool(op.arg("keepdim"))
        return op.op in SHAPED | ALONG

    def _again(self, v: Value, full: Shape) -> Value:
        """A value [.., K] over [M, N, K], or one of [.., 1] over [M, N]."""
        shape = full if dims_of(v)[-1:] == (full[2],) else full[:2]
        if (v.id, shape) in self.again:
            return self.again[v.id, shape]
        op = self.producer.get(v.id)
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
        """A factor of each row as one that broadcasts along the row."""
        if len(shape) == 3 and len(dims_of(v)) == 2:
            return self._op("reshape", v, [*dims_of(v), 1], shape=(*dims_of(v), 1))
        return v


def rows_of(op: OpView) -> int:
    """How many rows a linear multiplies."""
    return numel(op.arg("input")) // dims_of(op.arg("weight"))[1]


def dims_of(v: Value) -> Shape:
    """The static shape of a tensor value."""
    return tuple(int(s) for s in spec_of(v).shape)  # type: ignore[arg-type]


def numel(v: Value) -> int:
    return spec_of(v).numel_hint()


def spec_of(v: Value) -> TensorSpec:
    """The type of a tensor value."""
    assert v.spec is not None
    return v.spec


def _with_dtype(op: OpView, dtype: torch.dtype) -> tuple[Any, ...]:
    """The arguments of a cast to `dtype`."""
    return tuple(dtype if name == "dtype" else a for name, a in zip(op.argnames, op.args, strict=True))
