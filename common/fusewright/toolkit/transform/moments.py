"""Rewrites means and sums of squared deviations (`m2`) as plain sums, for emitters whose rows stay in cache: a second pass
over the row costs less than the per-element division of a running mean, and its error is smaller."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

from fusewright.toolkit.ir.extent import Extent
from fusewright.toolkit.ir.index import Index
from fusewright.toolkit.ir.ir import Kernel, Node, Stage, cost
from fusewright.toolkit.ir.schedule import KEEP_COST
from fusewright.toolkit.ir.verify import kernel_pass


@kernel_pass("without_moments")
def without_moments(kernel: Kernel) -> Kernel:
    """Return an equivalent kernel whose reductions each carry only one number per row."""
    if not any(n.how in ("mean", "m2") for n in kernel.nodes() if n.op == "reduce"):
        return kernel
    lowering = _Lowering(kernel)
    stages = tuple(s for stage in kernel.stages for s in lowering.stage(stage))
    return replace(kernel, stages=stages)


class _Lowering:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.fresh = count(1 + max(n.id for n in kernel.nodes()))
        self.types = {n.id: n.dtype for n in kernel.nodes()}

    def stage(self, stage: Stage) -> list[Stage]:
        """Emit the stage, the divisions for its means, and the second pass for its m2."""
        moments = [n for n in stage.nodes if n.op == "reduce" and n.how in ("mean", "m2")]
        if not moments:
            return [stage]
        nodes, after, mean_of = [n for n in stage.nodes if n not in moments], list[Node](), dict[int, int]()
        for n in sorted(moments, key=lambda n: n.how == "m2"):
            x = n.args[0]
            if n.how == "mean" or x not in mean_of:
                total = Node(next(self.fresh), "reduce", n.dtype, (x,), how="sum")
                mean = n.id if n.how == "mean" else next(self.fresh)
                nodes.append(total)
                after += self._divided(total, mean)
                mean_of[x] = mean
        distances = [n for n in moments if n.how == "m2"]
        if not distances:
            return [Stage("PR", tuple(nodes)), Stage("P", tuple(after))]
        nodes = self._kept(nodes, {n.args[0] for n in distances})
        second = self._second(nodes, distances, mean_of)
        return [Stage("PR", tuple(nodes)), Stage("P", tuple(after)), Stage("PR", tuple(second))]

    def _divided(self, total: Node, result: int) -> list[Node]:
        """Emit `total` divided by the row length, as the value `result`."""
        row: Extent = 1
        for s in self.kernel.r:
            row = row * s
        if isinstance(row, int):
            steps = [Node(next(self.fresh), "const", total.dtype, value=float(row))]
        else:
            size = Node(next(self.fresh), "index", "i64", index=Index(row, sizes=self.kernel.sizes))
            steps = [size, Node(next(self.fresh), "cast", total.dtype, (size.id,))]
        return [*steps, Node(result, "div", total.dtype, (total.id, steps[-1].id))]

    def _kept(self, nodes: list[Node], operands: set[int]) -> list[Node]:
        """Mark as kept the operands that are expensive to recompute, or whose inputs a store may overwrite before the
        second pass (an output may alias an input that is not read after it)."""
        stores = any(n.op == "store" for n in nodes)
        dear = {x for x in operands if stores or sum(map(cost, self._needed(nodes, x))) >= KEEP_COST}
        dear |= {x for x in operands if any(n.op == "scan" for n in self._needed(nodes, x))}
        return [replace(n, keep=True) if n.id in dear else n for n in nodes]

    def _needed(self, nodes: list[Node], x: int) -> list[Node]:
        """The nodes of the stage that compute `x`, in order, apart from kept values."""
        by_id = {n.id: n for n in nodes if not n.keep}
        todo, seen = [x], set[int]()
        while todo:
            i = todo.pop()
            if i in by_id and i not in seen:
                seen.add(i)
                todo.extend(by_id[i].uses())
        return [n for n in nodes if n.id in seen]

    def _second(self, nodes: list[Node], distances: list[Node], mean_of: dict[int, int]) -> list[Node]:
        """Emit the pass that sums (x - mean)^2 for each operand."""
        out, again = list[Node](), dict[int, int]()
        for m2 in distances:
            for n in self._needed(nodes, m2.args[0]):
                if n.id not in again:
                    again[n.id] = next(self.fresh)
                    index = n.index.with_values({u: again.get(u, u) for u in n.uses()}) if n.index else n.index
                    out.append(replace(n, id=again[n.id], args=tuple(again.get(a, a) for a in n.args), index=index))
            x, t = again.get(m2.args[0], m2.args[0]), m2.dtype
            d = Node(next(self.fresh), "sub", t, (x, mean_of[m2.args[0]]))
            square = Node(next(self.fresh), "mul", t, (d.id, d.id))
            out += [d, square, replace(m2, args=(square.id,), how="sum")]
        return out
