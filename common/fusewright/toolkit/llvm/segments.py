"""Where a condition on a position along one axis changes: between those points it is a constant. A concatenation or a
pad is then a loop for each of its parts, without tests and masks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from fusewright.toolkit.kernel.ir import Kernel, Node, cost

MOST = 4
"""Segments, beyond which the code is not written out."""
MOST_COST = 150
"""Vector instructions of a kernel that is written out once per segment."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Points `start` to `stop` of the axis, and the conditions (by node) that are known there."""

    start: int
    stop: int
    known: dict[int, bool]


def segments(kernel: Kernel, v: int) -> list[Segment]:
    """The segments of axis `v`; none where there is nothing to gain."""
    size = kernel.sizes[v]
    if kernel.r or not isinstance(size, int):
        return []
    nodes = kernel.node_map()
    turns = {n.id: turn for n in nodes.values() if (turn := _turn(n, nodes, v)) is not None}
    cuts = sorted({at for at, _ in turns.values() if 0 < at < size})
    if not cuts or len(cuts) >= MOST or sum(map(cost, nodes.values())) > MOST_COST:
        return []
    ends = [0, *cuts, size]
    return [Segment(a, b, {i: (a < at) == before for i, (at, before) in turns.items()}) for a, b in pairwise(ends)]


def _turn(n: Node, nodes: dict[int, Node], v: int) -> tuple[int, bool] | None:
    """(the first point of `v` at which the condition is another, its value before) for `position < constant` and its
    like."""
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
