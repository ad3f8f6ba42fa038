"""Linears with weights of 8 bits, as torchao's tensors leave them in a graph.

Weight-only: `mm(x, cast(t(w)))`, then a factor for each column and a bias. For a few rows it is a loop kernel of sums with
its neighbours, for more a kernel of blocks that reads the weight as it is; for many, eager's own cast before the library's
product costs less than it saves. Dynamic: `_int_mm` of quantized rows, with
loop kernels before and behind it; shapes that cuBLAS refuses have a kernel of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fusewright.interface import CompileContext, OpView, Region, Value
from fusewright.plan.ir import Ref
from fusewright.toolkit.backend.candidates import Lazy, Thunk
from fusewright_triton.kernels.int8_ops import LEAST_ROWS, LINEAR, MM, MULTIPLE, int8_linear, int8_mm, linear_by_torch
from fusewright_triton.select import gemv, products
from fusewright_triton.select.calls import Calls, Found, spec_of

REPEATS = 20
"""Products that are timed together."""


def mm_reason(op: OpView) -> str | None:
    """Why a product stays torch's own call. Its rows, and what its weight is made of, are seen by `lower_mm`."""
    x, out = spec_of(op.arg("self")), spec_of(op.out)
    return "symbolic or empty" if not (x.static and out.static) or 0 in (*x.shape, *out.shape) else None


def lower_mm(op: OpView, c: Calls) -> Found | None:
    """By what its weight is made of, else by its rows."""
    few = int(spec_of(op.arg("self")).shape[0]) <= c.target.bounds.int8_rows  # type: ignore[arg-type]
    found = lower_linear(op, c) if few else None
    return found or (None if products.mm_reason(op) else products.lower_mm(op, c))


def lower_linear(op: OpView, c: Calls) -> Found | None:
    """A product with a weight of 8 bits that the region widens, and the factor and the bias behind it; else None."""
    cast = c.producer(op.arg("mat2"))
    if cast is None or cast.op != "cast" or not c.free(cast) or c.region.phase != "infer":
        return None
    weight = next(iter(cast.inputs()))
    if (
        spec_of(weight).dtype != torch.int8
        or not _transposed(weight)
        or spec_of(cast.out).dtype != spec_of(op.out).dtype
    ):
        return None
    if not _reading_pays(op, c):
        return None
    ops, scale, bias = [op], None, None
    if (step := _column_op(ops[-1], "mul", c)) is not None:
        ops, scale = [*ops, step[0]], step[1]
    if (step := _column_op(ops[-1], "add", c)) is not None:
        ops, bias = [*ops, step[0]], step[1]
    if c.b.links.only_user(cast.out) is op:
        ops = [cast, *ops]
    write = partial(_linear, op, weight, scale, bias, ops[-1])
    return Found(tuple(ops), ops[-1], write, "product with int8 weights")


def _reading_pays(op: OpView, c: Calls) -> bool:
    """Whether the kernel that reads 8-bit weights is faster than the library's product of widened ones."""
    x, (k, n) = spec_of(op.arg("self")), (int(s) for s in spec_of(op.arg("mat2")).shape)  # type: ignore[arg-type]
    m, arch = int(x.shape[0]), c.ctx.device.arch  # type: ignore[arg-type]

    def products(run: Callable[..., Any]) -> Callable[[], Thunk]:
        def make() -> Thunk:
            given = torch.ones(m, k, dtype=x.dtype, device=x.device), torch.ones(n, k, dtype=torch.int8, device=x.device)
            return lambda: _repeated(lambda x, w: run(x, w, None, None, arch), *given)

        return make

    key = f"int8 weights {str(x.dtype).removeprefix('torch.')} {m}x{k}x{n}"
    return c.pays(key, products(linear_by_torch), products(int8_linear))


def _column_op(op: OpView, name: str, c: Calls) -> tuple[OpView, Value] | None:
    """The op `name` that alone reads a product, if its other operand is one number for each column of the same type."""
    user = c.only_user(op.out)
    if user is None or user.op != name:
        return None
    others = [v for v in user.inputs() if v.id != op.out.id]
    out, made = spec_of(op.out), spec_of(user.out)
    if len(others) != 1 or made.shape != out.shape or made.dtype != out.dtype:
        return None
    if name == "add" and user.arg("alpha") != 1:
        return None
    spec = spec_of(others[0])
    return (user, others[0]) if spec.shape == out.shape[-1:] and spec.dtype == out.dtype else None


def _linear(op: OpView, weight: Value, scale: Value | None, bias: Value | None, last: OpView, c: Calls) -> None:
    args = (c.exact(op.arg("self")), _rows_of(weight, c), c.exact(scale), c.exact(bias), _target(c))
    c.b.call(LINEAR, *args, out=last.out, op=last)


def with_few_rows(region: Region, ctx: CompileContext) -> Region:
    """The region with products of few rows by widened int8 weights as linears, which `few_rows` makes sums of. The weight
    is widened where it is read."""
    producer = {v.id: op for op in region.ops for v in op.outs}
    ops: list[OpView] = []
    for op in region.ops:
        ops += _as_linear(op, producer, ctx) if op.op == "mm" and region.phase == "infer" else [op]
    read = {v.id for op in ops for v in op.inputs()} | {v.id for v in region.outputs}
    return replace(region, ops=tuple(op for op in ops if op.op != "cast" or op.out.id in read))


def _as_linear(op: OpView, producer: Mapping[int, OpView], ctx: CompileContext) -> list[OpView]:
    cast = producer.get(op.arg("mat2").id)
    weight = None if cast is None or cast.op != "cast" else cast.arg("self")
    if weight is None or spec_of(weight).dtype != torch.int8 or not _transposed(weight):
        return [op]
    spec = spec_of(weight)
    rows = ctx.value(replace(spec, shape=spec.shape[::-1], stride=spec.stride[::-1]))
    transpose = OpView(ctx.value(None).id, "t", "aten::t.default", ("self",), (weight,), (rows,))
    names = ("input", "weight", "bias")
    linear = replace(op, op="linear", target="aten::linear.default", argnames=names, args=(op.arg("self"), rows, None))
    return [transpose, linear] if gemv.suits(linear, ctx.device) else [op]


def int_mm_reason(op: OpView) -> str | None:
    """Why an integer product stays torch's own call."""
    a, b = spec_of(op.arg("self")), spec_of(op.arg("mat2"))
    if not (a.static and b.static) or 0 in (*a.shape, *b.shape):
        return "symbolic or empty"
    return None if a.dtype == b.dtype == torch.int8 else "not int8 on both sides"


def lower_int_mm(op: OpView, c: Calls) -> Found | None:
    """A product of integers that cuBLAS refuses, or that a kernel computes faster; else None."""
    m, k, n = (int(s) for s in (*spec_of(op.arg("self")).shape, spec_of(op.arg("mat2")).shape[1]))  # type: ignore[arg-type]
    if m >= LEAST_ROWS and k % MULTIPLE == 0 and n % MULTIPLE == 0:
        if c.ctx.device.simulated or not _transposed(op.arg("mat2")) or not _kernel_pays(m, n, k, op, c):
            return None
    return Found((op,), op, partial(_int_mm, op), "int8 product")


def _kernel_pays(m: int, n: int, k: int, op: OpView, c: Calls) -> bool:
    """Whether the kernel is faster than the library, by a short measurement."""
    device, target = spec_of(op.out).device, _target(c)

    def products(run: Callable[[torch.Tensor, torch.Tensor], Any]) -> Callable[[], Thunk]:
        def make() -> Thunk:
            x, w = (torch.ones(rows, k, dtype=torch.int8, device=device) for rows in (m, n))
            return lambda: _repeated(run, x, w)

        return make

    library = products(lambda x, w: torch.ops.aten._int_mm(x, w.t()))
    kernel = products(lambda x, w: int8_mm(x, w, target))
    return c.ctx.choose(f"int8 product {m}x{n}x{k}", Lazy({"library": library, "kernel": kernel})) == "kernel"


def _repeated(run: Callable[[torch.Tensor, torch.Tensor], Any], x: torch.Tensor, w: torch.Tensor) -> None:
    for _ in range(REPEATS):
        run(x, w)
    torch.cuda.synchronize(x.device)


def _int_mm(op: OpView, c: Calls) -> None:
    args = (c.exact(op.arg("self")), _rows_of(op.arg("mat2"), c), _target(c))
    c.b.call(MM, *args, out=op.out, op=op)


def _target(c: Calls) -> str:
    return c.ctx.device.arch


def _transposed(value: Value) -> bool:
    """Whether a matrix is the transpose of a dense one."""
    spec = spec_of(value)
    return spec.rank == 2 and spec.stride == (1, spec.shape[0])


def _rows_of(value: Value, c: Calls) -> Ref:
    """The transpose of a matrix; the operators copy one that is not dense then."""
    if c.is_const(value):
        return c.b.prepare("aten::t.default", c.b.exact(value))
    made = c.ctx.value(None)
    c.b.call("aten::t.default", c.b.exact(value), out=made)
    return Ref(made.id)
