"""Short reductions as maps: unrolled, so that they fuse like pointwise ops and are vectorized across rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from fusewright.interface import OpView
from fusewright.toolkit.ir import Builder, Index, Val
from fusewright.toolkit.ir.types import is_float
from fusewright.toolkit.rules.evaluate import KernelRow, Space
from fusewright.toolkit.rules.kinds import Evaluator, Map, Row, Rules, Table
from fusewright.toolkit.rules.space import At

SHORT = 8
"""Rows of at most this many elements are unrolled: a vector along them would be half empty."""


class _Reached(Exception):
    """Raised at a reduction whose operand is not yet known at every position."""

    def __init__(self, how: str, operand: Val) -> None:
        super().__init__(how)
        self.how, self.operand = how, operand


class _Recorder:
    """A builder whose first reductions are already known."""

    def __init__(self, b: Builder, known: list[Val]) -> None:
        self._b, self._known, self._next = b, known, 0

    def reduce(self, how: str, value: Val) -> Val:
        if self._next == len(self._known):
            raise _Reached(how, value)
        self._next += 1
        return self._known[self._next - 1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._b, name)


def unrolled(rule: Row) -> Map:
    """The results of a row op (all of level "row"), computed one element at a time."""

    def code(e: Evaluator, op: OpView, k: int, at: At) -> Val:
        domain = rule.domain(op)
        count = math.prod(s for d in domain.dims if isinstance(s := domain.shape[d], int))
        outer = [d for d in range(len(domain.shape)) if d not in domain.dims]
        row = at.reshape(tuple(domain.shape[d] for d in outer))
        known: list[Val] = []
        while True:
            operands: list[Val] = []
            for position in range(count):
                axes = dict(zip(outer, row.dims, strict=True))
                for d in reversed(domain.dims):
                    size = domain.shape[d]
                    assert isinstance(size, int)
                    axes[d] = Index(position % size, sizes=e.b.p + e.b.r)
                    position //= size
                context = KernelRow(e, Space.of(domain, axes), domain)
                context.b = _Recorder(e.b, known)  # type: ignore[assignment]
                try:
                    return rule.code(context, op)[k]
                except _Reached as reached:
                    how = reached.how
                    operands.append(reached.operand)
            known.append(_folded(e.b, how, operands))

    return Map(code, rule.check, cost=4 * SHORT)


def _folded(b: Builder, how: str, values: list[Val]) -> Val:
    match how:
        case "argmax" | "argmin":
            return _position(b, how == "argmax", values)
        case "mean":
            return _folded(b, "sum", values) / len(values)
        case "m2":
            # of distances from an element, whose mean is small: see `transform/moments.py`
            apart = [v - values[0] for v in values[1:]]
            mean = _folded(b, "sum", apart) / len(values)
            return _folded(b, "sum", [mean * mean, *((v - mean) * (v - mean) for v in apart)])
    op = {"sum": "add", "prod": "mul", "max": "maximum", "min": "minimum", "any": "or", "all": "and"}[how]
    first = how in ("max", "min")  # of two zeros these are the first as in eager, and an extreme is its second operand
    while len(values) > 1:  # pairwise: short dependency chains, small errors
        odd = values[-1:] if len(values) % 2 else []
        pairs = zip(values[::2], values[1::2], strict=False)
        values = [b.op(op, y, x) if first else b.op(op, x, y) for x, y in pairs] + odd
    return values[0]


def _position(b: Builder, up: bool, values: list[Val]) -> Val:
    """The position of the first extreme value; NaN wins."""
    best, at = values[0], b.const(0, "i32")
    for k, v in enumerate(values[1:], 1):
        stays = v <= best if up else v >= best
        if is_float(v.dtype):
            stays = stays | b.op("isnan", best)
        best, at = b.where(stays, best, v), b.where(stays, at, b.const(k, "i32"))
    return b.cast(at, "i64")


def is_short(rule: Row, op: OpView) -> bool:
    """Whether an op's rows are short, and there are more than a few of them."""
    domain = rule.domain(op)
    lengths = [domain.shape[d] for d in domain.dims]
    if not all(isinstance(n, int) for n in lengths):
        return False
    return 1 < math.prod(n for n in lengths if isinstance(n, int)) <= SHORT


def with_short_rows(table: Table) -> Table:
    """The table with plain reductions replaced by their unrolled form where rows are short."""
    return {name: _chosen(rules) for name, rules in table.items()}


def _chosen(rules: Rules) -> Rules:
    if callable(rules) or len(rules) != 1:
        return rules
    row = rules[0]
    if not isinstance(row, Row) or any(level != "row" for level in row.levels):
        return rules
    return _choice(row)


def _choice(row: Row) -> Callable[[OpView], tuple[Map | Row, ...]]:
    short, long = (unrolled(row),), (row,)
    return lambda op: short if is_short(row, op) else long
