"""Splits integer cumulative sums along few long rows into parts: sum each part, scan the sums to get each part's start value,
then scan all parts in parallel.

Integers only, since reordering would change float results. Whether to split depends on sizes, as in `split`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count

from fusewright.interface import Splits
from fusewright.toolkit.ir.extent import Extent, evaluate, product
from fusewright.toolkit.ir.index import axis_index
from fusewright.toolkit.ir.ir import Buffer, Kernel, Node, Stage
from fusewright.toolkit.ir.symbols import Step, step
from fusewright.toolkit.ir.types import TYPES
from fusewright.toolkit.ir.verify import kernel_pass
from fusewright.toolkit.transform.split import chunk_of, guarded, linear
from fusewright.toolkit.transform.split_columns import SPLITS, Steps


@kernel_pass("split_scan", made=lambda steps: () if steps is None else steps.kernels)
def split_scan(kernel: Kernel, splits: Splits = SPLITS) -> Steps | None:
    """Split a kernel with few points, a long row and a single row stage with one integer cumulative sum into three steps.
    Return None for any other kernel."""
    n_p = len(kernel.p)
    rows = [s for s in kernel.stages if s.over == "PR"]
    scans = [n for n in kernel.nodes() if n.op == "scan"]
    if len(scans) != 1 or len(rows) != 1 or scans[0].how != "sum" or TYPES[scans[0].dtype].kind != "int":
        return None
    if any(n.op == "reduce" or n.keep or _ordered(n) for n in kernel.nodes()):
        return None
    seen = [evaluate(s, kernel.hints) for s in kernel.sizes]
    if not 0 < math.prod(seen[:n_p]) <= splits.few_points or seen[n_p] < splits.long_row:
        return None
    return _Scan(kernel, scans[0], splits.scan_parts, chunk_of(kernel, splits.scan_parts)).run()


def _ordered(n: Node) -> bool:
    """Whether a store depends on the execution order of points."""
    return n.op == "store" and n.index is not None and bool(n.how or n.index.indirect)


@dataclass
class _Scan:
    kernel: Kernel
    scan: Node
    parts: int
    chunk: Extent

    def __post_init__(self) -> None:
        old, n_p = self.kernel.sizes, len(self.kernel.p)
        self.sizes: tuple[Extent, ...] = (self.parts, *old[:n_p], self.chunk)
        self.axes = [axis_index(a + 1, self.sizes) for a in range(len(old))]
        self.axes[n_p] = axis_index(0, self.sizes) * self.chunk + axis_index(n_p + 1, self.sizes)
        self.points = product(self.kernel.p)
        self.place = axis_index(0, self.sizes) * self.points + linear(n_p, self.sizes, old[:n_p], 1)
        self.fresh: Iterator[int] = count(1 + max(n.id for n in self.kernel.nodes()))
        self.counts, self.starts = len(self.kernel.buffers), len(self.kernel.buffers) + 1

    def run(self) -> Steps:
        t = self.scan.dtype
        steps = (self._counted(), self._begun(), self._placed())
        return Steps(steps, ((t, self.points * self.parts), (t, self.points * self.parts)))

    def _counted(self) -> Step:
        """Step 1: the sum of each part."""
        wanted = self._needed(self.scan.args[0])
        total = Node(next(self.fresh), "reduce", self.scan.dtype, self.scan.args, how="sum")
        stages = [Stage(s.over, tuple(self._moved(n) for n in s.nodes if n.id in wanted)) for s in self.kernel.stages]
        row = next(k for k, s in enumerate(stages) if s.over == "PR")
        stages[row] = Stage("PR", self._guarded([*stages[row].nodes, total]))
        after = Node(next(self.fresh), "store", total.dtype, (total.id,), self.place, self.counts)
        return self._kernel("counts", [*stages[: row + 1], Stage("P", (after,))], self.sizes)

    def _begun(self) -> Step:
        """Step 2: the start value of each part, the sum of all parts before it."""
        n_p, t = len(self.kernel.p), self.scan.dtype
        sizes: tuple[Extent, ...] = (*self.kernel.p, self.parts)
        at = axis_index(n_p, sizes) * self.points + linear(n_p, sizes, self.kernel.p, 0)
        load, scan, less, store = (next(self.fresh) for _ in range(4))
        row = (
            Node(load, "load", t, (), at, self.counts),
            Node(scan, "scan", t, (load,), how="sum"),
            Node(less, "sub", t, (scan, load)),
            Node(store, "store", t, (less,), at, self.starts),
        )
        return self._kernel("starts", [Stage("PR", row)], sizes, n_p)

    def _placed(self) -> Step:
        """Step 3: the original kernel, run on each part from its start value."""
        start = Node(next(self.fresh), "load", self.scan.dtype, (), self.place, self.starts)
        within = replace(self.scan, id=next(self.fresh))
        total = Node(self.scan.id, "add", self.scan.dtype, (within.id, start.id))
        stages = [Stage("P", (start,))]
        for s in self.kernel.stages:
            nodes = [m for n in s.nodes for m in ((within, total) if n.id == self.scan.id else (self._moved(n),))]
            stages.append(Stage(s.over, self._guarded(nodes) if s.over == "PR" else tuple(nodes)))
        return self._kernel("placed", stages, self.sizes)

    def _needed(self, value: int) -> set[int]:
        """The values that `value` is computed from, including itself."""
        nodes, todo, found = self.kernel.node_map(), [value], set[int]()
        while todo:
            i = todo.pop()
            if i not in found:
                found.add(i)
                todo.extend(nodes[i].uses())
        return found

    def _moved(self, n: Node) -> Node:
        return n if n.index is None else replace(n, index=n.index.substitute(self.axes, self.sizes))

    def _guarded(self, row: list[Node]) -> tuple[Node, ...]:
        size = self.kernel.sizes[len(self.kernel.p)]
        if self.chunk * self.parts == size:
            return tuple(row)
        types = {n.id: n.dtype for n in (*self.kernel.nodes(), *row)}
        return tuple(guarded(row, self.axes[len(self.kernel.p)], size, types, self.fresh))

    def _kernel(self, what: str, stages: list[Stage], sizes: tuple[Extent, ...], n_p: int | None = None) -> Step:
        stored = {n.buffer for s in stages for n in s.nodes if n.op == "store"}
        extra = [Buffer("counts", self.scan.dtype), Buffer("starts", self.scan.dtype)]
        buffers = [
            replace(b, access="out" if k in stored else "in") for k, b in enumerate([*self.kernel.buffers, *extra])
        ]
        cut = len(self.kernel.p) + 1 if n_p is None else n_p
        kept = tuple(s for s in stages if s.nodes)
        return step(
            replace(
                self.kernel, name=f"{self.kernel.name}_{what}", buffers=tuple(buffers), p=sizes[:cut], r=sizes[cut:],
                stages=kept,
            )
        )  # fmt: skip
