"""Gathers of rows from a tensor whose rows are not contiguous: a copy first, where rows are read several times.

One element of such a row is one sector of memory (measured: docs/studies/gpu-models.md, "Nets that people write themselves").
"""

from __future__ import annotations

import torch

from fusewright.interface import OpView
from fusewright.toolkit.region.graph import spec_of
from fusewright.toolkit.region.pattern import Match, chain
from fusewright.toolkit.region.rewrite import Row
from fusewright_triton.select.calls import Calls

TIMES, RUN = 4, 8
"""How often the tensor is read at least, and elements of the shortest row that fills much of a sector."""


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
    b.without(op)
    rows = b.append_op("clone", op.arg("self"), torch.contiguous_format)
    b.append_op(op.op, rows, *op.args[1:], out=op.out)


OPS = ("gather", "index_select", "index")

ROWS = (Row("triton.gather.rows", chain(OPS), write=_write, note="rows gathered from a copy"),)
