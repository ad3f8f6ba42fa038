"""The whole table, and the conditions common to its rows."""

from __future__ import annotations

from fusewright.interface import YES, Device, OpView, Verdict, Why
from fusewright_xla_cpu.rows import indexing, pointwise, pooling, products, reductions, shapes
from fusewright_xla_cpu.table import LOWERINGS
from fusewright_xla_cpu.target import DTYPES

__all__ = ["LOWERINGS", "ROWS", "verdict"]

ROWS = (pointwise, reductions, shapes, indexing, products, pooling)
"""Modules that fill the table on import."""


def verdict(op: OpView, device: Device) -> Verdict:
    """Whether the table takes `op`: its row accepts it, and all its tensors have lowered dtypes."""
    if op.op not in LOWERINGS:
        return Verdict(Why.NO_LOWERING, f"no lowering for {op.op}")
    for v in (*op.inputs(), *op.outs):
        if v.spec is not None and v.spec.dtype not in DTYPES:
            return Verdict(Why.DTYPE, f"{v.spec.dtype} is left to eager")
    if not op.outs or all(v.spec is None for v in op.outs):
        return Verdict(Why.NO_LOWERING, "it gives no tensor")
    found = LOWERINGS.supports(op, device)
    return YES if found else found
