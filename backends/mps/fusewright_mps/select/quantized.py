"""Linears of few rows with 8-bit or 4-bit weights, as torchao leaves them in a graph: one kernel that reads the weights unwidened.

With more rows the weights are widened before torch's product, as in eager, because reading them no longer dominates.
"""

from __future__ import annotations

import torch

from fusewright.interface import OpView, TensorSpec, Value
from fusewright.plan.ir import Ref
from fusewright.toolkit.region.builder import Builder, contiguous_strides
from fusewright.toolkit.region.graph import spec_of
from fusewright.toolkit.region.pattern import Match, chain
from fusewright.toolkit.region.rewrite import Row
from fusewright.toolkit.region.weight_only import Grouped, behind, grouped, widened, widened_linear
from fusewright_mps.kernels import gemv
from fusewright_mps.kernels.handwritten import METAL
from fusewright_mps.select.calls import SUMS, Calls

COLUMNS = widened_linear("mps.int8")


def _suits(x: TensorSpec, out: TensorSpec, n: int, k: int) -> bool:
    """Whether the kernel takes input rows `x` with a weight [n, k] large enough that reading it dominates."""
    if not x.static or not out.static or x.dtype not in METAL or out.dtype != x.dtype or k % 8 or 0 in x.shape:
        return False
    dense = all(s.stride == contiguous_strides(s.shape) for s in (x, out))  # type: ignore[arg-type]
    return dense and x.numel_hint() // k <= gemv.MOST_ROWS and n * k >= SUMS.weights


def _by_columns(m: Match, c: Calls) -> Match | None:
    """Match a product with a widened 8-bit weight and a scale per column."""
    found = widened(m, c.graph, gemv.MOST_ROWS)
    if found is None or m.get("scale") is None or not c.graph.is_const(m["weight"]):
        return None
    k, n = (int(s) for s in spec_of(m["weight"]).shape)  # type: ignore[arg-type]
    return found if _suits(spec_of(m.anchor.arg("self")), spec_of(m.out), n, k) else None


def _write_columns(m: Match, c: Calls) -> None:
    op, found = m.anchor, behind(m)
    k, n = (int(s) for s in spec_of(m["weight"]).shape)  # type: ignore[arg-type]
    rows = c.b.prepare("aten::t.default", c.b.exact(m["weight"]))
    _launch(m, c, op.arg("self"), 8, (n, k, k), [rows], found["scale"], None, found.get("bias"))


def _in_groups(m: Match, c: Calls) -> Match | None:
    """Match a linear whose weight is dequantized from 8-bit values in groups."""
    op = m.anchor
    found = grouped(op.arg("weight"), c.graph) if c.graph.phase == "infer" else None
    if found is None or not all(map(c.graph.is_const, (found.q, found.scale, found.zero))) or found.group % 8:
        return None
    bias, x = op.arg("bias"), spec_of(op.arg("input"))
    if found.zero is not None and spec_of(found.zero).dtype not in (torch.int8, x.dtype):
        return None
    if spec_of(found.scale).dtype != x.dtype or (bias is not None and spec_of(bias).dtype != x.dtype):
        return None
    n, k = (int(s) for s in spec_of(op.arg("weight")).shape)  # type: ignore[arg-type]
    return m.with_ops(*found.ops, at=op, made_of=found) if _suits(x, spec_of(op.out), n, k) else None


def _write_groups(m: Match, c: Calls) -> None:
    op, found = m.anchor, m["made_of"]
    assert isinstance(found, Grouped)
    n, k = (int(s) for s in spec_of(op.arg("weight")).shape)  # type: ignore[arg-type]
    weights = planes(c.b.prepare("aten::reshape.default", c.b.exact(found.q), (n, k)), c.b)
    _launch(m, c, op.arg("input"), 4, (n, k, found.group), weights, found.scale, found.zero, op.arg("bias"))


def _launch(
    m: Match, c: Calls, x: Value, bits: int, sizes: tuple[int, int, int], weights: list[Ref],
    scale: Value | None, zero: Value | None, bias: Value | None,
) -> None:  # fmt: skip
    n, k, group = sizes
    rows = spec_of(x).numel_hint() // k
    outputs = gemv.rows_for(n, c.target)
    zeros = "" if zero is None else {torch.int8: "char", **METAL}[spec_of(zero).dtype]
    kernel = gemv.Gemv(METAL[spec_of(x).dtype], bits, rows, n, k, group, zeros, bias is not None, outputs)
    inputs = [c.b.exact(x), *weights, *(None if v is None else c.b.exact(v) for v in (scale, zero, bias))]
    c.launch(kernel, inputs, [m.out.id], m.last)


def planes(q: Ref, b: Builder) -> list[Ref]:
    """Split int8 [n, k] into planes of low and high nibbles [n, k / 2], even columns in the low bits, and an int32 flag [n] per
    row: whether any of its weights does not fit a signed nibble. Prepared once."""
    wide = b.prepare("aten::_to_copy.default", q, dtype=torch.int16)
    high = b.prepare("aten::div.Scalar_mode", wide, 16, rounding_mode="floor")
    odd = [b.prepare("aten::lt.Scalar", wide, -8), b.prepare("aten::gt.Scalar", wide, 7)]
    some = b.prepare("aten::any.dim", b.prepare("aten::logical_or.default", *odd), 1)
    flags = b.prepare("aten::_to_copy.default", some, dtype=torch.int32)
    return [_packed(wide, b), _packed(high, b), flags]


def _packed(v: Ref, b: Builder) -> Ref:
    """Pack the low nibbles of int16 [n, k], two per byte."""
    even, odd = (
        b.prepare("aten::bitwise_and.Scalar", b.prepare("aten::slice.Tensor", v, 1, k, None, 2), 15) for k in (0, 1)
    )
    both = b.prepare("aten::bitwise_or.Tensor", even, b.prepare("aten::mul.Scalar", odd, 16))
    return b.prepare("aten::_to_copy.default", both, dtype=torch.uint8)


INT8 = Row(
    "mps.int8.linear", COLUMNS, extend=_by_columns, write=_write_columns, note="product of few rows with int8 weights"
)
"""A product with an 8-bit weight that the region widens, and the scale and bias that follow."""

GROUPS = Row(
    "mps.int4.linear", chain("linear"), extend=_in_groups, write=_write_groups,
    note="product of few rows with int4 weights in groups",
)  # fmt: skip
"""A linear with a grouped weight of 4 or 8 bits."""


def by_hand(op: OpView, c: Calls) -> bool:
    """Whether one of these rows takes a product, so that it must not become a sum."""
    row = {"mm": INT8, "linear": GROUPS}.get(op.op)
    if row is None or not c.ctx.rules.allows(row.id):
        return False
    return row.match(op, c.graph, c, c.ctx.rules) is not None
