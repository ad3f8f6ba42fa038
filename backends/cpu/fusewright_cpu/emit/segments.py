"""Split an axis where a condition on its position changes: within a segment the condition is constant. A concatenation or a
pad then becomes a loop for each of its parts, without tests and masks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from fusewright.toolkit.ir.index import Index
from fusewright.toolkit.ir.ir import Kernel, Node, Stage, cost
from fusewright.toolkit.transform.split import identity

MOST = 4
"""The most segments that are written out."""
MOST_COST = 150
"""The most vector instructions of a kernel that is written out once per segment."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Points `start` to `stop` of the axis, and the conditions (by node) that are known there."""

    start: int
    stop: int
    known: dict[int, bool]


def segments(kernel: Kernel, v: int) -> list[Segment]:
    """Return the segments of axis `v`; none if there is nothing to gain."""
    size = kernel.sizes[v]
    if kernel.r or not isinstance(size, int):
        return []
    nodes = kernel.node_map()
    turns = {n.id: turn for n in nodes.values() if (turn := _turn(n, nodes, v)) is not None}
    cuts = sorted({at for at, _ in turns.values() if 0 < at < size})
    if not cuts or len(cuts) >= MOST or sum(map(cost, nodes.values())) > MOST_COST:
        return []
    ends = [0, *cuts, size]
    return [Segment(a, b, _implied({i: (a < at) == before for i, (at, before) in turns.items()}, nodes)) for a, b in pairwise(ends)]


def _implied(known: dict[int, bool], nodes: dict[int, Node]) -> dict[int, bool]:
    """Add what follows from known conditions for those that join them."""
    for n in nodes.values():
        if n.op == "and" and n.dtype == "bool":
            parts = [known.get(a) for a in n.args]
            if False in parts or all(parts):
                known[n.id] = all(parts)
    return known


def _turn(n: Node, nodes: dict[int, Node], v: int) -> tuple[int, bool] | None:
    """Return (the first point of `v` at which the condition changes, its value before) for `position < constant` and
    the like."""
    if n.op not in ("lt", "ge", "le", "gt"):
        return None
    position, limit = (nodes[a] for a in n.args)
    ix = position.index
    if position.op != "index" or ix is None or limit.op != "const" or not isinstance(limit.value, int):
        return None
    if ix.divmods or ix.indirect or len(ix.coefs) != 1 or ix.coefs[0][0] != v:
        return None
    step, offset = ix.coefs[0][1], ix.offset
    if not isinstance(step, int) or not isinstance(offset, int) or step <= 0:
        return None
    room = limit.value - offset
    at = -(-room // step) if n.op in ("lt", "ge") else room // step + 1
    return at, n.op in ("lt", "le")


@dataclass(frozen=True, slots=True)
class RowEnd:
    """The end of a row: a row stage does nothing from the step of its first row axis at which `start + step` reaches `limit`;
    before it the condition holds."""

    condition: int
    start: Index
    limit: Node


def row_end(kernel: Kernel, stage: Stage, columns: int | None) -> RowEnd | None:
    """Return where the rows of a stage end early, as those of a last part do (see `kernel.split`): loops then run up to there
    without tests and masks. None if something depends on elements past the end, or on the axis of vectors of `columns`."""
    nodes, first = {n.id: n for n in kernel.nodes()}, len(kernel.p)
    for n in stage.nodes:
        if n.op != "lt" or any(nodes[a].op not in ("index", "const") for a in n.args):
            continue
        ix, limit = nodes[n.args[0]].index, nodes[n.args[1]]
        if ix is None or ix.divmods or ix.indirect or ix.stride_of(first) != 1 or columns in ix.axes():
            continue
        if any(a > first for a in ix.axes()) or (limit.index is not None and limit.index.axes()):
            continue
        if all(_idle(m, n.id, nodes) for m in stage.nodes):
            start = replace(ix, coefs=tuple((a, c) for a, c in ix.coefs if a != first))
            return RowEnd(n.id, start, limit)
    return None


def _idle(n: Node, condition: int, nodes: dict[int, Node]) -> bool:
    """Return whether a node changes nothing where the condition does not hold."""
    if n.op == "reduce":
        x = nodes[n.args[0]]
        other = nodes[x.args[2]] if x.op == "where" and x.args[0] == condition else None
        if other is None or other.op != "const" or n.how in ("mean", "m2"):
            return False
        return other.value == identity(n.how.removeprefix("arg"), x.dtype)
    if n.op in ("store", "bound"):
        return len(n.args) > 1 and _implies(nodes[n.args[1]], condition, nodes)
    return not n.keep


def _implies(mask: Node, condition: int, nodes: dict[int, Node]) -> bool:
    return mask.id == condition or (mask.op == "and" and any(_implies(nodes[a], condition, nodes) for a in mask.args))
