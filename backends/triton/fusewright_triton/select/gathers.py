"""Layouts of what neighbours are gathered from, and of what is reduced over them.

Rows are gathered from a copy where they are not contiguous, if they are read several times: one element of such a row is one
sector of memory (measured: docs/studies/gpu-models.md, "Nets that people write themselves"). The result of a reduction lies as its
operand does, so that neither the reduction nor what reads it goes across memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusewright.interface import OpView, TensorSpec, Value
from fusewright.toolkit.region.builder import same_strides
from fusewright.toolkit.region.graph import spec_of
from fusewright.toolkit.region.pattern import Match, chain
from fusewright.toolkit.region.rewrite import Row
from fusewright_triton.select.calls import Calls

TIMES, RUN = 4, 8
"""How often the tensor is read at least, and elements of the shortest row that fills much of a sector."""

LEAST = 1 << 16
"""Elements of the smallest result whose layout is worth a choice."""


def reason(op: OpView) -> str | None:
    """Return why a gather reads its operand as it lies in memory."""
    x, out = spec_of(op.arg("self")), spec_of(op.out)
    if not x.static or not out.static or x.rank < 2 or not _by_rows(op):
        return "symbolic sizes, or no rows"
    if x.stride[-1] == 1 or x.shape[-1] < RUN:  # type: ignore[operator]
        return "contiguous or short rows"
    return None if out.numel_hint() >= TIMES * x.numel_hint() else "read too few times to pay for a copy"


def _by_rows(op: OpView) -> bool:
    """Whether elements of the last dim that are neighbours stay so."""
    rank = spec_of(op.arg("self")).rank
    if op.op == "index":
        indices = op.arg("indices")
        return len(indices) < rank or indices[-1] is None
    other = op.arg("dim") % rank != rank - 1
    return other and (op.op == "index_select" or spec_of(op.arg("index")).stride[-1] == 0)


def _write(m: Match, c: Calls) -> None:
    op, b = m.anchor, c.b
    x = op.arg("self")
    b.without(op)
    rows = x
    if b.spec(x).stride[-1] != 1:
        rows = b.once((x.id, "rows"), lambda: b.append_op("clone", x, torch.contiguous_format))
        if _read_in_any_order(x, c):
            b.moved(x, rows)  # what is read beside the neighbours, expanded over them
    b.append_op(op.op, rows, *op.args[1:], out=op.out)


def _read_in_any_order(x: Value, c: Calls) -> bool:
    """Return whether nobody needs the strides of a value."""
    return not c.graph.escapes(x) and all(c.b.takes_any_strides(u) for u in c.graph.users(x))


def reduced_reason(op: OpView) -> str | None:
    """Return why the result of a reduction lies as in the graph."""
    x, out = spec_of(op.arg("self")), spec_of(op.outs[0])
    if not x.static or out.rank < 2 or out.numel_hint() < LEAST:
        return "symbolic or small"
    stride = _followed(op, x)
    return "in the operand's order" if stride is None or same_strides(out, stride) else None


def _followed(op: OpView, x: TensorSpec) -> tuple[int, ...] | None:
    """Return the strides of a dense result whose dims are in the operand's order in memory; None for an operand that repeats
    elements."""
    dims, rank = op.arg("dim"), x.rank
    gone = {d % rank for d in (dims if isinstance(dims, Sequence) else (dims,))}
    if not gone or any(s == 0 and n != 1 for s, n in zip(x.stride, x.shape, strict=True)):
        return None
    stride, step = [1] * rank, 1
    for d in sorted(range(rank), key=lambda d: (x.stride[d], -d)):
        stride[d] = step
        step *= 1 if d in gone else int(x.shape[d])  # type: ignore[arg-type]
    return tuple(s for d, s in enumerate(stride) if op.arg("keepdim") or d not in gone)


def _free(m: Match, c: Calls) -> bool:
    return all(_read_in_any_order(v, c) for v in m.anchor.outs)


def _write_reduced(m: Match, c: Calls) -> None:
    op, b = m.anchor, c.b
    b.without(op)
    stride = _followed(op, b.spec(op.arg("self")))
    if stride is None:
        b.leave(op)
    else:
        b.leave_with(op, *[stride] * len(op.outs))


OPS = ("gather", "index_select", "index")
REDUCTIONS = ("amax", "amin", "max_with_indices", "min_with_indices", "sum", "mean")

ROWS = (Row("triton.gather.rows", chain(OPS), write=_write, note="rows gathered from a copy"),)

REDUCED = (
    Row(
        "triton.reduction.order", chain(REDUCTIONS),
        when=_free, write=_write_reduced, note="reduction, in its operand's order",
    ),
)  # fmt: skip
