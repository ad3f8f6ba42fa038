"""A rough roofline: FLOPs and bytes of an op from its metadata, for profitability and for the time shares in `explain`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fusewright import ops
from fusewright.interface import DevicePolicy, OpView, TensorSpec, hint


@dataclass(frozen=True)
class Work:
    kind: str
    flops: float
    bytes: float

    def seconds(self, policy: DevicePolicy) -> float:
        """Estimate the time on a device with this policy."""
        if self.kind == "view":
            return 0.0
        return policy.call_seconds + max(self.flops / policy.flops_per_second, self.bytes / policy.bytes_per_second)


SIZES = ("aten.sym_size.int", "aten.sym_stride.int", "aten.sym_numel.default")
"""Calls that read a number of a tensor, which costs nothing: composites that were opened have them."""


def work(op: OpView) -> Work:
    """Estimated work of one op at the sizes seen when tracing."""
    row = ops.OPS.get(op.op)
    if op.op in SIZES or (row is not None and (row.kind is ops.Kind.VIEW or _makes_nothing(op, row))):
        return Work("view", 0.0, 0.0)
    specs = [v.spec for v in (*op.inputs(), *op.outs) if v.spec is not None]
    moved = float(sum(s.bytes_hint() for s in specs))
    kind = row.kind.name.lower() if row else "opaque"
    return Work(kind, _flops(op, kind), moved)


def _makes_nothing(op: OpView, row: ops.Op) -> bool:
    """Whether a creation has no elements: like a view, it is a tensor without work."""
    return row.kind is ops.Kind.CREATION and all(v.spec is not None and 0 in v.spec.shape for v in op.outs)


def _flops(op: OpView, kind: str) -> float:
    out = op.outs[0].spec if op.outs else None
    tensors = [v.spec for v in op.inputs() if v.spec is not None]
    if out is None or not tensors:
        return 0.0
    n = float(out.numel_hint())
    if op.op == "conv":
        weight = op.arg("weight").spec
        return 2.0 * n * math.prod(hint(s) for s in weight.shape[1:])
    if op.op in ("sdpa", "sdpa_with_lse"):
        q, k = tensors[0], tensors[1]
        return 4.0 * q.numel_hint() * hint(k.shape[-2])
    if op.op in ("linear", "mm", "bmm", "matmul", "addmm", "baddbmm"):
        return 2.0 * n * _inner(op, tensors)
    return n


def _inner(op: OpView, tensors: list[TensorSpec]) -> int:
    first = tensors[1] if op.op in ("addmm", "baddbmm") else tensors[0]
    return hint(first.shape[-1]) if first.shape else 1
