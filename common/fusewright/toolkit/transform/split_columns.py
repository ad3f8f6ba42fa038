"""Splits kernels over few columns with long rows (norms over channels-last images, their gradients): one kernel for each
pass over the rows, one for values per point, one for stores per element.

Adjacent columns form one work item, so an unsplit kernel would run on a single worker. Its rows have left the cache by the
time they are read again, so reading them in another kernel costs nothing extra. Only sizes (for symbolic sizes, those seen
when tracing) decide, so results do not depend on the number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import count

from fusewright.interface import Splits
from fusewright.toolkit.ir.extent import Extent, evaluate, product
from fusewright.toolkit.ir.index import Index, axis_index
from fusewright.toolkit.ir.ir import Buffer, Kernel, Node, Stage
from fusewright.toolkit.ir.symbols import Step, step
from fusewright.toolkit.ir.types import DType
from fusewright.toolkit.ir.verify import kernel_pass
from fusewright.toolkit.transform.moments import without_moments

SPLITS = Splits()
FREE = ("const", "scalar")
"""Values per point that each kernel makes for itself, as they cost nothing."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Run `steps` in order, each on all buffers of the original kernel followed by the temporaries (type and element count).
    Buffers that a step does not use are declared as its inputs."""

    steps: tuple[Step, ...]
    temporaries: tuple[tuple[DType, Extent], ...]

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        return tuple(s.kernel for s in self.steps)


def few_columns(kernel: Kernel, splits: Splits = SPLITS) -> bool:
    """Whether rows are strided in memory, long, and too few to occupy the workers of a device."""
    n_p = len(kernel.p)
    if not kernel.r or not n_p:
        return False
    sizes = [evaluate(s, kernel.hints) for s in kernel.sizes]
    points, row = math.prod(sizes[:n_p]), math.prod(sizes[n_p:])
    if not 0 < points <= splits.few_columns or row < splits.column_rows or points * row < splits.column_elements:
        return False
    loads = [n.index for s in kernel.stages if s.over == "PR" for n in s.nodes if n.op == "load" and n.index]
    return any(i.stride_of(n_p - 1) == 1 for i in loads) and not any(i.stride_of(len(sizes) - 1) == 1 for i in loads)


@kernel_pass("split_columns", made=lambda steps: () if steps is None else steps.kernels)
def split_columns(kernel: Kernel) -> Steps | None:
    """Split a kernel for which `few_columns` holds. Return None if it already is one pass of reductions, or if its stores
    depend on their order."""
    kernel = without_moments(kernel)
    nodes = list(kernel.nodes())
    ordered = any(n.op == "scan" or (n.op == "store" and n.how) for n in nodes)
    rows = [s for s in kernel.stages if s.over == "PR"]
    if ordered or (len(rows) == 1 and not any(n.op == "store" for n in rows[0].nodes)):
        return None
    return _Apart(kernel).run()


class _Apart:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.nodes = kernel, list(kernel.nodes())
        self.by_id = {n.id: n for n in self.nodes}
        self.over = {n.id: s.over for s in kernel.stages for n in s.nodes}
        self.fresh = count(1 + max(self.by_id))
        self.temporaries: dict[int, int] = {}
        """Value -> the temporary that holds it, one element per point."""
        self.point = Index(sizes=kernel.sizes)
        for a in range(len(kernel.p)):
            self.point = self.point + axis_index(a, kernel.sizes) * product(kernel.p[a + 1 :])

    def run(self) -> Steps:
        rows = [s for s in self.kernel.stages if s.over == "PR"]
        kernels = [self._reductions(s) for s in rows if any(n.op == "reduce" for n in s.nodes)]
        stores = [[n for n in s.nodes if n.op == "store"] for s in rows]
        elements = [self._needed(group, self._per_point) for group in stores if group]
        wanted = {n.id for group in elements for n in group if self._per_point(n)}
        before = set(self.temporaries)
        for i in sorted(wanted - before):
            self._temporary(i)
        points = self._points(wanted - before)
        kernels += ([points] if points else []) + [self._elements(group) for group in elements]
        places = sorted(self.temporaries, key=self.temporaries.__getitem__)
        temporaries = tuple((self.by_id[i].dtype, product(self.kernel.p)) for i in places)
        return Steps(tuple(self._complete(k) for k in kernels), temporaries)

    def _temporary(self, value: int) -> int:
        return len(self.kernel.buffers) + self.temporaries.setdefault(value, len(self.temporaries))

    def _per_point(self, n: Node) -> bool:
        """Whether per-element kernels load the value from a temporary: it is per point and not free."""
        return n.op == "reduce" or (self.over[n.id] == "P" and n.op not in FREE)

    def _needed(self, roots: Iterable[Node], ends: Callable[[Node], bool] | None = None) -> list[Node]:
        """The nodes that the roots depend on, in order, stopping at values held in temporaries (those for which `ends` holds;
        by default every reduction)."""
        first = {n.id for n in roots}
        todo, seen = list(first), set[int]()
        while todo:
            n = self.by_id[todo.pop()]
            if n.id in seen:
                continue
            seen.add(n.id)
            stops = ends(n) if ends is not None else n.op == "reduce"
            if n.id in first or not stops:
                todo.extend(n.uses())
        return [n for n in self.nodes if n.id in seen]

    def _loaded(self, n: Node) -> Node:
        return Node(n.id, "load", n.dtype, index=self.point, buffer=self._temporary(n.id))

    def _stored(self, n: Node) -> Node:
        return Node(next(self.fresh), "store", n.dtype, (n.id,), self.point, self._temporary(n.id))

    def _reductions(self, stage: Stage) -> Kernel:
        """The kernel of one stage's reductions, each stored to its temporary."""
        roots = [n for n in stage.nodes if n.op == "reduce"]
        mine = {n.id for n in roots}
        points, row = list[Node](), list[Node]()
        for n in self._needed(roots):
            if n.op == "reduce" and n.id not in mine:
                points.append(self._loaded(n))
            else:
                (points if self.over[n.id] == "P" else row).append(replace(n, keep=False))
        stages = [Stage("P", tuple(points))] if points else []
        stages += [Stage("PR", tuple(row)), Stage("P", tuple(self._stored(n) for n in roots))]
        return replace(self.kernel, name=f"{self.kernel.name}_rows", stages=tuple(stages))

    def _points(self, wanted: set[int]) -> Kernel | None:
        """The kernel of stores per point, which also stores the values in `wanted` to their temporaries."""
        stores = [n for n in self.nodes if n.op == "store" and self.over[n.id] == "P"]
        values = [n for n in self.nodes if n.id in wanted]
        if not stores and not values:
            return None
        nodes = [self._loaded(n) if n.op == "reduce" else n for n in self._needed([*stores, *values])]
        nodes += [self._stored(n) for n in values]
        sizes = self.kernel.p
        axes = [axis_index(a, sizes) for a in range(len(sizes))] + [Index(sizes=sizes)] * len(self.kernel.r)
        return self._moved(nodes, axes, sizes, "points")

    def _elements(self, needed: list[Node]) -> Kernel:
        """The kernel of stores per element, without row axes; columns are the innermost axis."""
        nodes = [self._loaded(n) if self._per_point(n) else replace(n, keep=False) for n in needed]
        n_p, n_r = len(self.kernel.p), len(self.kernel.r)
        sizes = (*self.kernel.r, *self.kernel.p)
        axes = [axis_index(n_r + a, sizes) for a in range(n_p)] + [axis_index(a, sizes) for a in range(n_r)]
        return self._moved(nodes, axes, sizes, "elements")

    def _moved(self, nodes: list[Node], axes: list[Index], sizes: tuple[Extent, ...], what: str) -> Kernel:
        moved = [n if n.index is None else replace(n, index=n.index.substitute(axes, sizes)) for n in nodes]
        stages = (Stage("P", tuple(moved)),)
        return replace(self.kernel, name=f"{self.kernel.name}_{what}", p=sizes, r=(), stages=stages)

    def _complete(self, kernel: Kernel) -> Step:
        """Add the temporaries to the kernel's buffers and bring it into normal form."""
        stored = {n.buffer for n in kernel.nodes() if n.op == "store"}
        buffers = list(self.kernel.buffers)
        for i in sorted(self.temporaries, key=self.temporaries.__getitem__):
            buffers.append(Buffer(f"t{self.temporaries[i]}", self.by_id[i].dtype))
        given = tuple(replace(b, access="out" if k in stored else "in") for k, b in enumerate(buffers))
        return step(replace(kernel, buffers=given))
