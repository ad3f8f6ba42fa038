"""Recognizes linears with 8-bit weights and floating-point activations, as quantizers write them into a graph.

Per column: `mm(x, cast(t(q)))`, then a factor per column and a bias. In groups: a linear whose weight is
`view((cast(view(q)) - cast(view(zero))) * view(scale))`, with the groups as the last dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from fusewright.interface import OpView, Value
from fusewright.toolkit.region.builder import contiguous_strides
from fusewright.toolkit.region.gemv import transposed
from fusewright.toolkit.region.graph import RegionGraph, spec_of
from fusewright.toolkit.region.pattern import ANY, Chain, Match, chain, maybe, p


def widened_linear(prefix: str) -> Chain:
    """A product with an 8-bit weight that the region widens, followed by an optional factor and bias. `prefix` is the prefix of
    the optional steps' ids."""
    return chain(
        p("mm", ANY, p("cast", "weight", capture="cast")),
        maybe("mul", of_columns, "scale", rule=f"{prefix}.scale"),
        maybe("add", of_columns, "bias", rule=f"{prefix}.bias"),
    )


def widened(m: Match, graph: RegionGraph, most_rows: int) -> Match | None:
    """Accept a match of `widened_linear` if it has few rows and an int8 weight. The cast joins it if it has no other reader."""
    op, cast, weight = m.anchor, m["cast"], m["weight"]
    wrong = (
        spec_of(weight).dtype != torch.int8
        or not transposed(weight)
        or spec_of(cast.out).dtype != spec_of(op.out).dtype
    )
    few = int(spec_of(op.arg("self")).shape[0]) <= most_rows  # type: ignore[arg-type]
    if wrong or not few or not graph.free(cast) or graph.phase != "infer":
        return None
    return m if graph.only_user(cast.out) is op else replace(m, ops=m.ops[1:])


def of_columns(op: OpView, m: Match, context: Any) -> bool:
    """Whether the other operand of a product's only reader is one number per column, of the same dtype."""
    other = other_operand(op, m.out)
    out, made = spec_of(m.out), spec_of(op.out)
    if other is None or made.shape != out.shape or made.dtype != out.dtype or (op.op == "add" and op.arg("alpha") != 1):
        return False
    return spec_of(other).shape == out.shape[-1:] and spec_of(other).dtype == out.dtype


def other_operand(op: OpView, value: Value) -> Value | None:
    """The operand of a binary op other than `value`."""
    others = [v for v in op.inputs() if v.id != value.id]
    return others[0] if len(others) == 1 else None


def behind(m: Match) -> dict[str, Value | None]:
    """The factor and the bias of a match of `widened_linear`, each None if absent."""
    found, made = dict[str, Value | None](), m.anchor.out
    for name in ("scale", "bias"):
        if (step := m.get(name)) is not None:
            found[name], made = other_operand(step, made), step.out
    return found


@dataclass(frozen=True)
class Grouped:
    """A weight [n, k] quantized in groups along k: int8 `q` [n, k] or [n, groups, group], and per group a floating-point `scale`
    and a `zero` (int8, floating-point or None); all dense. `ops` compute the weight from them, and their intermediate results
    have no other reader."""

    q: Value
    scale: Value
    zero: Value | None
    group: int
    ops: tuple[OpView, ...]


def grouped(weight: Value, graph: RegionGraph) -> Grouped | None:
    """Recognize a weight quantized in groups, or return None. Values computed from small constants may be constants themselves."""
    steps = _Steps(graph)
    whole = steps.made(weight, "view", "reshape")
    factor = whole and steps.made(whole.arg("self"), "mul")
    if not factor or not isinstance(factor.arg("other"), Value):
        return None
    shifted, scale, zero = factor.arg("self"), steps.source(factor.arg("other")), None
    minus = steps.made(shifted, "sub")
    if minus is not None:
        if not isinstance(minus.arg("other"), Value) or minus.arg("alpha") != 1:
            return None
        zero, shifted = steps.source(minus.arg("other")), minus.arg("self")
    return _checked(weight, steps.source(shifted), scale, zero, spec_of(factor.out).shape, steps.ops)


def _checked(
    weight: Value, q: Value, scale: Value, zero: Value | None, shape: Any, ops: list[OpView]
) -> Grouped | None:
    """Make a `Grouped` if types and shapes fit, else return None."""
    if len(shape) != 3 or not all(isinstance(s, int) for s in shape) or shape[0] != spec_of(weight).shape[0]:
        return None
    n, groups, group = shape
    per_group = [scale] if zero is None else [scale, zero]
    right = spec_of(q).numel_hint() == n * groups * group and all(
        spec_of(v).numel_hint() == n * groups for v in per_group
    )
    dense = all(spec_of(v).stride == contiguous_strides(spec_of(v).shape) for v in (q, *per_group))  # type: ignore[arg-type]
    types = spec_of(q).dtype == torch.int8 and spec_of(scale).dtype.is_floating_point
    return Grouped(q, scale, zero, group, tuple(ops)) if right and dense and types else None


class _Steps:
    """Walks back from a value through ops whose results have a single reader."""

    def __init__(self, graph: RegionGraph) -> None:
        self.graph = graph
        self.ops: list[OpView] = []

    def made(self, value: Value, *names: str) -> OpView | None:
        op = self.graph.producer(value)
        if op is None or op.op not in names or self.graph.only_user(value) is None or not self.graph.free(op):
            return None
        self.ops.append(op)
        return op

    def source(self, value: Value) -> Value:
        """Skip a cast and a view behind a value, if present."""
        for names in (("cast",), ("view", "reshape", "unsqueeze")):
            op = self.made(value, *names)
            value = value if op is None else op.arg("self")
        return value
