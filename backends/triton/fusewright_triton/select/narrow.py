"""Products over a few features, such as the heads of attention or the coordinates of points, as sums in loop kernels.

Rows of a few elements suit no library's product, which takes many times as long as reading and writing them would (measured:
docs/studies/gpu-models.md). A loop kernel also reads them in any layout, with what computes them.
"""

from __future__ import annotations

import torch

from fusewright.interface import OpView, Value
from fusewright.toolkit.region.attention import RESHAPES
from fusewright.toolkit.region.graph import spec_of
from fusewright.toolkit.region.pattern import Match, chain
from fusewright.toolkit.region.rewrite import Row
from fusewright.toolkit.region.sums import write_sum
from fusewright_triton.select import aligned
from fusewright_triton.select.calls import Calls

MOST = aligned.FEW
"""The longest sum."""

ALIGNED, WIDE = 16, 64
"""Bytes of a row that a library reads at once, and results of a row from which on its product of such rows is fast."""

LEAST = 1 << 16
"""Results of the smallest product that is worth it."""


def reason(op: OpView) -> str | None:
    """Return why a product is no sum of a few terms."""
    x, w = (spec_of(op.arg(n)) for n in operands(op))
    if x.rank < 2 or w.rank != 2 or not w.static or x.dtype != w.dtype or 0 in (*x.shape, *w.shape):
        return "empty, of mixed types, or no matrix"
    terms, results = w.shape if op.op == "mm" else w.shape[::-1]
    if terms > MOST or (terms * x.dtype.itemsize % ALIGNED == 0 and results >= WIDE):  # type: ignore[operator]
        return "rows that suit a library's product"
    return "few results" if spec_of(op.out).numel_hint() < LEAST else None


def operands(op: OpView) -> tuple[str, str]:
    return ("self", "mat2") if op.op == "mm" else ("input", "weight")


def _without_copy(m: Match, c: Calls) -> Match:
    """Bind the rows as they were before a copy for a library, which a kernel does not need."""
    x = m.anchor.arg(operands(m.anchor)[0])
    source, between = x, list[OpView]()
    while (made := c.graph.producer(source)) is not None and made.op in RESHAPES and c.graph.only_user(source) is not None:
        between.append(made)
        source = made.arg("self")
        if made.op == "clone" and spec_of(source).shape == spec_of(x).shape:
            return m.with_ops(*between, at=m.anchor, rows=source)
    return m.with_ops(rows=x)


def _write(m: Match, c: Calls) -> None:
    op, b = m.anchor, c.b
    x, w, bias = m["rows"], op.arg(operands(op)[1]), op.arg("bias") if op.op == "linear" else None
    by_row = int(op.op != "mm")  # the weight has a row for each result

    def wide(value: Value) -> Value:
        return value if spec_of(value).dtype is torch.float32 else b.append_op("cast", value, torch.float32)

    def factors(k: int) -> tuple[Value, Value]:
        return wide(b.append_op("slice", x, -1, k, k + 1)), wide(b.append_op("select", w, by_row, k))

    b.without(op)
    terms = range(spec_of(w).shape[by_row])  # type: ignore[arg-type]
    write_sum(None if bias is None else wide(bias), map(factors, terms), op.out, b)


ROWS = (
    Row(
        "triton.product.narrow", chain(("linear", "mm")), extend=_without_copy, write=_write,
        note="product over few features, as a sum",
    ),
)  # fmt: skip
