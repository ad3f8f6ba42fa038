"""Linears with weights of 8 bits, as torchao's tensors leave them in a graph.

Weight-only: `mm(x, cast(t(w)))`, then a factor for each column and a bias. For few rows the weight is read as it is; for
many, eager's own cast before the library's product costs less than it saves. Dynamic: `_int_mm` of quantized rows, with
loop kernels before and behind it; shapes that cuBLAS refuses have a kernel of their own.
"""

from __future__ import annotations

from functools import partial

import torch

from fusewright.interface import OpView, Value
from fusewright.plan.ir import Ref
from fusewright_triton import products
from fusewright_triton.calls import Calls, Found, spec_of
from fusewright_triton.kernels.int8_ops import LINEAR, MM

FLOATS = (torch.bfloat16, torch.float16, torch.float32)

FEW = 128
"""Rows up to which a product that reads the weight as it is beats one with a weight that was cast before it."""

LEAST_ROWS, MULTIPLE = 17, 8
"""What cuBLAS wants of an int8 product: rows of the left operand, and what K and N are multiples of."""


def linear_reason(op: OpView) -> str | None:
    """Why a product is none of few rows. What its weight is made of is seen by `lower_linear`."""
    x, out = spec_of(op.arg("self")), spec_of(op.out)
    if not (x.static and out.static) or 0 in (*x.shape, *out.shape):
        return "symbolic or empty"
    return None if int(x.shape[0]) <= FEW else "many rows"  # type: ignore[arg-type]


def mm_reason(op: OpView) -> str | None:
    """Why a product stays torch's own call: it is neither one of few rows nor one whose rows suit no fast kernel."""
    return products.mm_reason(op) if linear_reason(op) else None


def lower_mm(op: OpView, c: Calls) -> Found | None:
    """By what its weight is made of, else by its rows."""
    found = None if linear_reason(op) else lower_linear(op, c)
    return found or (None if products.mm_reason(op) else products.lower_mm(op, c))


def lower_linear(op: OpView, c: Calls) -> Found | None:
    """A product with a weight of 8 bits that the region widens, and the factor and the bias behind it; else None."""
    cast = c.producer(op.arg("mat2"))
    if cast is None or cast.op != "cast" or cast.id in c.found or c.region.phase != "infer":
        return None
    weight = next(iter(cast.inputs()))
    if (
        spec_of(weight).dtype != torch.int8
        or not _transposed(weight)
        or spec_of(cast.out).dtype != spec_of(op.out).dtype
    ):
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


def _column_op(op: OpView, name: str, c: Calls) -> tuple[OpView, Value] | None:
    """The op `name` that alone reads a product, if its other operand is one number for each column of the same type."""
    user = c.b.links.only_user(op.out)
    if user is None or user.op != name or user.id in c.found:
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


def int_mm_reason(op: OpView) -> str | None:
    """Only what the library refuses."""
    a, b = spec_of(op.arg("self")), spec_of(op.arg("mat2"))
    if not (a.static and b.static) or 0 in (*a.shape, *b.shape):
        return "symbolic or empty"
    if a.dtype != torch.int8 or b.dtype != torch.int8:
        return "not int8 on both sides"
    (m, k), n = a.shape, b.shape[1]
    suits = m >= LEAST_ROWS and k % MULTIPLE == 0 and n % MULTIPLE == 0  # type: ignore[operator]
    return "the library takes it" if suits else None


def lower_int_mm(op: OpView, c: Calls) -> Found:
    """A product of integers that cuBLAS refuses."""
    return Found((op,), op, partial(_int_mm, op), "int8 product of few rows")


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
        return c.b.once("aten::t.default", c.b.exact(value))
    made = c.ctx.value(None)
    c.b.call("aten::t.default", c.b.exact(value), out=made)
    return Ref(made.id)
