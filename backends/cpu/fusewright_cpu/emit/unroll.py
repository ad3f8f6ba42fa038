"""Unroll an innermost axis of two to seven points (pairs of a rotary embedding, repeated or stacked elements). The axis
before it is then vectorised, and the stored vectors are zipped.

Conditions on the position, such as those of a concatenation, are known at each point.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace

from fusewright.toolkit.ir.extent import evaluate
from fusewright.toolkit.ir.index import Index, axis_index
from fusewright.toolkit.ir.ir import Kernel, Node, Stage, cost
from fusewright.toolkit.ir.simplify import in_order
from fusewright.toolkit.ir.verify import kernel_pass

FEW = 7
"""The most points of an axis that is unrolled."""
LEAST = 16
"""The least points of the axis before it; with fewer, vectors would not be full."""
MOST_COST = 150
"""The most vector instructions of the unrolled code."""

_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip


@kernel_pass("unrolled")
def unrolled(kernel: Kernel) -> Kernel:
    """Return an equal kernel without its innermost axis if that is short and stored along; else the kernel itself."""
    return _Unroll(kernel).run() if _worth(kernel) else kernel


def _worth(kernel: Kernel) -> bool:
    a = len(kernel.p) - 1
    size = kernel.p[-1] if kernel.p else 1
    if kernel.r or a < 1 or not isinstance(size, int) or not 2 <= size <= FEW:
        return False
    if evaluate(kernel.p[a - 1], kernel.hints) < LEAST or size * sum(map(cost, kernel.nodes())) > MOST_COST:
        return False
    stores = [n for n in kernel.nodes() if n.op == "store"]
    loads = [n for n in kernel.nodes() if n.op == "load" and n.buffer is not None]
    inputs = all(kernel.buffers[n.buffer].access == "in" for n in loads if n.buffer is not None)
    return inputs and all(_along(n, a, size) for n in stores)


def _along(n: Node, a: int, size: int) -> bool:
    """Return whether a store runs along axis `a`, and next to it along the axis before."""
    ix = n.index
    if ix is None or n.how or len(n.args) > 1 or ix.indirect or not isinstance(ix.offset, int):
        return False
    return ix.stride_of(a) == 1 and ix.stride_of(a - 1) == size


class _Unroll:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.axis = kernel, len(kernel.p) - 1
        self.sizes = kernel.p[:-1]
        self.out: list[Node] = []
        self.count = 0

    def run(self) -> Kernel:
        axes, points = self.kernel.axes_of(), self.kernel.p[-1]
        outer = [axis_index(b, self.sizes) for b in range(self.axis)]
        common: dict[int, Node] = {}
        stages = []
        for stage in self.kernel.stages:
            self.out = []
            for n in stage.nodes:
                if self.axis not in axes[n.id]:
                    self._add(n, common, [*outer, Index(sizes=self.sizes)])
            for point in range(points if isinstance(points, int) else 0):
                here = dict(common)
                for n in stage.nodes:
                    if self.axis in axes[n.id]:
                        self._add(n, here, [*outer, Index(point, sizes=self.sizes)])
            stages.append(Stage(stage.over, tuple(self.out)))
        return _without_unused(replace(self.kernel, p=self.sizes, stages=tuple(stages)))

    def _add(self, n: Node, names: dict[int, Node], at: list[Index]) -> None:
        """Add the node at one point: its known value there, or a new node."""
        args = [names[x] for x in n.args]
        if n.index is not None:
            ids = {u: names[u].id for u in n.uses()}
            n = replace(n, index=n.index.substitute(at, self.sizes).with_values(ids))
        known = _known(n, args)
        if isinstance(known, Node):
            names[n.id] = known
            return
        if n.op == "load" and args and args[0].op == "const":
            args = []
        new = replace(n, args=tuple(x.id for x in args))
        if known is not None:
            new = Node(0, "const", n.dtype, value=known)
        names[n.id] = new = replace(new, id=self.count)
        self.out.append(new)
        self.count += 1


def _known(n: Node, args: list[Node]) -> Node | int | bool | None:
    """Return the value of a node at a point: an operand of it, a number, or None."""
    consts = [x.value for x in args if x.op == "const"]
    if n.op == "index" and n.index is not None:
        ix = n.index
        return ix.offset if isinstance(ix.offset, int) and not (ix.coefs or ix.divmods or ix.indirect) else None
    if n.op in _COMPARE and len(consts) == 2 and all(isinstance(c, int) for c in consts):
        return _COMPARE[n.op](int(consts[0] or 0), int(consts[1] or 0))
    first = args[0] if args else None
    if n.op == "where" and first is not None and first.op == "const":
        return args[1] if first.value else args[2]
    if n.op == "load" and first is not None and first.op == "const" and not first.value:
        return args[1]
    if n.op in ("and", "or") and n.dtype == "bool" and consts:
        x, c = (args[1], args[0]) if args[0].op == "const" else (args[0], args[1])
        return x if bool(c.value) == (n.op == "and") else c
    return None


def _without_unused(kernel: Kernel) -> Kernel:
    """Return the kernel without nodes that no store needs."""
    nodes = list(kernel.nodes())
    used: set[int] = set()
    for n in reversed(nodes):
        if n.id in used or n.op in ("store", "bound"):
            used.add(n.id)
            used.update(n.uses())
    stages = [replace(s, nodes=tuple(n for n in s.nodes if n.id in used)) for s in kernel.stages]
    return in_order(replace(kernel, stages=tuple(s for s in stages if s.nodes)))
