"""One product for several linears of constants that read the same rows: weights one below another, results side by side.

What it pays to join is the backend's to say; who may be joined, and how results are taken apart, is said here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fusewright.interface import OpView
from fusewright.plan.ir import Ref
from fusewright.toolkit.region.builder import Builder, contiguous_strides
from fusewright.toolkit.region.graph import RegionGraph
from fusewright.toolkit.region.pattern import siblings


def siblings_of(op: OpView, graph: RegionGraph, suits: Callable[[OpView], bool]) -> Sequence[OpView] | None:
    """All free linears of constants that read what `op` reads, itself among them, in order; None when it is alone."""

    def eligible(other: OpView) -> bool:
        constant = graph.is_const(other.arg("weight")) and graph.is_const(other.arg("bias"))
        return suits(other) and constant and graph.free(other)

    readers = graph.ordered(graph.users(op.arg("input")))
    return next((g for g in siblings(readers, eligible) if op in g), None)


def joined(group: Sequence[OpView], b: Builder) -> tuple[Ref, Ref | None]:
    """Weight and bias of all of them, prepared once."""
    weight = b.prepare("aten::cat.default", tuple(b.exact(op.arg("weight")) for op in group), 0)
    if group[0].arg("bias") is None:
        return weight, None
    return weight, b.prepare("aten::cat.default", tuple(b.exact(op.arg("bias")) for op in group), 0)


def widths_of(group: Sequence[OpView]) -> list[int]:
    """Columns of each result."""
    return [int(op.out.spec.shape[-1]) for op in group]  # type: ignore[union-attr, arg-type]


def taken_apart(group: Sequence[OpView], whole: Ref, b: Builder, more: int = 0) -> None:
    """The results of the group as slices of one product, without a copy; `more` columns behind them are nobody's."""
    widths, start = widths_of(group), 0
    shape = (*group[0].out.spec.shape[:-1], sum(widths) + more)  # type: ignore[union-attr]
    stride = contiguous_strides(shape)
    for op, width in zip(group, widths, strict=True):
        columns = (whole, len(shape) - 1, start, start + width)
        b.library("aten::slice.Tensor", *columns, out=op.out, stride=stride, op=op)
        start += width
