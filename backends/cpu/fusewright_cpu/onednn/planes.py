"""Linears over a few features that lie in planes, such as those that mix the heads of attention, as sums in loop kernels.

A library's product copies the planes to rows and its readers copy the result back; rows of a few numbers also suit none.
"""

from __future__ import annotations

import torch

from fusewright.interface import TensorSpec, Value
from fusewright.toolkit.region.builder import Builder
from fusewright.toolkit.region.graph import spec_of
from fusewright.toolkit.region.pattern import Match, chain
from fusewright.toolkit.region.rewrite import Row
from fusewright.toolkit.region.sums import write_sum

MOST = 8
"""The most features and results."""

LEAST = 64
"""The least length of a plane's rows."""


def _fits(m: Match, b: Builder) -> bool:
    op = m.anchor
    x, w, out = b.spec(op.arg("input")), spec_of(op.arg("weight")), spec_of(op.out)
    if x.rank < 2 or not (x.static and w.static) or w.rank != 2 or 0 in out.shape or max(w.shape) > MOST:  # type: ignore[operator, type-var]
        return False
    return b.graph.phase == "infer" and all(spec_of(v).dtype == out.dtype for v in op.inputs()) and in_planes(x)


def in_planes(x: TensorSpec) -> bool:
    """Whether a dimension other than the last, long enough for vectors, is the dense one."""
    lengths = [n for n, step in zip(x.shape[:-1], x.stride, strict=False) if step == 1]
    return x.shape[-1] != 1 and x.stride[-1] != 1 and any(n >= LEAST for n in lengths)  # type: ignore[operator]


def _strides(x: TensorSpec, results: int) -> tuple[int, ...]:
    """Return dense strides for a result whose dimensions lie in the order of the operand's."""
    shape, stride, step = (*x.shape[:-1], results), [0] * x.rank, 1
    for d in sorted(range(x.rank), key=lambda d: (x.stride[d], -d)):
        stride[d] = step
        step *= shape[d]  # type: ignore[operator]
    return tuple(stride)


def _write(m: Match, b: Builder) -> None:
    op = m.anchor
    x, w, bias = (op.arg(n) for n in ("input", "weight", "bias"))
    results, features = spec_of(w).shape
    spec = b.spec(x)

    def wide(value: Value) -> Value:
        return value if spec_of(value).dtype is torch.float32 else b.append_op("cast", value, torch.float32)

    def factors(k: int) -> tuple[Value, Value]:
        return wide(b.append_op("slice", x, -1, k, k + 1)), wide(b.append_op("select", w, 1, k))

    b.without(op)
    out = b.with_layout(op.out, _strides(spec, results))  # type: ignore[arg-type]
    write_sum(None if bias is None else wide(bias), map(factors, range(features)), out, b)  # type: ignore[arg-type]
    b.notes[op.id] = "sum in a kernel"


ROW = Row("onednn.product.planes", chain("linear"), when=_fits, write=_write, note="product over few features in planes, as a sum")
