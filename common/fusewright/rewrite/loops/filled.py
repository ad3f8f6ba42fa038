"""A tensor that a loop fills piece by piece, `out[:, t] = y`, is a stack or cat of the pieces.

Without writes in place, each step makes a new tensor with one piece replaced. If every element is replaced once, what was there
before does not matter, and the pieces are joined at once; rules for loops see a join.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from fusewright import ops
from fusewright.graph.effects import drop_dead_code
from fusewright.graph.spec import arguments, by_stride, extent, value_of
from fusewright.graph.view import is_op
from fusewright.interface import RuleLog
from fusewright.rewrite.engine import READER, Rewriter
from fusewright.rewrite.loops.unrolled import LEAST_STEPS, alike, has

ID = "loop.filled"
"""The rule's id in reports, and for `disable_rules`."""


@dataclass(frozen=True, slots=True)
class Write:
    """`node` is `before` with the elements `start` to `end` of a dim replaced."""

    node: Node
    before: Node
    dim: int
    start: int
    end: int
    kept: bool
    """Whether the piece has the dim."""


def fill(graph: Graph, log: RuleLog) -> None:
    """Join the pieces of tensors that are filled step by step, in place, in a canonical graph."""
    if ID in log.disabled or sum(map(_writes, graph.nodes)) < LEAST_STEPS:
        return
    r = Rewriter(graph, log)
    for node in [n for n in graph.nodes if _writes(n) and not _continues(n)]:
        writes = sorted(_chain(node), key=lambda w: w.start)
        if len(writes) < LEAST_STEPS or not _whole(writes) or r.changes_before(node) or not log.allows(ID):
            continue
        new = r.attempt(node, _joined, r, writes)
        if new is not None and alike(value_of(new), value_of(node)):
            log.hit(ID)
            r.replace(node, new)
    drop_dead_code(graph)


def _writes(node: Node) -> bool:
    return is_op(node) and READER.name(node) in ("select_scatter", "slice_scatter")


def place(node: Node) -> Write | None:
    """How a node replaces a piece, or reads one (as a view); None if it is no piece of known place and step 1."""
    row = ops.find(node.target)
    assert row is not None
    call = row.bind(node.args, node.kwargs)
    before, dim, kept = call["self"], call["dim"], row.name in ("slice", "slice_scatter")
    size = extent(value_of(before).shape[dim])
    start: Any = call["start"] or 0 if kept else call["index"]
    end: Any = size if kept and call["end"] is None else call["end"] if kept else start
    if not all(isinstance(n, int) for n in (dim, size, start, end)) or (kept and call["step"] != 1):
        return None
    start, end = (n + size if n < 0 else n for n in (start, end))
    return Write(node, before, dim % value_of(before).dim(), start, min(end, size) if kept else start + 1, kept)


def _chain(node: Node) -> Iterator[Write]:
    """The writes that make a tensor, the last one first, of which nobody reads what is between them."""
    while _writes(node) and (write := place(node)) is not None:
        yield write
        node = write.before
        if any(u is not write.node and not _overwritten(u, write.node) for u in node.users):
            return


def _continues(node: Node) -> bool:
    """Whether another write goes on from a node's result alone."""
    return any(_writes(u) and u.args[0] is node and all(v is u or _overwritten(v, u) for v in node.users) for u in node.users)


def _overwritten(view: Node, write: Node) -> bool:
    """Whether a view is only the place that `write` copies a value to."""
    copies = view.users.keys()
    return is_op(view) and READER.name(view) in ("select", "slice") and all(
        READER.name(c) == "copy" and c.args[0] is view and list(c.users) == [write] for c in copies
    )  # fmt: skip


def _whole(writes: list[Write]) -> bool:
    """Whether writes, in order of their places, replace every element once."""
    ends = [0, *(w.end for w in writes)]
    same = len({(w.dim, w.kept) for w in writes}) == 1
    return same and [w.start for w in writes] == ends[:-1] and ends[-1] == extent(value_of(writes[0].node).shape[writes[0].dim])


def _joined(r: Rewriter, writes: list[Write]) -> Node | None:
    """What was written, joined in the order in which the filled tensor lies in memory (one like a transposed view lies as that)."""
    pieces = [_value(r, w) for w in writes]
    if any(x is None for x in pieces):
        return None
    dim, kept, name = writes[0].dim, writes[0].kept, "cat" if writes[0].kept else "stack"
    order = _order(value_of(writes[0].node))
    if order == sorted(order):
        return r.call(name, (pieces, dim))
    inner = order if kept else [d - (d > dim) for d in order if d != dim]
    joined = r.call(name, ([r.call("permute", (x, inner)) for x in pieces], order.index(dim)))
    return r.call("permute", (joined, [order.index(d) for d in range(len(order))]))


def _order(x: torch.Tensor) -> list[int]:
    """The dims of a tensor from the outermost in memory to the innermost; as they are where strides are symbols."""
    return by_stride(x) if all(isinstance(n, int) for n in x.stride()) else list(range(x.dim()))


def _value(r: Rewriter, write: Write) -> Node | None:
    """The piece that a write puts in place, in the type and shape of its place."""
    value: Any = write.node.args[1]
    if READER.name(value) != "copy":
        return value if value_of(value).dtype == value_of(write.node).dtype else None
    return copied(r, value)


def copies_into_piece(node: Node) -> bool:
    """Whether a copy is only read as a piece that replaces another: its strides do not matter."""
    return READER.name(node) == "copy" and all(
        READER.name(u) in ("select_scatter", "slice_scatter") and u.args[1] is node and u.args[0] is not node for u in node.users
    )


def copied(r: Rewriter, copy: Node) -> Node | None:
    """What a copy holds, in the type and shape of its place."""
    place, source = cast("tuple[Node, Any]", copy.args[:2])
    like, x = value_of(place), value_of(source)
    if not isinstance(source, Node) or x.device != like.device:
        return None
    if x.dtype != like.dtype:
        source = r.call("cast", (source,), kwargs={"dtype": like.dtype})
    return source if has(x, x, like.shape) else r.call("expand", (source, arguments(r.graph, like.shape)))
