"""Online softmax: compute a row's maximum and the sum of exp(x - maximum) in one pass, rescaling the sum as the maximum grows.

Milakov and Gimelshein 2018, "Online normalizer calculation for softmax". Saves one read of long rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusewright.toolkit.ir.ir import Kernel, Node


@dataclass(frozen=True, slots=True)
class Total:
    """A sum of exp(x - maximum), by the id of the maximum. A `guarded` one subtracts 0 for an infinite maximum: logsumexp."""

    top: int
    guarded: bool


def pairs(kernel: Kernel) -> dict[int, int]:
    """Map each reduction `sum(exp(x - max(x)))` to the reduction `max(x)` that it can be fused with, by ids."""
    found: dict[int, int] = {}
    for i, t in totals(kernel).items():
        if not t.guarded and t.top not in found.values():
            found[i] = t.top
    return found


def totals(kernel: Kernel) -> dict[int, Total]:
    """Map every sum of exponentials to the maximum whose pass can give it. Several sums may have one maximum."""
    nodes = kernel.node_map()
    stage_of = {n.id: k for k, s in enumerate(kernel.stages) for n in s.nodes}
    stores = [n for n in nodes.values() if n.op == "store"]
    found: dict[int, Total] = {}
    for n in nodes.values():
        t = _total(nodes, n)
        if t is None or stage_of[t.top] >= stage_of[n.id]:
            continue
        # no store may change the inputs of the row between the two passes
        between = [m.buffer for m in stores if stage_of[t.top] <= stage_of[m.id] < stage_of[n.id] and m.buffer is not None]
        read = _buffers(nodes, nodes[t.top].args[0])
        if not any(m == b or kernel.may_share(m, b) for m in between for b in read):
            found[n.id] = t
    return found


def _total(nodes: dict[int, Node], n: Node) -> Total | None:
    """The maximum that `n` subtracts, if `n` is such a sum."""
    if n.op != "reduce" or n.how != "sum" or nodes[n.args[0]].op != "exp":
        return None
    difference = nodes[nodes[n.args[0]].args[0]]
    if difference.op != "sub":
        return None
    top = nodes[difference.args[1]]
    guarded = _guarded(nodes, top)
    top = top if guarded is None else guarded
    if top.op != "reduce" or top.how != "max" or not _same(nodes, difference.args[0], top.args[0]):
        return None
    return Total(top.id, guarded is not None)


def _guarded(nodes: dict[int, Node], n: Node) -> Node | None:
    """The value that `n` is unless it is infinite, when `n` is 0."""
    if n.op != "where":
        return None
    infinite, zero, value = (nodes[a] for a in n.args)
    if infinite.op != "isinf" or infinite.args[0] != value.id or zero.op != "const" or zero.value != 0:
        return None
    return value


def _buffers(nodes: dict[int, Node], i: int) -> set[int]:
    """The buffers that a value is computed from, but for what reductions read."""
    todo, seen, found = [i], set[int](), set[int]()
    while todo:
        n = nodes[todo.pop()]
        if n.id in seen or n.op == "reduce":
            continue
        seen.add(n.id)
        todo.extend(n.uses())
        if n.buffer is not None:
            found.add(n.buffer)
    return found


def _same(nodes: dict[int, Node], a: int, b: int) -> bool:
    """Whether two values are computed by equal expressions."""
    x, y = nodes[a], nodes[b]
    if a == b:
        return True
    if (x.op, x.dtype, x.buffer, x.how, repr(x.value), x.extent) != (
        y.op, y.dtype, y.buffer, y.how, repr(y.value), y.extent,
    ) or len(x.args) != len(y.args) or x.op in ("scan", "reduce"):  # fmt: skip
        return False
    return _same_index(nodes, x, y) and all(_same(nodes, i, j) for i, j in zip(x.args, y.args, strict=True))


def _same_index(nodes: dict[int, Node], x: Node, y: Node) -> bool:
    if x.index is None or y.index is None:
        return x.index is y.index
    i, j = x.index.indirect, y.index.indirect
    return (
        (x.index.offset, x.index.coefs, x.index.divmods) == (y.index.offset, y.index.coefs, y.index.divmods)
        and len(i) == len(j)
        and all(a.stride == b.stride and _same(nodes, a.value, b.value) for a, b in zip(i, j, strict=True))
    )
