"""Online softmax: compute a row's maximum and the sum of exp(x - maximum) in one pass, rescaling the sum as the maximum grows.

Milakov and Gimelshein 2018, "Online normalizer calculation for softmax". Saves one read of long rows.
"""

from __future__ import annotations

from fusewright.toolkit.ir.ir import Kernel, Node


def pairs(kernel: Kernel) -> dict[int, int]:
    """Map each reduction `sum(exp(x - max(x)))` to the reduction `max(x)` that it can be fused with, by ids."""
    nodes = kernel.node_map()
    stage_of = {n.id: k for k, s in enumerate(kernel.stages) for n in s.nodes}
    first_store = min((stage_of[n.id] for n in nodes.values() if n.op == "store"), default=len(kernel.stages))
    found: dict[int, int] = {}
    for n in nodes.values():
        top = _maximum(nodes, n)
        if top is None or top.id in found.values():
            continue
        # no store may change the inputs of the row between the two passes
        if stage_of[top.id] < stage_of[n.id] <= first_store:
            found[n.id] = top.id
    return found


def _maximum(nodes: dict[int, Node], n: Node) -> Node | None:
    """The maximum that `n` subtracts, if `n` is such a sum."""
    if n.op != "reduce" or n.how != "sum" or nodes[n.args[0]].op != "exp":
        return None
    difference = nodes[nodes[n.args[0]].args[0]]
    if difference.op != "sub":
        return None
    top = nodes[difference.args[1]]
    if top.op != "reduce" or top.how != "max" or not _same(nodes, difference.args[0], top.args[0]):
        return None
    return top


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
