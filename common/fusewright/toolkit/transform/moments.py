"""Rewrites means and sums of squared deviations (`m2`) as plain sums, for emitters whose rows stay in cache: a second pass
over the row costs less than the per-element division of a running mean, and its error is smaller.

Where deviations are far smaller than the mean, its rounding would be a visible part of them. So the second pass also adds up
the distances from the rounded mean, which gives its error (Chan, Golub and LeVeque, "Algorithms for computing the sample
variance", 1983). In short rows one more sum would take a third of the time: there both passes work on distances from an element,
whose mean is small. The row's mean is then the element's rounding away from exact, as a deviation from it is anyway; where it has
other uses it has a sum of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import count

import torch

from fusewright.toolkit.ir.extent import Extent
from fusewright.toolkit.ir.index import Index, axis_index
from fusewright.toolkit.ir.ir import Kernel, Node, Stage, cost
from fusewright.toolkit.ir.schedule import KEEP_COST
from fusewright.toolkit.ir.types import DType, to_torch
from fusewright.toolkit.ir.verify import kernel_pass

SHORT = 512
"""Rows of fewer elements are short. In longer ones one more sum costs no more than subtracting an element, which would be rounded
into the mean of rows around zero."""


@kernel_pass("without_moments")
def without_moments(kernel: Kernel, short: int = SHORT) -> Kernel:
    """Return an equivalent kernel whose reductions each carry only one number per row. Rows of fewer than `short` elements read
    their first one in each pass: 0 where a row is not one thread's and may be written in place."""
    if not any(n.how in ("mean", "m2") for n in kernel.nodes() if n.op == "reduce"):
        return kernel
    lowering = _Lowering(kernel, short)
    stages = tuple(s for stage in kernel.stages for s in lowering.stage(stage) if s.nodes)
    return replace(kernel, stages=stages)


@dataclass(slots=True)
class _Operand:
    """The operand of an m2. Its distances from `element` (0 if None) have the mean `centre`. `mean`: the row's, if it is wanted."""

    mean: int | None
    centre: int
    element: Node | None


class _Lowering:
    def __init__(self, kernel: Kernel, short: int) -> None:
        self.kernel, self.short = kernel, short
        self.fresh = count(1 + max(n.id for n in kernel.nodes()))
        self.types = {n.id: n.dtype for n in kernel.nodes()}
        self.per_row = {n.id for s in kernel.stages for n in s.nodes if s.over == "P" or n.op == "reduce"}
        self.read = {u for n in kernel.nodes() for u in (n.uses() if n.op != "sub" else n.args[:1])}  # other than subtracted

    def stage(self, stage: Stage) -> list[Stage]:
        """Emit the stage, the divisions for its means, and the second pass for its m2, with what each needs from the one before."""
        moments = [n for n in stage.nodes if n.op == "reduce" and n.how in ("mean", "m2")]
        if not moments:
            return [stage]
        first, before, sums, after = [n for n in stage.nodes if n not in moments], list[Node](), list[Node](), list[Node]()
        means = {n.args[0]: n.id for n in moments if n.how == "mean"}
        operands = dict[int, _Operand]()
        for m2 in (n for n in moments if n.how == "m2"):
            element = self._element(first, m2.args[0])
            before += element
            operands[m2.args[0]] = _Operand(means.get(m2.args[0]), next(self.fresh), element[-1] if element else None)
        for x in dict.fromkeys(n.args[0] for n in moments):
            passed, divided = self._first(x, operands[x]) if x in operands else self._mean(x, means[x])
            sums, after = [*sums, *passed], [*after, *divided]
        first = [*self._kept(first, set(operands)), *sums]
        second, last = self._second(first, [n for n in moments if n.how == "m2"], operands)
        return [
            Stage("P", tuple(before)), Stage("PR", tuple(first)), Stage("P", tuple(after)),
            Stage("PR", tuple(second)), Stage("P", tuple(last)),
        ]  # fmt: skip

    def _new(self, op: str, dtype: DType, *args: int, how: str = "", value: float | None = None) -> Node:
        return Node(next(self.fresh), op, dtype, args, how=how, value=value)

    def _mean(self, x: int, mean: int) -> tuple[list[Node], list[Node]]:
        """Emit the sum of `x`, and its division by the row length, as the value `mean`."""
        total = self._new("reduce", self.types[x], x, how="sum")
        return [total], self._divided(total, mean)

    def _divided(self, total: Node, result: int) -> list[Node]:
        """Emit `total` divided by the row length, as the value `result`."""
        length = self._length(total.dtype)
        return [*length, Node(result, "div", total.dtype, (total.id, length[-1].id))]

    def _length(self, dtype: DType) -> list[Node]:
        """Emit the row length as a value."""
        row: Extent = 1
        for s in self.kernel.r:
            row = row * s
        if isinstance(row, int):
            return [self._new("const", dtype, value=float(row))]
        size = Node(next(self.fresh), "index", "i64", index=Index(row, sizes=self.kernel.sizes))
        return [size, self._new("cast", dtype, size.id)]

    def _first(self, x: int, operand: _Operand) -> tuple[list[Node], list[Node]]:
        """Emit the sum of the distances of `x` from its row's element, their mean, and that of the row."""
        if operand.element is None:
            return self._mean(x, operand.centre)
        t, element = self.types[x], operand.element.id
        apart = self._new("sub", t, x, element)
        total = self._new("reduce", t, apart.id, how="sum")
        divided = self._divided(total, operand.centre)
        if operand.mean in self.read:
            passed, own = self._mean(x, operand.mean)
            return [apart, total, *passed], [*divided, *own]
        if operand.mean is not None:
            divided.append(Node(operand.mean, "add", t, (element, operand.centre)))
        return [apart, total], divided

    def _element(self, nodes: list[Node], x: int) -> list[Node]:
        """Emit the first element of each row of `x`, as the last value, or nothing where rows are not short or it is dear."""
        row = math.prod(s if isinstance(s, int) else self.short for s in self.kernel.r)
        if not 0 < row < self.short:
            return []
        needed = self._needed([replace(n, keep=False) for n in nodes], x)
        new = {n.id: next(self.fresh) for n in needed}
        local = x in new and all(u in new or u in self.per_row for n in needed for u in n.uses())
        pure = not any(n.op in ("reduce", "scan", "bound") for n in needed) and sum(map(cost, needed)) < KEEP_COST
        if not (local and pure):
            return []
        sizes = self.kernel.sizes
        axes = [axis_index(a, sizes) for a in range(len(self.kernel.p))] + [Index(sizes=sizes)] * len(self.kernel.r)
        copies = [self._again(n, new) for n in needed]
        return [n if n.index is None else replace(n, index=n.index.substitute(axes, sizes)) for n in copies]

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

    @staticmethod
    def _again(n: Node, new: dict[int, int]) -> Node:
        """A copy of a node that reads copies."""
        index = n.index.with_values({u: new.get(u, u) for u in n.uses()}) if n.index else n.index
        return replace(n, id=new[n.id], args=tuple(new.get(a, a) for a in n.args), index=index, keep=False)

    def _second(
        self, nodes: list[Node], distances: list[Node], operands: dict[int, _Operand]
    ) -> tuple[list[Node], list[Node]]:
        """Emit the pass that sums (x - mean)^2 for each operand, and what corrects the sums."""
        out, last, new = list[Node](), list[Node](), dict[int, int]()
        for m2 in distances:
            operand, t = operands[m2.args[0]], m2.dtype
            for n in self._needed(nodes, m2.args[0]):
                if n.id not in new:
                    new[n.id] = next(self.fresh)
                    out.append(self._again(n, new))
            x = new.get(m2.args[0], m2.args[0])
            if operand.element is not None:
                out.append(self._new("sub", t, x, operand.element.id))
                x = out[-1].id
            d = self._new("sub", t, x, operand.centre)
            square = self._new("mul", t, d.id, d.id)
            out += [d, square]
            if operand.element is not None:
                out.append(replace(m2, args=(square.id,), how="sum"))
                continue
            squares, rest = (self._new("reduce", t, v.id, how="sum") for v in (square, d))
            out += [squares, rest]
            last += self._corrected(m2, squares, rest, operand)
        return out, last

    def _corrected(self, m2: Node, squares: Node, rest: Node, operand: _Operand) -> list[Node]:
        """Emit m2 and the mean, from sums of distances from the rounded one. Rounding must not make m2 negative, and a sum that
        overflows not inf - inf."""
        t, off = m2.dtype, next(self.fresh)
        zero, most = (self._new("const", t, value=v) for v in (0.0, torch.finfo(to_torch(t)).max))
        share = self._new("mul", t, rest.id, off)
        finite = self._new("lt", "bool", share.id, most.id)
        taken = self._new("where", t, finite.id, share.id, most.id)
        left = self._new("sub", t, squares.id, taken.id)
        below = self._new("lt", "bool", left.id, zero.id)
        found = Node(m2.id, "where", t, (below.id, zero.id, left.id))
        out = [*self._divided(rest, off), zero, most, share, finite, taken, left, below, found]
        return out if operand.mean is None else [*out, Node(operand.mean, "add", t, (operand.centre, off))]
