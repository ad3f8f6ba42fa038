"""Joins linears with constant weights that read the same rows into one product: weights are concatenated, results sliced.

This module decides which linears may be joined and how results are sliced; the backend decides when joining pays off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fusewright.interface import OpView
from fusewright.plan.ir import Ref
from fusewright.toolkit.region.builder import Builder, contiguous_strides
from fusewright.toolkit.region.graph import RegionGraph
from fusewright.toolkit.region.pattern import siblings


def siblings_of(op: OpView, graph: RegionGraph, suits: Callable[[OpView], bool]) -> Sequence[OpView] | None:
    """All unclaimed linears with constant weights that read the same input as `op`, including `op`, in order; None if there is
    no other."""

    def eligible(other: OpView) -> bool:
        constant = graph.is_const(other.arg("weight")) and graph.is_const(other.arg("bias"))
        return suits(other) and constant and graph.free(other)

    readers = graph.ordered(graph.users(op.arg("input")))
    return next((g for g in siblings(readers, eligible) if op in g), None)


def joined(group: Sequence[OpView], b: Builder) -> tuple[Ref, Ref | None]:
    """The concatenated weight and bias of the group, prepared once."""
    weight = b.prepare("aten::cat.default", tuple(b.exact(op.arg("weight")) for op in group), 0)
    if group[0].arg("bias") is None:
        return weight, None
    return weight, b.prepare("aten::cat.default", tuple(b.exact(op.arg("bias")) for op in group), 0)


def widths_of(group: Sequence[OpView]) -> list[int]:
    """The number of columns of each result."""
    return [int(op.out.spec.shape[-1]) for op in group]  # type: ignore[union-attr, arg-type]


def taken_apart(group: Sequence[OpView], whole: Ref, b: Builder, more: int = 0) -> None:
    """Slice the results of the group out of one product, without copying. `more` extra columns after them are ignored."""
    widths, start = widths_of(group), 0
    shape = (*group[0].out.spec.shape[:-1], sum(widths) + more)  # type: ignore[union-attr]
    stride = contiguous_strides(shape)
    for op, width in zip(group, widths, strict=True):
        columns = (whole, len(shape) - 1, start, start + width)
        b.library("aten::slice.Tensor", *columns, out=op.out, stride=stride, op=op)
        start += width
